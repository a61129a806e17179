"""Pictures of causal tests show what the results hold."""

from typing import Any

import pytest
import torch

from mechicl import viz
from mechicl.algorithms.stepwise import Hypothesis, QueryDescent, ResidualDescent
from mechicl.analysis.causes import HypothesisTest, Interchange, interchange_each, sample_sources
from mechicl.constructions import gradient_descent
from mechicl.tasks import LinearRegression
from tests.viz.traces import heatmaps


def exchanged() -> list[Interchange]:
    task = LinearRegression(x_dim=2, n_context=5)
    prompts = task.sample(16, seed=0, dtype=torch.float64)
    model = gradient_descent(x_dim=2, n_context=5, step_size=0.4, steps=3)
    hypotheses = [Hypothesis(kind(3, step_size=0.4)) for kind in (ResidualDescent, QueryDescent)]
    return interchange_each(model, hypotheses, prompts, sample_sources(task, prompts, seed=1), progress=False)


def ranked() -> HypothesisTest:
    return HypothesisTest(exchanged(), [((0, 0), (1, 1), (2, 2), (3, 3))] * 2)


def test_cells_stand_at_their_layer_and_intervention():
    result = exchanged()[1]
    figure: Any = viz.plot(result)
    (values,) = heatmaps(figure)
    rows, layers = list(figure.data[0].y), list(figure.data[0].x)
    assert layers == ["0", "1", "2"]
    for cell, r2 in zip(result.cells, result.r2, strict=True):
        shown = values[rows.index(cell.intervention), layers.index(str(cell.layer))]
        assert shown.item() == pytest.approx(r2.mean)
    assert figure.layout.title.text == result.hypothesis


def test_hypotheses_stand_with_what_they_explain():
    result = ranked()
    figure: Any = viz.plot(result)
    assert list(figure.data[0].y) == [test.hypothesis for test in result.tests]
    assert list(figure.data[0].x) == [test.effects.mean for test in result.tests]
    assert "weakest" in figure.data[0].text[1]
