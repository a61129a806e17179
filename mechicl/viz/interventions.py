"""Figures of sweeps: the effect on a metric of patching or ablating each layer, position and head."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from mechicl.analysis import InterventionSweep
from mechicl.base.arguments import checked
from mechicl.statistics import interval
from mechicl.viz.elements import add_heatmap, bar_ticks, bar_title, figure, name_cells, panel, panels, signed_scale

PER_ROW = 4  # panels, where there is room for them
WRITTEN = 8  # cells in a row that there is room for numbers in
WIDE = 24  # cells in a row beyond which there are two panels beside each other, and not every label
POSITIONS = ("pos", "query", "key")
NAMES = {"pos": "position", "query": "query position", "key": "key position"}
LOW, BETWEEN, AROUND = 120, 50, 150  # pixels: of a low panel, between two, and for titles and labels


@checked
def patching_grid(
    sweep: InterventionSweep,
    metric: str | None = None,
    *,
    recovered: bool | None = None,
    labels: Sequence[str] | None = None,
    title: str | None = None,
) -> go.Figure:
    """A heatmap of the effect of every cell: by layer and position, with a panel per head; or by layer and head.

    Two of the sweep's axes span a panel: layers, from the bottom up, and positions, heads, or another axis. A third
    axis has a panel for each of its indices. With four axes (direct paths, pairs of heads) the first two make the rows
    and the others the columns. Hovering shows the mean effect and its 95% interval over prompts.

    Args:
        sweep: of `patch`, `ablate`, `attribute` or `patch_paths`.
        metric: its name; the first by default.
        recovered: draw the share of the way to the source run instead of the change; by default if there is one.
        labels: of the positions, for instance `model.cfg.format.labels(n_context)`; equal ones get their number.
        title: of the figure.

    Raises:
        ValueError: a number of axes that is not 2 to 4, no layers among two or three, or too few labels.

    Example:
        >>> patching_grid(patch(model, prompts, corrupted, "resid_pre"), labels=model.cfg.format.labels(20))
    """
    if not 2 <= len(sweep.axes) <= 4 or (len(sweep.axes) < 4 and "layer" not in sweep.axes):
        raise ValueError(f"a grid has 2 to 4 axes, with layers among two or three; this sweep has {sweep.axes}")
    effect, name = sweep.effect(metric), metric or next(iter(sweep.values))
    as_share = bool(sweep.source_values) if recovered is None else recovered
    values = sweep.recovered(name) if as_share else effect.mean(-1)
    noising = sweep.what.startswith("noising")
    share = f"share of the way to the corrupted {name}" if noising else f"share of {name} recovered"
    quantity = share if as_share else f"change of {name}"
    intervals = np.array([str(interval(cell)) for cell in effect.flatten(0, -2)], dtype=object).reshape(values.shape)
    heading = title or f"{sweep.what[:1].upper()}{sweep.what[1:]}: {quantity}"
    largest = float(values[values.isfinite()].abs().max()) if values.isfinite().any() else 0.0
    ticks = {"tickvals": bar_ticks(largest)[::2], "tickformat": ".2~g"}
    colorbar = {"title": bar_title(quantity.replace(" of ", " of<br>")), "thickness": 14, **ticks}
    style: dict[str, Any] = {**signed_scale(max(largest, 1e-12)), "zmid": 0, "colorbar": colorbar}

    def draw(fig: go.Figure, cells: Any, x: Sequence[str], y: Sequence[str], where: str, **options: Any) -> None:
        """A heatmap of some cells `[y x]` of the array of all."""
        z, words = values.permute(order)[cells], intervals.transpose(order)[cells]
        z, words = z.reshape(len(y), len(x)), words.reshape(len(y), len(x))
        add_heatmap(
            fig, z, x, y, f"{where}<br>{quantity}: %{{z:.4g}}<br>mean effect %{{customdata}}",
            customdata=words.tolist(), text=[[_number(value) for value in row] for row in z.tolist()],
            texttemplate="%{text}" if len(x) <= WRITTEN else None, **style, **options,
        )  # fmt: skip

    if len(sweep.axes) == 4:  # pairs of axes, such as layer and head that write, and layer and head that read
        order = [0, 1, 2, 3]
        y, x = ([f"{i}.{j}" for i in first for j in second] for first, second in (sweep.indices[:2], sweep.indices[2:]))
        fig = figure(heading, _pair(sweep.axes[2:]), _pair(sweep.axes[:2]))
        draw(fig, ..., x, y, f"{_pair(sweep.axes[:2])} %{{y}}, {_pair(sweep.axes[2:])} %{{x}}")
        fig.update_layout(height=max(380, 22 * len(y) + AROUND))
        return _categories(fig, [*x, *y])
    across = next(axis for axis in (*POSITIONS, "head", *sweep.axes) if axis in sweep.axes and axis != "layer")
    third = next((axis for axis in sweep.axes if axis not in ("layer", across)), None)
    order = [sweep.axes.index(axis) for axis in (*([third] if third else []), "layer", across)]
    places = dict(zip(sweep.axes, sweep.indices, strict=True))
    x = _labels(places[across], labels if across in POSITIONS else None, across)
    y = [str(layer) for layer in places["layer"]]
    names = [f"{_spaced(third)} {i}" for i in places[third]] if third else [""]
    columns = min(len(names), PER_ROW if len(x) <= WIDE else 2)
    rows = -(-len(names) // columns)
    height = rows * max(LOW, 26 * len(y)) + (rows - 1) * BETWEEN
    fig = panels(
        heading, names, columns=columns, shared_xaxes=True, shared_yaxes=True, horizontal_spacing=0.03,
        vertical_spacing=BETWEEN / height,
    )  # fmt: skip
    for i, name in enumerate(names):
        place = panel(i, columns)
        where = f"{name}{', ' if name else ''}layer %{{y}}, {_spaced(across)} %{{x}}"
        draw(fig, i if third else ..., x, y, where, showscale=i == 0, place=place)
        if i + columns >= len(names):  # the lowest in its column
            fig.update_xaxes(title_text=_spaced(across), showticklabels=True, **place)
    fig.update_yaxes(title_text="layer", col=1)
    fig.update_layout(height=height + AROUND + (25 if _slanted(x) else 0), margin_t=75 if third else 55)
    if across not in POSITIONS and not third:  # few cells: no need to stretch them over the page
        fig.update_layout(width=max(90 * len(x), 260) + 200)
    return _categories(fig, x)


def _number(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 100 or not size else f"{value:.2g}" if size >= 1e-4 else f"{value:.0e}"


def _labels(indices: Sequence[int], labels: Sequence[str] | None, axis: str) -> list[str]:
    if labels is None:
        return [str(i) for i in indices]
    if max(indices, default=-1) >= len(labels):
        raise ValueError(f"{len(labels)} labels, but the sweep has {axis} {max(indices)}")
    chosen = [labels[i] for i in indices]  # equal ones would share a column
    return [f"{label} ({i})" if chosen.count(label) > 1 else label for i, label in zip(indices, chosen, strict=True)]


def _spaced(axis: str) -> str:
    """For example "position" for "pos", and "layer" for the second layer of a pair."""
    return NAMES.get(axis, axis.removesuffix("_2").replace("_", " "))


def _pair(axes: Sequence[str]) -> str:
    """For example "to layer.head"."""
    first, second = map(_spaced, axes)
    return f"{first}.{second.removeprefix('to ')}"


def _slanted(x: Sequence[str]) -> bool:
    return len(x) * max(map(len, x)) > 36  # characters side by side


def _categories(fig: go.Figure, x: Sequence[str]) -> go.Figure:
    name_cells(fig)
    return fig.update_xaxes(tickangle=-60 if _slanted(x) else 0)
