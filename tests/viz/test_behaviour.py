"""Figures of behaviour, layers and causal tests draw the numbers of the results."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from mechicl import algorithms, viz
from mechicl.algorithms.stepwise import Hypothesis, QueryDescent, ResidualDescent
from mechicl.analysis import Identification, Match, measure_shifted_losses
from mechicl.analysis.behaviour import SpectralLearner
from mechicl.analysis.behaviour.families import FamilyMatch
from mechicl.analysis.behaviour.growth import fit_growth
from mechicl.analysis.behaviour.losses import ShiftedLosses
from mechicl.analysis.causes import (
    HypothesisTest,
    Interchange,
    SubspaceFit,
    SubspaceSearch,
    fit_subspace,
    sample_sources,
)
from mechicl.analysis.causes.interchange import interchange_each
from mechicl.analysis.layers.probes import ProbeResult
from mechicl.constructions import gradient_descent
from mechicl.learners import AlgorithmLearner, Learner
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression
from mechicl.viz.behaviour import identified_filters, match_curve
from mechicl.viz.elements import COLORS
from tests.viz.traces import heatmaps, lines

VALUES = torch.tensor([[0.9, 0.5, 0.1], [0.2, 0.8, 0.3], [0.1, 0.4, 0.7]], dtype=torch.float64)
MATCH = Match("layer", "Newton", (0, 1, 2), (1, 4, 9), VALUES[..., None] + torch.tensor([-0.05, 0.0, 0.05]), "errors")


def match(name: str, learner: Learner, distances: list[float]) -> FamilyMatch:
    values = torch.tensor(distances, dtype=torch.float64)
    return FamilyMatch(name, learner, {}, 0, values, torch.ones_like(values), values, values)


def ridge(eigenvalues: Tensor) -> Tensor:
    return 1 / (eigenvalues + 0.3)


def identification() -> Identification:
    matches = [
        match("least squares", AlgorithmLearner(algorithms.ols), [0.1, 0.2]),
        match("of all", SpectralLearner(ridge, "of all", elementwise=False), [0.2, 0.2]),
        match("ridge", SpectralLearner(ridge, "ridge"), [0.5, 1.0]),
        match("diverging", SpectralLearner(lambda e: 50 * torch.ones_like(e), "diverging"), [3.0, 5.0]),
    ]
    squares = torch.full((2,), 2.0, dtype=torch.float64)
    eigenvalues = torch.tensor([[0.0, 0.0], [0.2, 0.5], [1.0, 2.0]], dtype=torch.float64)
    return Identification(matches, [], squares, squares, eigenvalues)


def test_filters_are_drawn_over_the_eigenvalues_of_the_prompts():
    figure: Any = identified_filters(identification())
    assert [trace.name for trace in figure.data] == ["ridge", "diverging"]  # the others are not functions of one
    ((x, y),) = lines(figure, "ridge")
    assert y == pytest.approx([0.3 / (eigenvalue + 0.3) for eigenvalue in x], abs=1e-6)
    assert min(lines(figure, "diverging")[0][1]) == -1.5  # below, it would hide the others
    low, high = torch.quantile(torch.tensor([0.2, 0.5, 1.0, 2.0]), torch.tensor([0.01, 0.99])).tolist()
    assert (figure.layout.shapes[0].x0, figure.layout.shapes[0].x1) == pytest.approx((low, high))
    assert (min(x), max(x)) == pytest.approx((low / 2, 1.3 * high))


def test_families_are_ordered_with_the_nearest_at_the_top():
    figure: Any = viz.plot(identification())
    points = figure.data[0]
    assert list(points.y) == ["least squares", "of all", "ridge", "diverging"]
    assert list(points.x) == pytest.approx([0.075, 0.1, 0.375, 2.0])  # over squared predictions of 2
    assert figure.layout.yaxis.autorange == "reversed"
    assert points.error_x.array[2] == pytest.approx(interval(torch.tensor([0.25, 0.5])).half_width)
    assert points.error_x.arrayminus[2] == pytest.approx(0.9 * 0.375)  # a logarithmic axis has no place for less than 0


def test_a_family_without_any_distance_is_drawn_at_the_floor():
    exact, rest = match("least squares", AlgorithmLearner(algorithms.ols), [0.0, 0.0]), identification()
    points: Any = viz.plot(replace(rest, matches=[exact, *rest.matches[1:]]))
    assert points.data[0].x[0] == 1e-8
    assert 10 ** points.layout.xaxis.range[0] == pytest.approx(0.5e-8)


def shifted() -> ShiftedLosses:
    descent = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.5})
    learners = {"gradient descent": descent, "trained 0": AlgorithmLearner(algorithms.ols), "mine": descent}
    return measure_shifted_losses(learners, LinearRegression(x_dim=3, n_context=4), [0.5, 1.0], n_prompts=20)


@pytest.mark.parametrize("half", [False, True])
def test_shifts_show_the_mean_squared_error_of_every_learner(half: bool):
    losses = shifted()
    figure: Any = viz.shifted_losses({"inputs": losses, "again": losses}, half=half)
    for name, means in zip(("gradient descent", "trained", "mine"), losses.mean(), strict=True):
        assert lines(figure, name) == [([0.5, 1.0], pytest.approx((means / (1 + half)).tolist()))] * 2
    assert [trace.showlegend for trace in figure.data] == [True] * 3 + [False] * 3


def test_a_match_shows_means_and_outlines_the_best():
    figure: Any = viz.plot(MATCH)
    heatmap, best = figure.data
    assert torch.tensor(heatmap.z).allclose(VALUES.T.float())
    assert (list(heatmap.x), list(heatmap.y)) == (["0", "1", "2"], ["1", "4", "9"])
    assert list(best.y) == ["1", "4", "9"]


def test_the_curve_marks_matches_at_the_edge_and_draws_the_better_fit():
    growth = fit_growth([0, 1, 2, 3, 4], [1, 4, 16, 64, 256])
    figure: Any = match_curve({"Newton": MATCH}, {"Newton": growth})
    inside, edge, fit = figure.data
    assert (list(inside.y), inside.marker.symbol, inside.showlegend) == ([4], "circle", True)
    assert (list(edge.y), edge.marker.symbol, edge.showlegend) == ([1, 9], "circle-open", False)
    assert "exponential" in fit.name
    assert list(fit.y) == pytest.approx([1, 4, 16, 64, 256])


def test_the_probe_heatmap_is_selectivity():
    errors = torch.rand(2, 3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions, ones = ("x1", "y1", "x2", "y2", "query"), torch.ones(2, 1, 5, 4).double()
    figure: Any = viz.plot(ProbeResult(("a", "b"), positions, errors, ones, 1 - 0.25 * errors), quantity="b")
    assert heatmaps(figure)[0].float().allclose(1 - 1.25 * errors[1].float().mean(-1))
    assert torch.tensor(figure.data[0].customdata)[..., 0].allclose(1 - errors[1].float().mean(-1))


# ---- figures of causal tests show the numbers of the results ----
ROWS = {"query skips": (0.0, 0.0), "context skips": (1.0, 1.0), "query does not read": (1.0, 0.0)}  # from, to
TASK = LinearRegression(x_dim=2, n_context=5)
MODEL = gradient_descent(x_dim=2, n_context=5, step_size=0.4, steps=3)


@cache
def exchanged() -> list[Interchange]:
    prompts = TASK.sample(16, seed=0, dtype=torch.float64)
    hypotheses = [Hypothesis(kind(3, step_size=0.4)) for kind in (ResidualDescent, QueryDescent)]
    return interchange_each(MODEL, hypotheses, prompts, sample_sources(TASK, prompts, seed=1), progress=False)


def ranked() -> HypothesisTest:
    return HypothesisTest(exchanged(), [((0, 0), (1, 1), (2, 2), (3, 3))] * 2)


@cache
def searched() -> SubspaceSearch:
    few = SubspaceFit(n_fitting=8, n_prompts=8, iterations=2, restarts=0)
    hypothesis = Hypothesis(ResidualDescent(3, step_size=0.4))
    return fit_subspace(MODEL, hypothesis, "residual", TASK, dims=(1, 2), fit=few, progress=False)


def test_cells_are_at_their_layer_and_intervention():
    result = exchanged()[1]
    figure: Any = viz.plot(result)
    (values,) = heatmaps(figure)
    rows, layers = list(figure.data[0].y), list(figure.data[0].x)
    assert layers == ["0", "1", "2"]
    for cell, r2 in zip(result.cells, result.r2, strict=True):
        shown = values[rows.index(cell.intervention), layers.index(str(cell.layer))]
        assert shown.item() == pytest.approx(r2.mean)
    assert figure.layout.title.text == result.hypothesis


def test_hypotheses_are_shown_with_the_effects_that_they_explain():
    result = ranked()
    figure: Any = viz.plot(result)
    assert list(figure.data[0].y) == [test.hypothesis for test in result.tests]
    assert list(figure.data[0].x) == [test.effects.mean for test in result.tests]
    assert "weakest" in figure.data[0].text[1]


def test_dots_are_counterfactuals_of_model_and_hypothesis():
    result = exchanged()[1]
    figure: Any = viz.counterfactual_scatter(result, ["query exchanged", "context frozen"])
    titles = [note.text for note in figure.layout.annotations]
    assert titles == ["query exchanged", "context frozen"]
    dots = [trace for trace in figure.data if trace.mode == "markers"]
    cells = [i for i, cell in enumerate(result.cells) if cell.intervention in titles]
    assert len(dots) == len(cells)
    limit = max(figure.layout.xaxis.range)
    for trace in dots:
        (i,) = (i for i in cells if trace.hovertemplate.startswith(f"{result.cells[i]}<br>"))
        assert list(trace.x) == pytest.approx(result.expected[i, 0].clamp(-limit, limit).tolist())
        assert list(trace.y) == pytest.approx(result.predictions[i, 0].clamp(-limit, limit).tolist())


def test_arrows_have_the_effect_of_cutting_them():
    result = exchanged()[1]
    figure: Any = viz.causal_graph(result)
    arrows = [note for note in figure.layout.annotations if note.showarrow]
    cut = [i for i, cell in enumerate(result.cells) if cell.intervention in ROWS]
    assert len(arrows) == len(cut) == 9
    texts = {trace.hovertext.split(":")[0]: trace.text[0] for trace in figure.data if trace.hovertext}
    for i in cut:
        ends = (result.sources[i] - result.base).square().mean()
        moved = ((result.predictions[i] - result.base).square().mean() / ends).item()
        assert texts[str(result.cells[i])] == (f"{moved:.2f}" if moved < 10 else "> 10")
        between = (result.cells[i].layer, result.cells[i].to_layer, *ROWS[result.cells[i].intervention])
        (arrow,) = (arrow for arrow in arrows if (arrow.ax, arrow.x, arrow.ay, arrow.y) == between)
        assert arrow.arrowcolor == (COLORS["trained"] if result.r2[i].mean >= 0.9 else COLORS["interpolated"])


def test_subspaces_are_drawn_with_their_complements_and_controls():
    result = searched()
    figure: Any = viz.plot(result)
    for s, search in enumerate(result.searches):
        by_layer = [result.curves(s, i) for i in range(2)]
        for rest, name in enumerate((search, f"{search}, its rest")):
            drawn = lines(figure, name)
            assert [x for x, _ in drawn] == [["1", "2"]] * 2
            assert [y for _, y in drawn] == [[r2.mean for r2 in layer[rest]] for layer in by_layer]
    assert "residual" in figure.layout.title.text
