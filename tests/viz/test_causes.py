"""Figures of causal tests show the numbers of the results."""

from functools import cache
from typing import Any

import pytest
import torch

from mechicl import viz
from mechicl.algorithms.stepwise import Hypothesis, QueryDescent, ResidualDescent
from mechicl.analysis.causes import HypothesisTest, Interchange, SubspaceSearch, fit_subspace, sample_sources
from mechicl.analysis.causes.interchange import interchange_each
from mechicl.constructions import gradient_descent
from mechicl.tasks import LinearRegression
from mechicl.viz.elements import COLORS
from tests.viz.traces import heatmaps, lines

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
    few: dict[str, Any] = {"n_fitting": 8, "n_prompts": 8, "iterations": 2, "restarts": 0}
    hypothesis = Hypothesis(ResidualDescent(3, step_size=0.4))
    return fit_subspace(MODEL, hypothesis, "residual", TASK, dims=(1, 2), **few, progress=False)


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
