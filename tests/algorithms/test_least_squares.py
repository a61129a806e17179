import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.algorithms import spectra
from mechicl.prompts import Prompts

from .reference import awkward_prompts, make_prompts, over_prefixes, prompts_of_any_size

quick = settings(max_examples=40)
AWKWARD = awkward_prompts()
awkward = pytest.mark.parametrize("prompts", AWKWARD.values(), ids=AWKWARD.keys())


def lstsq(xs, ys, query):
    return query @ np.linalg.lstsq(xs, ys, rcond=1e-7)[0] if len(xs) else np.zeros(ys.shape[1])


def solve(penalty):
    def predict(xs, ys, query):
        return query @ np.linalg.solve(xs.T @ xs + penalty * np.eye(query.size), xs.T @ ys)

    return predict


def fit_with_pseudo_examples(penalty):
    """Least squares on the context and d more points `(√λ e_i, 0)`."""

    def predict(xs, ys, query):
        more = np.sqrt(penalty) * np.eye(query.size)
        inputs, targets = np.concatenate([xs, more]), np.concatenate([ys, np.zeros((query.size, ys.shape[1]))])
        return query @ np.linalg.lstsq(inputs, targets, rcond=None)[0]

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


@quick
@given(prompts_of_any_size())
def test_ols_is_the_pseudo_inverse(prompts):
    def predict(xs, ys, query):
        return query @ np.linalg.pinv(xs, rcond=1e-7) @ ys if len(xs) else np.zeros(ys.shape[1])

    expected = over_prefixes(prompts, predict)
    conditions = [np.linalg.cond(x[:t].numpy(), -2) for x in prompts.xs for t in range(1, len(x))]
    worst = max((1 / c for c in conditions if c > 1e-7), default=1.0)  # of the well-defined prefixes
    assert_equal(algorithms.ols(prompts), expected, 1e-13 * max(worst, 1e4) ** 2)


def test_ols_recovers_the_weights_once_there_are_as_many_points_as_dimensions():
    prompts = exactly_linear(n_context=9, x_dim=4, y_dim=2)
    errors = algorithms.ols(prompts).step_errors(prompts)[0]
    assert errors[:, 4:].max() < 1e-16
    assert errors[:, :4].min() > 1e-8


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


@quick
@given(prompts_of_any_size(), st.floats(1e-3, 1e3))
def test_ridge_is_least_squares_with_pseudo_examples(prompts, penalty):
    expected = over_prefixes(prompts, fit_with_pseudo_examples(penalty))
    assert_equal(algorithms.ridge(prompts, penalty=penalty), expected, 1e-10)


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


@awkward
@pytest.mark.parametrize(("noise_std", "weight_std"), [(0.5, 1), (0.2, 3.0), (2, 0.5)])
def test_bayes_is_least_squares_with_pseudo_examples_of_the_noise_to_weight_ratio(prompts, noise_std, weight_std):
    expected = over_prefixes(prompts, fit_with_pseudo_examples(noise_std**2 / weight_std**2))
    ours = algorithms.bayes(prompts, noise_std=noise_std, weight_std=weight_std)
    assert_equal(ours, expected, 1e-11)


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


def all_three(prompts, **options):
    yield algorithms.ols(prompts, **options)
    yield algorithms.ridge(prompts, penalty=0.3, **options)
    yield algorithms.bayes(prompts, noise_std=0.4, **options)


@awkward
def test_the_query_alone_is_predicted_as_the_last_of_all_points(prompts):
    atol = 1e-2 if prompts is AWKWARD["eigenvalues from 1 to 1e-10"] else 1e-10
    for alone, all_points in zip(all_three(prompts, at="query"), all_three(prompts), strict=True):
        assert alone.predictions.shape == (1, len(prompts), 1, prompts.y_dim)
        torch.testing.assert_close(alone.query(), all_points.query(), rtol=1e-4, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_predictions_have_the_prompts_dtype_and_are_computed_in_float64(dtype):
    prompts = make_prompts(dtype=dtype)
    for low, high in zip(all_three(prompts), all_three(prompts.to(torch.float64)), strict=True):
        assert low.predictions.dtype == dtype
        assert torch.equal(low.predictions, high.predictions.to(dtype))


def test_without_context_all_three_predict_zero():
    for trajectory in all_three(make_prompts(n_context=0, y_dim=2)):
        assert torch.equal(trajectory.predictions, torch.zeros(1, 3, 1, 2, dtype=torch.float64))


@pytest.mark.parametrize("at", ["points", "query"])
@pytest.mark.parametrize("n_context", [0, 2, 7])
def test_the_gradient_with_respect_to_the_query_is_the_fitted_weights(at, n_context):
    prompts = make_prompts(n_context=n_context)
    query = prompts.query.xs.clone().requires_grad_()
    varied = prompts.with_query(query)
    fits = (lstsq, solve(0.3), fit_with_pseudo_examples(0.16))
    for trajectory, fit in zip(all_three(varied, at=at), fits, strict=True):
        (gradient,) = torch.autograd.grad(trajectory.query().sum(), query)
        for i in range(len(prompts)):
            context = prompts.context.xs[i].numpy(), prompts.context.ys[i].numpy()
            weights = [fit(*context, axis).item() for axis in np.eye(4)]
            np.testing.assert_allclose(gradient[i].numpy(), weights, atol=1e-9)


def test_chunks_give_equal_results(monkeypatch):
    prompts = make_prompts(n_prompts=7, y_dim=2)
    whole = [t.predictions for t in all_three(prompts)]
    monkeypatch.setattr(spectra, "CHUNK_ELEMENTS", 8 * 4 * 4 * 2)
    for expected, chunked in zip(whole, all_three(prompts), strict=True):
        torch.testing.assert_close(chunked.predictions, expected, rtol=1e-11, atol=1e-11)
