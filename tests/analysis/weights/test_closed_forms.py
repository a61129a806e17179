"""Closed forms of the best losses, against each other and against simulation."""

import math

import pytest

from mechicl import algorithms
from mechicl.analysis.weights import linear_attention_optimum, one_step_optimum
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
