"""Primitives of figures: one style, grids of panels, lines with bands of intervals, dots with bars, heatmaps."""

import html
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
from plotly.colors import sample_colorscale, unlabel_rgb
from plotly.subplots import make_subplots
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.statistics import Interval

COLORS = {
    "gradient descent": "#222222", "gradient descent on the paper's grid": "#777777",
    "gradient descent with momentum": "#4e342e", "GD++": "#7b4fb0", "Newton": "#d6336c", "Chebyshev": "#0a8f8f",
    "steepest descent": "#6a4cff", "conjugate gradients": "#00a8e8", "closed form": "#2a9d4a", "ridge path": "#f28e2b",
    "any function of S": "#e8648f", "any first-order learner": "#a8577e",
    "trained": "#1f6fb4", "other seeds": "#9cc3e6", "interpolated": "#e07b00", "linearised": "#7d7d00",
    "layer by layer": "#5c6bc0", "fine-tuned": "#a0522d", "zero-shot": "#5f7a8c", "random": "#b4b4b4",
    "other": "#b0413e", "named": "#b5179e", "nearest": "#b5179e", "tied with it": "#dc8fd0",
    "contains it as a special case": "#7b6fa8", "other algorithms": "#8a8f98",
    "query exchanged": "#33658a", "context exchanged": "#d1495b", "query stops reading": "#edae49",
    "context frozen": "#66a182", "context isolated": "#8a4fff",
}  # fmt: skip
"""Colour of every line whose name begins with one of these, the same in all figures."""
ALIASES = {
    "each seed": "trained", "opened seed": "trained", "seed": "trained", "in context": "trained",
    "OLS": "closed form", "ridge": "closed form", "least squares": "closed form", "before fine-tuning": "zero-shot",
    "Bayes": "closed form", "true labels": "trained", "intact": "trained", "without these heads": "other",
    "without random heads": "random",
}  # fmt: skip
"""Other names with the colour of one above."""
PALETTE = ("#c99700", "#3f9fd1", "#6fa82e", "#9c7fd9", "#00565c", "#6d1b3b")
"""Colours of other names, in order."""
DASHES = ("solid", "dash", "dot", "dashdot")
SIGNED = "RdBu"
"""Colour scale of quantities with a sign: blue is positive, red is negative, in every figure."""
SHARES = "Blues"
"""Colour scale of quantities without a sign: attention, shares."""
PERCENT = ".0%"  # format of axes of accuracies, probabilities and shares
MANY = 7  # names from which on a colour scale is used
WHOLE = 16  # integers of an axis that all get a tick
DECADES = 6  # decades of a logarithmic axis that all get a tick
BELOW = {"orientation": "h", "x": 0, "y": -0.25, "yanchor": "top"}  # a legend under its figure
ZERO = {"y": 0, "line": {"color": "#999999", "width": 1}}  # a horizontal line, for `add_hline`
_Panel = Mapping[str, Any]  # of a trace in a grid of panels: "row" and "col", or "secondary_y"


class Markup(str):
    """Text for plotly that contains its tags or is escaped already."""


def literal(text: Any) -> Any:
    """Return a text as plotly has to get it to show its characters: no tags, formulas, fields of templates, lines."""
    if not isinstance(text, str) or isinstance(text, Markup):
        return text
    escaped = html.escape(text, quote=False).replace("%{", "%&#123;").replace("$", "&#36;")
    return Markup(re.sub("\r\n?|\n", "↵", escaped))


def figure(title: str, x_title: str = "", y_title: str = "", *, log_x: bool = False, log_y: bool = False) -> go.Figure:
    """Return an empty figure with titles and axes."""
    fig = _styled(go.Figure(), title)
    fig.update_xaxes(title_text=literal(x_title), type="log" if log_x else "linear")
    return fig.update_yaxes(title_text=literal(y_title), type="log" if log_y else "linear", exponentformat="power")


def panels(title: str, names: Sequence[str], *, columns: int | None = None, **options: Any) -> go.Figure:
    """Return an empty grid of panels with a name above each; `options` are those of plotly's `make_subplots`."""
    columns = columns or max(len(names), 1)
    rows = -(-len(names) // columns) or 1
    titles = [*map(literal, names)] if any(names) else None
    fig = make_subplots(rows=rows, cols=columns, subplot_titles=titles, **options)
    _styled(fig, title).update_annotations(font_size=13)
    return fig.update_layout(margin_t=85 if title and any(names) else 50)


def panel(i: int, columns: int) -> dict[str, Any]:
    """Return the place of the i-th panel of a grid."""
    return {"row": i // columns + 1, "col": i % columns + 1}


def _styled(fig: go.Figure, title: str) -> go.Figure:
    for update in (fig.update_xaxes, fig.update_yaxes):
        update(ticks="outside", ticklen=6, tickcolor="rgba(0,0,0,0)")  # space, so that the zeros of both axes fit
    return fig.update_layout(
        title={"text": literal(title), "x": 0.01, "font": {"size": 16}}, template="plotly_white", height=380,
        font={"family": "system-ui, sans-serif", "size": 13}, margin={"l": 70, "r": 20, "t": 50, "b": 55},
        legend={"bgcolor": "rgba(255,255,255,0.7)"},
    )  # fmt: skip


# ---- lines and dots ----


def add_line(
    fig: go.Figure, x: Sequence[float | str], y: Sequence[float | None], name: str, color: str, *,
    dash: str = "solid", width: float = 2, place: _Panel | None = None, **options: Any,
) -> None:  # fmt: skip
    """Add a line; None leaves a gap, and a point between two gaps gets a marker."""
    look: dict[str, Any] = {"line": {"color": color, "dash": dash, "width": width}, "mode": "lines", **options}
    known = [False, *(value is not None and math.isfinite(value) for value in y), False]
    isolated = [known[i] and not known[i - 1] and not known[i + 1] for i in range(1, len(known) - 1)]
    if look["mode"] == "lines" and any(isolated):  # a line of one point shows nothing
        look |= {"mode": "lines+markers", "marker": {"color": color, "size": [8 if one else 0 for one in isolated]}}
    fig.add_scatter(x=[*map(literal, x)], y=list(y), name=literal(name), **look, **(place or {}))


def add_band(
    fig: go.Figure, x: Sequence[float | str], low: Sequence[float], high: Sequence[float], color: str,
    place: _Panel | None = None,
) -> None:  # fmt: skip
    """Add a shaded interval around a line."""
    r, g, b = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    fig.add_scatter(
        x=[*map(literal, [*x, *reversed(list(x))])], y=[*high, *reversed(list(low))], fill="toself", mode="lines",
        fillcolor=f"rgba({r},{g},{b},0.18)", line={"width": 0}, hoverinfo="skip", showlegend=False, **(place or {}),
    )  # fmt: skip


def add_intervals(
    fig: go.Figure, x: Sequence[float | str], intervals: Sequence[Interval], name: str, color: str, *,
    log_y: bool = False, place: _Panel | None = None, **options: Any,
) -> None:  # fmt: skip
    """Add a line of means with a band for each run of intervals (a bar for a single one); log axes skip means <= 0.

    Means of one sample and those without finite ends have no interval.
    """
    shown = [i for i, each in enumerate(intervals) if math.isfinite(each.mean) and (each.mean > 0 or not log_y)]
    known = [i for i in shown if intervals[i].n > 1 and math.isfinite(intervals[i].high - intervals[i].low)]
    runs = [[i for _, i in run] for _, run in itertools.groupby(enumerate(known), lambda each: each[1] - each[0])]
    for run in (each for each in runs if len(each) > 1):
        low = [max(intervals[i].low, intervals[i].mean * 1e-2) if log_y else intervals[i].low for i in run]
        add_band(fig, [x[i] for i in run], low, [intervals[i].high for i in run], color, place)
    if alone := [run[0] for run in runs if len(run) == 1]:
        bars = [each if i in alone else replace(each, low=math.nan, high=math.nan) for i, each in enumerate(intervals)]
        options["error_y"] = error_bars(bars, log=log_y, width=4, color=color)
    means = [each.mean if i in shown else None for i, each in enumerate(intervals)]
    add_line(fig, x, means, name, color, place=place, **options)


@checked
def interval_lines(
    title: str, x_title: str, y_title: str, x: Sequence[float], lines: Mapping[str, Sequence[Interval]], *,
    log_y: bool = False, log_x: bool = False,
) -> go.Figure:  # fmt: skip
    """Draw lines of means with bands of their intervals.

    Args:
        x: positions along the horizontal axis, the same for all lines.
        lines: for each line an `Interval` (mean and ends) at each x, for example of `statistics.interval`; the keys
            are the labels in the legend. Names of known algorithms have fixed colours.
        log_y: logarithmic vertical axis, on which means that are not positive leave a gap.
        log_x: logarithmic horizontal axis.
    """
    for name, intervals in lines.items():
        if len(intervals) != len(x):
            raise ValueError(f"lines must have one interval per x, got {len(intervals)} of {name!r} for {len(x)}")
    fig = figure(title, x_title, y_title, log_x=log_x, log_y=log_y)
    alike = len(lines) > 1 and all(re.fullmatch(r"seed \d+", name) for name in lines)  # one legend entry for all
    for i, (color, (name, intervals)) in enumerate(zip(colors_for(list(lines)), lines.items(), strict=True)):
        seeds = {"name": "each seed", "legendgroup": "seeds", "showlegend": not i, "opacity": 0.6} if alike else {}
        add_intervals(fig, x, intervals, color=color, log_y=log_y, **{"name": name, **seeds})
    if all(isinstance(value, int) for value in x) and 0 < max(x, default=0) - min(x, default=0) <= WHOLE:
        fig.update_xaxes(dtick=1)
    return tick_log_axes(fig)


def error_bars(intervals: Sequence[Interval], *, log: bool = False, **look: Any) -> dict[str, Any]:
    """Return plotly's error bars for intervals around their means; on a logarithmic axis they stay above 0."""
    return {
        "type": "data", "symmetric": False, "thickness": 1.4, "array": [i.high - i.mean for i in intervals],
        "arrayminus": [min(i.mean - i.low, 0.9 * i.mean) if log else i.mean - i.low for i in intervals], **look,
    }  # fmt: skip


def interval_dots(
    title: str, x_title: str, names: Sequence[str], intervals: Sequence[Interval], *, log_x: bool = False,
    notes: Sequence[str] = (),
) -> go.Figure:  # fmt: skip
    """Draw a dot with its interval for each name, the first at the top; hovering shows the notes too."""
    fig = figure(title, x_title, log_x=log_x)
    fig.add_scatter(
        x=[each.mean for each in intervals], y=[*map(literal, names)], text=[*map(literal, notes)] or None,
        mode="markers", marker={"color": COLORS["trained"], "size": 9}, error_x=error_bars(intervals, log=log_x),
        hovertemplate=f"%{{y}}: %{{x:.3g}}{'<br>%{text}' if notes else ''}<extra></extra>",
    )  # fmt: skip
    fig.update_yaxes(autorange="reversed", type="category")
    return tick_log_axes(fig.update_layout(height=120 + 26 * len(names)))


def color_of(name: str) -> str | None:
    """Return the colour of a name that begins with one of `COLORS` or `ALIASES`; None for others."""
    known = [start for start in (*COLORS, *ALIASES) if re.match(rf"{re.escape(start)}(?!\w)", name)]
    start = max(known, key=len, default=None)
    return None if start is None else COLORS[ALIASES.get(start, start)]


def colors_for(names: Sequence[str]) -> list[str]:
    """Return a colour for each name: its fixed one, a shade of a colour scale, or the next of the palette.

    Shades are for numbered names ("layer 3") and for more names than the palette has colours; seeds share one colour.
    """
    fixed = [color_of(name) for name in names]
    if all(re.fullmatch(r"seed \d+", name) for name in names):
        return [COLORS["trained"]] * len(names)
    if len(set(fixed)) == len(fixed) and None not in fixed:
        return [color for color in fixed if color is not None]
    if len(names) >= MANY or (len(names) > 1 and all(re.fullmatch(r"\D* \d+", name) for name in names)):
        return shades(len(names))
    colors: list[str] = []
    for color in fixed:
        free = [each for each in PALETTE if each not in (*colors, *fixed)] or list(PALETTE)
        colors.append(free[0] if color is None or color in colors else color)
    return colors


def shades(n: int) -> list[str]:
    """Return n colours of a colour scale."""
    places = [0.85 * i / max(n - 1, 1) for i in range(n)]  # the last is too light for a line
    return ["#" + bytes(map(round, unlabel_rgb(rgb))).hex() for rgb in sample_colorscale("Viridis", places)]


# ---- heatmaps ----


def add_heatmap(
    fig: go.Figure, z: Tensor | Sequence[Sequence[float | None]], x: Sequence[Any], y: Sequence[Any], hover: str, *,
    place: _Panel | None = None, **options: Any,
) -> None:  # fmt: skip
    """Add a heatmap `[y x]`; `hover` is plotly's template of the text shown for the cell under the pointer."""
    values = z.tolist() if isinstance(z, Tensor) else z
    x, y = ([*map(literal, ticks)] for ticks in (x, y))
    fig.add_heatmap(z=values, x=x, y=y, hovertemplate=f"{hover}<extra></extra>", **options, **(place or {}))


def signed_scale(bound: float) -> dict[str, Any]:
    """Return colours from red (negative) to blue (positive), equally dark at both bounds."""
    return {"colorscale": SIGNED, "zmin": -bound, "zmax": bound}


def name_cells(fig: go.Figure, **options: Any) -> go.Figure:
    """Make the names of a heatmap's rows and columns the ticks of its axes; `options` are those of plotly's axes."""
    look = {"type": "category", "showgrid": False, **options}
    return fig.update_xaxes(look).update_yaxes(look)


def color_bar(title: str, **options: Any) -> dict[str, Any]:
    """Return a colour bar with its title at its side: above, it would cover the highest tick."""
    return {"title": {"text": literal(title), "side": "right"}, "thickness": 14, **options}


def bar_ticks(bound: float, *, signed: bool = True) -> list[float]:
    """Return ticks of a colour bar: the largest round number up to the bound, half of it, 0, and the same below 0."""
    if not (math.isfinite(bound) and bound > 0):
        return [0.0]
    decimals = 1 - math.floor(math.log10(bound))
    top = math.floor(bound * 10**decimals * (1 + 1e-9)) / 10**decimals
    values = [0.0, top / 2, top]
    return [-top, -top / 2, *values] if signed else values


def tick_log_axes(fig: go.Figure) -> go.Figure:
    """Set ticks of logarithmic axes: at decades, or at 1, 2 and 5 where there are few decades.

    Plotly's own ticks write single digits between the decades, which overlap in a small figure.
    """
    spans: dict[str, list[float]] = {}
    for trace in fig.data:
        for letter in "xy":
            axis, values = getattr(trace, f"{letter}axis", None) or letter, getattr(trace, letter, None)
            numbers = [value for value in (() if values is None else values) if isinstance(value, int | float)]
            spans.setdefault(axis, []).extend(float(each) for each in numbers if math.isfinite(each) and each > 0)
    for name, values in spans.items():
        layout: Any = fig.layout[f"{name[0]}axis{name[1:]}"]
        if layout.type == "log" and values:
            layout.update(_log_ticks(min(values), max(values)))
    return fig


def _log_ticks(low: float, high: float) -> dict[str, Any]:
    ratio = high / low
    decades = math.log10(ratio) if math.isfinite(ratio) else math.log10(high) - math.log10(low)
    if decades > DECADES:
        return {"tickmode": "linear", "dtick": math.ceil(decades / DECADES), "exponentformat": "power"}
    digits = (1,) if decades > 2 else (1, 2, 5) if decades > 0.8 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [digit * 10.0**power for power in powers for digit in digits]
    values = [value for value in values if low / 1.3 <= value <= high * 1.3]
    if len(values) < 2:  # less than a digit apart: plotly's linear ticks serve
        return {}
    return {"tickmode": "array", "tickvals": values, "ticktext": [_tick_text(value) for value in values]}


def share_axis(low: float, high: float) -> dict[str, Any]:
    """Return a logarithmic axis of shares in percent, between two powers of ten."""
    powers = range(math.floor(high), math.ceil(low) - 1, -max(1, math.ceil((high - low) / DECADES)))
    ticks = [10.0**power for power in reversed(powers)]
    return {"type": "log", "range": (low, high), "tickvals": ticks, "ticktext": [f"{100 * each:g}%" for each in ticks]}


def _tick_text(value: float) -> str:
    if 1e-3 < value < 1e6:
        return f"{value:,.10g}"
    power = math.floor(math.log10(value) + 1e-9)
    digit = value / 10.0**power
    return f"10<sup>{power}</sup>" if abs(digit - 1) < 1e-6 else f"{digit:g}·10<sup>{power}</sup>"


def title_of_steps(steps: Sequence[int]) -> dict[str, Any]:
    """Return the title of an axis of training steps; it names the first point if that is step 0."""
    return {"text": "optimisation step" + " (the first point is step\u00a00)" * (0 in steps), "font": {"size": 12}}


def on_log_axis(steps: Sequence[int]) -> list[float]:
    """Return steps for a logarithmic axis: step 0 is drawn at half of the next."""
    first = steps[1] / 2 if len(steps) > 1 else 1
    return [step or first for step in steps]
