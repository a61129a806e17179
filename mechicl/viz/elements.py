"""What figures are made of: one look, grids of panels, lines with bands of intervals, heatmaps."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots
from torch import Tensor

from mechicl.statistics import Interval

COLORS = {
    "gradient descent": "#222222",
    "GD++": "#7b4fb0",
    "trained": "#1f6fb4",
    "interpolated": "#e07b00",
    "closed form": "#2a9d4a",
    "other": "#b0413e",
}
"""Who is who, the same in every figure."""
PALETTE = tuple(COLORS[name] for name in ("trained", "interpolated", "closed form", "other", "gradient descent"))
MANY = 6  # names beyond which a legend of colours tells less than a colour scale
BELOW = {"orientation": "h", "x": 0, "y": -0.25, "yanchor": "top"}  # where a legend stands under its figure
SIGNED = "RdBu"
"""Colours of quantities with a sign: blue is positive, red is negative, in every picture."""
SHARES = "Blues"
"""Colours of quantities without: attention, shares."""
FIRST_STEP = "optimisation step (the first point is step 0)"
Place = Mapping[str, Any]  # of a trace in a grid: a `panel`, or "secondary_y"


def figure(title: str, x_title: str = "", y_title: str = "", *, log_x: bool = False, log_y: bool = False) -> go.Figure:
    """An empty figure with titles and axes."""
    fig = go.Figure()
    _look(fig, title)
    fig.update_xaxes(title_text=x_title, type="log" if log_x else "linear")
    fig.update_yaxes(title_text=y_title, type="log" if log_y else "linear", exponentformat="power")
    return fig


def panels(title: str, names: Sequence[str], *, columns: int | None = None, **options: Any) -> go.Figure:
    """An empty grid of panels with a name above each; `options` are those of plotly's `make_subplots`."""
    columns = columns or max(len(names), 1)
    rows = -(-len(names) // columns) or 1
    fig = make_subplots(rows=rows, cols=columns, subplot_titles=list(names) if any(names) else None, **options)
    _look(fig, title)
    fig.update_annotations(font_size=13)
    fig.update_layout(margin_t=85 if title and any(names) else 50)
    return fig


def panel(i: int, columns: int) -> dict[str, Any]:
    """The place of the i-th panel of a grid."""
    return {"row": i // columns + 1, "col": i % columns + 1}


def _look(fig: go.Figure, title: str) -> None:
    fig.update_layout(
        title={"text": title, "x": 0.01, "font": {"size": 16}},
        template="plotly_white",
        font={"family": "system-ui, sans-serif", "size": 13},
        margin={"l": 70, "r": 20, "t": 50, "b": 55},
        height=380,
        legend={"bgcolor": "rgba(255,255,255,0.7)"},
    )


def add_line(
    fig: go.Figure,
    x: Sequence[float],
    y: Sequence[float | None],
    name: str,
    color: str,
    *,
    dash: str = "solid",
    width: float = 2,
    place: Place | None = None,
    **options: Any,
) -> None:
    """A line with a name and a colour; None leaves a gap."""
    line = {"color": color, "dash": dash, "width": width}
    fig.add_trace(
        go.Scatter(x=list(x), y=list(y), name=name, line=line, **{"mode": "lines", **options}), **(place or {})
    )


def add_band(
    fig: go.Figure,
    x: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    color: str,
    place: Place | None = None,
) -> None:
    """A shaded interval around a line."""
    r, g, b = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    band = go.Scatter(
        x=[*x, *reversed(list(x))],
        y=[*high, *reversed(list(low))],
        mode="lines",  # by default few points would show markers
        fill="toself",
        fillcolor=f"rgba({r},{g},{b},0.18)",
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
    )
    fig.add_trace(band, **(place or {}))


def add_intervals(
    fig: go.Figure,
    x: Sequence[float],
    intervals: Sequence[Interval],
    name: str,
    color: str,
    *,
    log_y: bool = False,
    place: Place | None = None,
    **options: Any,
) -> None:
    """A line of means with a band of their intervals, where they have several samples.

    On a logarithmic axis, means that are not positive leave a gap.
    """
    means = [None if log_y and not each.mean > 0 else each.mean for each in intervals]
    shown = [i for i, mean in enumerate(means) if mean is not None]
    if shown and all(intervals[i].n > 1 for i in shown):
        low = [max(intervals[i].low, intervals[i].mean * 1e-2) if log_y else intervals[i].low for i in shown]
        add_band(fig, [x[i] for i in shown], low, [intervals[i].high for i in shown], color, place)
    add_line(fig, x, means, name, color, place=place, **options)


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
    for color, (name, intervals) in zip(colors_for(len(lines)), lines.items(), strict=True):
        add_intervals(fig, x, intervals, name, color, log_y=log_y)
    return fig


def colors_for(n: int) -> list[str]:
    """Colours of n lines: those of the palette while they are few, else of a scale."""
    if n < MANY:
        return [PALETTE[i % len(PALETTE)] for i in range(n)]
    return [_hex(str(color)) for color in sample_colorscale("Viridis", [i / (n - 1) for i in range(n)])]


def _hex(color: str) -> str:
    """`rgb(r, g, b)` as `#rrggbb`."""
    r, g, b = (round(float(part)) for part in color.removeprefix("rgb(").removesuffix(")").split(","))
    return f"#{r:02x}{g:02x}{b:02x}"


def add_heatmap(
    fig: go.Figure,
    z: Tensor | Sequence[Sequence[float | None]],
    x: Sequence[Any],
    y: Sequence[Any],
    hover: str,
    *,
    place: Place | None = None,
    **options: Any,
) -> None:
    """A heatmap `[y x]`; `hover` is plotly's template of what the pointer shows of a cell."""
    values = z.tolist() if isinstance(z, Tensor) else z
    heat = go.Heatmap(z=values, x=list(x), y=list(y), hovertemplate=f"{hover}<extra></extra>", **options)
    fig.add_trace(heat, **(place or {}))


def signed_scale(bound: float) -> dict[str, Any]:
    """Colours from red (negative) to blue (positive), as deep for both signs."""
    return {"colorscale": SIGNED, "zmin": -bound, "zmax": bound}


def name_cells(fig: go.Figure, **options: Any) -> go.Figure:
    """Axes whose ticks are names of a heatmap's rows and columns; `options` are those of plotly's axes."""
    for update in (fig.update_xaxes, fig.update_yaxes):
        update(type="category", showgrid=False, **options)
    return fig


def on_log_axis(steps: Sequence[int]) -> list[float]:
    """Steps as they are, but 0, which has no place on a logarithmic axis, at half of the next."""
    first = steps[1] / 2 if len(steps) > 1 else 1
    return [step or first for step in steps]
