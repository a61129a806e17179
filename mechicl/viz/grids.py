"""Figures of sweeps' tables: phase diagrams, and lines with intervals over seeds."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch

from mechicl.base.arguments import checked
from mechicl.statistics import Interval, interval, median_interval
from mechicl.statistics.grids import SEED, GridTable, value_range
from mechicl.viz import elements as draw

DIVERGED = "diverged_at"
"""Column of a sweep's table: the step at which training diverged, if it did."""
LOG_FROM = 20.0
"""Positive values whose largest exceeds the smallest by this factor are shown on a logarithmic scale."""
DIVERGED_COLOR, THRESHOLD_COLOR = "#9aa0a6", "#e6007e"
FEW_SEEDS = 10
"""Number of seeds up to which each is drawn as a point: more informative than an interval of so small a sample."""


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
    """Draw a measured value over two axes of a sweep: one coloured cell per combination, the median over its seeds.

    Hovering shows each cell's 95% interval over seeds and their number. Combinations whose seeds all diverged are grey
    with a cross, those with some diverged seeds have a small cross; combinations that were not run or whose median is
    infinite stay blank.

    Args:
        table: result of a sweep (`Sweep.run` or `load_table`), or a pandas frame with these columns; axes that are not
            drawn must have one value each, except "seed".
        x: name of the column along the horizontal axis.
        y: name of the column along the vertical axis.
        value: name of the column to draw, such as "loss".
        threshold: value at which to draw a contour line; none by default.
        log: colour by the logarithm of the value; by default if all are positive and the largest is more than 20 times
            the smallest.
        title: title of the figure; by default the value's name.

    Example:
        >>> phase_diagram(table, x="task.n_tasks", y="model.n_layers", value="loss")
    """
    frame = _columns(table, [x, y], [value])
    if x == y:
        raise ValueError(f"x and y must be two axes of the table, got {x!r} twice")
    _check_one_value(table, frame, x, y)
    xs, ys = _ordered(frame[x]), _ordered(frame[y])
    x_labels, y_labels = labels(xs), labels(ys)
    cells = {(b, a): part for (a, b), part in frame.groupby([x, y], sort=False)}
    grid = [[cells.get((b, a)) for a in xs] for b in ys]
    samples = [[torch.empty(0) if cell is None else _known(cell, value) for cell in row] for row in grid]
    medians = [[float(np.median(each)) if len(each) else math.nan for each in row] for row in samples]
    medians = [[m if math.isfinite(m) else math.nan for m in row] for row in medians]
    known = [m for row in medians for m in row if not math.isnan(m)]
    log = _spans_decades(known) if log is None else log
    if log and any(m <= 0 for m in known):
        raise ValueError(f"{value!r} has values that are not positive, which have no logarithm: take log=False")
    colors = [[math.log10(m) if log else m for m in row] for row in medians]
    text = [
        ["<br>".join(map(draw.literal, (f"{x} {a}, {y} {b}", _summary(cell, value))))
         for a, cell in zip(x_labels, row, strict=True)]
        for b, row in zip(y_labels, grid, strict=True)
    ]  # fmt: skip
    fig = draw.figure(title or value, x, y)
    places_x, places_y = list(range(len(xs))), list(range(len(ys)))
    draw.add_heatmap(
        fig, colors, places_x, places_y, "%{text}", text=text, colorscale="Viridis", xgap=1, ygap=1,
        colorbar=draw.color_bar(value, **(_log_ticks([math.log10(m) for m in known]) if log and known else {})),
    )  # fmt: skip
    _add_diverged(fig, [[_lost(cell) for cell in row] for row in grid])
    if threshold is not None:
        _add_threshold(fig, medians, threshold, log)
    for update, places, each in ((fig.update_xaxes, places_x, x_labels), (fig.update_yaxes, places_y, y_labels)):
        ticks = {"tickvals": places, "ticktext": [*map(draw.literal, each)]}
        update(showgrid=False, zeroline=False, range=[-0.5, len(places) - 0.5], **ticks)
    return fig.update_layout(legend={"orientation": "h", "x": 1, "y": 1, "xanchor": "right", "yanchor": "bottom"})


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
) -> go.Figure:
    """Draw measured values of a sweep along one of its axes: means over seeds with bands of 95% intervals.

    Seeds that diverged are left out; an infinite mean or median leaves a gap. Along an axis of names (kinds of
    attention, labels) there are points with bars. Up to ten seeds are also drawn as small points. Intervals of means
    are Student's (they suppose a normal distribution), or binomial for a column of 0 and 1. Those of medians are
    bootstrap intervals: for few seeds the seeds' range, which contains the true median with probability 75% for three.

    Args:
        table: result of a sweep (`Sweep.run` or `load_table`), or a pandas frame with these columns; axes that are not
            drawn must have one value each, except "seed".
        x: name of the column along the horizontal axis.
        value: name of the column to draw, such as "loss", or several, each as a line.
        by: name of a column; each of its values gets a line.
        references: heights of horizontal lines to add; the keys are their labels in the legend.
        middle: "mean", or "median" with its bootstrap interval, for skewed values.
        log_x: logarithmic horizontal axis; by default if the numbers are positive and the largest is more than 20 times
            the smallest.
        log_y: logarithmic vertical axis, by the same default.
        title: title of the figure; by default the value's name.

    Example:
        >>> lines(table, x="task.n_tasks", value="loss", by="model.n_layers")
    """
    values, shown = [value] if isinstance(value, str) else list(value), [x, *([by] if by else [])]
    frame = _columns(table, shown, values)
    _check_one_value(table, frame, *shown)
    xs, references = _ordered(frame[x]), references or {}
    groups = [(None, frame)] if by is None else [(each, frame[frame[by] == each]) for each in _ordered(frame[by])]
    seeds: dict[str, list[torch.Tensor]] = {}
    ranges: dict[str, tuple[float, float]] = {}
    for (group, part), tick in zip(groups, labels([group for group, _ in groups]), strict=True):
        for column in values:
            label = [] if by is None else [tick if isinstance(group, str) else f"{by} {tick}"]
            name = ", ".join([*label, *([column] if len(values) > 1 else [])])
            seeds[name or column] = [_known(part[part[x] == each], column) for each in xs]
            ranges[name or column] = value_range(frame[column])
    intervals = {
        name: [median_interval(each) if middle == "median" else interval(each, within=ranges[name]) for each in at]
        for name, at in seeds.items()
    }
    means = [each.mean for line in intervals.values() for each in line if math.isfinite(each.mean)]
    log_x = _spans_decades(xs) if log_x is None else log_x
    log_y = _spans_decades([*means, *references.values()]) if log_y is None else log_y
    y_title = ", ".join(values)
    title = title or y_title
    if pd.api.types.is_numeric_dtype(frame[x]):
        fig = draw.interval_lines(title, x, y_title, xs, intervals, log_x=log_x, log_y=log_y)
        fig.update_traces(mode="lines+markers", selector=lambda trace: trace.fill is None)
    else:
        xs = labels(xs)
        fig = _interval_points(draw.figure(title, x, y_title, log_y=log_y), xs, intervals)
    _add_seeds(fig, xs, seeds)
    for dash, (name, level) in zip(itertools.cycle(draw.DASHES[1:]), references.items(), strict=False):
        draw.add_line(fig, [xs[0], xs[-1]], [level, level], name, "#555555", dash=dash, width=1.5)
    return draw.tick_log_axes(fig.update_layout(showlegend=len(intervals) + len(references) > 1))


def _interval_points(fig: go.Figure, names: list[str], intervals: Mapping[str, list[Interval]]) -> go.Figure:
    """Add a point with a bar for each place on the axis, side by side if there are several lines."""
    for color, (name, each) in zip(draw.colors_for(list(intervals)), intervals.items(), strict=True):
        bar = draw.error_bars(each, width=5, color=color)
        means = [one.mean for one in each]
        draw.add_line(fig, names, means, name, color, mode="markers", error_y=bar, offsetgroup=name)
    fig.update_traces(marker_size=9)
    fig.update_xaxes(type="category", range=[-0.5, len(names) - 0.5])
    return fig.update_layout(scattermode="group", scattergap=0.75)


def _add_seeds(fig: go.Figure, xs: list[Any], seeds: Mapping[str, list[torch.Tensor]]) -> None:
    """Add a small point for each of a few seeds, in its line's colour; a single seed is the line."""
    for color, (name, at) in zip(draw.colors_for(list(seeds)), seeds.items(), strict=True):
        if 1 < max(map(len, at), default=0) <= FEW_SEEDS:
            fig.add_scatter(
                x=[draw.literal(x) for x, values in zip(xs, at, strict=True) for _ in values], y=torch.cat(at).tolist(),
                marker={"size": 5, "color": color, "opacity": 0.55, "line": {"width": 0.5, "color": "white"}},
                mode="markers", name=draw.literal(f"{name}: each seed"), showlegend=False, offsetgroup=name,
                hovertemplate="%{y:.4g}<extra>a seed</extra>",
            )  # fmt: skip


def _columns(table: GridTable | pd.DataFrame, axes: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    """Return the table with labels on axes that are not numeric, and numbers or NaN as values."""
    frame = table if isinstance(table, pd.DataFrame) else table.frame
    for name in (*axes, *values):
        if name not in frame.columns:
            raise KeyError(f"the table has no column {name!r}; it has {', '.join(map(str, frame.columns))}")
    # None is a setting like any other, and yes or no is not a number
    shown: dict[str, Any] = {
        name: [_label(value) for value in frame[name]] for name in axes
        if pd.api.types.is_bool_dtype(frame[name]) or not pd.api.types.is_numeric_dtype(frame[name])
    }  # fmt: skip
    for name in values:
        numbers = pd.to_numeric(frame[name], errors="coerce")
        if numbers.isna().all() and frame[name].notna().any():
            raise ValueError(f"value must be a column of numbers, got {name!r} with {frame[name].dropna().iloc[0]!r}")
        if name not in axes:
            shown[name] = numbers.astype(float)
    return frame.assign(**shown)


def _label(value: Any) -> Any:
    return str(value) if isinstance(value, bool | np.bool_) else "none" if pd.isna(value) else value


def _check_one_value(table: GridTable | pd.DataFrame, frame: pd.DataFrame, *shown: str) -> None:
    """Refuse a table whose other axes vary: its cells would be mixtures."""
    for axis in () if isinstance(table, pd.DataFrame) else table.axes:  # the axes of a frame are unknown
        if axis not in (*shown, SEED) and frame[axis].nunique(dropna=False) > 1:
            raise ValueError(
                f"the table varies in {axis!r} too, which is not drawn: choose one value, as in "
                f"table.frame[table.frame[{axis!r}] == {_ordered(frame[axis])[0]!r}]"
            )


def _ordered(column: pd.Series) -> list[Any]:
    values = column.dropna().unique().tolist()
    return sorted(values) if pd.api.types.is_numeric_dtype(column) else values


def _diverged(frame: pd.DataFrame) -> pd.Series:
    if DIVERGED not in frame.columns:
        return pd.Series(False, index=frame.index)
    return pd.to_numeric(frame[DIVERGED], errors="coerce").notna()


def _known(frame: pd.DataFrame, value: str) -> torch.Tensor:
    kept = pd.to_numeric(frame[value][~_diverged(frame)], errors="coerce").to_numpy(dtype=float)
    return torch.from_numpy(kept[~np.isnan(kept)].copy())


def _summary(cell: pd.DataFrame | None, value: str) -> str:
    if cell is None:
        return "not run"
    samples, lost = _known(cell, value), int(_diverged(cell).sum())
    after = f"; {lost} diverged" if lost else ""
    if not len(samples):
        return f"{value} not measured{after}"
    middle = median_interval(samples) if len(samples) > 1 else f"{samples.item():.4g}"
    infinite = f", {n} of them infinite" if (n := int(samples.isinf().sum())) else ""
    return f"{value} {middle}, {len(samples)} seed{'' if len(samples) == 1 else 's'}{infinite}{after}"


def _tick(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def labels(values: Sequence[Any], text: Callable[[Any], str] = _tick) -> list[str]:
    """Return values as text; different values that would read alike are written with all their digits."""
    texts = [*map(text, values)]
    times = Counter(each for each, _ in set(zip(texts, values, strict=True)))
    full = [repr(value) if isinstance(value, str) else str(value) for value in values]
    return [each if times[each] < 2 else exact for each, exact in zip(texts, full, strict=True)]


def _spans_decades(values: Sequence[Any]) -> bool:
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return bool(numbers) and len(numbers) == len(values) and min(numbers) > 0 and max(numbers) / min(numbers) > LOG_FROM


def _log_ticks(colors: Sequence[float]) -> dict[str, Any]:
    """Return ticks of a colour bar of logarithms, labelled with the values themselves."""
    low, high = min(colors), max(colors)
    digits = (1,) if high - low > 3 else (1, 3)
    marks = [d * 10.0**p for p in range(math.floor(low), math.floor(high + 0.05) + 1) for d in digits]
    marks = [mark for mark in marks if low - 0.05 <= math.log10(mark) <= high + 0.05]
    return {"tickvals": [math.log10(mark) for mark in marks], "ticktext": [f"{mark:g}" for mark in marks]}


def _lost(cell: pd.DataFrame | None) -> str:
    """Return "all" if all seeds of a cell diverged, "some", or "" for none."""
    lost = pd.Series(dtype=bool) if cell is None else _diverged(cell)
    return "all" if len(lost) and lost.all() else "some" if lost.any() else ""


def _add_diverged(fig: go.Figure, lost: list[list[str]]) -> None:
    """Add crosses: large on grey where all seeds of a combination diverged, small where some did."""
    if any("all" in row for row in lost):
        grid = [[0.0 if each == "all" else math.nan for each in row] for row in lost]
        grey = [[0, DIVERGED_COLOR], [1, DIVERGED_COLOR]]
        fig.add_heatmap(z=grid, colorscale=grey, showscale=False, xgap=1, ygap=1, hoverinfo="skip")
    for kind, size, color in (("all", 13, "#222222"), ("some", 8, "#d1495b")):
        at = [(i, j) for j, row in enumerate(lost) for i, each in enumerate(row) if each == kind]
        if at:
            x, y = zip(*at, strict=True)
            cross = {"symbol": "x", "size": size, "color": color, "line": {"width": 1, "color": "white"}}
            fig.add_scatter(
                x=x, y=y, mode="markers", marker=cross, name=f"{kind} seeds diverged", hoverinfo="skip", showlegend=True
            )


def _add_threshold(fig: go.Figure, medians: list[list[float]], level: float, log: bool) -> None:
    """Add a line through the points of the rows, between two neighbours, where the value first passes the level."""
    crossings: list[tuple[float, int]] = []
    for j, row in enumerate(medians):
        for i, (a, b) in enumerate(itertools.pairwise(row)):
            if not (math.isnan(a) or math.isnan(b)) and (a < level) != (b < level):
                start, stop, goal = (math.log(v) for v in (a, b, level)) if log and level > 0 else (a, b, level)
                crossings.append((i + (goal - start) / (stop - start), j))
                break
    if crossings:
        x, y = zip(*crossings, strict=True)
        look = {"line": {"color": THRESHOLD_COLOR, "width": 3}, "marker": {"size": 7, "color": THRESHOLD_COLOR}}
        fig.add_scatter(
            x=x, y=y, mode="lines+markers", name=f"{level:g} is passed", hoverinfo="skip", showlegend=True, **look
        )
