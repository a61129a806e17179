"""Pictures of layers as steps of an algorithm: matches with its iterations, and probes."""

import itertools
from collections.abc import Mapping

import plotly.graph_objects as go
import torch

from mechicl.analysis.behaviour.growth import Growth
from mechicl.analysis.behaviour.matching import Match
from mechicl.analysis.layers.probes import ProbeResult
from mechicl.viz.elements import PALETTE, add_heatmap, add_line, figure, name_cells


def match_heatmap(match: Match, title: str | None = None) -> go.Figure:
    """Similarity of every pair of steps, the best match of each row outlined (Fu et al. 2024, Fig. 2)."""
    x, y = [str(row) for row in match.rows], [str(column) for column in match.columns]
    compared = "errors" if match.similarity == "errors" else "induced weights"
    fig = figure(title or f"Similarity of {compared}", match.row_name, match.column_name)
    hover = f"{match.row_name} %{{x}}<br>{match.column_name} %{{y}}<br>cosine %{{z:.3f}}"
    colorbar = {"title": "cosine", "thickness": 14}
    add_heatmap(fig, match.mean().cpu().T, x, y, hover, colorscale="Viridis", colorbar=colorbar)
    fig.add_trace(
        go.Scatter(
            x=x,
            y=[y[column] for column in match.best_columns()],
            mode="markers",
            marker={"symbol": "square-open", "size": 13, "color": "white", "line": {"width": 2.5}},
            name="best match",
            hoverinfo="skip",
        )
    )
    name_cells(fig)
    fig.update_layout(height=max(380, 17 * len(y) + 130), showlegend=False)
    return fig


def match_curve(
    matches: Mapping[str, Match], growths: Mapping[str, Growth] | None = None, title: str = "Best-matching steps"
) -> go.Figure:
    """The best-matching step of each layer with its interval, on a logarithmic axis, and curves fitted to it.

    Args:
        matches: by the algorithm's name.
        growths: fits by the same names; the better of the two curves is drawn.
        title: of the figure.

    Raises:
        ValueError: no matches.
    """
    if not matches:
        raise ValueError("match_curve() needs at least one match")
    fig = figure(title, next(iter(matches.values())).row_name, "best-matching steps", log_y=True)
    for color, (name, match) in zip(itertools.cycle(PALETTE), matches.items(), strict=False):
        best = [b for b in match.best() if b.column >= 1]
        errors = {
            "type": "data", "symmetric": False, "thickness": 1.2, "width": 3,
            "array": [max(b.high - b.column, 0) for b in best],
            "arrayminus": [min(max(b.column - b.low, 0), b.column - 0.5) for b in best],
        }  # fmt: skip
        fig.add_trace(
            go.Scatter(
                x=[b.row for b in best],
                y=[b.column for b in best],
                error_y=errors,
                name=name,
                mode="markers",
                marker={"color": color, "size": 9, "symbol": ["circle-open" if b.at_edge else "circle" for b in best]},
                text=["at the edge of the grid" if b.at_edge else "" for b in best],
            )
        )
        growth = (growths or {}).get(name)
        if growth is not None:
            exponential = growth.exponential_aic < growth.linear_aic
            curve, kind = (growth.exponential_fit, "exponential") if exponential else (growth.linear_fit, "linear")
            add_line(fig, growth.rows, curve, f"{name}: {kind} fit", color, dash="dot")
    return fig


def probe_heatmap(result: ProbeResult, quantity: str, title: str | None = None) -> go.Figure:
    """Selectivity (R² minus the control task's) of the probes for one quantity, by layer and position.

    Raises:
        ValueError: an unknown quantity.
    """
    if quantity not in result.quantities:
        raise ValueError(f"no quantity {quantity!r}; there are {list(result.quantities)}")
    index = result.quantities.index(quantity)
    explained, control = result.explained()[index], result.control()[index]
    fig = figure(title or f"Probes for {quantity}", "token", "layer")
    hover = "%{x}, layer %{y}<br>R² %{customdata[0]:.3f}<br>control %{customdata[1]:.3f}"
    add_heatmap(
        fig, explained - control, result.positions, range(len(explained)), hover, zmin=0, zmax=1, colorscale="Viridis",
        customdata=torch.stack([explained, control], -1).tolist(), colorbar={"title": "R² − control", "thickness": 14},
    )  # fmt: skip
    fig.update_xaxes(type="category", showgrid=False)
    fig.update_yaxes(dtick=1, showgrid=False)
    return fig
