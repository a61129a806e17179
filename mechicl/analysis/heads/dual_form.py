"""The dual form: attention over the context as an update of the weights that are applied to the query."""

from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.utilities import get_act_name

from mechicl.analysis.layers.layer_learners import check_layer
from mechicl.base.annotations import described
from mechicl.base.arguments import checked
from mechicl.base.memory import Budget
from mechicl.base.progress import progress_bar
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.parts import TransformerParts
from mechicl.models.transformer.attention import key_mask
from mechicl.models.transformer.config_rules import check_attends
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
    prompts: Prompts | Int[Tensor, "prompt pos"],
    layer: int = 0,
    n_demonstration_tokens: int | None = None,
    *,
    progress: bool | None = None,
) -> DualForm:
    """Decompose a layer's attention output at the query into a zero-shot part and an update by the demonstrations.

    With q a head's query vector, linear attention writes `q (zero_shot + update)`: in-context learning as an update of
    weights. The query is the last position. Queries, keys and values are those that scores and sums are made of: with
    their biases, norms, bounds and rotations. The layer's output bias, which belongs to no head, is left out. Keys and
    values that a group of heads shares are repeated for each. Source: Irie et al. 2022; Dai et al. 2023.

    Args:
        model: a `HookedTransformer` with any attention, but no momentum, soft cap of scores or ALiBi. The formula
            leaves out softmax and other functions of scores, so it is exact for linear attention only
            (`relative_error`). Damping and the 1/n of `TransformerConfig.normalize_by_context` are part of the weights.
        prompts: prompts of points, or token ids `[prompt pos]`.
        n_demonstration_tokens: number of positions of the demonstrations, from the first one on; the remaining
            positions form the query, which may have several tokens. By default all but the last one.

    Example:
        >>> read_dual_form(load("lsa-1l"), LinearRegression().sample(100, seed=0)).relative_error.max() < 1e-4
        tensor(True)
    """
    adapter = ModelAdapter(model)
    if not adapter.is_transformer:
        raise ValueError(f"the dual form is of the attention of a HookedTransformer, got {type(model).__name__}")
    check_layer(layer, model.cfg.n_layers - 1)
    check_attends(model.cfg)
    if model.cfg.momentum:
        raise ValueError(f"the dual form needs attention without momentum, got momentum={model.cfg.momentum}")
    if model.cfg.attn_scores_soft_cap > 0 or model.cfg.positional_embedding_type == "alibi":
        raise ValueError(
            "the dual form needs scores that are products of queries and keys, and this model has "
            f"attn_scores_soft_cap={model.cfg.attn_scores_soft_cap} and positional_embedding_type="
            f"{model.cfg.positional_embedding_type!r}"
        )
    parts = TransformerParts(adapter)
    if parts.norms_after:
        raise ValueError("this model norms the sum of its heads' outputs: no dual form")
    if isinstance(prompts, Tensor) and model.cfg.prompt_format != "token_ids":
        raise ValueError(
            f"a model of prompt_format={model.cfg.prompt_format!r} reads Prompts, got {described(prompts)}"
        )
    if isinstance(prompts, Tensor) and not prompts.shape[1]:
        raise ValueError(f"token ids must have one position or more, got {described(prompts)}")
    tokens = adapter.encode(prompts)
    n_pos = tokens.shape[1]
    n_shown = n_pos - 1 if n_demonstration_tokens is None else n_demonstration_tokens
    if not 0 <= n_shown < n_pos:
        raise ValueError(f"n_demonstration_tokens must be 0 to {n_pos - 1}, without the last one, got {n_shown}")
    names = {part: get_act_name(part, layer) for part in ("q", "k", "v", "z")}
    batches = tokens.split(Budget().rows(adapter.bytes_per_row(tokens)))
    bar = progress_bar(batches, unit="batch", progress=progress, desc="dual form")
    caches = [adapter.record(part, names.values(), len(part)) for part in bar]
    q, k, v, z = (torch.cat([cache[names[part]] for cache in caches]) for part in ("q", "k", "v", "z"))
    q, k, v, z = (part.double() for part in (*model.blocks[layer].attn.prepare(q, k, v), z))
    n_heads = q.shape[2]
    k, v = (part.repeat_interleave(n_heads // part.shape[2], dim=2) for part in (k, v))
    demonstrations = torch.arange(n_pos, device=q.device) < n_shown
    cfg = model.cfg.for_layer(layer)
    seen = key_mask(cfg, n_pos, slice(n_pos - 1, n_pos), q.device)[0].double()
    factors = cfg.score_scale * seen / (seen.sum().clamp(min=1) if cfg.normalize_by_context else 1)
    # what each head adds to the stream for each unit vector as z
    units = torch.eye(z.shape[-1]).to(caches[0][names["z"]])[:, None, None].expand(-1, 1, n_heads, -1)
    weights = parts.write(layer, units)[:, :, 0].double()

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
