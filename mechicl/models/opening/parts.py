"""The nodes of a model (heads, MLPs, ends) as functions of the streams that they read."""

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.bridge_parts import BridgeParts, run_nodes, share_of_norm


class TransformerParts:
    """The nodes of one of our transformers; `heads_interact` is True if a head depends on other heads' inputs.

    Streams are `[prompt pos d_model]`, before the receiver's norm. `BridgeParts` has the same attributes and methods. A
    norm after the attention scales the sum of the heads' outputs: a head's output is its share of the scaled sum.
    """

    def __init__(self, adapter: ModelAdapter):
        if not adapter.is_transformer:
            kind = type(adapter.model).__name__
            raise ValueError(f"edges are cut in a HookedTransformer or a TransformerBridge, not in {kind}")
        self.adapter, self.model = adapter, adapter.model
        cfg = self.model.cfg
        blocks = self.model.blocks
        self.norms_after = any(block.output_norm("ln1") is not None for block in blocks)
        together = cfg.use_qk_norm and cfg.qk_norm_over == "all"
        self.heads_interact = cfg.n_heads > 1 and (self.norms_after or together)

    def embed(self, tokens: Tensor) -> Tensor:
        """Compute the stream before the first block."""
        if self.model.cfg.token_clip is not None:
            raise ValueError("this model clips its stream, so the stream is not the sum of what its parts write")
        biases = self.norms_after and self.model.cfg.attn_bias and self.model.b_O.any()
        if self.norms_after and (biases or str(self.model.cfg.normalization_type).startswith("LN")):
            raise ValueError("norms after the attention that centre, or add biases, have no share for each head")
        return self.model.embed_tokens(tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute the output of each head, `[head prompt pos d_model]`, from a stream per head for q, k and v."""
        block = self.model.blocks[layer]
        reads = (block.normed_input(streams, "ln1").permute(1, 2, 0, 3) for streams in (q, k, v))
        return self.write(layer, block.attn.mix(*reads))

    def write(self, layer: int, z: Tensor) -> Tensor:
        """Compute what each head adds to the stream, `[head prompt pos d_model]`, from z `[prompt pos head d_head]`."""
        block = self.model.blocks[layer]
        written = einsum(z, block.attn.W_O, "prompt pos head d, head d model -> head prompt pos model")
        return share_of_norm(block.output_norm("ln1"), block.cfg.damping * written)

    def attention_bias(self, layer: int) -> Tensor | float:
        """Return the part of a layer's attention output that is independent of its heads."""
        block = self.model.blocks[layer]
        return block.cfg.damping * block.attn.b_O if block.cfg.attn_bias else 0.0

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        """Compute the output of a layer's MLP."""
        return self.model.blocks[layer].write_mlp(stream)

    def read_out(self, stream: Tensor) -> Tensor:
        """Compute predictions from the final stream."""
        return self.adapter.resume_from_end(stream)

    def bytes_per_row(self, tokens: Tensor) -> float:
        """Bound the memory of a run per prompt, in bytes, without the inputs and outputs of nodes."""
        return self.adapter.bytes_per_row(tokens)


def take_apart(adapter: ModelAdapter) -> TransformerParts | BridgeParts:
    """Return the nodes of a model; a ValueError if its stream is not the sum of their outputs."""
    return TransformerParts(adapter) if adapter.reads_prompts else BridgeParts(adapter)


@torch.no_grad()
def record_writes(
    adapter: ModelAdapter, tokens: Tensor, embedded: Float[Tensor, "prompt pos d_model"] | None = None
) -> Float[Tensor, "node prompt pos d_model"]:
    """Return each node's output, from the embedding or another stream; with biases they sum to the final stream."""
    parts = take_apart(adapter)
    stream = parts.embed(tokens)  # also records how a bridge calls its parts
    stream = stream if embedded is None else embedded
    outputs = [stream[None]]
    for layer in range(adapter.n_layers):
        of_layer, stream = run_nodes(parts, layer, stream)
        outputs += of_layer
    return torch.cat(outputs)
