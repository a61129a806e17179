"""Weight products, their gauge, and reading gradient descent off them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mechicl import constructions
from mechicl.analysis import read_gradient_descent, trained_part, weight_products, with_products
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression


def random_model(**fields) -> HookedTransformer:
    cfg = TransformerConfig(x_dim=3, n_context=4, n_layers=2, n_heads=2, initializer_range=0.5, dtype="float64")
    return HookedTransformer(cfg.replace(**fields), seed=1)


def test_products_are_those_of_the_matrices():
    model = random_model(score_scale=0.7)
    products = weight_products(model)
    for layer in range(2):
        for head in range(2):
            q, k, v, o = (getattr(model, f"W_{n}")[layer, head].detach().numpy() for n in "QKVO")
            torch.testing.assert_close(products.W_KQ[layer, head], torch.tensor(0.7 * q @ k.T))
            torch.testing.assert_close(products.W_PV[layer, head], torch.tensor(v @ o))


def test_a_model_made_of_products_predicts_the_same():
    model = random_model(score_scale=0.7, damping=0.9, recurrent=True)
    prompts = LinearRegression(x_dim=3, n_context=4).sample(20, seed=0, dtype=torch.float64)
    made = with_products(model, weight_products(model))
    torch.testing.assert_close(made.predict(prompts), model.predict(prompts), rtol=1e-12, atol=1e-14)


@given(scale=st.floats(0.01, 100), negative=st.booleans())
def test_fixing_the_gauge_undoes_any_rescaling(scale: float, negative: bool):
    model = random_model()
    expected = weight_products(model).fixed()
    factor = -scale if negative else scale
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_K.mul_(factor)
            block.attn.W_O.div_(factor)
    products = weight_products(model).fixed()
    torch.testing.assert_close(products.W_KQ, expected.W_KQ, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(products.W_PV, expected.W_PV, rtol=1e-10, atol=1e-12)
    diagonal = products.W_KQ[..., :3, :3].diagonal(dim1=-2, dim2=-1).mean(-1)
    torch.testing.assert_close(diagonal, torch.ones(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("y_dim", [1, 2])
def test_parameters_of_constructions_are_read_off_exactly(y_dim: int):
    model = constructions.gd_plus_plus(
        x_dim=4, y_dim=y_dim, n_context=5, step_size=[0.1, 0.2, 0.3], gamma=[0.01, -0.02, 0.05], steps=3
    )
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_K.mul_(-3.0)
            block.attn.W_O.div_(-3.0)
    fit = read_gradient_descent(model)
    torch.testing.assert_close(fit.step_size[:, 0], torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))
    torch.testing.assert_close(fit.gamma[:, 0], torch.tensor([0.01, -0.02, 0.05], dtype=torch.float64))
    torch.testing.assert_close(fit.beta, torch.full((3, 1), -3.0, dtype=torch.float64))
    assert fit.distance_KQ.max() < 1e-12
    assert fit.distance_PV.max() < 1e-12


def test_distance_is_the_relative_size_of_a_perturbation():
    model = constructions.gradient_descent(x_dim=4, n_context=5, step_size=0.5, steps=2)
    with torch.no_grad():
        model.blocks[0].attn.W_Q[0, 0, 1] = 0.3  # off the diagonal: the gauge stays
    fit = read_gradient_descent(model)
    torch.testing.assert_close(fit.distance_KQ[0, 0].item(), 0.3 / 4**0.5)


def test_untrained_parts_do_not_act_in_one_layer():
    model = random_model(n_layers=1, n_heads=1)
    prompts = LinearRegression(x_dim=3, n_context=4).sample(20, seed=0, dtype=torch.float64)
    products = weight_products(model)
    part = trained_part(products)
    assert not torch.equal(part.W_KQ, products.W_KQ)
    torch.testing.assert_close(
        with_products(model, part).predict(prompts), model.predict(prompts), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"attention": "relu"},
        {"attn_bias": True},
        {"normalize_by_context": True},
        {"normalization_type": "LNPre"},
        {"prompt_format": "interleaved", "d_model": 8},
        {"read_in": "linear", "d_model": 4},
    ],
)
def test_models_that_the_products_do_not_describe_are_refused(fields: dict):
    with pytest.raises(ValueError, match="weight products describe"):
        weight_products(random_model(**fields))


def test_a_head_without_a_gauge_is_refused():
    model = random_model()
    with torch.no_grad():
        model.blocks[0].attn.W_Q.zero_()
    with pytest.raises(ValueError, match="no gauge"):
        weight_products(model).fixed()
