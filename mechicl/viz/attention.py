"""Attention patterns: by circuitsvis from its bundled source (no network, no telemetry), and as a plotly figure."""

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
from mechicl.viz.elements import add_heatmap, panel, panels
from mechicl.viz.html import Html, circuitsvis_source

POSITIVE, NEGATIVE = "#1f6fb4", "#b0413e"
PER_ROW = 4  # panels
PANEL = {1: 290, 2: 240}  # pixels, a side of a panel by the number of columns; of more columns:
SMALL = 150
BESIDE, BELOW = 26, 84  # pixels between panels
LEFT, RIGHT, TOP, BOTTOM = 85, 105, 40, 90  # margins
TITLE = 35
LABELS = 11  # of positions, that there is room for along a panel
# circuitsvis' headings are made for a page of its own, and its small pictures would be covered by their names
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
def attention_html(
    pattern: Float[Tensor, "head query_pos key_pos"], tokens: Sequence[str], head_names: Sequence[str] | None = None
) -> Html:
    """Heatmaps of attention patterns, one per head; a caption explains negative attention.

    Args:
        pattern: one prompt's and layer's `attn.hook_pattern`; linear attention has negative entries.
        tokens: a label for each position; any text.
        head_names: a label for each head.

    Returns:
        A picture that a notebook shows and `save` writes to a file.

    Raises:
        ValueError: another number of labels than of positions or heads.

    Example:
        >>> attention_html(torch.eye(2)[None], ["a", "b"]).save("attention.html")
    """
    still = attention_figure(pattern, tokens, head_names)  # it checks the arguments
    names = [f"head {i}" for i in range(len(pattern))] if head_names is None else list(head_names)
    low, high = (float(pattern.min()), float(pattern.max())) if pattern.numel() else (0.0, 0.0)
    bound = max(-low, high) or 1.0
    properties = {
        "attention": _rounded(pattern.detach().cpu().tolist()),
        "tokens": list(tokens),
        "attentionHeadNames": names,
        "maxValue": bound,
        "minValue": -bound if low < 0 else 0.0,
        "negativeColor": NEGATIVE,
        "positiveColor": POSITIVE,
        "maskUpperTri": False,
    }
    # Labels are JSON inside the script: React shows them as text, but a "</script>" in one would end the script.
    script = _DRAW.replace("PROPERTIES", json.dumps(properties).replace("<", "\\u003c"))
    body = (
        f'{_STYLE}<figure style="position:relative;max-width:680px;margin:15px 0">'
        f'<div class="attention-heads" data-waiting></div>{_caption(low, high)}<script>{script}</script></figure>'
    )
    return Html(body, circuitsvis_source(), still)


@checked
def prompt_attention(
    model: Any, prompt: Prompts | Int[Tensor, "1 pos"], layer: int = 0, labels: Sequence[str] | None = None
) -> Html:
    """A layer's attention on one prompt: `model_attention` of this layer."""
    return model_attention(model, prompt, [layer], labels)


@checked
@torch.no_grad()
def model_attention(
    model: Any,
    prompt: Prompts | Int[Tensor, "1 pos"],
    layers: Sequence[int] | None = None,
    labels: Sequence[str] | None = None,
) -> Html:
    """The attention of all heads of several layers on one prompt, a picture per layer.

    Args:
        model: one of ours, or any with TransformerLens' hook names and `run_with_cache`.
        prompt: one prompt, or the token ids of one sequence.
        layers: numbers of the layers; all by default.
        labels: of the positions; by default those of the prompt format, or the ids.

    Raises:
        ValueError: more than one prompt, another number of labels than of positions, or a layer without attention.

    Example:
        >>> model_attention(load("gpt2-8l"), prompts[:1], layers=[0, 4])
    """
    if len(prompt) != 1:
        raise ValueError(f"attention is drawn of one prompt, got {len(prompt)}: pass prompts[:1]")
    hook_names(model)  # refuses what has none
    numbers = range(model.cfg.n_layers) if layers is None else layers
    if not len(numbers):
        raise ValueError("layers has no numbers: there is nothing to draw")
    names = [Site("pattern", layer).hook_name for layer in numbers]
    for name in names:
        check_hook(model, name)
    if labels is None:
        is_points = isinstance(prompt, Prompts)
        labels = model.cfg.format.labels(prompt.n_context) if is_points else [str(i) for i in prompt[0].tolist()]
    _, cache = model.run_with_cache(prompt, names_filter=names)
    patterns = [cache[name][0] for name in names]
    tokens = list(labels or ())
    pictures = [attention_html(pattern, tokens) for pattern in patterns]
    if len(pictures) == 1:
        return pictures[0]
    bodies = [f"<h4>layer {n}</h4>{picture.body}" for n, picture in zip(numbers, pictures, strict=True)]
    heads = [f"layer {n}, head {i}" for n, pattern in zip(numbers, patterns, strict=True) for i in range(len(pattern))]
    columns = min(len(patterns[0]), PER_ROW)
    still = attention_figure(torch.cat(patterns), tokens, heads, columns=columns)
    return Html("".join(bodies), circuitsvis_source(), still)


@checked
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
        tokens: a label for each position; if there are many, only some are written, and hovering shows each.
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


def _caption(low: float, high: float) -> str:
    if low >= 0:
        return ""
    words = (
        f'<span style="color:{NEGATIVE}">■</span> Negative attention, down to {low:.3g}, is red; '
        f'<span style="color:{POSITIVE}">■</span> positive attention, up to {max(high, 0.0):.3g}, is blue.'
    )
    return f'<figcaption style="font-size:0.9em;color:#555">{words}</figcaption>'


def _rounded(values: Any) -> Any:
    """Nested lists of numbers at four digits, which is more than a colour shows and half as long."""
    return [_rounded(each) for each in values] if isinstance(values, list) else float(f"{values:.4g}")
