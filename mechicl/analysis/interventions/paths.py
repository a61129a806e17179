"""Direct-path patching: one head's output, as another head alone sees it (Wang et al. 2023)."""

import itertools
from typing import Any, Literal

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm
from transformer_lens.utilities import get_act_name

from mechicl.analysis.interventions.metrics import all_measured
from mechicl.analysis.interventions.patching import (
    Direction,
    Inputs,
    Metrics,
    bytes_of_results,
    hooks_of,
    keeps_predictions,
    named_metrics,
    opened_runs,
)
from mechicl.analysis.interventions.runs import DELAY, MEMORY, base_run, record_within, run_cells
from mechicl.analysis.interventions.sweeps import Sweep
from mechicl.models.adapter import ModelAdapter
from mechicl.models.sites import Site
from mechicl.prompts import At

Receiver = Literal["q", "k", "v"]


def patch_paths(
    model: Any,
    clean: Inputs,
    corrupted: Inputs,
    receiver: Receiver = "q",
    *,
    direction: Direction = "denoising",
    metrics: Metrics = None,
    at: At = "query",
    keep_predictions: bool | None = None,
    memory: float = MEMORY,
    progress: bool = True,
) -> Sweep:
    """What the model predicts when one head's query, key or value sees another head's output of another run.

    For every head A and every head B of a later layer: what A wrote in the clean run, in place of what it wrote in the
    corrupted one, reaches B's query (key, value) straight through the residual stream, at all positions. Every other
    part still sees A's corrupted output, what lies between A and B too.

    Args:
        model: ours, or one of TransformerLens' protocol whose layers write `z @ W_O` and read the norm of the stream,
            as GPT-2's do.
        clean: as for `patch`.
        corrupted: as for `patch`.
        receiver: what B receives it by: "q", "k" or "v".
        direction: as for `patch`.
        metrics: as for `patch`.
        at: as for `patch`.
        keep_predictions: as for `patch`.
        memory: bound in bytes on what the sweep allocates.
        progress: show a progress bar, if it takes more than two seconds.

    Returns:
        A sweep over `("layer", "head", "to_layer", "to_head")`. Where B's layer is not behind A's there is no path, and
        the entries are those of the unpatched run.

    Raises:
        ValueError: as for `patch`; an unknown receiver, a model whose streams are clipped or whose layers norm what
            heads write once more (outputs do not add up), or fewer key than query heads for "k" and "v".

    Example:
        >>> patch_paths(model, prompts, corrupted, "k").effect().shape
        torch.Size([2, 4, 2, 4, 64])

    Source: Wang et al. 2023, section 3.1 and appendix B, where MLPs between the two are recomputed and count as part of
    the path; here they stay as they are in the run that is intervened in, as in TransformerLens'
    `get_act_patch_direct_path`.
    """
    if receiver not in ("q", "k", "v"):
        raise ValueError(f"receiver={receiver!r} is not one of ('q', 'k', 'v')")
    adapter, into, source = opened_runs(model, clean, corrupted, direction, at)
    _check_additive(adapter, receiver, into[:1])
    named = named_metrics(metrics, clean, at)
    n_layers, n_heads = adapter.n_layers, adapter.model.cfg.n_heads
    z_names, names = hooks_of(adapter, "z"), hooks_of(adapter, receiver)
    theirs = record_within(adapter, source, z_names, memory)
    held = sum(of.nbytes for of in theirs.values())
    own = record_within(adapter, into, z_names, memory, held)
    keep = keeps_predictions(keep_predictions, clean, named)
    shape = (n_layers, n_heads, n_layers, n_heads)
    n_cells = torch.Size(shape).numel() + n_layers * n_heads  # all, and those of one sender
    held += 3 * sum(of.nbytes for of in own.values())  # beside z, the receivers as they are made and put in
    held += bytes_of_results(adapter, into, n_cells, len(named), keep)
    held += 6 * adapter.record(into[:1], ["blocks.0.hook_resid_pre"], 1)["blocks.0.hook_resid_pre"].nbytes * len(into)
    base = base_run(adapter, into, held=held, memory=memory)
    unpatched = all_measured(named, base.unpatched)
    found = {name: of.expand(*shape, -1).clone() for name, of in unpatched.items()}
    predictions = base.unpatched.expand(*shape, *base.unpatched.shape).clone() if keep else None
    senders = list(itertools.product(range(n_layers - 1), range(n_heads)))
    with torch.no_grad(), tqdm(total=len(senders), disable=not progress, unit="head", leave=False, delay=DELAY) as bar:
        source_predictions = adapter.predict(source, base.batch)
        for layer, head in senders:
            change = _written(adapter, layer, head, theirs[z_names[layer]] - own[z_names[layer]])
            later = range(layer + 1, n_layers)
            values = {names[to]: _received(adapter, to, receiver, base.streams[to] + change) for to in later}
            cells = [(Site(receiver, to, head=other),) for to in later for other in range(n_heads)]
            out, measurements = run_cells(adapter, base, cells, values, metrics=named, keep_predictions=keep)
            if predictions is not None and out is not None:
                predictions[layer, head, layer + 1 :] = out.unflatten(0, (len(later), n_heads))
            for name, of in measurements.items():
                found[name][layer, head, layer + 1 :] = of.unflatten(0, (len(later), n_heads))
            bar.update()
    every = (tuple(range(n_layers)), tuple(range(n_heads)))
    return Sweep(
        what=f"{direction} of the direct path to {receiver}",
        axes=("layer", "head", "to_layer", "to_head"),
        indices=every + every,
        predictions=predictions,
        unpatched=base.unpatched,
        source=source_predictions,
        values=found,
        unpatched_values=unpatched,
        source_values=all_measured(named, source_predictions),
    )


@torch.no_grad()
def _check_additive(adapter: ModelAdapter, receiver: Receiver, tokens: Tensor) -> None:
    cfg = adapter.model.cfg
    if not adapter.resumes or not hasattr(adapter.model.blocks[0], "attn"):
        raise ValueError(f"{type(adapter.model).__name__} has no attention layers that can be resumed from")
    if getattr(cfg, "token_clip", None) is not None:
        raise ValueError("this model clips its stream, so what heads write does not add up: there are no direct paths")
    key_heads = getattr(cfg, "n_key_value_heads", None)
    if receiver != "q" and key_heads not in (None, cfg.n_heads):
        raise ValueError(
            f"{cfg.n_heads} heads share {key_heads} keys and values: only receiver='q' belongs to one head"
        )
    for layer in range(adapter.n_layers):
        attn = adapter.model.blocks[layer].attn
        names = {part: get_act_name(part, layer) for part in ("resid_pre", "z", "attn_out", receiver)}
        found = adapter.record(tokens, names.values(), 1, before_user_hooks=[names["resid_pre"], names["attn_out"]])
        bias = getattr(attn, "b_O", None)
        out = sum(_written(adapter, layer, head, found[names["z"]]) for head in range(cfg.n_heads))
        out = out if bias is None else out + getattr(cfg, "damping", 1.0) * bias
        for made, part in (
            (out, "attn_out"),
            (_received(adapter, layer, receiver, found[names["resid_pre"]]), receiver),
        ):
            there = found[names[part]]
            near = 1e3 * torch.finfo(there.dtype).eps  # rounding of other orders of the same sums, not more
            if not torch.allclose(torch.as_tensor(made), there, rtol=near, atol=near, equal_nan=True):
                raise ValueError(
                    f"{names[part]} of {type(adapter.model).__name__} is not what its weights make of z, or of the "
                    f"normed stream: it may be normed once more, and what a head hands to another is not known"
                )


def _written(
    adapter: ModelAdapter, layer: int, head: int, z: Float[Tensor, "prompt pos head d_head"]
) -> Float[Tensor, "prompt pos d_model"]:
    """What a head adds to the stream for some output z."""
    W_O = adapter.model.blocks[layer].attn.W_O[head]
    return getattr(adapter.model.cfg, "damping", 1.0) * (z[:, :, head] @ W_O)


def _received(
    adapter: ModelAdapter, layer: int, receiver: Receiver, stream: Float[Tensor, "prompt pos d_model"]
) -> Float[Tensor, "prompt pos head d_head"]:
    """The queries, keys or values that a layer makes of a stream."""
    block = adapter.model.blocks[layer]
    normalized = block.ln1(adapter.apply_user_hooks(get_act_name("resid_pre", layer), stream))
    weights = getattr(block.attn, f"W_{receiver.upper()}")
    out = einsum(normalized, weights, "prompt pos model, head model d -> prompt pos head d")
    bias = getattr(block.attn, f"b_{receiver.upper()}", None)
    return adapter.apply_user_hooks(get_act_name(receiver, layer), out if bias is None else out + bias)
