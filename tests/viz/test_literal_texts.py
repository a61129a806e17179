"""Names and labels of users are shown character by character in every figure, whatever characters they have."""

import html
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest
import torch
from playwright.sync_api import Browser

from mechicl import viz
from mechicl.analysis import Match
from mechicl.analysis.behaviour.losses import ShiftedLosses
from mechicl.analysis.dynamics.training import AlignmentOverTraining, OverTraining
from mechicl.analysis.heads import HeadScores
from mechicl.analysis.language import FewShotScores, MatchedAblation
from mechicl.analysis.weights.paths import LossPath
from mechicl.statistics import interval
from mechicl.viz.behaviour import match_curve, score_bars
from mechicl.viz.elements import add_heatmap, interval_dots, panels
from mechicl.viz.interventions import ablation_bars, few_shot_curves
from mechicl.viz.page import Section, page
from tests.viz.test_interventions import swept
from tests.viz.test_page import opened

HOSTILE = "<b>m</b> &lt; & $x^2$ %{y} %{z:.2f}<br>c|d `e` {f}\nnext </script> <sub>2</sub> 🎉 ‮ab‬"
VISIBLE = HOSTILE.replace("\n", "↵")
DRAWS = torch.linspace(0, 1, 24).reshape(4, 6)
SHARES = DRAWS.reshape(1, 2, 2, 6)
PATTERN = torch.softmax(torch.arange(18.0).reshape(2, 3, 3), -1)
SEEDS = torch.tensor([[0.2, 0.3], [0.5, 0.7]])
VALUES = torch.tensor([[0.9, 0.5, 0.1], [0.2, 0.8, 0.3], [0.1, 0.4, 0.7]], dtype=torch.float64)
INTERVALS = [interval(row) for row in DRAWS]
ALIGNED = AlignmentOverTraining((1, 10), SEEDS, SEEDS, SEEDS, SEEDS)
MATCH = Match("layer", "Newton", (0, 1, 2), (1, 4, 9), VALUES[..., None] + torch.tensor([-0.05, 0.0, 0.05]), "errors")
CURVE = {"eval_step": [1, 10], "eval_loss": [[1.0, 2.0], [0.5, 0.6]]}


def frame(text: str) -> pd.DataFrame:
    return pd.DataFrame(
        {text: ["a", text, "a", text], "seed": [0, 0, 1, 1], "n": [1, 2, 1, 2], f"l {text}": [1.0, 2, 1.1, 2.1]}
    )


FIGURES: dict[str, Callable[[str], go.Figure]] = {
    "lines of intervals": lambda t: viz.interval_lines(t, f"x {t}", f"y {t}", [0, 1, 2, 3], {t: INTERVALS}),
    "dots": lambda t: interval_dots(t, t, [t, "b"], INTERVALS[:2], notes=[t, ""]),
    "panels and cells": lambda t: cells(panels(t, [t, "b"]), t),
    "tokens": lambda t: viz.attention_figure(PATTERN, [t, "b", t], [t, "c"]),
    "head scores": lambda t: viz.head_table(HeadScores({t: VALUES}, {t: 0.0}), title=t),
    "sweeps": lambda t: viz.patching_grid(swept(("layer", "pos"), ((0, 1), (0, 1, 2))), labels=[t, "b", "c"], title=t),
    "sweeps without a title": lambda t: viz.patching_grid(metric_named(t)),
    "tables": lambda t: viz.lines(frame(t), x=t, value=f"l {t}", title=t),
    "tables by a column": lambda t: viz.lines(frame(t), x="n", value=f"l {t}", by=t),
    "phase diagrams": lambda t: viz.phase_diagram(frame(t), t, "n", f"l {t}"),
    "losses": lambda t: viz.losses_over_training([1, 10], {t: [[1.0], [0.5]]}, references={t: 0.1}),
    "alignments": lambda t: viz.alignments_over_training({t: ALIGNED, "b": ALIGNED}),
    "histories": lambda t: viz.training_history(CURVE, {t: OverTraining((1, 10), {t: SEEDS, "b": SEEDS})}, loss=t),
    "settings": lambda t: viz.settings_figure({t: {t: INTERVALS[0], "b": INTERVALS[1]}}, t),
    "scores": lambda t: score_bars(t, t, [t, "b"], {t: [0.1, 0.2]}),
    "paths": lambda t: viz.connectivity_paths({t: LossPath("linear", (0.0, 1.0), 1 + DRAWS[:2])}),
    "shifts": lambda t: viz.shifted_losses({t: ShiftedLosses((t, "b"), "inputs", (1.0, 2.0), 1 + SHARES[0])}),
    "matches": lambda t: match_curve({t: MATCH}),
    "tasks": lambda t: few_shot_curves(FewShotScores((t,), (t, "b"), (0, 2), SHARES, SHARES)),
    "ablations": lambda t: ablation_bars({t: MatchedAblation(((0, 1),), DRAWS[0], DRAWS[1], DRAWS)}),
    "any result": lambda t: viz.plot(OverTraining((1, 10), {t: SEEDS}), title=t),
}  # fmt: skip
"""Figures in which every text that a user can choose is `t`."""


def cells(fig: go.Figure, text: str) -> go.Figure:
    add_heatmap(fig, VALUES[:2, :2], [text, "b"], [text, "c"], "%{z}")
    return fig


def metric_named(text: str) -> Any:
    sweep = swept(("layer", "pos"), ((0, 1), (0, 1, 2)))
    values = {text: sweep.values["loss"]}
    return replace(sweep, what=text, values=values, unpatched_values={text: torch.zeros(3)})


def texts(value: Any, key: str = "") -> Iterator[str]:
    """All texts of a figure that plotly shows."""
    if isinstance(value, str) and key not in ("legendgroup", "offsetgroup"):
        yield value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from texts(part, name)
    elif not isinstance(value, str) and hasattr(value, "__iter__"):
        for part in value:
            yield from texts(part, key)


def shown(text: str) -> str:
    """A text as plotly shows it: without tags, with the characters of entities."""
    return html.unescape(re.sub("<[^<>]*>", "", text))


@pytest.mark.parametrize("name", FIGURES)
def test_figures_show_texts_of_users_character_by_character(name):
    plain = [text for text in texts(FIGURES[name]("MARK").to_plotly_json()) if "MARK" in text]
    found = [text for text in texts(FIGURES[name](HOSTILE).to_plotly_json()) if "c|d" in text]
    assert len(found) == len(plain) > 0
    for text in found:
        assert not re.search(r"<b>|<sub>|</script>|\$|%\{y\} %\{z|\n", text), text
        assert re.sub(r"\s+", " ", VISIBLE.replace("_", " ")) in re.sub(r"\s+", " ", shown(text)), text


def test_a_browser_shows_them(browser: Browser, tmp_path):
    names = ("lines of intervals", "panels and cells", "tokens", "settings", "tables")
    figures = [FIGURES[name](HOSTILE) for name in names]
    tab = opened(browser, tmp_path, page("title", "lead", [Section("all", "words", figures)]))
    tab.wait_for_function(f"document.querySelectorAll('.main-svg').length >= {len(names)}")
    drawn = tab.locator("svg text").all_text_contents()
    whole = [text for text in drawn if "c|d" in text]
    assert len(whole) >= 12
    for text in whole:  # lines of a label are joined without the space between them
        assert VISIBLE.replace(" ", "") in text.replace(" ", "")
    assert tab.locator("svg tspan[style*='bold']").count() == 0
