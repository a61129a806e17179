"""Iterative Newton for the inverse of the context's second moments: as a trajectory, fitted, and step by step."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.card import FILTER, FitProblem, FittedAlgorithm, new_card
from mechicl.algorithms.descent_cards import FEW, FEWER, named
from mechicl.algorithms.sizes import SizedForFourthPowers
from mechicl.algorithms.spectra import Steps, context_moments, iterates, safe_norm, spectral_trajectory, step_numbers
from mechicl.algorithms.spectral_fit import MARGIN, SpectralLearner, SpectralProblem, largest_stable
from mechicl.algorithms.stepwise.base import StepwiseAlgorithm
from mechicl.algorithms.stepwise.inverses import NewtonSteps
from mechicl.algorithms.tuning import geometric_grid, tuned_each_step
from mechicl.base.arguments import Positive, checked
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt

PATH_ITERATIONS = tuple(range(1, 24))
MOST_ITERATIONS = 12  # of the step forms


@checked
def newton(
    prompts: SizedForFourthPowers,
    steps: Steps = 1,
    *,
    alpha: Positive | None = None,
    factors: Sequence[float] | None = None,
    at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:
    """Run iterative Newton for the inverse of S: `M_0 = αS`, `M_{k+1} = 2 M_k - M_k S M_k`, prediction `x M_k B`.

    S = XᵀX and B = XᵀY sum over the points before the predicted one. Source: Fu et al. 2024, section 3.2 and C.3,
    whose `α = 2 / ‖S Sᵀ‖₂` is on the boundary and does not converge; the authors' code has the default.

    Args:
        steps: number of iterations, or several in any order; 0 predicts `x αS B`.
        alpha: α, the same for all prefixes; by default `1 / ‖S Sᵀ‖_F` of each prefix, with which it always converges.
        factors: multiply the start αS and each iteration's result by these numbers, one more than the largest of
            `steps`; none by default.

    Raises:
        ValueError: `alpha` is too large to converge on these prompts.
    """
    numbers = step_numbers(steps)
    if factors is not None and len(factors) != max(numbers) + 1:
        raise ValueError(
            f"factors must be {max(numbers) + 1} numbers for {max(numbers)} iterations, got {len(factors)}"
        )

    def filters(eigenvalues: Tensor) -> Tensor:
        if alpha is None:
            # ‖S Sᵀ‖_F = ‖λ²‖ >= λ_max², so that 0 < αλ² <= 1 and all errors 1 - αλ² lie in [0, 1): it converges for
            # every context, a network can compute it without eigenvalues, and it is 1 / λ_max² for a single direction.
            each = 1 / _norms(eigenvalues)
        else:
            each = alpha
            if bool((alpha * eigenvalues.square() >= 2).any()):
                limit = 2 / eigenvalues.square().max().item()
                raise ValueError(f"alpha={alpha:g} does not converge: on these prompts it must be below {limit:g}")
        scales = [1.0] * (max(numbers) + 1) if factors is None else factors
        return iterates(
            lambda k, inverse: scales[k + 1] * inverse * (2 - eigenvalues * inverse),
            scales[0] * each * eigenvalues,
            numbers,
        )

    return spectral_trajectory(prompts, filters, name="Newton", steps=numbers, at=at, with_weights=with_weights)


def _norms(eigenvalues: Float[Tensor, "*any x"]) -> Float[Tensor, "*any 1"]:
    """Return `‖S Sᵀ‖_F`; for a prefix of zeros 1e-300, which keeps α finite."""
    return safe_norm(eigenvalues.square())


def newton_filter(eigenvalues: Float[Tensor, "*any"], steps: int, alpha: float | Tensor) -> Float[Tensor, "..."]:
    """Return `m_k` of `m ← m (2 - λm)` from αλ: the error `1 - λm` is squared in each step, from `1 - αλ²`.

    Differentiable with respect to α, a number or a tensor that broadcasts. It converges for `0 < αλ² < 2`.
    """
    return iterates(lambda _, inverse: inverse * (2 - eigenvalues * inverse), alpha * eigenvalues, [steps])[0]


def fit_newton(spectral: SpectralProblem, numbers: Sequence[int]) -> FittedAlgorithm:
    """Fit Newton's method from αS, with one α for all contexts or with α relative to each context's 1/|SSᵀ|."""

    def relative(eigenvalues: Tensor, k: int, share: float | Tensor) -> Tensor:
        return newton_filter(eigenvalues, k, share / _norms(eigenvalues))

    def grid(k: int, typical: float, largest: float) -> list[float]:
        return geometric_grid(1e-4 / typical, min(1e2 / typical, largest_stable(2**k) / largest), 20)

    typical = _norms(spectral.eigenvalues).mean().item()
    largest = (MARGIN * spectral.eigenvalues.max().item()) ** 2
    # filter, label, whether f(λ) depends on λ alone, and the typical and largest λ² in the unit of 1/α
    choices = (
        (relative, "alpha over 1/|SSᵀ|", False, partial(grid, typical=1, largest=1)),
        (newton_filter, "alpha", True, partial(grid, typical=typical, largest=largest)),
    )
    fits = [(*spectral.least_steps(choice[0], numbers, choice[3]), choice[:3]) for choice in choices]
    k, alpha, _, (family, label, elementwise) = min(fits, key=lambda fit: fit[2])
    name = NEWTON.member(k)
    learner = SpectralLearner(
        lambda eigenvalues: family(eigenvalues, k, alpha), name, {label: alpha}, elementwise=elementwise
    )
    return FittedAlgorithm(name, learner, {label: alpha}, 1 + (len(numbers) > 1))


def _newton_steps(problem: FitProblem) -> Iterator[StepwiseAlgorithm]:
    iterations, parameters = _causal_parameters(problem) if problem.causal else _parameters(problem)
    for answer in ("at the end", "anew", "running"):
        algorithm = NewtonSteps(iterations, answer=answer, causal=problem.causal, **parameters)
        yield named(algorithm, algorithm.name, causal=problem.causal)


def _parameters(problem: FitProblem) -> tuple[int, dict[str, float]]:
    few = problem.spectral.first(FEW)
    largest = few.eigenvalues.max().item() ** 2
    fits = []
    for iterations in range(MOST_ITERATIONS + 1):
        grids = {"share": geometric_grid(1e-3, 1.9, 20), "alpha": geometric_grid(1e-4 / largest, 1.9 / largest, 20)}
        for name, grid in grids.items():
            unit = 1 / _norms(few.eigenvalues) if name == "share" else 1.0
            value, error = few.least(lambda v, k=iterations, u=unit: newton_filter(few.eigenvalues, k, v * u), grid)
            fits.append((error, iterations, {name: value}))
    least = min(error for error, *_ in fits)
    _, iterations, parameters = min((fit for fit in fits if fit[0] <= 1.001 * least), key=lambda fit: fit[1])
    return iterations, parameters


def _causal_parameters(problem: FitProblem) -> tuple[int, dict[str, float]]:
    few = problem.first(FEWER)

    def error(iterations: int, parameter: str, value: float) -> float:
        return few.error(NewtonSteps(iterations, causal=True, **{parameter: value}).predict(few.prompts))  # type: ignore[arg-type]

    largest = problem.spectral.eigenvalues.max().item() ** 2
    grids = {"share": geometric_grid(1e-2, 1.9, 8), "alpha": geometric_grid(1e-3 / largest, 1.9 / largest, 8)}
    choices = [(k, name, v) for k in range(MOST_ITERATIONS + 1) for name, grid in grids.items() for v in grid]
    iterations, parameter, value = min(choices, key=lambda choice: error(*choice))
    return iterations, {parameter: value}


def _fixed_path(prompts: Prompts) -> dict[str, Any]:
    eigenvalues = torch.linalg.eigvalsh(context_moments(prompts, "query")[0])
    return {"steps": PATH_ITERATIONS, "alpha": 1 / _norms(eigenvalues).max().item()}


def _tuned_path(prompts: Prompts) -> dict[str, Any]:
    def advance(k: int, eigenvalues: Tensor, before: Tensor, factor: float) -> Tensor:
        moved = before * (2 - eigenvalues * before) if k else eigenvalues / _norms(eigenvalues)
        return factor * moved

    return {"steps": PATH_ITERATIONS, "factors": tuned_each_step(prompts, max(PATH_ITERATIONS) + 1, advance)}


NEWTON = new_card(
    name="Newton",
    holds=FILTER,
    violates=("shift of the targets",),
    trajectory=newton,
    fit=lambda problem: [fit_newton(problem.spectral, range(16))],
    path=lambda _: {"steps": PATH_ITERATIONS},
    freedom="per prefix",
    other_paths={"fixed": _fixed_path, "tuned per step": _tuned_path},
    step_forms=_newton_steps,
    phrase="{count} of Newton's method",
    unit="iteration",
)
