"""Run many queries on one context, which is computed once.

With causal keys no position sees a later one, and with keys "context" none sees the query. So the context's stream
does not depend on the tokens after it, and a query's row depends only on itself, on the keys and values of the context
before it, and (if causal) on its own key and value. One plain pass gives the contexts' streams; then every layer
computes keys and values from them once, and one row for each query. No position attends to these rows, so queries do
not see each other. This fails for momentum, where rows depend on other rows, and for keys "full".
"""

from collections.abc import Iterable, Iterator

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechicl.base.precision import at_least_float32
from mechicl.models.transformer.attention import rotate
from mechicl.models.transformer.fast import (
    add_update,
    after_attention,
    attention_pattern,
    fast_norm,
    join_heads,
    queries_keys_values,
)
from mechicl.models.transformer.layers import Block


def query_streams(
    blocks: Iterable[Block],
    contexts: Iterable[Float[Tensor, "prompt pos d_model"]],
    queries: Float[Tensor, "prompt point query d_model"],
    positions: range,
) -> Iterator[Float[Tensor, "prompt point query d_model"]]:
    """Yield the stream of the queries before the first block and then after each.

    `blocks` have keys "causal" or "context" and no momentum. `contexts` are the streams of a plain pass, whose own
    query is last. Queries at `positions` see the keys before (and, if causal, themselves).
    """
    rows, n_keys = queries.flatten(1, 2), positions[-1]
    position_of_row = torch.tensor(positions, device=rows.device).repeat_interleave(queries.shape[2])
    visible = torch.arange(n_keys, device=rows.device) < position_of_row[:, None]
    yield queries
    for block, context in zip(blocks, contexts, strict=False):
        rows = _query_block(block, rows, context[:, :n_keys], visible, position_of_row)
        yield rows.unflatten(1, queries.shape[1:3])


def _query_block(
    block: Block,
    rows: Float[Tensor, "prompt row d_model"],
    context: Float[Tensor, "prompt key_pos d_model"],
    visible: Bool[Tensor, "row key_pos"],
    positions: Int[Tensor, "row"],
) -> Float[Tensor, "prompt row d_model"]:
    """The stream of the rows after the block; each attends to its visible keys, and to itself if causal."""
    cfg, attn, n_keys = block.cfg, block.attn, context.shape[1]
    q, k_of_row, v_of_row = queries_keys_values(attn, fast_norm(block.ln1, rows), "QKV")
    k, v = queries_keys_values(attn, fast_norm(block.ln1, context), "KV")
    if cfg.rotates:
        q, k_of_row, k = (
            rotate(cfg, vectors.transpose(1, 2), at).transpose(1, 2)
            for vectors, at in ((q, positions), (k_of_row, positions), (k, torch.arange(n_keys, device=k.device)))
        )
    dtype = v.dtype
    q, k, v, k_of_row, v_of_row = map(at_least_float32, (q, k, v, k_of_row, v_of_row))
    scores = q @ k.mT
    if cfg.keys == "causal":  # one more key: of the row itself
        with_itself = einsum(q, k_of_row, "prompt head row d, prompt head row d -> prompt head row")
        scores = torch.cat([scores, with_itself[..., None]], dim=-1)
        visible = torch.cat([visible, visible.new_ones(len(visible), 1)], dim=-1)
    pattern = attention_pattern(attn, cfg.score_scale * scores, visible)
    z = pattern[..., :n_keys] @ v
    if cfg.keys == "causal":
        z = z + pattern[..., n_keys:] * v_of_row
    update = join_heads(z.to(dtype), attn.W_O)
    if cfg.attn_bias:
        update = update + attn.b_O
    return after_attention(block, add_update(rows, update, cfg.damping))
