"""Descent with exact line searches: steepest descent and conjugate gradients."""

from collections.abc import Callable, Iterator

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.card import Algorithm, register
from mechicl.algorithms.sizes import Sized
from mechicl.algorithms.spectra import PrefixSpectra, Steps, above_rounding, in_parts, step_numbers
from mechicl.base.arguments import checked
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt

Coordinates = Float[Tensor, "prompt point x y"]
Iteration = Callable[[Float[Tensor, "prompt point x 1"], Coordinates], Iterator[Coordinates]]


@checked
def steepest_descent(
    prompts: Sized, steps: Steps = 1, *, at: PointsAt = "points", with_weights: bool = False
) -> Trajectory:
    """Run gradient descent from 0 with exact line search: each step goes to the least error along the gradient.

    S = XᵀX and B = XᵀY sum over the points before the predicted one. With the residual `r = B - S W` a step is `W ← W +
    a r`, `a = |r|² / rᵀSr`. Each target has separate line searches, so that its prediction does not depend on the other
    targets. The cost grows with the largest number of steps. Source: Cauchy 1847.

    Args:
        steps: number of steps, or several in any order; 0 predicts 0.
        at: "query" for the last point only (a point axis of length 1), "points" for every prefix.
        with_weights: also return the weights W of each prediction `x W`, as `weights` `[step prompt point x y]`.

    Returns:
        `Trajectory`: `predictions` `[step prompt point y]`, point t predicted from those before; `query()` is the last.
    """
    return _line_searches(prompts, steps, _steepest, "steepest descent", at, with_weights)


@checked
def conjugate_gradient(
    prompts: Sized, steps: Steps = 1, *, at: PointsAt = "points", with_weights: bool = False
) -> Trajectory:
    """Run conjugate gradients from 0 on `S W = B`: after k steps the least error that k gradients can reach.

    S = XᵀX and B = XᵀY sum over the points before the predicted one. No method whose weights are combinations of `B,
    SB, ..., S^(k-1) B` has a smaller squared error on these points. It ends at least squares, after one step for each
    distinct eigenvalue of S. Each target is a separate problem. Source: Hestenes & Stiefel 1952.

    Args:
        steps: number of steps, or several in any order; 0 predicts 0.
        at: "query" for the last point only (a point axis of length 1), "points" for every prefix.
        with_weights: also return the weights W of each prediction `x W`, as `weights` `[step prompt point x y]`.

    Returns:
        `Trajectory`: `predictions` `[step prompt point y]`, point t predicted from those before; `query()` is the last.
    """
    return _line_searches(prompts, steps, _conjugate, "conjugate gradients", at, with_weights)


def _line_searches(
    prompts: Prompts, steps: Steps, iteration: Iteration, name: str, at: PointsAt, with_weights: bool
) -> Trajectory:
    """Run the iteration in the eigenbasis of each prefix's S; line searches depend on B, so no filter is shared."""
    numbers = step_numbers(steps)
    n_points = prompts.n_context + 1 if at == "points" else 1
    per_prompt = n_points * prompts.x_dim * max(prompts.x_dim, len(numbers) * prompts.y_dim)

    def run(part: Prompts) -> Trajectory:
        spectra = PrefixSpectra.decompose(part.xs.double(), part.ys.double(), at)
        coordinates = _solve(spectra, numbers, iteration)
        predictions = einsum(spectra.point_coordinates, coordinates, "prompt t x, k prompt t x y -> k prompt t y")
        weights = None
        if with_weights:
            weights = einsum(spectra.eigenvectors, coordinates, "prompt t x e, k prompt t e y -> k prompt t x y")
            weights = weights.to(part.dtype)
        return Trajectory(numbers, predictions.to(part.dtype), name, weights)

    return in_parts(prompts, per_prompt, run)


def _solve(
    spectra: PrefixSpectra, numbers: tuple[int, ...], iteration: Iteration
) -> Float[Tensor, "step prompt point x y"]:
    """Return the weights' coordinates `UᵀW` after each number of steps."""
    eigenvalues, targets = spectra.eigenvalues[..., None], spectra.target_coordinates
    # λ and B in units of their largest, so that no square under- or overflows; eigenvalues that are rounding noise
    # count as absent, and B is noise there
    largest = eigenvalues.amax(-2, keepdim=True)
    targets = targets.masked_fill(~above_rounding(eigenvalues, dim=-2), 0.0)
    size = targets.abs().amax(-2, keepdim=True)
    iterates = iteration(eigenvalues / _or_one(largest), targets / _or_one(size))
    wanted, reached = set(numbers), {}
    for k in range(max(numbers) + 1):
        weights = next(iterates)
        if k in wanted:
            reached[k] = weights
    return torch.stack([reached[k] for k in numbers]) * (size / _or_one(largest))


def _steepest(eigenvalues: Tensor, targets: Tensor) -> Iterator[Coordinates]:
    weights = torch.zeros_like(targets)
    while True:
        yield weights
        residual = targets - eigenvalues * weights
        weights = weights + _step_length(residual, residual, eigenvalues) * residual


def _conjugate(eigenvalues: Tensor, targets: Tensor) -> Iterator[Coordinates]:
    weights = torch.zeros_like(targets)
    residual = direction = targets
    while True:
        yield weights
        length = _step_length(residual, direction, eigenvalues)
        weights = weights + length * direction
        before = _squared(residual)
        residual = residual - length * eigenvalues * direction
        direction = residual + _squared(residual) / _or_one(before) * direction


def _step_length(residual: Tensor, direction: Tensor, eigenvalues: Tensor) -> Float[Tensor, "prompt point 1 y"]:
    """Return `|r|² / pᵀSp`; 0 once the residual is rounding noise of a B of size 1."""
    squared, curvature = _squared(residual), (eigenvalues * direction.square()).sum(-2, keepdim=True)
    moving = (squared > 1e-30) & (curvature > 0)
    return torch.where(moving, squared / curvature.masked_fill(~moving, 1.0), 0.0)


def _squared(vectors: Tensor) -> Float[Tensor, "prompt point 1 y"]:
    return vectors.square().sum(-2, keepdim=True)


def _or_one(values: Tensor) -> Tensor:
    return values.masked_fill(values == 0, 1.0)


# 28 numbers of steps up to 1024, which runs them all
SEARCH_STEPS = tuple(sorted({round(1024 ** (i / 27)) for i in range(28)}))
STEEPEST_DESCENT = register(
    Algorithm(
        name="steepest descent",
        trajectory=steepest_descent,
        path=lambda _: {"steps": SEARCH_STEPS},
        freedom="per prefix",
    )
)
CONJUGATE_GRADIENTS = register(
    Algorithm(
        name="conjugate gradients",
        trajectory=conjugate_gradient,
        path=lambda prompts: {"steps": tuple(range(1, 2 * prompts.x_dim + 1))},
        freedom="per prefix",
    )
)
