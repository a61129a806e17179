"""Figures of fine-tuning compared with reading demonstrations: accuracies, and similarities layer by layer."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from mechicl.analysis.finetuning.context_comparison import FineTuningComparison
from mechicl.base.arguments import checked
from mechicl.statistics import Interval, interval
from mechicl.viz.elements import (
    add_heatmap,
    add_intervals,
    bar_title,
    colors_for,
    figure,
    interval_lines,
    name_cells,
    signed_scale,
)


@checked
def settings_figure(
    scores: Mapping[str, Mapping[str, Interval]],
    y_title: str = "accuracy",
    title: str = "With demonstrations, and tuned on them",
    *,
    chance: Sequence[float] | None = None,
) -> go.Figure:
    """Bars with intervals: one per task for each setting.

    Args:
        scores: by setting, then by task.
        y_title: the kind of score.
        title: of the figure.
        chance: of each task, drawn as a line across its bars.

    Raises:
        ValueError: no settings.
    """
    if not scores:
        raise ValueError("settings_figure() needs the scores of at least one setting")
    fig = figure(title, "", y_title)
    for color, (name, by_task) in zip(colors_for(list(scores)), scores.items(), strict=True):
        halves = [i.half_width if i.n > 1 else 0.0 for i in by_task.values()]
        error_y = {"type": "data", "array": halves, "thickness": 1.2, "width": 3, "color": "#333"}
        means = [i.mean for i in by_task.values()]
        fig.add_trace(go.Bar(x=list(by_task), y=means, name=name, marker_color=color, error_y=error_y))
    dotted = {"color": "#444", "width": 1, "dash": "dot"}
    for i, level in enumerate(chance or ()):
        fig.add_shape(type="line", x0=i - 0.45, x1=i + 0.45, y0=level, y1=level, line=dotted, layer="above",
                      name="chance", showlegend=i == 0)  # fmt: skip
    fig.update_layout(barmode="group", bargap=0.25)
    return fig.update_xaxes(type="category")  # the lines' numeric ends would make it a linear one


@checked
def update_similarity_figure(
    comparisons: Mapping[str, FineTuningComparison], title: str = "What demonstrations and fine-tuning change (SimAOU)"
) -> go.Figure:
    """SimAOU by layer, a line for each comparison, with the random baseline of the first; bands over queries.

    Raises:
        ValueError: no comparisons.
    """
    lines = {name: _by_layer(comparison, "update_similarity") for name, comparison in comparisons.items()}
    lines["random change"] = _by_layer(_first(comparisons), "random_update_similarity")
    return _lines_by_layer(title, lines)


@checked
def map_similarity_figure(
    comparisons: Mapping[str, FineTuningComparison], title: str = "Attention to the query's own tokens (SimAM)"
) -> go.Figure:
    """SimAM by layer, mean over heads: before fine-tuning once, and after it a line for each comparison.

    Raises:
        ValueError: no comparisons.
    """
    lines = {"before fine-tuning": _by_layer(_first(comparisons), "map_similarity_before")}
    lines |= {name: _by_layer(comparison, "map_similarity_after") for name, comparison in comparisons.items()}
    return _lines_by_layer(title, lines)


@checked
def head_similarity_figure(
    comparison: FineTuningComparison, title: str = "What each head changes, in context and by fine-tuning"
) -> go.Figure:
    """The cosine of the changes of each head's output, layer by head."""
    means = comparison.head_update_similarity.mean(-1)
    layers, heads = means.shape
    fig = figure(title, "head", "layer")
    add_heatmap(
        fig, means, range(heads), range(layers), "layer %{y}, head %{x}<br>%{z:.4f}", **signed_scale(1),
        texttemplate="%{z:.2f}" if heads <= 24 else None, xgap=1.5, ygap=1.5,
        colorbar={"title": bar_title("cosine"), "thickness": 14},
    )  # fmt: skip
    fig.update_layout(width=max(420, 70 * heads + 200), height=max(300, 46 * layers + 130))
    return name_cells(fig)


def _by_layer(comparison: FineTuningComparison, measure: str) -> list[Interval]:
    """A measure's mean over queries in each layer, heads averaged, with its interval."""
    values = getattr(comparison, measure)
    return [interval(layer if layer.ndim == 1 else layer.mean(0)) for layer in values]


def _first(comparisons: Mapping[str, FineTuningComparison]) -> FineTuningComparison:
    if not comparisons:
        raise ValueError("there is no comparison to draw")
    return next(iter(comparisons.values()))


def _lines_by_layer(title: str, lines: Mapping[str, Sequence[Interval]]) -> go.Figure:
    layers = list(range(len(next(iter(lines.values())))))
    if len(layers) > 1:
        fig = interval_lines(title, "layer", "cosine", layers, lines)
    else:  # points side by side
        fig = figure(title, "the one layer", "cosine")
        for color, (name, intervals) in zip(colors_for(list(lines)), lines.items(), strict=True):
            add_intervals(fig, [name], intervals, name, color, showlegend=False)
        fig.update_xaxes(type="category", range=[-0.5, len(lines) - 0.5])
        fig.update_layout(width=min(1044, 180 + 160 * len(lines)))
    return fig.add_hline(y=0, line={"color": "#999", "width": 1})
