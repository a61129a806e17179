"""Figures of causal tests: counterfactuals by layer and intervention, hypotheses ranked, learned subspaces."""

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from mechicl.analysis.causes import HypothesisTest, Interchange, SubspaceSearch
from mechicl.analysis.causes.hypotheses import HOLDS
from mechicl.base.arguments import Count, checked
from mechicl.viz import elements as draw

ARROWS = {
    "context skips": ("context", "context"),
    "query skips": ("query", "query"),
    "query does not read": ("context", "query"),
}
"""Interventions that cut an arrow, and the nodes that the arrow joins."""


def interchange_heatmap(result: Interchange) -> go.Figure:
    """Draw the R² of each intervention of `interchange` (rows) at each layer (columns), in one colour below 0."""
    rows = list(dict.fromkeys(cell.intervention for cell in result.cells))
    layers = sorted({cell.layer for cell in result.cells})
    values = [[math.nan] * len(layers) for _ in rows]
    for cell, r2 in zip(result.cells, result.r2, strict=True):
        values[rows.index(cell.intervention)][layers.index(cell.layer)] = r2.mean
    text = [["" if math.isnan(v) else f"{v:.2f}" if v > -10 else "< -10" for v in row] for row in values]
    fig = draw.figure(result.hypothesis, "layers before the intervention")
    draw.add_heatmap(
        fig, values, [str(layer) for layer in layers], rows, "%{y}, %{x} layers: R² %{text}", zmin=0, zmax=1,
        colorscale="Viridis", colorbar=draw.color_bar("R²"), text=text, texttemplate="%{text}",
    )  # fmt: skip
    fig.update_yaxes(autorange="reversed", type="category").update_xaxes(type="category")
    return fig.update_layout(height=150 + 30 * len(rows))


def hypotheses_ranked(result: HypothesisTest) -> go.Figure:
    """Draw the share of effects that each hypothesis explains (`test_hypotheses`), with 95% intervals, best first."""
    names, effects = [test.hypothesis for test in result.tests], [test.effects for test in result.tests]
    weakest = [f"weakest R² {test.score.mean:.3g}, {test.cells[test.weakest]}" for test in result.tests]
    fig = draw.interval_dots("Which algorithm does it run?", "effects explained", names, effects, notes=weakest)
    return fig.add_vline(x=1, line={"width": 1, "dash": "dot"}).update_xaxes(tickformat=draw.PERCENT)


@checked
def counterfactual_scatter(result: Interchange, interventions: Sequence[str] = (), *, columns: Count = 3) -> go.Figure:
    """Draw the model's prediction after an intervention (vertical) against the hypothesis's (horizontal).

    Each dot is a prompt at one layer, darker for later layers; on the dotted line model and hypothesis agree.

    Args:
        result: interventions compared with a hypothesis, from `interchange` (or a test of `test_hypotheses`).
        interventions: names of the interventions to draw, one panel each, such as "query exchanged"; by default all.
        columns: number of panels in a row.
    """
    names = list(dict.fromkeys(cell.intervention for cell in result.cells))
    if unknown := sorted(set(interventions) - set(names)):
        raise ValueError(f"interventions must be among {names}, got {unknown}")
    names = [name for name in names if not interventions or name in interventions]
    fig = draw.panels(result.hypothesis, names, columns=columns)
    # predictions that explode would hide everything else
    bound = 1.5 * float(max(result.base.abs().max(), result.sources.abs().max())) or 1.0
    last = max(cell.to_layer for cell in result.cells) or 1
    diagonal = {"width": 1, "dash": "dot", "color": "grey"}
    for i, name in enumerate(names):
        place = draw.panel(i, columns)
        fig.add_scatter(
            x=[-bound, bound], y=[-bound, bound], mode="lines", line=diagonal, showlegend=False, hoverinfo="skip",
            **place,
        )  # fmt: skip
        for j, cell in enumerate(result.cells):
            if cell.intervention == name:
                x, y = (cut[j].flatten().clamp(-bound, bound).tolist() for cut in (result.expected, result.predictions))
                shade = {"color": draw.COLORS["trained"], "size": 4, "opacity": 0.25 + 0.6 * cell.layer / last}
                hover = f"{draw.literal(str(cell))}<br>hypothesis %{{x:.3f}}, model %{{y:.3f}}<extra></extra>"
                fig.add_scatter(x=x, y=y, mode="markers", marker=shade, showlegend=False, hovertemplate=hover, **place)
        if i + columns >= len(names):  # the lowest in its column
            fig.update_xaxes(title_text="hypothesis", **place)
    fig.update_xaxes(range=[-bound, bound]).update_yaxes(range=[-bound, bound])
    fig.update_yaxes(title_text="model", col=1)
    return fig.update_layout(height=110 + 190 * -(-len(names) // columns))


@checked
def causal_graph(result: Interchange, title: str | None = None) -> go.Figure:
    """Draw an algorithm's causal graph with measured effects: states of the query and of the context, layer by layer.

    Numbers are squared changes of the prediction, as a share of the squared distance between the predictions on the
    prompts and on the source prompts. A number at an arrow is for cutting that arrow: along a row, skipping the layers
    at the query or in the context; between the rows, the query not reading the context. A number in a circle is for
    replacing that state by the source run's. Blue: the model does as the hypothesis predicts (interchange R² of at
    least 0.9); orange: it does not. Interventions that were not made are missing.

    Args:
        result: interventions compared with a hypothesis, from `interchange` (or a test of `test_hypotheses`).
        title: title of the figure; by default the hypothesis's name.
    """
    rows = {"context": 1.0, "query": 0.0}
    fig = draw.figure(title or result.hypothesis, "layers")
    last = max(cell.to_layer for cell in result.cells)
    for cell, move, expected, score in zip(result.cells, result.moved, result.expected_moved, result.r2, strict=True):
        moved, r2 = move.mean, score.mean
        color = draw.COLORS["trained" if r2 >= HOLDS else "interpolated"]
        capped = f"{r2:.2f}" if r2 > -10 else "below -10"
        hover = f"{cell}: moves {_share(moved)} (hypothesis {_share(expected.mean)}), R² {capped}"
        text = {"text": [_share(moved)], "showlegend": False, "hovertext": draw.literal(hover), "hoverinfo": "text"}
        if cell.intervention in ARROWS:
            tail, head = (rows[end] for end in ARROWS[cell.intervention])
            fig.add_annotation(
                x=cell.to_layer, y=head, ax=cell.layer, ay=tail, xref="x", yref="y", axref="x", ayref="y", text="",
                showarrow=True, arrowhead=2, arrowsize=0.6, arrowwidth=1 + 3 * min(1.0, math.sqrt(moved)),
                arrowcolor=color, standoff=19, startstandoff=19, opacity=0.8,
            )  # fmt: skip
            x, y = (cell.layer + cell.to_layer) / 2, (tail + head) / 2  # right of the arrow, or above it and the discs
            side, y = ("middle right", y) if tail != head else ("top center", y + 0.15)
            look = {"textposition": side, "textfont": {"color": color, "size": 12}}
            fig.add_scatter(x=[x + 0.07 * (tail != head)], y=[y], mode="text", **look, **text)
        elif cell.intervention in ("query exchanged", "context exchanged"):
            disc = {"size": 36, "color": "white", "line": {"color": color, "width": 3}}
            y = rows[cell.intervention.split()[0]]
            fig.add_scatter(x=[cell.layer], y=[y], mode="markers+text", textfont={"size": 11}, marker=disc, **text)
    grey = {"size": 14, "color": "#888888"}
    for name, row in rows.items():
        fig.add_scatter(x=[0, last], y=[row, row], mode="markers", showlegend=False, hoverinfo="skip", marker=grey)
        fig.add_annotation(x=-0.15, y=row, text=name, showarrow=False, xanchor="right")
    fig.add_annotation(x=last + 0.9, y=0, text="prediction", showarrow=False, xanchor="right", yshift=-20)
    fig.update_yaxes(visible=False, range=[-0.35, 1.35])
    fig.update_xaxes(range=[-0.8, last + 0.9], tickvals=list(range(last + 1)), showgrid=False, zeroline=False)
    return fig.update_layout(height=300)


def subspace_curves(result: SubspaceSearch) -> go.Figure:
    """Draw held-out R² of learned subspaces (solid) and of their complements (dotted) by dimension, a panel per layer.

    The result is that of `fit_subspace`. The model and the controls are drawn, with 95% intervals; values below -0.5
    are cut off.
    """
    names = [f"after {layer} layer{'' if layer == 1 else 's'}" for layer in result.layers]
    title = f"{result.place}'s {', '.join(result.variables)}: {result.hypothesis}"
    columns = min(3, len(names))
    fig = draw.panels(title, names, columns=columns)
    colors = [draw.COLORS["trained"], *draw.colors_for([*result.searches[1:]])]
    for s, search in enumerate(result.searches):
        for i in range(len(result.layers)):
            for curve, dash, suffix in zip(result.curves(s, i), ("solid", "dot"), ("", ", its rest"), strict=True):
                draw.add_intervals(
                    fig, [str(dim) for dim in result.dims], curve, search + suffix, colors[s], dash=dash,
                    place=draw.panel(i, columns), showlegend=not i, legendgroup=search + suffix,
                )  # fmt: skip
    fig.update_xaxes(title_text="dimensions", type="category").update_yaxes(range=[-0.5, 1.05])
    fig.update_yaxes(title_text="held-out R²", col=1)
    return fig.update_layout(legend=draw.BELOW, height=130 + 330 * (-(-len(names) // columns)))


def _share(value: float) -> str:
    return f"{value:.2f}" if value < 10 else "> 10"
