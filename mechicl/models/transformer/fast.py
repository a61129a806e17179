"""Quicker routes through a block, for runs without hooks.

Outputs agree with the hooked route of `layers.py` to float precision; only the positions (`rows`) that are needed are
computed, and in the last block only the dimensions (`columns`) that are read. Scores and patterns are
`[batch head row key_pos]`.

With A_h = W_Q W_Kᵀ and B_h = W_V W_O of head h, attention adds Σ_h pattern(X A_h Xᵀ) X B_h to the stream X
`[pos d_model]`. The routes differ in the order of the products:

- *plain*: queries, keys and values of all positions, as usual: (X W_Q)(X W_K)ᵀ, then its pattern times X W_V;
- *folded*: X A_h is compared with the stream itself, and the weighted sum of the stream is projected once, so that keys
  and values are never formed for every position: good for few rows;
- *merged*: folded for all rows of linear attention, X [A_1 B_1 A_2 B_2 ...] as one product;
- *associative*: linear attention without a score: X A_h (XᵀX) B_h, whose cost is linear in the number of positions.

One more route has no matrix products of single prompts:

- *across prompts*: the last row in one dimension, by elementwise products over all prompts at once, if prompts lie
  along the last axis in memory (`put_prompts_last`). Training takes half as long as by the folded route, which
  multiplies one small matrix after another.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

from mechicl.base.precision import at_least_float32
from mechicl.models.transformer.attention import (
    ALL,
    NOTHING_ELSE,
    Attention,
    Run,
    elementwise_attention,
    key_mask,
    repeat_groups,
    with_momentum,
)
from mechicl.models.transformer.layers import MLP, Block
from mechicl.models.transformer.norms import LayerNorm
from mechicl.models.transformer.recurrent import Recurrence
from mechicl.prompts.prompts import lies_prompts_last

# Cost of an operation, relative to the plain and folded routes. Counts of operations alone mislead if they are close:
# at a prompt's size (tens of positions, tens of dimensions) a batched product takes about as long to start as to run.
# The associative route has four batched products instead of three: for 10 points in 10 dimensions, with equal counts,
# it took 1.4 times as long on a CPU, so it has to save that much. The merged route does the folded one's operations in
# three products instead of five: it is always preferred to that one, and to the plain route unless that one saves more
# than a tenth.
ASSOCIATIVE_COST, MERGED_COST = 1.4, 0.9


def possible_routes(blocks: Sequence[Block], residual: Float[Tensor, "batch pos d_model"]) -> list[str]:
    """List the routes that these blocks can all take at all positions: for `take_route`."""
    if any(isinstance(block.attn, Recurrence) or _only_plain(block.attn) for block in blocks):
        return []
    of_each = [_costs(block.attn, residual, ALL) for block in blocks]
    return [route for route in of_each[0] if all(route in costs for costs in of_each)] if blocks else []


def take_route(blocks: Sequence[Block], route: str | None) -> None:
    """Make passes without hooks take a route through the attention of these blocks; None for the cheapest by a rule."""
    for block in blocks:
        block.attn.route = route


def _only_plain(attn: Attention) -> bool:
    # what changes queries, keys or scores, and the fused kernel, need queries and keys, which the other routes never
    # form; with momentum each row depends on those before it; in half precision other orders of the products would
    # overflow
    is_half = attn.cfg.torch_dtype.itemsize < 4
    return attn.cfg.rotates or not attn.cfg.has_plain_scores or attn.fused or bool(attn.cfg.momentum) or is_half


def fast_block(
    block: Block,
    residual: Float[Tensor, "batch pos d_model"],
    rows: slice,
    columns: slice = ALL,
    run: Run | None = None,
) -> Float[Tensor, "batch row column"]:
    """Compute the stream after the block at the positions `rows`, from the stream before it at all positions.

    `columns` are the dimensions of the stream to return; a block with an MLP, or a norm after attention, needs all of
    them.
    """
    cfg, before = block.cfg, residual[:, rows, columns]
    read = residual if cfg.norm_location == "after" else fast_norm(block.ln1, residual)
    update = _normed_output(block, fast_attention(block.attn, read, rows, columns, run), "ln1")
    after = add_update(before, update, cfg.damping)
    return after_attention(block, after, before if cfg.parallel_attn_mlp else None)


def after_attention(
    block: Block, residual: Float[Tensor, "batch row column"], before: Tensor | None = None
) -> Float[Tensor, "batch row column"]:
    """Compute the stream after the block from the stream after its attention.

    `before` is the stream before the attention, for an MLP that reads it.
    """
    cfg = block.cfg
    if cfg.block_mlp:
        read = residual if before is None else before
        read = read if cfg.norm_location == "after" else fast_norm(block.ln2, read)
        residual = add_update(residual, _normed_output(block, fast_mlp(block.mlp, read), "ln2"), cfg.damping)
    if cfg.token_clip is not None:
        residual = residual.clamp(-cfg.token_clip, cfg.token_clip)
    return residual


def _normed_output(block: Block, written: Tensor, norm: str) -> Tensor:
    after = block.output_norm(norm)
    return written if after is None else fast_norm(after, written)


def fast_norm(norm: LayerNorm | nn.Identity, residual: Float[Tensor, "batch pos d_model"]) -> Tensor:
    """Compute a norm in torch's one kernel, or step by step if it is differentiated forwards."""
    if not isinstance(norm, LayerNorm):
        return residual
    if unpack_dual(residual).tangent is not None:  # the kernel has no such derivative
        return norm(residual)
    weight = norm.w if norm.has_weights else None
    if not norm.centres:
        return F.rms_norm(residual, residual.shape[-1:], weight, norm.eps)
    return F.layer_norm(residual, residual.shape[-1:], weight, norm.b if norm.has_weights else None, norm.eps)


def fast_mlp(mlp: MLP, x: Tensor) -> Tensor:
    """Compute the MLP with its biases added inside the products."""
    if mlp.gated:
        hidden = torch.addcmul(mlp.b_in, mlp.act_fn(x @ mlp.W_gate), x @ mlp.W_in)
        return F.linear(hidden, mlp.W_out.mT, mlp.b_out)
    hidden = mlp.act_fn(F.linear(x, mlp.W_in.mT, mlp.b_in))
    return F.linear(hidden if mlp.ln is None else fast_norm(mlp.ln, hidden), mlp.W_out.mT, mlp.b_out)


def add_update(residual: Tensor, update: Tensor, damping: float) -> Tensor:
    """Add a damped update to the stream."""
    return residual + update if damping == 1 else residual + damping * update


def fast_attention(
    attn: Attention,
    x: Float[Tensor, "batch pos d_model"],
    rows: slice,
    columns: slice = ALL,
    run: Run | None = None,
) -> Float[Tensor, "batch row column"]:
    """Compute the attention layer's output at the positions `rows`, by the cheapest route."""
    if isinstance(attn, Recurrence):
        return attn.fast(x, rows, columns)
    cfg, n_pos = attn.cfg, x.shape[1]
    if cfg.momentum:
        return _plain(attn, x, x, ALL, key_mask(cfg, n_pos, ALL, x.device))[:, rows, columns]
    if run is not None:
        mask = attn.mask(run.n_before + n_pos, slice(run.n_before, None), x.device, run)
        return _plain(attn, x, x, ALL, mask, run)[:, rows, columns]
    costs = _costs(attn, x, rows)
    route = "plain" if _only_plain(attn) else attn.route or min(costs, key=costs.__getitem__)
    if route == "folded" and _can_go_across(attn, x, rows, columns):
        return _across_prompts(attn, x, columns)
    if route == "associative":
        return _associative(attn, x, rows)[..., columns]
    if route == "merged":
        return _merged(attn, x)[:, rows, columns]
    # only a causal mask differs between rows: otherwise hidden keys are left out instead of masked
    differs = cfg.keys == "causal" or cfg.window_size is not None
    mask = key_mask(cfg, n_pos, rows, x.device) if differs else None
    x_rows = x if len(range(*rows.indices(n_pos))) == n_pos else x[:, rows]
    x_keys = x[:, :-1] if cfg.keys == "context" else x
    if route == "folded":
        return _folded(attn, x_rows, x, x_keys.shape[1], mask, columns)
    mask = mask if mask is None or x_keys is x else mask[:, :-1]
    return _plain(attn, x_rows, x_keys, rows, mask)[..., columns]


def fuse_attention(model: nn.Module) -> None:
    """Use torch's fused attention, which never stores scores, in a model's passes without hooks.

    For training one model on a GPU: it has no second derivative and no batching rule for several models.
    """
    layers = [part for part in model.modules() if isinstance(part, Attention)]
    kinds = sorted({part.cfg.attention for part in layers} - {"softmax"})
    unlike = any(
        part.cfg.sink != "none" or part.cfg.attn_scores_soft_cap > 0 or part.cfg.positional_embedding_type == "alibi"
        for part in layers
    )
    if not layers or kinds or unlike:
        other = "an attention sink, a soft cap or ALiBi" if layers else "no attention of ours"
        has = f"{', '.join(kinds)} attention" if kinds else other
        raise ValueError(f"fused attention is plain softmax, and this model has {has}: do without it")
    for part in layers:
        part.fused = True


def _costs(attn: Attention, x: Tensor, rows: slice) -> dict[str, float]:
    """The number of multiplications of each route for these rows of one prompt, weighted by their cost."""
    cfg, (batch, n_pos, d) = attn.cfg, x.shape
    n_rows, h, heads = len(range(*rows.indices(n_pos))), cfg.d_head, cfg.n_heads
    products = 2 * d * d * h / max(batch, 1)  # W_Q W_Kᵀ and W_V W_O, once for all prompts
    scores_and_sums = 2 * n_rows * n_pos  # times the width of keys and values
    costs = {
        "folded": heads * (scores_and_sums * d + min(4 * n_rows * d * h, 2 * n_rows * d * d + products)),
        "plain": heads * (scores_and_sums * h + 2 * n_pos * d * h + 2 * n_rows * d * h),
    }
    if cfg.attention == "linear" and cfg.keys != "causal" and not cfg.attn_bias:
        second_moments = n_pos * d * d
        costs["associative"] = ASSOCIATIVE_COST * (second_moments + heads * (d**3 + 2 * n_rows * d * d + products))
        if rows == ALL:
            costs["merged"] = MERGED_COST * costs["folded"]
    return costs


def _query_key_and_value_out(attn: Attention, n_keys: int) -> tuple[Tensor, Tensor]:
    """A_h = W_Q W_Kᵀ with all factors of the scores, and B_h = W_V W_O: linear attention depends on nothing else."""
    cfg = attn.cfg
    scale = cfg.score_scale / max(n_keys, 1) if cfg.normalize_by_context else cfg.score_scale
    return scale * attn.W_Q @ attn.W_K.mT, attn.W_V @ attn.W_O


def _associative(attn: Attention, x: Tensor, rows: slice) -> Tensor:
    """Linear attention through the keys' second moments: `Σ_h (X A_h)(XᵀX B_h)`."""
    keys = x[:, :-1] if attn.cfg.keys == "context" else x
    query_key, value_out = _query_key_and_value_out(attn, keys.shape[1])
    moments = project_heads(keys.mT @ keys, value_out)
    return (project_heads(x[:, rows], query_key) @ moments).sum(1)


def _merged(attn: Attention, x: Tensor) -> Tensor:
    """Linear attention in three products: `X [A_h B_h]`, scores, sum."""
    heads, n_pos = attn.cfg.n_heads, x.shape[1]
    keys = x[:, :-1] if attn.cfg.keys == "context" else x
    both = torch.cat(_query_key_and_value_out(attn, keys.shape[1]))  # [2 head, d_model, d_model]
    projected = x @ both.transpose(0, 1).flatten(1)
    queries, values = projected.unflatten(-1, (2, heads, -1)).unbind(2)
    scores = queries.flatten(1, 2) @ keys.mT  # [batch, pos * head, key_pos]
    values = values[:, : keys.shape[1]].transpose(1, 2).flatten(1, 2)  # [batch, head * key_pos, d_model]
    return scores.reshape(x.shape[0], n_pos, heads * keys.shape[1]) @ values


def _folded(
    attn: Attention,
    x_rows: Tensor,
    x: Tensor,
    n_keys: int,
    mask: Bool[Tensor, "row key_pos"] | None,
    columns: slice = ALL,
) -> Tensor:
    """Scores and sums over the first `n_keys` keys: `[batch head row key_pos]`, `[... d_model]`."""
    cfg, x_keys = attn.cfg, x[:, :n_keys]
    narrow = 2 * cfg.d_head < cfg.d_model  # then two thin products are quicker than one with the square A_h
    if narrow:
        q = torch.einsum("bhrd,hmd->bhrm", project_heads(x_rows, attn.W_Q), attn.W_K)
    else:
        q = project_heads(x_rows, attn.W_Q @ attn.W_K.mT)
    if cfg.attn_bias:
        q = q + attn.b_Q[:, None] @ attn.W_K.mT
    scores = (q.flatten(1, 2) @ x_keys.mT).unflatten(1, (cfg.n_heads, -1))
    if cfg.attn_bias:
        scores = scores + project_heads(x_rows, attn.W_Q @ attn.b_K[..., None])
        scores = scores + (attn.b_Q * attn.b_K).sum(-1)[:, None, None]
    pattern = attention_pattern(attn, scores if cfg.score_scale == 1 else cfg.score_scale * scores, mask)
    W_O = attn.W_O[..., columns]
    if W_O.shape[-1] * x_rows.shape[1] <= 2:  # few dimensions to write: project each key first
        written = project_heads(x, attn.W_V @ W_O)[:, :, :n_keys]  # all of x: a part of it would be copied
        out = (pattern[..., None] * written[:, :, None]).sum((1, 3))
    else:
        gathered = (pattern.flatten(1, 2) @ x_keys).unflatten(1, (cfg.n_heads, -1))
        if narrow:
            out = join_heads(torch.einsum("bhrm,hmd->bhrd", gathered, attn.W_V), W_O)
        else:
            out = join_heads(gathered, attn.W_V @ W_O)
    if cfg.attn_bias:
        value_bias = (attn.b_V[:, None] @ W_O)[:, 0]
        out = out + torch.einsum("bhr,hm->brm", pattern.sum(-1), value_bias) + attn.b_O[columns]
    return out


def put_prompts_last(tokens: Float[Tensor, "*seed prompt pos d"]) -> Float[Tensor, "*seed prompt pos d"]:
    """Copy tokens, with the prompts along the last axis in memory."""
    return tokens.movedim(-3, -1).contiguous().movedim(-1, -3)


def _can_go_across(attn: Attention, x: Tensor, rows: slice, columns: slice) -> bool:
    elementwise = attn.cfg.attention != "softmax" and not attn.cfg.attn_bias
    last = rows.indices(x.shape[1]) == (x.shape[1] - 1, x.shape[1], 1)
    one_column = len(range(*columns.indices(x.shape[2]))) == 1
    return elementwise and last and one_column and lies_prompts_last(x)


def _across_prompts(attn: Attention, x: Tensor, columns: slice) -> Float[Tensor, "batch 1 1"]:
    """Attention of the last row in one dimension; axes are those of `[head key_pos d_model prompt]`, less some."""
    cfg, stream = attn.cfg, x.permute(1, 2, 0)
    keys = stream[:-1] if cfg.keys == "context" else stream
    queries = cfg.score_scale * (attn.W_Q @ attn.W_K.mT).mT @ stream[-1]
    pattern = elementwise_attention(cfg, (queries[:, None] * keys).sum(2))
    written = ((attn.W_V @ attn.W_O[..., columns])[:, None] * keys).sum(2)
    out = (pattern * written).sum((0, 1))[:, None, None]
    return out / max(len(keys), 1) if cfg.normalize_by_context else out


def _plain(
    attn: Attention,
    x_rows: Tensor,
    x_keys: Tensor,
    rows: slice,
    mask: Bool[Tensor, "*batch row key_pos"] | None,
    run: Run = NOTHING_ELSE,
) -> Tensor:
    """Keys and values for all positions, queries for the rows (with momentum all).

    Torch's fused attention is not quicker here on a CPU, and lacks derivatives: see `fuse_attention`.
    """
    cfg = attn.cfg
    if attn.shortformer is not None:
        placed = attn.placed(x_keys, run)
        (q,), (k,), (v,) = (queries_keys_values(attn, x, which) for x, which in
                            ((placed[:, rows], "Q"), (placed, "K"), (x_keys, "V")))  # fmt: skip
    elif x_rows is x_keys:
        q, k, v = queries_keys_values(attn, x_keys, "QKV")
    else:
        (q,), (k, v) = queries_keys_values(attn, x_rows, "Q"), queries_keys_values(attn, x_keys, "KV")
    if cfg.rotates or not cfg.has_plain_scores or run.cache is not None:
        n_hidden = 1 if cfg.keys == "context" else 0
        prepared = attn.prepare(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), run, rows, n_hidden)
        q, k, v = (part.transpose(1, 2) for part in prepared)
    dtype, heads_a_group = v.dtype, q.shape[1] // v.shape[1]
    if attn.fused:
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=cfg.score_scale, enable_gqa=heads_a_group > 1)
    else:
        q, k, v = at_least_float32(q), at_least_float32(k), at_least_float32(v)
        # queries of the heads that share keys are rows of one product
        q = q if heads_a_group == 1 else q.unflatten(1, (-1, heads_a_group)).flatten(2, 3)
        z = _gathered(attn, q, k, v, rows, mask, run)
    if cfg.momentum:
        values = repeat_groups(v.transpose(1, 2), cfg.n_heads)
        z = with_momentum(cfg, z.transpose(1, 2), values).transpose(1, 2)
    out = join_heads(z.to(dtype), attn.W_O)
    return out + attn.b_O if cfg.attn_bias else out


def _gathered(
    attn: Attention,
    q: Float[Tensor, "batch group row d_head"],
    k: Float[Tensor, "batch group key_pos d_head"],
    v: Float[Tensor, "batch group key_pos d_head"],
    rows: slice,
    mask: Bool[Tensor, "*batch row key_pos"] | None,
    run: Run,
) -> Float[Tensor, "batch head row d_head"]:
    """Compute z; the rows of q are those of all heads of a group, one after the other."""
    cfg = attn.cfg
    by_head = (len(q), cfg.n_heads, q.shape[1] * q.shape[2] // cfg.n_heads, cfg.d_head)
    bent = cfg.attn_scores_soft_cap > 0 or cfg.positional_embedding_type == "alibi"
    if not bent and run.tokens is None and mask is not None and cfg.attention == "softmax" and cfg.sink == "none":
        heads = mask if mask.shape[0] == q.shape[2] else mask.repeat(q.shape[2] // mask.shape[0], 1)
        z = masked_softmax(q, k, heads, cfg.score_scale) @ v
        return z.reshape(by_head)
    products = (q @ k.mT).reshape(*by_head[:3], k.shape[2])
    at = slice(run.n_before, None) if run.n_before else rows
    pattern = attention_pattern(attn, attn.shape_scores(products, at, run), mask)
    z = pattern.reshape(*q.shape[:3], k.shape[2]) @ v
    return z.reshape(by_head)


def queries_keys_values(attn: Attention, x: Tensor, which: str) -> list[Float[Tensor, "batch head pos d_head"]]:
    """Compute some of q, k and v; keys and values may have groups of heads."""
    return [attn.project(x, name).transpose(1, 2) for name in which]


def project_heads(x: Float[Tensor, "batch pos d_in"], weights: Float[Tensor, "head d_in d_out"]) -> Tensor:
    """Compute `x W_h` for every head as one matrix product: `[batch head pos d_out]`."""
    heads, _, d_out = weights.shape
    flat = weights.transpose(0, 1).reshape(-1, heads * d_out)
    return (x @ flat).unflatten(-1, (heads, d_out)).transpose(1, 2)


def join_heads(z: Float[Tensor, "batch head pos d_in"], weights: Float[Tensor, "head d_in d_out"]) -> Tensor:
    """Compute `Σ_h z_h W_h` as one matrix product: `[batch pos d_out]`."""
    return z.transpose(1, 2).flatten(2) @ weights.flatten(0, 1)


def masked_softmax(
    q: Float[Tensor, "batch head row d_head"],
    k: Float[Tensor, "batch head key_pos d_head"],
    mask: Bool[Tensor, "row key_pos"],
    scale: float,
) -> Float[Tensor, "batch head row key_pos"]:
    """Compute softmax attention's pattern over the keys of the mask.

    Scale and mask are part of the product: as separate passes they took a quarter of the attention's time.
    """
    hidden = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
    scores = torch.baddbmm(hidden, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
    return scores.softmax(-1).unflatten(0, q.shape[:2])


def attention_pattern(
    attn: Attention, scores: Float[Tensor, "batch head row key_pos"], mask: Bool[Tensor, "row key_pos"] | None
) -> Float[Tensor, "batch head row key_pos"]:
    """Compute the weight that each row gives to each key, from scaled scores; without a mask all keys are visible."""
    cfg, scores = attn.cfg, scores if mask is None else attn.masked(scores, mask)
    if cfg.attention == "softmax":
        # without a sink or padding, hidden keys are left out or one is visible, so every row sees a key
        padded = mask is not None and mask.ndim > 2
        return attn.softmax(scores) if cfg.sink != "none" or padded else scores.softmax(-1)
    if mask is not None:
        return attn.weigh(scores, mask)
    pattern = elementwise_attention(cfg, scores)
    return pattern / max(scores.shape[-1], 1) if cfg.normalize_by_context else pattern
