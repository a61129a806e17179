"""Runs with chosen edges as plain loops over edges, one receiver after the other, to compare the graph with."""

import torch

from mechicl.models.opening.sites import EMBEDDING, Edge, Node, list_edges, list_nodes
from mechicl.models.transformer.recurrent import Recurrence
from tests.models.transformer.recurrent_loop import head_by_loop


def write_all(model, tokens):
    """Writes of each node in a plain run, by node `[prompt pos d_model]`."""
    out, stream = {}, model.embed_tokens(tokens)
    out[EMBEDDING] = stream
    for layer, block in enumerate(model.blocks):
        heads = [write_head(block, head, stream, stream, stream) for head in range(model.cfg.n_heads)]
        for head, written in enumerate(heads):
            out[Node(layer, head)] = written
        stream = stream + sum(heads) + attention_bias(block)
        if model.cfg.block_mlp:
            out[Node(layer)] = model.cfg.damping * block.mlp(block.ln2(stream))
            stream = stream + out[Node(layer)]
    return out


def run_edges(model, tokens, references, weights):
    """Outputs at all positions of a run in which each edge carries a mixture of the sender's write and the reference.

    Args:
        references: the content of a cut edge, by node.
        weights: 1 for the write, 0 for the reference, by edge.
    """
    writes = {EMBEDDING: model.embed_tokens(tokens)}
    biases = 0.0

    def read(receiver, by=""):
        stream = biases
        for sender, written in writes.items():
            share = weights[Edge(sender, receiver, by)]
            stream = stream + share * written + (1 - share) * references[sender]
        return stream

    for layer, block in enumerate(model.blocks):
        heads = {}
        for head in range(model.cfg.n_heads):
            node = Node(layer, head)
            heads[node] = write_head(block, head, *(read(node, by) for by in "qkv"))
        writes |= heads
        biases = biases + attention_bias(block)
        if model.cfg.block_mlp:
            node = Node(layer)
            writes[node] = model.cfg.damping * block.mlp(block.ln2(read(node)))
    return model.read_out(read(None))


def everything(model, share=1.0):
    """The same weight for all edges."""
    return dict.fromkeys(list_edges(model), share)


def zeros(model, tokens):
    """References of zero."""
    return {node: torch.zeros_like(model.embed_tokens(tokens)) for node in list_nodes(model)}


def write_head(block, head, q_stream, k_stream, v_stream):
    """softmax(q k) v W_O of one head, or its recurrence, each of the three from its own stream."""
    attn, cfg = block.attn, block.cfg
    if isinstance(attn, Recurrence):
        normed = (block.ln1(stream) for stream in (q_stream, k_stream, v_stream))
        return torch.stack([head_by_loop(attn, head, reads)[0] for reads in zip(*normed, strict=True)])
    q, k, v = (
        block.ln1(stream) @ getattr(attn, f"W_{by}")[head] + (getattr(attn, f"b_{by}")[head] if cfg.attn_bias else 0)
        for by, stream in (("Q", q_stream), ("K", k_stream), ("V", v_stream))
    )
    scores = cfg.score_scale * q @ k.mT
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return cfg.damping * scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v @ attn.W_O[head]


def attention_bias(block):
    return block.cfg.damping * block.attn.b_O if block.cfg.attn_bias else 0.0
