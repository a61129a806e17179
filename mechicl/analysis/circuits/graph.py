"""A transformer as a graph: what each head and MLP reads is a sum of what those before it wrote, edge by edge."""

from collections.abc import Sequence
from typing import cast

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edges import EMBEDDING, Edge, Node, list_edges, list_nodes
from mechicl.models.transformer.attention import Attention
from mechicl.models.transformer.layers import MLP, Block


class EdgeGraph:
    """Runs of one of our transformers in which chosen edges carry what another run writes.

    Every edge that is cut brings its receiver what the sender writes in a reference run instead. With nothing cut the
    runs are the model's, with everything cut each part reads the reference's stream.

    Args:
        adapter: of one of our transformers.
        tokens: `[prompt pos ...]`.
        references: what each node writes where its edges are cut, `[node prompt pos d_model]`; see `record_writes`.
    """

    def __init__(self, adapter: ModelAdapter, tokens: Tensor, references: Float[Tensor, "node prompt pos d_model"]):
        check_graph(adapter)
        self.adapter, self.tokens, self.references = adapter, tokens, references
        self.nodes = list_nodes(adapter.model)
        self.edges = list_edges(adapter.model)

    @torch.no_grad()
    def run(self, kept: Bool[Tensor, "edge"]) -> Tensor:
        """Predictions with only some of the edges carrying what the run itself writes."""
        model = self.adapter.model
        carried = dict(zip(self.edges, kept.tolist(), strict=True))
        references = dict(zip(self.nodes, self.references, strict=True))
        # every node reads the reference run's stream, plus what this run changes in it along the edges that are kept
        stream = references[EMBEDDING]
        changes = {EMBEDDING: model.embed_tokens(self.tokens) - stream}

        def read(receiver: Node | None, by: str = "") -> Tensor:
            return sum(
                (change for sender, change in changes.items() if carried[Edge(sender, receiver, by)]), start=stream
            )

        for layer, block in enumerate(model.blocks):
            heads = [Node(layer, head) for head in range(model.cfg.n_heads)]
            reads = {by: torch.stack([block.ln1(read(node, by)) for node in heads]) for by in ("q", "k", "v")}
            changes |= {node: out - references[node] for node, out in zip(heads, _heads(block, reads), strict=True)}
            stream = sum((references[node] for node in heads), start=stream + _biases(block))
            if model.cfg.block_mlp:
                node = Node(layer)
                out = model.cfg.damping * cast(MLP, block.mlp)(block.ln2(read(node)))
                changes[node] = out - references[node]
                stream = stream + references[node]
        return self.adapter.resume_from_end(read(None))

    def mask(self, edges: Sequence[Edge]) -> Bool[Tensor, "edge"]:
        """True for these edges, as `run` takes it."""
        chosen = set(edges)
        return torch.tensor([edge in chosen for edge in self.edges])


def check_graph(adapter: ModelAdapter) -> None:
    """Refuse (ValueError) a model whose stream is no sum of what its parts write, or is not ours to take apart."""
    if not adapter.is_transformer:
        raise ValueError(
            f"edges are cut in a HookedTransformer of this package, not in {type(adapter.model).__name__}; for a "
            f"TransformerBridge see transformer_lens.tools.analysis.attribution_patch"
        )
    if adapter.model.cfg.token_clip is not None:
        raise ValueError("this model clips its stream, so it is no sum of what its parts write")


@torch.no_grad()
def record_writes(adapter: ModelAdapter, tokens: Tensor) -> Float[Tensor, "node prompt pos d_model"]:
    """What each node writes in a run of the model: with the attention's biases, their sum is the final stream."""
    model = adapter.model
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
    mlps = [f"blocks.{layer}.hook_mlp_out" for layer in range(model.cfg.n_layers)] if model.cfg.block_mlp else []
    recorded = adapter.record(tokens, [*names, *mlps], len(tokens))
    outputs = [model.embed_tokens(tokens)]
    for layer, block in enumerate(model.blocks):
        attn = cast(Attention, block.attn)
        heads = einsum(recorded[names[layer]], attn.W_O, "prompt pos head d, head d model -> head prompt pos model")
        outputs += [*(model.cfg.damping * heads)]
        outputs += [recorded[mlps[layer]]] if mlps else []
    return torch.stack(outputs)


def _heads(
    block: Block, reads: dict[str, Float[Tensor, "head prompt pos d_model"]]
) -> Float[Tensor, "head prompt pos d_model"]:
    """What each head writes when it reads streams of its own for its query, key and value."""
    attn = cast(Attention, block.attn)
    projected = []
    for by, streams in reads.items():
        weights = getattr(attn, f"W_{by.upper()}")
        out = einsum(streams, weights, "head prompt pos model, head model d -> prompt pos head d")
        projected.append(out + getattr(attn, f"b_{by.upper()}") if block.cfg.attn_bias else out)
    z = attn.attend(*projected)
    return block.cfg.damping * einsum(z, attn.W_O, "prompt pos head d, head d model -> head prompt pos model")


def _biases(block: Block) -> Tensor | float:
    """What a block's attention adds whatever its heads do."""
    attn = cast(Attention, block.attn)
    return block.cfg.damping * attn.b_O if block.cfg.attn_bias else 0.0
