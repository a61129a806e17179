import math

import numpy as np
import pytest
import torch

from mechicl import algorithms
from mechicl.prompts import Prompts

from .reference import awkward_prompts, make_prompts, over_prefixes

AWKWARD = awkward_prompts()
awkward = pytest.mark.parametrize("prompts", AWKWARD.values(), ids=AWKWARD.keys())


def lstsq(xs, ys, query):
    return query @ np.linalg.lstsq(xs, ys, rcond=1e-7)[0] if len(xs) else np.zeros(ys.shape[1])


def solve(penalty):
    def predict(xs, ys, query):
        return query @ np.linalg.solve(xs.T @ xs + penalty * np.eye(query.size), xs.T @ ys)

    return predict


def assert_equal(trajectory, expected, tolerance=1e-9):
    assert trajectory.steps == (1,)
    assert np.isfinite(expected).all()
    scale = max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(trajectory.predictions[0].detach().numpy(), expected, rtol=0, atol=tolerance * scale)


def exactly_linear(n_context, x_dim, y_dim=1):
    prompts = make_prompts(n_context=n_context, x_dim=x_dim)
    weights = torch.randn(3, x_dim, y_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return Prompts(prompts.xs, prompts.xs @ weights)


# ---- ordinary least squares ----


@awkward
def test_ols_is_the_least_squares_solution_of_minimum_norm_on_every_prefix(prompts):
    # the eigenvalues of XᵀX carry the square of X's condition number, here up to 1e5
    tolerance = 1e-3 if prompts is AWKWARD["eigenvalues from 1 to 1e-10"] else 1e-9
    assert_equal(algorithms.ols(prompts), over_prefixes(prompts, lstsq), tolerance)


def test_ols_ignores_a_direction_that_is_only_rounding_noise():
    prompts = exactly_linear(n_context=6, x_dim=3)
    prompts.xs[..., 2] = prompts.xs[..., 0] * (1 + 1e-12)
    assert_equal(algorithms.ols(prompts), over_prefixes(prompts, lstsq))


def test_ols_does_not_depend_on_the_scale_of_inputs():
    prompts = make_prompts(n_context=6)
    plain = algorithms.ols(prompts).predictions
    for scale in (1e-80, 1e-20, 1e20, 1e80):
        scaled = algorithms.ols(Prompts(scale * prompts.xs, prompts.ys)).predictions
        torch.testing.assert_close(scaled, plain, rtol=1e-8, atol=1e-8)


# ---- ridge ----


@awkward
@pytest.mark.parametrize("penalty", [0.01, 1, 300.0])
def test_ridge_solves_the_penalised_normal_equations_on_every_prefix(prompts, penalty):
    assert_equal(algorithms.ridge(prompts, penalty=penalty), over_prefixes(prompts, solve(penalty)), 1e-11)


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-40, 1e-18, 1e-15])
@pytest.mark.parametrize("trouble", [name for name in AWKWARD if not name.startswith("eigenvalues")])
def test_a_penalty_below_rounding_noise_gives_ols_and_no_noise(penalty, trouble):
    prompts = AWKWARD[trouble]
    torch.testing.assert_close(
        algorithms.ridge(prompts, penalty=penalty).predictions,
        algorithms.ols(prompts).predictions,
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("penalty", [0, -1.0, math.nan, math.inf])
def test_a_penalty_that_is_not_positive_is_refused(penalty):
    with pytest.raises(ValueError, match="penalty must be positive"):
        algorithms.ridge(make_prompts(), penalty=penalty)


# ---- Bayes ----


def test_bayes_is_the_posterior_mean_of_the_joint_normal_distribution():
    prompts = make_prompts(n_context=5, x_dim=3)

    def condition(xs, ys, query):
        covariance = 4.0 * xs @ xs.T + 0.09 * np.eye(len(xs))  # of the context's targets
        return 4.0 * query @ xs.T @ np.linalg.solve(covariance, ys)

    assert_equal(algorithms.bayes(prompts, noise_std=0.3, weight_std=2.0), over_prefixes(prompts, condition))


@pytest.mark.parametrize("noise_std", [0, 1e-170, 1e-12])
def test_bayes_without_noise_is_ols(noise_std):
    prompts = make_prompts(n_context=6, x_dim=4)
    ours = algorithms.bayes(prompts, noise_std=noise_std).predictions
    torch.testing.assert_close(ours, algorithms.ols(prompts).predictions, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("noise_std", "weight_std"), [(-0.1, 1.0), (math.nan, 1.0), (math.inf, 1.0), (0.1, 0.0), (0.1, -1.0), (0, math.inf)]
)
def test_deviations_out_of_range_are_refused(noise_std, weight_std):
    with pytest.raises(ValueError, match="_std must be"):
        algorithms.bayes(make_prompts(), noise_std=noise_std, weight_std=weight_std)


# ---- all three ----
