"""Ridge regressions and readouts against numpy's least squares on cached streams."""

import math

import numpy as np
import pytest
import torch

from mechicl import algorithms, constructions
from mechicl.analysis import Lens, Readouts, fit_readouts
from mechicl.analysis.layers.linear_maps import RidgeSums
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression


def _data(n_sites: int, n_prompts: int, n_samples: int, n_features: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n_sites, n_prompts, n_samples, n_features, generator=generator, dtype=torch.float64)
    features = features + 30  # a mean that is large against the spread
    mixing = torch.randn(n_features, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(n_sites, n_prompts, n_samples, 2, generator=generator, dtype=torch.float64)
    return features, features @ mixing + noise


def _ridge(x: np.ndarray, y: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    mean, target_mean = x.mean(0), y.mean(0)
    centred = x - mean
    covariance = centred.T @ centred / len(x)
    scale = np.trace(covariance) / x.shape[1]
    weights = np.linalg.solve(covariance + penalty * scale * np.eye(x.shape[1]), centred.T @ (y - target_mean) / len(x))
    return weights, target_mean - mean @ weights


@pytest.mark.parametrize(("n_prompts", "n_samples", "penalty", "batch"), [(8, 1, 2.0, 1), (20, 3, 1e-3, 7)])
def test_weights_are_numpys_however_the_prompts_are_batched(n_prompts, n_samples, penalty, batch):
    features, targets = _data(2, n_prompts, n_samples, 3, seed=0)
    sums = RidgeSums(folds=4)
    for start in range(0, n_prompts, batch):
        sums.add(features[:, start : start + batch], targets[:, start : start + batch])
    maps = sums.solve([penalty])
    for site in range(2):
        weights, bias = _ridge(features[site].flatten(0, 1).numpy(), targets[site].flatten(0, 1).numpy(), penalty)
        np.testing.assert_allclose(maps.weights[site], weights, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(maps.bias[site], bias, rtol=1e-8, atol=1e-7)


def test_validation_errors_are_those_of_maps_fitted_without_the_fold():
    features, targets = _data(1, 23, 2, 3, 5)
    sums = RidgeSums(folds=3)
    sums.add(features, targets)
    penalties = [1e-6, 1.0]
    maps = sums.solve(penalties)
    for i, penalty in enumerate(penalties):
        total = 0.0
        for fold in range(3):
            held = np.arange(23) % 3 == fold
            x, y = (a[0][~held].flatten(0, 1).numpy() for a in (features, targets))
            weights, bias = _ridge(x, y, penalty)
            predicted = features[0][held].flatten(0, 1).numpy() @ weights + bias
            total = total + ((predicted - targets[0][held].flatten(0, 1).numpy()) ** 2).sum(0)
        np.testing.assert_allclose(maps.validation_errors[i, 0].numpy(), total / 46, rtol=1e-7)
    best = maps.validation_errors[:, 0].argmin(0)
    assert maps.penalties[0].tolist() == [penalties[i] for i in best.tolist()]


def test_features_that_do_not_vary_or_repeat_are_no_obstacle():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 40, 1, 2, generator=generator, dtype=torch.float64)
    features = torch.cat([x, x, torch.full_like(x, 7.0)], dim=-1)
    targets = x.sum(-1, keepdim=True) * 3 + 1
    sums = RidgeSums()
    sums.add(features, targets)
    maps = sums.solve([0.0])
    predicted = features @ maps.weights[:, None] + maps.bias
    torch.testing.assert_close(predicted, targets, atol=1e-8, rtol=0)


TASK = LinearRegression(x_dim=3, n_context=5, inputs="gaussian")
CFG = TransformerConfig(
    x_dim=3, n_context=5, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=12, d_mlp=24, attention="softmax",
    normalization_type="LN", initializer_range=0.4, dtype="float64",
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer(CFG, seed=3).eval()


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return TASK.sample(300, seed=0, dtype=torch.float64)


def _cached(model: HookedTransformer, prompts: Prompts) -> list[np.ndarray]:
    _, cache = model.run_with_cache(model.encode(prompts))
    names = ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
    return [cache[name][:, ::2].detach().numpy() for name in names]


def test_without_penalty_a_readout_is_least_squares_on_the_stream(model, prompts):
    readouts = fit_readouts(model, prompts, penalties=[0.0], memory=2e6, normalize=False)
    held = TASK.sample(20, seed=1, dtype=torch.float64)
    predictions = readouts.trajectory(held).predictions
    fitted, measured = _cached(model, prompts), _cached(model, held)
    for layer in range(3):
        for t in range(6):
            x = np.concatenate([fitted[layer][:, t], np.ones((300, 1))], axis=1)
            solution = np.linalg.lstsq(x, prompts.ys[:, t].numpy(), rcond=1e-10)[0]
            expected = np.concatenate([measured[layer][:, t], np.ones((20, 1))], axis=1) @ solution
            np.testing.assert_allclose(predictions[layer, :, t].numpy(), expected, atol=1e-5)


def test_shared_readouts_pool_all_points(model, prompts):
    readouts = fit_readouts(model, prompts, shared=True, penalties=[1e-6], normalize=False)
    assert readouts.weights.shape == (3, 1, 12, 1)
    stream = _cached(model, prompts)[2].reshape(-1, 12)
    centred, targets = stream - stream.mean(0), prompts.ys.reshape(-1, 1).numpy()
    penalty = 1e-6 * (centred**2).mean()
    covariance = centred.T @ centred / len(stream) + penalty * np.eye(12)
    weights = np.linalg.solve(covariance, centred.T @ (targets - targets.mean()) / len(stream))
    np.testing.assert_allclose(readouts.weights[2, 0].numpy(), weights, rtol=1e-7, atol=1e-9)


def test_the_models_own_head_is_a_normalised_readout(model, prompts):
    fitted = fit_readouts(model, prompts, shared=True)
    assert fitted.normalized == (False, False, True)
    with torch.no_grad():
        head = model.ln_final.w[:, None] * model.unembed.W_U
        bias = model.ln_final.b @ model.unembed.W_U + model.unembed.b_U
        readouts = Readouts(
            model, head.expand(3, 1, -1, -1), bias.expand(3, 1, -1), fitted.penalties, (True,) * 3, True
        )
        torch.testing.assert_close(readouts.predict_prefixes(prompts), model.predict_prefixes(prompts))


def test_batches_give_the_same(model, prompts):
    whole = fit_readouts(model, prompts)
    parts = fit_readouts(model, prompts, memory=1e6)
    torch.testing.assert_close(whole.weights, parts.weights, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(whole.penalties, parts.penalties)


def test_prompts_with_fewer_points_are_read_by_their_points_readouts(model, prompts):
    readouts = fit_readouts(model, prompts)
    short = prompts.prefix(3)
    torch.testing.assert_close(
        readouts.trajectory(short).predictions, readouts.trajectory(prompts).predictions[:, :, :4]
    )


def test_the_lens_ends_in_the_models_own_prediction(model, prompts):
    trajectory = Lens(model).trajectory(prompts)
    assert trajectory.steps == (0, 1, 2)
    torch.testing.assert_close(trajectory.predictions[-1], model.predict_prefixes(prompts).detach())
    torch.testing.assert_close(Lens(model).predict(prompts), model.predict(prompts).detach())


def test_the_lens_on_a_construction_is_gradient_descent_step_by_step():
    steps = constructions.gradient_descent(x_dim=3, n_context=5, step_size=0.05, steps=4)
    prompts = TASK.sample(10, seed=0, dtype=torch.float64)
    expected = algorithms.gradient_descent(prompts, list(range(5)), step_size=0.05, at="query", with_weights=True)
    measured = Lens(steps).trajectory(prompts, with_weights=True)
    torch.testing.assert_close(measured.predictions, expected.predictions)
    torch.testing.assert_close(measured.weights, expected.weights)


def test_weights_are_the_derivatives_of_each_prefixs_prediction(model, prompts):
    readouts = fit_readouts(model, prompts)
    few = prompts[:4]
    weights = readouts.trajectory(few, with_weights=True).weights
    assert weights is not None
    assert weights.shape == (3, 4, 6, 3, 1)
    for t in range(6):
        query = few.xs[:, t].clone().requires_grad_()
        predictions = readouts.trajectory(few.prefix(t).with_query(query.detach())).predictions
        step = 1e-6
        for i in range(3):
            moved = query.detach().clone()
            moved[:, i] += step
            change = readouts.trajectory(few.prefix(t).with_query(moved)).predictions - predictions
            torch.testing.assert_close(weights[:, :, t, i], change[:, :, -1] / step, atol=1e-4, rtol=1e-3)


def test_other_queries_are_answered_as_in_a_prompt_of_their_own(model, prompts):
    readouts = fit_readouts(model, prompts)
    few = prompts[:3]
    queries = torch.randn(3, 6, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        answers = readouts.predict_queries(few, queries)
        last = readouts.predict_last_queries(few, queries[:, -1])
    torch.testing.assert_close(last, answers[:, :, -1])
    for t in range(6):
        for q in range(2):
            alone = few.prefix(t).with_query(queries[:, t, q])
            torch.testing.assert_close(answers[:, :, t, q], readouts.trajectory(alone).predictions[:, :, -1])


def test_errors_have_an_interval_for_each_layer(model, prompts):
    readouts = fit_readouts(model, prompts)
    errors = readouts.errors(prompts[:50], at="points")
    assert errors.squared_errors.shape == (3, 6, 50)
    expected = (readouts.trajectory(prompts[:50]).predictions - prompts[:50].ys).square().squeeze(-1)
    torch.testing.assert_close(errors.squared_errors, expected.transpose(1, 2))
    for interval, values in zip(errors.by_layer(), expected, strict=True):
        samples = values.mean(1)
        assert interval.mean == pytest.approx(samples.mean().item())
        assert interval.half_width == pytest.approx(2.0096 * samples.std().item() / math.sqrt(50), rel=1e-3)


def test_errors_mean_the_same_for_models_of_both_formats(model, prompts):
    few, readouts = prompts[:9], fit_readouts(model, prompts)
    query, points = readouts.errors(few), readouts.errors(few, at="points")
    torch.testing.assert_close(query.squared_errors, points.squared_errors[:, -1:])
    assert (query.points, points.points) == ((5,), (0, 1, 2, 3, 4, 5))
    assert "query after 5 points" in str(query)
    assert "mean over prefixes of 0 to 5 points" in str(points)
    assert str(points.by_layer()[1]) in str(points)
    paired = HookedTransformer(TransformerConfig(x_dim=3, n_context=5, n_layers=2, dtype="float64"), seed=1)
    lens = Lens(paired)
    torch.testing.assert_close(lens.errors(few).squared_errors, lens.errors(few, at="points").squared_errors[:, -1:])
    for t in range(6):
        expected = (paired.predict(few.prefix(t)) - few.ys[:, t]).square().mean(-1)
        torch.testing.assert_close(lens.errors(few, at="points").squared_errors[-1, t], expected.detach())


def test_a_paired_model_is_read_at_its_query():
    model = HookedTransformer(TransformerConfig(x_dim=3, n_context=5, n_layers=2, initializer_range=0.3))
    prompts = TASK.sample(64, seed=0)
    readouts = fit_readouts(model, prompts)
    assert readouts.trajectory(prompts).predictions.shape == (3, 64, 1, 1)
    assert not readouts.gives_all_points
