"""The checks of pictures find planted faults, and none in correct figures."""

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from playwright.sync_api import Browser

from mechicl import viz
from mechicl.statistics import Interval
from mechicl.viz.page import Section, page
from tests.pictures import color_faults, drawn_faults, figure_faults, section_faults

SURE = Interval(1.0, 0.5, 1.5, 9)


def scatter(x: Any, y: Any, **options: Any) -> go.Figure:
    return go.Figure(go.Scatter(x=x, y=y, **options))


@pytest.mark.parametrize(("figure", "reason"), [
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
])  # fmt: skip
def test_traces_that_show_nothing_are_found(figure: go.Figure, reason: str):
    (fault,) = figure_faults(figure)
    assert reason in fault


def test_an_entry_of_the_legend_without_a_point_needs_lines_of_its_colour():
    entry = go.Scatter(x=[None], y=[None], mode="lines", line={"color": "red"}, name="into a key")
    line = go.Scatter(x=[0, 1], y=[0, 1], mode="lines", line={"color": "red"}, showlegend=False)
    other = go.Scatter(x=[0, 1], y=[0, 1], mode="lines", line={"color": "blue"}, showlegend=False)
    assert figure_faults(go.Figure([entry, line])) == []
    assert "shows nothing" in figure_faults(go.Figure([entry, other]))[0]


def test_visible_traces_have_no_faults():
    seen = [
        scatter([0], [1], mode="markers"),
        scatter([0], [1], mode="lines", error_y={"array": [0.5]}),
        scatter(["a", "b"], [0, 1], mode="lines"),
        scatter([1, 10], [1, 100]).update_yaxes(type="log", range=[0, 2]),
        go.Figure(go.Heatmap(z=[[None, 0.0]])),
    ]
    # a line of one point is invisible, even with an error bar
    assert [len(figure_faults(figure)) for figure in seen] == [0, 1, 0, 0, 0]


def test_colours_with_two_meanings_and_meanings_with_two_colours_are_found():
    def line(name: str, color: str) -> go.Figure:
        return scatter([0, 1], [0, 1], mode="lines", name=name, line={"color": color}, showlegend=True)

    assert color_faults([line("gradient descent, tuned", "#222222"), line("gradient descent: fit", "#222222")]) == []
    assert color_faults([line("Newton", "#111111"), line("ours", "#111111")]) == ["#111111 means Newton and ours"]
    assert color_faults([line("Newton", "#111111"), line("Newton", "#333333")]) == ["Newton is #111111 and #333333"]
    heat = [go.Figure(go.Heatmap(z=[[1.0]], zmin=-1, zmax=1, colorscale=scale)) for scale in ("RdBu", "RdBu_r")]
    assert color_faults(heat) == ["positive is blue and red"]


def test_a_browser_finds_overlapping_and_cut_labels_covered_marks_and_empty_scales(tmp_path: Path, browser: Browser):
    good = viz.interval_lines("fine", "x", "y", range(3), {"a": [SURE] * 3, "b": [SURE] * 3})
    over = scatter([0, 1], [0, 1]).update_layout(title="over")
    for _ in range(2):
        over.add_annotation(x=0.5, y=0.5, text="twice", showarrow=False)
    cut = scatter([0, 1], [0, 1])
    cut.add_annotation(x=0.5, y=0, yref="paper", yshift=-130, text="far below", showarrow=False)
    legend = scatter([0, 1], [0, 1], name="a line with a name", showlegend=True)
    legend.update_layout(legend={"x": 0.5, "y": 0.5, "xanchor": "center"})
    scale = go.Figure(go.Heatmap(z=[[1, 2]], colorbar={"tickvals": [1.5]}))
    disc = scatter([0, 1], [0, 1], mode="markers+text", text=["in", "in"], marker={"size": 36})
    disc.add_annotation(x=0, y=0, xshift=20, text="half over", showarrow=False)
    figures = {"disc": disc, "good": good, "over": over, "cut": cut, "legend": legend, "scale": scale}
    path = tmp_path / "page.html"
    path.write_text(page("title", "lead", [Section(name, "words", figure) for name, figure in figures.items()]))
    tab = browser.new_page(viewport={"width": 1200, "height": 900})
    tab.goto(path.as_uri())
    faults = drawn_faults(tab)
    tab.close()
    assert "over: 'twice' overlaps 'twice'" in faults
    assert "cut: 'far below' is cut off" in faults
    assert any(fault.startswith("legend: the legend covers") for fault in faults)
    assert "scale: a colour bar has 1 ticks" in faults
    assert [fault for fault in faults if "covers a mark" in fault] == ["disc: 'half over' covers a mark"]
    assert not any(fault.startswith("good") for fault in faults)


def test_a_fault_is_named_with_its_section():
    empty = Section("Empty", "", scatter([0], [1], mode="lines", name="one"))
    assert section_faults([empty]) == ["Empty: trace 0 (one) shows nothing: a line needs two neighbouring points"]
