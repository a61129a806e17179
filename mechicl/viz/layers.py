"""Figures of layers as steps of an algorithm: matches with its iterations, and probes."""

from collections.abc import Mapping

import plotly.graph_objects as go
import torch

from mechicl.analysis.behaviour.growth import Growth
from mechicl.analysis.behaviour.matching import Match
from mechicl.analysis.layers.probes import ProbeResult
from mechicl.base.arguments import checked
from mechicl.viz.elements import add_heatmap, add_line, bar_title, colors_for, figure, name_cells, tick_log_axes


@checked
def match_heatmap(match: Match, title: str | None = None) -> go.Figure:
    """Similarity of every pair of steps, the best match of each row outlined (Fu et al. 2024, Fig. 2)."""
    x, y = [str(row) for row in match.rows], [str(column) for column in match.columns]
    compared = "errors" if match.similarity == "errors" else "induced weights"
    steps = match.column_name if match.column_name == "layer" else f"steps of {match.column_name}"
    fig = figure(title or f"Similarity of {compared}", match.row_name, steps)
    hover = f"{match.row_name} %{{x}}<br>{match.column_name} %{{y}}<br>cosine %{{z:.3f}}"
    means = match.mean().cpu().T
    lowest = -1 if means.min() < 0 else 0  # one scale for all families of a page
    add_heatmap(fig, means, x, y, hover, colorscale="Viridis", zmin=lowest, zmax=1,
                colorbar={"title": bar_title("cosine"), "thickness": 14})  # fmt: skip
    outline = {"symbol": "square-open", "size": 13, "color": "white", "line": {"width": 2.5}}
    best = [y[column] for column in match.best_columns()]
    fig.add_trace(go.Scatter(x=x, y=best, mode="markers", marker=outline, name="best match", hoverinfo="skip"))
    return name_cells(fig).update_layout(height=max(380, 17 * len(y) + 130), showlegend=False)


def match_curve(
    matches: Mapping[str, Match], growths: Mapping[str, Growth] | None = None, title: str = "Best-matching steps"
) -> go.Figure:
    """The best-matching step of each layer with its interval, on a logarithmic axis, and curves fitted to it.

    Args:
        matches: by the algorithm's name; at least one.
        growths: fits by the same names; the better of the two curves is drawn.
        title: of the figure.
    """
    fig = figure(title, next(iter(matches.values())).row_name, "best-matching steps", log_y=True)
    shifts = [0.12 * (i - (len(matches) - 1) / 2) for i in range(len(matches))]  # equal steps are side by side
    for color, shift, (name, match) in zip(colors_for(list(matches)), shifts, matches.items(), strict=True):
        best = [b for b in match.best() if b.column >= 1]
        for at_edge, symbol in ((False, "circle"), (True, "circle-open")):
            points = [b for b in best if b.at_edge == at_edge]
            if not points:
                continue
            where = ", at the edge of the steps that were tried" if at_edge else ""
            only = len(points) == len(best)
            errors = {  # None: no caps in the circle
                "type": "data", "symmetric": False, "thickness": 1.2, "width": 3,
                "array": [max(b.high - b.column, 0) if b.high > b.low else None for b in points],
                "arrayminus": [min(max(b.column - b.low, 0), b.column - 0.5) if b.high > b.low else None
                               for b in points],
            }  # fmt: skip
            drawn = go.Scatter(
                x=[b.row + shift for b in points], y=[b.column for b in points], error_y=errors,
                name=f"{name}{where}" if only else name, legendgroup=name, showlegend=only or not at_edge,
                mode="markers",
                marker={"color": color, "size": 9, "symbol": symbol, "line": {"width": 1.5, "color": color}},
                customdata=[b.row for b in points],
                hovertemplate=f"{match.row_name} %{{customdata}}: %{{y:g}} steps of {name}{where}<extra></extra>",
            )  # fmt: skip
            fig.add_trace(drawn)
        growth = (growths or {}).get(name)
        if growth is not None:
            exponential = growth.exponential_aic < growth.linear_aic
            curve, kind = (growth.exponential_fit, "exponential") if exponential else (growth.linear_fit, "linear")
            add_line(fig, growth.rows, curve, f"{name}: {kind} fit", color, dash="dot", legendgroup=name)
    fig.update_xaxes(dtick=1)
    return tick_log_axes(fig)


def probe_heatmap(result: ProbeResult, quantity: str | None = None, title: str | None = None) -> go.Figure:
    """Selectivity (R² minus the control task's) of the probes for one quantity, by layer and position.

    Raises:
        ValueError: an unknown quantity.
    """
    quantity = quantity or result.quantities[0]
    if quantity not in result.quantities:
        raise ValueError(f"no quantity {quantity!r}; there are {list(result.quantities)}")
    index = result.quantities.index(quantity)
    explained, control = result.explained()[index], result.control()[index]
    fig = figure(title or f"Probes for {quantity}", "token", "layer")
    hover = "%{x}, layer %{y}<br>R² %{customdata[0]:.3f}<br>control %{customdata[1]:.3f}"
    add_heatmap(
        fig, explained - control, result.positions, range(len(explained)), hover, zmin=0, zmax=1, colorscale="Viridis",
        customdata=torch.stack([explained, control], -1).tolist(),
        colorbar={"title": bar_title("R² − control"), "thickness": 14},
    )  # fmt: skip
    fig.update_xaxes(type="category", showgrid=False)
    return fig.update_yaxes(dtick=1, showgrid=False)
