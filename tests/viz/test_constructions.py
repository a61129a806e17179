"""Figures of fits draw the numbers of the results."""

from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from torch import Tensor

from mechicl import algorithms, constructions, viz
from mechicl.analysis import FamilyMatch, Identification, SpectralLearner, identify, interpolate
from mechicl.analysis.weights.connectivity import LossPath
from mechicl.learners import AlgorithmLearner, Learner
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression
from mechicl.viz.page import plot

TASK = LinearRegression(x_dim=3, n_context=5)
EIGENVALUES = torch.tensor([[0.0, 0.2, 1.0], [0.0, 0.5, 2.0]], dtype=torch.float64)


def lines(figure: Any) -> dict[str, list]:
    return {trace.name: list(trace.y) for trace in figure.data if trace.name}


def path(n_alphas: int, kind: str = "rescaled") -> LossPath:
    a, b = (constructions.gd_plus_plus(x_dim=3, n_context=5, step_size=s, gamma=0.2, steps=2) for s in (0.5, 1.0))
    prompts = TASK.sample(30, seed=0, dtype=torch.float64)
    return interpolate(a, b, prompts, n_alphas=n_alphas, kind=kind)  # type: ignore[arg-type]


def match(name: str, learner: Learner, distances: list[float]) -> FamilyMatch:
    values = torch.tensor(distances, dtype=torch.float64)
    return FamilyMatch(name, learner, {}, 0, values, torch.ones_like(values), values)


def ridge(eigenvalues: Tensor) -> Tensor:
    return 1 / (eigenvalues + 0.3)


def three_steps(eigenvalues: Tensor) -> Tensor:
    return (1 - (1 - 0.4 * eigenvalues) ** 3) / eigenvalues


def far_too_large(eigenvalues: Tensor) -> Tensor:
    return 50 * torch.ones_like(eigenvalues)


def relative_to_the_largest(eigenvalues: Tensor) -> Tensor:
    return eigenvalues / eigenvalues.amax(-1, keepdim=True)


def made() -> Identification:
    matches = [
        match("least squares", AlgorithmLearner(algorithms.ols), [0.1, 0.2]),
        match("of all", SpectralLearner(relative_to_the_largest, "of all", elementwise=False), [0.2, 0.2]),
        match("ridge", SpectralLearner(ridge, "ridge"), [0.0, 0.6]),
        match("three steps", SpectralLearner(three_steps, "three steps"), [1.0, 2.0]),
        match("diverging", SpectralLearner(far_too_large, "diverging"), [3.0, 5.0]),
    ]
    squares = torch.full((2,), 2.0, dtype=torch.float64)
    return Identification(matches, [], squares, squares, EIGENVALUES)


@pytest.fixture(scope="module")
def identified() -> Identification:
    model = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.6})
    return identify(model, TASK, steps=1, n_prompts=120, progress=False)


def test_paths_are_mean_squared_errors_with_bands_of_their_intervals():
    paths = {"rescaled": path(5), "lifted": path(5, "lifted")}
    figure: Any = viz.connectivity_paths(paths)
    drawn = lines(figure)
    assert list(drawn) == ["rescaled", "lifted"]
    for name, each in paths.items():
        assert drawn[name] == pytest.approx(each.squared_errors.mean(-1).tolist(), rel=1e-12)
    band, line = figure.data[:2]
    assert list(line.x) == [0, 0.25, 0.5, 0.75, 1]
    found = [interval(errors) for errors in paths["rescaled"].squared_errors]
    assert list(band.y) == pytest.approx([i.high for i in found] + [i.low for i in reversed(found)])
    assert figure.layout.yaxis.type == "log"


def test_paths_with_other_alphas_and_no_paths_are_errors():
    with pytest.raises(ValueError, match="same alphas"):
        viz.connectivity_paths({"a": path(3), "b": path(5)})
    with pytest.raises(ValueError, match="same alphas, got \\[\\]"):
        viz.connectivity_paths({})


def test_filters_are_what_each_learner_leaves():
    figure: Any = viz.identified_filters(made())
    drawn = {trace.name: trace for trace in figure.data}
    assert list(drawn) == ["ridge", "three steps", "diverging"]  # the others are no function of one eigenvalue
    eigenvalues = torch.tensor(drawn["ridge"].x, dtype=torch.float64)
    assert torch.tensor(drawn["ridge"].y).double().allclose(0.3 / (eigenvalues + 0.3), atol=1e-6)
    left = torch.tensor(drawn["three steps"].y).double()
    assert left.allclose((1 - 0.4 * eigenvalues) ** 3, atol=1e-6)
    assert min(drawn["diverging"].y) == -1.5  # beyond, the others would not be seen
    assert figure.layout.xaxis.type == "log"
    assert list(lines(viz.identified_filters(made(), n_families=1))) == ["ridge"]


def test_filters_are_shown_where_the_positive_eigenvalues_lie():
    figure: Any = viz.identified_filters(made())
    shade = figure.layout.shapes[0]
    low, high = torch.quantile(torch.tensor([0.2, 0.5, 1.0, 2.0]), torch.tensor([0.01, 0.99])).tolist()
    assert (shade.x0, shade.x1) == pytest.approx((low, high))
    assert (min(figure.data[0].x), max(figure.data[0].x)) == pytest.approx((low / 2, 1.3 * high))


def test_the_filter_of_one_step_is_a_line(identified):
    assert identified.best.name == "gradient descent, 1 step"
    figure: Any = viz.identified_filters(identified)
    trace = figure.data[0]
    assert trace.name == identified.best.name
    assert list(trace.y) == pytest.approx([max(1 - 0.6 * x, -1.5) for x in trace.x], abs=1e-6)


def test_families_are_ordered_with_the_nearest_at_the_top():
    figure: Any = viz.identified_families(made())
    points = figure.data[0]
    assert list(points.y) == ["least squares", "of all", "ridge", "three steps", "diverging"]
    assert list(points.x) == pytest.approx([0.075, 0.1, 0.15, 0.75, 2.0])  # over squared predictions of 2
    assert figure.layout.yaxis.autorange == "reversed"
    spread = interval(torch.tensor([0.5, 1.0])).half_width
    assert points.error_x.array[3] == pytest.approx(spread)
    assert points.error_x.array[1] == pytest.approx(0)
    assert points.error_x.arrayminus[3] == pytest.approx(0.9 * 0.75)  # a logarithmic axis has no place for less than 0


def test_families_show_what_was_identified(identified):
    figure: Any = viz.identified_families(identified)
    points = figure.data[0]
    assert list(points.y) == [m.name for m in identified.matches]
    assert list(points.x) == pytest.approx([identified.distance(m).mean for m in identified.matches])
    assert list(points.x[2:]) == sorted(points.x[2:])  # the first ones are alike up to rounding
    highs = [x + more for x, more in zip(points.x, points.error_x.array, strict=True)]
    assert highs == pytest.approx([identified.distance(m).high for m in identified.matches])


def test_figures_are_saved_as_html(tmp_path: FilePath, identified):
    figures: list[Any] = [viz.connectivity_paths({"a": path(3)}), *(draw(identified) for draw in
               (viz.identified_filters, viz.identified_families))]  # fmt: skip
    for i, figure in enumerate(figures):
        figure.write_html(tmp_path / f"{i}.html", include_plotlyjs=False)
        assert figure.layout.title.text in (tmp_path / f"{i}.html").read_text()
        assert plot(figure)
