"""A model taken apart: its nodes as functions of the streams that they read."""

from typing import Any, Protocol, cast, runtime_checkable

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.circuits.bridge_parts import INSTEAD, BridgeParts
from mechicl.analysis.circuits.stages import list_stages
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edges import list_edges, list_nodes
from mechicl.models.transformer.attention import Attention
from mechicl.models.transformer.layers import MLP


@runtime_checkable
class Parts(Protocol):
    """A model taken apart: its nodes as functions of the streams that they read.

    Streams are `[prompt pos d_model]`, before the norm of whoever reads them.

    Attributes:
        model: what is taken apart.
        heads_meet: whether what a head writes depends on what other heads of its layer read.
    """

    model: Any
    heads_meet: bool

    def embed(self, tokens: Tensor) -> Tensor:
        """What the embedding writes, positions included."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What each head of a layer writes, `[head prompt pos d_model]`, from a stream for each of its inputs."""
        ...

    def attention_bias(self, layer: int) -> Tensor | float:
        """What a layer's attention adds whatever its heads do."""
        ...

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        """What a layer's MLP writes."""
        ...

    def read_out(self, stream: Tensor) -> Tensor:
        """Predictions from the final stream."""
        ...

    def bytes_per_row(self, tokens: Tensor) -> float:
        """A bound on the memory of a run for each prompt, reads and writes aside."""
        ...


class TransformerParts:
    """One of our transformers, taken apart."""

    heads_meet = False

    def __init__(self, adapter: ModelAdapter):
        self.adapter, self.model = adapter, adapter.model

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens as the stream before the first block."""
        return self.model.embed_tokens(tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What each head writes when it reads streams of its own for its query, key and value."""
        block = self.model.blocks[layer]
        attn = cast(Attention, block.attn)
        projected = []
        for by, streams in (("Q", q), ("K", k), ("V", v)):
            weights = getattr(attn, f"W_{by}")
            out = einsum(block.ln1(streams), weights, "head prompt pos model, head model d -> prompt pos head d")
            projected.append(out + getattr(attn, f"b_{by}") if block.cfg.attn_bias else out)
        z = attn.attend(*projected)
        return block.cfg.damping * einsum(z, attn.W_O, "prompt pos head d, head d model -> head prompt pos model")

    def attention_bias(self, layer: int) -> Tensor | float:
        """What a block's attention adds whatever its heads do."""
        block = self.model.blocks[layer]
        return block.cfg.damping * cast(Attention, block.attn).b_O if block.cfg.attn_bias else 0.0

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        """What a block's MLP writes."""
        block = self.model.blocks[layer]
        return block.cfg.damping * cast(MLP, block.mlp)(block.ln2(stream))

    def read_out(self, stream: Tensor) -> Tensor:
        """Predictions from the final stream."""
        return self.adapter.resume_from_end(stream)

    def bytes_per_row(self, tokens: Tensor) -> float:
        """What a run of the model takes for each prompt."""
        return self.adapter.bytes_per_row(tokens)


def take_apart(adapter: ModelAdapter) -> Parts:
    """The parts of a model; refuses (ValueError) one whose stream is no sum of what its parts write."""
    check_graph(adapter)
    return TransformerParts(adapter) if adapter.is_transformer else BridgeParts(adapter)


def check_graph(adapter: ModelAdapter) -> None:
    """Refuse (ValueError) a model whose stream is no sum of what its parts write, or whose parts are not known."""
    if adapter.reads_prompts and not adapter.is_transformer:
        raise ValueError(
            f"edges are cut in a HookedTransformer of this package and in TransformerLens' bridges, not in "
            f"{type(adapter.model).__name__}, of whose parts it is not known what they read: {INSTEAD}"
        )
    if adapter.is_transformer and adapter.model.cfg.token_clip is not None:
        raise ValueError("this model clips its stream, so it is no sum of what its parts write")


@torch.no_grad()
def record_writes(
    adapter: ModelAdapter, tokens: Tensor, embedded: Float[Tensor, "prompt pos d_model"] | None = None
) -> Float[Tensor, "node prompt pos d_model"]:
    """What each node writes in a run of the model: with the attention's biases, their sum is the final stream.

    The run starts from the embedded tokens, or from another stream.
    """
    parts, nodes = take_apart(adapter), list_nodes(adapter.model)
    stream = before = parts.embed(tokens) if embedded is None else embedded
    outputs = [stream[None]]
    for stage in list_stages(nodes, list_edges(adapter.model)):
        if stage.kind == "heads":
            before = stream
            reads = (stream.expand(len(stage.edges[by]), *stream.shape) for by in ("q", "k", "v"))
            outputs.append(parts.attend(stage.layer, *reads))
            stream = stream + outputs[-1].sum(0) + parts.attention_bias(stage.layer)
        elif stage.kind == "mlp":
            # it may read the stream before its layer, as the heads do
            outputs.append(parts.mlp(stage.layer, stream if stage.n_senders == stage.place else before)[None])
            stream = stream + outputs[-1][0]
    return torch.cat(outputs)
