"""Attention patterns as a plotly figure: all heads beside each other, for paper and for pages that run no scripts."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.viz.elements import add_heatmap, panel, panels

POSITIVE, NEGATIVE = "#1f6fb4", "#b0413e"
PER_ROW = 4  # panels
PANEL = {1: 290, 2: 240}  # pixels, a side of a panel by the number of columns; of more columns:
SMALL = 150
BESIDE, BELOW = 26, 84  # pixels between panels
LEFT, RIGHT, TOP, BOTTOM = 85, 105, 40, 90  # margins
TITLE = 35
LABELS = 11  # of positions, that there is room for along a panel


def attention_figure(
    pattern: Float[Tensor, "head query_pos key_pos"],
    tokens: Sequence[str],
    head_names: Sequence[str] | None = None,
    *,
    title: str = "",
    columns: int | None = None,
) -> go.Figure:
    """A heatmap for each head, all on one scale of colours: blue is positive attention, red is negative.

    Rows are the positions that attend, from the top down; columns are those attended to.

    Args:
        pattern: one prompt's and layer's `attn.hook_pattern`, or those of several layers one after the other.
        tokens: a label for each position; of many, only some are written, and hovering shows each.
        head_names: a label for each head.
        title: of the figure.
        columns: panels in a row; by default all heads, up to four.

    Raises:
        ValueError: another number of labels than of positions or heads.

    Example:
        >>> viz.save(attention_figure(cache["blocks.0.attn.hook_pattern"][0], labels), "attention.pdf")
    """
    heads, queries, keys = pattern.shape
    if queries != keys or len(tokens) != keys:
        raise ValueError(f"pattern {tuple(pattern.shape)} needs one label a position, got {len(tokens)}")
    names = [f"head {i}" for i in range(heads)] if head_names is None else list(head_names)
    if len(names) != heads:
        raise ValueError(f"{heads} heads need {heads} names, got {len(names)}")
    columns = min(columns or PER_ROW, max(heads, 1))
    rows = -(-heads // columns) or 1
    side = PANEL.get(columns, SMALL)
    width, height = columns * (side + BESIDE) - BESIDE, rows * (side + BELOW) - BELOW
    spacing = {"horizontal_spacing": BESIDE / width, "vertical_spacing": BELOW / height}
    fig = panels(title, names, columns=columns, **spacing)
    low, high = (float(pattern.min()), float(pattern.max())) if pattern.numel() else (0.0, 0.0)
    bound = max(-low, high) or 1.0
    colors = [[0, "white"], [1, POSITIVE]] if low >= 0 else [[0, NEGATIVE], [0.5, "white"], [1, POSITIVE]]
    style = {
        "colorscale": colors, "zmin": -bound if low < 0 else 0, "zmax": bound, "customdata": [list(tokens)] * keys,
        "colorbar": {"title": {"text": "attention", "side": "right"}, "thickness": 12, "nticks": 5},
    }  # fmt: skip
    places = list(range(keys))
    for i in range(heads):
        place = panel(i, columns)
        hover = f"{names[i]}<br>%{{text}} attends to %{{customdata}}<br>attention: %{{z:.4g}}"
        text = [[token] * keys for token in tokens]
        z = pattern[i].detach().cpu().float()
        add_heatmap(fig, z, places, places, hover, text=text, showscale=i == 0, place=place, **style)
        written = places[:: -(-keys // LABELS)] if keys else []
        ticks = {"tickvals": written, "ticktext": [tokens[p] for p in written], "showgrid": False, "zeroline": False}
        look = {"mirror": True, "linecolor": "#ccc", "constrain": "domain", "tickfont_size": 10, "title_font_size": 12}
        fig.update_xaxes(**ticks, **look, tickangle=-60, **place)
        subplot: Any = fig.get_subplot(**place)
        anchor = subplot.xaxis.plotly_name.replace("axis", "")
        fig.update_yaxes(**ticks, **look, autorange="reversed", scaleanchor=anchor, **place)
        fig.update_yaxes(showticklabels=place["col"] == 1, **place)
        if i + columns >= heads:  # the lowest in its column
            fig.update_xaxes(title_text="key position", title_standoff=6, **place)
    fig.update_yaxes(title_text="query position", title_standoff=6, col=1)
    margin = {"l": LEFT, "r": RIGHT, "t": TOP + (TITLE if title else 0), "b": BOTTOM}
    return fig.update_layout(
        width=width + LEFT + RIGHT, height=height + margin["t"] + margin["b"], margin=margin, font_size=12
    )


def mean_patterns(patterns: Mapping[str, Float[Tensor, "query_pos key_pos"]], labels: Sequence[str]) -> go.Figure:
    """Attention patterns side by side, in one scale: `attention_figure` of patterns by title.

    Args:
        patterns: by title.
        labels: of the positions.

    Raises:
        ValueError: a pattern that does not fit the labels, or none.
    """
    shapes = [tuple(pattern.shape) for pattern in patterns.values()]
    if not shapes or any(shape != (len(labels), len(labels)) for shape in shapes):
        raise ValueError(f"patterns must be [query_pos key_pos] = {(len(labels), len(labels))}, got {shapes}")
    return attention_figure(torch.stack(list(patterns.values())), labels, list(patterns))
