"""First-order methods beside plain gradient descent: preconditioned, the best polynomial, and one point at a time."""

import functools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.spectra import (
    CHUNK_ELEMENTS,
    above_rounding,
    checked_steps,
    linear_trajectory,
    selected,
    spectral_trajectory,
    sums_before,
)
from mechicl.algorithms.stability import TOLERANCE, warn_where_most_diverge
from mechicl.learners import Trajectory
from mechicl.prompts import PointsAt, Prompts


def preconditioned_gd(
    prompts: Prompts,
    steps: int | Sequence[int] = 1,
    *,
    preconditioner: Float[Tensor, "x x"] | Sequence[Float[Tensor, "x x"]],
    at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:
    """Preconditioned gradient descent on the mean squared error: `W_{k+1} = W_k - A_k (S W_k - B) / n`, from 0.

    Args:
        prompts: each prefix is a context of its own, with n its number of points; the empty one predicts 0.
        steps: numbers of steps.
        preconditioner: A `[x x]`, or one a step.
        at: predict all "points", each from those before it, or the "query" alone.
        with_weights: also return the weights `[step prompt point x y]` that predictions come from.

    Raises:
        ValueError: a preconditioner of another shape, or fewer of them than steps.

    Warns:
        DivergenceWarning: more than one step, and on more than half of the full contexts of the first 256 prompts the
            product of the steps' `I - A_k S / n` has a spectral radius above 1: repeating the steps makes errors grow.

    Source: Nertinger 2025, Theorem 1 and section 2, where the sign is printed as plus.
    """
    numbers = checked_steps(steps)
    matrices = [preconditioner] * max(numbers) if isinstance(preconditioner, Tensor) else list(preconditioner)
    shape = (prompts.x_dim, prompts.x_dim)
    if len(matrices) < max(numbers) or any(matrix.shape != shape for matrix in matrices):
        raise ValueError(
            f"preconditioner must be [x x] = {shape}, one or {max(numbers)} of them; got "
            f"{[tuple(matrix.shape) for matrix in matrices]}"
        )
    n_points = prompts.n_context + 1
    parts, weight_parts = [], []
    for part in prompts.split(max(1, CHUNK_ELEMENTS // (n_points * prompts.x_dim * max(prompts.x_dim, prompts.y_dim)))):
        xs, ys = part.xs.double(), part.ys.double()
        n = torch.arange(n_points, device=xs.device).clamp(min=1)[:, None, None]
        second = selected(sums_before(xs[..., :, None] * xs[..., None, :]) / n, at)
        cross = selected(sums_before(xs[..., :, None] * ys[..., None, :]) / n, at)
        weights = torch.zeros_like(cross)
        after = [weights]
        for matrix in matrices[: max(numbers)]:
            weights = weights - matrix.to(xs) @ (second @ weights - cross)
            after.append(weights)
        reached = torch.stack([after[k] for k in numbers])
        parts.append((selected(xs, at)[..., None, :] @ reached)[..., 0, :].to(prompts.dtype))
        if with_weights:
            weight_parts.append(reached.to(prompts.dtype))
    if max(numbers) > 1:
        _warn_of_growth(prompts[:256], matrices[:1] if isinstance(preconditioner, Tensor) else matrices[: max(numbers)])
    weights = torch.cat(weight_parts, dim=1) if with_weights else None
    return Trajectory(numbers, torch.cat(parts, dim=1), "preconditioned GD", weights)


def _warn_of_growth(prompts: Prompts, matrices: Sequence[Tensor]) -> None:
    context = prompts.context.xs.detach().double()
    second = context.mT @ context / max(1, prompts.n_context)
    steps = [torch.eye(prompts.x_dim).to(context) - matrix.detach().to(context) @ second for matrix in matrices]
    # the product of all steps' matrices, last one leftmost: W_K - W is this times W_0 - W
    errors = functools.reduce(lambda before, step: step @ before, steps)
    finite = errors.isfinite().all(-1).all(-1)
    radius = torch.linalg.eigvals(errors.where(finite[:, None, None], 0.0)).abs().amax(-1)
    radius = radius.where(finite, math.inf)
    quantity = "the spectral radius of " + ("I - A S / n" if len(matrices) == 1 else "the product of all I - A_k S / n")
    warn_where_most_diverge("preconditioned GD", radius > 1 + TOLERANCE, f"if {quantity} is at most 1", "it", radius)


def chebyshev(
    prompts: Prompts, steps: int | Sequence[int] = 1, *, at: PointsAt = "points", with_weights: bool = False
) -> Trajectory:
    """The best polynomial of each degree on the interval of S's eigenvalues: the limit for first-order methods.

    After k steps the residual is `T_k(z(λ)) / T_k(z(0))` with z mapping `[λ_min, λ_max]`, over the directions that the
    prefix reaches, onto [-1, 1] and T_k the Chebyshev polynomial. No method whose weights after k steps are a
    polynomial of degree k - 1 in S times B has a smaller largest residual on that interval.

    Args:
        prompts: each prefix is a context of its own; the empty one predicts 0.
        steps: degrees k; 0 predicts 0.
        at: predict all "points", each from those before it, or the "query" alone.
        with_weights: also return the weights `[step prompt point x y]` that predictions come from.

    Source: Golub & Varga 1961; the comparison is that of Fu et al. 2024, section 4, with the best method in place of
    gradient descent.
    """
    numbers = checked_steps(steps)

    def filters(eigenvalues: Tensor) -> Tensor:
        return torch.stack([chebyshev_filter(eigenvalues, k) for k in numbers])

    return spectral_trajectory(prompts, filters, name="Chebyshev", steps=numbers, at=at, with_weights=with_weights)


def chebyshev_filter(eigenvalues: Float[Tensor, "*any x"], degree: int) -> Float[Tensor, "*any x"]:
    """`(1 - T_k(z(λ)) / T_k(z(0))) / λ` on the interval that the present eigenvalues of a prefix span, 0 at the others.

    Args:
        eigenvalues: λ >= 0 of each prefix's S; below `1e-13 x` of the largest they count as absent.
        degree: k.
    """
    # A polynomial method's residual after k steps is a polynomial r(λ) = 1 - λ f(λ) of degree k with r(0) = 1. Among
    # these T_k(z(λ)) / T_k(z(0)) is the smallest on [λ_min, λ_max]: it swings k + 1 times between ±1 / T_k(z(0)), and
    # its difference from a smaller one would have k roots there besides the one at 0, too many for its degree.
    # An eigenvalue that is rounding noise would stretch the interval to 0, where no method converges.
    largest = eigenvalues.amax(-1, keepdim=True)
    present = above_rounding(eigenvalues)
    smallest = eigenvalues.masked_fill(~present, math.inf).amin(-1, keepdim=True)
    spread = (largest - smallest).nan_to_num(0.0, 0.0, 0.0)
    point_like = spread <= 1e-12 * largest  # one eigenvalue: the first step solves it
    width = spread.masked_fill(point_like, 1.0)
    z = (largest + smallest - 2 * eigenvalues) / width
    z_at_zero = (largest + smallest) / width
    # T_k(cos φ) = cos kφ inside [-1, 1], where the λ are, and T_k(cosh φ) = cosh kφ beyond, where 0 is: no recursion,
    # and no overflow for any degree
    residual = torch.cos(degree * torch.acos(z.clamp(-1, 1)))
    residual = residual * _reciprocal_cosh(degree * torch.acosh(z_at_zero.clamp(min=1)))
    residual = torch.where(point_like, 1.0 if degree == 0 else 0.0, residual)
    return torch.where(present, (1 - residual) / eigenvalues.masked_fill(~present, 1.0), 0.0)


def _reciprocal_cosh(angle: Tensor) -> Tensor:
    return 2 * torch.exp(-angle) / (1 + torch.exp(-2 * angle))  # where cosh would overflow, this is 0


def online_gradient_descent(
    prompts: Prompts, *, step_size: float | None = None, at: PointsAt = "points", with_weights: bool = False
) -> Trajectory:
    """One pass of gradient descent over the context, one point a step, in the order of the prompt.

    `W ← W - a_t x_t (x_t W - y_t)`, from 0.

    Args:
        prompts: the order of their points matters.
        step_size: a, the same for all points; by default `1 / |x_t|²`, with which each point is fitted exactly as it
            passes (and points at 0 are passed over).
        at: predict all "points", each from those before it, or the "query" alone.
        with_weights: also return the weights `[step prompt point x y]` that predictions come from.

    Raises:
        ValueError: a step size that is not finite.

    Source: Fu et al. 2024, section 3.2 and Table 1.
    """
    if step_size is not None and not math.isfinite(step_size):
        raise ValueError(f"step_size must be finite, got {step_size}")
    xs, ys = prompts.xs.double(), prompts.ys.double()
    weights = xs.new_zeros(len(prompts), prompts.x_dim, prompts.y_dim)
    before = []
    for t in range(prompts.n_context + 1):
        x = xs[:, t, None]
        before.append(weights)
        squared = x.square().sum(-1, keepdim=True)
        if step_size is None:
            rate = torch.where(squared > 0, 1 / squared.masked_fill(squared == 0, 1.0), 0.0)
        else:
            rate = torch.full_like(squared, step_size)
        weights = weights - rate * x.mT @ (x @ weights - ys[:, t, None])
    return linear_trajectory(prompts, torch.stack(before, dim=1), "online GD", at, with_weights)
