"""First-order methods apart from plain descent, and bounds on all of them: Chebyshev, online, any filter."""

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.card import Algorithm, FitProblem, FittedAlgorithm, register
from mechicl.algorithms.gradient_descent import per_step
from mechicl.algorithms.sizes import Sized
from mechicl.algorithms.spectra import Steps, above_rounding, linear_trajectory, spectral_trajectory, step_numbers
from mechicl.algorithms.spectral_fit import SpectralLearner, SpectralProblem, hats, polynomials
from mechicl.algorithms.stepwise.base import StepwiseAlgorithm
from mechicl.algorithms.stepwise.descent import OnlineDescent
from mechicl.algorithms.tuning import geometric_grid, minimize_on_grid
from mechicl.base.arguments import Fraction, checked
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

    Args:
        steps: number k of steps, or several in any order; 0 predicts 0.
        at: "query" for the last point only (a point axis of length 1), "points" for every prefix.
        with_weights: also return the weights W of each prediction `x W`, as `weights` `[step prompt point x y]`.

    Returns:
        `Trajectory`: `predictions` `[step prompt point y]`, point t predicted from those before; `query()` is the last.
    """
    numbers = step_numbers(steps)
    return spectral_trajectory(
        prompts,
        lambda eigenvalues: torch.stack([chebyshev_filter(eigenvalues, k) for k in numbers]),
        name="Chebyshev",
        steps=numbers,
        at=at,
        with_weights=with_weights,
    )


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
    residual = residual * _reciprocal_cosh(degree * torch.acosh(z_at_zero.clamp(min=1)))
    residual = torch.where(point_like, 1.0 if degree == 0 else 0.0, residual)
    return torch.where(present, (1 - residual) / eigenvalues.masked_fill(~present, 1.0), 0.0)


def _reciprocal_cosh(angle: Tensor) -> Tensor:
    return 2 * torch.exp(-angle) / (1 + torch.exp(-2 * angle))  # where cosh would overflow, this is 0


@checked
def online_gradient_descent(
    prompts: Sized, *, step_size: float | None = None, discount: Fraction = 1.0, at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:  # fmt: skip
    """Make one pass of gradient descent over the context, one point a step, in the order of the prompt.

    `W ← γ W`, `W ← W - a_t x_tᵀ (x_t W - y_t)` for each point, from 0: least mean squares, with weight decay for γ < 1.
    Source: Fu et al. 2024, section 3.2 and Table 1; Widrow & Hoff 1960, for least mean squares.

    Args:
        step_size: a, the same for all points; by default `1 / |x_t|²`, with which each point is fitted exactly in its
            step (points at 0 are left out).
        discount: γ, the factor on the weights before each step; 1 for no weight decay.
        at: "query" for the last point only (a point axis of length 1), "points" for every prefix.
        with_weights: also return the weights W of each prediction `x W`, as `weights` `[1 prompt point x y]`.

    Returns:
        `Trajectory`: `predictions` `[1 prompt point y]`, point t predicted from points 0..t-1; `query()` is the last.
    """
    if step_size is not None:
        per_step("step_size", step_size, 1)

    def rate(squared: Tensor) -> Tensor:
        if step_size is None:
            return torch.where(squared > 0, 1 / squared.masked_fill(squared == 0, 1.0), 0.0)
        return torch.full_like(squared, step_size)

    return descend_online(prompts, rate, "online GD", at, with_weights, discount)


def descend_online(
    prompts: Prompts,
    rate: Callable[[Float[Tensor, "prompt 1 1"]], Tensor],
    name: str,
    at: PointsAt,
    with_weights: bool,
    discount: float = 1.0,
) -> Trajectory:
    """Make one pass over the context with a step size that may depend on the squared norm of each input."""
    xs, ys = prompts.xs.double(), prompts.ys.double()
    weights = xs.new_zeros(len(prompts), prompts.x_dim, prompts.y_dim)
    before = []
    for t in range(prompts.n_context + 1):
        x = xs[:, t, None]
        before.append(weights)
        weights = discount * weights
        weights = weights - rate(x.square().sum(-1, keepdim=True)) * x.mT @ (x @ weights - ys[:, t, None])
    return linear_trajectory(prompts, torch.stack(before, dim=1), name, at, with_weights)


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


def fit_online(problem: FitProblem) -> FittedAlgorithm:
    """Fit one pass over the context: by the step size nearest to the targets, or 1 / |x|² if that is nearer."""

    def error(step_size: float | None) -> float:
        return problem.error(online_gradient_descent(problem.prompts, step_size=step_size, at="query").query()[0])

    typical = 1 / problem.prompts.context.xs.square().sum(-1).mean().item()
    step_size, least_error = minimize_on_grid(error, geometric_grid(0.01 * typical, 4 * typical, 16))
    best = None if error(None) <= least_error else step_size  # None: 1 / |x|²
    learner = AlgorithmLearner(online_gradient_descent, {"step_size": best})
    settings = {} if best is None else {"step_size": best}
    return FittedAlgorithm(ONLINE.name, learner, settings, len(settings))


def _online_steps(problem: FitProblem) -> Iterator[StepwiseAlgorithm]:
    step_size = fit_online(problem).hyperparameters.get("step_size")
    yield OnlineDescent(problem.prompts.n_context, step_size=step_size, causal=problem.causal)


ANY_POLYNOMIAL = register(
    Algorithm(
        name="any first-order learner",
        # with one step, gradient descent is the only one
        fit=lambda problem: (
            [fit_polynomial(problem.spectral, problem.steps, ANY_POLYNOMIAL.member(problem.steps))]
            if problem.steps > 1
            else []
        ),
        for_scale=True,
    )
)
CHEBYSHEV = register(
    Algorithm(
        name="Chebyshev",
        trajectory=chebyshev,
        fit=_fit_chebyshev,
        path=lambda _: {"steps": tuple(range(1, 31))},
        freedom="per prefix",
        phrase="{count} of Chebyshev's iteration",
    )
)
ANY_FILTER = register(Algorithm(name="any function of S", fit=_fit_any_filter, for_scale=True))
ONLINE = register(
    Algorithm(
        name="online gradient descent",
        trajectory=online_gradient_descent,
        fit=lambda problem: [fit_online(problem)],
        step_forms=_online_steps,
        step_kinds={"online gradient descent": ("online", "")},
    )
)
