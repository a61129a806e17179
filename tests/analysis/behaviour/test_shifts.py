"""Losses under shifted prompts against losses computed prompt by prompt."""

import numpy as np
import pytest
import torch

from mechicl import algorithms
from mechicl.analysis import measure_shifted_losses
from mechicl.analysis.behaviour.shifts import FOREIGN_INPUTS
from mechicl.learners import AlgorithmLearner
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=3, n_context=4)
STEP = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.4})
HALF = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.2})


@pytest.mark.parametrize("scaled", ["input_scale", "weight_scale"])
def test_losses_are_those_of_prompts_scaled_by_hand(scaled):
    result = measure_shifted_losses({"gd": STEP}, TASK, [0.5, 2.0], scaled=scaled, n_prompts=30, seed=4)
    base = TASK.sample(30, seed=4)
    for i, scale in enumerate((0.5, 2.0)):
        xs, ys = base.xs.double().numpy(), base.ys.double().numpy() * scale
        xs = xs * scale if scaled == "input_scale" else xs
        for j in range(30):
            prediction = 0.4 * sum((xs[j, -1] @ xs[j, t]) * ys[j, t, 0] for t in range(4))
            expected = (prediction - ys[j, -1, 0]) ** 2
            np.testing.assert_allclose(result.squared_errors[0, i, j], expected, rtol=2e-5, atol=1e-7)


def test_the_task_keeps_its_own_scale():
    doubled = measure_shifted_losses({"gd": STEP}, TASK.replace(input_scale=2.0), [1.0], n_prompts=50)
    base = measure_shifted_losses({"gd": STEP}, TASK, [2.0], n_prompts=50)
    torch.testing.assert_close(doubled.squared_errors, base.squared_errors)


def test_ratio_and_its_interval():
    result = measure_shifted_losses({"gd": STEP, "half": HALF}, TASK, [1.0, 1.5], n_prompts=2000)
    means = result.mean()
    for i, ratio in enumerate(result.ratio("half", "gd")):
        assert ratio.mean == pytest.approx((means[1, i] / means[0, i]).item())
        a, b = (result.squared_errors[k, i].numpy() for k in (1, 0))
        generator = np.random.default_rng(0)
        draws = [generator.integers(0, 2000, 2000) for _ in range(400)]
        bootstrap = np.std([a[d].mean() / b[d].mean() for d in draws])
        assert ratio.half_width == pytest.approx(1.96 * bootstrap, rel=0.2)


def test_the_table_has_a_row_for_each_learner_and_scale():
    task = TASK.replace(inputs=FOREIGN_INPUTS)
    result = measure_shifted_losses({"gd": STEP, "half": HALF}, task, [0.5, 1.0], n_prompts=20)
    table = result.to_dataframe()
    assert list(table["learner"]) == ["gd", "gd", "half", "half"]
    assert list(table["scale"]) == [0.5, 1.0, 0.5, 1.0]
    assert table["squared_errors_high"][2] == pytest.approx(interval(result.squared_errors[1, 0]).high)
