"""A small vocabulary for weights written by hand: named subspaces of the residual stream, heads and MLPs on them.

A construction states the subspaces that a head reads and writes, never an index. Only the products query keyᵀ and value
output matter, and any invertible matrix between their factors cancels (a gauge): here factors read and write whole
subspaces, scale factors are in `output`, and unused dimensions of d_head are 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import Natural, check_fields, checked
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.transformer.attention import Attention
from mechicl.models.transformer.layers import MLP

WIDEST = 2**14
"""A matrix of the stream by the stream has 2 GiB at this width, and a head takes several."""


class Stream:
    """The residual stream as a sum of named subspaces, in the order given.

    Args:
        dimensions: dimension of each subspace, by name.

    Example:
        >>> stream = Stream(x=10, y=1)
        >>> stream.read("y").shape, stream.write("y").shape
        (torch.Size([11, 1]), torch.Size([1, 11]))
    """

    @checked
    def __init__(self, **dimensions: Natural):
        self.dimensions = dimensions
        if self.d_model > WIDEST:
            raise ValueError(f"the stream's width must be at most {WIDEST}, got {dimensions}")

    @property
    def d_model(self) -> int:
        """Return the width of the stream."""
        return sum(self.dimensions.values())

    @checked
    def read(self, name: str) -> Float[Tensor, "d_model dim"]:
        """Return the map from the stream to a subspace, float64: `e @ stream.read("x")` is the x-part of a vector e."""
        return self.write(name).T

    @checked
    def write(self, name: str) -> Float[Tensor, "dim d_model"]:
        """Return the map from a subspace into the stream, float64: `v @ stream.write("x")` has the x-part v."""
        if name not in self.dimensions:
            raise ValueError(f"name must be one of {list(self.dimensions)}, got {name!r}")
        names = list(self.dimensions)
        start = sum(self.dimensions[n] for n in names[: names.index(name)])
        return torch.eye(self.d_model, dtype=torch.float64)[start : start + self.dimensions[name]]

    @property
    def labels(self) -> tuple[str, ...]:
        """Return a name for each dimension: `x1`, `x2`, ..., and just `y` for a subspace of one dimension."""
        return tuple(
            name if size == 1 else f"{name}{i + 1}" for name, size in self.dimensions.items() for i in range(size)
        )


@dataclass(frozen=True, eq=False)
class Head:
    """One attention head for `assemble`: a position with stream e_q attends to positions with streams e_k.

    Attributes:
        query: the score of a key is the product `<e_q query, e_k key>`.
        key: see `query`; of the same shape.
        value: each key moves `e_k value output`, times its attention.
        output: see `value`; of the transposed shape.
    """

    query: Float[Tensor, "d_model score"]
    key: Float[Tensor, "d_model score"]
    value: Float[Tensor, "d_model moved"]
    output: Float[Tensor, "moved d_model"]

    def __post_init__(self):
        # a width of 1 would be broadcast silently
        check_fields(self)
        if self.query.shape != self.key.shape or self.value.shape != self.output.T.shape:
            shapes = {name: tuple(getattr(self, name).shape) for name in ("query", "key", "value", "output")}
            raise ValueError(f"query and key must have one shape, value and output transposed ones, got {shapes}")

    @property
    def width(self) -> int:
        """Return the smallest d_head."""
        return max(self.query.shape[1], self.value.shape[1])


@dataclass(frozen=True, eq=False)
class Hidden:
    """The hidden layer of an MLP: each position adds `act(e read + bias) write`; the bias is 0 by default."""

    read: Float[Tensor, "d_model hidden"]
    write: Float[Tensor, "hidden d_model"]
    bias: Float[Tensor, "hidden"] | None = None

    def __post_init__(self):
        check_fields(self)
        if self.read.shape != self.write.T.shape or (self.bias is not None and self.bias.shape != self.read.shape[1:]):
            shapes = [each if each is None else tuple(each.shape) for each in (self.read, self.write, self.bias)]
            raise ValueError(f"read, write and bias must be [d_model n], [n d_model] and [n], got {shapes}")

    @property
    def width(self) -> int:
        """Return the smallest d_mlp."""
        return self.read.shape[1]


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer for `assemble`: attention heads, and an MLP that runs after them.

    Attributes:
        heads: the layer's heads; a layer without any has zero weights there.
        mlp: `vocabulary.Hidden(read, write, bias)`, which adds `act(e read + bias) write` to a position's stream e;
            None for no MLP.
    """

    heads: Sequence[Head] = ()
    mlp: Hidden | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@checked
def assemble(
    stream: Stream,
    layers: Sequence[Sequence[Head] | Layer],
    *,
    n_context: int,
    initial_weights: Float[Tensor, "x y"] | None = None,
    input_mlp: Hidden | None = None,
    **config: Any,
) -> HookedTransformer:
    """Build a model of hand-written heads and MLPs on a residual stream that is a sum of named subspaces.

    The prediction is minus the y-subspace at the query: there, layers accumulate y minus the prediction, with y taken
    as 0. Attention is linear by default. Layers that are the same object become one looped block; heads and MLPs that a
    layer lacks get zero weights.

    Args:
        stream: `Stream(x=10, y=1, ...)`, the dimensions of the subspaces. On paired prompts (one token (x, y) per
            point) the first two are "x" and "y". On interleaved prompts (x_1, y_1, x_2, ...) the first is "token" and
            the last "y"; concatenated positions, if any, are the second. All other subspaces start at zero.
        layers: for each layer a list of heads, or `Layer(heads, mlp)`. In a `Head(query, key, value, output)` of
            matrices (made by `stream.read` and `stream.write`), the score of a query with stream e_q for a key with
            stream e_k is `<e_q query, e_k key>`, and the key adds `e_k value output` times its attention.
        n_context: number of context points in the config; without positions, others work too.
        initial_weights: W_0 `[x y]`: on paired prompts the query token is `(x, -x W_0)`, so that the prediction starts
            at `x W_0`; 0 by default.
        input_mlp: an MLP on the tokens before the first layer, instead of MLPs in layers: `vocabulary.Hidden(read,
            write, bias)` adds `act(e read + bias) write` to each position's stream e.
        config: any other field of `TransformerConfig`; for interleaved prompts `x_dim` and `y_dim` too. Weights that it
            adds to the model are zero, except a norm's (one) and a learned sink's (`sink_score`).

    Returns:
        A float64 model in eval mode; its `stream_labels` name the dimensions.

    Example:
        >>> stream = Stream(x=10, y=1)  # one step of gradient descent: scores <x_q, x_k>, values -0.1 y_k
        >>> x, y = stream.read("x"), stream.read("y")
        >>> model = assemble(stream, [[Head(query=x, key=x, value=y, output=-0.1 * stream.write("y"))]], n_context=10)
    """
    parts = [layer if isinstance(layer, Layer) else Layer(layer) for layer in layers]
    heads = [head for part in parts for head in part.heads]
    if not heads:
        raise ValueError(f"layers must have at least one head, got {len(layers)} layers without any")
    mlps = [part.mlp for part in parts if part.mlp is not None]
    if mlps and input_mlp is not None:
        raise ValueError("input_mlp must be None if layers have MLPs")
    begins = ["x", "y"] if config.get("prompt_format", "paired") == "paired" else ["token"]
    if list(stream.dimensions)[: len(begins)] != begins:
        raise ValueError(f"stream must begin with the tokens' {begins}, got {list(stream.dimensions)}")
    units = mlps + ([input_mlp] if input_mlp is not None else [])
    widths = {part.shape[0] for head in heads for part in (head.query, head.value)} | {u.read.shape[0] for u in units}
    if widths != {stream.d_model}:
        raise ValueError(f"layers must have the stream's width {stream.d_model}, got {sorted(widths)}")
    if begins == ["x", "y"]:
        config = {"x_dim": stream.dimensions["x"], "y_dim": stream.dimensions["y"], **config}
    cfg = TransformerConfig(
        n_context=n_context, n_layers=len(layers), n_heads=max(len(part.heads) for part in parts),
        d_model=stream.d_model, d_head=max(head.width for head in heads),
        d_mlp=max((unit.width for unit in units), default=None),
        mlp_location="input" if input_mlp is not None else "blocks",
        recurrent=len(layers) > 1 and all(layer is layers[0] for layer in layers),
        read_in="identity", read_out="identity", dtype="float64", **config,
    )  # fmt: skip
    model = HookedTransformer(cfg, initial_weights=initial_weights)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith((".w", ".sink")):  # weights of a norm, scores of a sink
                weight.zero_()
        for block, part in zip(model.blocks, parts, strict=True):
            for i, head in enumerate(part.heads):
                set_head(cast(Attention, block.attn), i, head)
            if part.mlp is not None:
                _set_mlp(block.mlp, part.mlp)
        if input_mlp is not None:
            _set_mlp(cast(MLP, model.input_mlp), input_mlp)
    model.stream_labels = stream.labels
    return model.eval()


def set_head(attn: Attention, index: int, head: Head) -> None:
    """Write a head into the weights of an attention layer; other entries are unchanged."""
    scored, moved = head.query.shape[1], head.value.shape[1]
    attn.W_Q[index, :, :scored] = head.query
    attn.W_K[index, :, :scored] = head.key
    attn.W_V[index, :, :moved] = head.value
    attn.W_O[index, :moved] = head.output


def _set_mlp(mlp: MLP, hidden: Hidden) -> None:
    mlp.W_in[:, : hidden.width] = hidden.read
    mlp.W_out[: hidden.width] = hidden.write
    if hidden.bias is not None:
        mlp.b_in[: hidden.width] = hidden.bias


def signed_pair(head: Head) -> list[Head]:
    """Return a linear head as two heads of ReLU attention: `s = relu(s) - relu(-s)` for every score s."""
    return [head, Head(-head.query, head.key, head.value, -head.output)]
