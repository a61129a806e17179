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
    decompose,
    initial_function,
    kernel_heatmaps,
    kernel_parts,
    point_streams,
    view_kernel,
)
from mechicl import algorithms, constructions
from mechicl.base.settings import settings
from mechicl.learners import AlgorithmLearner
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
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
    "two targets": {"y_dim": 2, "x_dim": 3},
}
GRID = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]


def make(name: str) -> HookedTransformer:
    return random_model(TransformerConfig(**{**SINE, **MODELS[name]}))


def features(model, xs, ys=None):
    """m(x, y): the stream's dimensions other than the target's."""
    stream, slot = point_streams(model, xs, ys).detach(), model.cfg.y_slot
    return torch.cat([stream[:, : slot.start], stream[:, slot.stop :]], dim=1)


def kernel(model, xs, others, n_context=6):
    _, through_values, through_scores = kernel_parts(model, xs, others, n_context)
    return (through_values + through_scores).detach()


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
    got = contributions(model, prompts)
    for i, (xs, ys) in enumerate(zip(prompts.xs.numpy(), prompts.ys.numpy(), strict=True)):
        each = [hand.contribution(x, y, xs[-1], 6) for x, y in zip(xs[:-1], ys[:-1], strict=True)]
        np.testing.assert_allclose(got[i].detach(), each, rtol=1e-9, atol=1e-12)
    total = initial_function(model, prompts.query.xs) + got.sum(1)
    torch.testing.assert_close(total, model.predict(prompts))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "two targets"])
def test_the_kernel_is_the_slope_of_a_contribution(name):
    model = make(name)
    hand, step = ByHand(model), 1e-6
    got = kernel(model, GRID, GRID + 0.1, n_context=4)
    for i, query in enumerate(GRID.numpy()):
        for j, x in enumerate((GRID + 0.1).numpy()):
            high, low = (hand.contribution(x, np.array([y]), query, 4) for y in (step, -step))
            assert got[i, j].item() == pytest.approx(((high - low) / (2 * step)).item(), rel=1e-5, abs=1e-8)


def test_the_gradient_descent_layer_s_scores_are_inner_products_of_features():
    model = make("gradient descent")
    view, m = view_kernel(model, GRID, random_prompts(model.cfg)), features(model, GRID)
    zero_targets = features(model, GRID, torch.zeros_like(GRID))
    expected = model.cfg.score_scale / 6 * m @ zero_targets.mT
    torch.testing.assert_close(view.scores, expected.detach())


@pytest.mark.parametrize("act_fn", ["relu", "tanh"])
def test_the_kernel_of_the_construction_is_the_step_size_times_inner_products(act_fn):
    weights = torch.randn(1, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = constructions.kernel_gradient_descent(
        weights=weights, bias=bias, n_context=6, step_size=0.03, act_fn=act_fn
    )
    prompts = SineRegression(n_context=6).sample(20, seed=0, dtype=torch.float64)
    view = view_kernel(model, GRID, prompts)
    m = features(model, GRID)[:, 1:]  # the stream contains x too
    torch.testing.assert_close(m, {"relu": torch.relu, "tanh": torch.tanh}[act_fn](GRID @ weights + bias))
    torch.testing.assert_close(view.kernel, 0.03 * m @ m.mT)
    torch.testing.assert_close(view.through_values, view.kernel)
    assert view.symmetry_error < 1e-12
    assert view.parts.error.abs().max() < 1e-12
    # no part but the linear one, which is kernel smoothing without a normaliser
    for other in (view.parts.initial, view.parts.constant, view.parts.remainder):
        torch.testing.assert_close(other, torch.zeros_like(other), atol=1e-12, rtol=0)
    torch.testing.assert_close(view.parts.linear, model.predict(prompts)[:, 0])


@pytest.mark.parametrize("name", ["attention", "gradient descent", "two heads", "relu attention"])
def test_the_parts_of_a_prediction(name):
    model = make(name)
    prompts = random_prompts(model.cfg, batch=7)
    with settings(memory=3 * 4 * model.bytes_per_prompt(prompts)):
        parts = decompose(model, prompts)
    assert parts.error.abs().max() < 1e-12
    torch.testing.assert_close(parts.prediction, model.predict(prompts)[:, 0].detach())
    without = contributions(model, Prompts(prompts.xs, torch.zeros_like(prompts.ys)))
    torch.testing.assert_close(parts.constant, without.sum((1, 2)).detach())
    (xs, ys), query = prompts.context, prompts.query.xs
    smoothed = [kernel(model, q[None], x)[0] @ y[:, 0] for q, x, y in zip(query, xs, ys, strict=True)]
    torch.testing.assert_close(parts.linear, torch.stack(smoothed).detach())
    # targets a thousand times smaller leave a remainder of second order
    small = decompose(model, Prompts(prompts.xs, prompts.ys / 1000))
    assert small.remainder.abs().max() < 1e-5 * max(1.0, float(parts.remainder.abs().max()))
    assert list(parts.to_dataframe()) == ["prediction", "initial", "constant", "linear", "remainder", "error"]


def view_of(kernel):
    points = torch.zeros(len(kernel))
    parts = decompose(make("attention"), random_prompts(make("attention").cfg))
    return KernelView(points[:, None], points, kernel, kernel, kernel, parts)


def test_spectra():
    matrix = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, -3.0]], dtype=torch.float64)
    torch.testing.assert_close(view_of(matrix).eigenvalues, torch.tensor([-3.0, 2.0, 0.0], dtype=torch.float64))
    assert view_of(matrix).effective_rank == pytest.approx(25 / 13)
    assert view_of(torch.eye(4)).effective_rank == pytest.approx(4)
    assert view_of(torch.eye(4)).symmetry_error == 0
    assert view_of(torch.tensor([[0.0, 1.0], [-1.0, 0.0]])).symmetry_error == pytest.approx(2)
    assert math.isnan(view_of(torch.zeros(2, 2)).effective_rank)
    # the sine waves of one frequency: a kernel cos(x - x') has rank 2
    points = 2 * math.pi * torch.arange(12, dtype=torch.float64) / 12
    assert view_of((points[:, None] - points).cos()).effective_rank == pytest.approx(2)


def learner_of(name: str) -> Any:
    if name == "lstm":
        return HookedLSTM(LSTMConfig(x_dim=1, n_context=6, n_layers=1, d_model=5), seed=0).double()
    if name == "algorithm":
        return AlgorithmLearner(algorithms.kernel_smoothing, {"bandwidth": 0.5})
    model = make("attention" if name == "model" else "gradient descent")
    if name == "hooked":
        model.blocks[0].attn.hook_pattern.add_hook(lambda tensor, *, hook: 2 * tensor)
    return model


@pytest.mark.parametrize("name", ["model", "hooked", "lstm", "algorithm"])
def test_adapted_functions_are_predictions_one_by_one(name):
    learner = learner_of(name)
    prompts = SineRegression(n_context=6).sample(4, seed=0, dtype=torch.float64)
    per_prompt = learner.bytes_per_prompt(prompts) if hasattr(learner, "bytes_per_prompt") else 64 * 7 * 4
    with settings(memory=3 * len(GRID) * per_prompt):
        got = adapted_functions(learner, prompts, GRID)
    assert got.shape == (4, 5, 1)
    assert not got.requires_grad
    for j, x in enumerate(GRID):
        torch.testing.assert_close(got[:, j], learner.predict(prompts.with_query(x.expand(4, 1))).detach())
    torch.testing.assert_close(adapted_functions(learner, prompts, GRID.float()), got)
    assert adapted_functions(learner, prompts[:0], GRID).shape == (0, 5, 1)


WIDE = torch.linspace(-5, 5, 7, dtype=torch.float64)[:, None]


def drawn_view(step_size: float = 0.1, grid: Any = WIDE) -> KernelView:
    weights = torch.tensor([[1.0, -1.0, 0.5]], dtype=torch.float64)
    model = constructions.kernel_gradient_descent(weights=weights, n_context=4, step_size=step_size)
    return view_kernel(model, grid, SineRegression(n_context=4).sample(5, seed=0, dtype=torch.float64))


def test_kernels_are_drawn_on_one_scale():
    views = {"slow": drawn_view(0.1), "fast": drawn_view(0.2)}
    figure: Any = kernel_heatmaps(views)
    for drawn, shown in zip(heatmaps(figure), views.values(), strict=True):
        torch.testing.assert_close(drawn, shown.kernel)
    scale = figure.layout.coloraxis
    assert scale.cmax == -scale.cmin == pytest.approx(views["fast"].kernel.abs().max().item())
    torch.testing.assert_close(heatmaps(kernel_heatmaps(views, part="through_values"))[0], views["slow"].through_values)


WITHOUT_KERNEL: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax", "normalize_by_context": False},
    "n_layers": {"n_layers": 2},
    "keys": {"keys": "full"},
    "normalization_type": {"normalization_type": "LN"},
    "block_mlp": {"mlp_location": "blocks"},
    "token_clip": {"token_clip": 1.0},
    "prompt_format": {"prompt_format": "interleaved", "keys": "causal"},
    "positional_embedding_type": {"positional_embedding_type": "standard"},
}
POINTS = random_prompts(make("attention").cfg)
MODEL = make("attention")
CASES: list[tuple[Any, str]] = [
    *((lambda call=call, fields=fields: call(HookedTransformer(TransformerConfig(**SINE | fields))), named)
      for named, fields in WITHOUT_KERNEL.items() for call in (
        lambda m: initial_function(m, GRID), lambda m: contributions(m, random_prompts(m.cfg)),
        lambda m: view_kernel(m, GRID, random_prompts(m.cfg)))),
    (lambda: point_streams(MODEL, GRID.expand(5, 2)), "xs must be"),
    (lambda: view_kernel(MODEL, GRID[:0], POINTS), "grid points"),
    (lambda: view_kernel(MODEL, GRID, POINTS.prefix(0)), "prompts must have contexts"),
    (lambda: view_kernel(make("two heads"), GRID, POINTS), "one head"),
    (lambda: decompose(make("two targets"), random_prompts(make("two targets").cfg)), "y_dim"),
    (lambda: adapted_functions(MODEL, POINTS, GRID.expand(5, 2)), "grid must be"),
    (lambda: kernel_heatmaps({}), "views"),
    (lambda: kernel_heatmaps({"a": drawn_view(), "b": drawn_view(grid=2 * WIDE)}), "views"),
    (lambda: kernel_heatmaps({"a": drawn_view(), "b": drawn_view(grid=WIDE[1:])}), "views"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "named"), CASES)
def test_errors_name_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()
