"""The operations that proofs about transformers are made of: moves, affine maps, products, quotients, sums.

Each puts its result into the subspace `target`, in place of what stood there (`total` adds to it), at every position
alike (`mov` at some). Reads come before writes, so that a target may also be a source. Source: Fu et al. 2024, C.1,
Proposition 1 and Lemma 1, after Akyürek et al. 2023.
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
    "causal" for moves to later ones. Two heads: one brings the new, one takes away the old.

    Args:
        stream: with one-hot positions.
        source: the subspace to copy.
        target: the subspace to copy into, of the same dimension.
        moves: pairs of positions (from, to), all at once.
        positions: the subspace of the positions.

    Raises:
        ValueError: no moves, a position that does not exist, two moves to one position, or subspaces of different
            dimensions.
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

    Exact up to rounding, which "square" does on numbers larger than 1 relative to their squares.

    Args:
        stream: whose subspaces these are.
        weights: W `[source target]` for the name of each subspace that is read.
        target: the subspace to put the result into.
        bias: b `[target]`, 0 by default.
        act_fn: the model's activation: "identity", or "relu" or "square" with two units for one.

    Raises:
        ValueError: another activation, or weights or a bias that do not fit the subspaces.
    """
    read = -stream.read(target)  # the MLP adds to the stream, so it takes away what the target holds
    for source, matrix in weights.items():
        expected = (stream.read(source).shape[1], read.shape[1])
        if matrix.shape != expected:
            raise ValueError(f"weights of {source!r} must be [source target] = {expected}, got {tuple(matrix.shape)}")
        read = read + stream.read(source) @ matrix.double()
    return _linear(read, stream.write(target), bias, act_fn)


def mul(stream: Stream, left: str, right: str, target: str, *, shape: tuple[int, int, int] | None = None) -> Hidden:
    """The product of two subspaces, by an MLP with the "square" activation: `4 a b = (a + b)² - (a - b)²`.

    Exact up to rounding, which is relative to `(|a| + |b|)²` and `(|target| + 1)²`. Two units for each product of two
    numbers, and two for each number that the target held.

    Args:
        stream: whose subspaces these are.
        left: the first factor.
        right: the second factor.
        target: the subspace to put the result into.
        shape: (rows, inner, columns) for a product of matrices, which stand in their subspaces row by row: left is
            rows x inner, right inner x columns. (1, d, 1) is an inner product. By default the product is elementwise.

    Raises:
        ValueError: subspaces whose dimensions are not those of the shape, or not all the same without one.
    """
    product = _product(stream, left, right, target, shape)
    return _beside(product, _linear(-stream.read(target), stream.write(target), None, "square"))


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
    is 4e-2 after 4 steps, 3e-6 after 6 and below rounding after 8. Rounding is relative to `(|v / c| + 1)²`. Where the
    printed operation divides by |c|, c must be positive here.

    Args:
        stream: whose subspaces these are.
        numerator: v, of any dimension.
        denominator: c, of one dimension; outside [low, high] the error grows, and from low + high on it diverges.
        target: the subspace to put v / c into.
        scratch: a subspace of one dimension for e, which is near 0 at the end; not one of the others.
        low: the least denominator, positive.
        high: the largest denominator.
        steps: number of layers after the first.

    Raises:
        ValueError: steps < 0, bounds that are not 0 < low <= high < infinity, or subspaces of the wrong dimension or
            the same one in two roles.
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
    start = _beside(
        aff(stream, {numerator: inverse * eye}, target, act_fn="square"),
        aff(stream, {denominator: -inverse * eye[:1, :1]}, scratch, bias=torch.ones(1).double(), act_fn="square"),
    )
    step = _beside(
        _product(stream, scratch, target, target, (1, 1, size)),  # added to what is there
        Hidden(read=stream.read(scratch), write=stream.write(scratch)),  # e²
        _linear(-stream.read(scratch), stream.write(scratch), None, "square"),
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

    Raises:
        ValueError: n_positions < 1, or subspaces of different dimensions.

    Source: Fu et al. 2024, Lemma 1.
    """
    check_whole(1, n_positions=n_positions)
    _same_dimensions(stream, source, target)
    one = stream.read(constant).sum(1, keepdim=True)
    return Head(query=one, key=one, value=stream.read(source), output=n_positions * stream.write(target))


def _linear(read: Tensor, write: Tensor, bias: Tensor | None, act_fn: str) -> Hidden:
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


def _product(stream: Stream, left: str, right: str, target: str, shape: tuple[int, int, int] | None) -> Hidden:
    """An MLP that adds a product to the target."""
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
    return Hidden(torch.cat([a + b, a - b], dim=1), torch.cat([write / 4, -write / 4]))


def _beside(*parts: Hidden) -> Hidden:
    """Several MLPs as one, side by side."""
    biases = [part.read.new_zeros(part.width) if part.bias is None else part.bias for part in parts]
    return Hidden(
        torch.cat([part.read for part in parts], dim=1), torch.cat([part.write for part in parts]), torch.cat(biases)
    )


def _same_dimensions(stream: Stream, source: str, target: str) -> None:
    sizes = [stream.read(name).shape[1] for name in (source, target)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"{source!r} has {sizes[0]} dimensions and {target!r} has {sizes[1]}")
