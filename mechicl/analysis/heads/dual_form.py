"""The dual form: attention over the context as an update of the weights that are applied to the query."""

from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.analysis.layers.layer_learners import check_layer
from mechicl.base.arguments import checked
from mechicl.base.memory import Budget
from mechicl.base.progress import progress_bar
from mechicl.models.opening.adapter import ModelAdapter, same_up_to_rounding
from mechicl.models.opening.parts import take_apart
from mechicl.models.opening.sites import hook_names
from mechicl.models.transformer.attention import key_mask
from mechicl.models.transformer.config_rules import check_attends
from mechicl.models.wrapping.wrapped import refuse_wrapped
from mechicl.prompts import Prompts
from mechicl.statistics import Result


@dataclass(frozen=True, eq=False)
class DualForm(Result):
    """Linear maps of each head's query vector that give the effect of a layer's heads on the query.

    Attributes:
        zero_shot: W_ZSL `[d_head d_model head prompt]`, from the visible keys and values after the demonstrations, by
            default the query's own.
        update: ΔW_ICL `[d_head d_model head prompt]`, the sum of the outer products of the demonstrations' keys and
            values.
        relative_error: distance between `q (zero_shot + update)` and the head's output, over the norm of the latter,
            `[head prompt]`: rounding for linear attention; for softmax the error of leaving out exp and normalizer.
    """

    zero_shot: Float[Tensor, "d_head d_model head prompt"]
    update: Float[Tensor, "d_head d_model head prompt"]
    relative_error: Float[Tensor, "head prompt"]


@checked(locks=True)
@torch.no_grad()
def read_dual_form(
    model: Any,
    prompts: Prompts | Tensor,
    layer: int = 0,
    n_demonstration_tokens: int | None = None,
    *,
    progress: bool | None = None,
) -> DualForm:
    """Decompose a layer's attention output at the query into a zero-shot part and an update by the demonstrations.

    With q a head's query vector, linear attention writes `q (zero_shot + update)`: in-context learning as an update of
    weights. The query is the last position. Queries, keys and values include their biases and rotations; the layer's
    output bias, which belongs to no head, is left out. Keys and values that a group of heads shares are repeated for
    each. Source: Irie et al. 2022; Dai et al. 2023.

    Args:
        model: a `HookedTransformer` with any attention but momentum, or a `TransformerBridge` in eval mode whose scores
            are scaled products of queries and keys. The formula leaves out softmax and other functions of scores, so
            it is exact for linear attention only (`relative_error`). Damping and the 1/n of
            `TransformerConfig.normalize_by_context` are part of the weights.
        prompts: prompts of points, or token ids `[prompt pos]`.
        layer: number of the layer.
        n_demonstration_tokens: number of positions of the demonstrations, from the first one on; the remaining
            positions form the query, which may have several tokens. By default all but the last one.

    Example:
        >>> read_dual_form(load("lsa-1l"), LinearRegression().sample(100, seed=0)).relative_error.max() < 1e-4
        tensor(True)
    """
    refuse_wrapped(model, "the dual form is made of W_O")
    adapter, cfg = ModelAdapter(model), model.cfg
    check_layer(layer, cfg.n_layers - 1)
    check_attends(cfg)
    if getattr(cfg, "momentum", 0):
        raise ValueError(f"the dual form needs attention without momentum, and this model has momentum={cfg.momentum}")
    tokens, names = _encode(adapter, prompts), _hooks(model, layer)
    batches = tokens.split(Budget().rows(adapter.bytes_per_row(tokens)))
    bar = progress_bar(batches, unit="batch", progress=progress, desc="dual form")
    caches = [adapter.record(part, names.values(), len(part)) for part in bar]
    q, k, v, z = (torch.cat([cache[names[part]] for cache in caches]).double() for part in ("q", "k", "v", "z"))
    n_pos, n_heads = q.shape[1], q.shape[2]
    k, v = (part.repeat_interleave(n_heads // part.shape[2], dim=2) for part in (k, v))
    n_shown = n_pos - 1 if n_demonstration_tokens is None else n_demonstration_tokens
    if not 0 <= n_shown < n_pos:
        raise ValueError(f"n_demonstration_tokens must be 0 to {n_pos - 1}, without the last one, got {n_shown}")
    demonstrations = torch.arange(n_pos, device=q.device) < n_shown
    if adapter.is_transformer:
        cfg = cfg.for_layer(layer)
        seen = key_mask(cfg, n_pos, slice(n_pos - 1, n_pos), q.device)[0].double()
        factors = cfg.score_scale * seen / (seen.sum().clamp(min=1) if cfg.normalize_by_context else 1)
    else:
        products = einsum(q[:1, -1], k[:1], "prompt head d, prompt pos head d -> prompt head pos")
        factors = _score_factors(adapter, tokens[:1], layer, products)
    weights = _output_weights(adapter, layer, caches[0][names["z"]])

    # Linear attention of the query q writes Σ_i s (q·k_i) v_i W_O = q (Σ_i s k_iᵀ v_i W_O): a linear map of q, which
    # splits into the part of the demonstrations' positions and that of the others. Positions are summed over first:
    # with the stream's width they would not fit into memory for long prompts.
    def map_from(positions: Bool[Tensor, "pos"]) -> Float[Tensor, "d_head d_model head prompt"]:
        scaled = k * (factors * positions)[:, None, None]
        summed = einsum(scaled, v, "prompt pos head key, prompt pos head value -> prompt head key value")
        return einsum(summed, weights, "prompt head key value, head value model -> key model head prompt")

    zero_shot, update = map_from(~demonstrations), map_from(demonstrations)
    predicted = einsum(q[:, -1], zero_shot + update, "prompt head key, key model head prompt -> head prompt model")
    written = einsum(z[:, -1], weights, "prompt head value, head value model -> head prompt model")
    return DualForm(zero_shot, update, (predicted - written).norm(dim=-1) / written.norm(dim=-1))


def _output_weights(adapter: ModelAdapter, layer: int, z: Tensor) -> Float[Tensor, "head d_head d_model"]:
    """Return what each head adds to the stream for each unit vector as z, with the model's factors."""
    parts, units = take_apart(adapter), torch.eye(z.shape[-1]).to(z)[:, None, None].expand(-1, 1, z.shape[2], -1)
    weights = parts.write(layer, units)
    if not same_up_to_rounding(parts.write(layer, 2 * units), 2 * weights):
        raise ValueError(f"this {type(adapter.model).__name__} norms the sum of its heads' outputs: no dual form")
    return weights[:, :, 0].double()


def _encode(adapter: ModelAdapter, prompts: Prompts | Tensor) -> Tensor:
    kind = getattr(adapter.model.cfg, "prompt_format", "token_ids")  # TransformerLens' models take nothing else
    if isinstance(prompts, Prompts) == (kind == "token_ids"):
        reads = "token ids [prompt pos]" if kind == "token_ids" else "Prompts"
        got = prompts if isinstance(prompts, Prompts) else f"a tensor {tuple(prompts.shape)}"
        raise ValueError(f"a {type(adapter.model).__name__} of prompt_format={kind!r} reads {reads}, got {got}")
    if isinstance(prompts, Tensor) and (prompts.ndim != 2 or prompts.shape[1] == 0 or prompts.is_floating_point()):
        raise ValueError(f"token ids must be ints [prompt pos], one or more, got {prompts.dtype} {[*prompts.shape]}")
    return adapter.encode(prompts)


def _hooks(model: Any, layer: int) -> dict[str, str]:
    """Hook names of q, k, v and z; of q and k after they are rotated, where they are."""
    known = set(hook_names(model))
    names = {part: f"blocks.{layer}.attn.hook_{part}" for part in ("q", "k", "v", "z")}
    rotated = {part: f"blocks.{layer}.attn.hook_rot_{part}" for part in ("q", "k")}
    names |= rotated if known.issuperset(rotated.values()) else {}
    missing = [name for name in names.values() if name not in known]
    if missing:
        raise ValueError(f"the dual form needs queries, keys and values; {type(model).__name__} has no {missing[0]!r}")
    return names


def _score_factors(
    adapter: ModelAdapter, tokens: Tensor, layer: int, products: Float[Tensor, "prompt head key_pos"]
) -> Float[Tensor, "key_pos"]:
    """Measured factors on products of query and keys in a TransformerLens model: a scale, 0 for hidden keys."""
    name = f"blocks.{layer}.attn.hook_attn_scores"
    recorded = adapter.record(tokens, [name], len(tokens))[name][:, :, -1]
    seen = recorded[0, 0] > torch.finfo(recorded.dtype).min / 2
    scores, products = recorded[..., seen].to(products), products[..., seen]
    scale = (scores * products).sum() / products.square().sum().clamp(min=torch.finfo(products.dtype).tiny)
    near = 1e3 * torch.finfo(recorded.dtype).eps
    if not torch.allclose(scale * products, scores, rtol=near, atol=near * products.abs().max().item()):
        raise ValueError(
            f"{name} of this {type(adapter.model).__name__} is not the scaled products of its queries and keys, as the "
            f"dual form needs: soft caps, biases by distance, norms after rotation, or no scores at this hook"
        )
    return scale * seen
