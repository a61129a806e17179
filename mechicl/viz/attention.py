"""Attention patterns: drawn by circuitsvis from its bundled script (no network access), and as a plotly figure."""

import json
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.models.opening.sites import Site, check_hook, hook_names
from mechicl.prompts import Prompts
from mechicl.viz import elements as draw
from mechicl.viz.export import Html, circuitsvis_source

POSITIVE, NEGATIVE = "#1f6fb4", "#b0413e"
PANELS_PER_ROW = 4  # panels
PANEL = {1: 290, 2: 240}  # pixels, a side of a panel by the number of columns; of more columns:
SMALL = 150
ACROSS, DOWN = 26, 84  # pixels between panels
LEFT, RIGHT, TOP, BOTTOM = 85, 105, 40, 90  # margins
MOST_LABELS = 11  # the most labels of positions along a panel
# circuitsvis' headings are made for a separate page, and its small pictures would be covered by their names
_STYLE = """<style>
.attention-heads h3 { font-size: 14px !important; margin: 6px 0 !important; }
.attention-heads h2 { display: none; }
.attention-heads > div > div:nth-of-type(1) > div { flex: 0 0 110px !important; max-width: 110px !important; }
.attention-heads h4 { font-size: 10px !important; line-height: 1.3 !important; opacity: 0.85; }
</style>"""
_DRAW = """(() => {
  const place = document.currentScript.parentElement.querySelector(".attention-heads");
  const properties = PROPERTIES;
  place.id = "attention-" + Math.random().toString(36).slice(2);
  const started = Date.now();
  (function draw() {
    if (window.CircuitsVis) {
      place.textContent = "";
      CircuitsVis.render(place.id, CircuitsVis.AttentionHeads, properties);
      place.removeAttribute("data-waiting");
      return;
    }
    if (Date.now() - started > 3000)
      place.textContent = "The script of this picture is missing: run the cell with init_notebook().";
    setTimeout(draw, 100);
  })();
})();"""


@checked
@torch.no_grad()
def prompt_attention(
    model: Any,
    prompt: Prompts | Int[Tensor, "1 pos"],
    layer: int | Sequence[int] | None = None,
    labels: Sequence[str] | None = None,
) -> Html:
    """Draw the attention of all heads on one prompt: a picture for each layer, with a heatmap for each head.

    Args:
        model: a mechicl model, or any with TransformerLens' hook names and `run_with_cache`.
        prompt: one prompt (`prompts[:1]`), or the token ids `[1 pos]` of one sequence.
        layer: number of a layer, or several, counted from 0; all by default.
        labels: names of the positions; by default those of the prompt format (x1, y1, ...), or the token ids.

    Returns:
        An interactive `Html` picture, which a notebook shows and `viz.save` writes to a file.

    Example:
        >>> prompt_attention(load("gpt2-8l"), prompts[:1], layer=[0, 4])
    """
    if len(prompt) != 1:
        raise ValueError(f"attention is drawn for one prompt, got {len(prompt)}: pass prompts[:1]")
    hook_names(model)  # refuses what has none
    layers = range(model.cfg.n_layers) if layer is None else [layer] if isinstance(layer, int) else layer
    if not layers:
        raise ValueError("layer must name at least one layer, got none")
    names = [Site("pattern", number).hook_name for number in layers]
    for name in names:
        check_hook(model, name)
    if labels is None:
        is_points = isinstance(prompt, Prompts)
        labels = model.cfg.format.labels(prompt.n_context) if is_points else [str(i) for i in prompt[0].tolist()]
    tokens = list(labels or ())
    _, cache = model.run_with_cache(prompt, names_filter=names)
    patterns = [cache[name][0] for name in names]
    pictures = [attention_html(pattern, tokens) for pattern in patterns]
    if len(pictures) == 1:
        return pictures[0]
    bodies = [f"<h4>layer {n}</h4>{picture.body}" for n, picture in zip(layers, pictures, strict=True)]
    heads = [f"layer {n}, head {i}" for n, pattern in zip(layers, patterns, strict=True) for i in range(len(pattern))]
    still = attention_figure(torch.cat(patterns), tokens, heads, columns=min(len(patterns[0]), PANELS_PER_ROW))
    return Html("".join(bodies), circuitsvis_source(), still)


def attention_html(pattern: Float[Tensor, "head query_pos key_pos"], tokens: Sequence[str]) -> Html:
    """Draw heatmaps of attention patterns, one per head; arguments and errors as in `attention_figure`."""
    still = attention_figure(pattern, tokens)
    low, high, bound = _range(pattern)
    properties = {
        "attention": _rounded(pattern.detach().cpu().tolist()), "tokens": list(tokens),
        "attentionHeadNames": [f"head {i}" for i in range(len(pattern))],
        "maxValue": bound, "minValue": -bound if low < 0 else 0.0,
        "negativeColor": NEGATIVE, "positiveColor": POSITIVE, "maskUpperTri": False,
    }  # fmt: skip
    caption = "" if low >= 0 else (
        f'<figcaption style="font-size:0.9em;color:#555"><span style="color:{NEGATIVE}">■</span> Negative attention, '
        f'down to {low:.3g}, is red; <span style="color:{POSITIVE}">■</span> positive attention, up to '
        f"{max(high, 0.0):.3g}, is blue.</figcaption>"
    )  # fmt: skip
    # Labels are JSON inside the script: React shows them as text, but a "</script>" in one would end the script.
    script = _DRAW.replace("PROPERTIES", json.dumps(properties).replace("<", "\\u003c"))
    body = (
        f'{_STYLE}<figure style="position:relative;max-width:680px;margin:15px 0">'
        f'<div class="attention-heads" data-waiting></div>{caption}<script>{script}</script></figure>'
    )
    return Html(body, circuitsvis_source(), still)


@checked
def attention_figure(
    pattern: Float[Tensor, "head query_pos key_pos"],
    tokens: Sequence[str],
    head_names: Sequence[str] | None = None,
    *,
    columns: int | None = None,
) -> go.Figure:
    """Draw attention patterns as heatmaps, one per head, on one colour scale: blue is positive, red is negative.

    Rows are the positions that attend (queries), from the top down; columns are the attended positions (keys).

    Args:
        pattern: attention of each head, `cache["blocks.0.attn.hook_pattern"][0]` for the first prompt and layer; heads
            of several layers may be concatenated.
        tokens: a label for each position; if there are many, only some are written, and hovering shows each.
        head_names: a label for each head; by default "head 0", "head 1", ...
        columns: number of panels in a row; by default all heads, up to four.

    Example:
        >>> viz.save(attention_figure(cache["blocks.0.attn.hook_pattern"][0], labels), "attention.pdf")
    """
    heads, queries, keys = pattern.shape
    tokens = [*map(draw.literal, tokens)]
    if queries != keys or len(tokens) != keys:
        raise ValueError(f"pattern {tuple(pattern.shape)} needs one label per position, got {len(tokens)} tokens")
    names = [*map(draw.literal, [f"head {i}" for i in range(heads)] if head_names is None else head_names)]
    if len(names) != heads:
        raise ValueError(f"head_names must have {heads} names, got {len(names)}")
    columns = min(columns or PANELS_PER_ROW, max(heads, 1))
    rows = -(-heads // columns) or 1
    side = PANEL.get(columns, SMALL)
    width, height = columns * (side + ACROSS) - ACROSS, rows * (side + DOWN) - DOWN
    spacing = {"horizontal_spacing": ACROSS / width, "vertical_spacing": DOWN / height}
    fig = draw.panels("", names, columns=columns, **spacing)
    low, _, bound = _range(pattern)
    colors = [[0, "white"], [1, POSITIVE]] if low >= 0 else [[0, NEGATIVE], [0.5, "white"], [1, POSITIVE]]
    style = {
        "colorscale": colors, "zmin": -bound if low < 0 else 0, "zmax": bound, "customdata": [tokens] * keys,
        "text": [[token] * keys for token in tokens], "colorbar": draw.color_bar("attention", thickness=12, nticks=5),
    }  # fmt: skip
    places = list(range(keys))
    written = places[:: -(-keys // MOST_LABELS)] if keys else []
    ticks = {
        "tickvals": written, "ticktext": [tokens[p] for p in written], "showgrid": False, "zeroline": False,
        "mirror": True, "linecolor": "#ccc", "constrain": "domain", "tickfont_size": 10, "title_font_size": 12,
    }  # fmt: skip
    for i, name in enumerate(names):
        place = draw.panel(i, columns)
        hover = f"{name}<br>%{{text}} attends to %{{customdata}}<br>attention: %{{z:.4g}}"
        z = pattern[i].detach().cpu().float()
        draw.add_heatmap(fig, z, places, places, hover, showscale=i == 0, place=place, **style)
        subplot: Any = fig.get_subplot(**place)
        anchor = subplot.xaxis.plotly_name.replace("axis", "")
        fig.update_yaxes(scaleanchor=anchor, showticklabels=place["col"] == 1, **place)
        if i + columns >= heads:  # the lowest in its column
            fig.update_xaxes(title_text="key position", title_standoff=6, **place)
    fig.update_xaxes(tickangle=-60, **ticks).update_yaxes(autorange="reversed", **ticks)
    fig.update_yaxes(title_text="query position", title_standoff=6, col=1)
    width, height = width + LEFT + RIGHT, height + TOP + BOTTOM
    margin = {"l": LEFT, "r": RIGHT, "t": TOP, "b": BOTTOM}
    return fig.update_layout(width=width, height=height, margin=margin, font_size=12)


def _range(pattern: Tensor) -> tuple[float, float, float]:
    low, high = (float(pattern.min()), float(pattern.max())) if pattern.numel() else (0.0, 0.0)
    return low, high, max(-low, high) or 1.0


def _rounded(values: Any) -> Any:
    """Round nested lists of numbers to four digits, which is more than a colour shows and half as long."""
    return [_rounded(each) for each in values] if isinstance(values, list) else float(f"{values:.4g}")
