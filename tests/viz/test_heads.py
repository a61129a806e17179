"""Figures of heads show what the scores hold."""

from typing import Any

import pytest
import torch

from mechicl import viz
from mechicl.analysis.heads import HeadScores
from tests.viz.traces import heatmaps


def made(layers: int = 2, heads: int = 3) -> HeadScores:
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand(2, layers, heads, 5, generator=generator, dtype=torch.float64)
    weights = 2 * torch.rand(layers, heads, generator=generator, dtype=torch.float64) - 1
    scores = {"previous_token": attention[0], "copying": weights, "induction": attention[1]}
    return HeadScores(scores, {"previous_token": 0.125, "copying": 0.0, "induction": 0.25})


def test_the_table_has_a_panel_a_score_with_its_means():
    scores = made()
    figure: Any = viz.head_table(scores)
    names = ("previous_token", "induction", "copying")  # of attention first
    for drawn, name in zip(heatmaps(figure), names, strict=True):
        assert drawn.allclose(scores.mean(name))
    first, second, third = figure.data
    assert float(first.text[1][2]) == round(scores.mean("previous_token")[1, 2].item(), 2)
    assert first.customdata[1][2] == pytest.approx(scores.interval("previous_token", 1, 2).half_width)
    assert first.coloraxis == second.coloraxis != third.coloraxis
    headings = " ".join(annotation.text for annotation in figure.layout.annotations)
    for words in ("chance 0.125", "chance 0.250", "copying", "of the weights"):
        assert words in headings


@pytest.mark.parametrize(
    ("heads", "kinds"),
    [(1, ("copying",)), (12, ("previous_token", "copying", "induction")), (40, ("copying", "induction"))],
)
def test_tables_of_any_size_are_made(heads, kinds):
    scores = made(layers=4, heads=heads)
    figure: Any = viz.head_table(HeadScores({name: scores[name] for name in kinds}, scores.chance), "Any")
    assert [heat.texttemplate is None for heat in figure.data] == [heads == 40] * len(kinds)
    assert figure.layout.width < 2000


def test_a_table_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one score"):
        viz.head_table(HeadScores({}, {}))


def test_compositions_are_shown_from_earlier_to_later_heads():
    scores = torch.rand(3, 2, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    heat: Any = viz.composition_figure(scores, "K").data[0]
    assert (list(heat.y), list(heat.x)) == (["0.0", "0.1", "1.0", "1.1"], ["1.0", "1.1", "2.0", "2.1"])
    for row, earlier in enumerate(heat.y):
        for column, later in enumerate(heat.x):
            (a, h), (b, k) = (map(int, name.split(".")) for name in (earlier, later))
            assert heat.z[row][column] == (scores[a, h, b, k].item() if a < b else None)
    assert heat.zmin == 0
    signed = viz.composition_figure(scores - 0.9, "Q").data[0]
    assert signed.zmin == -signed.zmax < 0  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="the model has only 1"):
        viz.composition_figure(torch.zeros(1, 2, 1, 2), "Q")
