"""Attention over the context as an update of the weights that the query meets: the dual form."""

from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechicl.learners import Samples
from mechicl.models import HookedTransformer
from mechicl.models.layers import key_mask
from mechicl.prompts import Prompts


@dataclass(frozen=True, eq=False)
class DualForm(Samples):
    """What each head of a layer does to the query, as linear maps of its query vector.

    The head's output at the query is `q (zero_shot + update)` for linear attention.

    Attributes:
        zero_shot: W_ZSL `[d_head d_model head prompt]`, from the query's own key and value; 0 where it sees neither.
        update: ΔW_ICL `[d_head d_model head prompt]`, the sum of the outer products of the context's keys and values.
        relative_error: distance between `q (zero_shot + update)` and what the head really writes, over the norm of the
            latter, `[head prompt]`: rounding for linear attention; for softmax, whose normaliser and exponential this
            reading drops, how wrong it is.
    """

    zero_shot: Float[Tensor, "d_head d_model head prompt"]
    update: Float[Tensor, "d_head d_model head prompt"]
    relative_error: Float[Tensor, "head prompt"]


@torch.no_grad()
def dual_form(model: HookedTransformer, prompts: Prompts, layer: int = 0) -> DualForm:
    """Read a layer's attention at the query as a zero-shot weight and the context's update of it.

    Args:
        model: any attention; the reading is exact for the linear kind. Damping and the 1/n of
            `normalize_by_context` are part of the weights.
        prompts: their context points are the demonstrations.
        layer: which.

    Raises:
        ValueError: a layer that does not exist.

    Source: Irie et al. 2022; Dai et al. 2023, whose equations 1 to 4 Bar Natan, Deutch & Magar revisit.

    Example:
        >>> dual_form(load("lsa-1l"), LinearRegression().sample(100, seed=0)).relative_error.max() < 1e-4
        tensor(True)
    """
    cfg = model.cfg
    if not 0 <= layer < cfg.n_layers:
        raise ValueError(f"layer must be 0 to {cfg.n_layers - 1}, got {layer}")
    names = [f"blocks.{layer}.attn.hook_{part}" for part in ("q", "k", "v", "z")]
    _, cache = model.run_with_cache(prompts, names_filter=names, return_cache_object=False)
    q, k, v, z = (cache[name].double() for name in names)
    n_pos, weights = q.shape[1], model.blocks[layer].attn.W_O.double()
    seen = key_mask(cfg, n_pos, slice(n_pos - 1, n_pos), q.device)[0].double()
    scale = cfg.damping * cfg.score_scale / (seen.sum().clamp(min=1) if cfg.normalize_by_context else 1)
    outer = "prompt pos head key, prompt pos head value, head value model, pos -> key model head prompt"
    query_alone = torch.arange(n_pos, device=q.device) == n_pos - 1
    zero_shot, update = (scale * einsum(k, v, weights, seen * at.double(), outer) for at in (query_alone, ~query_alone))
    read = einsum(q[:, -1], zero_shot + update, "prompt head key, key model head prompt -> head prompt model")
    written = cfg.damping * einsum(z[:, -1], weights, "prompt head value, head value model -> head prompt model")
    return DualForm(zero_shot, update, (read - written).norm(dim=-1) / written.norm(dim=-1))
