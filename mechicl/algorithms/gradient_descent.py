"""Gradient descent on the context's squared error, plain and with the data transformation of GD++."""

import math
import reprlib
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.sizes import Sized
from mechicl.algorithms.spectra import Steps, spectral_trajectory, step_numbers
from mechicl.base.arguments import checked
from mechicl.learners import Trajectory
from mechicl.prompts.prompts import PointsAt


@checked
def gradient_descent(
    prompts: Sized,
    steps: Steps = 1,
    *,
    step_size: float | Sequence[float],
    per_prefix: bool = False,
    initial_weights: Float[Tensor, "x y"] | None = None,
    at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:
    """Run gradient descent on `Σ_i (x_i W - y_i)² / 2`, summed over the points before the predicted one; predict `x W`.

    Any number of steps costs the same. With λ_max the largest eigenvalue of S = XᵀX, the iteration diverges for a step
    size below 0 or above 2/λ_max. Source: von Oswald et al. 2023, section 2, eq. 3.

    Args:
        steps: number of steps, or several; 0 gives the initial prediction.
        step_size: a, the factor on the summed gradient: one number, or one for each step up to the largest of `steps`.
            Von Oswald et al.'s η is `a * n_context`.
        per_prefix: step sizes are in units of `1 / λ_max` of each prefix: 1 suits all prefixes, as Newton's default
            `alpha` does. Otherwise they are the same for all.
        initial_weights: W_0 `[x y]` of every run; 0 by default.

    Warns:
        DivergenceWarning: it diverges on more than half of the full contexts, in more than one step.

    Example:
        >>> prompts = LinearRegression().sample(4, seed=0)
        >>> gradient_descent(prompts, steps=[1, 10, 100], step_size=0.6).predictions.shape
        torch.Size([3, 4, 11, 1])
    """
    numbers = step_numbers(steps)
    sizes = per_step("step_size", step_size, 1 if isinstance(step_size, int | float) else max(numbers))

    def filters(eigenvalues: Tensor) -> Tensor:
        largest = eigenvalues.amax(-1, keepdim=True) if per_prefix else torch.ones(1).to(eigenvalues)
        each = [size / largest.clamp(min=1e-300) for size in sizes]
        if isinstance(step_size, int | float):
            return torch.stack([gradient_descent_filter(eigenvalues, k, each[0]) for k in numbers])
        return gd_plus_plus_filters(eigenvalues, each, [0.0] * len(each))[list(numbers)]

    return spectral_trajectory(
        prompts,
        filters,
        name="gradient descent, per prefix" if per_prefix else "gradient descent",
        steps=numbers,
        at=at,
        with_weights=with_weights,
        initial_weights=initial_weights,
        parameters=f"step_size={reprlib.repr(step_size)}",
    )


def gradient_descent_filter(
    eigenvalues: Float[Tensor, "*any"], steps: int, step_size: float | Tensor
) -> Float[Tensor, "..."]:
    """Return `(1 - (1 - aλ)^k) / λ`, and its limit `k a` at λ = 0, without cancellation for small λ.

    Differentiable with respect to the step size a, a number or a tensor that broadcasts, unless it has diverged.
    """
    # In an eigendirection the weight w moves by w ← w - a (λ w - b): the distance to its end b / λ shrinks by 1 - aλ a
    # step, so from 0 it has come 1 - (1 - aλ)^k of the way. That difference loses all digits where aλ is near rounding,
    # so there it is -expm1(k log1p(-aλ)), which is exact for small arguments. Elsewhere 1 - aλ may be negative, which
    # has no logarithm, and the plain power is accurate.
    scaled = step_size * eigenvalues
    small = scaled.abs() < 0.5
    gentle = -torch.expm1(steps * torch.log1p(-scaled.masked_fill(~small, 0.0)))
    progress = torch.where(small, gentle, 1 - (1 - scaled) ** steps)
    # below 1e-300, near the least normal float64 (2e-308), a λ and 1 / λ lose digits, overflow or are 0 / 0; the limit
    # k a is exact there for any number of steps that can be run
    tiny = eigenvalues < 1e-300
    return torch.where(tiny, steps * step_size, progress / eigenvalues.masked_fill(tiny, 1.0))


@checked
def gd_plus_plus(
    prompts: Sized,
    steps: Steps = 1,
    *,
    step_size: float | Sequence[float],
    gamma: float | Sequence[float],
    at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:
    """Run GD++: after each step of gradient descent all inputs, the query's too, become `x - γ x S`.

    Step: `ΔW = a XᵀY`, `y ← y - x ΔW`, `x ← x - γ x S`, with the current X and `S = XᵀX` of the points before the
    predicted one; the prediction is the sum of the query's `x ΔW`. All steps are computed in the eigenbasis of the
    first S. Source: von Oswald et al. 2023, appendix A.10, eq. 23.

    Args:
        step_size: a, the factor on the summed gradient: one number, or one for each step up to the largest of `steps`.
        gamma: γ, the factor on the summed S: one number, or one for each step up to the largest of `steps`.

    Warns:
        DivergenceWarning: the residual grows on more than half of the full contexts, in more than one step. It does not
            where every a and γ is between 0 and 2/λ_max of the first S.
    """
    numbers = step_numbers(steps)
    step_sizes, gammas = per_step("step_size", step_size, max(numbers)), per_step("gamma", gamma, max(numbers))
    return spectral_trajectory(
        prompts,
        lambda eigenvalues: gd_plus_plus_filters(eigenvalues, step_sizes, gammas)[list(numbers)],
        name="GD++",
        steps=numbers,
        at=at,
        with_weights=with_weights,
        parameters=f"step_size={reprlib.repr(step_size)}, gamma={reprlib.repr(gamma)}",
    )


def gd_plus_plus_filters(
    eigenvalues: Float[Tensor, "*any"],
    step_sizes: Sequence[float] | Sequence[Tensor] | Float[Tensor, "step *extra"],
    gammas: Sequence[float] | Sequence[Tensor] | Float[Tensor, "step *extra"],
) -> Float[Tensor, "after ..."]:
    """Return the filters of GD++ after 0, 1, 2, ... steps: `Σ_i a_i (λ_i / λ) Π_{j<i} (1 - a_j λ_j)`, differentiable.

    Before step i an input has the eigenvalue `λ_i`: `λ_0 = λ`, `λ_{i+1} = λ_i (1 - γ_i λ_i)²`.
    """
    # All tokens' coordinates along one eigenvector are multiplied alike, by 1 - γ λ_i, so two numbers describe them:
    # x = stretch * x_0, and XᵀY = moment * X_0ᵀY_0. A step predicts a x XᵀY = a stretch moment x_0 B, takes a λ_i of
    # the targets' part that lies along X, and then stretches X, once more in XᵀY.
    stretch = torch.ones_like(eigenvalues)
    moment = torch.ones_like(eigenvalues)
    total = torch.zeros_like(eigenvalues)
    after = [total]
    for a, g in zip(step_sizes, gammas, strict=True):
        current = eigenvalues * stretch.square()
        total = total + a * stretch * moment
        moment = moment * (1 - g * current) * (1 - a * current)
        stretch = stretch * (1 - g * current)
        after.append(total)
    return torch.stack(torch.broadcast_tensors(*after))


def momentum_filter(
    eigenvalues: Float[Tensor, "*any"], steps: int, step_size: float | Tensor, momentum: float | Tensor
) -> Float[Tensor, "..."]:
    """Return the filter of momentum descent (Polyak 1964): `v ← β v + a (1 - λ f)`, `f ← f + v`, from 0."""
    total = velocity = torch.zeros_like(eigenvalues)
    for _ in range(steps):
        velocity = momentum * velocity + step_size * (1 - eigenvalues * total)
        total = total + velocity
    return total


def per_step(name: str, value: float | Sequence[float], steps: int) -> list[float]:
    """Return a parameter as one finite number a step."""
    values = [float(value)] * steps if isinstance(value, (int, float)) else [float(v) for v in value]
    if len(values) != steps or not all(map(math.isfinite, values)):
        raise ValueError(f"{name} must be a finite number or {steps} of them, one a step, got {reprlib.repr(value)}")
    return values
