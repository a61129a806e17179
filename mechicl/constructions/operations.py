"""MLPs that compute: affine maps, products and quotients of subspaces.

`aff` and `div` replace the content of the subspace `target`, and read before they write; arguments name subspaces.
Source: Fu et al. 2024, C.1, Proposition 1.
"""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.constructions.vocabulary import Hidden, Layer, Stream


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
    check_same_dimensions(stream, numerator, target)
    check_same_dimensions(stream, denominator, scratch)
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
        product(stream.read(scratch).expand(-1, size), stream.read(target), stream.write(target)),  # v e
        Hidden(read=stream.read(scratch), write=stream.write(scratch)),  # e²
        erased(stream, scratch),
    )
    return [Layer(mlp=start), *[Layer(mlp=step)] * steps]


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


def check_same_dimensions(stream: Stream, source: str, target: str) -> None:
    """Refuse subspaces of different dimensions."""
    sizes = [stream.read(name).shape[1] for name in (source, target)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"{source!r} and {target!r} must have the same dimension, got {sizes[0]} and {sizes[1]}")
