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
from mechicl.models.opening.bridge_parts import BridgeParts
from mechicl.models.opening.edits import check_edits
from mechicl.models.opening.parts import TransformerParts, take_apart
from mechicl.models.opening.sites import Site
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
        model: in eval mode: a mechicl model without a clipped residual stream, or a `TransformerBridge` without hooks
            whose residual stream is the sum of its components' outputs; without norms after the heads, and for "k" and
            "v" without shared keys and values.
        receiver: the input of B that is patched: its queries "q", keys "k" or values "v". The other arguments are those
            of `patch`.

    Returns:
        A sweep, as of `patch`, over `("layer", "head", "to_layer", "to_head")`: A's, then B's. `effect()` is 0 where
        B's layer is not after A's.

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0)
        >>> ids = torch.randint(16, (8, 16)).repeat(1, 2)
        >>> loss = next_token_loss(ids[:, 0])
        >>> patch_paths(induction, ids, corrupt_tokens(ids), "k", metrics=loss).effect().shape
        torch.Size([2, 4, 2, 4, 8])
    """
    adapter, into, source = encode_pair(model, clean, corrupted, direction, at)
    parts = _take_apart(adapter, receiver, into[:1])
    experiment = make_experiment(adapter, into, clean, metrics)
    n_layers, n_heads = adapter.n_layers, adapter.model.cfg.n_heads
    shape = (n_layers, n_heads, n_layers, n_heads)
    z_names, names = ([get_act_name(part, layer) for layer in range(n_layers)] for part in ("z", receiver))
    source_z = record_within(adapter, source, z_names, experiment.budget)
    into_z = record_within(adapter, into, z_names, experiment.budget.holding(source_z))
    # memory: z of both runs, the inputs of all receivers for two senders at a time, and streams
    stream = adapter.record(into[:1], ["blocks.0.hook_resid_pre"], 1)["blocks.0.hook_resid_pre"].nbytes * len(into)
    n_cells = torch.Size(shape).numel() + n_layers * n_heads  # all, and those of one sender
    kept = (source_z, into_z, 2 * count_bytes(into_z) + (6 + n_heads) * stream)
    baseline = experiment.run_baseline(n_cells, *kept, keep_streams=True)

    def everywhere(unpatched: Tensor) -> Tensor:
        return unpatched.expand(*shape, *unpatched.shape).clone()

    predictions = everywhere(baseline.predictions) if experiment.keep_predictions else None
    unpatched = evaluate_metrics(experiment.metrics, baseline.predictions)
    values = {name: everywhere(per_prompt) for name, per_prompt in unpatched.items()}
    senders = list(itertools.product(range(n_layers - 1), range(n_heads)))
    with torch.no_grad(), progress_bar(senders, unit="head", progress=progress) as bar:
        for layer, head in bar:
            change = parts.write(layer, source_z[z_names[layer]] - into_z[z_names[layer]])[head]
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
def _take_apart(adapter: ModelAdapter, receiver: Receiver, tokens: Tensor) -> TransformerParts | BridgeParts:
    """Return the parts of a model; a ValueError if heads do not write, or read, as their weights imply."""
    cfg, kind = adapter.model.cfg, type(adapter.model).__name__
    parts = take_apart(adapter)
    parts.embed(tokens)  # refuses streams that are not the sum of what parts write
    if parts.heads_interact:
        raise ValueError(f"no direct paths in {kind}: heads depend on each other's inputs")
    key_heads = getattr(cfg, "n_key_value_heads", None)
    if receiver != "q" and key_heads not in (None, cfg.n_heads):
        raise ValueError(f"{cfg.n_heads} heads share {key_heads} keys and values: receiver must be 'q'")
    streams, names = ([get_act_name(part, to) for to in range(adapter.n_layers)] for part in ("resid_pre", receiver))
    check_edits(adapter, tokens, names[1:])
    recorded = adapter.record(tokens, [*streams, *names], 1, before_user_hooks=streams)
    for layer, (stream, name) in enumerate(zip(streams, names, strict=True)):
        expected = _received(adapter, layer, receiver, recorded[stream])
        near = 1e3 * torch.finfo(expected.dtype).eps  # rounding of other orders of the same sums, not more
        if not torch.allclose(expected, recorded[name], rtol=near, atol=near, equal_nan=True):
            raise ValueError(f"no direct paths in {kind}: {name} is not a product of the normed stream and weights")
    return parts


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
