"""One eigendecomposition a prefix, from which every spectral algorithm's predictions follow for all steps at once.

Let `S = XᵀX` and `B = XᵀY` be summed over the points before point t. Gradient descent, GD++, ridge, least squares and
Newton's method read only these two from the context, and their weights are a function of S times B: a polynomial
`Σ_k c_k S^k B` (gradient descent's after k steps has degree k - 1), or its limit, an inverse. With the
eigendecomposition `S = U diag(λ) Uᵀ` every power is `S^k = U diag(λ^k) Uᵀ`, so all of them predict `x_t U f(λ) Uᵀ B`
and differ only in the filter `f`, a function of one number that is known in closed form. One decomposition a prefix
serves all steps, and the cost does not grow with their number.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechicl.base.arguments import Natural
from mechicl.base.warning import warn
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt

Steps = Natural | Sequence[Natural]
"""A number of steps, or several in any order."""
CHUNK_ELEMENTS = 2**24  # float64 numbers in the largest tensor of one chunk of prompts: 128 MiB
TOLERANCE = 1e-6  # growth of residuals from which on an iteration diverges: far above rounding


class ConditioningWarning(UserWarning):
    """Warning that a result has lost most of its digits because its inputs are badly conditioned (nearly collinear)."""


class DivergenceWarning(UserWarning):
    """Warning that the parameters of an iteration make it diverge on most of the prompts that it runs on."""


@dataclass(frozen=True, eq=False)
class PrefixSpectra:
    """Eigenvalues of each prefix's second moments, with the point's and the targets' coordinates in its eigenbasis."""

    # λ `[prompt point x]`, ascending, of S over the points before each point; never negative, and exactly 0 (as are the
    # targets' coordinates) in directions that a prefix with few points does not span.
    eigenvalues: Float[Tensor, "prompt point x"]
    point_coordinates: Float[Tensor, "prompt point x"]  # `x_t U` `[prompt point x]`
    target_coordinates: Float[Tensor, "prompt point x y"]  # `Uᵀ B` `[prompt point x y]`
    eigenvectors: Float[Tensor, "prompt point x x"]  # U `[prompt point x x]`, in columns

    @classmethod
    def decompose(
        cls, xs: Float[Tensor, "prompt point x"], ys: Float[Tensor, "prompt point y"], at: PointsAt
    ) -> "PrefixSpectra":
        """Return the spectra for the prediction of all points, or of the query alone."""
        n_earlier = selected(torch.arange(xs.shape[1], device=xs.device), at, axis=0)[:, None]
        second, cross = moments(xs, ys, at)
        eigenvalues, vectors = torch.linalg.eigh(second)  # ascending
        # n points span at most n directions: the first x_dim - n eigenvalues are 0 but for rounding, which filters such
        # as k a (gradient descent at λ = 0) or 1 / λ would blow up. There B is 0 too, so both are set to exactly 0.
        absent = torch.arange(xs.shape[2], device=xs.device) < xs.shape[2] - n_earlier
        return cls(
            eigenvalues.clamp(min=0).masked_fill(absent, 0.0),
            (selected(xs, at)[..., None, :] @ vectors)[..., 0, :],
            (vectors.mT @ cross).masked_fill(absent[..., None], 0.0),
            vectors,
        )

    @classmethod
    def decompose_inputs(
        cls, xs: Float[Tensor, "prompt point x"], ys: Float[Tensor, "prompt point y"], at: PointsAt
    ) -> "PrefixSpectra":
        """Return the same from the singular values of each prefix's X, which lose half as many digits as those of S."""
        n_earlier = selected(torch.arange(xs.shape[1], device=xs.device), at, axis=0)[:, None]
        before = torch.arange(xs.shape[1] - 1, device=xs.device) < n_earlier
        prefixes = xs[:, None, :-1] * before[..., None]
        left, singular, right = torch.linalg.svd(prefixes, full_matrices=False)
        absent = torch.arange(singular.shape[-1], device=xs.device) >= n_earlier
        singular = singular.masked_fill(absent, 0.0)
        coordinates = singular[..., None] * (left.mT @ (ys[:, None, :-1] * before[..., None]))
        missing = xs.shape[2] - singular.shape[-1]  # directions that no prefix spans
        pad = torch.nn.functional.pad
        vectors = pad(right, (0, 0, 0, missing)).mT
        points = (selected(xs, at)[..., None, :] @ vectors)[..., 0, :]
        return cls(pad(singular.square(), (0, missing)), points, pad(coordinates, (0, 0, 0, missing)), vectors)

    def predict(self, filters: Float[Tensor, "step prompt point x"]) -> Float[Tensor, "step prompt point y"]:
        """Return `x_t U f(λ) Uᵀ B` for each filter."""
        weighted = filters * self.point_coordinates
        return einsum(weighted, self.target_coordinates, "step prompt point x, prompt point x y -> step prompt point y")

    def weights(self, filters: Float[Tensor, "step prompt point x"]) -> Float[Tensor, "step prompt point x y"]:
        """Return `U f(λ) Uᵀ B` for each filter."""
        scaled = filters[..., None] * self.target_coordinates
        return einsum(self.eigenvectors, scaled, "prompt point x e, step prompt point e y -> step prompt point x y")


def safe_norm(values: Float[Tensor, "*any d"]) -> Float[Tensor, "*any 1"]:
    """Return the norm over the last axis, also where squares would underflow or overflow; of zeros 1e-300."""
    largest = values.abs().amax(-1, keepdim=True).clamp(min=1e-300)
    return (largest * (values / largest).norm(dim=-1, keepdim=True)).clamp(min=1e-300)


def sums_before(terms: Float[Tensor, "prompt point *any"]) -> Float[Tensor, "prompt point *any"]:
    """Sum the terms of the points before each point: zero for the first."""
    return torch.cat([torch.zeros_like(terms[:, :1]), terms[:, :-1].cumsum(1)], dim=1)


def context_moments(
    prompts: Prompts, at: PointsAt
) -> tuple[Float[Tensor, "prompt point x x"], Float[Tensor, "prompt point x y"]]:
    """Return S and B of each prefix, float64."""
    return moments(prompts.xs.double(), prompts.ys.double(), at)


def moments(xs: Tensor, ys: Tensor, at: PointsAt) -> tuple[Tensor, Tensor]:
    """Return `Σ x_iᵀ x_i` and `Σ x_iᵀ y_i` over the points before each point, or before the query."""
    if at == "query":
        return (xs[:, :-1].mT @ xs[:, :-1])[:, None], (xs[:, :-1].mT @ ys[:, :-1])[:, None]
    second, cross = (sums_before(xs[..., :, None] * values[..., None, :]) for values in (xs, ys))
    return second, cross


def selected(values: Tensor, at: PointsAt, axis: int = 1) -> Tensor:
    """Return the values of all points along an axis, or of the query alone, whose axis stays."""
    return values if at == "points" else values.narrow(axis, values.shape[axis] - 1, 1)


def n_before(prompts: Prompts, at: PointsAt) -> Int[Tensor, "point"]:
    """Return the number of points before each point."""
    return selected(torch.arange(prompts.n_context + 1, device=prompts.device), at, axis=0)


def earlier_points(prompts: Prompts, at: PointsAt) -> Bool[Tensor, "point other"]:
    """Return which points precede each point."""
    return torch.arange(prompts.n_context + 1, device=prompts.device) < n_before(prompts, at)[:, None]


def one_step(prompts: Prompts, predictions: Float[Tensor, "prompt point y"], name: str) -> Trajectory:
    """Return the trajectory of a learner without steps."""
    return Trajectory((1,), predictions[None].to(prompts.dtype), name)


def linear_trajectory(
    prompts: Prompts,
    weights: Float[Tensor, "*step prompt point x y"],
    name: str,
    at: PointsAt,
    with_weights: bool,
    steps: tuple[int, ...] = (1,),
) -> Trajectory:
    """Return the trajectory of a learner that predicts each point by its prefix's weights, float64."""
    weights = selected(weights, at, axis=-3)
    weights = weights if weights.ndim == 5 else weights[None]
    predictions = (selected(prompts.xs.double(), at)[..., None, :] @ weights)[..., 0, :].to(prompts.dtype)
    return Trajectory(steps, predictions, name, weights.to(prompts.dtype) if with_weights else None)


def iterates(step: Callable[[int, Any], Any], start: Any, numbers: Sequence[int]) -> Float[Tensor, "step *any"]:
    """Return what an iteration reaches after each of these numbers of steps; step k, from 0, is `step(k, state)`.

    A state is a tensor, or a tuple of tensors of which the first is returned.
    """
    states = itertools.accumulate(range(max(numbers)), lambda state, k: step(k, state), initial=start)
    reached = {k: state[0] if isinstance(state, tuple) else state for k, state in enumerate(states) if k in numbers}
    return torch.stack([reached[k] for k in numbers])


def above_rounding(eigenvalues: Tensor, dim: int = -1) -> Bool[Tensor, "..."]:
    """Return which eigenvalues of each prefix's S, along `dim`, exceed the rounding noise of its largest."""
    return eigenvalues > 1e-13 * eigenvalues.shape[dim] * eigenvalues.amax(dim, keepdim=True)


def in_parts(prompts: Prompts, per_prompt: float, run: Callable[[Prompts], Trajectory]) -> Trajectory:
    """Compute the trajectory of all prompts in parts, given how many numbers one needs in the largest tensor."""
    parts = [run(part) for part in prompts.split(max(1, int(CHUNK_ELEMENTS // per_prompt)))]
    weights = [part.weights for part in parts if part.weights is not None]
    predictions = torch.cat([part.predictions for part in parts], dim=1)
    return Trajectory(parts[0].steps, predictions, parts[0].name, torch.cat(weights, dim=1) if weights else None)


def spectral_trajectory(
    prompts: Prompts,
    filters: Callable[[Float[Tensor, "prompt point x"]], Float[Tensor, "step prompt point x"]],
    *,
    name: str,
    steps: Sequence[int] = (1,),
    at: PointsAt = "points",
    initial_weights: Float[Tensor, "x y"] | None = None,
    with_weights: bool = False,
    parameters: str = "",
    of_inputs: bool = False,
) -> Trajectory:
    """Compute the predictions of a spectral algorithm in float64; they are returned in the prompts' dtype.

    Gradients flow to the query; those to the context are NaN where eigenvalues of S coincide. `filters` maps
    eigenvalues to filter values, one slice for each of `steps`, and is fitted to the residual of `initial_weights` `[x
    y]`. `parameters` names an iteration's parameters, for a `DivergenceWarning` where the residual grows on most of the
    full contexts in more than one step. `of_inputs` decomposes X in place of S: slower, but keeps digits that S loses.
    """
    if initial_weights is not None and initial_weights.shape != (prompts.x_dim, prompts.y_dim):
        expected = (prompts.x_dim, prompts.y_dim)  # another shape might be broadcast without an error
        raise ValueError(f"initial_weights must be [x y] = {expected}, got {tuple(initial_weights.shape)}")
    n_points = prompts.n_context + 1 if at == "points" else 1
    per_prompt = n_points * prompts.x_dim * max(prompts.x_dim, prompts.y_dim, len(steps))
    if of_inputs:
        per_prompt = max(per_prompt, n_points * prompts.n_context * max(prompts.n_context, prompts.x_dim))
    if with_weights:
        per_prompt = max(per_prompt, len(steps) * n_points * prompts.x_dim * prompts.y_dim)
    last = max(range(len(steps)), key=lambda i: steps[i])
    decompose = PrefixSpectra.decompose_inputs if of_inputs else PrefixSpectra.decompose
    growing, limits = [], []

    def run(part: Prompts) -> Trajectory:
        xs, ys = part.xs.double(), part.ys.double()
        start = None
        if initial_weights is not None:
            # every step is affine in W: from W_0 it moves as from 0 on the residuals of W_0, plus W_0
            start = xs @ initial_weights.to(xs)
            ys = ys - start
        spectra = decompose(xs, ys, at)
        filtered = filters(spectra.eigenvalues)
        if parameters and steps[last] > 1:
            full = spectra.eigenvalues[:, -1].detach()
            growing.append(residuals_grow(full, filtered[last, :, -1].detach()))
            limits.append(2 / full.amax(-1))
        predictions = spectra.predict(filtered)
        predictions = predictions if start is None else predictions + selected(start, at)
        weights = spectra.weights(filtered) if with_weights else None
        if weights is not None:
            weights = (weights if initial_weights is None else weights + initial_weights.to(weights)).to(part.dtype)
        return Trajectory(tuple(steps), predictions.to(part.dtype), name, weights)

    result = in_parts(prompts, per_prompt, run)
    if growing:
        warn_where_most_diverge(
            f"{name} with {parameters}", torch.cat(growing), "with values between 0 and 2 / λ_max(S)", "that bound",
            torch.cat(limits),
        )  # fmt: skip
    return result


def step_numbers(steps: Steps) -> tuple[int, ...]:
    """Return numbers of steps as a tuple, one or more."""
    numbers = (steps,) if isinstance(steps, int) else tuple(steps)
    if not numbers:
        raise ValueError("steps must be one or more numbers, got none")
    return numbers


# ---- divergence ----


def residuals_grow(
    eigenvalues: Float[Tensor, "*context x"], filters: Float[Tensor, "*context x"]
) -> Bool[Tensor, "*context"]:
    """Return whether the residual `|1 - λ f(λ)|` exceeds its first value, 1, along some eigendirection of S.

    For k steps of gradient descent it is `|1 - aλ|^k`, which grows unless a is between 0 and 2/λ_max. For GD++ (a
    product of `|1 - a_i λ_i|`) that range of every a_i and γ_i suffices but is not necessary, so the residual itself
    decides.
    """
    residuals = (1 - eigenvalues * filters).abs()
    return ~(residuals <= 1 + TOLERANCE).all(-1)


def warn_where_most_diverge(
    parameters: str, diverging: Bool[Tensor, "context"], condition: str, quantity: str, values: Float[Tensor, "context"]
) -> None:
    """Warn of `parameters` that violate the `condition` for convergence (on `values`) on over half of the contexts."""
    share = diverging.double().mean().item()
    if share > 0.5:  # False for no contexts, whose mean is NaN
        middle, low, high = (value.item() for value in (values.median(), values.min(), values.max()))
        warn(
            f"{parameters} diverges on {share:.0%} of {len(diverging)} contexts. It converges {condition}; {quantity} "
            f"is {middle:.4g} on the median context, {low:.4g} to {high:.4g} on all",
            DivergenceWarning,
        )
