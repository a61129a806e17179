"""Does a layer copy targets to their inputs' tokens? Attention, decoding, and ablations."""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.layers.layer_learners import check_layer
from mechicl.base.arguments import checked
from mechicl.base.memory import Budget
from mechicl.base.progress import progress_bar
from mechicl.constructions import copy_targets
from mechicl.models import HookedTransformer
from mechicl.models.opening.adapter import Hook, ModelAdapter
from mechicl.prompts import Prompts
from mechicl.statistics import Result
from mechicl.statistics.results import COSINE, SHARE


@dataclass(frozen=True, eq=False)
class TargetCopying(Result):
    """Copying of targets by an attention layer, and the model's loss without it; see `measure_target_copying`.

    Attributes:
        attention: share of the context's x tokens' attention (absolute weights) on their targets' tokens, mean over x
            tokens, `[head prompt]`; NaN where an x token attends to nothing.
        pattern_cosine: cosine between the rows of the pattern at the context's x tokens and those of
            `constructions.copy_targets`, mean over x tokens, `[head prompt]`; NaN likewise.
        decoding_errors: squared error of a linear readout of each target from the stream at its input's token after the
            layer, relative to the targets' mean square: 0 if it is there, 1 if it is not; mean over points, `[prompt]`.
        decoding_errors_before: the same before the layer, `[prompt]`.
        decoding_errors_of_inputs: the same for each input at its target's token, where they can be joined too.
        errors: squared error of the model's prediction at the query, `[prompt]`, like the next three.
        errors_without: with the layer's attention output ablated (replaced by its mean over prompts) at the context's x
            tokens, where it can copy.
        errors_without_elsewhere: with it ablated at all other positions.
        errors_transplanted: with each head's pattern at the context's x tokens replaced by the construction's, times
            the head's mean total weight there.
    """

    attention: Float[Tensor, "head prompt"] = field(metadata=SHARE)
    pattern_cosine: Float[Tensor, "head prompt"] = field(metadata=COSINE)
    decoding_errors: Float[Tensor, "prompt"]
    decoding_errors_before: Float[Tensor, "prompt"]
    decoding_errors_of_inputs: Float[Tensor, "prompt"]
    errors: Float[Tensor, "prompt"]
    errors_without: Float[Tensor, "prompt"]
    errors_without_elsewhere: Float[Tensor, "prompt"]
    errors_transplanted: Float[Tensor, "prompt"]


@checked(locks=True)
@torch.no_grad()
def measure_target_copying(
    model: HookedTransformer, prompts: Prompts, layer: int = 0, *, progress: bool | None = None
) -> TargetCopying:
    """Measure how far a layer copies each target y_i onto the token of its input x_i, and whether the model needs it.

    Args:
        model: a `HookedTransformer` on interleaved prompts (tokens x_1, y_1, x_2, ..., query).
        prompts: two or more; the readouts are fitted on one half and evaluated on the other, and vice versa.

    Source: von Oswald et al. 2023, Proposition 3 and section 4.

    Example:
        >>> copied = measure_target_copying(load("copy-2l"), LinearRegression().sample(512, seed=0))
        >>> print(copied.intervals()["attention"])
    """
    if model.cfg.prompt_format != "interleaved":
        raise ValueError(f"copying needs interleaved prompts, and the model takes {model.cfg.prompt_format!r} ones")
    if len(prompts) < 2 or prompts.n_context == 0:
        raise ValueError(f"the readouts need at least two prompts and one context point, got {prompts}")
    check_layer(layer, model.cfg.n_layers - 1)
    names = {part: f"blocks.{layer}.{part}" for part in ("hook_resid_pre", "attn.hook_pattern", "hook_attn_out")}
    names["after"] = f"blocks.{layer}.hook_resid_post"
    adapter = ModelAdapter(model)
    tokens = adapter.encode(prompts)
    n_at_a_time = Budget().rows(adapter.bytes_per_row(tokens))
    cache = adapter.record(tokens, names.values(), n_at_a_time)
    inputs = torch.arange(0, 2 * prompts.n_context, 2)
    elsewhere = torch.cat([inputs + 1, torch.tensor([2 * prompts.n_context])])
    pattern = cache[names["attn.hook_pattern"]][:, :, inputs]  # [prompt head point key_pos]
    copies = _copying_pattern(prompts).to(pattern)
    share = (pattern.abs() * copies).sum(-1) / pattern.abs().sum(-1)
    cosine = (pattern * copies).sum(-1) / pattern.norm(dim=-1)
    mean_weight = pattern.sum(-1, keepdim=True).mean((0, 2), keepdim=True)[0]  # of each head, [head 1 1]
    mean_out = cache[names["hook_attn_out"]].mean(0)

    def errors(*hooks: Hook) -> Float[Tensor, "prompt"]:
        bar = progress_bar(tokens.split(n_at_a_time), unit="batch", progress=progress, desc="copying")
        outputs = torch.cat([adapter.run(part, hooks) for part in bar])
        return (outputs - prompts.query.ys.to(outputs)).square().mean(-1)

    def without(positions: Tensor) -> Hook:
        rows = torch.zeros(tokens.shape[1], 1, dtype=torch.bool).index_fill(0, positions, True).to(mean_out.device)
        return names["hook_attn_out"], lambda value, hook: torch.where(rows, mean_out, value)

    def transplant(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        value[:, :, inputs] = copies * mean_weight
        return value

    return TargetCopying(
        attention=share.mean(-1).T,
        pattern_cosine=cosine.mean(-1).T,
        decoding_errors=_decoding_errors(cache[names["after"]][:, inputs], prompts.context.ys),
        decoding_errors_before=_decoding_errors(cache[names["hook_resid_pre"]][:, inputs], prompts.context.ys),
        decoding_errors_of_inputs=_decoding_errors(cache[names["after"]][:, inputs + 1], prompts.context.xs),
        errors=errors(),
        errors_without=errors(without(inputs)),
        errors_without_elsewhere=errors(without(elsewhere)),
        errors_transplanted=errors((names["attn.hook_pattern"], transplant)),
    )


def _copying_pattern(prompts: Prompts) -> Float[Tensor, "point key_pos"]:
    made = copy_targets(x_dim=prompts.x_dim, n_context=prompts.n_context, y_dim=prompts.y_dim)
    name = "blocks.0.attn.hook_pattern"
    _, cache = made.run_with_cache(made.encode(prompts[:1].to(torch.float64)), names_filter=name)
    return cache[name][0, 0, 0 : 2 * prompts.n_context : 2]


def _decoding_errors(
    streams: Float[Tensor, "prompt point d_model"], values: Float[Tensor, "prompt point d_value"]
) -> Float[Tensor, "prompt"]:
    """Errors of least-squares readouts with a constant, on each half of the prompts those of the other half."""
    xs = torch.cat([streams, torch.ones_like(streams[..., :1])], dim=-1).double().cpu()  # gelsd exists on the CPU only
    ys = values.to(xs)
    half = len(ys) // 2
    halves = (slice(None, half), slice(half, None))
    errors = torch.empty(len(ys), dtype=torch.float64)
    for measured, fitted in (halves, halves[::-1]):
        rows, targets = xs[fitted].flatten(0, 1), ys[fitted].flatten(0, 1)
        rounding = torch.finfo(streams.dtype).eps * max(rows.shape)  # the model's rounding carries no signal
        readout = torch.linalg.lstsq(rows, targets, rcond=rounding, driver="gelsd").solution
        errors[measured] = (xs[measured] @ readout - ys[measured]).square().mean((1, 2))
    return (errors / ys.square().mean()).to(streams.device)
