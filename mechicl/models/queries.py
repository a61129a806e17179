"""Many queries to one context: the context's keys and values once a layer, and one row for each query."""

from collections.abc import Iterable, Iterator

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.models.fast import after_attention, attention_pattern, fast_norm, join, queries_keys_values, updated
from mechicl.models.layers import Block


def query_streams(
    blocks: Iterable[Block],
    contexts: Iterable[Float[Tensor, "prompt pos d_model"]],
    asked: Float[Tensor, "prompt point query d_model"],
    positions: range,
) -> Iterator[Float[Tensor, "prompt point query d_model"]]:
    """The stream of the queries before the first block and then after each.

    Args:
        blocks: with keys "causal" or "context", a context that does not see its query, and without momentum.
        contexts: the stream before each block at all positions of a plain pass, the plain pass' own query last.
        asked: the stream of the queries before the first block.
        positions: where the queries of each point stand; they see the keys before (and, if causal, themselves).
    """
    rows, n_keys = asked.flatten(1, 2), positions[-1]
    standing = torch.tensor(positions, device=rows.device).repeat_interleave(asked.shape[2])
    seen = torch.arange(n_keys, device=rows.device) < standing[:, None]
    yield asked
    for block, context in zip(blocks, contexts, strict=False):
        rows = ask_block(block, rows, context[:, :n_keys], seen)
        yield rows.unflatten(1, asked.shape[1:3])


def ask_block(
    block: Block,
    rows: Float[Tensor, "prompt row d_model"],
    context: Float[Tensor, "prompt key_pos d_model"],
    seen: Bool[Tensor, "row key_pos"],
) -> Float[Tensor, "prompt row d_model"]:
    """The stream of the rows after the block; each attends to the keys that it has `seen`, and to itself if causal."""
    cfg, attn, n_keys = block.cfg, block.attn, context.shape[1]
    q, own_k, own_v = queries_keys_values(attn, fast_norm(block.ln1, rows), "QKV")
    k, v = queries_keys_values(attn, fast_norm(block.ln1, context), "KV")
    scores = q @ k.mT
    if cfg.keys == "causal":  # one more key: the row itself
        own_scores = einsum(q, own_k, "prompt head row d, prompt head row d -> prompt head row")
        scores = torch.cat([scores, own_scores[..., None]], dim=-1)
        seen = torch.cat([seen, seen.new_ones(len(seen), 1)], dim=-1)
    pattern = attention_pattern(attn, cfg.score_scale * scores, seen)
    z = pattern[..., :n_keys] @ v
    if cfg.keys == "causal":
        z = z + pattern[..., n_keys:] * own_v
    update = join(z, attn.W_O)
    if cfg.attn_bias:
        update = update + attn.b_O
    return after_attention(block, updated(rows, update, cfg.damping))
