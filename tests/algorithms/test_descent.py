"""Iterations against plain loops and known optimality, and tuned step sizes against scans."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.algorithms import spectra
from mechicl.algorithms.descent_cards import GRADIENT_DESCENT
from mechicl.algorithms.gradient_descent import gradient_descent_filter
from mechicl.algorithms.newton import NEWTON
from mechicl.algorithms.tuning import minimize_on_grid
from mechicl.tasks import LinearRegression
from tests.algorithms.reference import (
    Predict,
    assert_same,
    at_query,
    awkward,
    descend,
    iterate,
    make_prompts,
    over_prefixes,
    prompts_of_any_size,
    transform,
)

# ---- gradient descent ----
anyhow = pytest.mark.filterwarnings("ignore::mechicl.algorithms.DivergenceWarning")  # equal where it diverges, too


@anyhow
@awkward
@pytest.mark.parametrize("step_size", [0.05, 0.3, -0.1])
def test_gradient_descent_equals_the_plain_loop_on_every_prefix_and_step(prompts, step_size):
    steps = [7, 0, 1, 2, 40]
    ours = algorithms.gradient_descent(prompts, steps, step_size=step_size)
    assert ours.steps == tuple(steps)
    assert_same(ours.predictions, [over_prefixes(prompts, descend(k, step_size)) for k in steps], 1e-11)


@anyhow
@settings(max_examples=15)
@given(prompts_of_any_size(), st.integers(0, 12), st.floats(-0.5, 2.0), st.integers(0, 100))
def test_gradient_descent_with_initial_weights_equals_the_plain_loop(prompts, steps, step_size, seed):
    start = np.random.default_rng(seed).standard_normal((prompts.x_dim, prompts.y_dim))
    ours = algorithms.gradient_descent(prompts, [steps], step_size=step_size, initial_weights=torch.from_numpy(start))
    assert_same(ours.predictions, [over_prefixes(prompts, descend(steps, step_size, start), empty=True)], 1e-12)


def test_a_diverged_prediction_is_infinite_or_nan_and_never_looks_converged():
    prompts = make_prompts(scale=1.0)
    with pytest.warns(algorithms.DivergenceWarning, match="100%"):
        far = algorithms.gradient_descent(prompts, 10**6, step_size=100.0, at="query").predictions
    assert not far.isfinite().any()


def test_a_thousand_billion_steps_do_not_leave_the_span_of_a_short_context():
    """Rounding noise in the directions that no point spans would grow in proportion to the steps."""
    prompts = make_prompts(n_context=5, x_dim=10)
    ours = algorithms.gradient_descent(prompts, 10**12, step_size=0.2).predictions[0]
    loops = over_prefixes(prompts, lambda xs, ys, q: q @ (np.linalg.pinv(xs) @ ys))
    np.testing.assert_allclose(ours.numpy(), loops, atol=1e-9)


@pytest.mark.parametrize("eigenvalue", [0.0, 5e-324, 1e-310, 1e-301, 1e-200, 1e-30, 1e-17])
def test_the_filter_of_a_vanishing_eigenvalue_is_steps_times_step_size(eigenvalue):
    value = gradient_descent_filter(torch.tensor([eigenvalue], dtype=torch.float64), 1000, 0.3)
    assert value.item() == pytest.approx(300, rel=1e-12)


@anyhow
@awkward
def test_gd_plus_plus_equals_the_transformation_of_the_tokens(prompts):
    step_sizes, gammas = [0.1, 0.3, -0.2, 0.5, 0.05], [0.02, 0.0, 0.1, -0.05, 0.3]
    ours = algorithms.gd_plus_plus(prompts, [5], step_size=step_sizes, gamma=gammas).predictions
    assert_same(ours, [over_prefixes(prompts, transform(step_sizes, gammas))], 1e-12)


@anyhow
@settings(max_examples=15)
@given(prompts_of_any_size(), st.integers(1, 6), st.floats(-0.3, 0.6), st.floats(-0.2, 0.3))
def test_gd_plus_plus_gives_all_steps_at_once_in_the_requested_order(prompts, steps, step_size, gamma):
    counts = [steps, 0, 1]
    ours = algorithms.gd_plus_plus(prompts, counts, step_size=step_size, gamma=gamma)
    assert ours.steps == tuple(counts)
    assert_same(
        ours.predictions, [over_prefixes(prompts, transform([step_size] * k, [gamma] * k)) for k in counts], 1e-12
    )


def test_many_steps_count_towards_the_size_of_a_chunk(monkeypatch):
    prompts, sizes, decompose = make_prompts(n_prompts=4), [], spectra.PrefixSpectra.decompose

    def counted(xs, ys, at):
        sizes.append(len(xs))
        return decompose(xs, ys, at)

    monkeypatch.setattr(spectra.PrefixSpectra, "decompose", staticmethod(counted))
    monkeypatch.setattr(spectra, "CHUNK_ELEMENTS", 8 * 4 * 50)
    algorithms.gradient_descent(prompts, range(100), step_size=0.1)
    assert sizes == [1] * 4


# ---- first order ----
def chebyshev_residual(eigenvalues: np.ndarray, steps: int) -> np.ndarray:
    """T_k(z(λ)) / T_k(z(0)) by numpy's Chebyshev series."""
    low, high = eigenvalues.min(), eigenvalues.max()
    series = np.polynomial.Chebyshev.basis(steps)
    return series((high + low - 2 * eigenvalues) / (high - low)) / series((high + low) / (high - low))


def chebyshev(steps: int) -> Predict:
    def predict(xs, ys, query):
        values, vectors = np.linalg.eigh(xs.T @ xs)
        progress = (1 - chebyshev_residual(values, steps)) / values
        return query @ vectors @ np.diag(progress) @ vectors.T @ xs.T @ ys

    return predict


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 30])
def test_chebyshev_is_the_polynomial_of_the_full_context(steps):
    prompts = make_prompts(n_context=9)
    found = algorithms.chebyshev(prompts, [steps], at="query").query()[0]
    np.testing.assert_allclose(found, at_query(prompts, chebyshev(steps)), rtol=1e-8, atol=1e-10)


# ---- algorithms.newton ----
@awkward
@pytest.mark.parametrize("alpha", [None, 0.01])
def test_every_step_and_prefix_is_the_matrix_iteration(prompts, alpha):
    steps = [0, 1, 2, 5, 12]
    trajectory = algorithms.newton(prompts, steps, alpha=alpha)
    for k, predictions in zip(steps, trajectory.predictions, strict=True):
        np.testing.assert_allclose(predictions, over_prefixes(prompts, iterate(k, alpha)), rtol=1e-8, atol=1e-10)


def test_the_printed_alpha_is_on_the_boundary_and_refused():
    # Fu et al. 2024, A.1 (eq. 10) and C.3 print 2 / ‖S Sᵀ‖₂, with which the top direction never converges
    prompts = make_prompts(n_prompts=1, n_context=8)
    printed = float(2 / np.linalg.norm(prompts.xs[0, :-1].numpy(), 2) ** 4)
    with pytest.raises(ValueError, match="does not converge"):
        algorithms.newton(prompts, [1], alpha=printed * (1 + 1e-9), at="query")
    below = algorithms.newton(prompts, [60], alpha=0.99 * printed, at="query")
    torch.testing.assert_close(
        below.predictions, algorithms.ols(prompts, at="query").predictions, rtol=1e-8, atol=1e-10
    )


# ---- line search ----
both = pytest.mark.parametrize("algorithm", [algorithms.steepest_descent, algorithms.conjugate_gradient])


def search_lines(steps, *, conjugate):
    """Run the textbook loop on `S w = b`, target by target, until the residual is 0."""

    def predict(xs, ys, query):
        second = xs.T @ xs
        predicted = []
        for b in (xs.T @ ys).T:
            w, r = np.zeros_like(b), b.copy()
            p = r.copy()
            for _ in range(steps):
                if r @ r <= 1e-26 * (b @ b):
                    break
                a = (r @ r) / (p @ second @ p)
                w, before = w + a * p, r @ r
                r = b - second @ w
                p = r + (r @ r) / before * p if conjugate else r
            predicted.append(query @ w)
        return np.array(predicted)

    return predict


@given(prompts=prompts_of_any_size())
def test_conjugate_gradients_end_at_least_squares(prompts):
    reached = algorithms.conjugate_gradient(prompts, 3 * prompts.x_dim).predictions
    torch.testing.assert_close(reached, algorithms.ols(prompts).predictions, rtol=1e-6, atol=1e-6)


@both
@awkward
def test_predictions_stay_finite_on_awkward_contexts(algorithm, prompts):
    trajectory = algorithm(prompts, [0, 1, 50], with_weights=True)
    assert trajectory.predictions.isfinite().all()
    assert trajectory.weights is not None
    assert trajectory.weights.isfinite().all()
    assert (trajectory.predictions[0] == 0).all()


# ---- tuning ----
def mean_squared_error(prompts, step_size, steps):
    """Return the error of the query's prediction by a plain loop over steps, for all prompts at once."""
    xs, ys = (values.double().numpy() for values in prompts.context)
    weights = np.zeros((len(prompts), prompts.x_dim, prompts.y_dim))
    second, cross = np.einsum("pnx,pnz->pxz", xs, xs), np.einsum("pnx,pny->pxy", xs, ys)
    for _ in range(steps):
        weights = weights - step_size * (second @ weights - cross)
    predictions = np.einsum("px,pxy->py", prompts.query.xs.double().numpy(), weights)
    return np.mean((predictions - prompts.query.ys.double().numpy()) ** 2)


def scan(prompts, steps, low, high, n=400):
    """The best step size of a fine grid, and the grid's spacing."""
    grid = np.linspace(low, high, n)
    return grid[np.argmin([mean_squared_error(prompts, a, steps) for a in grid])], grid[1] - grid[0]


@pytest.mark.parametrize("y_dim", [1, 3])
def test_one_step_in_closed_form_is_the_minimum_of_a_brute_force_scan(y_dim):
    prompts = LinearRegression(x_dim=5, n_context=8, y_dim=y_dim).sample(300, seed=1, dtype=torch.float64)
    best, spacing = scan(prompts, 1, 0.0, 2.0)
    tuned = algorithms.tuned_step_size(prompts)
    assert abs(tuned - best) <= spacing
    least = mean_squared_error(prompts, tuned, 1)
    assert least < mean_squared_error(prompts, tuned * (1 + 1e-4), 1)
    assert least < mean_squared_error(prompts, tuned * (1 - 1e-4), 1)


@pytest.mark.parametrize("steps", [2, 12])
@pytest.mark.parametrize("noise_std", [0.0, 1.5])
def test_several_steps_are_tuned_to_the_minimum_of_a_fine_grid(steps, noise_std):
    task = LinearRegression(x_dim=4, n_context=6, y_dim=2, noise_std=noise_std)
    prompts = task.sample(200, seed=3, dtype=torch.float64)
    best, spacing = scan(prompts, steps, 1e-3, 3.0, n=200)
    finer, spacing = scan(prompts, steps, max(1e-4, best - 2 * spacing), best + 2 * spacing, n=100)
    tuned = algorithms.tuned_step_size(prompts, steps)
    assert abs(tuned - finer) <= 2 * spacing
    assert mean_squared_error(prompts, tuned, steps) <= mean_squared_error(prompts, finer, steps) * (1 + 1e-9)


def test_the_stable_step_size_is_the_reciprocal_of_the_largest_eigenvalue():
    prompts = LinearRegression(x_dim=4, n_context=7, inputs="gaussian").sample(30, seed=0, dtype=torch.float64)
    largest = max(np.linalg.eigvalsh(x.T @ x)[-1] for x in prompts.xs[:, :-1].numpy())
    step_size = algorithms.stable_step_size(prompts)
    assert step_size == pytest.approx(1 / largest)
    errors = algorithms.gradient_descent(prompts, [1, 10**6], step_size=step_size).step_errors(prompts)
    assert errors[1, :, -1].max() < 1e-9


# ---- the search ----
@pytest.mark.parametrize("best", [0.6, 0.9, 1.7, 3.9])
def test_the_least_value_between_the_grids_points_is_reached(best):
    value, error = minimize_on_grid(lambda x: (math.log(x / best)) ** 2 + 3, [0.5, 1.0, 2.0, 4.0])
    assert value == pytest.approx(best, rel=1e-6)
    assert error == pytest.approx(3, rel=1e-12)


def test_a_minimum_at_the_end_of_the_grid_or_beyond_is_its_end():
    assert minimize_on_grid(lambda v: (v - 5) ** 2, [0.1, 1.0, 2.0]) == pytest.approx((2.0, 9.0), rel=1e-6)
    assert minimize_on_grid(lambda v: v, [0.0, 1.0, 2.0]) == pytest.approx((0.0, 0.0), abs=1e-6)
    assert minimize_on_grid(lambda v: (v - 5) ** 2, [5.0]) == (5.0, 0.0)


def test_values_that_diverge_count_as_bad_ones():
    def error(value: float) -> float:
        return (value - 1) ** 2 if value < 1.2 else (math.nan if value > 8 else math.inf)

    value, least = minimize_on_grid(error, [0.1, 0.5, 1.1, 3.0, 9.0])
    assert value == pytest.approx(1, abs=1e-6)
    assert least < 1e-12
    steep = minimize_on_grid(lambda v: (v - 1) ** 2 if v < 1.01 else v * 1e200, [0.5, 0.9, 1.5, 2.0])
    assert steep[0] == pytest.approx(1, abs=1e-6)
    assert minimize_on_grid(lambda v: math.nan, [1.0, 2.0])[1] > 1e40


# ---- step sizes for each prefix and each step ----
def by_loop(xs: torch.Tensor, ys: torch.Tensor, factors: list[float]) -> torch.Tensor:
    """Gradient descent from 0 on one prefix with steps of these sizes over the largest eigenvalue."""
    moment = xs.T @ xs
    largest = torch.linalg.eigvalsh(moment)[-1]
    weights = torch.zeros(xs.shape[1], ys.shape[1], dtype=torch.float64)
    for factor in factors:
        weights = weights - factor / largest * (moment @ weights - xs.T @ ys)
    return weights


@pytest.mark.parametrize("factors", [0.7, [0.7, 1.5, 0.2]])
def test_step_sizes_per_prefix_are_in_units_of_each_prefix_stable_one(factors):
    prompts = LinearRegression(x_dim=3, n_context=5, y_dim=2).sample(6, seed=1, dtype=torch.float64)
    found = algorithms.gradient_descent(prompts, [1, 3], step_size=factors, per_prefix=True)
    each = factors if isinstance(factors, list) else [factors] * 3
    for i, n in itertools.product(range(6), range(1, 6)):
        for k, steps in enumerate((1, 3)):
            weights = by_loop(prompts.xs[i, :n], prompts.ys[i, :n], each[:steps])
            torch.testing.assert_close(found.predictions[k, i, n], prompts.xs[i, n] @ weights)
    assert found.predictions[:, :, 0].abs().max() == 0


def test_a_step_size_for_each_step_is_not_relative_without_per_prefix():
    prompts = LinearRegression(x_dim=3, n_context=5).sample(6, seed=1, dtype=torch.float64)
    found = algorithms.gradient_descent(prompts, [2], step_size=[0.1, 0.2]).predictions
    torch.testing.assert_close(
        found, algorithms.gd_plus_plus(prompts, [2], step_size=[0.1, 0.2], gamma=0.0).predictions
    )


@pytest.mark.parametrize("card", [GRADIENT_DESCENT, NEWTON])
def test_tuned_steps_err_less_than_untuned_ones_and_less_from_step_to_step(card):
    task = LinearRegression(x_dim=3, n_context=8)
    prompts = task.sample(512, seed=0, dtype=torch.float64)

    def losses(freedom):
        learner = card.on(prompts, freedom)
        return learner.trajectory(prompts).step_errors(prompts).mean((1, 2))

    tuned, untuned, fixed = (losses(freedom) for freedom in ("tuned per step", "per prefix", "fixed"))
    assert bool((tuned.diff() <= 1e-12).all())
    assert bool((tuned[:4] < untuned[:4]).all())
    assert bool((untuned[:4] < fixed[:4]).all())


def test_newtons_factors_multiply_each_iterate():
    prompts = LinearRegression(x_dim=3, n_context=6).sample(4, seed=2, dtype=torch.float64)
    found = algorithms.newton(prompts, [0, 2], factors=[0.5, 1.2, 1.1], at="query")
    for i, (xs, ys) in enumerate(zip(prompts.context.xs, prompts.context.ys, strict=True)):
        moment = xs.T @ xs
        inverse = 0.5 * moment / (moment @ moment.T).norm()
        first = inverse
        for factor in (1.2, 1.1):
            inverse = factor * (2 * inverse - inverse @ moment @ inverse)
        for k, expected in enumerate((first, inverse)):
            torch.testing.assert_close(found.predictions[k, i, 0], prompts.xs[i, -1] @ expected @ xs.T @ ys)
    with pytest.raises(ValueError, match="factors must be 3 numbers for 2 iterations, got 2"):
        algorithms.newton(prompts, [2], factors=[1.0, 1.0])
