"""Least squares on the context: minimum norm, ridge, and the Bayes predictor."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.algorithms.card import FILTER, FitProblem, FittedAlgorithm, new_card
from mechicl.algorithms.descent_cards import named
from mechicl.algorithms.sizes import Sized, SizedForFourthPowers
from mechicl.algorithms.spectra import (
    ConditioningWarning,
    Steps,
    n_before,
    safe_norm,
    spectral_trajectory,
    step_numbers,
)
from mechicl.algorithms.stepwise.base import StepwiseAlgorithm
from mechicl.algorithms.stepwise.inverses import ResidualRidge, RidgeByDirections, RidgePath
from mechicl.algorithms.tuning import geometric_grid
from mechicl.base.arguments import NonNegative, Positive, checked
from mechicl.base.warning import warn
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt

EPSILON = torch.finfo(torch.float64).eps
LOST = 1e-5
"""Relative error from which on the user is warned."""
N_PENALTIES = 12  # of a ridge path step by step, each half of the one before


@checked
def ols(prompts: Sized, *, at: PointsAt = "points", with_weights: bool = False) -> Trajectory:
    """Predict by ordinary least squares, `S⁺ B`: the solution of minimum norm where the context allows several.

    S = XᵀX and B = XᵀY sum over the points before the predicted one. Directions whose singular value in X is below `ε
    max(n, d)` times the largest count as absent, with the ε of the prompts' dtype, as in `numpy.linalg.lstsq`. (Prompts
    of half precision have that of float32, as theirs would exclude much of an ordinary context.) Source: Fu et al.
    2024, section 3.1.

    Warns:
        ConditioningWarning: inputs are nearly collinear, or of very different sizes, so that few digits are right.
    """
    return _penalised(prompts, 0.0, "OLS", at, with_weights)


@checked
def ridge(prompts: Sized, *, penalty: Positive, at: PointsAt = "points", with_weights: bool = False) -> Trajectory:
    """Predict by ridge regression: W minimises `Σ_i (x_i W - y_i)² + penalty * |W|²`, that is `(S + penalty I)⁻¹ B`.

    S = XᵀX and B = XᵀY sum over the points before the predicted one. Source: Garg et al. 2022; the lecture notes
    "Transformers as meta-optimizers", Theorem 3.1.

    Args:
        penalty: λ > 0; for no penalty, or one near rounding noise, use `ols`.

    Warns:
        ConditioningWarning: inputs are nearly collinear, or of very different sizes, so that few digits are right.
    """
    return _penalised(prompts, penalty, f"ridge({penalty:g})", at, with_weights)


@checked
def ridge_path(
    prompts: SizedForFourthPowers, steps: Steps = 1, *, at: PointsAt = "points", with_weights: bool = False
) -> Trajectory:
    """Predict by ridge regression `(S + p_k I)⁻¹ B` along a path of penalties, each half of the one before.

    S = XᵀX and B = XᵀY sum over the points before the predicted one. Use it as a control for `newton`: it looks like an
    iteration, but each step is computed in closed form. Its first penalty `p_0 = ‖S Sᵀ‖_F^(1/2)` is slightly larger
    than S's top eigenvalue; it is also the λ at which Newton's first residual `1 - αλ²` is 0. Source: the lecture notes
    "Transformers as meta-optimizers", Theorem 3.1, for each penalty.

    Args:
        steps: number k of halvings, or several in any order; 0 uses `p_0`.
    """
    numbers = step_numbers(steps)

    def filters(eigenvalues: Tensor) -> Tensor:
        size = safe_norm(eigenvalues.square()).sqrt()
        return torch.stack([ridge_filter(eigenvalues, size / 2**k, n_context=prompts.n_context) for k in numbers])

    return spectral_trajectory(prompts, filters, name="ridge path", steps=numbers, at=at, with_weights=with_weights)


@checked
def bayes(
    prompts: Sized,
    *,
    noise_std: NonNegative = 0.0,
    weight_std: Positive = 1.0,
    weight_covariance: Float[Tensor, "x x"] | None = None,
    at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:
    """Predict the posterior mean of linear regression with Gaussian weights and noise: the best possible prediction.

    It is ridge with penalty `noise_std² / weight_std²`, or without noise minimum-norm least squares; with a covariance
    C of the weights, the same on inputs `x C^(1/2)`. Source: the lecture notes "Transformers as meta-optimizers",
    Theorem 3.1.

    Args:
        noise_std: standard deviation of the label noise.
        weight_std: standard deviation of the weights.
        weight_covariance: C, symmetric and without negative eigenvalues: weights are N(0, weight_std² C). By default I.
    """
    if weight_covariance is not None:
        root = _covariance_root(weight_covariance, prompts)
        mapped = Prompts(prompts.xs.double() @ root, prompts.ys.double())
        fitted = bayes(mapped, noise_std=noise_std, weight_std=weight_std, at=at, with_weights=with_weights)
        weights = None if fitted.weights is None else (root @ fitted.weights).to(prompts.dtype)
        return Trajectory(fitted.steps, fitted.predictions.to(prompts.dtype), fitted.name, weights)
    ratio = noise_std / weight_std
    if ratio * ratio == 0:  # no noise, or so little that its square underflows
        return ols(prompts, at=at, with_weights=with_weights)
    return ridge(prompts, penalty=ratio * ratio, at=at, with_weights=with_weights)


def _covariance_root(covariance: Tensor, prompts: Prompts) -> Float[Tensor, "x x"]:
    matrix = covariance.to(prompts.device).double()
    size = (prompts.x_dim, prompts.x_dim)
    if matrix.shape != size or not torch.allclose(matrix, matrix.T):
        raise ValueError(f"weight_covariance must be a symmetric matrix {size}, got {covariance}")
    values, vectors = torch.linalg.eigh(matrix)
    if values[0] < -1e-10 * values.abs().max():
        raise ValueError(f"weight_covariance must have no negative eigenvalue, got {values[0].item():.3g}")
    return vectors * values.clamp(min=0).sqrt() @ vectors.T


def _penalised(prompts: Prompts, penalty: float, name: str, at: PointsAt, with_weights: bool) -> Trajectory:
    """Fit ridge from the eigenvalues of S, or from X itself where these have lost digits that matter."""
    doubtful = []

    def filters(eigenvalues: Tensor) -> Tensor:
        doubtful.append(_are_doubtful(eigenvalues, penalty, prompts))
        return ridge_filter(eigenvalues, penalty, n_context=prompts.n_context)[None]

    options: dict[str, Any] = {"name": name, "at": at, "with_weights": with_weights}
    fitted = spectral_trajectory(prompts, filters, **options)
    rows = torch.cat(doubtful).nonzero()[:, 0]
    if not len(rows):
        return fitted
    noise = relative_noise(prompts)
    errors = []

    def exact_filters(eigenvalues: Tensor) -> Tensor:
        largest = eigenvalues.detach().amax(-1, keepdim=True)
        absent = eigenvalues.detach() <= (noise**2 * largest).clamp(min=1e-300)
        penalised = (eigenvalues + penalty).masked_fill(absent, 1.0)
        # a singular value is known to ε of the largest: the relative error that this gives σ / (σ² + penalty)
        lost = EPSILON * largest.sqrt() * eigenvalues.detach().sqrt() / penalised.detach()
        errors.append(float(lost.masked_fill(absent, 0.0).amax()))
        return torch.where(absent, 0.0, 1 / penalised)[None]

    exact = spectral_trajectory(prompts[rows], exact_filters, **options, of_inputs=True)
    if (error := max(errors)) > LOST:
        warn(
            f"{name} on {len(rows)} of {len(prompts)} prompts is right to about {error:.1g} of the largest weight: "
            "inputs are nearly collinear, or of very different sizes. Scale them, or take a larger penalty",
            ConditioningWarning,
        )
    predictions = fitted.predictions.index_copy(1, rows, exact.predictions)
    weights = None
    if fitted.weights is not None and exact.weights is not None:
        weights = fitted.weights.index_copy(1, rows, exact.weights)
    return Trajectory(fitted.steps, predictions, name, weights)


def relative_noise(prompts: Prompts) -> float:
    """Return the share of the largest singular value up to which others count as absent (see `ols`)."""
    epsilon = min(torch.finfo(prompts.dtype).eps, torch.finfo(torch.float32).eps)
    return epsilon * max(prompts.n_context, prompts.x_dim)


def _are_doubtful(
    eigenvalues: Float[Tensor, "prompt point x"], penalty: float, prompts: Prompts
) -> Bool[Tensor, "prompt"]:
    """Return which prompts have a prefix with an eigenvalue near the rounding noise in S along a spanned direction."""
    n_points, x_dim = eigenvalues.shape[1:]
    numbers = n_before(prompts, "points" if n_points > 1 else "query")
    spanned = torch.arange(x_dim, device=eigenvalues.device) >= x_dim - numbers[:, None]
    largest = eigenvalues.detach().amax(-1, keepdim=True)
    limit = 1e-9 if penalty else max(1e-9, relative_noise(prompts) ** 2)
    near_noise = (eigenvalues.detach() + penalty <= limit * largest) & (largest > 0)
    return (near_noise & spanned).flatten(1).any(1)


def ridge_filter(
    eigenvalues: Float[Tensor, "*any x"], penalty: float | Tensor, *, n_context: int = 0
) -> Float[Tensor, "... x"]:
    """Return `1 / (λ + penalty)`, and 0 where that sum is rounding noise: with no penalty the filter of `ols`.

    Differentiable with respect to the penalty. `n_context` is the number of points in S: more points make more noise.
    """
    # S is known to about n ε of its largest eigenvalue (ε = 2e-16); below 500 times that it is noise.
    # 1e-300 is for prefixes of zeros, whose eigenvalues would all count, and keeps 1 / λ finite.
    size = max(n_context, eigenvalues.shape[-1])
    cutoff = (1e-13 * size * eigenvalues.amax(-1, keepdim=True)).clamp(min=1e-300)
    penalised = eigenvalues + penalty
    absent = penalised <= cutoff
    return torch.where(absent, 0.0, 1 / penalised.masked_fill(absent, 1.0))


def fit_ridge(problem: FitProblem) -> FittedAlgorithm:
    """Fit ridge regression by the penalty nearest to the targets."""
    spectral = problem.spectral
    mean = spectral.eigenvalues.mean().item()
    penalty, _ = spectral.least(
        lambda value: ridge_filter(spectral.eigenvalues, value, n_context=problem.prompts.n_context),
        geometric_grid(1e-8 * mean, 1e2 * mean, 100),
    )
    return RIDGE.fitted({"penalty": penalty})


def _ridge_steps(problem: FitProblem) -> Iterator[StepwiseAlgorithm]:
    penalty = fit_ridge(problem).hyperparameters["penalty"]
    floor = 1e-3 * problem.spectral.eigenvalues.mean().item()
    yield named(RidgePath([penalty]), "ridge regression in one step")
    yield RidgePath([max(penalty, floor) * 2.0**k for k in range(N_PENALTIES - 2, -1, -1)] + [penalty])
    yield RidgeByDirections(problem.prompts.x_dim, penalty=penalty)
    if problem.causal:  # where points learn from their own past, as in a recurrent layer
        yield ResidualRidge(1, penalty=penalty, causal=True)


RIDGE = new_card(
    name="ridge",
    holds=FILTER,
    violates=("shift of the targets", "additive over points"),
    trajectory=ridge,
    fit=lambda problem: [fit_ridge(problem)],
    step_forms=_ridge_steps,
    step_kinds={
        "ridge regression in one step": ("ridge regression in one step", ""),
        "ridge path": ("ridge path", ""),
        "ridge by eigendirections": ("ridge by", ""),
        "ridge of residuals": ("ridge of residuals", ""),
    },
    contains=("least squares",),
    phrase="ridge regression",
)
RIDGE_PATH = new_card(
    name="ridge path",
    holds=FILTER,
    violates=("shift of the targets",),
    trajectory=ridge_path,
    path=lambda _: {"steps": tuple(range(1, 25))},
    freedom="per prefix",
)
LEAST_SQUARES = new_card(
    name="least squares",
    holds=(*FILTER, "scale of the inputs"),
    violates=("shift of the targets", "additive over points"),
    trajectory=ols,
    fit=lambda _: [LEAST_SQUARES.fitted({})],
    path=lambda _: {},
    layer_name="OLS",
)
