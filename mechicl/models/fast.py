"""Quicker routes through a block, for when no hook looks at what happens inside.

Outputs agree with the hooked route to float precision; only the rows that are needed are computed. Two ideas:

- *folded*: for few query rows, `q W_Kᵀ` is compared with the stream itself and the weighted sum of the stream is
  projected once, so that keys and values are never formed for every position;
- *associative*: linear attention over a fixed set of keys is `X Σ_h A_h (XᵀX) B_h`, with no score at all.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.models.layers import Attention, Block, elementwise_attention, key_mask


def fast_block(
    block: Block, residual: Float[Tensor, "batch pos d_model"], rows: slice
) -> Float[Tensor, "batch row d_model"]:
    """The stream after the block at the positions `rows`, from the stream before it at all positions."""
    cfg = block.cfg
    attn_in = block.ln1(residual) if hasattr(block, "ln1") else residual
    residual = residual[:, rows] + cfg.damping * fast_attention(block.attn, attn_in, rows)
    if cfg.block_mlp:
        residual = residual + cfg.damping * block.mlp(block.ln2(residual) if hasattr(block, "ln2") else residual)
    if cfg.token_clip is not None:
        residual = residual.clamp(-cfg.token_clip, cfg.token_clip)
    return residual


def fast_attention(
    attn: Attention, x: Float[Tensor, "batch pos d_model"], rows: slice
) -> Float[Tensor, "batch row d_model"]:
    """The attention layer's output at the positions `rows`, by whichever route takes the fewest operations."""
    cfg = attn.cfg
    n_pos, n_rows = x.shape[1], len(range(*rows.indices(x.shape[1])))
    d, h, heads = cfg.d_model, cfg.d_head, cfg.n_heads
    costs = {
        "folded": heads * (2 * n_rows * n_pos * d + 4 * n_rows * d * h),
        "plain": heads * (2 * n_pos * d * h + 2 * n_rows * d * h + 2 * n_rows * n_pos * h),
    }
    if cfg.attention == "linear" and cfg.keys != "causal" and not cfg.attn_bias:
        costs["associative"] = n_pos * d * d + heads * 2 * d**3 + n_rows * d * d
    route = min(costs, key=costs.__getitem__)
    if route == "associative":
        return _associative(attn, x, rows)
    mask = key_mask(cfg, n_pos, rows, x.device)
    # a context-only mask is the same for all rows: leave the other keys out instead of masking them
    if cfg.keys != "causal":
        x_keys, mask = (x[:, :-1], None) if cfg.keys == "context" else (x, None)
    else:
        x_keys = x
    return (_folded if route == "folded" else _plain)(attn, x[:, rows], x_keys, mask)


def _associative(attn: Attention, x: Tensor, rows: slice) -> Tensor:
    cfg = attn.cfg
    keys = x[:, :-1] if cfg.keys == "context" else x
    scale = cfg.score_scale / max(keys.shape[1], 1) if cfg.normalize_by_context else cfg.score_scale
    query_key = attn.W_Q @ attn.W_K.mT * scale
    value_out = attn.W_V @ attn.W_O
    moments = keys.mT @ keys
    update = sum((query_key[i] @ moments) @ value_out[i] for i in range(cfg.n_heads))
    return x[:, rows] @ update


def _folded(attn: Attention, x_rows: Tensor, x_keys: Tensor, mask: Bool[Tensor, "row key_pos"] | None) -> Tensor:
    """Scores and weighted sums in the space of the stream: `[batch head row key_pos]`, then `[... d_model]`."""
    cfg = attn.cfg
    query_key = attn.W_Q @ attn.W_K.mT
    q = _project(x_rows, query_key)
    if cfg.attn_bias:
        q = q + (attn.b_Q[:, None] @ attn.W_K.mT)
    scores = (q.flatten(1, 2) @ x_keys.mT).unflatten(1, (cfg.n_heads, -1))
    if cfg.attn_bias:
        key_bias = (attn.W_Q @ attn.b_K[..., None], (attn.b_Q * attn.b_K).sum(-1)[:, None, None])
        scores = scores + _project(x_rows, key_bias[0]) + key_bias[1]
    pattern = _pattern(attn, cfg.score_scale * scores, mask)
    gathered = (pattern.flatten(1, 2) @ x_keys).unflatten(1, (cfg.n_heads, -1))
    out = _join(gathered, attn.W_V @ attn.W_O)
    if cfg.attn_bias:
        value_bias = (attn.b_V[:, None] @ attn.W_O)[:, 0]
        out = out + torch.einsum("bhr,hm->brm", pattern.sum(-1), value_bias) + attn.b_O
    return out


def _plain(attn: Attention, x_rows: Tensor, x_keys: Tensor, mask: Bool[Tensor, "row key_pos"] | None) -> Tensor:
    """Keys and values for all positions, queries for the rows."""
    cfg = attn.cfg
    q, k, v = _project(x_rows, attn.W_Q), _project(x_keys, attn.W_K), _project(x_keys, attn.W_V)
    if cfg.attn_bias:
        q, k, v = q + attn.b_Q[:, None], k + attn.b_K[:, None], v + attn.b_V[:, None]
    if cfg.attention == "softmax" and cfg.sink == "none" and x_keys.shape[1] > 0:
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=cfg.score_scale)
    else:
        z = _pattern(attn, cfg.score_scale * (q @ k.mT), mask) @ v
    out = _join(z, attn.W_O)
    return out + attn.b_O if cfg.attn_bias else out


def _project(x: Float[Tensor, "batch pos d_in"], weights: Float[Tensor, "head d_in d_out"]) -> Tensor:
    """`x W_h` for every head as one matrix product: `[batch head pos d_out]`."""
    heads, _, d_out = weights.shape
    flat = weights.transpose(0, 1).reshape(-1, heads * d_out)
    return (x @ flat).unflatten(-1, (heads, d_out)).transpose(1, 2)


def _join(z: Float[Tensor, "batch head pos d_in"], weights: Float[Tensor, "head d_in d_out"]) -> Tensor:
    """`Σ_h z_h W_h` as one matrix product: `[batch pos d_out]`."""
    return z.transpose(1, 2).flatten(2) @ weights.flatten(0, 1)


def _pattern(attn: Attention, scores: Tensor, mask: Tensor | None) -> Float[Tensor, "batch head row key_pos"]:
    cfg = attn.cfg
    if cfg.attention == "softmax":
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return attn.softmax(scores)
    pattern = elementwise_attention(cfg, scores)
    if mask is not None:
        pattern = pattern * mask
    if cfg.normalize_by_context:
        n_keys = scores.shape[-1] if mask is None else mask.sum(-1, keepdim=True)
        pattern = pattern / torch.as_tensor(n_keys).clamp(min=1)
    return pattern

