"""The kernel view against the raw weights, token by token, and against constructions."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from analyses.support.kernels import (
    KernelView,
    adapted_functions,
    contributions,
    initial_function,
    kernel_heatmaps,
    view_kernel,
)  # fmt: skip
from mechicl import algorithms, constructions
from mechicl.learners import AlgorithmLearner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.tasks import SineRegression
from tests.strategies import random_model, random_prompts
from tests.viz.traces import heatmaps

SINE = {
    "x_dim": 1, "n_context": 6, "d_model": 7, "d_mlp": 11, "mlp_location": "input", "read_in": "linear",
    "read_out": "identity", "normalize_by_context": True, "score_scale": 0.7, "dtype": "float64",
}  # fmt: skip
MODELS = {
    "attention": {},
    "gradient descent": {"attention_weights": "gradient_descent"},
    "two heads": {"n_heads": 2, "d_head": 3},
    "relu attention": {"attention": "relu", "damping": 0.6, "normalize_by_context": False},
    "read-out": {"read_out": "linear", "read_bias": True},
    "no MLP": {"d_mlp": None, "mlp_location": "blocks", "d_model": 2, "read_in": "identity"},
}
GRID = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]


def make(name: str) -> HookedTransformer:
    return random_model(TransformerConfig(**{**SINE, **MODELS[name]}))


class ByHand:
    """One layer in numpy, one token at a time."""

    def __init__(self, model: HookedTransformer):
        self.cfg = model.cfg
        self.weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
        attn = model.blocks[0].attn
        self.Q, self.K, self.V, self.O = (w[0].detach().numpy() for w in (model.W_Q, model.W_K, model.W_V, model.W_O))
        assert attn.cfg.act_fn == "gelu"

    def stream(self, x, y=None):
        y = -x @ self.weights["initial_weights"] if y is None else y
        token = np.concatenate([x, y])
        if "embed.W_E" in self.weights:
            token = token @ self.weights["embed.W_E"] + self.weights.get("embed.b_E", 0)
        if "input_mlp.W_in" in self.weights:
            hidden = token @ self.weights["input_mlp.W_in"] + self.weights["input_mlp.b_in"]
            hidden = np.array([h * (1 + math.erf(h / 2**0.5)) / 2 for h in hidden])
            token = token + hidden @ self.weights["input_mlp.W_out"] + self.weights["input_mlp.b_out"]
        return token

    def read(self, stream, *, bias=True):
        if "unembed.W_U" in self.weights:
            return stream @ self.weights["unembed.W_U"] + (self.weights["unembed.b_U"] if bias else 0)
        return -stream[self.cfg.y_slot]

    def contribution(self, x, y, query, n):
        key, query_stream, out = self.stream(x, y), self.stream(query), 0.0
        for head in range(self.cfg.n_heads):
            score = self.cfg.score_scale * (query_stream @ self.Q[head]) @ (key @ self.K[head])
            score = max(score, 0.0) if self.cfg.attention == "relu" else score
            score = score / n if self.cfg.normalize_by_context else score
            out = out + self.cfg.damping * score * key @ self.V[head] @ self.O[head]
        return self.read(out, bias=False)


@pytest.mark.parametrize("name", MODELS)
def test_the_prediction_is_the_sum_of_contributions(name):
    model = make(name)
    prompts, hand = random_prompts(model.cfg, batch=3), ByHand(model)
    got = contributions(model, prompts.query.xs[:, None], *prompts.context, 6)[:, 0]
    for i, (xs, ys) in enumerate(zip(prompts.xs.numpy(), prompts.ys.numpy(), strict=True)):
        each = [hand.contribution(x, y, xs[-1], 6) for x, y in zip(xs[:-1], ys[:-1], strict=True)]
        np.testing.assert_allclose(got[i].detach(), each, rtol=1e-9, atol=1e-12)
    total = initial_function(model, prompts.query.xs) + got.sum(1)
    torch.testing.assert_close(total, model.predict(prompts))


@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_is_the_slope_of_a_contribution_and_the_remainder_what_is_left(name):
    model = make(name)
    hand, step, prompts = ByHand(model), 1e-6, random_prompts(model.cfg, batch=3)
    view = view_kernel(model, GRID, prompts)

    def slope(x, query):
        high, low = (hand.contribution(x, np.array([y]), query, 6) for y in (step, -step))
        return ((high - low) / (2 * step)).item()

    expected = [[slope(x, query) for x in GRID.numpy()] for query in GRID.numpy()]
    np.testing.assert_allclose(view.kernel, expected, rtol=1e-5, atol=1e-8)
    for i, (xs, ys) in enumerate(zip(prompts.xs.numpy(), prompts.ys.numpy(), strict=True)):
        left: Any = [hand.contribution(x, y, xs[-1], 6) - hand.contribution(x, 0 * y, xs[-1], 6) - slope(x, xs[-1]) * y
                for x, y in zip(xs[:-1], ys[:-1], strict=True)]  # fmt: skip
        assert view.remainder[i].item() == pytest.approx(np.sum(left), rel=1e-4, abs=1e-7)
    torch.testing.assert_close(view.prediction, model.predict(prompts)[:, 0].detach())


@pytest.mark.parametrize("act_fn", ["relu", "tanh"])
def test_the_kernel_of_the_construction_is_the_step_size_times_inner_products(act_fn):
    weights = torch.randn(1, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = constructions.kernel_gradient_descent(
        weights=weights, bias=bias, n_context=6, step_size=0.03, act_fn=act_fn
    )
    view = view_kernel(model, GRID, SineRegression(n_context=6).sample(20, seed=0, dtype=torch.float64))
    m = {"relu": torch.relu, "tanh": torch.tanh}[act_fn](GRID @ weights + bias)
    torch.testing.assert_close(view.kernel, 0.03 * m @ m.mT)
    assert view.symmetry_error < 1e-12
    assert view.remainder.abs().max() < 1e-12


def view_of(kernel):
    points = torch.zeros(len(kernel))
    return KernelView(points[:, None], kernel, points, points)


def test_spectra():
    matrix = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, -3.0]], dtype=torch.float64)
    assert view_of(matrix).effective_rank == pytest.approx(25 / 13)
    assert view_of(torch.eye(4)).effective_rank == pytest.approx(4)
    assert view_of(torch.eye(4)).symmetry_error == 0
    assert view_of(torch.tensor([[0.0, 1.0], [-1.0, 0.0]])).symmetry_error == pytest.approx(2)
    assert math.isnan(view_of(torch.zeros(2, 2)).effective_rank)
    # the sine waves of one frequency: a kernel cos(x - x') has rank 2
    points = 2 * math.pi * torch.arange(12, dtype=torch.float64) / 12
    assert view_of((points[:, None] - points).cos()).effective_rank == pytest.approx(2)


def test_adapted_functions_are_predictions_of_contexts_with_other_queries():
    prompts = SineRegression(n_context=6).sample(4, seed=0, dtype=torch.float64)
    got = adapted_functions(AlgorithmLearner(algorithms.kernel_smoothing, {"bandwidth": 0.5}), prompts, GRID)
    asked = Prompts(prompts.xs[2:3], prompts.ys[2:3]).with_query(GRID[1:2])
    torch.testing.assert_close(got[1, 2], algorithms.kernel_smoothing(asked, bandwidth=0.5).query()[-1, 0])


def test_kernels_are_drawn_on_one_scale():
    views = {"slow": view_of(torch.eye(3)), "fast": view_of(2 * torch.eye(3))}
    figure: Any = kernel_heatmaps(views)
    for drawn, shown in zip(heatmaps(figure), views.values(), strict=True):
        torch.testing.assert_close(drawn, shown.kernel, check_dtype=False)
    assert figure.layout.coloraxis.cmax == -figure.layout.coloraxis.cmin == 2


@pytest.mark.parametrize("fields", [
    {"attention": "softmax", "normalize_by_context": False}, {"n_layers": 2}, {"keys": "full"}, {"y_dim": 2},
])  # fmt: skip
def test_other_models_have_no_kernel(fields):
    model = HookedTransformer(TransformerConfig(**SINE | fields))
    with pytest.raises(ValueError, match="one layer without softmax"):
        view_kernel(model, GRID, random_prompts(model.cfg))
