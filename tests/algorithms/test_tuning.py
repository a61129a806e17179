import math

import numpy as np
import pytest
import torch

from mechicl import algorithms
from mechicl.algorithms.tuning import minimize_on_grid
from mechicl.tasks import LinearRegression


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


def test_one_step_on_the_default_task_is_tuned_to_20_over_33():
    """`E Σ ŷ y / E Σ ŷ²` for ten points x ~ U(-1/2, 1/2) in ten dimensions is (25/3) / (55/4)."""
    prompts = LinearRegression().sample(20_000, seed=0)
    tuned = algorithms.tuned_step_size(prompts)
    parts = algorithms.gradient_descent(prompts.to(torch.float64), step_size=1.0, at="query").query()[0]
    residuals = (parts * (prompts.query.ys.double() - tuned * parts)).flatten()
    standard_error = (residuals.std() / math.sqrt(len(prompts)) / parts.square().mean()).item()
    assert 0.001 < standard_error < 0.01
    assert tuned == pytest.approx(20 / 33, abs=3 * standard_error)


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


def test_early_stopping_on_noise_is_found_far_below_the_stable_step_size():
    """With noisy targets the best step size of 200 steps is a tenth of the best one without noise."""
    task = LinearRegression(x_dim=8, n_context=12, noise_std=1.5)
    prompts = task.sample(300, seed=5, dtype=torch.float64)
    grid = np.geomspace(1e-5, 0.05, 50)
    errors = [mean_squared_error(prompts, a, 200) for a in grid]
    best = grid[np.argmin(errors)]
    assert 1e-5 < best < 0.1 * algorithms.tuned_step_size(task.replace(noise_std=0.0).sample(300, seed=5), 200)
    tuned = algorithms.tuned_step_size(prompts, 200)
    assert tuned == pytest.approx(best, rel=0.2)
    assert mean_squared_error(prompts, tuned, 200) <= min(errors) * (1 + 1e-9)


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
