"""Direct-path patching: one head's output, as a single other head sees it (Wang et al. 2023)."""

import itertools
from typing import Any, Literal

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from transformer_lens.utilities import get_act_name

from mechicl.analysis.interventions.metrics import Inputs, SomeMetrics, evaluate_metrics
from mechicl.analysis.interventions.patching import PatchDirection, encode_pair, make_experiment, make_sweep
from mechicl.analysis.interventions.runs import CellResults, record_within
from mechicl.analysis.interventions.sweeps import InterventionSweep
from mechicl.base.arguments import checked
from mechicl.base.memory import count_bytes
from mechicl.base.progress import progress_bar
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edits import check_edits
from mechicl.models.opening.sites import Site, hook_names
from mechicl.models.temporary_hooks import without_user_hooks
from mechicl.prompts import At

Receiver = Literal["q", "k", "v"]


@checked(locks=True)
def patch_paths(
    model: Any,
    clean: Inputs,
    corrupted: Inputs,
    receiver: Receiver = "q",
    *,
    direction: PatchDirection = "denoising",
    metrics: SomeMetrics = None,
    at: At = "query",
    progress: bool | None = None,
) -> InterventionSweep:
    """Patch one head's output, as it reaches another head's query, key or value straight through the residual stream.

    For every head A and every head B of a later layer: B's query (key, value) reads A's output of the clean run in
    place of that of the corrupted run, at all positions, and all other parts still read A's corrupted output. Source:
    Wang et al. 2023, section 3.1 and appendix B, where MLPs between the two are recomputed; here they stay unchanged,
    as in TransformerLens' `get_act_patch_direct_path`.

    Args:
        model: a mechicl model in eval mode, or one of TransformerLens' protocol whose layers write `z @ W_O` and read
            the norm of the stream, as GPT-2's do; without clipping or norms after the heads, and for "k" and "v"
            without shared keys and values.
        receiver: the input of B that is patched: its queries "q", keys "k" or values "v". The other arguments are those
            of `patch`.

    Returns:
        A sweep over `("layer", "head", "to_layer", "to_head")`: A's, then B's. `effect()` is the change of the metric
        by each path, patched minus unpatched, `[*axes prompt]`, and 0 where B's layer is not after A's; `recovered()`
        is the share of the difference between both runs, `[*axes]`.

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0)
        >>> ids = torch.randint(16, (8, 16)).repeat(1, 2)
        >>> loss = next_token_loss(ids[:, 0])
        >>> patch_paths(induction, ids, corrupt_tokens(ids), "k", metrics=loss).effect().shape
        torch.Size([2, 4, 2, 4, 8])
    """
    adapter, into, source = encode_pair(model, clean, corrupted, direction, at)
    _check_additive(adapter, receiver, into[:1])
    experiment = make_experiment(adapter, into, clean, metrics)
    n_layers, n_heads = adapter.n_layers, adapter.model.cfg.n_heads
    shape = (n_layers, n_heads, n_layers, n_heads)
    z_names, names = ([get_act_name(part, layer) for layer in range(n_layers)] for part in ("z", receiver))
    source_z = record_within(adapter, source, z_names, experiment.budget)
    into_z = record_within(adapter, into, z_names, experiment.budget.holding(source_z))
    # memory: z of both runs, the inputs of all receivers for two senders at a time, and streams
    stream = adapter.record(into[:1], ["blocks.0.hook_resid_pre"], 1)["blocks.0.hook_resid_pre"].nbytes * len(into)
    n_cells = torch.Size(shape).numel() + n_layers * n_heads  # all, and those of one sender
    kept = (source_z, into_z, 2 * count_bytes(into_z) + 6 * stream)
    baseline = experiment.run_baseline(n_cells, *kept, keep_streams=True)

    def everywhere(unpatched: Tensor) -> Tensor:
        return unpatched.expand(*shape, *unpatched.shape).clone()

    predictions = everywhere(baseline.predictions) if experiment.keep_predictions else None
    unpatched = evaluate_metrics(experiment.metrics, baseline.predictions)
    values = {name: everywhere(per_prompt) for name, per_prompt in unpatched.items()}
    senders = list(itertools.product(range(n_layers - 1), range(n_heads)))
    with torch.no_grad(), progress_bar(senders, unit="head", progress=progress) as bar:
        for layer, head in bar:
            change = _written(adapter, layer, head, source_z[z_names[layer]] - into_z[z_names[layer]])
            later = range(layer + 1, n_layers)
            received = {names[to]: _received(adapter, to, receiver, baseline.streams[to] + change) for to in later}
            cells = [(Site(receiver, to, head=other),) for to in later for other in range(n_heads)]
            patched, by_receiver = experiment.run_cells(baseline, cells, received), (len(later), n_heads)
            if predictions is not None and patched.predictions is not None:
                predictions[layer, head, layer + 1 :] = patched.predictions.unflatten(0, by_receiver)
            for name, per_cell in patched.values.items():
                values[name][layer, head, layer + 1 :] = per_cell.unflatten(0, by_receiver)
    what = f"{direction} of the direct path to {receiver}"
    axes, indices = ("layer", "head", "to_layer", "to_head"), tuple(tuple(range(size)) for size in shape)
    return make_sweep(experiment, baseline, CellResults(predictions, values), what, axes, indices, source)


@torch.no_grad()
def _check_additive(adapter: ModelAdapter, receiver: Receiver, tokens: Tensor) -> None:
    """Refuse (ValueError) a model in which heads do not write, and read sums of writes, as their weights imply."""
    cfg, kind, known = adapter.model.cfg, type(adapter.model).__name__, hook_names(adapter.model)
    is_wrapped = adapter.reads_prompts and not adapter.ours
    if is_wrapped or not hasattr(adapter.model.blocks[0], "attn"):
        raise ValueError(f"{kind} has no attention layers whose inputs and outputs are known")
    if getattr(cfg, "token_clip", None) is not None:
        raise ValueError("this model clips its stream: heads' outputs do not add up, and there are no direct paths")
    key_heads = getattr(cfg, "n_key_value_heads", None)
    if receiver != "q" and key_heads not in (None, cfg.n_heads):
        raise ValueError(f"{cfg.n_heads} heads share {key_heads} keys and values: receiver must be 'q'")
    check_edits(adapter, tokens, [get_act_name(receiver, layer) for layer in range(1, adapter.n_layers)])

    def check(expected: Tensor, name: str, recorded: dict[str, Tensor]) -> None:
        near = 1e3 * torch.finfo(expected.dtype).eps  # rounding of other orders of the same sums, not more
        if not torch.allclose(expected, recorded[name], rtol=near, atol=near, equal_nan=True):
            raise ValueError(f"{name} of {kind} is not a plain sum or product of its inputs: no direct paths")

    for layer in range(adapter.n_layers):
        bias = getattr(adapter.model.blocks[layer].attn, "b_O", None)
        parts = ("resid_pre", "attn_out", "mlp_out", "resid_post", "z", receiver)
        names = {part: name for part in parts if (name := get_act_name(part, layer)) in known}
        with without_user_hooks(adapter.model):
            recorded = adapter.record(tokens, [names[part] for part in parts[:4] if part in names], 1)
        summed = torch.stack([recorded[names[part]] for part in parts[:3] if part in names]).sum(0)
        check(summed, names["resid_post"], recorded)
        before_user_hooks = [names["resid_pre"], names["attn_out"]]
        recorded = adapter.record(tokens, names.values(), 1, before_user_hooks=before_user_hooks)
        written = torch.stack([_written(adapter, layer, head, recorded[names["z"]]) for head in range(cfg.n_heads)])
        bias = 0.0 if bias is None else getattr(cfg, "damping", 1.0) * bias
        check(written.sum(0) + bias, names["attn_out"], recorded)
        check(_received(adapter, layer, receiver, recorded[names["resid_pre"]]), names[receiver], recorded)


def _written(
    adapter: ModelAdapter, layer: int, head: int, z: Float[Tensor, "prompt pos head d_head"]
) -> Float[Tensor, "prompt pos d_model"]:
    W_O = adapter.model.blocks[layer].attn.W_O[head]
    return getattr(adapter.model.cfg, "damping", 1.0) * (z[:, :, head] @ W_O)


def _received(
    adapter: ModelAdapter, layer: int, receiver: Receiver, stream: Float[Tensor, "prompt pos d_model"]
) -> Float[Tensor, "prompt pos head d_head"]:
    block = adapter.model.blocks[layer]
    stream = adapter.apply_user_hooks(get_act_name("resid_pre", layer), stream)
    normalized = block.normed_input(stream, "ln1") if adapter.is_transformer else block.ln1(stream)
    weights = getattr(block.attn, f"W_{receiver.upper()}")
    out = einsum(normalized, weights, "prompt pos model, head model d -> prompt pos head d")
    bias = getattr(block.attn, f"b_{receiver.upper()}", None)
    return adapter.apply_user_hooks(get_act_name(receiver, layer), out if bias is None else out + bias)
