"""Pictures of layers as steps of an algorithm: matches, curves over points or layers, probes."""

import itertools
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from mechicl.analysis.behaviour.growth import Growth
from mechicl.analysis.behaviour.matching import Match
from mechicl.analysis.layers.probes import ProbeResult
from mechicl.statistics import Interval
from mechicl.viz.style import COLORS, add_band, add_line, figure

PALETTE = tuple(COLORS[name] for name in ("trained", "interpolated", "closed form", "other", "gradient descent"))
MANY = 6  # names beyond which a legend of colours tells less than a colour scale


def match_heatmap(match: Match, title: str | None = None) -> go.Figure:
    """Similarity of every pair of steps, the best match of each row outlined (Fu et al. 2024, Fig. 2)."""
    values = match.mean().cpu()
    x, y = [str(row) for row in match.rows], [str(column) for column in match.columns]
    of = "errors" if match.similarity == "errors" else "induced weights"
    fig = figure(title or f"Similarity of {of}", match.row_name, match.column_name)
    fig.add_trace(
        go.Heatmap(
            z=values.T.tolist(),
            x=x,
            y=y,
            colorscale="Viridis",
            colorbar={"title": "cosine", "thickness": 14},
            hovertemplate=f"{match.row_name} %{{x}}<br>{match.column_name} %{{y}}<br>cosine %{{z:.3f}}<extra></extra>",
        )
    )
    best = match.best_columns()
    fig.add_trace(
        go.Scatter(
            x=x,
            y=[y[column] for column in best],
            mode="markers",
            marker={"symbol": "square-open", "size": 13, "color": "white", "line": {"width": 2.5}},
            name="best match",
            hoverinfo="skip",
        )
    )
    fig.update_xaxes(type="category", showgrid=False)
    fig.update_yaxes(type="category", showgrid=False)
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
    first = next(iter(matches.values()))
    fig = figure(title, first.row_name, "best-matching steps", log_y=True)
    for color, (name, match) in zip(itertools.cycle(PALETTE), matches.items(), strict=False):
        best = [b for b in match.best() if b.column >= 1]
        fig.add_trace(
            go.Scatter(
                x=[b.row for b in best],
                y=[b.column for b in best],
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [max(b.high - b.column, 0) for b in best],
                    "arrayminus": [min(max(b.column - b.low, 0), b.column - 0.5) for b in best],
                    "thickness": 1.2,
                    "width": 3,
                },
                name=name,
                mode="markers",
                marker={
                    "color": color,
                    "size": 9,
                    "symbol": ["circle-open" if b.at_edge else "circle" for b in best],
                },
                text=["at the edge of the grid" if b.at_edge else "" for b in best],
            )
        )
        growth = (growths or {}).get(name)
        if growth is not None:
            exponential = growth.exponential_aic < growth.linear_aic
            curve, kind = (growth.exponential_fit, "exponential") if exponential else (growth.linear_fit, "linear")
            add_line(fig, growth.rows, curve, f"{name}: {kind} fit", color, dash="dot")
    return fig


def interval_lines(
    title: str,
    x_title: str,
    y_title: str,
    x: Sequence[float],
    lines: Mapping[str, Sequence[Interval]],
    *,
    log_y: bool = False,
    log_x: bool = False,
) -> go.Figure:
    """Lines of means with bands of their intervals; many lines take the colours of a scale, in order.

    On a logarithmic axis, means that are not positive leave a gap.
    """
    fig = figure(title, x_title, y_title, log_x=log_x, log_y=log_y)
    many = len(lines) >= MANY
    colors = sample_colorscale("Viridis", [i / max(len(lines) - 1, 1) for i in range(len(lines))])
    for i, (name, intervals) in enumerate(lines.items()):
        color = _hex(str(colors[i])) if many else PALETTE[i % len(PALETTE)]
        shown = [None if log_y and not interval.mean > 0 else interval.mean for interval in intervals]
        positive = [j for j, mean in enumerate(shown) if mean is not None]
        if all(intervals[j].n > 1 for j in positive) and positive:
            low = [max(intervals[j].low, intervals[j].mean * 1e-2) if log_y else intervals[j].low for j in positive]
            add_band(fig, [x[j] for j in positive], low, [intervals[j].high for j in positive], color)
        add_line(fig, x, shown, name, color)
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
    fig.add_trace(
        go.Heatmap(
            z=(explained - control).tolist(),
            x=list(result.positions),
            customdata=[[list(pair) for pair in zip(e, c, strict=True)] for e, c in
                        zip(explained.tolist(), control.tolist(), strict=True)],
            zmin=0,
            zmax=1,
            colorscale="Viridis",
            colorbar={"title": "R² − control", "thickness": 14},
            hovertemplate="%{x}, layer %{y}<br>R² %{customdata[0]:.3f}<br>control %{customdata[1]:.3f}<extra></extra>",
        )
    )  # fmt: skip
    fig.update_xaxes(type="category", showgrid=False)
    fig.update_yaxes(dtick=1, showgrid=False)
    return fig


def _hex(color: str) -> str:
    """`rgb(r, g, b)` as `#rrggbb`."""
    r, g, b = (round(float(part)) for part in color.removeprefix("rgb(").removesuffix(")").split(","))
    return f"#{r:02x}{g:02x}{b:02x}"
