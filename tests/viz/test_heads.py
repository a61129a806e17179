"""Figures of heads show what the scores hold."""

from typing import Any

import pytest
import torch

from mechicl import viz as pictures
from mechicl.analysis import HeadScores

viz: Any = pictures  # plotly's types know too little of a figure's traces


def made(layers: int = 2, heads: int = 3) -> HeadScores:
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand(2, layers, heads, 5, generator=generator, dtype=torch.float64)
    weights = 2 * torch.rand(layers, heads, generator=generator, dtype=torch.float64) - 1
    scores = {"previous_token": attention[0], "copying": weights, "induction": attention[1]}
    return HeadScores(scores, {"previous_token": 0.125, "copying": 0.0, "induction": 0.25})


def test_the_table_has_a_panel_a_score_with_its_means():
    scores = made()
    fig = viz.head_table(scores)
    first, second, third = fig.data
    for heat, name in ((first, "previous_token"), (second, "induction"), (third, "copying")):
        assert torch.tensor(heat.z, dtype=torch.float64).allclose(scores.mean(name))
        assert (list(heat.x), list(heat.y)) == (["0", "1", "2"], ["0", "1"])
        assert [[float(text.replace("−", "-")) for text in row] for row in heat.text] == [
            [round(value, 2) for value in row] for row in scores.mean(name).tolist()
        ]
    assert first.customdata[1][2] == pytest.approx(scores.interval("previous_token", 1, 2).half_width)
    assert first.coloraxis == second.coloraxis == "coloraxis"
    assert third.coloraxis == "coloraxis2"
    assert (fig.layout.coloraxis.cmin, fig.layout.coloraxis.cmax) == (0, 1)
    assert (fig.layout.coloraxis2.cmin, fig.layout.coloraxis2.cmax) == (-1, 1)
    headings = " ".join(annotation.text for annotation in fig.layout.annotations)
    for text in ("previous token", "chance 0.125", "induction", "chance 0.250", "copying", "of the weights"):
        assert text in headings


@pytest.mark.parametrize(
    ("heads", "kinds"),
    [
        (1, ("previous_token",)),
        (1, ("copying",)),
        (12, ("previous_token", "copying", "induction")),
        (40, ("copying", "induction")),
    ],
)
def test_tables_of_any_size_are_made(heads, kinds):
    scores = made(layers=1 if heads == 40 else 4, heads=heads)
    fig = viz.head_table(HeadScores({name: scores[name] for name in kinds}, scores.chance), "Any")
    assert [heat.texttemplate is None for heat in fig.data] == [heads == 40] * len(kinds)
    assert fig.layout.title.text == "Any"
    assert fig.layout.width < 2000


def test_a_table_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one score"):
        viz.head_table(HeadScores({}, {}))


def test_compositions_are_shown_from_earlier_to_later_heads():
    scores = torch.rand(3, 2, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (heat,) = viz.composition_figure(scores, "K").data
    assert list(heat.y) == ["0.0", "0.1", "1.0", "1.1"]
    assert list(heat.x) == ["1.0", "1.1", "2.0", "2.1"]
    for row, earlier in enumerate(heat.y):
        for column, later in enumerate(heat.x):
            (a, h), (b, k) = (map(int, name.split(".")) for name in (earlier, later))
            if a < b:
                assert heat.z[row][column] == scores[a, h, b, k].item()
                assert heat.text[row][column] == f"{scores[a, h, b, k]:.2f}"
            else:
                assert heat.z[row][column] is None
                assert heat.text[row][column] == ""
    assert heat.zmin == 0


@pytest.mark.parametrize(("kind", "reads"), [("Q", "queries"), ("K", "keys"), ("V", "values")])
def test_signed_compositions_have_a_scale_around_0(kind, reads):
    scores = torch.zeros(2, 2, 2, 2, dtype=torch.float64)
    assert viz.composition_figure(scores, kind).data[0].zmax == 1
    scores[0, 1, 1, 0] = -0.5
    fig = viz.composition_figure(scores, kind)
    assert (fig.data[0].zmin, fig.data[0].zmax) == (-0.5, 0.5)
    assert reads in fig.layout.title.text
    assert viz.composition_figure(scores, kind, "Mine").layout.title.text == "Mine"


def test_one_layer_composes_with_nothing():
    with pytest.raises(ValueError, match="there is 1"):
        viz.composition_figure(torch.zeros(1, 2, 1, 2), "Q")
    with pytest.raises((ValueError, TypeError)):  # the type hook's error in these tests
        viz.composition_figure(torch.zeros(2, 2, 2, 2), "O")


def test_many_heads_are_drawn_without_numbers():
    fig = viz.composition_figure(torch.zeros(6, 5, 6, 5), "Q")
    assert fig.data[0].texttemplate is None
