"""One eigendecomposition a prefix, from which every spectral algorithm's predictions follow for all steps at once.

Let `S = XᵀX` and `B = XᵀY` be summed over the points before point t. Gradient descent, GD++, ridge, least squares and
Newton's method see the context only through these two, and their weights are a function of S times B: a polynomial
`Σ_k c_k S^k B` (gradient descent's after k steps has degree k - 1), or its limit, an inverse. With the
eigendecomposition `S = U diag(λ) Uᵀ` every power is `S^k = U diag(λ^k) Uᵀ`, so all of them predict `x_t U f(λ) Uᵀ B`
and differ only in the filter `f`, a function of one number that is known in closed form. One decomposition a prefix
serves all steps, and the cost does not grow with their number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.algorithms.stability import residuals_grow, warn_where_most_diverge
from mechicl.learners import Trajectory
from mechicl.prompts import PointsAt, Prompts

CHUNK_ELEMENTS = 2**24  # float64 numbers in the largest tensor of one chunk of prompts: 128 MiB


@dataclass(frozen=True, eq=False)
class PrefixSpectra:
    """Eigenvalues of each prefix's second moments, with the point's and the targets' coordinates in its eigenbasis.

    Attributes:
        eigenvalues: λ `[prompt point x]`, ascending, of S over the points before each point; never negative, and
            exactly 0 (as are the targets' coordinates) in the directions that so few points cannot reach.
        point_coordinates: `x_t U` `[prompt point x]`.
        target_coordinates: `Uᵀ B` `[prompt point x y]`.
        eigenvectors: U `[prompt point x x]`, in columns.
    """

    eigenvalues: Float[Tensor, "prompt point x"]
    point_coordinates: Float[Tensor, "prompt point x"]
    target_coordinates: Float[Tensor, "prompt point x y"]
    eigenvectors: Float[Tensor, "prompt point x x"]

    @classmethod
    def decompose(
        cls, xs: Float[Tensor, "prompt point x"], ys: Float[Tensor, "prompt point y"], at: PointsAt
    ) -> "PrefixSpectra":
        """Spectra for the prediction of all points, or of the query alone."""
        if selected(xs, at) is xs:
            second, cross = (sums_before(xs[..., :, None] * values[..., None, :]) for values in (xs, ys))
            targets, n_before = xs, torch.arange(xs.shape[1], device=xs.device)
        else:
            context = xs[:, :-1]
            second = (context.mT @ context)[:, None]
            cross = (context.mT @ ys[:, :-1])[:, None]
            targets, n_before = xs[:, -1:], torch.tensor([context.shape[1]], device=xs.device)
        eigenvalues, vectors = torch.linalg.eigh(second)  # ascending
        # n points span at most n directions: the first x_dim - n eigenvalues are 0 but for rounding, which filters such
        # as k a (gradient descent at λ = 0) or 1 / λ would blow up. There B is 0 too, so both are set to exactly 0.
        absent = torch.arange(xs.shape[2], device=xs.device) < xs.shape[2] - n_before[:, None]
        return cls(
            eigenvalues.clamp(min=0).masked_fill(absent, 0.0),
            (targets[..., None, :] @ vectors)[..., 0, :],
            (vectors.mT @ cross).masked_fill(absent[..., None], 0.0),
            vectors,
        )

    @classmethod
    def decompose_inputs(
        cls, xs: Float[Tensor, "prompt point x"], ys: Float[Tensor, "prompt point y"], at: PointsAt
    ) -> "PrefixSpectra":
        """The same from the singular values of each prefix's X, which lose half the digits that those of S lose."""
        n_before = torch.arange(xs.shape[1], device=xs.device) if at == "points" else torch.tensor([xs.shape[1] - 1])
        before = torch.arange(xs.shape[1] - 1, device=xs.device) < n_before.to(xs.device)[:, None]
        prefixes = xs[:, None, :-1] * before[..., None]
        left, singular, right = torch.linalg.svd(prefixes, full_matrices=False)
        absent = torch.arange(singular.shape[-1], device=xs.device) >= n_before.to(xs.device)[:, None]
        singular = singular.masked_fill(absent, 0.0)
        coordinates = singular[..., None] * (left.mT @ (ys[:, None, :-1] * before[..., None]))
        missing = xs.shape[2] - singular.shape[-1]  # directions that no prefix reaches
        pad = torch.nn.functional.pad
        vectors = pad(right, (0, 0, 0, missing)).mT
        points = ((xs if at == "points" else xs[:, -1:])[..., None, :] @ vectors)[..., 0, :]
        return cls(pad(singular.square(), (0, missing)), points, pad(coordinates, (0, 0, 0, missing)), vectors)

    def predict(self, filters: Float[Tensor, "step prompt point x"]) -> Float[Tensor, "step prompt point y"]:
        """`x_t U f(λ) Uᵀ B` for each filter."""
        weighted = filters * self.point_coordinates
        return einsum(weighted, self.target_coordinates, "step prompt point x, prompt point x y -> step prompt point y")

    def weights(self, filters: Float[Tensor, "step prompt point x"]) -> Float[Tensor, "step prompt point x y"]:
        """`U f(λ) Uᵀ B` for each filter."""
        scaled = filters[..., None] * self.target_coordinates
        return einsum(self.eigenvectors, scaled, "prompt point x e, step prompt point e y -> step prompt point x y")


def sums_before(terms: Float[Tensor, "prompt point a b"]) -> Float[Tensor, "prompt point a b"]:
    """Sums of the terms of the earlier points: zero for the first."""
    return torch.cat([torch.zeros_like(terms[:, :1]), terms[:, :-1].cumsum(1)], dim=1)


def second_moments(
    prompts: Prompts, at: PointsAt
) -> tuple[Float[Tensor, "prompt point x x"], Float[Tensor, "prompt point x y"]]:
    """S and B of each prefix, float64."""
    xs, ys = prompts.xs.double(), prompts.ys.double()
    second, cross = (sums_before(xs[..., :, None] * values[..., None, :]) for values in (xs, ys))
    return selected(second, at), selected(cross, at)


def selected(values: Tensor, at: PointsAt, axis: int = 1) -> Tensor:
    """The values of all points, along an axis, or of the query alone, whose axis stays."""
    if at not in ("points", "query"):
        raise ValueError(f"at must be 'points' or 'query', got {at!r}")
    return values if at == "points" else values.narrow(axis, values.shape[axis] - 1, 1)


def earlier_points(prompts: Prompts, at: PointsAt) -> Bool[Tensor, "point other"]:
    """Which points precede each point."""
    position = torch.arange(prompts.n_context + 1, device=prompts.device)
    return position < selected(position[None], at)[0][:, None]


def one_step(prompts: Prompts, predictions: Float[Tensor, "prompt point y"], name: str) -> Trajectory:
    """The trajectory of a learner without steps."""
    return Trajectory((1,), predictions[None].to(prompts.dtype), name)


def linear_trajectory(
    prompts: Prompts, weights: Float[Tensor, "prompt point x y"], name: str, at: PointsAt, with_weights: bool
) -> Trajectory:
    """The one-step trajectory of a learner that predicts each point by the weights, float64, of its prefix."""
    weights = selected(weights, at)
    predictions = (selected(prompts.xs.double(), at)[..., None, :] @ weights)[..., 0, :]
    kept = weights[None].to(prompts.dtype) if with_weights else None
    return Trajectory((1,), predictions[None].to(prompts.dtype), name, kept)


def above_rounding(eigenvalues: Tensor, dim: int = -1) -> Bool[Tensor, "..."]:
    """Which eigenvalues of each prefix's S, along `dim`, are more than the rounding noise of its largest."""
    return eigenvalues > 1e-13 * eigenvalues.shape[dim] * eigenvalues.amax(dim, keepdim=True)


def in_parts(prompts: Prompts, per_prompt: float, run: Callable[[Prompts], Trajectory]) -> Trajectory:
    """The trajectory of all prompts, computed in parts that fit into memory.

    Args:
        prompts: what to predict.
        per_prompt: numbers that a prompt needs in the largest tensor.
        run: makes the trajectory of some prompts.
    """
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
    """Predictions of a spectral algorithm, computed in float64 and returned in the prompts' dtype.

    Gradients flow to the query. Those to the context are NaN where eigenvalues of S coincide, as in a prefix with
    fewer points than dimensions.

    Args:
        prompts: what to predict.
        filters: eigenvalues to filter values, one slice a step.
        name: of the algorithm.
        steps: step numbers of the slices.
        at: all "points", each predicted from those before it, or the "query" alone (a trajectory with one point).
        initial_weights: the learner's weights `[x y]` before any step; the algorithm then fits the residual.
        parameters: names and values of an iteration's parameters, for the warning; it converges with any between 0 and
            `2 / λ_max(S)`, and may diverge with others.
        of_inputs: decompose each prefix's X in place of its S: slower, and right where S has lost the digits.

    Warns:
        DivergenceWarning: `parameters` are given, and after the largest number of steps, if that is more than one, the
            residual on most of the full contexts is larger than at the start.
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
            # every step is affine in W: from W_0 it moves as from 0 on the targets that W_0 leaves, plus W_0
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


def checked_steps(steps: int | Sequence[int]) -> tuple[int, ...]:
    """Step numbers as a tuple."""
    numbers = (steps,) if isinstance(steps, int) else tuple(steps)
    if not numbers or any(not isinstance(k, int) or isinstance(k, bool) or k < 0 for k in numbers):
        raise ValueError(f"steps must be one or more whole numbers >= 0, got {steps!r}")
    return numbers
