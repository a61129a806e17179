"""Figures draw the numbers that they are given."""

from typing import Any

import pytest
import torch
from mechicl.analysis.one_layer import RollOut

from mechicl import algorithms, constructions
from mechicl.analysis import interpolate, losses_over_scales, read_weight_products
from mechicl.analysis.dynamics.snapshots import AlignmentOverTraining
from mechicl.learners import AlgorithmLearner
from mechicl.tasks import LinearRegression
from mechicl.viz import (
    alignment_over_training,
    interpolation_paths,
    learning_curves,
    roll_outs,
    shifted_losses,
    weight_products_figure,
)


def lines(figure) -> dict[str, list]:
    return {trace.name: list(trace.y) for trace in figure.data if trace.name}


def test_learning_curves_show_half_the_loss():
    curve = {"eval_step": [0, 10, 20], "eval_loss": [[2.0, 3.0], [1.0, 1.5], [0.5, 0.8]]}
    drawn = lines(learning_curves(curve, [7, 8], gd_mse=0.4))
    assert drawn["seed 7"] == pytest.approx([0.5, 0.25])  # step 0 has no place on a logarithmic axis
    assert drawn["seed 8"] == pytest.approx([0.75, 0.4])
    assert drawn["gradient descent, tuned"] == pytest.approx([0.2, 0.2])


def test_alignment_shows_means_over_seeds():
    values = torch.tensor([[0.0, 1.0], [0.8, 1.0]])
    drawn = lines(alignment_over_training(AlignmentOverTraining((0, 100), values, values, values, values)))
    assert drawn["sensitivity cosine"] == pytest.approx([0.5, 0.9])


def test_paths_and_shifts_show_half_the_mean_squared_error():
    task = LinearRegression(x_dim=3, n_context=4)
    prompts = task.sample(20, seed=0, dtype=torch.float64)
    a = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.5)
    b = constructions.gradient_descent(x_dim=3, n_context=4, step_size=1.0)
    path = interpolate(a, b, prompts, n_alphas=3)
    drawn = lines(interpolation_paths([path], [path]))
    assert drawn["rescaled"] == pytest.approx((path.squared_errors.mean(-1) / 2).tolist())
    learners = {"gradient descent": a, "trained 0": b, "interpolated 0": AlgorithmLearner(algorithms.ols)}
    losses = losses_over_scales(learners, task, [0.5, 1.0], n_prompts=20)
    drawn = lines(shifted_losses({"inputs": losses}))
    for name, learner in (("gradient descent", 0), ("trained", 1), ("interpolated", 2)):
        assert drawn[name] == pytest.approx((losses.mean()[learner] / 2).tolist())


def test_weights_are_drawn_entry_by_entry():
    products = read_weight_products(constructions.gradient_descent(x_dim=2, n_context=4, step_size=0.5))
    figure: Any = weight_products_figure(products, products, ["x1", "x2", "y1"])
    assert [list(row) for row in figure.data[0].z] == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert [list(row) for row in figure.data[3].z] == [[0, 0, 0], [0, 0, 0], [0, 0, -0.5]]


def test_what_diverged_leaves_a_gap():
    losses = torch.tensor([1.0, 0.5, 1e9, float("nan")], dtype=torch.float64)
    drawn = lines(roll_outs([RollOut(0.75, losses[:, None], losses[:, None], losses)]))
    assert drawn["trained layer"] == [0.5, 0.25, None, None]
