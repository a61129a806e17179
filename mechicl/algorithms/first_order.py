"""First-order methods apart from plain descent, and bounds on all of them: Chebyshev, line searches, any filter."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.card import FILTER, LINE_SEARCH, FitProblem, FittedAlgorithm, new_card
from mechicl.algorithms.sizes import Sized
from mechicl.algorithms.spectra import (
    PrefixSpectra,
    Steps,
    above_rounding,
    in_parts,
    iterates,
    linear_trajectory,
    spectral_trajectory,
    step_numbers,
)
from mechicl.algorithms.spectral_fit import SpectralLearner, SpectralProblem, hats, polynomials
from mechicl.base.arguments import checked
from mechicl.learners import AlgorithmLearner, Trajectory
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt

N_KNOTS = 20


@checked
def chebyshev(prompts: Sized, steps: Steps = 1, *, at: PointsAt = "points", with_weights: bool = False) -> Trajectory:
    """Predict with the Chebyshev polynomial of each degree, the best that any first-order method can do in k steps.

    S = XᵀX and B = XᵀY sum over the points before the predicted one. After k steps the residual in the eigendirection λ
    of S is `T_k(z(λ)) / T_k(z(0))`. T_k is the Chebyshev polynomial, and z maps `[λ_min, λ_max]`, the range of S's
    nonzero eigenvalues, linearly onto [-1, 1]. Of all methods whose weights after k steps are `p(S) B` with a
    polynomial p of degree k - 1, it has the smallest worst-case residual over that interval. Source: Golub & Varga
    1961; Fu et al. 2024, section 4, compare models with gradient descent instead.
    """
    numbers = step_numbers(steps)

    def filters(eigenvalues: Tensor) -> Tensor:
        return torch.stack([chebyshev_filter(eigenvalues, k) for k in numbers])

    return spectral_trajectory(prompts, filters, name="Chebyshev", steps=numbers, at=at, with_weights=with_weights)


def chebyshev_filter(eigenvalues: Float[Tensor, "*any x"], degree: int) -> Float[Tensor, "*any x"]:
    """Return `(1 - T_k(z(λ)) / T_k(z(0))) / λ` on the interval of a prefix's eigenvalues, 0 where these are noise."""
    # A polynomial method's residual after k steps is a polynomial r(λ) = 1 - λ f(λ) of degree k with r(0) = 1. Among
    # these T_k(z(λ)) / T_k(z(0)) is the smallest on [λ_min, λ_max]: it swings k + 1 times between ±1 / T_k(z(0)), and
    # its difference from a smaller one would have k roots there besides the one at 0, too many for its degree.
    # An eigenvalue that is rounding noise would stretch the interval to 0, where no method converges.
    largest = eigenvalues.amax(-1, keepdim=True)
    present = above_rounding(eigenvalues)
    smallest = eigenvalues.masked_fill(~present, math.inf).amin(-1, keepdim=True)
    spread = (largest - smallest).nan_to_num(0.0, 0.0, 0.0)
    point_like = spread <= 1e-12 * largest  # one eigenvalue: the first step solves it
    width = spread.masked_fill(point_like, 1.0)
    z = (largest + smallest - 2 * eigenvalues) / width
    z_at_zero = (largest + smallest) / width
    # T_k(cos φ) = cos kφ inside [-1, 1], where the λ are, and T_k(cosh φ) = cosh kφ beyond, where 0 is: no recursion,
    # and no overflow for any degree
    residual = torch.cos(degree * torch.acos(z.clamp(-1, 1)))
    angle = degree * torch.acosh(z_at_zero.clamp(min=1))
    residual = residual * (2 * torch.exp(-angle) / (1 + torch.exp(-2 * angle)))  # 1 / cosh, 0 where that would overflow
    residual = torch.where(point_like, 1.0 if degree == 0 else 0.0, residual)
    return torch.where(present, (1 - residual) / eigenvalues.masked_fill(~present, 1.0), 0.0)


@checked
def steepest_descent(
    prompts: Sized, steps: Steps = 1, *, at: PointsAt = "points", with_weights: bool = False
) -> Trajectory:
    """Run gradient descent from 0 with exact line search: each step goes to the least error along the gradient.

    S = XᵀX and B = XᵀY sum over the points before the predicted one. With the residual `r = B - S W` a step is `W ← W +
    a r`, `a = |r|² / rᵀSr`. Each target has separate line searches, so that its prediction does not depend on the other
    targets. The cost grows with the largest number of steps. Source: Cauchy 1847.
    """
    return _line_searches(prompts, steps, False, "steepest descent", at, with_weights)


@checked
def conjugate_gradient(
    prompts: Sized, steps: Steps = 1, *, at: PointsAt = "points", with_weights: bool = False
) -> Trajectory:
    """Run conjugate gradients from 0 on `S W = B`: after k steps the least error that k gradients can reach.

    S = XᵀX and B = XᵀY sum over the points before the predicted one. No method whose weights are combinations of `B,
    SB, ..., S^(k-1) B` has a smaller squared error on these points. It ends at least squares, after one step for each
    distinct eigenvalue of S. Each target is a separate problem. Source: Hestenes & Stiefel 1952.
    """
    return _line_searches(prompts, steps, True, "conjugate gradients", at, with_weights)


def _line_searches(
    prompts: Prompts, steps: Steps, conjugate: bool, name: str, at: PointsAt, with_weights: bool
) -> Trajectory:
    """Run the iteration in the eigenbasis of each prefix's S; line searches depend on B, so no filter is shared."""
    numbers = step_numbers(steps)
    n_points = prompts.n_context + 1 if at == "points" else 1
    per_prompt = n_points * prompts.x_dim * max(prompts.x_dim, len(numbers) * prompts.y_dim)

    def run(part: Prompts) -> Trajectory:
        spectra = PrefixSpectra.decompose(part.xs.double(), part.ys.double(), at)
        weights = spectra.eigenvectors @ _search_lines(spectra, numbers, conjugate)
        return linear_trajectory(part, weights, name, at, with_weights, numbers)

    return in_parts(prompts, per_prompt, run)


def _search_lines(
    spectra: PrefixSpectra, numbers: tuple[int, ...], conjugate: bool
) -> Float[Tensor, "step prompt point x y"]:
    """Return the weights' coordinates `UᵀW` after each number of steps."""
    eigenvalues, targets = spectra.eigenvalues[..., None], spectra.target_coordinates
    # λ and B in units of their largest, so that no square under- or overflows; eigenvalues that are rounding noise
    # count as absent, and B is noise there
    largest = eigenvalues.amax(-2, keepdim=True)
    targets = targets.masked_fill(~above_rounding(eigenvalues, dim=-2), 0.0)
    size = targets.abs().amax(-2, keepdim=True)
    eigenvalues, targets = eigenvalues / _or_one(largest), targets / _or_one(size)

    def step(_: int, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        weights, residual, direction = state
        squared, curvature = _squared(residual), (eigenvalues * direction.square()).sum(-2, keepdim=True)
        moving = (squared > 1e-30) & (curvature > 0)  # 0 once the residual is rounding noise of a B of size 1
        length = torch.where(moving, squared / curvature.masked_fill(~moving, 1.0), 0.0)  # |r|² / pᵀSp
        weights = weights + length * direction
        residual = residual - length * eigenvalues * direction
        if conjugate:
            return weights, residual, residual + _squared(residual) / _or_one(squared) * direction
        return weights, residual, residual

    return iterates(step, (torch.zeros_like(targets), targets, targets), numbers) * (size / _or_one(largest))


def _squared(vectors: Tensor) -> Float[Tensor, "prompt point 1 y"]:
    return vectors.square().sum(-2, keepdim=True)


def _or_one(values: Tensor) -> Tensor:
    return values.masked_fill(values == 0, 1.0)


# ---- cards ----


def _fit_chebyshev(problem: FitProblem) -> Iterator[FittedAlgorithm]:
    spectral = problem.spectral
    degrees = range(1, 2 * spectral.eigenvalues.shape[1] + 1)
    best = min(degrees, key=lambda degree: spectral.error(chebyshev_filter(spectral.eigenvalues, degree)).item())
    learner = AlgorithmLearner(chebyshev, {"steps": best})
    yield FittedAlgorithm(CHEBYSHEV.member(best), learner, {"degree": best}, 1)


def fit_polynomial(spectral: SpectralProblem, steps: int, name: str) -> FittedAlgorithm:
    """Fit the best polynomial in S with `steps` terms: the limit of first-order methods with this number of steps."""
    basis = polynomials(steps, spectral.eigenvalues.max().item())
    coefficients = spectral.linear(basis)
    if spectral.explodes(lambda eigenvalues: basis(eigenvalues) @ coefficients):
        coefficients = spectral.guarded().linear(basis)
    learner = SpectralLearner(lambda eigenvalues: basis(eigenvalues) @ coefficients, name)
    return FittedAlgorithm(name, learner, {}, steps, n_given=1)


def _fit_any_filter(problem: FitProblem) -> Iterator[FittedAlgorithm]:
    eigenvalues = problem.spectral.eigenvalues.flatten()
    knots = torch.quantile(eigenvalues[:100_000], torch.linspace(0, 1, N_KNOTS).double()).unique()
    basis = hats(knots)
    coefficients = problem.spectral.linear(basis)
    learner = SpectralLearner(lambda eigenvalues: basis(eigenvalues) @ coefficients, ANY_FILTER.name)
    yield FittedAlgorithm(learner.name, learner, {}, len(knots))


ANY_POLYNOMIAL = new_card(
    name="any first-order learner",
    holds=FILTER,
    violates=("shift of the targets",),
    # with one step, gradient descent is the only one
    fit=lambda problem: (
        [fit_polynomial(problem.spectral, problem.steps, ANY_POLYNOMIAL.member(problem.steps))]
        if problem.steps > 1
        else []
    ),
    for_scale=True,
)
CHEBYSHEV = new_card(
    name="Chebyshev",
    holds=FILTER,
    violates=("shift of the targets",),
    trajectory=chebyshev,
    fit=_fit_chebyshev,
    path=lambda _: {"steps": tuple(range(1, 31))},
    freedom="per prefix",
    phrase="{count} of Chebyshev's iteration",
)
ANY_FILTER = new_card(
    name="any function of S", holds=FILTER, violates=("shift of the targets",), fit=_fit_any_filter, for_scale=True
)
# 28 numbers of steps up to 1024, which runs them all
SEARCH_STEPS = tuple(sorted({round(1024 ** (i / 27)) for i in range(28)}))
STEEPEST_DESCENT = new_card(
    name="steepest descent",
    holds=LINE_SEARCH,
    violates=("shift of the targets",),
    trajectory=steepest_descent,
    path=lambda _: {"steps": SEARCH_STEPS},
    freedom="per prefix",
)
CONJUGATE_GRADIENTS = new_card(
    name="conjugate gradients",
    holds=LINE_SEARCH,
    violates=("shift of the targets",),
    trajectory=conjugate_gradient,
    path=lambda prompts: {"steps": tuple(range(1, 2 * prompts.x_dim + 1))},
    freedom="per prefix",
)
