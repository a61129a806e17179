"""What the figures of layers show is what the results hold."""

import math
from typing import Any

import pytest
import torch

from mechicl import viz as pictures
from mechicl.analysis import Match
from mechicl.analysis.behaviour.growth import fit_growth
from mechicl.analysis.layers.probes import ProbeResult
from mechicl.statistics import Interval
from mechicl.viz.layers import match_curve, probe_heatmap

viz: Any = pictures  # plotly's types know too little of a figure's traces
VALUES = torch.tensor([[0.9, 0.5, 0.1], [0.2, 0.8, 0.3], [0.1, 0.4, 0.7]], dtype=torch.float64)
MATCH = Match("layer", "Newton", (0, 1, 2), (1, 4, 9), VALUES[..., None] + torch.tensor([-0.05, 0.0, 0.05]), "errors")


def test_the_heatmap_shows_means_and_outlines_the_best():
    heatmap, best = viz.match_heatmap(MATCH).data
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


def test_lines_have_bands_and_gaps_where_a_logarithm_is_not_defined():
    intervals = [Interval(1.0, 0.5, 1.5, 10), Interval(0.0, -1.0, 1.0, 10), Interval(2.0, 1.0, 3.0, 10)]
    band, line = viz.interval_lines("t", "x", "y", [0, 1, 2], {"a": intervals}, log_y=True).data
    assert list(line.y) == [1.0, None, 2.0]
    assert list(band.y) == [1.5, 3.0, 1.0, 0.5]
    eight = viz.interval_lines("t", "x", "y", [0, 1, 2], {str(i): intervals for i in range(8)})
    assert len({trace.line.color for trace in eight.data if trace.name}) == 8


def test_one_sample_has_a_line_and_no_band():
    alone = [Interval(1.0, math.nan, math.nan, 1)]
    assert len(viz.interval_lines("t", "x", "y", [0], {"a": alone}).data) == 1


def test_the_probe_heatmap_is_selectivity():
    errors = torch.rand(2, 3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = ProbeResult(
        ("a", "b"), ("x1", "y1", "x2", "y2", "query"), errors, torch.ones(2, 1, 5, 4).double(), 1 - 0.25 * errors
    )
    figure: Any = probe_heatmap(result, "b")
    (heatmap,) = figure.data
    assert torch.tensor(heatmap.z).allclose(1 - 1.25 * errors[1].float().mean(-1))
    assert torch.tensor(heatmap.customdata)[..., 0].allclose(1 - errors[1].float().mean(-1))
    with pytest.raises(ValueError, match="no quantity 'c'"):
        probe_heatmap(result, "c")
