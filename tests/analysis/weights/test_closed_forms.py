"""Closed forms of the best losses, against each other and against simulation."""

import math

import pytest
import torch

from mechicl import algorithms
from mechicl.analysis.weights import linear_attention_optimum, one_step_optimum, preconditioned_gd_optimum
from mechicl.tasks import LinearRegression


def test_default_task_has_the_exact_values():
    optimum = one_step_optimum(LinearRegression())
    assert optimum.step_size == pytest.approx(20 / 33)
    assert optimum.mse / 2 == pytest.approx(0.20623, abs=5e-6)


@pytest.mark.parametrize("inputs", ["uniform", "gaussian", "laplace"])
def test_simulation_agrees(inputs):
    task = LinearRegression(x_dim=4, n_context=12, inputs=inputs, input_scale=0.7, weight_scale=1.5, y_dim=2)
    optimum = one_step_optimum(task)
    prompts = task.sample(200_000, seed=0)
    predictions = algorithms.gradient_descent(prompts, 1, step_size=optimum.step_size, at="query").query()[0]
    errors = (predictions - prompts.query.ys).double().square().mean(-1)
    standard_error = errors.std().item() / math.sqrt(len(errors))
    assert abs(errors.mean().item() - optimum.mse) < 4 * standard_error
    assert algorithms.tuned_step_size(prompts) == pytest.approx(optimum.step_size, rel=0.03)


def test_printed_values_of_the_linear_optimum():
    assert linear_attention_optimum([1.0] * 5, 20) == pytest.approx(1.1538, abs=5e-5)
    assert linear_attention_optimum([10 ** (i / 4) for i in range(5)], 20) == pytest.approx(4.581, abs=5e-4)
    assert linear_attention_optimum([100 ** (i / 4) for i in range(5)], 20) == pytest.approx(25.350, abs=5e-4)


def test_on_isotropic_gaussian_inputs_the_best_step_is_the_best_linear_attention():
    for x_dim, n_context in ((1, 1), (5, 20), (10, 7)):
        step = one_step_optimum(LinearRegression(x_dim=x_dim, n_context=n_context, inputs="gaussian"))
        assert step.mse == pytest.approx(linear_attention_optimum([1.0] * x_dim, n_context))


def test_the_best_preconditioned_step_has_its_loss_on_sampled_prompts():
    eigenvalues = [1.0, 4.0, 16.0]
    task = LinearRegression(
        x_dim=3, n_context=8, inputs="gaussian", eigenvalues=(1.0, 4.0, 16.0), noise_std=2.0, query_noise=False
    )
    best = preconditioned_gd_optimum(eigenvalues, 8, noise_variance=4.0)
    prompts = task.sample(200_000, seed=0, dtype=torch.float64)
    xs, ys = prompts.context
    for eta in (best.step_size, 0.9 * best.step_size, 1.1 * best.step_size):
        weights = eta * (xs * ys).mean(1) / torch.tensor(eigenvalues, dtype=torch.float64)
        errors = ((weights * prompts.query.xs).sum(1) - prompts.query.ys[:, 0]).square()
        spread = 4 * errors.std().item() / len(prompts) ** 0.5
        if eta == best.step_size:
            assert errors.mean().item() == pytest.approx(best.mse, abs=spread)
        else:  # on common prompts the best one is best
            weights = best.step_size / eta * weights
            best_errors = ((weights * prompts.query.xs).sum(1) - prompts.query.ys[:, 0]).square()
            assert errors.mean() > best_errors.mean()
