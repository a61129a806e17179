"""The operations of proofs about transformers: moves, affine maps, products, quotients, sums.

Each replaces the content of the subspace `target` (`total` adds to it) at every position (`mov` at some), and reads
before it writes. Arguments name subspaces. Source: Fu et al. 2024, C.1, Proposition 1 and Lemma 1.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import Count
from mechicl.constructions.vocabulary import Head, Hidden, Layer, Stream


def mov(stream: Stream, source: str, target: str, moves: Sequence[tuple[int, int]]) -> Layer:
    """Copy `source` at one position into `target` at another, for pairs of positions `moves`, all at once.

    Two attention heads read one-hot positions in the subspace "position"; one adds the new content, the other removes
    the old. Exact with linear and ReLU attention, without normalisation, and with keys that show both positions:
    "full", or "causal" for moves to later ones.
    """
    n_positions, targets = stream.dimensions.get("position", 0), [to for _, to in moves]
    if not moves or len(set(targets)) < len(targets) or not all(0 <= p < n_positions for pair in moves for p in pair):
        raise ValueError(
            f"moves must be pairs of positions below {n_positions} with distinct targets, got {list(moves)}"
        )
    _same_dimensions(stream, source, target)
    # With one-hot positions the score of query p and key q is 1 for the pairs (to, from) and 0 for all others, so that
    # linear and ReLU attention, which sum scores times values, fetch just the source. Heads add to the stream, hence
    # the second one, which fetches the target from its own position with a minus sign.
    at = stream.read("position")
    to, origin = at[:, targets], at[:, [start for start, _ in moves]]
    copied = Head(query=to, key=origin, value=stream.read(source), output=stream.write(target))
    erased = Head(query=to, key=to, value=stream.read(target), output=-stream.write(target))
    return Layer([copied, erased])


def aff(
    stream: Stream, weights: Mapping[str, Float[Tensor, "_ target"]], target: str, *,
    bias: Float[Tensor, "target"] | None = None, act_fn: str = "identity",
) -> Hidden:  # fmt: skip
    """Compute an affine map of subspaces, `target ← Σ_s h_s W_s + b`, by an MLP; `weights` has W_s `[source target]`.

    Exact up to rounding, with `act_fn` "identity", or "relu" or "square" with two units instead of one; with "square",
    rounding of numbers above 1 is relative to their squares.
    """
    read = -stream.read(target)  # the MLP adds to the stream, so it subtracts the target's content
    for source, matrix in weights.items():
        expected = (stream.read(source).shape[1], read.shape[1])
        if matrix.shape != expected:
            raise ValueError(f"weights of {source!r} must be [source target] = {expected}, got {tuple(matrix.shape)}")
        read = read + stream.read(source) @ matrix.double()
    return linear(read, stream.write(target), bias, act_fn=act_fn)


def mul(stream: Stream, left: str, right: str, target: str, *, shape: tuple[int, int, int] | None = None) -> Hidden:
    """Multiply two subspaces by an MLP with the "square" activation: `4 a b = (a + b)² - (a - b)²`.

    Exact up to rounding, which is relative to `(|a| + |b|)²` and `(|target| + 1)²`. The product is elementwise, or with
    `shape` (rows, inner, columns) one of matrices stored row by row; (1, d, 1) is an inner product.
    """
    return joined(_products(stream, left, right, target, shape), erased(stream, target))


def div(
    stream: Stream, numerator: str, denominator: str, target: str, *, scratch: str, low: float, high: float, steps: int
) -> list[Layer]:
    """Divide a subspace by a positive number c in [low, high], by `steps + 1` MLPs with the "square" activation.

    No activation here is a reciprocal, so this is Goldschmidt's iteration: the first layer computes `v s` and
    `e = 1 - c s`, `s = 2 / (low + high)`, and each later one `v ← v (1 + e)` and `e ← e²`. The relative error is the
    first `e^(2^steps)`: for high = 10 low it is 4e-2 after 4 steps, 3e-6 after 6 and below rounding after 8. Rounding
    is relative to `(|v / c| + 1)²`. (Akyürek et al. divide by |c|, approximately, by a layer norm.)

    Args:
        numerator: v, of any dimension.
        denominator: c, of one dimension; outside [low, high] the error grows, and from low + high on it diverges.
        target: the subspace of v / c.
        scratch: another subspace of one dimension for e, which is near 0 at the end.
        low, high: the smallest and the largest denominator, positive.
        steps: number of layers after the first.
    """
    if steps < 0 or not 0 < low <= high < math.inf:
        raise ValueError(f"steps must be >= 0 and 0 < low <= high, got steps={steps}, low={low}, high={high}")
    _same_dimensions(stream, numerator, target)
    _same_dimensions(stream, denominator, scratch)
    if stream.read(scratch).shape[1] != 1 or scratch in (numerator, denominator, target):
        raise ValueError(f"scratch must be a separate subspace of one dimension, like the denominator, got {scratch!r}")
    # Goldschmidt: multiply numerator and denominator by the same numbers until the denominator is 1. With e = 1 - c s
    # the denominator is c s = 1 - e; times 1 + e it is 1 - e², so that e is squared every step. s = 2 / (low + high)
    # makes the two ends' errors, 1 - low s and 1 - high s, equal in size, which is the least possible.
    size, inverse = stream.read(target).shape[1], 2 / (low + high)
    eye = torch.eye(size, dtype=torch.float64)
    start = joined(
        aff(stream, {numerator: inverse * eye}, target, act_fn="square"),
        aff(stream, {denominator: -inverse * eye[:1, :1]}, scratch, bias=torch.ones(1).double(), act_fn="square"),
    )
    step = joined(
        _products(stream, scratch, target, target, (1, 1, size)),  # added to the target
        Hidden(read=stream.read(scratch), write=stream.write(scratch)),  # e²
        erased(stream, scratch),
    )
    return [Layer(mlp=start), *[Layer(mlp=step)] * steps]


def total(stream: Stream, source: str, target: str, *, n_positions: Count) -> Head:
    """Sum `source` over all positions, and add the sum to `target` at each of them, by one head of attention.

    Exact up to rounding in attention that is normalised: linear or ReLU with `normalize_by_context`, or softmax without
    a sink. All keys have equal scores, so each gets `1 / n_positions` (the number of keys; 1 without normalisation).
    """
    _same_dimensions(stream, source, target)
    one = stream.read("position").sum(1, keepdim=True)
    return Head(query=one, key=one, value=stream.read(source), output=n_positions * stream.write(target))


def linear(read: Tensor, write: Tensor, bias: Tensor | None = None, *, act_fn: str = "square") -> Hidden:
    """Return an MLP that adds `(e read + bias) write`."""
    bias = read.new_zeros(read.shape[1]) if bias is None else bias.double()
    if act_fn == "identity":
        return Hidden(read, write, bias)
    if act_fn == "relu":  # h = relu(h) - relu(-h)
        return Hidden(torch.cat([read, -read], dim=1), torch.cat([write, -write]), torch.cat([bias, -bias]))
    if act_fn == "square":  # 2 h = (h + 1/2)² - (h - 1/2)²
        shifted = torch.cat([bias + 0.5, bias - 0.5])
        return Hidden(torch.cat([read, read], dim=1), torch.cat([write / 2, -write / 2]), shifted)
    raise ValueError(f"act_fn must be 'identity', 'relu' or 'square', got {act_fn!r}")


def erased(stream: Stream, *names: str) -> Hidden:
    """Return an MLP with the "square" activation that subtracts subspaces."""
    return joined(*(linear(-stream.read(name), stream.write(name)) for name in names))


def product(
    left: Float[Tensor, "d_model n"], right: Float[Tensor, "d_model n"], write: Float[Tensor, "n d_model"],
    left_bias: Float[Tensor, "n"] | float = 0.0, right_bias: Float[Tensor, "n"] | float = 0.0,
) -> Hidden:  # fmt: skip
    """Return an MLP with the "square" activation that adds n products: `4 a b = (a + b)² - (a - b)²`."""
    zero = left.new_zeros(left.shape[1])
    biases = torch.cat([zero + left_bias + right_bias, zero + left_bias - right_bias])
    return Hidden(torch.cat([left + right, left - right], dim=1), torch.cat([write / 4, -write / 4]), biases)


def joined(*parts: Hidden) -> Hidden:
    """Join several MLPs, side by side, to one."""
    biases = [part.read.new_zeros(part.width) if part.bias is None else part.bias for part in parts]
    return Hidden(
        torch.cat([part.read for part in parts], dim=1), torch.cat([part.write for part in parts]), torch.cat(biases)
    )


def _products(stream: Stream, left: str, right: str, target: str, shape: tuple[int, int, int] | None) -> Hidden:
    a, b, write = stream.read(left), stream.read(right), stream.write(target)
    sizes = (a.shape[1], b.shape[1], write.shape[0])
    if shape is None:
        expected = (sizes[0],) * 3
    else:
        rows, inner, columns = shape
        expected = (rows * inner, inner * columns, rows * columns)
    if sizes != expected:
        raise ValueError(f"{left!r}, {right!r} and {target!r} must have dimensions {expected}, got {sizes}")
    if shape is not None:
        # a product of matrices is rows * inner * columns products of numbers: pick each one's factors and place
        i, j, k = torch.cartesian_prod(*map(torch.arange, shape)).unbind(1)
        a, b, write = a[:, i * inner + j], b[:, j * columns + k], write[i * columns + k]
    return product(a, b, write)


def _same_dimensions(stream: Stream, source: str, target: str) -> None:
    sizes = [stream.read(name).shape[1] for name in (source, target)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"{source!r} and {target!r} must have the same dimension, got {sizes[0]} and {sizes[1]}")
