"""A small network trained on each context from scratch."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.spectra import CHUNK_ELEMENTS, joined_trajectory, selected
from mechicl.base.checks import check_positive, check_whole
from mechicl.learners import Trajectory
from mechicl.prompts import PointsAt, Prompts


def network_descent(
    prompts: Prompts,
    *,
    n_hidden: int = 100,
    steps: int = 100,
    learning_rate: float = 5e-3,
    seed: int = 0,
    at: PointsAt = "points",
) -> Trajectory:
    """A two-layer ReLU network trained on the context's mean squared error by Adam, all points in every step.

    Every prefix trains a network of its own, all from the same initial weights: uniform within one over the root of the
    number of inputs of a layer, as in PyTorch, with biases. Computed in float64; it takes no gradients to the context.

    Args:
        prompts: each prefix is a context of its own; the empty one predicts 0.
        n_hidden: number of hidden units.
        steps: number of Adam's steps.
        learning_rate: Adam's.
        seed: of the initial weights.
        at: predict all "points", each from those before it, or the "query" alone, which is quicker by their number.

    Raises:
        ValueError: a value out of range.

    Source: Garg et al. 2022, section 5, and the authors' code (100 units, 100 steps, learning rate 0.005).

    Example:
        >>> prompts = ReluNetworks(x_dim=3, n_context=20).sample(10, seed=0)
        >>> algorithms.network_descent(prompts, at="query").predictions.shape
        torch.Size([1, 10, 1, 1])
    """
    check_whole(1, n_hidden=n_hidden)
    check_whole(0, steps=steps, seed=seed)
    check_positive(learning_rate=learning_rate)
    n_points = prompts.n_context + 1
    n_networks = len(selected(torch.arange(n_points)[None], at)[0])
    largest = n_networks * n_hidden * max(n_points, prompts.x_dim)
    parts = []
    for part in prompts.split(max(1, CHUNK_ELEMENTS // (4 * largest))):
        predictions = _train(part, n_hidden, steps, learning_rate, seed, at).to(prompts.dtype)
        parts.append(Trajectory((steps,), predictions[None], "network descent"))
    return joined_trajectory(parts)


def _train(
    prompts: Prompts, n_hidden: int, steps: int, learning_rate: float, seed: int, at: PointsAt
) -> Float[Tensor, "prompt point y"]:
    """One network for every prefix, whose weights stand side by side: nothing mixes them, so that one Adam does."""
    xs, ys = prompts.xs.double(), prompts.ys.double()
    position = torch.arange(xs.shape[1], device=xs.device)
    earlier = (position < selected(position[None], at)[0][:, None]).double()  # [point other]
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

    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
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
