"""Pictures of sweeps: what patching or ablating each layer, position and head does to a metric."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from torch import Tensor

from mechicl.analysis import Sweep
from mechicl.learners import interval
from mechicl.viz.style import figure

PER_ROW = 4
POSITIONS = ("pos", "query", "key")
NAMES = {"pos": "position", "query": "query position", "key": "key position"}


def patching_grid(
    sweep: Sweep,
    metric: str | None = None,
    *,
    recovered: bool | None = None,
    labels: Sequence[str] | None = None,
    title: str | None = None,
) -> go.Figure:
    """A heatmap of the effect of every cell: by layer and position, with a panel a head; or by layer and head.

    Two of the sweep's axes span a panel: layers across a position or head. A third axis has a panel for each of its
    indices. With four axes (direct paths, pairs of heads) the first two make the rows and the others the columns.
    Hovering shows the mean effect and its 95% interval over prompts.

    Args:
        sweep: of `patch`, `ablate`, `attribute` or `patch_paths`.
        metric: which; the first by default.
        recovered: draw the share of the way to the source run instead of the change; by default where there is one.
        labels: of the positions, for instance `model.cfg.format.labels(n_context)`.
        title: of the figure.

    Raises:
        ValueError: another number of axes than 2 to 4, too few labels, or nothing that could be recovered.

    Example:
        >>> patching_grid(patch(model, prompts, corrupted, "resid_pre"), labels=model.cfg.format.labels(20))
    """
    if not 2 <= len(sweep.axes) <= 4:
        raise ValueError(f"a grid has 2 to 4 axes, this sweep has {sweep.axes}")
    name = metric or next(iter(sweep.values), None)
    effect = sweep.effect(name)
    as_share = bool(sweep.source_values) if recovered is None else recovered
    values = sweep.recovered(name) if as_share else effect.mean(-1)
    quantity = f"{name}: share recovered" if as_share else f"change of {name}"
    words = _intervals(effect)
    titled = title or f"{sweep.what[:1].upper()}{sweep.what[1:]}: {quantity}"
    bound = max(float(values[values.isfinite()].abs().max()) if values.isfinite().any() else 0.0, 1e-12)
    if len(sweep.axes) == 4:
        rows, columns = sweep.shape[0] * sweep.shape[1], sweep.shape[2] * sweep.shape[3]
        fig = figure(titled, _pair(sweep.axes[2:]), _pair(sweep.axes[:2]))
        names = [_joined(sweep.indices[i : i + 2]) for i in (0, 2)]
        flat = [words[i * columns : (i + 1) * columns] for i in range(rows)]
        fig.add_trace(_heatmap(values.reshape(rows, columns), flat, names[1], names[0], bound, quantity))
        fig.update_layout(height=max(380, 22 * rows + 140))
        return _categories(fig)
    across = next(axis for axis in (*POSITIONS, "head") if axis in sweep.axes)
    panel = next((axis for axis in sweep.axes if axis not in ("layer", across)), None)
    order = [sweep.axes.index(axis) for axis in (*([panel] if panel else []), "layer", across)]
    ordered = values.permute(order)
    places = {axis: sweep.indices[sweep.axes.index(axis)] for axis in sweep.axes}
    text = _nested(words, values.shape, order)
    panels = places[panel] if panel else (None,)
    columns = min(len(panels), PER_ROW if len(places[across]) <= 24 else 2)
    rows = -(-len(panels) // columns)
    fig = make_subplots(
        rows, columns, subplot_titles=[f"{panel} {i}" for i in panels] if panel else None,
        shared_xaxes=True, shared_yaxes=True, horizontal_spacing=0.03, vertical_spacing=0.35 / max(rows, 2),
    )  # fmt: skip
    fig.update_layout(figure(titled, "", "").layout)
    x = _labels(places[across], labels if across in POSITIONS else None, across)
    for i in range(len(panels)):
        z, hover = (ordered[i], text[i]) if panel else (ordered, text)
        row, column = divmod(i, columns)
        trace = _heatmap(z, hover, x, [str(k) for k in places["layer"]], bound, quantity)
        fig.add_trace(trace, row + 1, column + 1)
    fig.update_traces(showscale=False)
    fig.update_traces(showscale=True, selector=0)
    fig.update_xaxes(title_text=NAMES.get(across, across), row=rows)
    fig.update_yaxes(title_text="layer", col=1)
    fig.update_layout(height=150 + rows * max(170, 26 * len(places["layer"]) + 60), margin_t=75)
    return _categories(fig)


def _heatmap(
    z: Tensor, hover: Sequence[Sequence[str]], x: Sequence[str], y: Sequence[str], bound: float, quantity: str
) -> go.Heatmap:
    few = len(x) <= 8
    return go.Heatmap(
        z=z.tolist(),
        x=list(x),
        y=list(y),
        customdata=[list(line) for line in hover],
        zmid=0,
        zmin=-bound,
        zmax=bound,
        colorscale="RdBu_r",
        colorbar={"title": {"text": quantity.replace(": ", ":<br>").replace(" of ", " of<br>")}, "thickness": 14},
        texttemplate="%{z:.2g}" if few else None,
        hovertemplate=f"%{{y}}, %{{x}}<br>{quantity} %{{z:.4g}}<br>mean effect %{{customdata}}<extra></extra>",
    )


def _intervals(effect: Tensor) -> list[str]:
    return [str(interval(of)) for of in effect.flatten(0, -2)]


def _nested(words: Sequence[str], shape: Sequence[int], order: Sequence[int]) -> Any:
    """Words of the cells, in the order of the axes of `shape`, as nested lists with the axes reordered."""
    strides = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * shape[i + 1]

    def part(depth: int, offset: int) -> Any:
        if depth == len(order):
            return words[offset]
        axis = order[depth]
        return [part(depth + 1, offset + i * strides[axis]) for i in range(shape[axis])]

    return part(0, 0)


def _labels(indices: Sequence[int], labels: Sequence[str] | None, axis: str) -> list[str]:
    if labels is None:
        return [str(i) for i in indices]
    if max(indices, default=-1) >= len(labels):
        raise ValueError(f"{len(labels)} labels, but the sweep has {axis} {max(indices)}")
    return [labels[i] for i in indices]


def _pair(axes: Sequence[str]) -> str:
    """Such as "to layer . head"."""
    first, second = (axis.replace("_2", "").replace("_", " ") for axis in axes)
    return f"{first}.{second.removeprefix('to ')}"


def _joined(indices: Sequence[Sequence[int]]) -> list[str]:
    return [f"{i}.{j}" for i in indices[0] for j in indices[1]]


def _categories(fig: go.Figure) -> go.Figure:
    fig.update_xaxes(type="category", showgrid=False, tickangle=-60 if _crowded(fig) else 0)
    fig.update_yaxes(type="category", showgrid=False)
    return fig


def _crowded(fig: Any) -> bool:
    return any(len(trace.x) > 24 or max(len(str(label)) for label in trace.x) > 2 for trace in fig.data)
