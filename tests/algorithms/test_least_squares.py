import functools
import math

import numpy as np
import pytest
import torch

from mechicl import algorithms
from mechicl.prompts import Prompts

from .reference import awkward, awkward_prompts, make_prompts, over_prefixes

AWKWARD, EYE = awkward_prompts(), np.eye(4)


def lstsq(xs, ys, query):
    return query @ np.linalg.lstsq(xs, ys, rcond=1e-7)[0]


def solve(penalty):
    def predict(xs, ys, query):
        return query @ np.linalg.solve(xs.T @ xs + penalty * np.eye(query.size), xs.T @ ys)

    return predict


def assert_equal(trajectory, expected, tolerance=1e-9):
    assert trajectory.steps == (1,)
    assert np.isfinite(expected).all()
    scale = max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(trajectory.predictions[0].detach().numpy(), expected, rtol=0, atol=tolerance * scale)


# ---- ordinary least squares ----


@awkward
def test_ols_is_the_least_squares_solution_of_minimum_norm_on_every_prefix(prompts):
    # the eigenvalues of XᵀX carry the square of X's condition number, here up to 1e5
    tolerance = 1e-3 if prompts.xs.equal(AWKWARD["eigenvalues from 1 to 1e-10"].xs) else 1e-9
    assert_equal(algorithms.ols(prompts), over_prefixes(prompts, lstsq), tolerance)


def test_ols_does_not_depend_on_the_scale_of_inputs():
    prompts = make_prompts(n_context=6)
    plain = algorithms.ols(prompts).predictions
    for scale in (1e-80, 1e-20, 1e20, 1e80):
        scaled = algorithms.ols(Prompts(scale * prompts.xs, prompts.ys)).predictions
        torch.testing.assert_close(scaled, plain, rtol=1e-8, atol=1e-8)


# ---- badly conditioned inputs ----


def augmented(penalty):
    """Ridge as least squares on [X; √penalty I], by numpy."""

    def predict(xs, ys, query):
        rows = np.vstack([xs, math.sqrt(penalty) * np.eye(query.size)])
        return query @ np.linalg.lstsq(rows, np.vstack([ys, np.zeros((query.size, ys.shape[1]))]), rcond=None)[0]

    return predict


@pytest.mark.parametrize("column", [0, 2, 4])
@pytest.mark.parametrize("scale", [1e-6, 1e4, 1e6, 1e7])
@pytest.mark.parametrize("at", ["points", "query"])
def test_an_input_of_another_size_loses_no_digits(column, scale, at):
    generator = torch.Generator().manual_seed(column)
    xs = torch.randn(3, 21, 5, dtype=torch.float64, generator=generator)
    xs[..., column] *= scale
    prompts = Prompts(xs, xs @ torch.randn(5, 2, dtype=torch.float64, generator=generator))
    for penalty in (0.0, 0.1):
        algorithm = algorithms.ols if penalty == 0 else functools.partial(algorithms.ridge, penalty=penalty)
        fitted = algorithm(prompts, at=at, with_weights=True)
        expected = over_prefixes(prompts, augmented(penalty))
        np.testing.assert_allclose(fitted.predictions[0], expected if at == "points" else expected[:, -1:], rtol=1e-7)
        assert fitted.weights is not None
        asked = prompts.xs if at == "points" else prompts.xs[:, -1:]
        torch.testing.assert_close((asked[..., None, :] @ fitted.weights[0])[..., 0, :], fitted.predictions[0])


def test_the_user_is_warned_of_lost_digits():
    xs = make_prompts(n_context=9, x_dim=3).xs
    nearly = torch.cat([xs, xs[..., :1] + 1e-11 * xs[..., 1:2] ** 2], dim=-1)
    prompts = Prompts(nearly, make_prompts(n_context=9, x_dim=3).ys)
    with pytest.warns(algorithms.ConditioningWarning, match=r"OLS on 3 of 3 prompts is right to about [\d.e-]+ of the"):
        algorithms.ols(prompts)
    regularised = algorithms.ridge(prompts, penalty=0.1)  # and this one is as good as ever
    assert_equal(regularised, over_prefixes(prompts, augmented(0.1)), 1e-9)


# ---- ridge ----


@awkward
@pytest.mark.parametrize("penalty", [0.01, 1, 300.0])
def test_ridge_solves_the_penalised_normal_equations_on_every_prefix(prompts, penalty):
    assert_equal(algorithms.ridge(prompts, penalty=penalty), over_prefixes(prompts, solve(penalty)), 1e-11)


@pytest.mark.parametrize("penalty", [5e-324, 1e-18, 1e-15])
@pytest.mark.parametrize("trouble", [name for name in AWKWARD if not name.startswith("eigenvalues")])
def test_a_penalty_below_rounding_noise_gives_ols_and_no_noise(penalty, trouble):
    prompts = AWKWARD[trouble]
    torch.testing.assert_close(
        algorithms.ridge(prompts, penalty=penalty).predictions,
        algorithms.ols(prompts).predictions,
        rtol=1e-9,
        atol=1e-9,
    )


# ---- Bayes ----


@pytest.mark.parametrize("noise_std", [0, 1e-170, 1e-12])
def test_bayes_without_noise_is_ols(noise_std):
    prompts = make_prompts(n_context=6, x_dim=4)
    ours = algorithms.bayes(prompts, noise_std=noise_std).predictions
    torch.testing.assert_close(ours, algorithms.ols(prompts).predictions, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("factor", [EYE, np.random.default_rng(0).normal(size=(4, 4))])
@pytest.mark.parametrize("noise_std", [0.0, 0.3])
def test_bayes_is_the_conditional_mean_of_jointly_normal_targets(noise_std, factor):
    prompts = make_prompts(n_context=6)
    covariance = factor @ factor.T

    def condition(xs, ys, query):
        kernel = 4 * xs @ covariance @ xs.T + noise_std**2 * np.eye(len(xs))
        return 4 * query @ covariance @ xs.T @ np.linalg.pinv(kernel, rcond=1e-10) @ ys

    options = {"noise_std": noise_std, "weight_std": 2.0, "weight_covariance": torch.from_numpy(covariance)}
    trajectory = algorithms.bayes(prompts, **options, with_weights=True)
    assert_equal(trajectory, over_prefixes(prompts, condition), 1e-7)
    assert trajectory.weights is not None
    predictions = torch.einsum("npx,npxy->npy", prompts.xs, trajectory.weights[0])
    torch.testing.assert_close(predictions, trajectory.predictions[0], rtol=1e-9, atol=1e-9)
    plain = algorithms.bayes(prompts, noise_std=noise_std, weight_std=2.0).predictions
    assert torch.allclose(plain, trajectory.predictions) == (factor is EYE)


# ---- a path of penalties ----


@awkward
def test_each_step_of_a_ridge_path_is_ridge_with_its_penalty(prompts):
    path = algorithms.ridge_path(prompts, [0, 2, 5], penalty=4.0)
    assert path.steps == (0, 2, 5)
    for predictions, penalty in zip(path.predictions, (4.0, 1.0, 0.125), strict=True):
        torch.testing.assert_close(predictions, algorithms.ridge(prompts, penalty=penalty).predictions[0])


def test_a_ridge_path_starts_at_each_prefix_own_size():
    prompts = make_prompts(x_dim=3)

    def at_its_size(xs, ys, query):
        second = xs.T @ xs
        penalty = np.linalg.norm(second @ second) ** 0.5
        return query @ np.linalg.solve(second + penalty / 3 * np.eye(3), xs.T @ ys)

    path = algorithms.ridge_path(prompts, 1, shrink=1 / 3)
    np.testing.assert_allclose(path.predictions[0], over_prefixes(prompts, at_its_size), rtol=1e-10, atol=1e-12)


def test_a_ridge_path_ends_at_least_squares():
    prompts = make_prompts()
    end = algorithms.ridge_path(prompts, 200).predictions
    torch.testing.assert_close(end, algorithms.ols(prompts).predictions)
