"""Primitives: lines with bands, colours of names, ticks of scales."""

import math
from typing import Any

import pytest
import torch

from mechicl import viz
from mechicl.statistics import Interval
from mechicl.viz.elements import COLORS, bar_ticks, color_of, colors_for
from tests.pictures import figure_faults

SURE, NONE = Interval(1.0, 0.5, 1.5, 9), Interval(math.nan, math.nan, math.nan, 9)


def drawn(intervals: list[Interval], **options: bool) -> Any:
    return viz.interval_lines("t", "x", "y", range(len(intervals)), {"a": intervals}, **options)


def test_lines_have_bands_and_gaps_where_a_logarithm_is_not_defined():
    intervals = [Interval(1.0, 0.5, 1.5, 10), Interval(0.0, -1.0, 1.0, 10), Interval(2.0, 1.0, 3.0, 10)]
    band, line = drawn(intervals, log_y=True).data
    assert list(line.y) == [1.0, None, 2.0]
    assert list(band.y) == [1.5, 3.0, 1.0, 0.5]
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


@pytest.mark.parametrize("bound", [1e-9, 0.00123, 0.3, 1.0, 1.04, 99.0, 12345.0])
def test_scales_have_a_tick_near_their_ends(bound: float):
    ticks = torch.tensor(bar_ticks(bound), dtype=torch.float64)
    assert 0.85 * bound < ticks.max() <= bound * (1 + 1e-9)
    torch.testing.assert_close(ticks, -ticks.flip(0))
    assert len(ticks) == 5
    assert bar_ticks(bound, signed=False) == ticks[2:].tolist()
