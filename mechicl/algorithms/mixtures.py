"""Bayes predictors where the task is one of a finite pool, or comes from one of several Gaussian linear models.

For a Gaussian model the context's targets are jointly normal, so that its evidence and its posterior mean are known in
closed form; the best prediction is the mean of the models' predictions, weighted by evidence.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.algorithms.least_squares import EPSILON, LOST
from mechicl.algorithms.sizes import Sized
from mechicl.algorithms.spectra import ConditioningWarning, in_parts, linear_trajectory, n_before, sums_before
from mechicl.base.arguments import Count, NonNegative, Positive, checked
from mechicl.base.warning import warn
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt

NO_NOISE = 1e-4
"""The noise that contexts without noise are assumed to have, for each unit of the weights: the evidence is finite then,
and predictions differ from the limit by about its square."""


@checked
def mixture_bayes(
    prompts: Sized,
    *,
    noise_stds: Sequence[Positive],
    weight_stds: Sequence[Positive] = (1.0,),
    at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:
    """Predict the posterior mean for prompts of several kinds, each with its noise level and scale of the weights.

    All settings are equally likely. It is the mean of ridge regressions with penalties `noise_std² / weight_std²`,
    weighted by the evidence of each: the best prediction on `tasks.MixedRegression`. Source: Bai et al. 2023, on mixed
    noise levels.

    Args:
        noise_stds: standard deviations of the label noise, one for each setting.
        weight_stds: standard deviations of the weights, one for each setting or one for all.

    Warns:
        ConditioningWarning: inputs or targets are so large next to the noise that few digits of the evidence are right.
    """
    stds = tuple(weight_stds) * (len(noise_stds) if len(weight_stds) == 1 else 1)
    if not noise_stds or len(stds) != len(noise_stds):
        raise ValueError(f"weight_stds must be one, or one for each of noise_stds, got {weight_stds} for {noise_stds}")
    supports = torch.arange(prompts.x_dim).expand(len(stds), -1)
    return _averaged(prompts, supports, tuple(noise_stds), stds, "Bayes over settings", at, with_weights)


@checked
def sparse_bayes(
    prompts: Sized,
    *,
    sparsity: Count,
    noise_std: NonNegative = 0.0,
    weight_std: Positive = 1.0,
    at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:
    """Predict the posterior mean where `sparsity` of the weights, at unknown places, are normal and all others 0.

    All choices of inputs are equally likely, and all are tried: 1140 of them for 3 of 20. Source: Garg et al. 2022,
    section 5, for the task.

    Args:
        sparsity: number of weights that are not zero, 1 to x_dim.
        noise_std: standard deviation of the label noise; below 1e-4 times `weight_std`, that value is assumed.
        weight_std: standard deviation of the weights that are not zero.

    Warns:
        ConditioningWarning: inputs or targets are so large next to the noise that few digits of the evidence are right.
    """
    if sparsity > prompts.x_dim:
        raise ValueError(f"sparsity must be 1 to x_dim={prompts.x_dim}, got {sparsity}")
    supports = torch.tensor(list(itertools.combinations(range(prompts.x_dim), sparsity)))
    noise_std = max(noise_std, NO_NOISE * weight_std)
    return _averaged(prompts, supports, (noise_std,), (weight_std,), "Bayes over supports", at, with_weights)


def _averaged(
    prompts: Prompts,
    supports: Int[Tensor, "model s"],
    noise_stds: Sequence[float],
    weight_stds: Sequence[float],
    name: str,
    at: PointsAt,
    with_weights: bool,
) -> Trajectory:
    """Average the weights over all models by their posterior.

    A model has the inputs that count, and a noise level and a scale of the weights, each one for all or one a model.
    """
    supports = supports.to(prompts.device)
    noises, scales = (
        torch.tensor(stds, dtype=torch.float64, device=prompts.device) for stds in (noise_stds, weight_stds)
    )
    errors = []

    def run(part: Prompts) -> Trajectory:
        evidence, weights, error = _fit(part, supports, noises, scales, at)
        errors.append(error)
        places = torch.nn.functional.one_hot(supports, part.x_dim).double()
        posterior = evidence.softmax(-1)
        mean = einsum(posterior, weights, places, "prompt point k, prompt point k s y, k s x -> prompt point x y")
        return linear_trajectory(part, mean, name, at, with_weights)

    n_points = prompts.n_context + 1 if at == "points" else 1
    size = supports.shape[1]
    fitted = in_parts(prompts, max(n_points * supports.numel() * (size + prompts.y_dim), prompts.x_dim**2), run)
    if (error := max(errors)) > LOST:
        warn(
            f"{name} weights models by residuals that rounding changes by up to {error:.1g} of the noise: divide "
            "inputs and targets by a constant, or assume more noise",
            ConditioningWarning,
        )
    return fitted


def _fit(
    prompts: Prompts,
    supports: Int[Tensor, "model s"],
    noise_std: Float[Tensor, "#model"],
    weight_std: Float[Tensor, "#model"],
    at: PointsAt,
) -> tuple[Float[Tensor, "prompt point model"], Float[Tensor, "prompt point model s y"], float]:
    """Return the log-evidence of each prefix, up to a constant, and the posterior mean weights, for each model.

    With A = S + (σ²/τ²) I on the support, targets have log-density
    `-(n/2) log σ² - log|A τ²/σ²|/2 - (YᵀY - BᵀA⁻¹B) / (2σ²)` for each dimension. Neither A nor the difference is
    computed, which lose digits: Givens rotations add point after point to the triangle R of [X Y], with A = RᵀR, and
    leave residuals, whose squares sum to the difference. The third result is the rounding of residuals over σ.
    """
    least = 1e-150  # whose square does not underflow
    noise_std, size = noise_std.clamp(min=least), supports.shape[1]
    ratio = (noise_std / weight_std).clamp(min=least)[:, None]
    xs, ys = prompts.xs.double(), prompts.ys.double()
    start = torch.eye(size, size + prompts.y_dim).to(xs)
    rows = list((ratio[..., None] * start).expand(len(xs), len(supports), -1, -1).unbind(-2))
    triangles, costs = [torch.stack(rows, -2)], [xs.new_zeros(len(xs), len(supports))]
    for x, y in zip(xs[:, :-1].unbind(1), ys.unbind(1), strict=False):
        point = torch.cat([x[:, supports], y[:, None].expand(-1, len(supports), -1)], -1)
        for i, row in enumerate(rows):
            length = torch.hypot(row[..., i : i + 1], point[..., i : i + 1])
            cosine, sine = row[..., i : i + 1] / length, point[..., i : i + 1] / length
            rows[i], point = cosine * row + sine * point, cosine * point - sine * row
        cost = costs[-1] + (point[..., size:] / noise_std[:, None]).square().sum(-1)
        costs = [*(costs if at == "points" else ()), cost.clamp(max=1e300)]
        triangles = [*(triangles if at == "points" else ()), torch.stack(rows, -2)]
    right, solved = torch.stack(triangles, 1).split([size, prompts.y_dim], -1)
    weights = torch.linalg.solve_triangular(right, solved, upper=True)
    determinant = n_before(prompts, at).double()[:, None] * noise_std.log()
    determinant = determinant + (right.diagonal(dim1=-2, dim2=-1) / ratio).log().sum(-1)
    largest_x, largest_y = (max(each.detach().flatten(1).norm(dim=-1).tolist(), default=0.0) for each in (xs, ys))
    error = EPSILON * torch.maximum(largest_x / ratio[:, 0], largest_y / noise_std).amax().item()
    return -prompts.y_dim * determinant - torch.stack(costs, 1) / 2, weights, error


# ---- finite pools ----


@checked
def dmmse(
    prompts: Sized,
    *,
    pool: Float[Tensor, "task x"] | Float[Tensor, "task x y"],
    noise_std: NonNegative,
    at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:
    """Predict by the posterior mean of a finite pool of weights: the discrete minimum mean squared error estimator.

    It is Bayes-optimal if all tasks of the pool are equally likely and the noise is Gaussian: a model near it has
    learned the pool by heart. With a growing pool of draws from N(0, I) it becomes `bayes`. Source: Raventós et al.
    2023, section 2.

    Args:
        pool: weights of the tasks: `[task x]` for one target, or `[task x y]`.
        noise_std: standard deviation of the label noise; with 0 the average runs over the tasks with the smallest error
            on the earlier points.
    """
    weights = _checked_pool(prompts, pool)

    def run(part: Prompts) -> Trajectory:
        mean = einsum(_posterior(part, weights, noise_std), weights, "prompt point task, task x y -> prompt point x y")
        return linear_trajectory(part, mean, "dMMSE", at, with_weights)

    return in_parts(prompts, (prompts.n_context + 1) * len(weights) * prompts.y_dim, run)


def _posterior(
    prompts: Prompts, pool: Float[Tensor, "task x y"], noise_std: float
) -> Float[Tensor, "prompt point task"]:
    """Return probabilities proportional to `exp(-Σ_i (y_i - x_i w)² / (2 noise_std²))`."""
    xs, ys = prompts.xs.double(), prompts.ys.double()
    predicted = einsum(xs, pool, "prompt point x, task x y -> prompt point task y")
    squares = (ys[:, :, None] - predicted).square().sum(-1)
    costs = sums_before(squares)
    excess = costs - costs.amin(-1, keepdim=True)
    scale = noise_std * math.sqrt(2)
    if scale * scale == 0:  # without noise (or so little that its square underflows) only the nearest tasks remain
        nearest = (excess <= 1e-9 * costs).double()
        return nearest / nearest.sum(-1, keepdim=True)
    return (-excess / scale / scale).softmax(-1)


def _checked_pool(prompts: Prompts, pool: Tensor) -> Float[Tensor, "task x y"]:
    weights = pool[..., None] if pool.ndim == 2 else pool
    expected = (prompts.x_dim, prompts.y_dim)
    if weights.ndim != 3 or not len(weights) or weights.shape[1:] != expected:
        raise ValueError(f"pool must be [task x] or [task x y] with x, y = {expected}, got shape {tuple(pool.shape)}")
    return weights.to(prompts.device).double()
