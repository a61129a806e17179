"""Readouts, probes and ridge regressions against numpy's least squares on cached streams."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from mechicl import algorithms, constructions
from mechicl.algorithms import gradient_descent, newton
from mechicl.analysis import Lens, Readouts, fit_readouts, probe
from mechicl.analysis.layers import algorithm_weights, cross_moments, ols_weights, second_moments
from mechicl.analysis.layers.layer_learners import trajectories
from mechicl.analysis.layers.readouts import RidgeSums, fit_each
from mechicl.base.settings import settings
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=3, n_context=5, inputs="gaussian")
CFG = TransformerConfig(
    x_dim=3, n_context=5, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=12, d_mlp=24, attention="softmax",
    normalization_type="LN", initializer_range=0.4, dtype="float64",
)  # fmt: skip


CANDIDATES = "mechicl.analysis.layers.readouts.PENALTIES"


def drawn(n_sites: int, n_prompts: int, n_samples: int, seed: int):
    """Features whose mean is large against their spread, and noisy linear targets."""
    generator = torch.Generator().manual_seed(seed)
    shape = n_sites, n_prompts, n_samples
    features = torch.randn(*shape, 3, generator=generator, dtype=torch.float64) + 30
    mixing = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    return features, features @ mixing + torch.randn(*shape, 2, generator=generator, dtype=torch.float64)


def ridge(x: np.ndarray, y: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    mean, target_mean = x.mean(0), y.mean(0)
    centred = x - mean
    covariance = centred.T @ centred / len(x)
    scale = np.trace(covariance) / x.shape[1]
    weights = np.linalg.solve(covariance + penalty * scale * np.eye(x.shape[1]), centred.T @ (y - target_mean) / len(x))
    return weights, target_mean - mean @ weights


@pytest.mark.parametrize(("n_prompts", "n_samples", "penalty", "batch"), [(8, 1, 2.0, 1), (20, 3, 1e-3, 7)])
def test_weights_are_numpys_however_the_prompts_are_batched(n_prompts, n_samples, penalty, batch, monkeypatch):
    monkeypatch.setattr(CANDIDATES, (penalty,))
    features, targets = drawn(2, n_prompts, n_samples, seed=0)
    sums = RidgeSums()
    for start in range(0, n_prompts, batch):
        sums.add(features[:, start : start + batch], targets[:, start : start + batch])
    for site, (fitted, constant) in enumerate(zip(*sums.solve(), strict=True)):
        weights, bias = ridge(features[site].flatten(0, 1).numpy(), targets[site].flatten(0, 1).numpy(), penalty)
        np.testing.assert_allclose(fitted, weights, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(constant, bias, rtol=1e-8, atol=1e-7)


@pytest.mark.parametrize("noise", [0.1, 3.0, 30.0])
def test_the_penalty_is_the_best_of_maps_fitted_without_the_fold(noise, monkeypatch):
    penalties = (1e-6, 0.1, 10.0)
    monkeypatch.setattr(CANDIDATES, penalties)
    features, targets = drawn(1, 23, 2, seed=5)
    targets = targets + noise * torch.randn(targets.shape, generator=torch.Generator().manual_seed(1)).double()
    sums = RidgeSums()
    sums.add(features, targets)
    errors = np.zeros((len(penalties), 2))
    for i, penalty in enumerate(penalties):
        for fold in range(4):
            held = np.arange(23) % 4 == fold
            x, y = (a[0][~held].flatten(0, 1).numpy() for a in (features, targets))
            weights, bias = ridge(x, y, penalty)
            predicted = features[0][held].flatten(0, 1).numpy() @ weights + bias
            errors[i] += ((predicted - targets[0][held].flatten(0, 1).numpy()) ** 2).sum(0)
    x, y = (a[0].flatten(0, 1).numpy() for a in (features, targets))
    for target, best in enumerate(errors.argmin(0)):
        weights, _ = ridge(x, y, penalties[best])
        np.testing.assert_allclose(sums.solve()[0][0, :, target], weights[:, target], rtol=1e-7)


def test_features_that_are_constant_or_repeat_are_no_obstacle(monkeypatch):
    monkeypatch.setattr(CANDIDATES, (0.0,))
    x = torch.randn(1, 40, 1, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features, targets = torch.cat([x, x, torch.full_like(x, 7.0)], dim=-1), x.sum(-1, keepdim=True) * 3 + 1
    sums = RidgeSums()
    sums.add(features, targets)
    weights, bias = sums.solve()
    torch.testing.assert_close(features @ weights[:, None] + bias, targets, atol=1e-8, rtol=0)


# ---- readouts ----
@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer(CFG, seed=3).eval()


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return TASK.sample(300, seed=0, dtype=torch.float64)


@pytest.fixture(scope="module")
def readouts(model, prompts) -> Readouts:
    return fit_readouts(model, prompts)


def cached(model: HookedTransformer, prompts: Prompts) -> list[np.ndarray]:
    """The streams at x tokens before and after each layer; the last with mean 0 and variance 1."""
    _, cache = model.run_with_cache(model.encode(prompts))
    names = ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
    first, second, last = (cache[name][:, ::2].detach().numpy() for name in names)
    centred = last - last.mean(-1, keepdims=True)
    return [first, second, centred / np.sqrt((centred**2).mean(-1, keepdims=True) + model.cfg.eps)]


def test_without_penalty_a_readout_is_least_squares_on_the_stream(model, prompts, monkeypatch):
    monkeypatch.setattr(CANDIDATES, (0.0,))
    held = TASK.sample(20, seed=1, dtype=torch.float64)
    with settings(memory=2e6):
        fitted = fit_readouts(model, prompts)
    predictions = fitted.trajectory(held).predictions
    for layer, (x, x_held) in enumerate(zip(cached(model, prompts), cached(model, held), strict=True)):
        for t in range(6):
            rows, rows_held = (np.concatenate([a[:, t], np.ones((len(a), 1))], axis=1) for a in (x, x_held))
            expected = rows_held @ np.linalg.lstsq(rows, prompts.ys[:, t].numpy(), rcond=1e-10)[0]
            np.testing.assert_allclose(predictions[layer, :, t].numpy(), expected, atol=1e-5)


def test_two_fits_from_one_run_are_those_of_two(monkeypatch):
    monkeypatch.setattr("mechicl.models.layered.FAST_BYTES", 1)  # 64 prompts at a time
    model, prompts = HookedTransformer(CFG, seed=1), TASK.sample(150, seed=2)
    both = fit_each(model, prompts, {False: 150, True: 100})
    for fitted, alone in zip(
        both, (fit_readouts(model, prompts), fit_readouts(model, prompts[:100], shared=True)), strict=True
    ):
        assert fitted.shared == alone.shared
        torch.testing.assert_close(fitted.weights, alone.weights, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(fitted.bias, alone.bias, rtol=1e-8, atol=1e-9)


def test_shared_readouts_pool_all_points(model, prompts, monkeypatch):
    monkeypatch.setattr(CANDIDATES, (1e-6,))
    fitted = fit_readouts(model, prompts, shared=True)
    assert fitted.weights.shape == (3, 1, 12, 1)
    weights, _ = ridge(cached(model, prompts)[2].reshape(-1, 12), prompts.ys.reshape(-1, 1).numpy(), 1e-6)
    np.testing.assert_allclose(fitted.weights[2, 0].numpy(), weights, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("norm", [{}, {"final_rms": True}, {"normalization_type": "RMS"}])
def test_the_models_own_head_is_a_normalised_readout(norm, prompts):
    model: Any = HookedTransformer(CFG.replace(**norm), seed=1)
    with torch.no_grad():
        head = (model.ln_final.w[:, None] * model.unembed.W_U).expand(3, 1, -1, -1)
        shift = getattr(model.ln_final, "b", torch.zeros(12, dtype=torch.float64))
        bias = (shift @ model.unembed.W_U + model.unembed.b_U).expand(3, 1, -1)
        own = Readouts(model, head, bias, shared=True)
        torch.testing.assert_close(own.predict_prefixes(prompts), model.predict_prefixes(prompts))


def test_prompts_with_fewer_points_are_read_by_their_points_readouts(prompts, readouts):
    short = readouts.trajectory(prompts.prefix(3)).predictions
    torch.testing.assert_close(short, readouts.trajectory(prompts).predictions[:, :, :4])


def test_the_lens_ends_in_the_models_own_prediction(model, prompts):
    trajectory = Lens(model).trajectory(prompts)
    assert trajectory.steps == (0, 1, 2)
    torch.testing.assert_close(trajectory.predictions[-1], model.predict_prefixes(prompts).detach())


def test_the_lens_on_a_construction_is_gradient_descent(prompts):
    steps = constructions.gradient_descent(x_dim=3, n_context=5, step_size=0.05, steps=4)
    expected = algorithms.gradient_descent(prompts, list(range(5)), step_size=0.05, at="query", with_weights=True)
    measured = Lens(steps).trajectory(prompts, with_weights=True)
    torch.testing.assert_close(measured.predictions, expected.predictions)
    torch.testing.assert_close(measured.weights, expected.weights)


def test_weights_are_the_derivatives_of_each_prefixs_prediction(prompts, readouts):
    few, step = prompts[:4], 1e-6
    weights = readouts.trajectory(few, with_weights=True).weights
    assert weights is not None
    assert weights.shape == (3, 4, 6, 3, 1)
    for t in range(6):
        prefix = few.prefix(t)
        for i in range(3):
            moved = few.xs[:, t].clone()
            moved[:, i] += step
            change = readouts.trajectory(prefix.with_query(moved)).query() - readouts.trajectory(prefix).query()
            torch.testing.assert_close(weights[:, :, t, i], change / step, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_other_queries_are_predicted_as_in_separate_prompts(prompts, readouts):
    few = prompts[:3]
    queries = torch.randn(3, 6, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    predicted = readouts.predict_queries(few, queries)
    for t in range(6):
        for q in range(2):
            alone = readouts.trajectory(few.prefix(t).with_query(queries[:, t, q])).query()
            torch.testing.assert_close(predicted[:, :, t, q], alone)


def test_errors_have_an_interval_for_each_layer(prompts, readouts):
    errors = readouts.errors(prompts[:50], at="points")
    expected = (readouts.trajectory(prompts[:50]).predictions - prompts[:50].ys).square().squeeze(-1)
    torch.testing.assert_close(errors.squared_errors, expected.transpose(1, 2))
    for interval, values in zip(errors.by_layer(), expected, strict=True):
        samples = values.mean(1)
        assert interval.mean == pytest.approx(samples.mean().item())
        assert interval.half_width == pytest.approx(2.0096 * samples.std().item() / math.sqrt(50), rel=1e-3)


def test_errors_mean_the_same_for_models_of_both_formats(prompts, readouts):
    few = prompts[:9]
    query, points = readouts.errors(few), readouts.errors(few, at="points")
    torch.testing.assert_close(query.squared_errors, points.squared_errors[:, -1:])
    assert (query.points, points.points) == ((5,), (0, 1, 2, 3, 4, 5))
    assert "query after 5 points" in str(query)
    assert "mean over prefixes of 0 to 5 points" in str(points)
    assert str(points.by_layer()[1]) in str(points)
    paired = HookedTransformer(TransformerConfig(x_dim=3, n_context=5, n_layers=2, dtype="float64"), seed=1)
    query, points = (Lens(paired).errors(few, at=at) for at in ("query", "points"))
    torch.testing.assert_close(query.squared_errors, points.squared_errors[:, -1:])
    for t in range(6):
        expected = (paired.predict(few.prefix(t)) - few.ys[:, t]).square().mean(-1)
        torch.testing.assert_close(points.squared_errors[-1, t], expected.detach())


def test_a_paired_model_is_read_at_its_query():
    model = HookedTransformer(TransformerConfig(x_dim=3, n_context=5, n_layers=2, initializer_range=0.3))
    prompts = TASK.sample(64, seed=0)
    fitted = fit_readouts(model, prompts)
    assert fitted.trajectory(prompts).predictions.shape == (3, 64, 1, 1)
    assert not fitted.gives_all_points


def test_readings_of_one_model_share_its_run(monkeypatch):
    model, prompts, fitting = HookedTransformer(CFG, seed=0), TASK.sample(9, seed=1), TASK.sample(64, seed=0)
    learners = [fit_readouts(model, fitting), fit_readouts(model, fitting, shared=True), Lens(model)]
    expected, runs, streams = [each.trajectory(prompts) for each in learners], [], HookedTransformer.layer_streams
    monkeypatch.setattr(HookedTransformer, "layer_streams", lambda *args: runs.append(args) or streams(*args))
    found = trajectories(learners, prompts)
    assert len(runs) == 1
    for one, alone in zip(found, expected, strict=True):
        assert (one.steps, one.name) == (alone.steps, alone.name)
        torch.testing.assert_close(one.predictions, alone.predictions)


# ---- probes ----
TWO_INPUTS = LinearRegression(x_dim=2, n_context=4, inputs="gaussian")
FITTING, HELD_OUT = (TWO_INPUTS.sample(n, seed=s, dtype=torch.float64) for n, s in ((600, 0), (200, 1)))


def _averaging_model() -> HookedTransformer:
    """One layer of uniform attention: each position contains the mean of the tokens that it sees."""
    cfg = TransformerConfig(
        x_dim=2, n_context=4, prompt_format="interleaved", n_layers=1, d_model=40, d_head=40, attention="softmax",
        positional_embedding_type="one_hot", read_in="identity", read_out="linear", dtype="float64",
    )  # fmt: skip
    model = HookedTransformer(cfg).eval()
    with torch.no_grad():
        for name in "QKVO":
            getattr(model.blocks[0].attn, f"W_{name}").zero_()
        model.blocks[0].attn.W_V[0, :2, 20:22] = torch.eye(2)
        model.blocks[0].attn.W_O[0] = torch.eye(40)
    return model


def _mean_of_tokens(prompts):
    """The content of that model at x tokens: the sum of the x and y before, without its own x."""
    xs, ys = prompts.xs, torch.nn.functional.pad(prompts.ys, (0, 1))
    sums = (xs + ys).cumsum(1) - (xs + ys)
    return sums


def test_a_quantity_is_found_after_the_layer_that_writes_it():
    result = probe(_averaging_model(), {"sum": _mean_of_tokens}, FITTING, HELD_OUT)
    explained = result.explained()[0]
    assert explained.shape == (2, 9)
    assert (explained[1, 1:] > 1 - 1e-6).all()  # after the layer, at every position that has seen a point
    assert explained[0, 2:].max() < 0.9  # before it, a position contains only its own token
    assert explained[:, 0].isnan().all()  # nothing varies before the first point
    assert result.control()[0, :, 1:].max() < 0.05
    assert (result.selectivity()[0, 1, 1:] > 0.95).all()


def test_r_squared_is_that_of_numpys_regression_on_the_cached_stream(monkeypatch):
    monkeypatch.setattr(CANDIDATES, (0.0,))
    model = _averaging_model()
    result = probe(model, {"cross": cross_moments}, FITTING, HELD_OUT)
    position, seen = 5, 3  # the third y token has seen three points
    _, cache = model.run_with_cache(model.encode(FITTING))
    _, cache_held = model.run_with_cache(model.encode(HELD_OUT))
    x, x_held = (c["blocks.0.hook_resid_post"][:, position].detach().numpy() for c in (cache, cache_held))
    y, y_held = ((p.xs[:, :seen, :] * p.ys[:, :seen, :]).sum(1).numpy() for p in (FITTING, HELD_OUT))
    x, x_held = (np.concatenate([a, np.ones((len(a), 1))], axis=1) for a in (x, x_held))
    predicted = x_held @ np.linalg.lstsq(x, y, rcond=1e-10)[0]
    expected = 1 - ((predicted - y_held) ** 2).sum() / ((y_held - y_held.mean(0)) ** 2).sum()
    assert result.explained()[0, 1, position].item() == pytest.approx(expected, abs=1e-8)
    interval = result.interval("cross", 1, position)
    assert interval.mean == pytest.approx(expected, abs=1e-8)
    assert interval.low < interval.mean < interval.high


def test_quantities_are_those_of_plain_loops():
    prompts = TWO_INPUTS.sample(3, seed=5, dtype=torch.float64)
    xs, ys = prompts.xs.numpy(), prompts.ys.numpy()
    of_newton = algorithm_weights(newton, steps=[2])(prompts)
    gd = algorithm_weights(gradient_descent, steps=[3], step_size=0.1)(prompts)
    for p in range(3):
        for t in range(5):
            x, y = xs[p, :t], ys[p, :t]
            second, cross = x.T @ x, x.T @ y
            np.testing.assert_allclose(cross_moments(prompts)[p, t], cross[:, 0], atol=1e-12)
            upper = [second[0, 0], second[0, 1], second[1, 1]]
            np.testing.assert_allclose(second_moments(prompts)[p, t], upper, atol=1e-12)
            np.testing.assert_allclose(ols_weights(prompts)[p, t], (np.linalg.pinv(x) @ y)[:, 0], atol=1e-7)
            inverse = second / np.linalg.norm(second @ second.T) if t else second
            for _ in range(2):
                inverse = 2 * inverse - inverse @ second @ inverse
            np.testing.assert_allclose(of_newton[p, t], (inverse @ cross)[:, 0], atol=1e-9)
            w = np.zeros((2, 1))
            for _ in range(3):
                w = w - 0.1 * (second @ w - cross)
            np.testing.assert_allclose(gd[p, t], w[:, 0], atol=1e-12)


def test_the_best_site_is_among_the_given_positions():
    result = probe(_averaging_model(), {"sum": _mean_of_tokens}, FITTING, HELD_OUT)
    layer, _position, explained = result.best("sum")
    assert layer == 1
    assert explained.mean == pytest.approx(1, abs=1e-6)
    assert explained.n == 100  # the other half chose the site
    assert result.best("sum", [4, 6])[1] in (4, 6)


# ---- errors ----
DRAWN_TASK = LinearRegression(x_dim=2, n_context=4)
DRAWN = DRAWN_TASK.sample(12, seed=0)
FORMAT: Any = {"prompt_format": "interleaved", "d_model": 8, "attention": "softmax"}
MODEL = HookedTransformer(TransformerConfig(x_dim=2, n_context=4, **FORMAT)).eval()
PAIRED = HookedTransformer(TransformerConfig(x_dim=2, n_context=4)).eval()
CROSS = {"cross": cross_moments}


def sums(n: int) -> RidgeSums:
    made = RidgeSums()
    made.add(torch.randn(1, n, 1, 2), torch.randn(1, n, 1, 1))
    return made


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("call", "named"), [
    (lambda: sums(3).solve(), "4-fold cross-validation of 3 prompts"),
    (lambda: fit_readouts(MODEL, DRAWN).read(7, torch.zeros(1, 1, 1, 8)), "layer must be 0 to 1, got 7"),
    (lambda: fit_readouts(MODEL, DRAWN.prefix(3)).trajectory(DRAWN), "fitted for 4 points, the prompts have 5"),
    (lambda: fit_readouts(MODEL, DRAWN.prefix(0)).trajectory(DRAWN), "fitted for 1 points, the prompts have 5"),
    (lambda: probe(MODEL, {}, DRAWN, DRAWN), "at least one quantity"),
    (lambda: probe(MODEL, CROSS, DRAWN, DRAWN.prefix(2)), "same number of points"),
    (lambda: probe(MODEL, {"x": lambda p: p.xs[:, 0]}, DRAWN, DRAWN), r"'x' must give \[prompt point quantity"),
    (lambda: probe(PAIRED, CROSS, DRAWN, DRAWN), "interleaved model with causal keys"),
    (lambda: probe(MODEL, CROSS, DRAWN, DRAWN).interval("S", 0, 1), "quantity must be one of 'cross'; got 'S'"),
    (lambda: probe(MODEL, CROSS, DRAWN, DRAWN).interval("cross", 2, 1), "layer must be 0 to 1"),
])  # fmt: skip
def test_errors_name_the_argument_or_the_cause(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()
