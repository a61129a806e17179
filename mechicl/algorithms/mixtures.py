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

from mechicl.algorithms.sizes import Sized
from mechicl.algorithms.spectra import context_moments, in_parts, linear_trajectory, n_before, selected, sums_before
from mechicl.base.arguments import Count, NonNegative, Positive, checked
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
    """
    stds = tuple(weight_stds) * (len(noise_stds) if len(weight_stds) == 1 else 1)
    if not noise_stds or len(stds) != len(noise_stds):
        raise ValueError(f"weight_stds must be one, or one for each of noise_stds, got {weight_stds} for {noise_stds}")
    every = torch.arange(prompts.x_dim)[None]
    models = [(every, noise_std, weight_std) for noise_std, weight_std in zip(noise_stds, stds, strict=True)]
    return _averaged(prompts, models, "Bayes over settings", at, with_weights)


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
    """
    if sparsity > prompts.x_dim:
        raise ValueError(f"sparsity must be 1 to x_dim={prompts.x_dim}, got {sparsity}")
    supports = torch.tensor(list(itertools.combinations(range(prompts.x_dim), sparsity)))
    models = [(supports, max(noise_std, NO_NOISE * weight_std), weight_std)]
    return _averaged(prompts, models, "Bayes over supports", at, with_weights)


_Models = Sequence[tuple[Int[Tensor, "support s"], float, float]]
"""The inputs that count, in each of several models of one size; standard deviations of their noise and weights."""


def _averaged(prompts: Prompts, models: _Models, name: str, at: PointsAt, with_weights: bool) -> Trajectory:
    """Average the weights over all supports of all models by their posterior."""
    per_prompt = (prompts.n_context + 1) * max(
        len(supports) * supports.shape[1] * max(supports.shape[1], prompts.y_dim) for supports, _, _ in models
    )

    def run(part: Prompts) -> Trajectory:
        second, cross = context_moments(part, at)
        squares = selected(sums_before(part.ys.double().square().sum(-1)[..., None, None])[..., 0], at)
        numbers = n_before(part, at)[:, None]
        evidences, weights = [], []
        for supports, noise_std, weight_std in models:
            evidence, means = _fit(second, cross, squares, numbers, supports.to(part.device), noise_std, weight_std)
            evidences.append(evidence)
            weights.append((means, torch.nn.functional.one_hot(supports, part.x_dim).to(second)))
        posterior = torch.cat(evidences, -1).softmax(-1).split([each.shape[-1] for each in evidences], -1)
        mean = torch.stack([
            einsum(p, w, places, "prompt point k, prompt point k s y, k s x -> prompt point x y")
            for p, (w, places) in zip(posterior, weights, strict=True)
        ]).sum(0)  # fmt: skip
        return linear_trajectory(part, mean, name, at, with_weights)

    return in_parts(prompts, max(per_prompt, prompts.x_dim**2), run)


def _fit(
    second: Float[Tensor, "prompt point x x"],
    cross: Float[Tensor, "prompt point x y"],
    squares: Float[Tensor, "prompt point 1"],
    numbers: Int[Tensor, "point 1"],
    supports: Int[Tensor, "support s"],
    noise_std: float,
    weight_std: float,
) -> tuple[Float[Tensor, "prompt point support"], Float[Tensor, "prompt point support s y"]]:
    """Return the log-evidence of each prefix, up to a constant, and posterior mean weights, for each support.

    With A = S + (σ²/τ²) I on the support, targets have log-density
    `-(n/2) log σ² - log|A τ²/σ²|/2 - (YᵀY - BᵀA⁻¹B) / (2σ²)` for each dimension.
    """
    y_dim, size = cross.shape[-1], supports.shape[1]
    chosen = second[:, :, supports[:, :, None], supports[:, None, :]]
    targets = cross[:, :, supports]
    ratio = (noise_std / weight_std) ** 2
    factor = torch.linalg.cholesky(chosen + ratio * torch.eye(size).to(chosen))
    weights = torch.cholesky_solve(targets, factor)
    log_determinant = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - size * math.log(ratio)
    explained = (targets * weights).sum((-2, -1))
    determinant = numbers.double() * math.log(noise_std) + log_determinant / 2
    return -y_dim * determinant - (squares - explained) / noise_std / (2 * noise_std), weights


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
    costs = sums_before(squares[..., None])[..., 0]
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
