"""Pieces of proofs about transformers: moves, products and sums of subspaces, and ridge regression as least squares.

`mov` and `mul` replace the content of the subspace `target` (`mov` at some positions), `total` adds to it; all read
before they write. Arguments name subspaces. Source: Fu et al. 2024, C.1, Proposition 1 and Lemma 1.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mechicl.constructions import Head, Layer, Stream
from mechicl.constructions.operations import check_same_dimensions, erased, joined, product
from mechicl.constructions.vocabulary import Hidden
from mechicl.prompts import Prompts


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
    check_same_dimensions(stream, source, target)
    # With one-hot positions the score of query p and key q is 1 for the pairs (to, from) and 0 for all others, so that
    # linear and ReLU attention, which sum scores times values, fetch just the source. Heads add to the stream, hence
    # the second one, which fetches the target from its own position with a minus sign.
    at = stream.read("position")
    to, origin = at[:, targets], at[:, [start for start, _ in moves]]
    copied = Head(query=to, key=origin, value=stream.read(source), output=stream.write(target))
    erased = Head(query=to, key=to, value=stream.read(target), output=-stream.write(target))
    return Layer([copied, erased])


def mul(stream: Stream, left: str, right: str, target: str) -> Hidden:
    """Multiply two subspaces elementwise by an MLP with the "square" activation: `4 a b = (a + b)² - (a - b)²`.

    Exact up to rounding, which is relative to `(|a| + |b|)²` and `(|target| + 1)²`.
    """
    check_same_dimensions(stream, left, right)
    check_same_dimensions(stream, left, target)
    return joined(product(stream.read(left), stream.read(right), stream.write(target)), erased(stream, target))


def total(stream: Stream, source: str, target: str, *, n_positions: int) -> Head:
    """Sum `source` over all positions, and add the sum to `target` at each of them, by one head of attention.

    Exact up to rounding in attention that is normalised: linear or ReLU with `normalize_by_context`, or softmax without
    a sink. All keys have equal scores, so each gets `1 / n_positions` (the number of keys; 1 without normalisation).
    """
    check_same_dimensions(stream, source, target)
    one = stream.read("position").sum(1, keepdim=True)
    return Head(query=one, key=one, value=stream.read(source), output=n_positions * stream.write(target))


def with_pseudo_examples(prompts: Prompts, penalty: float) -> Prompts:
    """Add d context points `(√λ e_i, 0)` to each prompt, on which least squares is ridge regression with penalty λ.

    On these prompts `newton(x_dim=d, n_context=n + d, steps=k, alpha=α, ...)`, with α below `2 / (λ_max + λ)²`, solves
    for `(S + λI)⁻¹ B`: in eigendirection i of S = XᵀX with relative error `(1 - α (λ_i + λ)²)^(2^k)`. With `λ = σ_ε² /
    σ_w²` (variances of noise and weights) it is the Bayes predictor. Source: the lecture notes "Transformers as
    meta-optimizers", Theorem 3.1, whose Neumann series needs many more terms.

    Args:
        prompts: prompts with n context points.
        penalty: penalty λ of ridge regression.

    Returns:
        Prompts with n + d context points, the new ones first.

    """
    n, d = len(prompts), prompts.x_dim
    xs: Tensor = math.sqrt(penalty) * torch.eye(d, dtype=prompts.dtype, device=prompts.device).expand(n, d, d)
    zeros = prompts.ys.new_zeros(n, d, prompts.y_dim)
    return Prompts(torch.cat([xs, prompts.xs], dim=1), torch.cat([zeros, prompts.ys], dim=1))
