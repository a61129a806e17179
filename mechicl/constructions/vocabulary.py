"""A small vocabulary for weights written by hand: named subspaces of the residual stream, and heads on them.

A construction says what a head reads and writes, never an index.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.layers import Attention


class Stream:
    """The residual stream as a sum of named subspaces, in the order given.

    Example:
        >>> stream = Stream(x=10, y=1)
        >>> stream.read("y").shape, stream.write("y").shape
        (torch.Size([11, 1]), torch.Size([1, 11]))
    """

    def __init__(self, **dimensions: int):
        self.dimensions = dimensions

    @property
    def d_model(self) -> int:
        """Width of the stream."""
        return sum(self.dimensions.values())

    def read(self, name: str) -> Float[Tensor, "d_model dim"]:
        """The map from the stream to a subspace, float64."""
        return self.write(name).T

    def write(self, name: str) -> Float[Tensor, "dim d_model"]:
        """The map from a subspace into the stream, float64."""
        if name not in self.dimensions:
            raise ValueError(f"the stream has no subspace {name!r}, only {list(self.dimensions)}")
        names = list(self.dimensions)
        start = sum(self.dimensions[n] for n in names[: names.index(name)])
        return torch.eye(self.d_model, dtype=torch.float64)[start : start + self.dimensions[name]]


@dataclass(frozen=True, eq=False)
class Head:
    """One attention head: scores `<e_q query, e_k key>`, and `value` then `output` carry what it moves.

    Attributes:
        query: `[d_model score]`.
        key: `[d_model score]`.
        value: `[d_model moved]`.
        output: `[moved d_model]`.

    Raises:
        ValueError: query and key of different shapes, or an output that does not fit the value.
    """

    query: Float[Tensor, "d_model score"]
    key: Float[Tensor, "d_model score"]
    value: Float[Tensor, "d_model moved"]
    output: Float[Tensor, "moved d_model"]

    def __post_init__(self):
        # a width of 1 would be broadcast, unnoticed
        if self.query.shape != self.key.shape or self.value.shape != self.output.T.shape:
            shapes = {name: tuple(getattr(self, name).shape) for name in ("query", "key", "value", "output")}
            raise ValueError(f"query and key need one shape, value and output opposite ones; got {shapes}")

    @property
    def width(self) -> int:
        """The d_head that it needs."""
        return max(self.query.shape[1], self.value.shape[1])


def assemble(
    stream: Stream,
    layers: Sequence[Sequence[Head]],
    *,
    n_context: int,
    initial_weights: Float[Tensor, "x y"] | None = None,
    **config: Any,
) -> HookedTransformer:
    """A linear-attention model on paired prompts with these heads; the prediction is minus the query's y.

    Layers that are one and the same list of heads become one looped block. Weights are float64.

    Args:
        stream: its first two subspaces, "x" and "y", are the token's; others start at zero.
        layers: the heads of each layer.
        n_context: number of context points that the model is meant for.
        initial_weights: W_0 `[x y]` of the query token `(x, -x W_0)`.
        config: any other field of `TransformerConfig`. What it adds to the model beside the attention starts at zero,
            but a norm's weights at one and a learned sink at `sink_score`.

    Raises:
        ValueError: no layers, layers with different numbers of heads, heads of another width than the stream, or a
            stream that does not begin with x and y.
    """
    if list(stream.dimensions)[:2] != ["x", "y"]:
        raise ValueError(f"the stream must begin with x and y, where the tokens are; got {list(stream.dimensions)}")
    counts = {len(heads) for heads in layers}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(f"every layer needs the same number of heads, at least one; got {[len(h) for h in layers]}")
    widths = {head.query.shape[0] for heads in layers for head in heads}
    widths |= {head.value.shape[0] for heads in layers for head in heads}
    if widths != {stream.d_model}:
        raise ValueError(f"the stream has width {stream.d_model}, the heads are made for {sorted(widths)}")
    cfg = TransformerConfig(
        x_dim=stream.dimensions["x"],
        y_dim=stream.dimensions["y"],
        n_context=n_context,
        n_layers=len(layers),
        n_heads=counts.pop(),
        d_model=stream.d_model,
        d_head=max(head.width for heads in layers for head in heads),
        recurrent=len(layers) > 1 and all(heads is layers[0] for heads in layers),
        read_in="identity",
        dtype="float64",
        **config,
    )
    model = HookedTransformer(cfg, initial_weights=initial_weights)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith((".w", ".sink")):  # weights of a norm, scores of a sink
                weight.zero_()
        for block, heads in zip(model.blocks, layers, strict=True):
            attn = cast(Attention, block.attn)
            for i, head in enumerate(heads):
                scored, moved = head.query.shape[1], head.value.shape[1]
                attn.W_Q[i, :, :scored] = head.query
                attn.W_K[i, :, :scored] = head.key
                attn.W_V[i, :, :moved] = head.value
                attn.W_O[i, :moved] = head.output
    return model.eval()
