"""Figures of heads and of sweeps: scores, composition, effects of patching and ablating, and of few-shot prompts."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.heads.scores import HeadScores
from mechicl.analysis.interventions import InterventionSweep
from mechicl.analysis.language import FewShotScores, FunctionVector, MatchedAblation
from mechicl.base.arguments import checked
from mechicl.statistics import UNBOUNDED, interval
from mechicl.viz import elements as draw

PER_ROW = 4  # the most panels in a row of a sweep
WIDE = 24  # cells in a row of a sweep beyond which there are two panels in a row
POSITIONS = ("pos", "query", "key")
NAMES = {"pos": "position", "query": "query position", "key": "key position"}
LOW, BETWEEN, AROUND = 120, 50, 150  # pixels: a low panel, the gap between two, and titles with labels
NUMBERED, NUMBERED_HEADS = 8, 24  # cells in a row beyond which numbers would overlap: of a sweep, and of a head table
WIDEST_TABLE = 1400  # pixels of a head table
ABOVE = 95  # pixels above a panel of a head table, for its name and the axis of the one above
READERS = {"Q": "queries", "K": "keys", "V": "values"}
N_NAMED = 4  # heads of a map that are named, if they are at least N_APART layers or heads from each other
N_APART = 3


@checked
def patching_grid(
    sweep: InterventionSweep,
    metric: str | None = None,
    *,
    recovered: bool | None = None,
    labels: Sequence[str] | None = None,
    title: str | None = None,
) -> go.Figure:
    """Draw the effects of patching or ablating as heatmaps: by layer and position, with a panel per head, for example.

    Two of the sweep's axes span a panel: layers, from the bottom up, and positions, heads, or another axis. A third
    axis has a panel for each of its indices. With four axes (direct paths, pairs of heads) the first two make the rows
    and the others the columns. Hovering shows the mean change of the metric and its 95% interval over prompts.

    Args:
        sweep: result of `patch`, `ablate`, `attribute` or `patch_paths`.
        metric: name of the metric to draw; by default the sweep's first.
        recovered: True to draw the share of the change that the source run would make (0: as without intervention, 1:
            as in the source run), False to draw the change itself. By default True if the sweep has a source run.
        labels: names of the positions, such as `model.cfg.format.labels(n_context)`; equal names get their position's
            number. By default positions are numbered.
        title: title of the figure; by default a description of the sweep.

    Example:
        >>> patching_grid(patch(model, prompts, corrupted, "resid_pre"), labels=model.cfg.format.labels(20))
    """
    if not 2 <= len(sweep.axes) <= 4 or (len(sweep.axes) < 4 and "layer" not in sweep.axes):
        raise ValueError(f"sweep must have 2 to 4 axes, with layers among two or three, got {sweep.axes}")
    effect, name = sweep.effect(metric), metric or next(iter(sweep.values))
    as_share = bool(sweep.source_values) if recovered is None else recovered
    values = sweep.recovered(name) if as_share else effect.mean(-1)
    noising = sweep.what.startswith("noising")
    share = f"share of the way to the corrupted {name}" if noising else f"share of {name} recovered"
    quantity = draw.literal(share if as_share else f"change of {name}")
    shown = [str(interval(cell, within=UNBOUNDED)) for cell in effect.flatten(0, -2)]
    intervals = np.array(shown, dtype=object).reshape(values.shape)
    heading = title or draw.Markup(f"{draw.literal(sweep.what[:1].upper() + sweep.what[1:])}: {quantity}")
    largest = float(values[values.isfinite()].abs().max()) if values.isfinite().any() else 0.0
    ticks = {"tickvals": draw.bar_ticks(largest)[::2], "tickformat": ".2~r"}
    bar = draw.color_bar(draw.Markup(quantity.replace(" of ", " of<br>")), **ticks)
    style: dict[str, Any] = {**draw.signed_scale(max(largest, 1e-12)), "zmid": 0, "colorbar": bar}

    def add_cells(fig: go.Figure, cells: Any, x: Sequence[str], y: Sequence[str], where: str, **options: Any) -> None:
        z, text = values.permute(order)[cells], intervals.transpose(order)[cells]
        z, text = z.reshape(len(y), len(x)), text.reshape(len(y), len(x))
        draw.add_heatmap(
            fig, z, x, y, f"{where}<br>{quantity}: %{{z:.4g}}<br>mean effect %{{customdata}}",
            customdata=text.tolist(), text=[[_effect(value) for value in row] for row in z.tolist()],
            texttemplate="%{text}" if len(x) <= NUMBERED else None, **style, **options,
        )  # fmt: skip

    if len(sweep.axes) == 4:  # pairs of axes, such as layer and head that write, and layer and head that read
        order = [0, 1, 2, 3]
        y, x = ([f"{i}.{j}" for i in first for j in second] for first, second in (sweep.indices[:2], sweep.indices[2:]))
        down, across = (f"{_spaced(a)}.{_spaced(b).removeprefix('to ')}" for a, b in (sweep.axes[:2], sweep.axes[2:]))
        fig = draw.figure(heading, across, down)
        add_cells(fig, ..., x, y, f"{down} %{{y}}, {across} %{{x}}")
        fig.update_layout(height=max(380, 22 * len(y) + AROUND))
        return _name_cells(fig, [*x, *y])
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
    fig = draw.panels(
        heading, names, columns=columns, shared_xaxes=True, shared_yaxes=True, horizontal_spacing=0.03,
        vertical_spacing=BETWEEN / height,
    )  # fmt: skip
    for i, name in enumerate(names):
        place = draw.panel(i, columns)
        where = f"{name}{', ' if name else ''}layer %{{y}}, {_spaced(across)} %{{x}}"
        add_cells(fig, i if third else ..., x, y, where, showscale=i == 0, place=place)
        if i + columns >= len(names):  # the lowest in its column
            fig.update_xaxes(title_text=_spaced(across), showticklabels=True, **place)
    fig.update_yaxes(title_text="layer", col=1)
    fig.update_layout(height=height + AROUND + (25 if _slanted(x) else 0), margin_t=75 if third else 55)
    if across not in POSITIONS and not third:  # few cells: no need to stretch them over the page
        fig.update_layout(width=max(90 * len(x), 260) + 200)
    return _name_cells(fig, x)


@checked
def head_table(scores: HeadScores, title: str = "What the heads do") -> go.Figure:
    """Draw heatmaps of head scores, such as "induction": a panel per score, with layers as rows and heads as columns.

    Cells contain means over prompts, and hovering shows their 95% intervals. Scores of attention share a colour scale
    from 0 to 1; those of weights, which have no interval, one from -1 to 1. The number under the name of an attention
    score ("chance") is its value for uniform attention.

    Args:
        scores: result of `score_heads`.
    """
    if not scores.scores:
        raise ValueError("scores must have at least one score, got none")
    layers, heads = scores.mean(next(iter(scores.scores))).shape
    cell = _cell(heads)
    width, height = max(cell * heads, 130), max(cell * layers, 60)  # of a panel
    groups = [[name for name in scores.scores if scores.is_of_attention(name) is kind] for kind in (True, False)]
    columns = max(1, min(max(map(len, groups)), WIDEST_TABLE // (width + BETWEEN)))
    lines = [group[i : i + columns] for group in groups for i in range(0, len(group), columns)]
    plot_width, plot_height = columns * (width + BETWEEN) - BETWEEN, len(lines) * (height + ABOVE) - ABOVE
    fig = draw.panels(
        title, [_heading(scores, line[c]) if c < len(line) else "" for line in lines for c in range(columns)],
        columns=columns, specs=[[{} if c < len(line) else None for c in range(columns)] for line in lines],
        horizontal_spacing=BETWEEN / plot_width, vertical_spacing=ABOVE / plot_height if len(lines) > 1 else 0,
    )  # fmt: skip
    table = scores.to_dataframe()
    for row, line in enumerate(lines):
        for column, name in enumerate(line):
            measured, means = scores.is_of_attention(name), scores.mean(name)
            precision = table[f"{name}_half_width"].to_numpy().reshape(layers, heads) if measured else means
            hover = "layer %{y}, head %{x}<br>%{z:.4f}" + (" ± %{customdata:.4f}" if measured else "")
            draw.add_heatmap(
                fig, means, list(map(str, range(heads))), list(map(str, range(layers))),
                f"{draw.literal(name.replace('_', ' '))}<br>{hover}",
                text=[[_score(one) for one in row] for row in means.tolist()],
                texttemplate="%{text}" if heads <= NUMBERED_HEADS else None, textfont={"size": 11 if cell > 40 else 9},
                customdata=precision.tolist(), xgap=1.5, ygap=1.5, coloraxis="coloraxis" if measured else "coloraxis2",
                place=draw.panel(row * columns + column, columns),
            )  # fmt: skip
    draw.name_cells(fig, ticks="", tickfont={"size": 11})
    fig.update_xaxes(title={"text": "head", "font": {"size": 12}, "standoff": 4})
    fig.update_yaxes(title={"text": "layer", "font": {"size": 12}, "standoff": 4}, col=1)
    measured_lines = sum(line[0] in groups[0] for line in lines)
    top = 1 - measured_lines * (height + ABOVE) / plot_height  # of the first panel of weights
    length = max(height, 90) / plot_height
    return fig.update_layout(
        width=plot_width + 175, height=plot_height + 155, margin={"l": 55, "r": 120, "t": 105, "b": 50},
        title={"y": 1 - 25 / (plot_height + 155), "yanchor": "middle"},
        coloraxis=_scale("attention", draw.SHARES, 0, 1.0, length),
        coloraxis2=_scale("eigenvalues", draw.SIGNED, -1, top, length),
    )  # fmt: skip


@checked
def composition_figure(scores: Float[Tensor, "layer head layer head"], kind: Literal["Q", "K", "V"]) -> go.Figure:
    """Draw how strongly each head of a later layer reads each earlier head's output, by the weights.

    Rows are the heads that write and columns the heads that read, both as "layer.head". Composition scores are at most
    1, and 0 if nothing of the output is read.

    Args:
        scores: result of `composition_scores`: earlier layer, its head, later layer, its head.
        kind: the part of the later heads that `scores` is about: queries "Q", keys "K" or values "V".
    """
    layers, heads = scores.shape[:2]
    if layers < 2:
        raise ValueError(f"scores must have at least 2 layers, across which heads compose, got {layers}")
    values: Any = scores.detach().cpu().double()
    names = [f"{layer}.{head}" for layer in range(layers) for head in range(heads)]
    earlier, later = names[:-heads], names[heads:]
    z = values[:-1, :, 1:].flatten(2).flatten(0, 1).tolist()
    for row, column in ((r, c) for r in range(len(z)) for c in range(len(z)) if c // heads < r // heads):
        z[row][column] = None  # the column's layer, one more than its number here, is not later
    shown = [value for row in z for value in row if value is not None]
    bound = max(map(abs, shown)) or 1.0
    signed = min(shown) < -1e-6 * bound  # more than rounding
    numbered = len(later) <= NUMBERED_HEADS
    reads = READERS[kind]
    fig = draw.figure(f"Composition with {reads} of later heads", "reads: layer.head", "writes: layer.head")
    ticks = {"tickvals": draw.bar_ticks(bound, signed=signed)[:: 2 if signed else 1], "tickformat": ".2~r"}
    draw.add_heatmap(
        fig, z, later, earlier, f"head %{{y}} to {reads} of %{{x}}<br>%{{z:.4f}}", xgap=1, ygap=1, hoverongaps=False,
        zmin=-bound if signed else 0, zmax=bound, colorscale=draw.SIGNED if signed else draw.SHARES,
        text=[["" if value is None else _score(value) for value in row] for row in z],
        texttemplate="%{text}" if numbered else None, textfont={"size": 10},
        colorbar=draw.color_bar("composition", thickness=12, tickfont={"size": 10}, **ticks),
    )  # fmt: skip
    line = {"color": "#999999", "width": 1}
    for edge in range(heads, len(later), heads):
        fig.add_vline(edge - 0.5, line=line).add_hline(edge - 0.5, line=line)
    draw.name_cells(fig, ticks="", tickfont={"size": 11})
    side = _cell(len(later)) if numbered else 14
    return fig.update_layout(width=max(side * len(later), 260) + 170, height=max(side * len(earlier), 160) + 120)


def _effect(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}" if abs(value) >= 1e-4 else "0"


def _score(value: float) -> str:
    return f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")


def _labels(indices: Sequence[int], labels: Sequence[str] | None, axis: str) -> list[str]:
    if labels is None:
        return [str(i) for i in indices]
    if max(indices, default=-1) >= len(labels):
        raise ValueError(f"labels must name {axis} 0 to {max(indices)}, got {len(labels)} labels")
    chosen = [labels[i] for i in indices]  # equal ones would share a column
    return [f"{label} ({i})" if chosen.count(label) > 1 else label for i, label in zip(indices, chosen, strict=True)]


def _spaced(axis: str) -> str:
    """Return "position" for "pos", and "layer" for the second layer of a pair."""
    return NAMES.get(axis, axis.removesuffix("_2").replace("_", " "))


def _slanted(x: Sequence[str]) -> bool:
    return len(x) * max(map(len, x)) > 36  # characters side by side


def _name_cells(fig: go.Figure, x: Sequence[str]) -> go.Figure:
    return draw.name_cells(fig).update_xaxes(tickangle=-60 if _slanted(x) else 0)


def _cell(n: int) -> int:
    return 44 if n <= 6 else 34


def _scale(title: str, colors: str, low: float, top: float, length: float) -> dict[str, Any]:
    bar = {"title": {"text": title, "font": {"size": 11}}, "tickfont": {"size": 10}, "tickformat": ".1f", "nticks": 3}
    place = {"thickness": 12, "y": top, "yanchor": "top", "len": min(length, 1), "ypad": 0}
    return {"colorscale": colors, "cmin": low, "cmax": 1, "colorbar": bar | place}


def _heading(scores: HeadScores, name: str) -> str:
    under = f"chance {scores.chance[name]:.3f}" if scores.is_of_attention(name) else "of the weights"
    return draw.Markup(f"{draw.literal(name.replace('_', ' '))}<br><span style='font-size:11px'>{under}</span>")


def in_context_figure(scores: FewShotScores, vector: FunctionVector) -> go.Figure:
    """Draw the accuracy by demonstrations over all tasks, and the effects of all heads with the strongest named."""
    task = draw.literal(vector.task.replace("_", " "))
    values = vector.indirect_effects.mean(-1).T  # layers along the horizontal axis: there are more of them
    bound = float(values.abs().max()) or 1.0
    effects = f"Effect of heads (layer.head), {task}<br>(darkest: {100 * bound:.0f} points of probability)"
    names = [f"Accuracy, mean of {len(scores.tasks)} tasks", draw.Markup(effects)]
    fig = draw.panels("", names, horizontal_spacing=0.16)
    labels = [f"{label} labels" for label in scores.labels]
    for k, (name, color) in enumerate(zip(labels, draw.colors_for(labels), strict=True)):
        means = [interval(accuracy.flatten().double()).within(0, 1) for accuracy in scores.accuracy[:, k].unbind(1)]
        draw.add_intervals(fig, list(scores.shots), means, name, color, place=draw.panel(0, 2))
    fig.update_xaxes(title_text="demonstrations", tickvals=list(scores.shots), **draw.panel(0, 2))
    fig.update_yaxes(range=[-0.02, 1.02], tickformat=draw.PERCENT, **draw.panel(0, 2))
    look = {"showscale": False, **draw.signed_scale(bound)}
    heads, layers = map(range, values.shape)
    draw.add_heatmap(fig, values, layers, heads, "head %{x}.%{y}: %{z:.2%}", place=draw.panel(1, 2), **look)
    named: list[tuple[int, int]] = []
    for layer, head in vector.heads:
        if len(named) < N_NAMED and all(max(abs(layer - one), abs(head - two)) >= N_APART for one, two in named):
            named.append((layer, head))
            look = {"ax": 0, "ay": -16, "arrowwidth": 1, "arrowhead": 0, "bgcolor": "rgba(255,255,255,0.8)"}
            fig.add_annotation(x=layer, y=head, text=f"{layer}.{head}", borderpad=0, **look, **draw.panel(1, 2))
    fig.update_xaxes(title_text="layer", showgrid=False, **draw.panel(1, 2))
    fig.update_yaxes(title_text="head", showgrid=False, **draw.panel(1, 2))
    return fig.update_layout(height=330, legend=draw.BELOW)


def few_shot_curves(scores: FewShotScores, task: str | None = None) -> go.Figure:
    """Draw the accuracy of `icl_score` on a task by demonstrations, with 95% intervals, a line per kind of labels."""
    t = 0 if task is None else scores.tasks.index(task)
    curves = {
        f"{label} labels": [interval(accuracy.double()).within(0, 1) for accuracy in scores.accuracy[t, k]]
        for k, label in enumerate(scores.labels)
    }
    title = scores.tasks[t].replace("_", " ")
    fig = draw.interval_lines(title, "demonstrations", "accuracy", list(scores.shots), curves)
    fig.update_xaxes(tickvals=list(scores.shots))
    return fig.update_yaxes(range=[-0.02, 1.02], tickformat=draw.PERCENT)


def head_effects(vector: FunctionVector) -> go.Figure:
    """Draw the indirect effect of each head from `function_vectors`, a mean over prompts."""
    values = vector.indirect_effects.mean(-1)
    bound = float(values.abs().max()) or 1.0
    fig = draw.figure("Indirect effect of each head on the probability", "head", "layer")
    heads, layers = range(values.shape[1]), range(values.shape[0])
    look = {"colorbar": {"title": "effect", "tickformat": ".1%"}, **draw.signed_scale(bound)}
    draw.add_heatmap(fig, values, heads, layers, "head %{y}.%{x}: %{z:.2%}", **look)
    return fig


def curves_by_layer(vector: FunctionVector) -> go.Figure:
    """Draw the right answer's probability with the vector of `function_vectors` (or a random one) added to a layer."""
    added = {"function vector": vector.added, "random vector": vector.random_added}
    curves = {
        name: [interval(values.double(), within=UNBOUNDED).within(0, 1) for values in lines]
        for name, lines in added.items()
    }
    title = "Probability of the right answer without demonstrations"
    fig = draw.interval_lines(title, "layer", "probability", list(range(len(vector.added))), curves)
    return fig.update_yaxes(tickformat=draw.PERCENT)


def ablation_bars(ablations: Mapping[str, MatchedAblation]) -> go.Figure:
    """Draw the right answer's probability without some heads (`ablate_matched`, by name), and without random ones."""
    fig = draw.figure("Probability of the right answer", "", "probability")
    fig.update_xaxes(type="category").update_yaxes(tickformat=draw.PERCENT)
    for name in ("intact", "ablated", "matched"):
        label = {"ablated": "without these heads", "matched": "without random heads of the same layers"}.get(name, name)
        samples = [getattr(result, name).double() for result in ablations.values()]
        values = [interval(each.mean(0) if each.ndim > 1 else each).within(0, 1) for each in samples]
        look = {"marker_color": draw.color_of(label), "error_y": draw.error_bars(values)}
        fig.add_bar(x=[*map(draw.literal, ablations)], y=[v.mean for v in values], name=label, **look)
    return fig
