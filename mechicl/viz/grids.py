"""Tables of sweeps: phase diagrams, and lines with intervals over seeds."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch

from mechicl.base.arguments import checked
from mechicl.statistics import Interval, interval, median_interval
from mechicl.statistics.grids import GridTable
from mechicl.viz.elements import (
    add_heatmap,
    add_line,
    bar_title,
    colors_for,
    error_bars,
    figure,
    interval_lines,
    tick_log_axes,
)

SEED, DIVERGED = "seed", "diverged_at"
"""Columns of a sweep's table: which seed, and the step at which its training diverged, if it did."""
LOG_FROM = 20.0
"""Positive values whose largest is so many times the smallest are shown on a logarithmic scale."""
DIVERGED_COLOR = "#9aa0a6"
FEW = 10
"""Seeds, up to which each is drawn as a point: an interval of so few says less than they do."""


@checked
def phase_diagram(
    table: GridTable | pd.DataFrame,
    x: str,
    y: str,
    value: str,
    *,
    threshold: float | None = None,
    log: bool | None = None,
    title: str | None = None,
) -> go.Figure:
    """A value over two axes of a sweep: one coloured cell per combination, the median over its seeds.

    The pointer shows each cell's interval and number of seeds. Combinations whose seeds all diverged are grey with a
    cross, those with some diverged seeds have a small cross; combinations that were not run stay blank.

    Args:
        table: a sweep's table, or a pandas frame with these columns; its other axes must have one value each.
        x: the column along the horizontal axis.
        y: the column along the vertical axis.
        value: the column that is drawn.
        threshold: draw the line on which the value is this.
        log: colour by the logarithm of the value; by default if all are positive and span more than about a decade.
        title: of the figure; by default the value's name.

    Raises:
        KeyError: no such column.
        ValueError: x and y are the same, or another axis has several values.

    Example:
        >>> phase_diagram(table, x="task.n_tasks", y="model.n_layers", value="loss")
    """
    frame = _columns(table, x, y, value)
    if x == y:
        raise ValueError(f"x and y must be two axes of the table, got {x!r} twice")
    _check_one_value(table, frame, x, y)
    xs, ys = _ordered(frame[x]), _ordered(frame[y])
    cells = {(b, a): part for (a, b), part in frame.groupby([x, y], sort=False)}
    medians = [[_median(cells.get((b, a)), value) for a in xs] for b in ys]
    known = [m for row in medians for m in row if m is not None]
    log = _spans_decades(known) if log is None else log
    if log and any(m <= 0 for m in known):
        raise ValueError(f"{value!r} has values that are not positive, which have no logarithm: take log=False")
    colors = [[math.nan if m is None else math.log10(m) if log else m for m in row] for row in medians]
    words = [
        [f"{x} {_tick(a)}, {y} {_tick(b)}<br>{_words(cells.get((b, a)), value)}" for a in xs] for b in ys
    ]  # fmt: skip
    fig = figure(title or value, x, y)
    places_x, places_y = list(range(len(xs))), list(range(len(ys)))
    add_heatmap(
        fig, colors, places_x, places_y, "%{text}", text=words, colorscale="Viridis", xgap=1, ygap=1,
        colorbar=_bar(value, [c for row in colors for c in row if math.isfinite(c)], log),
    )  # fmt: skip
    _add_diverged(fig, [[_lost(cells.get((b, a))) for a in xs] for b in ys])
    if threshold is not None:
        _add_threshold(fig, medians, threshold, log)
    for update, places, each in ((fig.update_xaxes, places_x, xs), (fig.update_yaxes, places_y, ys)):
        ticks = {"tickvals": places, "ticktext": [_tick(one) for one in each]}
        update(showgrid=False, zeroline=False, range=[-0.5, len(places) - 0.5], **ticks)
    fig.update_layout(legend={"orientation": "h", "x": 1, "y": 1, "xanchor": "right", "yanchor": "bottom"})
    return fig


@checked
def lines(
    table: GridTable | pd.DataFrame,
    x: str,
    value: str | Sequence[str],
    by: str | None = None,
    *,
    references: Mapping[str, float] | None = None,
    middle: Literal["mean", "median"] = "mean",
    log_x: bool | None = None,
    log_y: bool | None = None,
    title: str | None = None,
    y_title: str | None = None,
) -> go.Figure:
    """Values of a sweep along one of its axes, with 95% intervals over seeds; seeds that diverged are left out.

    Along an axis of words (kinds of attention, labels) they are points with bars. Up to ten seeds are drawn as small
    points: the intervals of means are right only for values near a normal distribution, and those of medians are the
    seeds' range, which for three seeds covers the median with probability 75% (`statistics.median_interval`).

    Args:
        table: a sweep's table, or a pandas frame with these columns; its other axes must have one value each.
        x: the column along the horizontal axis.
        value: the column that is drawn, or several of them, a line each.
        by: a column with a line for each of its values.
        references: horizontal lines by name.
        middle: "mean", or "median" with its bootstrap interval, for skewed values.
        log_x: a logarithmic axis; by default if the values are positive and span more than about a decade.
        log_y: likewise.
        title: of the figure; by default the value's name.
        y_title: of the vertical axis, likewise.

    Raises:
        KeyError: no such column.
        ValueError: another axis has several values.

    Example:
        >>> lines(table, x="task.n_tasks", value="loss", by="model.n_layers")
    """
    values = [value] if isinstance(value, str) else list(value)
    frame = _columns(table, x, *([by] if by else []), *values)
    _check_one_value(table, frame, x, *([by] if by else []))
    if middle not in ("mean", "median"):
        raise ValueError(f"middle must be 'mean' or 'median', got {middle!r}")
    xs = _ordered(frame[x])
    groups = [(None, frame)] if by is None else [(each, frame[frame[by] == each]) for each in _ordered(frame[by])]
    over_seeds: dict[str, list[Interval]] = {}
    of_seeds: dict[str, list[torch.Tensor]] = {}
    for group, part in groups:
        for column in values:
            label = [] if by is None else [group if isinstance(group, str) else f"{by} {_tick(group)}"]
            name = ", ".join([*label, *([column] if len(values) > 1 else [])])
            at = [_finite(part[part[x] == each], column) for each in xs]
            of_seeds[name or column] = at
            over_seeds[name or column] = [median_interval(s) if middle == "median" else interval(s) for s in at]
    means = [each.mean for line in over_seeds.values() for each in line if math.isfinite(each.mean)]
    means += list((references or {}).values())
    log_x = _spans_decades(xs) if log_x is None else log_x
    log_y = _spans_decades(means) if log_y is None else log_y
    words = y_title or ", ".join(values)
    if pd.api.types.is_numeric_dtype(frame[x]):
        fig = interval_lines(title or words, x, words, xs, over_seeds, log_x=log_x, log_y=log_y)
        fig.update_traces(mode="lines+markers", selector=lambda trace: trace.fill is None)
    else:
        xs = [_tick(each) for each in xs]
        fig = _interval_points(figure(title or words, x, words, log_y=log_y), xs, over_seeds)
    _add_seeds(fig, xs, of_seeds)
    for i, (name, level) in enumerate((references or {}).items()):
        dash = ("dash", "dot", "dashdot")[i % 3]
        add_line(fig, [xs[0], xs[-1]], [level, level], name, "#555555", dash=dash, width=1.5)
    fig.update_layout(showlegend=len(over_seeds) + len(references or {}) > 1)
    return tick_log_axes(fig)


def _interval_points(fig: go.Figure, words: list[str], over_seeds: Mapping[str, list[Interval]]) -> go.Figure:
    """A point with a bar for each word, side by side if there are several names."""
    for color, (name, intervals) in zip(colors_for(list(over_seeds)), over_seeds.items(), strict=True):
        means, bar = [each.mean for each in intervals], error_bars(intervals, width=5, color=color)
        add_line(fig, words, means, name, color, mode="markers", error_y=bar, offsetgroup=name)
    fig.update_traces(marker_size=9)
    fig.update_xaxes(type="category", range=[-0.5, len(words) - 0.5])
    return fig.update_layout(scattermode="group", scattergap=0.75)


def _add_seeds(fig: go.Figure, xs: list[Any], of_seeds: Mapping[str, list[torch.Tensor]]) -> None:
    """A small point for each of a few seeds, in its line's colour; a seed alone is the line."""
    for color, (name, at) in zip(colors_for(list(of_seeds)), of_seeds.items(), strict=True):
        if not 1 < max(map(len, at), default=0) <= FEW:
            continue
        points = [(x, value) for x, values in zip(xs, at, strict=True) for value in values.tolist()]
        fig.add_trace(
            go.Scatter(
                x=[x for x, _ in points], y=[value for _, value in points], mode="markers", name=f"{name}: each seed",
                marker={"size": 5, "color": color, "opacity": 0.55, "line": {"width": 0.5, "color": "white"}},
                showlegend=False, offsetgroup=name, hovertemplate="%{y:.4g}<extra>a seed</extra>",
            )
        )  # fmt: skip


def _columns(table: GridTable | pd.DataFrame, *names: str) -> pd.DataFrame:
    """The table's frame, with all these columns."""
    frame = table if isinstance(table, pd.DataFrame) else table.frame
    for name in names:
        if name not in frame.columns:
            raise KeyError(f"the table has no column {name!r}; it has {', '.join(map(str, frame.columns))}")
    return frame


def _check_one_value(table: GridTable | pd.DataFrame, frame: pd.DataFrame, *shown: str) -> None:
    """Refuse a table whose other axes vary: its cells would be mixtures."""
    for axis in () if isinstance(table, pd.DataFrame) else table.axes:  # the axes of a frame are unknown
        if axis not in (*shown, SEED) and len(_ordered(frame[axis])) > 1:
            raise ValueError(
                f"the table varies in {axis!r} too, which is not drawn: choose one value, as in "
                f"table.frame[table.frame[{axis!r}] == {_ordered(frame[axis])[0]!r}]"
            )


def _ordered(column: pd.Series) -> list[Any]:
    """The distinct values: numbers by size, others in their order."""
    values = column.dropna().unique().tolist()
    return sorted(values) if pd.api.types.is_numeric_dtype(column) else values


def _diverged(frame: pd.DataFrame) -> pd.Series:
    """Which rows are of a training that diverged."""
    if DIVERGED not in frame.columns:
        return pd.Series(False, index=frame.index)
    return pd.to_numeric(frame[DIVERGED], errors="coerce").notna()


def _finite(frame: pd.DataFrame, value: str) -> torch.Tensor:
    """The values of the seeds that have not diverged."""
    kept = pd.to_numeric(frame[value][~_diverged(frame)], errors="coerce").to_numpy(dtype=float)
    return torch.from_numpy(kept[np.isfinite(kept)].copy())


def _median(cell: pd.DataFrame | None, value: str) -> float | None:
    samples = torch.empty(0) if cell is None else _finite(cell, value)
    return samples.quantile(0.5).item() if len(samples) else None


def _words(cell: pd.DataFrame | None, value: str) -> str:
    """The text that hovering over a cell shows."""
    if cell is None:
        return "not run"
    samples, lost = _finite(cell, value), int(_diverged(cell).sum())
    after = f"; {lost} diverged" if lost else ""
    if not len(samples):
        return f"{value} not measured{after}"
    middle = median_interval(samples) if len(samples) > 1 else f"{samples.item():.4g}"
    return f"{value} {middle}, {len(samples)} seed{'' if len(samples) == 1 else 's'}{after}"


def _tick(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _spans_decades(values: Sequence[Any]) -> bool:
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return bool(numbers) and len(numbers) == len(values) and min(numbers) > 0 and max(numbers) / min(numbers) > LOG_FROM


def _bar(value: str, colors: Sequence[float], log: bool) -> dict[str, Any]:
    """The colour bar; if colours are logarithms, its ticks are the values themselves."""
    bar: dict[str, Any] = {"title": bar_title(value)}
    if log and colors:
        low, high = min(colors), max(colors)
        digits = (1,) if high - low > 3 else (1, 3)
        marks = [d * 10.0**p for p in range(math.floor(low), math.ceil(high) + 1) for d in digits]
        marks = [mark for mark in marks if low - 0.05 <= math.log10(mark) <= high + 0.05]
        bar |= {"tickvals": [math.log10(mark) for mark in marks], "ticktext": [f"{mark:g}" for mark in marks]}
    return bar


def _lost(cell: pd.DataFrame | None) -> str:
    """ "all" if all seeds of a cell diverged, "some", or "" for none."""
    lost = pd.Series(dtype=bool) if cell is None else _diverged(cell)
    return "all" if len(lost) and lost.all() else "some" if lost.any() else ""


def _add_diverged(fig: go.Figure, lost: list[list[str]]) -> None:
    """Crosses: large on grey where all seeds of a combination diverged, small where some did."""
    grid = [[0.0 if each == "all" else math.nan for each in row] for row in lost]
    grey = [[0, DIVERGED_COLOR], [1, DIVERGED_COLOR]]
    if any("all" in row for row in lost):
        fig.add_trace(go.Heatmap(z=grid, colorscale=grey, showscale=False, xgap=1, ygap=1, hoverinfo="skip"))
    for word, size, color in (("all", 13, "#222222"), ("some", 8, "#d1495b")):
        at = [(i, j) for j, row in enumerate(lost) for i, each in enumerate(row) if each == word]
        if at:
            x, y = zip(*at, strict=True)
            cross = {"symbol": "x", "size": size, "color": color, "line": {"width": 1, "color": "white"}}
            name = f"{word} seeds diverged"
            fig.add_trace(go.Scatter(x=x, y=y, mode="markers", marker=cross, name=name, hoverinfo="skip"))
            fig.update_layout(showlegend=True)


def _add_threshold(fig: go.Figure, medians: list[list[float | None]], level: float, log: bool) -> None:
    """A line through the points of the rows, between two neighbours, where the value first passes the level."""
    through: list[tuple[float, int]] = []
    for j, row in enumerate(medians):
        for i, (a, b) in enumerate(itertools.pairwise(row)):
            if a is not None and b is not None and (a < level) != (b < level):
                start, stop, goal = (math.log(v) for v in (a, b, level)) if log and level > 0 else (a, b, level)
                through.append((i + (goal - start) / (stop - start), j))
                break
    if through:
        fig.add_trace(
            go.Scatter(
                x=[x for x, _ in through], y=[y for _, y in through], mode="lines+markers", name=f"{level:g} is passed",
                line={"color": "#e6007e", "width": 3}, marker={"size": 7, "color": "#e6007e"}, hoverinfo="skip",
            )
        )  # fmt: skip
        fig.update_layout(showlegend=True)
