"""Pictures of causal tests: counterfactuals by layer and intervention, and hypotheses by what they explain."""

import math

import plotly.graph_objects as go

from mechicl.analysis.causes.ranking import HypothesisTest
from mechicl.analysis.causes.results import Interchange
from mechicl.viz.elements import COLORS, add_heatmap, bar_title, figure


def interchange_heatmap(result: Interchange, title: str | None = None) -> go.Figure:
    """Interchange R² of every intervention (rows) at every layer (columns); below 0 all cells have one colour.

    Args:
        result: of `interchange`.
        title: by default the hypothesis.
    """
    rows = list(dict.fromkeys(cell.intervention for cell in result.cells))
    layers = sorted({cell.layer for cell in result.cells})
    values = [[math.nan] * len(layers) for _ in rows]
    for cell, r2 in zip(result.cells, result.r2, strict=True):
        values[rows.index(cell.intervention)][layers.index(cell.layer)] = r2.mean
    words = [["" if math.isnan(v) else f"{v:.2f}" if v > -10 else "< -10" for v in row] for row in values]
    fig = figure(title or result.hypothesis, "layers before the intervention")
    add_heatmap(
        fig, values, [str(layer) for layer in layers], rows, "%{y}, %{x} layers: R² %{text}", zmin=0, zmax=1,
        colorbar={"title": bar_title("R²")}, text=words, texttemplate="%{text}",
    )  # fmt: skip
    fig.update_yaxes(autorange="reversed", type="category")
    fig.update_xaxes(type="category")
    fig.update_layout(height=150 + 30 * len(rows), margin={"l": 220})
    return fig


def hypotheses_ranked(result: HypothesisTest, title: str = "Which algorithm does it run?") -> go.Figure:
    """What each hypothesis explains of what interventions do, with 95% intervals, the best at the top.

    Args:
        result: of `test_hypotheses`.
        title: of the picture.
    """
    effects = [test.effects for test in result.tests]
    names = [test.hypothesis for test in result.tests]
    fig = figure(title, "part of the effects that is explained")
    errors = {
        "type": "data", "symmetric": False, "thickness": 1.3,
        "array": [e.high - e.mean for e in effects], "arrayminus": [e.mean - e.low for e in effects],
    }  # fmt: skip
    weakest = [f"weakest R² {test.score.mean:.3g}, {test.cells[test.weakest]}" for test in result.tests]
    fig.add_trace(
        go.Scatter(
            x=[e.mean for e in effects], y=names, mode="markers", marker={"color": COLORS["trained"], "size": 9},
            error_x=errors, text=weakest, hovertemplate="%{y}: %{x:.3f}<br>%{text}<extra></extra>",
        )
    )  # fmt: skip
    fig.add_vline(x=1, line={"width": 1, "dash": "dot"})
    fig.update_yaxes(autorange="reversed", type="category")
    fig.update_layout(height=120 + 26 * len(names), margin={"l": 480})
    return fig
