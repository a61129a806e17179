"""Pictures of causal tests: counterfactuals by layer and intervention, hypotheses ranked, learned subspaces."""

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from mechicl.analysis.causes.hypotheses import HOLDS, HypothesisTest
from mechicl.analysis.causes.interchange import Interchange
from mechicl.analysis.causes.subspaces import SubspaceSearch
from mechicl.base.arguments import checked
from mechicl.viz.elements import (
    BELOW,
    COLORS,
    add_heatmap,
    add_intervals,
    bar_title,
    colors_for,
    figure,
    interval_dots,
    panel,
    panels,
)

ARROWS = {
    "context skips": ("context", "context"),
    "query skips": ("query", "query"),
    "query does not read": ("context", "query"),
}
"""Interventions that cut an arrow, and what the arrow joins."""


@checked
def interchange_heatmap(result: Interchange, title: str | None = None) -> go.Figure:
    """Interchange R² of every intervention (rows) at every layer (columns); below 0 all cells have one colour."""
    rows = list(dict.fromkeys(cell.intervention for cell in result.cells))
    layers = sorted({cell.layer for cell in result.cells})
    values = [[math.nan] * len(layers) for _ in rows]
    for cell, r2 in zip(result.cells, result.r2, strict=True):
        values[rows.index(cell.intervention)][layers.index(cell.layer)] = r2.mean
    words = [["" if math.isnan(v) else f"{v:.2f}" if v > -10 else "< -10" for v in row] for row in values]
    fig = figure(title or result.hypothesis, "layers before the intervention")
    add_heatmap(
        fig, values, [str(layer) for layer in layers], rows, "%{y}, %{x} layers: R² %{text}", zmin=0, zmax=1,
        colorscale="Viridis", colorbar={"title": bar_title("R²")}, text=words, texttemplate="%{text}",
    )  # fmt: skip
    fig.update_yaxes(autorange="reversed", type="category")
    fig.update_xaxes(type="category")
    return fig.update_layout(height=150 + 30 * len(rows))


@checked
def hypotheses_ranked(result: HypothesisTest, title: str = "Which algorithm does it run?") -> go.Figure:
    """The part of the interventions' effects that each hypothesis explains, with 95% intervals, the best at the top."""
    names, effects = [test.hypothesis for test in result.tests], [test.effects for test in result.tests]
    weakest = [f"weakest R² {test.score.mean:.3g}, {test.cells[test.weakest]}" for test in result.tests]
    fig = interval_dots(title, "part of the effects that is explained", names, effects, words=weakest)
    return fig.add_vline(x=1, line={"width": 1, "dash": "dot"})


@checked
def counterfactual_scatter(
    result: Interchange, interventions: Sequence[str] = (), *, columns: int = 3, title: str | None = None
) -> go.Figure:
    """The model's prediction after an intervention (up) against the hypothesis's (across), a panel per intervention.

    Dots are prompts at all layers, darker for later ones; on the dotted line both agree. All interventions are drawn by
    default.

    Raises:
        ValueError: interventions that were not made.
    """
    names = list(dict.fromkeys(cell.intervention for cell in result.cells))
    unknown = sorted(set(interventions) - set(names))
    if unknown:
        raise ValueError(f"{unknown} were not made; there are {names}")
    names = [name for name in names if not interventions or name in interventions]
    fig = panels(title or result.hypothesis, names, columns=columns)
    # predictions that explode would hide everything else
    bound = 1.5 * float(max(result.base.abs().max(), result.sources.abs().max())) or 1.0
    last = max(cell.to_layer for cell in result.cells) or 1
    for i, name in enumerate(names):
        place = panel(i, columns)
        fig.add_trace(go.Scatter(x=[-bound, bound], y=[-bound, bound], mode="lines", showlegend=False, hoverinfo="skip",
                                 line={"width": 1, "dash": "dot", "color": "grey"}), **place)  # fmt: skip
        for j, cell in enumerate(result.cells):
            if cell.intervention != name:
                continue
            across, up = (each[j].flatten().clamp(-bound, bound) for each in (result.expected, result.predictions))
            shade = {"color": COLORS["trained"], "size": 4, "opacity": 0.25 + 0.6 * cell.layer / last}
            words = f"{cell}<br>hypothesis %{{x:.3f}}, model %{{y:.3f}}<extra></extra>"
            fig.add_trace(go.Scatter(x=across.tolist(), y=up.tolist(), mode="markers", marker=shade, showlegend=False,
                                     hovertemplate=words), **place)  # fmt: skip
    fig.update_xaxes(range=[-bound, bound])
    fig.update_yaxes(range=[-bound, bound])
    n_rows = -(-len(names) // columns)
    fig.update_layout(height=110 + 190 * n_rows)
    for i in range(max(0, len(names) - columns), len(names)):
        fig.update_xaxes(title_text="hypothesis", **panel(i, columns))
    for i in range(0, len(names), columns):
        fig.update_yaxes(title_text="model", **panel(i, columns))
    return fig


@checked
def causal_graph(result: Interchange, title: str | None = None) -> go.Figure:
    """The causal model with its measured arrows: the states of the query and of the context, layer by layer.

    An arrow's number is how far the prediction moves when the arrow is cut, as a part of the squared distance between
    both ends: along the rows, what layers do at the query or in the context; between them, what the query reads. The
    number in a circle is how far the prediction moves when the state there comes from the source. Blue agrees with the
    hypothesis (R² of at least 0.9), orange does not; interventions that were not made are missing.
    """
    rows = {"context": 1.0, "query": 0.0}
    fig = figure(title or result.hypothesis, "layers")
    last = max(cell.to_layer for cell in result.cells)
    moves, expected, r2s = result.moved, result.expected_moved, result.r2
    for i, cell in enumerate(result.cells):
        moved, told, r2 = moves[i].mean, expected[i].mean, r2s[i].mean
        color = COLORS["trained"] if r2 >= HOLDS else COLORS["interpolated"]
        words = f"{cell}: moves {_share(moved)} (hypothesis {_share(told)}), R² {_capped(r2)}"
        text = {"text": [_share(moved)], "showlegend": False, "hovertext": words, "hoverinfo": "text"}
        if cell.intervention in ARROWS:
            tail, head = (rows[end] for end in ARROWS[cell.intervention])
            width = 1 + 5 * min(1.0, math.sqrt(moved))
            fig.add_annotation(
                x=cell.to_layer, y=head, ax=cell.layer, ay=tail, xref="x", yref="y", axref="x", ayref="y", text="",
                showarrow=True, arrowhead=2, arrowsize=0.6, arrowwidth=width, arrowcolor=color, standoff=19,
                startstandoff=19, opacity=0.8,
            )  # fmt: skip
            sideways = 0.13 if tail != head else 0.0
            across, up = (cell.layer + cell.to_layer) / 2 + sideways, (tail + head) / 2 + 0.12 * (tail == head)
            fig.add_trace(go.Scatter(x=[across], y=[up], mode="text", textfont={"color": color, "size": 12}, **text))
        elif cell.intervention in ("query exchanged", "context exchanged"):
            row = rows[cell.intervention.split()[0]]
            disc = {"size": 36, "color": "white", "line": {"color": color, "width": 3}}
            fig.add_trace(go.Scatter(x=[cell.layer], y=[row], mode="markers+text", textfont={"size": 11}, marker=disc,
                                     **text))  # fmt: skip
    for name, row in rows.items():
        fig.add_trace(go.Scatter(x=[0, last], y=[row, row], mode="markers", showlegend=False, hoverinfo="skip",
                                 marker={"size": 14, "color": "#888888"}))  # fmt: skip
        fig.add_annotation(x=-0.15, y=row, text=name, showarrow=False, xanchor="right")
    fig.add_annotation(x=last + 0.15, y=0, text="prediction", showarrow=False, xanchor="left")
    fig.update_yaxes(visible=False, range=[-0.35, 1.35])
    fig.update_xaxes(range=[-0.8, last + 0.9], tickvals=list(range(last + 1)), showgrid=False, zeroline=False)
    fig.update_layout(height=300)
    return fig


def subspace_curves(result: SubspaceSearch, title: str | None = None) -> go.Figure:
    """Held-out R² of learned subspaces (solid) and of their complements (dotted) by dimension, a panel per layer.

    The model and the controls are drawn, with 95% intervals; values below -0.5 are cut off.
    """
    names = [f"after {layer} layer{'' if layer == 1 else 's'}" for layer in result.layers]
    title = title or f"{result.place}'s {', '.join(result.variables)}: {result.hypothesis}"
    columns = min(3, len(names))
    fig = panels(title, names, columns=columns)
    colors = [COLORS["trained"], *colors_for([*result.searches[1:]])]
    for s, search in enumerate(result.searches):
        for i in range(len(result.layers)):
            for curve, dash, suffix in zip(result.curves(s, i), ("solid", "dot"), ("", ", its rest"), strict=True):
                add_intervals(
                    fig, [str(dim) for dim in result.dims], curve, search + suffix, colors[s], dash=dash,
                    place=panel(i, columns), showlegend=not i, legendgroup=search + suffix,
                )  # fmt: skip
    fig.update_xaxes(title_text="dimensions", type="category")
    fig.update_yaxes(range=[-0.5, 1.05])
    fig.update_yaxes(title_text="held-out R²", col=1)
    return fig.update_layout(legend=BELOW, height=130 + 330 * (-(-len(names) // columns)))


def _share(value: float) -> str:
    return f"{value:.2f}" if value < 10 else "> 10"


def _capped(value: float) -> str:
    return f"{value:.2f}" if value > -10 else "below -10"
