"""Iterative Newton for the inverse of the context's second moments, and its view as a polynomial in them."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.spectra import checked_steps, spectral_trajectory
from mechicl.base.checks import check_positive
from mechicl.learners import Trajectory
from mechicl.prompts import PointsAt, Prompts


def newton(
    prompts: Prompts,
    steps: int | Sequence[int] = 1,
    *,
    alpha: float | None = None,
    at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:
    """Iterative Newton: `M_0 = αS`, `M_{k+1} = 2 M_k - M_k S M_k`, prediction `x M_k B`.

    In the eigenbasis M_k is `newton_filter`, so that any number of steps costs the same.

    Args:
        prompts: each prefix is a context of its own; the empty one predicts 0.
        steps: numbers of iterations, in any order; 0 gives `x αS B`.
        alpha: α, the same for all prefixes; by default `1 / ‖S Sᵀ‖_F` of each prefix.
        at: predict all "points", each from those before it, or the "query" alone.
        with_weights: also return the weights `[step prompt point x y]` that predictions come from.

    Raises:
        ValueError: an alpha that is not positive, or too large to converge on one of the prefixes: `α ≥ 2 / λ_max²`.

    Source: Fu et al. 2024, section 3.2 and C.3, whose `α = 2 / ‖S Sᵀ‖₂` is on the boundary and does not converge; the
    authors' code has the default.

    Example:
        >>> newton(LinearRegression().sample(4, seed=0), steps=[0, 5, 10]).predictions.shape
        torch.Size([3, 4, 11, 1])
    """
    numbers = checked_steps(steps)
    if alpha is not None:
        check_positive(alpha=alpha)

    def filters(eigenvalues: Tensor) -> Tensor:
        squared = eigenvalues.square()
        if alpha is None:
            # ‖S Sᵀ‖_F = ‖λ²‖ >= λ_max², so that 0 < αλ² <= 1 and all errors 1 - αλ² lie in [0, 1): it converges for
            # every context, needs no eigenvalue of its own in a network, and is α = 1 / λ_max² for a single direction.
            # In a prefix of zeros any α does; 1e-300 only keeps it finite.
            each = 1 / squared.norm(dim=-1, keepdim=True).clamp(min=1e-300)
        else:
            each = alpha
            if bool((alpha * squared >= 2).any()):
                limit = 2 / squared.max().item()
                raise ValueError(f"alpha={alpha:g} does not converge: on these prompts it must be below {limit:g}")
        return torch.stack([newton_filter(eigenvalues, k, each) for k in numbers])

    return spectral_trajectory(prompts, filters, name="Newton", steps=numbers, at=at, with_weights=with_weights)


def newton_filter(eigenvalues: Float[Tensor, "*any"], steps: int, alpha: float | Tensor) -> Float[Tensor, "..."]:
    """`m_k = (1 - (1 - αλ²)^(2^k)) / λ`, and its limit 0 at λ = 0, without cancellation for small λ.

    Differentiable with respect to α, as long as no direction has diverged to infinity.

    Args:
        eigenvalues: λ >= 0.
        steps: k.
        alpha: α, a number or a tensor that broadcasts against the eigenvalues; it converges for `0 < αλ² < 2`.
    """
    # In an eigendirection m ← 2m - λm² = m (2 - λm), so the error 1 - λm is squared: from the first, 1 - αλ², k times.
    # Where that is near 1 the difference loses digits: see `gradient_descent_filter`.
    scaled = alpha * eigenvalues.square()
    small = scaled < 0.5
    gentle = -torch.expm1(2.0**steps * torch.log1p(-scaled.masked_fill(~small, 0.0)))
    # an even power beyond k = 0, so that the sign of 1 - αλ² matters only there
    rest = 1 - scaled if steps == 0 else (1 - scaled).abs() ** (2.0**steps)
    progress = torch.where(small, gentle, 1 - rest)
    present = eigenvalues > 0
    return torch.where(present, progress / eigenvalues.masked_fill(~present, 1.0), 0.0)


def newton_moments(steps: int, alpha: float) -> list[float]:
    """Coefficients β of Newton's `M_k` as a polynomial in S: entry s belongs to `S^(2s+1)`, s = 0 .. 2^k - 1.

    `β_s = (-1)^s C(2^k, s+1) α^(s+1)`: `M_1 = 2αS - α²S³`, `M_2 = 4αS - 6α²S³ + 4α³S⁵ - α⁴S⁷`.

    Args:
        steps: k.
        alpha: α.

    Raises:
        ValueError: steps is no whole number >= 0.

    Source: Fu et al. 2024, section 3 and C.3, which print other coefficients (4α² and 4, 12, 16, 16).
    """
    (steps,) = checked_steps([steps])
    return [(-1) ** s * math.comb(2**steps, s + 1) * alpha ** (s + 1) for s in range(2**steps)]
