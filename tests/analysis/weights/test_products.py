"""Weight products, their gauge, their unread parts, and repeated layers."""

import pytest
import torch

from mechicl import algorithms, constructions
from mechicl.analysis import Lens, read_weight_products
from mechicl.analysis.weights import WeightProducts, replace_products
from mechicl.analysis.weights.products import repeat_layers
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression

PROMPTS = LinearRegression(x_dim=3, n_context=4).sample(20, seed=0, dtype=torch.float64)


def random_model(**fields) -> HookedTransformer:
    cfg = TransformerConfig(x_dim=3, n_context=4, n_layers=2, n_heads=2, initializer_range=0.5, dtype="float64")
    return HookedTransformer(cfg.replace(**fields), seed=1)


def test_products_are_those_of_the_matrices():
    model = random_model(score_scale=0.7)
    products = read_weight_products(model)
    for layer in range(2):
        for head in range(2):
            q, k, v, o = (getattr(model, f"W_{n}")[layer, head].detach().numpy() for n in "QKVO")
            torch.testing.assert_close(products.W_KQ[layer, head], torch.tensor(0.7 * q @ k.T))
            torch.testing.assert_close(products.W_PV[layer, head], torch.tensor(v @ o))


@pytest.mark.parametrize("factor", [0.01, -70.0])
def test_fixing_the_gauge_undoes_any_rescaling(factor: float):
    model = random_model()
    expected = read_weight_products(model).gauge_fixed()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_K.mul_(factor)
            block.attn.W_O.div_(factor)
    products = read_weight_products(model).gauge_fixed()
    torch.testing.assert_close(products.W_KQ, expected.W_KQ, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(products.W_PV, expected.W_PV, rtol=1e-10, atol=1e-12)
    diagonal = products.W_KQ[..., :3, :3].diagonal(dim1=-2, dim2=-1).mean(-1)
    torch.testing.assert_close(diagonal, torch.ones(2, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    "fields",
    [
        {"attention": "relu", "score_scale": 0.7},
        {"score_scale": 0.7, "damping": 0.9, "recurrent": True},
        {"normalize_by_context": True},
        {"normalize_by_context": True, "recurrent": True},
        {"attention": "softmax", "d_head": 4},
        {"attention": "softmax", "d_head": 4, "sink": "fixed", "sink_score": 0.3},
        {"attention": "softmax", "d_head": 4, "sink": "learned", "sink_score": 0.3},
        {"d_mlp": 5, "token_clip": 0.4},
        {"d_mlp": 5, "mlp_location": "input", "normalization_type": "LN", "attn_bias": False},
        {"d_model": 6, "read_in": "identity", "dtype": "float32"},
    ],
)
def test_other_weights_and_functions_of_the_scores_stay(fields: dict):
    model = random_model(**fields)
    made = replace_products(model, read_weight_products(model))
    assert made.cfg.dtype == torch.float64
    expected = HookedTransformer(model.cfg.replace(dtype="float64"))
    expected.load_state_dict(model.state_dict())
    torch.testing.assert_close(made.predict(PROMPTS), expected.predict(PROMPTS), rtol=1e-11, atol=1e-13)


def test_a_model_has_the_heads_of_its_products():
    model = random_model(attention="softmax", d_head=4, sink="learned", sink_score=0.3)
    products = read_weight_products(model)
    silent = torch.zeros(2, 1, 4, 4, dtype=torch.float64)
    W_KQ, W_PV = (torch.cat([w, silent], dim=1) for w in (products.W_KQ, products.W_PV))
    made = replace_products(model, WeightProducts(W_KQ, W_PV, 3, 1))
    assert made.cfg.n_heads == 3
    torch.testing.assert_close(made.predict(PROMPTS), model.predict(PROMPTS), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("n_layers", "recurrent", "d_model", "seed"),
    [(1, False, 4, 0), (1, True, 6, 1), (2, False, 5, 2), (2, True, 5, 3), (3, False, 6, 4)],
)
def test_unread_parts_do_not_change_predictions(n_layers: int, recurrent: bool, d_model: int, seed: int):
    cfg = random_model().cfg.replace(n_layers=n_layers, recurrent=recurrent, d_model=d_model, read_in="identity")
    model = HookedTransformer(cfg, seed=seed)
    products = read_weight_products(model)
    part = products.without_unread_parts(recurrent)
    torch.testing.assert_close(
        replace_products(model, part).predict(PROMPTS), model.predict(PROMPTS), rtol=1e-12, atol=1e-14
    )
    # zeros where the last layer writes outside y, and in one layer where the query's 0 is read; nowhere else
    gone_KQ, gone_PV = part.W_KQ != products.W_KQ, part.W_PV != products.W_PV
    expected_KQ, expected_PV = torch.zeros_like(gone_KQ), torch.zeros_like(gone_PV)
    if n_layers == 1:
        expected_KQ[:, :, 3:] = True
    if n_layers == 1 or not recurrent:
        expected_PV[-1, ..., [i for i in range(d_model) if i != 3]] = True
    assert torch.equal(gone_KQ, expected_KQ)
    assert torch.equal(gone_PV, expected_PV)
    assert not part.W_KQ[gone_KQ].any()
    assert not part.W_PV[gone_PV].any()


@pytest.mark.parametrize("damping", [1.0, 0.75])
def test_a_repeated_step_is_gradient_descent_with_a_damped_step_size(damping: float):
    one_step = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.5)
    trajectory = Lens(repeat_layers(one_step, 12, damping)).trajectory(PROMPTS)
    expected = algorithms.gradient_descent(PROMPTS, list(range(13)), step_size=0.5 * damping, at="query")
    assert trajectory.steps == tuple(range(13))
    torch.testing.assert_close(trajectory.predictions, expected.predictions, rtol=1e-11, atol=1e-12)


def test_repeating_does_not_change_the_model():
    model = random_model(n_layers=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        repeat_layers(model, 5).blocks[0].attn.W_Q.zero_()
    assert model.cfg.n_layers == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
