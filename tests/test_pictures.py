"""The checks of pictures find what is planted, and figures of this package do not have it."""

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
import torch
from playwright.sync_api import Browser

from mechicl import viz
from mechicl.statistics import Interval
from mechicl.viz.elements import COLORS, bar_ticks, color_of, colors_for
from mechicl.viz.page import Section, page
from tests.pictures import caption_faults, color_faults, drawn_faults, figure_faults, section_faults

SURE, NONE = Interval(1.0, 0.5, 1.5, 9), Interval(float("nan"), float("nan"), float("nan"), 9)


def scatter(x: Any, y: Any, **options: Any) -> go.Figure:
    return go.Figure(go.Scatter(x=x, y=y, **options))


@pytest.mark.parametrize(
    ("figure", "reason"),
    [
        (scatter([0], [1], mode="lines"), "two neighbouring points"),
        (scatter([0, 1, 2], [1, None, 1], mode="lines"), "two neighbouring points"),
        (scatter([0, 1], [float("nan")] * 2), "has a place"),
        (scatter([0, 1], [0, 1]).update_yaxes(range=[2, 3]), "has a place"),
        (scatter([0, 1], [0, -1], mode="markers").update_yaxes(type="log"), "has a place"),
        (scatter([0, 1], [0, 1], mode="markers", marker={"size": 0}), "nothing is drawn"),
        (scatter([0, 1], [0, 1], mode="lines", line={"width": 0}), "nothing is drawn"),
        (scatter([0, 1], [0, 1], opacity=0), "invisible"),
        (go.Figure(go.Heatmap(z=[[None, float("nan")]])), "no cell"),
        (go.Figure(go.Bar(x=["a"], y=[0])), "no bar"),
        (go.Figure(), "no traces"),
    ],
)
def test_traces_that_show_nothing_are_found(figure: go.Figure, reason: str):
    (fault,) = figure_faults(figure)
    assert reason in fault


def test_an_entry_of_the_legend_without_a_point_names_lines_that_are_there():
    entry = go.Scatter(x=[None], y=[None], mode="lines", line={"color": "red"}, name="into a key")
    line = go.Scatter(x=[0, 1], y=[0, 1], mode="lines", line={"color": "red"}, showlegend=False)
    other = go.Scatter(x=[0, 1], y=[0, 1], mode="lines", line={"color": "blue"}, showlegend=False)
    assert figure_faults(go.Figure([entry, line])) == []
    assert "shows nothing" in figure_faults(go.Figure([entry, other]))[0]


def test_what_is_seen_is_no_fault():
    seen = [
        scatter([0], [1], mode="markers"),
        scatter([0], [1], mode="lines", error_y={"array": [0.5]}),
        scatter(["a", "b"], [0, 1], mode="lines"),
        scatter([1, 10], [1, 100]).update_yaxes(type="log", range=[0, 2]),
        go.Figure(go.Heatmap(z=[[None, 0.0]])),
    ]
    # a line of one point is none, whatever stands around it
    assert [len(figure_faults(figure)) for figure in seen] == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("log_y", [False, True])
def test_lines_of_one_mean_are_points_with_bars(log_y: bool):
    for intervals in ([SURE], [NONE, SURE, NONE], [SURE, NONE, SURE]):
        figure: Any = viz.interval_lines("t", "x", "y", range(len(intervals)), {"a": intervals}, log_y=log_y)
        assert figure_faults(figure) == []
        points = figure.data[-1]
        shown = [size for size, each in zip(points.marker.size, intervals, strict=True) if each is SURE]
        assert min(shown) > 5
    alone: Any = viz.interval_lines("t", "x", "y", [3], {"a": [SURE]}).data[0]
    assert (alone.error_y.array, alone.error_y.arrayminus) == ((0.5,), (0.5,))


def test_words_that_no_mark_has_are_found():
    dashed = scatter([0, 1], [0, 1], mode="lines", line={"dash": "dash", "color": "#222222"})
    assert caption_faults("Black and dashed lines.", [dashed]) == []
    assert caption_faults("Dotted: a fit. Bands: 95% intervals.", [dashed]) == [
        "the words say 'bands', and nothing drawn is",
        "the words say 'dotted', and nothing drawn is",
    ]
    circles = scatter([0, 1], [0, 1], mode="markers", marker={"symbol": ["circle", "circle-open"]})
    assert caption_faults("Open circles are others.", [circles]) == []
    assert "do not say what they are" in caption_faults("Circles.", [circles])[0]
    positive = go.Figure(go.Heatmap(z=[[0.0, 1.0]], zmin=-1, zmax=1, colorscale="RdBu"))
    assert caption_faults("Blue cells are where it is.", [positive]) == []
    assert caption_faults("Red cells are where it is.", [positive]) == ["the words say 'red', and nothing drawn is"]


def test_colours_with_two_meanings_and_meanings_with_two_colours_are_found():
    def line(name: str, color: str) -> go.Figure:
        return scatter([0, 1], [0, 1], mode="lines", name=name, line={"color": color}, showlegend=True)

    assert color_faults([line("gradient descent, tuned", "#222222"), line("gradient descent: fit", "#222222")]) == []
    assert color_faults([line("Newton", "#111111"), line("ours", "#111111")]) == ["#111111 means Newton and ours"]
    assert color_faults([line("Newton", "#111111"), line("Newton", "#333333")]) == ["Newton is #111111 and #333333"]
    heat = [go.Figure(go.Heatmap(z=[[1.0]], zmin=-1, zmax=1, colorscale=scale)) for scale in ("RdBu", "RdBu_r")]
    assert color_faults(heat) == ["positive is blue and red"]


def test_a_browser_finds_labels_over_each_other_cut_off_legends_over_marks_and_empty_scales(
    tmp_path: Path, browser: Browser
):
    good = viz.interval_lines("fine", "x", "y", range(3), {"a": [SURE] * 3, "b": [SURE] * 3})
    over = scatter([0, 1], [0, 1]).update_layout(title="over")
    for _ in range(2):
        over.add_annotation(x=0.5, y=0.5, text="twice", showarrow=False)
    cut = scatter([0, 1], [0, 1])
    cut.add_annotation(x=0.5, y=0, yref="paper", yshift=-130, text="far below", showarrow=False)
    legend = scatter([0, 1], [0, 1], name="a line with a name", showlegend=True)
    legend.update_layout(legend={"x": 0.5, "y": 0.5, "xanchor": "center"})
    scale = go.Figure(go.Heatmap(z=[[1, 2]], colorbar={"tickvals": [1.5]}))
    figures = {"good": good, "over": over, "cut": cut, "legend": legend, "scale": scale}
    path = tmp_path / "page.html"
    path.write_text(page("title", "lead", [Section(name, "words", figure) for name, figure in figures.items()]))
    tab = browser.new_page(viewport={"width": 1200, "height": 900})
    tab.goto(path.as_uri())
    faults = drawn_faults(tab)
    tab.close()
    assert "over: 'twice' lies over 'twice'" in faults
    assert "cut: 'far below' is cut off" in faults
    assert any(fault.startswith("legend: the legend covers") for fault in faults)
    assert "scale: a colour bar has 1 ticks" in faults
    assert not any(fault.startswith("good") for fault in faults)


def test_a_section_is_checked_with_its_words():
    empty = Section("Empty", "Dashed.", scatter([0], [1], mode="lines", name="one"))
    assert section_faults([empty]) == [
        "Empty: trace 0 (one) shows nothing: a line needs two neighbouring points",
        "Empty: the words say 'dashed', and nothing drawn is",
    ]


def test_names_have_one_colour_and_others_none_of_those():
    assert color_of("gradient descent, 4 steps") == COLORS["gradient descent"]
    assert color_of("gradient descents") is None
    assert color_of("seed 3") == color_of("trained") == COLORS["trained"]
    assert colors_for(["Newton", "gradient descent"]) == [COLORS["Newton"], COLORS["gradient descent"]]
    strangers = colors_for(["farm", "town", "home", "leisure", "trained"])
    assert len(set(strangers)) == 5
    assert not set(strangers[:4]) & set(COLORS.values())
    assert len(set(colors_for([f"layer {i}" for i in range(4)]))) == 4
    assert len(set(colors_for([f"GD++, {i}" for i in range(3)]))) == 3


@pytest.mark.parametrize("bound", [1e-9, 0.00123, 0.3, 1.0, 1.04, 99.0, 12345.0])
def test_scales_have_a_tick_near_their_ends(bound: float):
    ticks = torch.tensor(bar_ticks(bound), dtype=torch.float64)
    assert 0.85 * bound < ticks.max() <= bound * (1 + 1e-9)
    torch.testing.assert_close(ticks, -ticks.flip(0))
    assert len(ticks) == 5
    assert bar_ticks(bound, signed=False) == ticks[2:].tolist()
