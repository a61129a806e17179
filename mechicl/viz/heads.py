"""Figures of heads: their scores, layer by head, and which heads read what earlier ones write."""

from typing import Any, Literal

import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.heads.scores import HeadScores
from mechicl.base.arguments import checked
from mechicl.viz.elements import SHARES, SIGNED, add_heatmap, bar_ticks, bar_title, figure, name_cells, panel, panels

WIDEST = 1400  # pixels
WRITTEN = 24  # cells in a row beyond which there is no room for numbers
BETWEEN = 50  # panels beside each other
ABOVE = 95  # each panel, for its name and the axis of the one above
READERS = {"Q": "queries", "K": "keys", "V": "values"}


@checked
def head_table(scores: HeadScores, title: str = "What the heads do") -> go.Figure:
    """A heatmap per score, layer by head, with the means written into the cells.

    Scores of attention share one scale from 0 to 1, those of weights another from -1 to 1. Under the name of a score of
    attention is the score of uniform attention; intervals are shown on hovering.
    """
    if not scores.scores:
        raise ValueError("head_table() needs at least one score")
    layers, heads = scores.mean(next(iter(scores.scores))).shape
    cell = _cell(heads)
    width, height = max(cell * heads, 130), max(cell * layers, 60)  # of a panel
    groups = [[name for name in scores.scores if scores.is_of_attention(name) is kind] for kind in (True, False)]
    columns = max(1, min(max(map(len, groups)), WIDEST // (width + BETWEEN)))
    lines = [group[i : i + columns] for group in groups for i in range(0, len(group), columns)]
    plot_width, plot_height = columns * (width + BETWEEN) - BETWEEN, len(lines) * (height + ABOVE) - ABOVE
    fig = panels(
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
            add_heatmap(
                fig, means, list(map(str, range(heads))), list(map(str, range(layers))), f"{_spaced(name)}<br>{hover}",
                text=[[_number(value) for value in row] for row in means.tolist()],
                texttemplate="%{text}" if heads <= WRITTEN else None, textfont={"size": 11 if cell > 40 else 9},
                customdata=precision.tolist(), xgap=1.5, ygap=1.5, coloraxis="coloraxis" if measured else "coloraxis2",
                place=panel(row * columns + column, columns),
            )  # fmt: skip
    name_cells(fig, ticks="", tickfont={"size": 11})
    fig.update_xaxes(title={"text": "head", "font": {"size": 12}, "standoff": 4})
    fig.update_yaxes(title={"text": "layer", "font": {"size": 12}, "standoff": 4}, col=1)
    measured_lines = sum(line[0] in groups[0] for line in lines)
    top = 1 - measured_lines * (height + ABOVE) / plot_height  # of the first panel of weights
    fig.update_layout(
        width=plot_width + 175,
        height=plot_height + 155,
        title={"y": 1 - 25 / (plot_height + 155), "yanchor": "middle"},
        margin={"l": 55, "r": 120, "t": 105, "b": 50},
        coloraxis=_scale("attention", SHARES, 0, 1.0, max(height, 90) / plot_height),
        coloraxis2=_scale("eigenvalues", SIGNED, -1, top, max(height, 90) / plot_height),
    )
    return fig


@checked
def composition_figure(
    scores: Float[Tensor, "layer head layer head"], kind: Literal["Q", "K", "V"], title: str | None = None
) -> go.Figure:
    """How much of each head's output is read by each head of a later layer.

    Args:
        scores: of `analysis.composition_scores`; or of `prefix_matching_scores`, with kind "K".
        kind: the part of the later heads that reads: queries "Q", keys "K" or values "V".
        title: of the figure.

    Raises:
        ValueError: fewer than two layers.
    """
    layers, heads = scores.shape[:2]
    if layers < 2:
        raise ValueError(f"heads compose across layers, and the model has only {layers}")
    values: Any = scores.detach().cpu().double()
    names = [f"{layer}.{head}" for layer in range(layers) for head in range(heads)]
    earlier, later = names[:-heads], names[heads:]
    z = values[:-1, :, 1:].flatten(2).flatten(0, 1).tolist()
    for row, column in ((r, c) for r in range(len(z)) for c in range(len(z)) if c // heads < r // heads):
        z[row][column] = None  # the column's layer, one more than its number here, is no later one
    shown = [value for row in z for value in row if value is not None]
    signed = min(shown) < -1e-6 * max(map(abs, shown))  # more than rounding
    bound = max(map(abs, shown)) or 1.0
    fig = figure(title or f"Composition with {READERS[kind]} of later heads", "reads: layer.head", "writes: layer.head")
    add_heatmap(
        fig, z, later, earlier, f"head %{{y}} to {READERS[kind]} of %{{x}}<br>%{{z:.4f}}", xgap=1, ygap=1,
        hoverongaps=False, zmin=-bound if signed else 0, zmax=bound, colorscale=SIGNED if signed else SHARES,
        text=[["" if value is None else _number(value) for value in row] for row in z],
        texttemplate="%{text}" if len(later) <= WRITTEN else None, textfont={"size": 10},
        colorbar={"title": bar_title("composition"), "thickness": 12,
                   "len": 1, "tickfont": {"size": 10}, "tickformat": ".2~g",
                  "tickvals": bar_ticks(bound, signed=signed)[:: 2 if signed else 1]},
    )  # fmt: skip
    line = {"color": "#999999", "width": 1}
    for edge in range(heads, len(later), heads):
        fig.add_vline(edge - 0.5, line=line)
        fig.add_hline(edge - 0.5, line=line)
    name_cells(fig, ticks="", tickfont={"size": 11})
    side = _cell(len(later)) if len(later) <= WRITTEN else 14
    fig.update_layout(width=max(side * len(later), 260) + 170, height=max(side * len(earlier), 160) + 120)
    return fig


def _cell(n: int) -> int:
    """Pixels of a cell in a row of n."""
    return 44 if n <= 6 else 34


def _scale(title: str, colors: str, low: float, top: float, length: float) -> dict[str, Any]:
    bar = {"title": {"text": title, "font": {"size": 11}}, "tickfont": {"size": 10}, "tickformat": ".1f", "nticks": 3}
    place = {"thickness": 12, "y": top, "yanchor": "top", "len": min(length, 1), "ypad": 0}
    return {"colorscale": colors, "cmin": low, "cmax": 1, "colorbar": bar | place}


def _heading(scores: HeadScores, name: str) -> str:
    under = f"chance {scores.chance[name]:.3f}" if scores.is_of_attention(name) else "of the weights"
    return f"{_spaced(name)}<br><span style='font-size:11px'>{under}</span>"


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _number(value: float) -> str:
    return f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")
