"""Gradient flow, kernel ridge, Huber's regression and learners on unit inputs equal scipy, scikit-learn and loops."""

from typing import Any

import numpy as np
import pytest
import scipy
import torch
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Lasso

from mechicl import algorithms
from mechicl.analysis import identify
from mechicl.learners import AlgorithmLearner
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=3, n_context=8, y_dim=2, noise_std=0.4, inputs="gaussian")
F64 = torch.float64
PROMPTS = TASK.sample(5, seed=3, dtype=F64)
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gradient flow": (algorithms.gradient_flow, {"time": 0.13}),
    "lasso": (algorithms.lasso, {"penalty": 0.11}),
    "Huber regression": (algorithms.huber, {"threshold": 0.37}),
    "kernel ridge": (algorithms.kernel_ridge, {"bandwidth": 1.9, "penalty": 0.23}),
    "least mean squares on unit inputs": (algorithms.on_unit_inputs, {"strength": 0.7, "scale": 0.6}),
    "ridge on unit inputs": (algorithms.on_unit_inputs, {"strength": 0.8, "scale": 0.6, "algorithm": "ridge"}),
}


def flow(xs, ys, x):
    second = xs.T @ xs
    shrunk = np.eye(len(x)) - scipy.linalg.expm(-0.13 * second)
    return x @ np.linalg.pinv(second) @ shrunk @ xs.T @ ys


def kernel(xs, ys, x):
    settings: dict[str, Any] = {"alpha": 0.23, "kernel": "rbf", "gamma": 1 / (2 * 1.9**2)}
    return KernelRidge(**settings).fit(xs, ys).predict(x[None])[0]


def l1(xs, ys, x):
    return np.array(
        [x @ Lasso(alpha=0.02, fit_intercept=False, tol=1e-13, max_iter=10**5).fit(xs, y).coef_ for y in ys.T]
    )


def huber(xs, ys, x):
    def loss(w, y):
        rest = np.abs(xs @ w - y)
        return np.where(rest <= 0.37, rest**2 / 2, 0.37 * (rest - 0.37 / 2)).sum()

    def slope(w, y):
        return xs.T @ np.clip(xs @ w - y, -0.37, 0.37)

    return np.array([x @ scipy.optimize.minimize(loss, np.zeros(3), (y,), jac=slope, tol=1e-13).x for y in ys.T])


def unit_lms(xs, ys, x):
    weights = np.zeros((xs.shape[1], ys.shape[1]))
    for row, y in zip(xs / np.linalg.norm(xs, axis=1, keepdims=True), ys, strict=True):
        weights += 0.7 * np.outer(row, y - row @ weights)
    return 0.6 * x @ weights


def unit_ridge(xs, ys, x):
    unit = xs / np.linalg.norm(xs, axis=1, keepdims=True)
    return 0.6 * x @ np.linalg.solve(unit.T @ unit + 0.8 * np.eye(3), unit.T @ ys)


PLAIN = {
    "gradient flow": flow, "kernel ridge": kernel, "Huber regression": huber,
    "least mean squares on unit inputs": unit_lms, "ridge on unit inputs": unit_ridge,
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_predictions_equal_another_computation(name):
    algorithm, settings = CALLS[name]
    got = algorithm(PROMPTS, **settings).predictions[0].numpy()
    for prompt in range(len(PROMPTS)):
        xs, ys = PROMPTS.xs[prompt].numpy(), PROMPTS.ys[prompt].numpy()
        for t in range(4 if name == "Huber regression" else 1, 9):  # fewer points have many minima
            np.testing.assert_allclose(got[prompt, t], PLAIN[name](xs[:t], ys[:t], xs[t]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(algorithm(PROMPTS, **settings, at="query").query()[0], torch.tensor(got[:, -1]))


@pytest.mark.parametrize("penalty", [1e-12, 1e-15, 1e-16, 1e-300])
def test_kernel_ridge_of_equal_points_and_little_penalty_averages_their_targets_and_warns(penalty):
    xs, ys = ([[[value] for value in row]] for row in ([0.0, 0.0, 1.0, 0.0], [1.0, 3.0, 0.0, 0.0]))
    prompts = Prompts(torch.tensor(xs, dtype=F64), torch.tensor(ys, dtype=F64))
    with pytest.warns(algorithms.ConditioningWarning, match="kernel_ridge"):
        found = algorithms.kernel_ridge(prompts, bandwidth=1.0, penalty=penalty).predictions[0, 0, :, 0].tolist()
    assert found == pytest.approx([0.0, 1.0, 2 * np.exp(-0.5), 2.0], abs=1e-3 if penalty > 1e-13 else 1e-9)


@pytest.mark.filterwarnings("error")
def test_kernel_ridge_of_separate_points_is_exact_with_little_penalty():
    xs, ys = (torch.tensor(values, dtype=F64)[None, :, None] for values in ([0.0, 1, 3, 7, 2], [1.0, -1, 2, 3, 0]))
    found = algorithms.kernel_ridge(Prompts(xs, ys), bandwidth=1.0, penalty=1e-14, at="query").query().item()
    kernel = np.exp(-np.square(xs[0].numpy() - xs[0, :, 0].numpy()) / 2)
    assert found == pytest.approx(kernel[4, :4] @ np.linalg.solve(kernel[:4, :4], ys[0, :4, 0].numpy()), rel=1e-9)


@pytest.mark.parametrize("name", CALLS)
def test_each_is_recognised_with_its_settings(name):
    algorithm, settings = CALLS[name]
    task = LinearRegression(x_dim=3, n_context=12, noise_std=0.4, inputs="gaussian")
    result = identify(AlgorithmLearner(algorithm, settings), task, n_prompts=96, with_limits=False, progress=False)
    assert result.answer.name == name
    assert result.confidence > 0.9
    for setting, value in result.answer.hyperparameters.items():
        assert value == pytest.approx(settings[setting], rel=1e-3)


@pytest.mark.parametrize("threshold", [1e-4, 0.01, 0.1, 0.5])
def test_the_slope_of_hubers_loss_is_0_also_where_fewer_points_than_dimensions_are_within_the_threshold(threshold):
    prompts = LinearRegression(x_dim=5, n_context=20, inputs="gaussian", noise_std=1.0).sample(50, seed=1, dtype=F64)
    weights = algorithms.huber(prompts, threshold=threshold, at="query", with_weights=True).weights
    assert weights is not None
    residuals = prompts.context.ys - prompts.context.xs @ weights[0, :, 0]
    slope = (prompts.context.xs * residuals.clamp(-threshold, threshold)).sum(1)
    assert slope.abs().max() < 1e-9 * threshold * prompts.context.xs.abs().sum(1).max()


def test_hubers_fit_of_a_prompt_does_not_depend_on_others_and_their_scale():
    alone = Prompts(torch.ones(1, 4, 1, dtype=F64), torch.tensor([0.0, 0.0, 9.0, 0.0], dtype=F64)[None, :, None])
    together = Prompts(alone.xs.expand(2, -1, -1), torch.cat([alone.ys, 1e12 * alone.ys]))
    for prompts in (alone, together):
        assert algorithms.huber(prompts, threshold=0.1, at="query").query()[0, 0].item() == pytest.approx(0.05)
    assert algorithms.huber(alone[:0], threshold=0.1, at="query").query().numel() == 0


def test_huber_that_has_not_converged_is_reported(monkeypatch):
    monkeypatch.setattr("mechicl.algorithms.other_regressions.MAX_REWEIGHTINGS", 2)
    with pytest.warns(algorithms.ConditioningWarning, match=r"threshold=1e-06.* after 2 repetitions"):
        algorithms.huber(PROMPTS, threshold=1e-6)


def test_huber_with_a_large_threshold_is_least_squares_and_bounds_an_outlier_with_a_small_one():
    far = PROMPTS.ys.clone()
    far[:, 0] += 1e6
    outlier = Prompts(PROMPTS.xs, far)
    ols = algorithms.ols(PROMPTS, at="query").query()
    torch.testing.assert_close(algorithms.huber(PROMPTS, threshold=100.0, at="query").query(), ols)
    wide = LinearRegression(x_dim=20, n_context=5, inputs="gaussian").sample(20, seed=0, dtype=F64)
    for t in range(1, 6):
        got = algorithms.huber(wide.prefix(t), threshold=1e6, at="query").query()[0, :, 0]
        least = torch.linalg.pinv(wide.xs[:, :t]) @ wide.ys[:, :t]
        torch.testing.assert_close(got, (wide.xs[:, t, None] @ least)[:, 0, 0], rtol=1e-9, atol=1e-9)
    assert (algorithms.huber(outlier, threshold=0.4, at="query").query() - ols).abs().max() < 10
    assert (algorithms.ols(outlier, at="query").query() - ols).abs().max() > 1e3
