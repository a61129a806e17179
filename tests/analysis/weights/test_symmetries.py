"""Weight products; functions stay while weights change; random symmetry transformations are undone."""

import numpy as np
import pytest
import torch

from mechicl.analysis import read_weight_products
from mechicl.analysis.weights import WeightProducts, replace_products
from mechicl.analysis.weights.symmetries import (
    align_heads,
    check_same_shape,
    express_in_products,
    lift_heads,
)
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression

PROMPTS = LinearRegression(x_dim=2, n_context=3, inputs="gaussian").sample(12, seed=0, dtype=torch.float64)
CFG = TransformerConfig(
    x_dim=2, n_context=3, n_layers=2, n_heads=3, d_model=4, d_head=2, read_in="identity", initializer_range=0.5,
    dtype="float64",
)  # fmt: skip
KINDS: dict[str, dict] = {
    "linear": {},
    "looped": {"recurrent": True, "damping": 0.7},
    "clipped": {"token_clip": 0.6, "normalize_by_context": True},
    "relu": {"attention": "relu"},
    "leaky relu": {"attention": "leaky_relu", "attention_slope": 0.2},
    "softmax": {"attention": "softmax", "score_scale": 0.4},
    "fixed sink": {"attention": "softmax", "sink": "fixed", "sink_score": 0.3},
    "learned sink": {"attention": "softmax", "sink": "learned"},
    "learned sink, looped": {"attention": "softmax", "sink": "learned", "recurrent": True},
    "momentum over outputs": {"keys": "causal", "momentum": 0.6},
    "momentum over values": {"keys": "causal", "momentum": 0.6, "momentum_over": "values"},
    "grouped heads": {"n_key_value_heads": 1},
    "mlp": {"d_mlp": 5, "act_fn": "relu"},
    "gated mlp": {"d_mlp": 4, "act_fn": "silu", "gated_mlp": True},
    "shared mlp": {"d_mlp": 5, "act_fn": "relu", "share_mlp": True},
    "mlp, looped": {"d_mlp": 5, "act_fn": "gelu", "recurrent": True},
    "input mlp": {"d_mlp": 5, "mlp_location": "input"},
    "norm": {"normalization_type": "LN", "attn_bias": False, "attention": "softmax", "d_mlp": 3},
}
MEANS = {"products": express_in_products, "aligned": align_heads, "lifted": lift_heads}


@torch.no_grad()
def random_model(seed: int, **fields) -> HookedTransformer:
    model = HookedTransformer(CFG.replace(**fields), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.rsplit(".", 1)[-1] in ("b_in", "b_out", "sink", "w", "b"):  # their initial values are not random
            weight.add_(0.5 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return model


def sign_and_scale(attention: str, generator: torch.Generator) -> float:
    if attention == "softmax":
        return 1.0
    scale = torch.randn((), generator=generator, dtype=torch.float64).exp().item()
    return -scale if attention == "linear" and torch.rand((), generator=generator) < 0.5 else scale


@torch.no_grad()
def transformed(model: HookedTransformer, seed: int) -> HookedTransformer:
    """The same function: heads and hidden units permuted, heads rescaled, other bases for queries and values."""
    generator = torch.Generator().manual_seed(seed)
    made = HookedTransformer(model.cfg)
    made.load_state_dict(model.state_dict())
    cfg = model.cfg
    for block in list(made.blocks)[: 1 if cfg.recurrent else None]:
        attn, order = block.attn, torch.randperm(cfg.n_heads, generator=generator)
        for name, weight in attn.named_parameters():
            assert name in ("W_Q", "W_K", "W_V", "W_O", "sink")
            weight.copy_(weight[order].clone())
        for head in range(cfg.n_heads):
            c = 1.0 if cfg.momentum_over == "values" else sign_and_scale(cfg.attention, generator)
            first, second = (
                torch.eye(cfg.d_head, dtype=torch.float64)
                + 0.3 * torch.rand(cfg.d_head, cfg.d_head, generator=generator, dtype=torch.float64)
                for _ in range(2)
            )
            attn.W_Q[head] = c * attn.W_Q[head] @ first
            attn.W_K[head] = attn.W_K[head] @ torch.linalg.inv(first).T
            attn.W_V[head] = attn.W_V[head] @ second
            attn.W_O[head] = torch.linalg.inv(second) @ attn.W_O[head] / c
    if cfg.d_mlp is not None:
        inside = list(made.blocks)[: 1 if cfg.recurrent or cfg.share_mlp else None]
        for mlp in [made.input_mlp] if cfg.mlp_location == "input" else [block.mlp for block in inside]:
            units = torch.randperm(cfg.d_mlp, generator=generator)
            weights = dict(mlp.named_parameters())
            for name in ("W_in", "b_in", *(("W_gate",) if cfg.gated_mlp else ())):
                weights[name].copy_(weights[name][..., units].clone())
            weights["W_out"].copy_(weights["W_out"][units].clone())
    return made


def scaled(model: HookedTransformer, factors: torch.Tensor) -> HookedTransformer:
    products, c = read_weight_products(model), factors[..., None, None]
    return replace_products(model, WeightProducts(c * products.W_KQ, products.W_PV / c, products.x_dim, products.y_dim))


def assert_same_function(a: HookedTransformer, b: HookedTransformer) -> None:
    torch.testing.assert_close(a.predict(PROMPTS), b.predict(PROMPTS), rtol=1e-10, atol=1e-10)


FEWER = [(kind, which) for kind in ("linear", "softmax", "learned sink", "mlp") for which in (0, 1)]


@pytest.mark.parametrize("means", MEANS)
@pytest.mark.parametrize(("kind", "fewer"), [*((kind, None) for kind in KINDS), *FEWER])
def test_functions_stay(kind: str, means: str, fewer: int | None):
    """A model with fewer heads gets some that do nothing."""
    models = [random_model(i, **KINDS[kind] | ({"n_heads": 1, "d_head": 3} if i == fewer else {})) for i in range(2)]
    for before, after in zip(models, MEANS[means](*models), strict=True):
        assert_same_function(before, after)
        assert after.cfg.n_heads == (6 if means == "lifted" else 3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "grouped heads"])  # which share keys and values
@pytest.mark.parametrize("seed", [3, 1_000])
def test_aligning_undoes_random_symmetries(kind: str, seed: int):
    a = random_model(seed, **KINDS[kind])
    b = transformed(a, seed)
    assert_same_function(a, b)
    first, second = align_heads(a, b)
    assert [n for n, _ in first.named_parameters()] == [n for n, _ in second.named_parameters()]
    for (name, mine), theirs in zip(first.named_parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def test_the_factor_is_the_best_on_a_fine_grid():
    a, b = random_model(1, n_heads=1, n_layers=1), random_model(2, n_heads=1, n_layers=1)
    first, second, aligned = (read_weight_products(m) for m in (a, b, align_heads(a, b)[1]))

    def distance(W_KQ: np.ndarray, W_PV: np.ndarray) -> float:
        return sum(
            float(((x.numpy()[0, 0] - y) ** 2).sum() / (x.numpy() ** 2).sum())
            for x, y in ((first.W_KQ, W_KQ), (first.W_PV, W_PV))
        )

    grid = np.concatenate([sign * np.geomspace(0.01, 100, 2000) for sign in (-1, 1)])
    least = min(distance(c * second.W_KQ.numpy()[0, 0], second.W_PV.numpy()[0, 0] / c) for c in grid)
    assert distance(aligned.W_KQ.numpy()[0, 0], aligned.W_PV.numpy()[0, 0]) == pytest.approx(least, rel=1e-4)


@pytest.mark.parametrize("attention", ["relu", "leaky_relu"])
def test_a_rectifiers_scale_is_positive(attention: str):
    a = random_model(1, n_heads=1, n_layers=1, attention=attention)
    mirrored = scaled(a, -torch.ones(1, 1, dtype=torch.float64))  # another function, nearest under a negative factor
    assert_same_function(align_heads(a, mirrored)[1], mirrored)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("clipped", "norm")])
def test_on_the_lifted_line_outputs_of_parts_move_linearly(kind: str):
    a, b = lift_heads(random_model(1, **KINDS[kind]), random_model(2, **KINDS[kind]))
    middle = HookedTransformer(a.cfg)
    alpha = 0.3
    with torch.no_grad():
        for weight, mine, theirs in zip(middle.parameters(), a.parameters(), b.parameters(), strict=True):
            weight.copy_((1 - alpha) * mine + alpha * theirs)
    stream = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for layer in range(2):
        parts = [[m.blocks[layer].attn, *([m.blocks[layer].mlp] if a.cfg.block_mlp else [])] for m in (a, b, middle)]
        for first, second, mixed in zip(*parts, strict=True):
            expected = (1 - alpha) * first(stream) + alpha * second(stream)
            torch.testing.assert_close(mixed(stream), expected, rtol=1e-10, atol=1e-10)
    if a.cfg.mlp_location == "input" and a.cfg.d_mlp is not None:
        expected = (1 - alpha) * a.input_mlp(stream) + alpha * b.input_mlp(stream)
        torch.testing.assert_close(middle.input_mlp(stream), expected, rtol=1e-10, atol=1e-10)


def test_only_heads_precision_and_clipping_may_differ():
    check_same_shape(random_model(0), random_model(0, n_heads=1, d_head=1, dtype="float32", token_clip=3.0))
    tokens = TransformerConfig(prompt_format="token_ids", d_vocab=5, n_ctx=4, d_model=8)
    check_same_shape(HookedTransformer(tokens), HookedTransformer(tokens, seed=1))
    moved = HookedTransformer(CFG, initial_weights=torch.ones(2, 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="initial weights"):
        check_same_shape(random_model(0), moved)


@torch.no_grad()
def test_two_opposite_heads_of_relu_attention_are_not_each_others_match():
    model = random_model(0, attention="relu", n_heads=2)
    swapped = random_model(0, attention="relu", n_heads=2)
    for block, other in zip(model.blocks, swapped.blocks, strict=True):
        block.attn.W_Q[1], block.attn.W_K[1] = -block.attn.W_Q[0], block.attn.W_K[0]
        block.attn.W_V[1], block.attn.W_O[1] = -block.attn.W_V[0], block.attn.W_O[0]
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            getattr(other.attn, name).copy_(getattr(block.attn, name).flip(0))
    first, second = (read_weight_products(m) for m in align_heads(model, swapped))
    torch.testing.assert_close(first.W_KQ, second.W_KQ, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(first.W_PV, second.W_PV, rtol=1e-9, atol=1e-12)


# ---- products ----
FOUR_POINTS = LinearRegression(x_dim=3, n_context=4).sample(20, seed=0, dtype=torch.float64)


def two_layers(**fields) -> HookedTransformer:
    cfg = TransformerConfig(x_dim=3, n_context=4, n_layers=2, n_heads=2, initializer_range=0.5, dtype="float64")
    return HookedTransformer(cfg.replace(**fields), seed=1)


def test_products_are_those_of_the_matrices():
    model = two_layers(score_scale=0.7)
    products = read_weight_products(model)
    for layer in range(2):
        for head in range(2):
            q, k, v, o = (getattr(model, f"W_{n}")[layer, head].detach().numpy() for n in "QKVO")
            torch.testing.assert_close(products.W_KQ[layer, head], torch.tensor(0.7 * q @ k.T))
            torch.testing.assert_close(products.W_PV[layer, head], torch.tensor(v @ o))


@pytest.mark.parametrize("factor", [0.01, -70.0])
def test_fixing_the_gauge_undoes_any_rescaling(factor: float):
    model = two_layers()
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
    ("n_layers", "recurrent", "d_model", "seed"),
    [(1, False, 4, 0), (1, True, 6, 1), (2, False, 5, 2), (2, True, 5, 3), (3, False, 6, 4)],
)
def test_unread_parts_do_not_change_predictions(n_layers: int, recurrent: bool, d_model: int, seed: int):
    cfg = two_layers().cfg.replace(n_layers=n_layers, recurrent=recurrent, d_model=d_model, read_in="identity")
    model = HookedTransformer(cfg, seed=seed)
    products = read_weight_products(model)
    part = products.without_unread_parts(recurrent)
    torch.testing.assert_close(
        replace_products(model, part).predict(FOUR_POINTS), model.predict(FOUR_POINTS), rtol=1e-12, atol=1e-14
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
