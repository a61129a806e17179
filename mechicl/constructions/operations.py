"""The operations of proofs about transformers: moves, affine maps, products, quotients, sums.

Each writes its result into the subspace `target`, replacing its content (`total` adds to it), at every position (`mov`
at some). Reads come before writes, so that a target may also be a source. Source: Fu et al. 2024, C.1, Proposition 1
and Lemma 1, after Akyürek et al. 2023.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.checks import check_whole
from mechicl.constructions.vocabulary import Head, Hidden, Layer, Stream


def mov(
    stream: Stream, source: str, target: str, moves: Sequence[tuple[int, int]], *, positions: str = "position"
) -> Layer:
    """Copy a subspace from one position into a subspace at another, by attention on one-hot positions.

    Exact with linear and ReLU attention, without normalisation, and with keys that show both positions: "full", or
    "causal" for moves to later ones. Of two heads, one adds the new content and one removes the old.

    Args:
        stream: with one-hot positions.
        source: the subspace to copy.
        target: the subspace to copy into, of the same dimension.
        moves: pairs of positions (from, to), all at once.
        positions: the subspace of the positions.
    """
    n_positions, targets = stream.dimensions.get(positions, 0), [to for _, to in moves]
    if not moves or len(set(targets)) < len(targets) or not all(0 <= p < n_positions for pair in moves for p in pair):
        raise ValueError(
            f"moves need pairs of positions below {n_positions}, each the target of one move at most; got {list(moves)}"
        )
    _same_dimensions(stream, source, target)
    # With one-hot positions the score of query p and key q is 1 for the pairs (to, from) and 0 for all others, so that
    # linear and ReLU attention, which sum scores times values, fetch just the source. The stream is added to, hence the
    # second head, which fetches the target from its own position with a minus sign.
    at = stream.read(positions)
    here, there = at[:, targets], at[:, [origin for origin, _ in moves]]
    copied = Head(query=here, key=there, value=stream.read(source), output=stream.write(target))
    erased = Head(query=here, key=here, value=stream.read(target), output=-stream.write(target))
    return Layer([copied, erased])


def aff(
    stream: Stream,
    weights: Mapping[str, Float[Tensor, "_ target"]],
    target: str,
    *,
    bias: Float[Tensor, "target"] | None = None,
    act_fn: str = "identity",
) -> Hidden:
    """An affine map of subspaces, `target ← Σ_s h_s W_s + b`, by an MLP.

    Exact up to rounding; with "square", rounding of numbers above 1 is relative to their squares.

    Args:
        stream: of the subspaces.
        weights: W `[source target]` for the name of each subspace that is read.
        target: the subspace of the result.
        bias: b `[target]`, 0 by default.
        act_fn: the model's activation: "identity", or "relu" or "square" with two units for one.
    """
    read = -stream.read(target)  # the MLP adds to the stream, so it subtracts the target's content
    for source, matrix in weights.items():
        expected = (stream.read(source).shape[1], read.shape[1])
        if matrix.shape != expected:
            raise ValueError(f"weights of {source!r} must be [source target] = {expected}, got {tuple(matrix.shape)}")
        read = read + stream.read(source) @ matrix.double()
    return linear(read, stream.write(target), bias, act_fn=act_fn)


def mul(stream: Stream, left: str, right: str, target: str, *, shape: tuple[int, int, int] | None = None) -> Hidden:
    """The product of two subspaces, by an MLP with the "square" activation: `4 a b = (a + b)² - (a - b)²`.

    Exact up to rounding, which is relative to `(|a| + |b|)²` and `(|target| + 1)²`. Two units for each product of two
    numbers, and two for each number that the target held.

    Args:
        stream: of the subspaces.
        left: the first factor.
        right: the second factor.
        target: the subspace of the result.
        shape: (rows, inner, columns) for a product of matrices, which stand in their subspaces row by row: left is
            rows x inner, right inner x columns. (1, d, 1) is an inner product. By default the product is elementwise.
    """
    return beside(_products(stream, left, right, target, shape), erased(stream, target))


def div(
    stream: Stream,
    numerator: str,
    denominator: str,
    target: str,
    *,
    scratch: str,
    low: float,
    high: float,
    steps: int,
) -> list[Layer]:
    """A subspace divided by a positive number c in [low, high], by `steps + 1` MLPs with the "square" activation.

    Not exact in any number of layers: no activation here is a reciprocal, and a layer norm, by which Akyürek et al.
    divide approximately in one layer, would act on every other layer too. Goldschmidt's iteration instead: the first
    layer makes `v s` and `e = 1 - c s`, `s = 2 / (low + high)`, and each later one `v ← v (1 + e)` and `e ← e²`. The
    relative error is the first `e^(2^steps)`, at most `((high - low) / (high + low))^(2^steps)`: for high = 10 low it
    is 4e-2 after 4 steps, 3e-6 after 6 and below rounding after 8. Rounding is relative to `(|v / c| + 1)²`. The
    printed operation divides by |c|; here c must be positive.

    Args:
        stream: of the subspaces.
        numerator: v, of any dimension.
        denominator: c, of one dimension; outside [low, high] the error grows, and from low + high on it diverges.
        target: the subspace of v / c.
        scratch: another subspace of one dimension for e, which is near 0 at the end.
        low: the smallest denominator, positive.
        high: the largest denominator.
        steps: number of layers after the first.
    """
    if steps < 0 or not 0 < low <= high < math.inf:
        raise ValueError(f"needs steps >= 0 and 0 < low <= high, got steps={steps}, low={low}, high={high}")
    _same_dimensions(stream, numerator, target)
    _same_dimensions(stream, denominator, scratch)
    if stream.read(scratch).shape[1] != 1 or scratch in (numerator, denominator, target):
        raise ValueError(
            f"denominator and scratch have one dimension, and scratch is a subspace of its own: {scratch!r}"
        )
    # Goldschmidt: multiply numerator and denominator by the same numbers until the denominator is 1. With e = 1 - c s
    # the denominator is c s = 1 - e; times 1 + e it is 1 - e², so that e is squared every step. s = 2 / (low + high)
    # makes the two ends' errors, 1 - low s and 1 - high s, equal in size, which is the least possible.
    size, inverse = stream.read(target).shape[1], 2 / (low + high)
    eye = torch.eye(size, dtype=torch.float64)
    start = beside(
        aff(stream, {numerator: inverse * eye}, target, act_fn="square"),
        aff(stream, {denominator: -inverse * eye[:1, :1]}, scratch, bias=torch.ones(1).double(), act_fn="square"),
    )
    step = beside(
        _products(stream, scratch, target, target, (1, 1, size)),  # added to what is there
        Hidden(read=stream.read(scratch), write=stream.write(scratch)),  # e²
        erased(stream, scratch),
    )
    return [Layer(mlp=start), *[Layer(mlp=step)] * steps]


def total(stream: Stream, source: str, target: str, *, n_positions: int, constant: str = "position") -> Head:
    """The sum of a subspace over all positions, added to the target at each of them, by one head of attention.

    Exact up to rounding in attention that is normalised: linear or ReLU with `normalize_by_context`, or softmax without
    a sink. All keys score alike, so each gets `1 / n_positions`. One head is enough: of the two of the printed proof,
    the second is `relu(-1) = 0` everywhere.

    Args:
        stream: with a subspace whose entries sum to 1 at every position.
        source: the subspace to sum.
        target: the subspace to add the sum to, of the same dimension.
        n_positions: number of keys that a position sees; 1 for the sum in linear or ReLU attention that is not
            normalised.
        constant: a subspace whose entries sum to 1, such as one-hot positions.

    Source: Fu et al. 2024, Lemma 1.
    """
    check_whole(1, n_positions=n_positions)
    _same_dimensions(stream, source, target)
    one = stream.read(constant).sum(1, keepdim=True)
    return Head(query=one, key=one, value=stream.read(source), output=n_positions * stream.write(target))


def linear(read: Tensor, write: Tensor, bias: Tensor | None = None, *, act_fn: str = "square") -> Hidden:
    """An MLP that adds `(e read + bias) write`."""
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
    """An MLP with the "square" activation that takes subspaces away."""
    return beside(*(linear(-stream.read(name), stream.write(name)) for name in names))


def product(
    left: Float[Tensor, "d_model n"],
    right: Float[Tensor, "d_model n"],
    write: Float[Tensor, "n d_model"],
    left_bias: Float[Tensor, "n"] | float = 0.0,
    right_bias: Float[Tensor, "n"] | float = 0.0,
) -> Hidden:
    """An MLP with the "square" activation that adds n products of numbers: `4 a b = (a + b)² - (a - b)²`."""
    zero = left.new_zeros(left.shape[1])
    biases = torch.cat([zero + left_bias + right_bias, zero + left_bias - right_bias])
    return Hidden(torch.cat([left + right, left - right], dim=1), torch.cat([write / 4, -write / 4]), biases)


def beside(*parts: Hidden) -> Hidden:
    """Several MLPs as one, side by side."""
    biases = [part.read.new_zeros(part.width) if part.bias is None else part.bias for part in parts]
    return Hidden(
        torch.cat([part.read for part in parts], dim=1), torch.cat([part.write for part in parts]), torch.cat(biases)
    )


def _products(stream: Stream, left: str, right: str, target: str, shape: tuple[int, int, int] | None) -> Hidden:
    """An MLP that adds the product of two subspaces to the target."""
    a, b, write = stream.read(left), stream.read(right), stream.write(target)
    sizes = (a.shape[1], b.shape[1], write.shape[0])
    if shape is None:
        expected = (sizes[0],) * 3
    else:
        rows, inner, columns = shape
        expected = (rows * inner, inner * columns, rows * columns)
    if sizes != expected:
        raise ValueError(f"{left!r}, {right!r} and {target!r} need dimensions {expected}, they have {sizes}")
    if shape is not None:
        # a product of matrices is rows * inner * columns products of numbers: pick each one's factors and place
        i, j, k = torch.cartesian_prod(*map(torch.arange, shape)).unbind(1)
        a, b, write = a[:, i * inner + j], b[:, j * columns + k], write[i * columns + k]
    return product(a, b, write)


def _same_dimensions(stream: Stream, source: str, target: str) -> None:
    sizes = [stream.read(name).shape[1] for name in (source, target)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"{source!r} has {sizes[0]} dimensions and {target!r} has {sizes[1]}")
