"""Learners of other functions than linear ones: on features, with a logistic link, or by a small network."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.least_squares import ols
from mechicl.algorithms.sizes import Sized
from mechicl.algorithms.spectra import earlier_points, in_parts, one_step, selected
from mechicl.base.arguments import Count, Natural, Positive, checked
from mechicl.base.optimizers import Adam
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt

MAX_STEPS = 50
N_NODES = 32  # of Gauss-Hermite quadrature over the query's score


@checked
def on_features(
    prompts: Sized,
    *,
    features: Callable[[Tensor], Tensor],
    algorithm: Callable[..., Trajectory] = ols,
    hyperparameters: Mapping[str, Any] | None = None,
    at: PointsAt = "points",
) -> Trajectory:
    """Run an algorithm of this package on features of the inputs, for example least squares on their squares.

    Args:
        features: function of the inputs `[prompt point x]`, float64, that returns features `[prompt point feature]`;
            the features of a point may depend on that point only.
        algorithm: function of `mechicl.algorithms` that returns a `Trajectory`; by default `ols`.
        hyperparameters: keyword arguments of `algorithm`, such as `{"steps": [1, 2], "step_size": 0.1}`.

    Returns:
        `Trajectory` of `algorithm`, without weights.

    Source: Guo et al. 2024 call such prompts linear regression on representations.
    """
    mapped = features(prompts.xs.double())
    if mapped.ndim != 3 or mapped.shape[:2] != prompts.xs.shape[:2]:
        raise ValueError(
            f"features must return [prompt point feature] for inputs of shape {tuple(prompts.xs.shape)}, got "
            f"{tuple(mapped.shape)}"
        )
    trajectory = algorithm(Prompts(mapped.double(), prompts.ys.double()), **(hyperparameters or {}), at=at)
    name = f"{trajectory.name} on {getattr(features, '__name__', 'features')}"
    return Trajectory(trajectory.steps, trajectory.predictions.to(prompts.dtype), name)


def sine_and_cosine(xs: Float[Tensor, "*any x"]) -> Float[Tensor, "*any feature"]:
    """Return `sin x` and `cos x`, in which sine waves of any amplitude and phase are linear."""
    return torch.cat([xs.sin(), xs.cos()], dim=-1)


# ---- logistic regression ----


@checked
def logistic(
    prompts: Sized,
    *,
    weight_std: Positive = 1.0,
    posterior: Literal["mode", "laplace"] = "laplace",
    at: PointsAt = "points",
) -> Trajectory:
    """Predict the expected label, from -1 to 1, where `P(y = 1) = 1 / (1 + exp(-x w))` with weights N(0, weight_std²).

    Newton's method finds the weights of largest posterior density, those of logistic regression with the penalty `|w|²
    / (2 weight_std²)`. Source: Bai et al. 2023; MacKay 1992 for the average.

    Args:
        prompts: labels (targets) of the context are -1 and 1, as in `tasks.LogisticRegression`.
        weight_std: standard deviation of the weights' normal prior.
        posterior: "mode" predicts `tanh(x w / 2)` with these weights; "laplace" averages it over the normal
            distribution that has the posterior's curvature there, which is nearer to exact Bayes.
    """
    labels = prompts.ys[:, :-1]
    if len(wrong := labels[labels.abs() != 1]):
        raise ValueError(f"labels of the context must be -1 or 1, got {wrong[0].item():g}")
    n_points = prompts.n_context + 1

    def run(part: Prompts) -> Trajectory:
        targets = [_predict(part, k, weight_std**-2, posterior, at) for k in range(prompts.y_dim)]
        return one_step(part, torch.stack(targets, -1), f"logistic ({posterior})")

    return in_parts(prompts, 4 * n_points * max(n_points, prompts.x_dim**2), run)


def _predict(prompts: Prompts, k: int, penalty: float, posterior: str, at: PointsAt) -> Float[Tensor, "prompt point"]:
    xs, labels = prompts.xs.double(), prompts.ys[..., k].double()
    earlier = earlier_points(prompts, at).double()
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
    """Minimise `Σ_i log(1 + exp(-y_i x_i w)) + penalty |w|²/2` over the earlier points, for every prefix."""

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
        for _ in range(30):  # halve the steps that do not lower the cost by a fair part of the slope's prediction
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
    scores = weights @ xs.mT
    spread = scores.sigmoid() * (-scores).sigmoid() * earlier
    second = einsum(spread, xs, xs, "prompt point other, prompt other x, prompt other z -> prompt point x z")
    return second + penalty * torch.eye(xs.shape[-1]).to(xs)


# ---- a small network ----


@checked
def network_descent(
    prompts: Sized,
    *,
    n_hidden: Count = 100,
    steps: Natural = 100,
    learning_rate: Positive = 5e-3,
    seed: Natural = 0,
    at: PointsAt = "points",
) -> Trajectory:
    """Train a two-layer ReLU network on the earlier points' mean squared error by Adam, and predict with it.

    Every prefix trains a separate network, all from the same initial weights: uniform in ±1/√n for a layer of n inputs,
    biases included, as in PyTorch. It predicts 0 before the first point. Gradients do not flow to the context. Source:
    Garg et al. 2022, section 5, and the authors' code (100 units, 100 steps, learning rate 0.005).

    Args:
        n_hidden: number of hidden units.
        steps: number of steps of Adam, each on all points.
        learning_rate: learning rate of Adam.
    """
    n_points = prompts.n_context + 1
    largest = (n_points if at == "points" else 1) * n_hidden * max(n_points, prompts.x_dim)

    def run(part: Prompts) -> Trajectory:
        predictions = _train(part, n_hidden, steps, learning_rate, seed, at).to(part.dtype)
        return Trajectory((steps,), predictions[None], "network descent")

    return in_parts(prompts, 4 * largest, run)


def _train(
    prompts: Prompts, n_hidden: int, steps: int, learning_rate: float, seed: int, at: PointsAt
) -> Float[Tensor, "prompt point y"]:
    """Train the networks of all prefixes at once: Adam is elementwise, so that stacked weights do not mix."""
    xs, ys = prompts.xs.double(), prompts.ys.double()
    earlier = earlier_points(prompts, at).double()
    share = earlier / earlier.sum(-1, keepdim=True).clamp(min=1) / ys.shape[-1]
    generator = torch.Generator().manual_seed(seed)

    def initial(n_inputs: int, *shape: int) -> Tensor:
        values = (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) / math.sqrt(n_inputs)
        return values.to(xs.device).expand(len(xs), len(earlier), *shape).clone().requires_grad_()

    x_dim, y_dim = xs.shape[-1], ys.shape[-1]
    first, first_bias = initial(x_dim, x_dim, n_hidden), initial(x_dim, 1, n_hidden)
    second, second_bias = initial(n_hidden, n_hidden, y_dim), initial(n_hidden, 1, y_dim)
    parameters = [first, first_bias, second, second_bias]

    def run(inputs: Float[Tensor, "prompt #point other x"]) -> Float[Tensor, "prompt point other y"]:
        return (inputs @ first + first_bias).relu() @ second + second_bias

    optimizer = Adam(parameters, lr=learning_rate)
    with torch.enable_grad():
        for _ in range(steps):
            errors = (run(xs.detach()[:, None]) - ys.detach()[:, None]).square().sum(-1)
            gradients = torch.autograd.grad((errors * share).sum(), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    for parameter in parameters:
        parameter.requires_grad_(False)
    predictions = run(selected(xs, at)[:, :, None])[:, :, 0]
    return torch.where((earlier.sum(-1) > 0)[:, None], predictions, 0.0)
