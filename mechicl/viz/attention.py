"""Attention of one prompt, drawn by circuitsvis from its bundled source: no network, no telemetry."""

from circuitsvis.utils.render import render_local
from jaxtyping import Float
from torch import Tensor

from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts


def attention_html(
    pattern: Float[Tensor, "head query_pos key_pos"], tokens: list[str], head_names: list[str] | None = None
) -> str:
    """Heatmaps of attention patterns as a self-contained piece of HTML.

    Args:
        pattern: one prompt's and layer's `attn.hook_pattern`; linear attention has negative entries.
        tokens: a label for each position; any text.
        head_names: a label for each head.

    Raises:
        ValueError: another number of labels than of positions or heads.
    """
    heads, queries, keys = pattern.shape
    if queries != keys or len(tokens) != keys:
        raise ValueError(f"pattern {tuple(pattern.shape)} needs one label a position, got {len(tokens)}")
    names = head_names or [f"head {i}" for i in range(heads)]
    if len(names) != heads:
        raise ValueError(f"{heads} heads need {heads} names, got {len(names)}")
    bound = float(pattern.abs().max()) or 1.0
    rendered = render_local(
        "AttentionHeads",
        attention=pattern.detach().cpu().float().numpy(),
        tokens=tokens,
        attentionHeadNames=names,
        maxValue=bound,
        minValue=-bound if bool((pattern < 0).any()) else 0.0,
        negativeColor="#b0413e",
        positiveColor="#1f6fb4",
        maskUpperTri=False,
    )
    # Labels stand as JSON inside the script: React shows them as text, but a "</script>" in one would end the script.
    source, call, properties = rendered.rpartition("CircuitsVis.render(")
    properties, end, rest = properties.rpartition("</script>")
    return source + call + properties.replace("<", "\\u003c") + end + rest


def prompt_attention(model: HookedTransformer, prompt: Prompts, layer: int = 0) -> str:
    """A layer's attention on one prompt, labelled by the prompt format.

    Raises:
        ValueError: more than one prompt.
    """
    if len(prompt) != 1:
        raise ValueError(f"prompt_attention draws one prompt, got {len(prompt)}: pass prompts[:1]")
    name = f"blocks.{layer}.attn.hook_pattern"
    _, cache = model.run_with_cache(model.encode(prompt), names_filter=name)
    return attention_html(cache[name][0], model.cfg.format.labels(prompt.n_context))
