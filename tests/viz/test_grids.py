"""Figures of sweeps' tables; lines with bands, colours of names, ticks of scales."""

import itertools
import math
from typing import Any

import pandas as pd
import pytest
import torch

from mechicl import viz
from mechicl.statistics import Interval, interval, median_interval
from mechicl.statistics.grids import GridTable
from mechicl.viz.elements import COLORS, bar_ticks, color_of, colors_for
from tests.pictures import figure_faults
from tests.viz.traces import heatmaps, lines

NAN = float("nan")


def table() -> pd.DataFrame:
    """Return losses of two depths and three numbers of tasks, three seeds each; some diverged, one was not run."""
    rows = []
    for i, n_layers, seed in itertools.product(range(3), (1, 2), range(3)):
        if (i, n_layers) != (2, 2):
            diverged = (i, n_layers) == (1, 2) or (i, n_layers, seed) == (0, 1, 0)
            loss = NAN if diverged else 10.0**i * (1 + 0.1 * seed) / n_layers
            rows.append((2 * 4**i, n_layers, seed, 100.0 if diverged else NAN, loss))
    return pd.DataFrame(rows, columns=["n_tasks", "n_layers", "seed", "diverged_at", "loss"])


def test_settings_of_none_and_of_yes_and_no_are_settings():
    frame = pd.DataFrame(
        {"norm": [None, None, "LN", "LN"], "n": [1, 2, 1, 2], "seed": 0, "loss": [11.0, 12.0, 2.0, 3.0]}
    )
    grid = GridTable(frame, ("n", "norm", "seed"))
    with pytest.raises(ValueError, match="the table varies in 'norm' too"):
        viz.lines(grid, x="n", value="loss")
    figure: Any = viz.lines(grid, x="n", value="loss", by="norm")
    assert {trace.name: list(trace.y) for trace in figure.data} == {"none": [11.0, 12.0], "LN": [2.0, 3.0]}
    (medians,) = heatmaps(viz.phase_diagram(grid, "n", "norm", "loss", log=False))
    assert medians.tolist() == [[11.0, 12.0], [2.0, 3.0]]
    named: Any = viz.lines(frame.assign(norm=[False, False, True, True]), x="norm", value="loss", by="n")
    assert [list(trace.x) for trace in named.data] == 2 * [["False", "True"]]
    near: Any = viz.lines(frame.assign(norm=[0.00123456, 0.00123456, 0.001234561, 0.001234561]), "n", "loss", "norm")
    assert [list(trace.y) for trace in near.data] == [[11.0, 12.0], [2.0, 3.0]]


def test_near_numbers_are_written_with_all_their_digits():
    frame = pd.DataFrame({"n": [1, 2, 1, 2], "a": [0.2999999999, 0.2999999999, 0.3, 0.3], "loss": [1.0, 2.0, 3.0, 4.0]})
    near: Any = viz.lines(frame, "n", "loss", by="a")
    assert {trace.name: list(trace.y) for trace in near.data} == {"a 0.2999999999": [1.0, 2.0], "a 0.3": [3.0, 4.0]}
    mixed = pd.DataFrame({"a": [0.3, 0.1 + 0.2, "none", 0.5], "n": 1, "loss": [1.0, 2.0, 3.0, 4.0]})
    texts = ["0.3", "0.30000000000000004", "none", "0.5"]
    figure: Any = viz.lines(mixed, "a", "loss")
    assert list(figure.data[0].x) == texts
    figure = viz.phase_diagram(mixed, "a", "n", "loss")
    assert list(figure.layout.xaxis.ticktext) == texts
    assert "a 0.30000000000000004, n 1" in figure.data[0].text[0][1]


def test_a_phase_diagram_shows_medians_diverged_and_missing_cells():
    figure: Any = viz.phase_diagram(table(), "n_tasks", "n_layers", "loss", log=False)
    medians, diverged = heatmaps(figure)
    expected = torch.tensor([[1.15, 11.0, 110.0], [0.55, NAN, NAN]], dtype=torch.float64)
    assert medians.allclose(expected, equal_nan=True)
    assert diverged.isfinite().nonzero().tolist() == [[1, 1]]
    assert lines(figure, "all seeds diverged") == [([1], [1])]
    assert lines(figure, "some seeds diverged") == [([0], [0])]
    text = figure.data[0].text
    assert text[1][2].endswith("not run")
    assert text[1][1].endswith("not measured; 3 diverged")
    assert text[0][0].endswith("2 seeds; 1 diverged")
    assert "n_tasks 2, n_layers 1" in text[0][0]
    assert str(median_interval(torch.tensor([100.0, 110.0, 120.0]))) in text[0][2]
    assert list(figure.layout.xaxis.ticktext) == ["2", "8", "32"]


def test_lines_of_losses_that_happen_to_be_1_have_no_binomial_band():
    frame = pd.DataFrame({"n": [1, 1, 1, 2, 2, 2], "seed": 2 * [0, 1, 2], "loss": [1.0, 1.0, 1.0, 0.0, 1.0, 2.0]})
    for losses, least in ((frame["loss"], 1.0), (frame["loss"].clip(upper=1.0), 0.29240177382128674)):
        figure: Any = viz.lines(frame.assign(loss=losses), x="n", value="loss", log_x=False)
        ends = [y for trace in figure.data if trace.fill for x, y in zip(trace.x, trace.y, strict=True) if x == 1]
        assert min(ends) == pytest.approx(least)  # (0.05 / 2)^(1/3) for a share of three


def test_values_of_yes_and_no_are_1_and_0():
    frame = pd.DataFrame({"n": [1, 1, 2, 2], "seed": [0, 1, 0, 1], "solved": [False, True, True, True]})
    for column in (frame["solved"], frame["solved"].astype(object).where(frame["seed"] + frame["n"] < 3, None)):
        figure: Any = viz.lines(frame.assign(solved=column), "n", "solved")
        ((_, y),) = lines(figure, "solved")
        assert y == [0.5, 1.0]


def test_infinite_values_count_and_infinite_medians_leave_a_gap():
    frame = pd.DataFrame({"n": [2] * 3 + [8] * 3 + [32] * 3, "m": 1, "seed": [0, 1, 2] * 3, "loss": [1.0] * 9})
    frame.loc[[1, 2, 5], "loss"] = math.inf
    figure: Any = viz.phase_diagram(frame, "n", "m", "loss", threshold=5, log=True)
    assert list(figure.data[0].z[0]) == pytest.approx([NAN, 0.0, 0.0], nan_ok=True)
    assert "3 seeds, 2 of them infinite" in figure.data[0].text[0][0]
    assert "3 seeds, 1 of them infinite" in figure.data[0].text[0][1]
    figure = viz.lines(frame, "n", "loss", middle="median")
    assert lines(figure, "loss")[0][1] == [None, 1.0, 1.0]  # a gap
    assert lines(viz.lines(frame, "n", "loss"), "loss")[0][1] == [None, None, 1.0]


def test_colours_are_logarithms_where_values_span_decades():
    figure: Any = viz.phase_diagram(table(), "n_tasks", "n_layers", "loss")
    assert heatmaps(figure)[0][0].tolist() == pytest.approx([math.log10(v) for v in (1.15, 11.0, 110.0)])
    assert "100" in figure.data[0].colorbar.ticktext
    negative = table().assign(loss=-1.0)
    assert heatmaps(viz.phase_diagram(negative, "n_tasks", "n_layers", "loss"))[0][0].tolist() == [-1.0] * 3


def test_a_threshold_is_where_neighbours_lie_on_its_two_sides():
    figure: Any = viz.phase_diagram(table(), "n_tasks", "n_layers", "loss", threshold=20.0)
    ((x, y),) = lines(figure, "20 is passed")
    assert y == [0]  # the other row has no such neighbours
    assert x == pytest.approx([1 + math.log(20 / 11) / math.log(110 / 11)])
    linear: Any = viz.phase_diagram(table(), "n_tasks", "n_layers", "loss", threshold=20.0, log=False)
    assert lines(linear, "20 is passed")[0][0] == pytest.approx([1 + (20 - 11) / (110 - 11)])
    assert not lines(viz.phase_diagram(table(), "n_tasks", "n_layers", "loss", threshold=1e6), "1e+06 is passed")


def test_lines_have_intervals_over_seeds_that_did_not_diverge():
    figure: Any = viz.lines(table(), "n_tasks", "loss", "n_layers", references={"Bayes": 0.3})
    ((x, y),) = lines(figure, "n_layers 1")
    assert x == [2, 8, 32]
    assert y == pytest.approx([1.15, 11.0, 110.0])
    ((_, second),) = lines(figure, "n_layers 2")
    assert second[0] == pytest.approx(0.55)
    assert second[1:] == [None, None]
    band = next(trace for trace in figure.data if trace.fill == "toself")
    expected = [interval(torch.tensor(v, dtype=torch.float64)) for v in ([1.1, 1.2], [10.0, 11, 12], [100.0, 110, 120])]
    assert list(band.y)[:3] == pytest.approx([each.high for each in expected])
    assert lines(figure, "Bayes") == [([2, 32], [0.3, 0.3])]
    assert figure.layout.yaxis.type == "log"
    assert figure.layout.xaxis.type == "linear"


def test_several_values_are_lines_of_their_names():
    frame = table().assign(other=lambda f: 2 * f["loss"])
    figure: Any = viz.lines(frame[frame["n_layers"] == 1], "n_tasks", ["loss", "other"], middle="median")
    assert lines(figure, "loss")[0][1] == pytest.approx([1.15, 11.0, 110.0])
    assert lines(figure, "other")[0][1] == pytest.approx([2.3, 22.0, 220.0])


def test_axes_of_names_keep_their_order():
    frame = pd.DataFrame({"kind": ["rotary", "none"], "n": [1, 1], "seed": [0, 0], "loss": [2.0, 1.0]})
    figure: Any = viz.phase_diagram(frame, "kind", "n", "loss")
    assert list(figure.layout.xaxis.ticktext) == ["rotary", "none"]
    three = pd.concat([frame, frame.assign(loss=lambda f: f["loss"] + 1), frame.assign(loss=lambda f: f["loss"] + 5)])
    points: Any = viz.lines(three, "kind", "loss")
    ((x, y),) = lines(points, "loss")
    assert (x, y) == (["rotary", "none"], [4.0, 3.0])
    expected = interval(torch.tensor([2.0, 3.0, 7.0]))
    assert points.data[0].error_y.array[0] == pytest.approx(expected.half_width)
    assert points.data[0].mode == "markers"
    named: Any = viz.lines(frame, "n", "loss", "kind")
    assert [trace.name for trace in named.data] == ["rotary", "none"]


def test_few_seeds_are_points_and_many_are_not():
    few = pd.DataFrame({"n": [1, 1, 1, 2, 2, 2], "seed": [0, 1, 2] * 2, "loss": [1.0, 2, 9, 3, NAN, 5]})
    figure: Any = viz.lines(few, "n", "loss", middle="median", log_x=False, log_y=False)
    ((x, y),) = lines(figure, "loss: each seed")
    assert (list(x), list(y)) == ([1, 1, 1, 2, 2], [1, 2, 9, 3, 5])
    many = pd.concat([few.assign(seed=few["seed"] + 3 * i) for i in range(4)])
    assert not lines(viz.lines(many, "n", "loss"), "loss: each seed")
    alone = few[few["seed"] == 0]
    assert not lines(viz.lines(alone, "n", "loss"), "loss: each seed")
    named = few.assign(n=few["n"].map({1: "one", 2: "two"}))
    assert lines(viz.lines(named, "n", "loss"), "loss: each seed")[0][0] == ["one"] * 3 + ["two"] * 2


# ---- primitives: lines with bands, colours of names, ticks of scales ----
SURE, NONE = Interval(1.0, 0.5, 1.5, 9), Interval(math.nan, math.nan, math.nan, 9)


def drawn(intervals: list[Interval], **options: bool) -> Any:
    return viz.interval_lines("t", "x", "y", range(len(intervals)), {"a": intervals}, **options)


def test_lines_have_bands_and_gaps_where_a_logarithm_is_not_defined():
    intervals = [Interval(1.0, 0.5, 1.5, 10), Interval(0.0, -1.0, 1.0, 10), Interval(2.0, 1.0, 3.0, 10)]
    (line,) = drawn(intervals, log_y=True).data
    assert list(line.y) == [1.0, None, 2.0]
    assert list(line.error_y.array) == pytest.approx([0.5, NAN, 1.0], nan_ok=True)
    pair = intervals[::2]
    first, second, line = drawn([*pair, intervals[1], *pair], log_y=True).data
    assert (list(first.x), list(second.x)) == ([0, 1, 1, 0], [3, 4, 4, 3])
    assert list(first.y) == list(second.y) == [1.5, 3.0, 1.0, 0.5]
    band, line = drawn([*pair, Interval(4.0, NAN, NAN, 1), SURE]).data  # a single seed in the middle
    assert (list(band.x), list(line.y)) == ([0, 1, 1, 0], [1.0, 2.0, 4.0, 1.0])
    assert list(line.error_y.array) == pytest.approx([NAN, NAN, NAN, 0.5], nan_ok=True)
    eight: Any = viz.interval_lines("t", "x", "y", [0, 1, 2], {str(i): intervals for i in range(8)})
    assert len({trace.line.color for trace in eight.data if trace.name}) == 8
    assert len(drawn([Interval(1.0, math.nan, math.nan, 1)]).data) == 1  # one sample has no band


@pytest.mark.parametrize("log_y", [False, True])
def test_lines_of_one_mean_are_points_with_bars(log_y: bool):
    for intervals in ([SURE], [NONE, SURE, NONE], [SURE, NONE, SURE]):
        figure = drawn(intervals, log_y=log_y)
        assert figure_faults(figure) == []
        sizes = zip(figure.data[-1].marker.size, intervals, strict=True)
        assert min(size for size, each in sizes if each is SURE) > 5
    alone = drawn([SURE]).data[0]
    assert (alone.error_y.array, alone.error_y.arrayminus) == ((0.5,), (0.5,))


def test_known_names_have_fixed_colours_and_others_get_different_ones():
    assert color_of("gradient descent, 4 steps") == COLORS["gradient descent"]
    assert color_of("gradient descents") is None
    assert color_of("seed 3") == color_of("trained") == COLORS["trained"]
    assert colors_for(["Newton", "gradient descent"]) == [COLORS["Newton"], COLORS["gradient descent"]]
    others = colors_for(["farm", "town", "home", "leisure", "trained"])
    assert len(set(others)) == 5
    assert not set(others[:4]) & set(COLORS.values())
    assert len(set(colors_for([f"layer {i}" for i in range(4)]))) == 4
    assert len(set(colors_for([f"GD++, {i}" for i in range(3)]))) == 3


@pytest.mark.parametrize(("low", "high"), [(1e-16, 1e300), (1e-300, 1.5e308)])
def test_logarithmic_figures_take_values_whose_ratio_overflows(low: float, high: float):
    frame = pd.DataFrame({"n": [0, 1], "m": 1, "loss": [low, high]})
    figure: Any
    for figure in (drawn([Interval(m, m, m, 1) for m in (low, high)], log_y=True), viz.lines(frame, "n", "loss")):
        assert figure.layout.yaxis.dtick == math.ceil((math.log10(high) - math.log10(low)) / 6)
    figure = viz.phase_diagram(frame, "n", "m", "loss")
    assert figure.data[0].colorbar.tickvals[-1] == math.floor(math.log10(high))


@pytest.mark.parametrize("bound", [1e-9, 0.00123, 0.3, 1.0, 1.04, 99.0, 12345.0])
def test_scales_have_a_tick_near_their_ends(bound: float):
    ticks = torch.tensor(bar_ticks(bound), dtype=torch.float64)
    assert 0.85 * bound < ticks.max() <= bound * (1 + 1e-9)
    torch.testing.assert_close(ticks, -ticks.flip(0))
    assert len(ticks) == 5
    assert bar_ticks(bound, signed=False) == ticks[2:].tolist()
