"""Algorithms that read the context once and forget: recursive least squares, LMS, discounted moments.

The state has a fixed size, as in recurrent layers; with discount γ, a point k points back has the weight γ^k.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.card import LINEAR, FitProblem, FittedAlgorithm, new_card
from mechicl.algorithms.descent_cards import FEWER
from mechicl.algorithms.gradient_descent import per_step
from mechicl.algorithms.least_squares import EPSILON, LOST, ridge_filter
from mechicl.algorithms.sizes import Sized
from mechicl.algorithms.spectra import ConditioningWarning, in_parts, linear_trajectory, n_before, selected
from mechicl.algorithms.spectral_fit import SCREENING, SpectralProblem
from mechicl.algorithms.stepwise.base import StepwiseAlgorithm
from mechicl.algorithms.stepwise.descent import DiscountedDescent, OnlineDescent, RecursiveSteps
from mechicl.algorithms.tuning import geometric_grid, minimize_on_grid, simplex
from mechicl.base.arguments import Fraction, NonNegative, Positive, between, checked
from mechicl.base.warning import warn
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt

LEAST_DISCOUNT = 1e-3
Discount = Annotated[float, between(LEAST_DISCOUNT, 1)]
"""γ: the weight of a point relative to the one after it."""
DISCOUNTS = (0.3, 0.5, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97, 0.985, 1.0)  # that fits start from


@checked
def online_gradient_descent(
    prompts: Sized, *, step_size: float | None = None, offset: NonNegative | None = None, discount: Fraction = 1.0,
    at: PointsAt = "points", with_weights: bool = False,
) -> Trajectory:  # fmt: skip
    """Make one pass of gradient descent over the context, one point a step, in the order of the prompt.

    `W ← γ W`, `W ← W - a_t x_tᵀ (x_t W - y_t)` for each point, from 0: least mean squares, with weight decay for γ < 1.
    With `offset` ε it is normalised least mean squares, `a_t = a / (ε + |x_t|²)`: stable for a between 0 and 2, and
    with ε = 0 a step takes the share a of the point's error. Source: Fu et al. 2024, section 3.2 and Table 1; Widrow &
    Hoff 1960, for least mean squares; Nagumo & Noda 1967 and Haykin 2002, chapter 6, for normalised ones.

    Args:
        step_size: a, the same for all points; by default 1 with an offset of 0, so that each point is fitted exactly in
            its step (points at 0 are left out).
        offset: ε, in units of x²; None for the plain step size `a_t = a`.
        discount: γ, the factor on the weights before each step; 1 for no weight decay.
    """
    size, offset = (1.0, offset or 0.0) if step_size is None else (per_step("step_size", step_size, 1)[0], offset)
    xs, ys = prompts.xs.double(), prompts.ys.double()
    weights = xs.new_zeros(len(prompts), prompts.x_dim, prompts.y_dim)
    before = []
    for t in range(prompts.n_context + 1):
        x = xs[:, t, None]
        before.append(weights)
        squared = x.square().sum(-1, keepdim=True)
        rate = size if offset is None else size / (offset + squared).masked_fill(squared == 0, torch.inf)
        weights = discount * weights
        weights = weights - rate * x.mT @ (x @ weights - ys[:, t, None])
    name = "online GD" if offset is None or step_size is None else "normalised LMS"
    return linear_trajectory(prompts, torch.stack(before, dim=1), name, at, with_weights)


@checked
def recursive_least_squares(
    prompts: Sized, *, penalty: Positive, discount: Discount = 1.0, fading: bool = True, at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:  # fmt: skip
    """Predict by recursive least squares with forgetting: ridge regression in which old points count less.

    Point t is predicted from points i = 0..t-1 by the W of least `Σ_i γ^(t-1-i) (x_i W - y_i)² + γ^t penalty |W|²`. The
    recursion keeps W and the inverse P of the discounted moments, from `P = I / penalty`; each point adds `P xᵀ (y - x
    W) / (γ + x P xᵀ)` to W. Here the same W is computed in closed form. With γ = 1 it is `ridge`. Source: Plackett
    1950, for the recursion; Haykin 2002, chapter 9, for forgetting; von Oswald et al. 2025 for `fading=False`.

    Args:
        penalty: start of the inverse, `P_0 = I / penalty`.
        discount: γ, between 0.001 and 1; 1 forgets nothing.
        fading: True if the penalty is discounted with the points, as in the recursion; False for a penalty that stays,
            as in a Mesa layer, whose moments decay and whose regulariser does not.

    Warns:
        ConditioningWarning: moments of earlier points, and the faded penalty, are near rounding noise, so that few
            digits are right.

    Example:
        >>> prompts = LinearRegression().sample(4, seed=0)
        >>> recursive_least_squares(prompts, penalty=0.1, discount=0.9).predictions.shape
        torch.Size([1, 4, 11, 1])
    """

    errors: list[float] = []

    def run(part: Prompts) -> Trajectory:
        second, cross = discounted_moments(part, discount, at)
        eigenvalues, vectors = torch.linalg.eigh(second)
        numbers = n_before(part, at)
        penalties = penalty * discount ** (numbers.double() * fading)[:, None]
        # an eigenvalue is known to ε of the largest; directions without a point have none, and no moment
        rank = torch.linalg.matrix_rank(part.context.xs.detach().double())[:, None, None]
        spanned = torch.arange(part.x_dim, device=rank.device) >= part.x_dim - numbers[:, None].minimum(rank)
        known = eigenvalues.detach().clamp(min=0)
        lost = EPSILON * known[..., -1:] / (known + penalties).clamp(min=1e-300)
        errors.append(float(lost.masked_fill(~spanned, 0).amax()) if len(part) else 0.0)
        filtered = ridge_filter(eigenvalues.clamp(min=0), penalties, n_context=part.n_context) * spanned
        weights = vectors @ (filtered[..., None] * (vectors.mT @ cross))
        return linear_trajectory(part, weights, "recursive least squares", at, with_weights)

    trajectory = in_parts(prompts, (prompts.n_context + 1) * prompts.x_dim * max(prompts.x_dim, prompts.y_dim), run)
    if max(errors) > LOST:
        warn(
            f"recursive least squares with the discount {discount:.3g} is right to about {max(errors):.1g} of the "
            "largest weight: earlier points fade into rounding noise. Take a larger discount or penalty",
            ConditioningWarning,
        )
    return trajectory


@checked
def discounted_gradient_descent(
    prompts: Sized, *, step_size: float, discount: Discount = 1.0, at: PointsAt = "points", with_weights: bool = False
) -> Trajectory:
    """Take one step of gradient descent from 0 on `Σ_i γ^(t-1-i) (x_i W - y_i)² / 2`, in which old points count less.

    The weights are `W = a Σ_i γ^(t-1-i) x_iᵀ y_i`: an exponentially weighted sum, which a linear attention layer with a
    decayed state computes. With a discount of 1 it is one step of `gradient_descent`. Source: von Oswald et al. 2023,
    Proposition 1, with the decay of Yang et al. 2024a (gated linear attention).

    Args:
        step_size: a, the factor on the summed gradient.
        discount: γ, between 0.001 and 1; 1 forgets nothing.
    """
    weights = step_size * discounted_moments(prompts, discount, at)[1]
    return linear_trajectory(prompts, weights, "discounted gradient descent", at, with_weights)


@checked
def discounted_averaging(
    prompts: Sized, *, discount: Discount = 1.0, at: PointsAt = "points", with_weights: bool = False
) -> Trajectory:
    """Predict `x W` with the exponentially weighted average `W = Σ_i γ^(t-1-i) x_iᵀ y_i / Σ_i γ^(t-1-i)`.

    With a discount of 1 it is `averaging`. Source: Garg et al. 2022, section 3, for the average; Dao & Gu 2024 for the
    weights of a state-space layer.

    Args:
        discount: γ, between 0.001 and 1; 1 forgets nothing.
    """
    cross = discounted_moments(prompts, discount, at)[1]
    exponents = torch.arange(prompts.n_context + 1, dtype=torch.float64, device=prompts.device)
    before = torch.cat([exponents[:1], (discount**exponents)[:-1].cumsum(0)])  # of γ^0, γ^1, ... for each point
    totals = selected(before, at, axis=0).clamp(min=1e-300)
    return linear_trajectory(prompts, cross / totals[:, None, None], "discounted averaging", at, with_weights)


def discounted_moments(
    prompts: Prompts, discount: float, at: PointsAt
) -> tuple[Float[Tensor, "prompt point x x"], Float[Tensor, "prompt point x y"]]:
    """Return `Σ_i γ^(t-1-i) x_iᵀ x_i` and `Σ_i γ^(t-1-i) x_iᵀ y_i` over the points before each point, float64."""
    xs, ys = prompts.xs.double(), prompts.ys.double()
    both = torch.cat([xs, ys], dim=-1)
    if at == "query":
        ages = torch.arange(prompts.n_context - 1, -1, -1, dtype=torch.float64, device=xs.device)
        sums = ((xs[:, :-1] * (discount**ages)[:, None]).mT @ both[:, :-1])[:, None]
    else:
        total, before = xs.new_zeros(len(prompts), prompts.x_dim, both.shape[-1]), []
        for t in range(prompts.n_context + 1):
            before.append(total)
            total = discount * total + xs[:, t, :, None] * both[:, t, None]
        sums = torch.stack(before, dim=1)
    second, cross = sums.split([prompts.x_dim, prompts.y_dim], dim=-1)
    return second, cross


# ---- cards ----


def _least(
    error: Callable[[FitProblem, Sequence[float]], float], problem: FitProblem, grid: Sequence[Sequence[float]]
) -> list[float]:
    """Return the values with the least error: the best of a grid on a few prompts, then Nelder-Mead's method.

    The search is in logarithms, for the discount γ that of 1 - γ; γ = 1 is tried too.
    """
    few, some = problem.first(SCREENING // 4), problem.first(2 * SCREENING)
    start = min(grid, key=lambda values: error(few, values))

    def value_of(logs: Any) -> list[float]:
        return [min(max(1 - math.exp(logs[0]), LEAST_DISCOUNT), 1.0), *(math.exp(log) for log in logs[1:])]

    logs = np.log([max(1 - start[0], 0.01), *start[1:]])
    forgetting = simplex(lambda x: error(some, value_of(x)), logs)
    lasting = simplex(lambda x: error(some, [1.0, *np.exp(x)]), logs[1:])
    return min([1.0, *np.exp(lasting).tolist()], value_of(forgetting), key=lambda values: error(problem, values))


def at_queries(problem: FitProblem, function: Callable[..., Trajectory], **settings: Any) -> Tensor:
    """Return an algorithm's predictions of the queries, `[prompt y]`."""
    return function(problem.prompts, **settings, at="query").query()[0]


def error_of(problem: FitProblem, function: Callable[..., Trajectory], **settings: Any) -> float:
    """Return the error of an algorithm's predictions of the queries."""
    return problem.error(at_queries(problem, function, **settings))


def nearest_scale(problem: FitProblem, predictions: Tensor) -> float:
    """Return the factor on predictions that brings them nearest to the targets."""
    return ((predictions * problem.targets).sum() / predictions.square().sum().clamp(min=1e-300)).item()


def discounted_spectra(problem: FitProblem, discount: float) -> SpectralProblem:
    """Return the queries' discounted moments in their eigenbases, in which `recursive_least_squares` is a filter."""
    second, cross = (moments[:, 0] for moments in discounted_moments(problem.prompts, discount, "query"))
    eigenvalues, vectors = torch.linalg.eigh(second)
    points = problem.prompts.query.xs.double()[:, None] @ vectors
    return SpectralProblem(eigenvalues.clamp(min=0), points.mT * (vectors.mT @ cross), problem.targets)


def fit_recursive(problem: FitProblem) -> FittedAlgorithm:
    """Fit the discount and the penalty; with one number of points, a lasting penalty replaces a fading one."""
    mean = problem.prompts.context.xs.square().sum(1).mean().item()  # of S's eigenvalues
    grid = [(discount, p) for discount in DISCOUNTS[3:] for p in geometric_grid(1e-6 * mean, 10 * mean, 8)]

    discounted = functools.lru_cache(maxsize=8)(discounted_spectra)  # one decomposition for all penalties

    def error(part: FitProblem, values: Sequence[float]) -> float:
        discount, penalty = values
        if not 1e-12 * mean < penalty < 1e6 * mean:
            return math.inf
        n, spectral = part.prompts.n_context, discounted(part, discount)
        filtered = ridge_filter(spectral.eigenvalues, penalty * discount**n, n_context=n)
        return spectral.error(filtered).nan_to_num(math.inf, math.inf).item()

    discount, penalty = _least(error, problem, grid)
    return RECURSIVE.fitted({"discount": discount, "penalty": penalty})


def fit_online(problem: FitProblem) -> FittedAlgorithm:
    """Fit one pass over the context: by the step size nearest to the targets, or 1 / |x|² if that is nearer."""

    def error(step_size: float | None) -> float:
        return error_of(problem, online_gradient_descent, step_size=step_size)

    typical = 1 / problem.prompts.context.xs.square().sum(-1).mean().item()
    step_size, least_error = minimize_on_grid(error, geometric_grid(0.01 * typical, 4 * typical, 16))
    return ONLINE.fitted({} if error(None) <= least_error else {"step_size": step_size})


def fit_normalized(problem: FitProblem) -> FittedAlgorithm:
    """Fit normalised least mean squares by its step size, and by the offset if that comes nearer."""
    size = problem.prompts.context.xs.square().sum(-1).mean().item()
    some = problem.first(2 * SCREENING)

    def error(part: FitProblem, step_size: float, offset: float = 0.0) -> float:
        return error_of(part, online_gradient_descent, step_size=step_size, offset=offset)

    sizes = geometric_grid(0.02, 2, 12)
    step_size, least = minimize_on_grid(lambda a: error(problem, a), sizes)

    def values_of(logs: Any) -> list[float]:
        return np.exp(np.clip(logs, -30, 10)).tolist()

    starts = [(math.log(a), math.log(e)) for a in (0.3, 1.0) for e in (0.03 * size, 0.3 * size)]
    start = min(starts, key=lambda each: error(some, *values_of(each)))
    step_size_here, offset = values_of(simplex(lambda x: error(some, *values_of(x)), start))
    if error(problem, step_size_here, offset) < 0.999 * least:
        return NORMALIZED.fitted({"step_size": step_size_here, "offset": offset})
    return NORMALIZED.fitted({"step_size": step_size})


def fit_discounted(problem: FitProblem) -> FittedAlgorithm:
    """Fit discounted gradient descent: its step size in closed form, the discount by search."""

    def size_of(discount: float) -> float:
        unit = at_queries(problem, discounted_gradient_descent, step_size=1.0, discount=discount)
        return nearest_scale(problem, unit)

    def error(discount: float) -> float:
        return error_of(problem, discounted_gradient_descent, step_size=size_of(discount), discount=discount)

    discount, _ = minimize_on_grid(error, DISCOUNTS)
    return DISCOUNTED.fitted({"step_size": size_of(discount), "discount": discount}, steps=1)


def fit_discounted_averaging(problem: FitProblem) -> FittedAlgorithm:
    """Fit the exponentially weighted average by its discount."""
    discount, _ = minimize_on_grid(lambda each: error_of(problem, discounted_averaging, discount=each), DISCOUNTS)
    return DISCOUNTED_AVERAGING.fitted({"discount": discount})


def _online_steps(problem: FitProblem, fitted: dict[str, Any]) -> Iterator[StepwiseAlgorithm]:
    yield OnlineDescent(problem.prompts.n_context, **fitted, causal=problem.causal)


def _recursive_steps(problem: FitProblem) -> Iterator[StepwiseAlgorithm]:
    fitted = fit_recursive(problem).hyperparameters
    yield RecursiveSteps(problem.prompts.n_context, **fitted, causal=problem.causal)


def _discounted_steps(problem: FitProblem) -> Iterator[StepwiseAlgorithm]:
    settings = fit_discounted(problem).hyperparameters
    yield DiscountedDescent(1, step_size=settings["step_size"], discount=settings["discount"])
    if problem.steps > 1:
        few = problem.first(FEWER)

        def error(part: FitProblem, values: Sequence[float]) -> float:
            discount, step_size = values
            form = DiscountedDescent(problem.steps, step_size=step_size, discount=discount)
            return part.error(form.predict(part.prompts))

        size = abs(settings["step_size"]) or 1.0
        grid = [(discount, share * size) for discount in DISCOUNTS[3:] for share in (0.2, 0.5, 1.0)]
        discount, step_size = _least(error, few, grid)
        yield DiscountedDescent(problem.steps, step_size=step_size, discount=discount)


ONLINE = new_card(
    name="online gradient descent",
    holds=(*LINEAR, "rotation of the inputs"),
    violates=("order of the points", "moments"),
    trajectory=online_gradient_descent,
    fit=lambda problem: [fit_online(problem)],
    step_forms=lambda problem: _online_steps(problem, fit_online(problem).hyperparameters),
)
RECURSIVE = new_card(
    name="recursive least squares",
    holds=(*LINEAR, "rotation of the inputs"),
    violates=("shift of the targets",),
    trajectory=recursive_least_squares,
    fit=lambda problem: [fit_recursive(problem)],
    step_forms=_recursive_steps,
    contains=("ridge",),
    phrase="recursive least squares with forgetting",
)
NORMALIZED = new_card(
    name="normalised LMS",
    holds=(*LINEAR, "rotation of the inputs"),
    violates=("order of the points", "moments"),
    trajectory=functools.partial(online_gradient_descent, offset=0.0),
    fit=lambda problem: [fit_normalized(problem)],
    step_forms=lambda problem: _online_steps(problem, {"offset": 0.0, **fit_normalized(problem).hyperparameters}),
    contains=("online gradient descent",),
    phrase="normalised least mean squares",
)
DISCOUNTED = new_card(
    name="discounted gradient descent",
    holds=(*LINEAR, "rotation of the inputs"),
    violates=("scale of the inputs", "shift of the targets"),
    trajectory=discounted_gradient_descent,
    fit=lambda problem: [fit_discounted(problem)],
    step_forms=_discounted_steps,
    contains=("gradient descent", "averaging", "discounted averaging"),
    phrase="{count} of discounted gradient descent",
)
DISCOUNTED_AVERAGING = new_card(
    name="discounted averaging",
    holds=(*LINEAR, "rotation of the inputs"),
    violates=("scale of the inputs", "shift of the targets"),
    trajectory=discounted_averaging,
    fit=lambda problem: [fit_discounted_averaging(problem)],
    contains=("averaging",),
    phrase="an exponentially weighted average",
)
