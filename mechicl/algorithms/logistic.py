"""Regularised logistic regression on labels -1 and 1, and its Bayes predictor to second order."""

import math
from typing import Literal

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.spectra import CHUNK_ELEMENTS, joined_trajectory, selected
from mechicl.base.checks import check_positive
from mechicl.learners import Trajectory
from mechicl.prompts import PointsAt, Prompts

MAX_STEPS = 50
N_NODES = 32  # of Gauss-Hermite quadrature over the query's score


def logistic(
    prompts: Prompts,
    *,
    weight_std: float = 1.0,
    posterior: Literal["mode", "laplace"] = "laplace",
    at: PointsAt = "points",
) -> Trajectory:
    """The expected label, between -1 and 1, where `P(y = 1) = 1 / (1 + exp(-x w))` with weights N(0, weight_std²).

    Newton's method finds the weights of largest posterior density, those of logistic regression with the penalty
    `|w|² / (2 weight_std²)`. "mode" predicts with these, `tanh(x w / 2)`; "laplace" averages over the normal
    distribution that has the posterior's curvature there, which is nearer to exact Bayes.

    Args:
        prompts: labels -1 and 1; each prefix is a context of its own; the empty one predicts 0.
        weight_std: standard deviation of the weights, > 0: the larger, the less is regularised.
        posterior: see above.
        at: predict all "points", each from those before it, or the "query" alone.

    Raises:
        ValueError: labels other than -1 and 1, an unknown posterior, or a weight_std out of range.

    Source: Bai et al. 2023; MacKay 1992 for the average.

    Example:
        >>> prompts = LogisticRegression(x_dim=3).sample(100, seed=0)
        >>> bool(algorithms.logistic(prompts).predictions.abs().max() <= 1)
        True
    """
    check_positive(weight_std=weight_std)
    if posterior not in ("mode", "laplace"):
        raise ValueError(f"posterior must be 'mode' or 'laplace', got {posterior!r}")
    labels = prompts.ys[:, :-1]
    if not (labels.abs() == 1).all():
        wrong = labels[labels.abs() != 1].flatten()[0].item()
        raise ValueError(f"labels of the context must be -1 or 1, got {wrong:g}")
    n_points = prompts.n_context + 1
    parts = []
    for part in prompts.split(max(1, CHUNK_ELEMENTS // (4 * n_points * max(n_points, prompts.x_dim**2)))):
        targets = [_predict(part, k, weight_std**-2, posterior, at) for k in range(prompts.y_dim)]
        predictions = torch.stack(targets, -1).to(prompts.dtype)
        parts.append(Trajectory((1,), predictions[None], f"logistic ({posterior})"))
    return joined_trajectory(parts)


def _predict(prompts: Prompts, k: int, penalty: float, posterior: str, at: PointsAt) -> Float[Tensor, "prompt point"]:
    """The expected label number k of each point."""
    xs, labels = prompts.xs.double(), prompts.ys[..., k].double()
    position = torch.arange(xs.shape[1], device=xs.device)
    earlier = (position < selected(position[None], at)[0][:, None]).double()  # [point other]
    inputs, context, signs = selected(xs, at), xs.detach(), labels.detach()
    weights = _mode(context, signs, earlier, penalty)
    score = (inputs * weights).sum(-1)
    if posterior == "mode":
        return (score / 2).tanh()
    factor = torch.linalg.cholesky(_curvature(context, weights, earlier, penalty))
    spread = torch.linalg.solve_triangular(factor, inputs[..., None], upper=False)[..., 0].norm(dim=-1)
    nodes, masses = (torch.from_numpy(each).to(xs) for each in np.polynomial.hermite_e.hermegauss(N_NODES))
    return (((score[..., None] + spread[..., None] * nodes) / 2).tanh() @ masses) / math.sqrt(2 * math.pi)


def _mode(
    xs: Float[Tensor, "prompt other x"], signs: Float[Tensor, "prompt other"], earlier: Tensor, penalty: float
) -> Float[Tensor, "prompt point x"]:
    """The minimiser of `Σ_i log(1 + exp(-y_i x_i w)) + penalty |w|²/2` over the earlier points, for every prefix."""

    def costs(weights: Tensor) -> Tensor:
        margins = signs[:, None] * (weights @ xs.mT)
        return (torch.nn.functional.softplus(-margins) * earlier).sum(-1) + penalty * weights.square().sum(-1) / 2

    weights = xs.new_zeros(len(xs), len(earlier), xs.shape[-1])
    cost = costs(weights)
    for _ in range(MAX_STEPS):
        pull = signs[:, None] * (-signs[:, None] * (weights @ xs.mT)).sigmoid() * earlier
        gradient = penalty * weights - pull @ xs
        factor = torch.linalg.cholesky(_curvature(xs, weights, earlier, penalty))
        move = torch.cholesky_solve(gradient[..., None], factor)[..., 0]
        slope = (gradient * move).sum(-1)
        size = torch.ones_like(cost)
        for _ in range(30):  # halve the steps that do not lower the cost by a fair part of what the slope promises
            new = costs(weights - size[..., None] * move)
            poor = new > cost - 1e-4 * size * slope + 1e-12 * cost
            if not poor.any():
                break
            size = torch.where(poor, size / 2, size)
        weights, cost = weights - size[..., None] * move, new
        if bool((slope <= 1e-20 * (1 + cost)).all()):
            break
    return weights


def _curvature(xs: Tensor, weights: Tensor, earlier: Tensor, penalty: float) -> Float[Tensor, "prompt point x x"]:
    """Second derivative of the cost by the weights."""
    scores = weights @ xs.mT
    spread = scores.sigmoid() * (-scores).sigmoid() * earlier
    second = einsum(spread, xs, xs, "prompt point other, prompt other x, prompt other z -> prompt point x z")
    return second + penalty * torch.eye(xs.shape[-1]).to(xs)
