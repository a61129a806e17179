"""Figures of behaviour draw the numbers of the results."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mechicl import algorithms, viz
from mechicl.analysis import Identification, measure_shifted_losses
from mechicl.analysis.behaviour import FamilyMatch, SpectralLearner
from mechicl.analysis.behaviour.losses import ShiftedLosses
from mechicl.learners import AlgorithmLearner, Learner
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression
from mechicl.viz.behaviour import identified_filters
from tests.viz.traces import lines


def match(name: str, learner: Learner, distances: list[float]) -> FamilyMatch:
    values = torch.tensor(distances, dtype=torch.float64)
    return FamilyMatch(name, learner, {}, 0, values, torch.ones_like(values), values)


def ridge(eigenvalues: Tensor) -> Tensor:
    return 1 / (eigenvalues + 0.3)


def far_too_large(eigenvalues: Tensor) -> Tensor:
    return 50 * torch.ones_like(eigenvalues)


def made() -> Identification:
    matches = [
        match("least squares", AlgorithmLearner(algorithms.ols), [0.1, 0.2]),
        match("of all", SpectralLearner(ridge, "of all", elementwise=False), [0.2, 0.2]),
        match("ridge", SpectralLearner(ridge, "ridge"), [0.5, 1.0]),
        match("diverging", SpectralLearner(far_too_large, "diverging"), [3.0, 5.0]),
    ]
    squares = torch.full((2,), 2.0, dtype=torch.float64)
    eigenvalues = torch.tensor([[0.0, 0.0], [0.2, 0.5], [1.0, 2.0]], dtype=torch.float64)
    return Identification(matches, [], squares, squares, eigenvalues)


def test_filters_are_what_each_learner_leaves_where_eigenvalues_lie():
    figure: Any = identified_filters(made())
    assert [trace.name for trace in figure.data] == ["ridge", "diverging"]  # the others are no function of one
    ((x, y),) = lines(figure, "ridge")
    assert y == pytest.approx([0.3 / (eigenvalue + 0.3) for eigenvalue in x], abs=1e-6)
    assert min(lines(figure, "diverging")[0][1]) == -1.5  # beyond, the others would not be seen
    low, high = torch.quantile(torch.tensor([0.2, 0.5, 1.0, 2.0]), torch.tensor([0.01, 0.99])).tolist()
    assert (figure.layout.shapes[0].x0, figure.layout.shapes[0].x1) == pytest.approx((low, high))
    assert (min(x), max(x)) == pytest.approx((low / 2, 1.3 * high))
    assert len(identified_filters(made(), n_families=1).data) == 1  # type: ignore[attr-defined]


def test_families_are_ordered_with_the_nearest_at_the_top():
    figure: Any = viz.plot(made())
    points = figure.data[0]
    assert list(points.y) == ["least squares", "of all", "ridge", "diverging"]
    assert list(points.x) == pytest.approx([0.075, 0.1, 0.375, 2.0])  # over squared predictions of 2
    assert figure.layout.yaxis.autorange == "reversed"
    assert points.error_x.array[2] == pytest.approx(interval(torch.tensor([0.25, 0.5])).half_width)
    assert points.error_x.arrayminus[2] == pytest.approx(0.9 * 0.375)  # a logarithmic axis has no place for less than 0


def losses() -> ShiftedLosses:
    descent = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.5})
    learners = {"gradient descent": descent, "trained 0": AlgorithmLearner(algorithms.ols), "mine": descent}
    return measure_shifted_losses(learners, LinearRegression(x_dim=3, n_context=4), [0.5, 1.0], n_prompts=20)


def test_shifts_show_half_the_mean_squared_error_of_every_learner():
    shifted = losses()
    figure: Any = viz.shifted_losses({"inputs": shifted, "again": shifted})
    for name, means in zip(("gradient descent", "trained", "mine"), shifted.mean(), strict=True):
        assert lines(figure, name) == [([0.5, 1.0], pytest.approx((means / 2).tolist()))] * 2
    assert [trace.showlegend for trace in figure.data] == [True] * 3 + [False] * 3
