"""Figures of sweeps and heads: every cell where it belongs, with its number."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mechicl import viz
from mechicl.analysis import InterventionSweep
from mechicl.analysis.heads import HeadScores
from mechicl.statistics import interval
from mechicl.viz import patching_grid
from tests.viz.traces import heatmaps

N = 3  # prompts
ZERO = torch.zeros(N)


def swept(axes: tuple[str, ...], indices: tuple[tuple[int, ...], ...], *, source: bool = False) -> InterventionSweep:
    """Return a sweep with a different effect in every cell and prompt."""
    shape = tuple(map(len, indices))
    effects = torch.randn(*shape, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unpatched = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    return InterventionSweep(
        "mean ablation of z", axes, indices, None, torch.zeros(N, 1), torch.zeros(N, 1) if source else None,
        {"loss": unpatched + effects, "other": unpatched - 2 * effects},
        {"loss": unpatched, "other": unpatched},
        {"loss": unpatched - 4, "other": unpatched - 4} if source else {},
    )  # fmt: skip


@pytest.mark.parametrize("axes", [("layer", "head"), ("head", "layer")])
def test_layers_are_rows_and_heads_columns_in_any_order_of_the_axes(axes):
    places = {"layer": (0, 2), "head": (1, 3, 4)}
    sweep = swept(axes, tuple(places[axis] for axis in axes))
    effects = sweep.effect() if axes[0] == "layer" else sweep.effect().transpose(0, 1)
    figure: Any = patching_grid(sweep)
    (heat,) = figure.data
    assert heatmaps(figure)[0].equal(effects.mean(-1))
    assert (heat.y, heat.x) == (("0", "2"), ("1", "3", "4"))
    assert heat.customdata[1][2] == str(interval(effects[1, 2]))
    assert float(heat.text[1][2]) == pytest.approx(heat.z[1][2], rel=0.05)
    assert heat.zmax == -heat.zmin == effects.mean(-1).abs().max()


@pytest.mark.parametrize(
    ("axes", "across", "panel"),
    [(("layer", "pos", "head"), 1, 2), (("layer", "head", "query"), 2, 1), (("layer", "query", "key"), 1, 2)],
)
def test_a_third_axis_has_a_panel_for_each_index(axes, across, panel):
    sweep = swept(axes, ((0, 1), (0, 1, 2), (0, 3)))
    figure: Any = patching_grid(sweep, "other")
    effects = sweep.effect("other").movedim(panel, 0)  # the rest is layer by the axis that runs across
    assert len(figure.data) == len(effects)
    for heat, drawn, expected in zip(figure.data, heatmaps(figure), effects, strict=True):
        assert drawn.equal(expected.mean(-1))
        assert heat.customdata[1][1] == str(interval(expected[1, 1]))
        assert heat.zmax == figure.data[0].zmax
    assert list(figure.data[0].x) == [str(i) for i in sweep.indices[across]]


def test_pairs_of_axes_are_rows_and_columns():
    sweep = swept(("layer", "head", "to_layer", "to_head"), ((0, 1), (0, 1, 2), (1, 2), (0,)))
    figure: Any = patching_grid(sweep)
    assert figure.data[0].y == ("0.0", "0.1", "0.2", "1.0", "1.1", "1.2")
    assert figure.data[0].x == ("1.0", "2.0")
    assert heatmaps(figure)[0].equal(sweep.effect().mean(-1).reshape(6, 2))
    assert figure.data[0].customdata[4][1] == str(interval(sweep.effect()[1, 1, 1, 0]))


def test_the_share_recovered_is_drawn_if_there_is_a_source_run():
    sweep = swept(("layer", "pos"), ((0, 1), (0, 1, 2)), source=True)
    figure: Any = patching_grid(sweep)
    assert heatmaps(figure)[0].allclose(sweep.effect().mean(-1) / -4)
    assert figure.layout.title.text == "Mean ablation of z: share of loss recovered"
    figure = patching_grid(sweep, "other", recovered=False)
    assert heatmaps(figure)[0].equal(sweep.effect("other").mean(-1))


def test_equal_labels_keep_their_columns():
    sweep = swept(("layer", "pos"), ((0,), (0, 1, 2)))
    assert patching_grid(sweep, labels=["A", "B", "A"]).data[0].x == ("A (0)", "B", "A (2)")  # type: ignore[attr-defined]
    by_head = swept(("layer", "head"), ((0,), (0, 1, 2)))
    assert patching_grid(by_head, labels=["of positions"]).data[0].x == ("0", "1", "2")  # type: ignore[attr-defined]


def test_effects_that_are_zero_or_not_finite_are_drawn():
    for values, bound in ((torch.zeros(1, 2, N), 1e-12), (torch.tensor([[[torch.inf] * N, [1.0] * N]]), 1)):
        sweep = replace(
            swept(("layer", "head"), ((0,), (0, 1))), values={"loss": values}, unpatched_values={"loss": ZERO}
        )
        assert patching_grid(sweep).data[0].zmax == bound  # type: ignore[attr-defined]


# ---- heads ----
def head_scores(layers: int = 2, heads: int = 3) -> HeadScores:
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand(2, layers, heads, 5, generator=generator, dtype=torch.float64)
    weights = 2 * torch.rand(layers, heads, generator=generator, dtype=torch.float64) - 1
    scores = {"previous_token": attention[0], "copying": weights, "induction": attention[1]}
    return HeadScores(scores, {"previous_token": 0.125, "copying": 0.0, "induction": 0.25})


def test_the_table_of_heads_has_a_panel_per_score_with_its_means():
    scores = head_scores()
    figure: Any = viz.head_table(scores)
    names = ("previous_token", "induction", "copying")  # of attention first
    for drawn, name in zip(heatmaps(figure), names, strict=True):
        assert drawn.allclose(scores.mean(name))
    first, second, third = figure.data
    assert float(first.text[1][2]) == round(scores.mean("previous_token")[1, 2].item(), 2)
    assert first.customdata[1][2] == pytest.approx(scores.interval("previous_token", 1, 2).half_width)
    assert first.coloraxis == second.coloraxis != third.coloraxis
    headings = " ".join(annotation.text for annotation in figure.layout.annotations)
    assert all(each in headings for each in ("chance 0.125", "chance 0.250", "copying", "of the weights"))


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
