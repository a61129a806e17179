"""Errors of analyses of weights name the argument."""

import math
from typing import Any

import pytest
import torch

from mechicl import constructions
from mechicl.analysis import connect_modes, fit_construction, interpolate, read_weight_products
from mechicl.analysis.weights import (
    WeightProducts,
    linear_attention_optimum,
    one_step_optimum,
)
from mechicl.analysis.weights.construction_families import family_for
from mechicl.analysis.weights.symmetries import align_heads, check_same_shape, lift_heads, rescale_heads
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression
from tests.analysis.weights import test_fits as families
from tests.analysis.weights import test_symmetries

SIZES: dict[str, Any] = {"x_dim": 3, "n_context": 4}
TASK = LinearRegression(**SIZES)
PROMPTS = TASK.sample(12, seed=0, dtype=torch.float64)
GD = constructions.gradient_descent(**SIZES, step_size=0.5)
DEEP = constructions.gradient_descent(**SIZES, step_size=0.5, steps=2)
MOVED = constructions.gradient_descent(**SIZES, step_size=0.5, initial_weights=torch.ones(3, 1).double())
ONES = torch.ones(1, 1, 4, 4)


def made(**fields: Any) -> HookedTransformer:
    return HookedTransformer(TransformerConfig(**SIZES | fields))


@torch.no_grad()
def spoiled(value: float, part: str, **fields: Any) -> HookedTransformer:
    model = test_symmetries.random_model(2, **fields)
    getattr(model.blocks[1].attn, part)[0] = value
    return model


def fit(models: Any = GD, family: Any = "gd", n_prompts: int = 10) -> Any:
    return fit_construction(models, family, TASK, n_prompts=n_prompts)


def family(name: Any, *sizes: int, **fields: Any) -> Any:
    return family_for(name, families.config("newton" if name == "newton" else "gd", *sizes, **fields))


def same_shape(**fields: Any) -> None:
    check_same_shape(test_symmetries.random_model(0), test_symmetries.random_model(0, **fields))


def symmetric(kind: str) -> HookedTransformer:
    return test_symmetries.random_model(1, **test_symmetries.KINDS[kind])


CASES: list[tuple[Any, str]] = [
    *((lambda task=task: one_step_optimum(task), "task must have independent, noiseless") for task in
      (LinearRegression(noise_std=0.1), LinearRegression(inputs="exponential"),
       LinearRegression(inputs="gaussian", condition_number=10.0))),
    *((lambda bad=bad: linear_attention_optimum(bad, 5), "eigenvalues")
      for bad in ([0.0, 0.0], [-1.0, 2.0], [math.inf])),
    *((lambda fields=fields: family("gd", 2, 1, 3, 2, **fields), named) for fields, named in (
        ({"damping": 0.5}, "damping"), ({"attention": "softmax", "d_head": 3}, "softmax"), ({"d_mlp": 4}, "d_mlp"),
        ({"keys": "causal"}, "keys"), ({"d_model": 5, "read_in": "identity"}, "d_model"),
        ({"positional_embedding_type": "one_hot", "d_model": 8}, "positional"),
        ({"prompt_format": "interleaved", "d_model": 8}, "paired prompts"))),
    (lambda: family("gd", 2, 1, 3, 0), "gd takes at least 1 layers"),
    (lambda: family("gd++ per layer", 2, 1, 3, 2, recurrent=True), r"all layers: fit 'gd\+\+'"),
    *((lambda bad=bad: family_for("newton", families.config("newton", 2, 1, 3, 3).replace(**bad)), next(iter(bad)))
      for bad in ({"recurrent": True}, {"n_heads": 2})),
    (lambda: fit([]), "models must not be empty"),
    (lambda: fit([GD, DEEP]), "models of different configs"),
    (lambda: fit(MOVED), "W_0 = 0"),
    (lambda: fit(made(damping=0.5)), "damping"),
    (lambda: fit(spoiled(0, "W_Q", x_dim=3, n_context=4)), "a head has no gauge"),
    (lambda: interpolate(GD, DEEP, PROMPTS), "one shape and kind, which differ in n_layers: 1 and 2"),
    (lambda: interpolate(GD, MOVED, PROMPTS), "same initial weights"),
    (lambda: connect_modes(GD, GD, TASK, kinds=()), "kinds must not be empty"),
    *((lambda kind=kind: rescale_heads(symmetric(kind), symmetric(kind)), "linear attention only")
      for kind in ("relu", "softmax")),
    (lambda: rescale_heads(*2 * [symmetric("momentum over values")]), "momentum_over='values'"),
    (lambda: rescale_heads(*2 * [spoiled(0, "W_Q")]), "a head has no gauge"),
    *((lambda call=call: call(symmetric("linear"), spoiled(math.inf, "W_V")), r"model b .*blocks\.1\.attn\.W_V")
      for call in (align_heads, lift_heads)),
    *((lambda fields=fields: same_shape(**fields), next(iter(fields))) for fields in (
        {"n_layers": 1}, {"recurrent": True}, {"attention": "softmax"}, {"d_mlp": 3}, {"normalize_by_context": True})),
    *((lambda fields=fields: read_weight_products(test_symmetries.two_layers(**fields)), "weight products describe")
      for fields in ({"attn_bias": True}, {"normalization_type": "LNPre"}, {"read_in": "linear", "d_model": 4},
                     {"prompt_format": "interleaved", "d_model": 8}, {"use_qk_norm": True}, {"clip_qkv": 0.3})),
    (lambda: read_weight_products(test_symmetries.two_layers(positional_embedding_type="rotary", d_head=2)), "rotary"),
    *((lambda dims=dims: WeightProducts(ONES, ONES, *dims), named)
      for dims, named in (((0, 1), "x_dim"), ((2, 0), "y_dim"), ((3, 2), "x_dim=3 and y_dim=2 exceed the width 4"))),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*has weights that are not finite:RuntimeWarning")
@pytest.mark.parametrize(("call", "named"), CASES)
def test_errors_name_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()
