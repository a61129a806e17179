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

from mechicl.algorithms.spectra import (
    CHUNK_ELEMENTS,
    in_parts,
    linear_trajectory,
    second_moments,
    selected,
    sums_before,
)
from mechicl.base.arguments import checked
from mechicl.base.checks import check_positive, check_whole
from mechicl.learners import Trajectory
from mechicl.prompts import PointsAt, Prompts

NO_NOISE = 1e-4
"""Without noise, contexts are taken to have this much for each unit of the weights: the evidence is finite then, and
predictions differ from the limit by about its square."""


@checked
def mixture_bayes(
    prompts: Prompts,
    *,
    noise_stds: Sequence[float],
    weight_stds: Sequence[float] = (1.0,),
    at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:
    """Posterior mean where each prompt has one of a few levels of noise and sizes of weights, all equally likely.

    A mean of ridge regressions with penalties `noise_std² / weight_std²`, weighted by the evidence of each.

    Args:
        noise_stds: standard deviations of the label noise, one for each setting, > 0.
        weight_stds: standard deviations of the weights, one for each setting or one for all.

    Source: Bai et al. 2023, on mixed noise levels.

    Example:
        >>> task = MixedRegression(x_dim=5, n_context=10)
        >>> noise_stds, weight_stds = zip(*task.settings)
        >>> prompts = task.sample(100, seed=0)
        >>> algorithms.mixture_bayes(prompts, noise_stds=noise_stds, weight_stds=weight_stds).predictions.shape
        torch.Size([1, 100, 11, 1])
    """
    stds = tuple(weight_stds) * (len(noise_stds) if len(weight_stds) == 1 else 1)
    if not noise_stds or len(stds) != len(noise_stds):
        raise ValueError(
            f"mixture_bayes needs one or more noise_stds and as many weight_stds, or one, got {noise_stds} and "
            f"{weight_stds}"
        )
    for noise_std, weight_std in zip(noise_stds, stds, strict=True):
        check_positive(noise_std=noise_std, weight_std=weight_std)
    every = torch.arange(prompts.x_dim)[None]
    models = [(every, noise_std, weight_std) for noise_std, weight_std in zip(noise_stds, stds, strict=True)]
    return _averaged(prompts, models, "Bayes over settings", at, with_weights)


@checked
def sparse_bayes(
    prompts: Prompts,
    *,
    sparsity: int,
    noise_std: float = 0.0,
    weight_std: float = 1.0,
    at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:
    """Posterior mean where `sparsity` weights are normal and the others zero, all choices of them equally likely.

    It goes through all choices of inputs: 1140 of them for 3 of 20.

    Args:
        sparsity: number of weights that are not zero, 1 to x_dim.
        noise_std: standard deviation of the label noise, >= 0; without noise `NO_NOISE` of the weights' is assumed.
        weight_std: standard deviation of the weights that are not zero, > 0.

    Source: Garg et al. 2022, section 5, for the task.

    Example:
        >>> prompts = SparseLinearRegression(x_dim=5, n_context=10, sparsity=2).sample(100, seed=0)
        >>> algorithms.sparse_bayes(prompts, sparsity=2).predictions.shape
        torch.Size([1, 100, 11, 1])
    """
    check_whole(1, sparsity=sparsity)
    check_positive(weight_std=weight_std)
    if sparsity > prompts.x_dim:
        raise ValueError(f"sparsity must be 1 to x_dim={prompts.x_dim}, got {sparsity}")
    if not (noise_std >= 0 and math.isfinite(noise_std)):
        raise ValueError(f"noise_std must be >= 0 and finite, got {noise_std}")
    supports = torch.tensor(list(itertools.combinations(range(prompts.x_dim), sparsity)))
    models = [(supports, max(noise_std, NO_NOISE * weight_std), weight_std)]
    return _averaged(prompts, models, "Bayes over supports", at, with_weights)


Models = Sequence[tuple[Int[Tensor, "support s"], float, float]]
"""Which inputs count, in each of several models of one size; their noise and their weights in standard deviations."""


def _averaged(prompts: Prompts, models: Models, name: str, at: PointsAt, with_weights: bool) -> Trajectory:
    """Posterior-weighted weights over all supports of all models."""
    per_prompt = (prompts.n_context + 1) * max(
        len(supports) * supports.shape[1] * max(supports.shape[1], prompts.y_dim) for supports, _, _ in models
    )

    def run(part: Prompts) -> Trajectory:
        second, cross = second_moments(part, at)
        squares = selected(sums_before(part.ys.double().square().sum(-1)[..., None, None])[..., 0], at)
        n_before = selected(torch.arange(part.n_context + 1, device=part.device)[None], at)[0][:, None]
        evidences, weights = [], []
        for supports, noise_std, weight_std in models:
            evidence, means = _fit(second, cross, squares, n_before, supports.to(part.device), noise_std, weight_std)
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
    n_before: Int[Tensor, "point 1"],
    supports: Int[Tensor, "support s"],
    noise_std: float,
    weight_std: float,
) -> tuple[Float[Tensor, "prompt point support"], Float[Tensor, "prompt point support s y"]]:
    """Log-evidence of each prefix, but for what all models share, and posterior mean weights, for each support.

    With A = S + (σ²/τ²) I on the support, targets have log-density `-(n/2) log σ² - log|A τ²/σ²|/2 - (YᵀY - BᵀA⁻¹B) /
    (2σ²)` for each dimension.
    """
    y_dim, size = cross.shape[-1], supports.shape[1]
    chosen = second[:, :, supports[:, :, None], supports[:, None, :]]
    targets = cross[:, :, supports]
    ratio = (noise_std / weight_std) ** 2
    factor = torch.linalg.cholesky(chosen + ratio * torch.eye(size).to(chosen))
    weights = torch.cholesky_solve(targets, factor)
    log_determinant = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - size * math.log(ratio)
    explained = (targets * weights).sum((-2, -1))
    determinant = n_before * math.log(noise_std) + log_determinant / 2
    return -y_dim * determinant - (squares - explained) / (2 * noise_std**2), weights


# ---- finite pools ----


@checked
def dmmse(
    prompts: Prompts,
    *,
    pool: Float[Tensor, "task x"] | Float[Tensor, "task x y"],
    noise_std: float,
    at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:
    """The discrete minimum mean squared error estimator: the mean of the pool's weights under their posterior.

    The best any learner can do where all tasks of the pool are equally likely and the noise is Gaussian. With a growing
    pool of draws from N(0, I) it becomes `bayes`.

    Args:
        pool: the weights of the tasks.
        noise_std: standard deviation of the label noise, >= 0; without noise the tasks nearest to the context remain.

    Source: Raventós et al. 2023, section 2.

    Example:
        >>> task = TaskPool(n_tasks=4)
        >>> prompts = task.sample(100, seed=0)
        >>> algorithms.dmmse(prompts, pool=task.weights, noise_std=task.noise_std).predictions.shape
        torch.Size([1, 100, 16, 1])
    """
    weights = _checked_pool(prompts, pool)

    def run(part: Prompts) -> Trajectory:
        posterior = _posterior(part, weights, noise_std)
        mean = einsum(posterior, weights, "prompt point task, task x y -> prompt point x y")
        return linear_trajectory(part, mean, "dMMSE", at, with_weights)

    return in_parts(prompts, (prompts.n_context + 1) * len(weights) * prompts.y_dim, run)


def pool_posterior(
    prompts: Prompts,
    *,
    pool: Float[Tensor, "task x"] | Float[Tensor, "task x y"],
    noise_std: float,
    at: PointsAt = "points",
) -> Float[Tensor, "prompt point task"]:
    """How likely each task of the pool is after the points before each point: the weights of `dmmse`, float64.

    Args:
        pool: the weights of the tasks.
        noise_std: standard deviation of the label noise, >= 0.

    Source: Raventós et al. 2023, section 2.

    Example:
        >>> task = TaskPool(n_tasks=4)
        >>> posterior = pool_posterior(task.sample(100, seed=0), pool=task.weights, noise_std=0.5)
        >>> posterior[:, 0].unique()
        tensor([0.2500], dtype=torch.float64)
    """
    weights = _checked_pool(prompts, pool)
    parts = prompts.split(max(1, CHUNK_ELEMENTS // ((prompts.n_context + 1) * len(weights) * prompts.y_dim)))
    return torch.cat([selected(_posterior(part, weights, noise_std), at) for part in parts])


def _posterior(
    prompts: Prompts, pool: Float[Tensor, "task x y"], noise_std: float
) -> Float[Tensor, "prompt point task"]:
    """Probabilities proportional to `exp(-Σ_i (y_i - x_i w)² / (2 noise_std²))`."""
    if not (noise_std >= 0 and math.isfinite(noise_std)):
        raise ValueError(f"noise_std must be >= 0 and finite, got {noise_std}")
    xs, ys = prompts.xs.double(), prompts.ys.double()
    predicted = einsum(xs, pool, "prompt point x, task x y -> prompt point task y")
    squares = (ys[:, :, None] - predicted).square().sum(-1)
    costs = sums_before(squares[..., None])[..., 0]
    excess = costs - costs.amin(-1, keepdim=True)
    scale = noise_std * math.sqrt(2)
    if scale * scale == 0:  # without noise (or so little that its square underflows) only the nearest tasks remain
        nearest = (excess <= 1e-9 * costs).double()
        return nearest / nearest.sum(-1, keepdim=True)
    return (-excess / scale**2).softmax(-1)


def _checked_pool(prompts: Prompts, pool: Tensor) -> Float[Tensor, "task x y"]:
    weights = pool[..., None] if pool.ndim == 2 else pool
    expected = (prompts.x_dim, prompts.y_dim)
    if weights.ndim != 3 or not len(weights) or weights.shape[1:] != expected or not weights.isfinite().all():
        raise ValueError(
            f"a pool of finite weights [task x] or [task x y] for {prompts} needs at least one task and x, y = "
            f"{expected}, got the shape {tuple(pool.shape)}"
        )
    return weights.to(prompts.device).double()
