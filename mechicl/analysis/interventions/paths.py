"""Direct-path patching: one head's output, as another head alone sees it (Wang et al. 2023)."""

import itertools
from typing import Any, Literal

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from transformer_lens.utilities import get_act_name

from mechicl.analysis.interventions.metrics import Inputs, Metrics, evaluate_metrics
from mechicl.analysis.interventions.patching import Direction, encode_pair, make_experiment, make_sweep
from mechicl.analysis.interventions.runs import CellResults, record_within
from mechicl.analysis.interventions.sweeps import InterventionSweep
from mechicl.base.arguments import checked
from mechicl.base.memory import MEMORY, count_bytes
from mechicl.base.progress import progress_bar
from mechicl.models.holding import holds_models
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edits import check_edits, without_user_hooks
from mechicl.models.opening.sites import Site, hook_names
from mechicl.prompts import At

Receiver = Literal["q", "k", "v"]


@checked
@holds_models
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
) -> InterventionSweep:
    """What the model predicts when one head's query, key or value sees another head's output of another run.

    For every head A and every head B of a later layer: what A wrote in the clean run, in place of what it wrote in the
    corrupted one, reaches B's query (key, value) straight through the residual stream, at all positions. Every other
    part still sees A's corrupted output, what lies between A and B too. What
    is not described here is as for `patch`: the prompts, `direction`, `metrics`, `at`, `keep_predictions`, `memory`.

    Args:
        model: ours, or one of TransformerLens' protocol whose layers write `z @ W_O` and read the norm of the stream,
            as GPT-2's do.
        receiver: what B receives it by: "q", "k" or "v".

    Returns:
        A sweep over `("layer", "head", "to_layer", "to_head")`. Where B's layer is not after A's there is no path, and
        the entries are those of the unpatched run.

    Raises:
        ValueError: as for `patch`; an unknown receiver, a model whose streams are clipped or whose layers norm or scale
            what heads write once more (outputs do not add up), or fewer key than query heads for "k" and "v".

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0)
        >>> ids = torch.randint(16, (8, 16)).repeat(1, 2)
        >>> loss = next_token_loss(ids[:, 0])
        >>> patch_paths(induction, ids, corrupt_tokens(ids), "k", metrics=loss).effect().shape
        torch.Size([2, 4, 2, 4, 8])

    Source: Wang et al. 2023, section 3.1 and appendix B, where MLPs between the two are recomputed and count as part of
    the path; here they stay as they are in the run that is intervened in, as in TransformerLens'
    `get_act_patch_direct_path`.
    """
    adapter, into, source = encode_pair(model, clean, corrupted, direction, at)
    _check_additive(adapter, receiver, into[:1])
    experiment = make_experiment(adapter, into, clean, metrics, keep_predictions, memory)
    n_layers, n_heads = adapter.n_layers, adapter.model.cfg.n_heads
    shape = (n_layers, n_heads, n_layers, n_heads)
    z_names, names = ([get_act_name(part, layer) for layer in range(n_layers)] for part in ("z", receiver))
    source_z = record_within(adapter, source, z_names, experiment.budget)
    into_z = record_within(adapter, into, z_names, experiment.budget.holding(source_z))
    # beside z, what is received in all layers, as it is made for one sender while that of another is there; and streams
    stream = adapter.record(into[:1], ["blocks.0.hook_resid_pre"], 1)["blocks.0.hook_resid_pre"].nbytes * len(into)
    n_cells = torch.Size(shape).numel() + n_layers * n_heads  # all, and those of one sender
    baseline = experiment.run_baseline(n_cells, source_z, into_z, 2 * count_bytes(into_z) + 6 * stream)

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
    """Refuse (ValueError) a model in which a head's output, or what a head receives, is not what its weights say."""
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
    check_edits(adapter, tokens, [get_act_name(receiver, layer) for layer in range(1, adapter.n_layers)])
    _check_sums(adapter, tokens)
    for layer in range(adapter.n_layers):
        bias = getattr(adapter.model.blocks[layer].attn, "b_O", None)
        names = {part: get_act_name(part, layer) for part in ("resid_pre", "z", "attn_out", receiver)}
        before_user_hooks = [names["resid_pre"], names["attn_out"]]
        recorded = adapter.record(tokens, names.values(), 1, before_user_hooks=before_user_hooks)
        written = sum(_written(adapter, layer, head, recorded[names["z"]]) for head in range(cfg.n_heads))
        computed = {
            "attn_out": written if bias is None else written + getattr(cfg, "damping", 1.0) * bias,
            receiver: _received(adapter, layer, receiver, recorded[names["resid_pre"]]),
        }
        for part, expected in computed.items():
            if not _nearly_equal(torch.as_tensor(expected), recorded[names[part]]):
                raise ValueError(
                    f"{names[part]} of {type(adapter.model).__name__} is not what its weights make of z, or of the "
                    f"normed stream: it may be normed once more, and what a head hands to another is not known"
                )


def _check_sums(adapter: ModelAdapter, tokens: Tensor) -> None:
    """Refuse (ValueError) a model whose layers do not add to the stream just what attention and MLP give out."""
    known = hook_names(adapter.model)
    with without_user_hooks(adapter.model):
        for layer in range(adapter.n_layers):
            parts = ("resid_pre", "attn_out", "mlp_out", "resid_post")
            names = {part: get_act_name(part, layer) for part in parts}
            recorded = adapter.record(tokens, [name for name in names.values() if name in known], 1)
            summed = sum(recorded[names[part]] for part in parts[:3] if names[part] in recorded)
            if not _nearly_equal(torch.as_tensor(summed), recorded[names["resid_post"]]):
                raise ValueError(
                    f"layer {layer} of {type(adapter.model).__name__} scales, norms or mixes what its parts write "
                    f"before the next layer reads it: there are no direct paths"
                )


def _nearly_equal(expected: Tensor, actual: Tensor) -> bool:
    near = 1e3 * torch.finfo(actual.dtype).eps  # rounding of other orders of the same sums, not more
    return torch.allclose(expected, actual, rtol=near, atol=near, equal_nan=True)


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
