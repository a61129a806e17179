"""The cards of gradient descent, GD++ and gradient descent with momentum: how they are fitted, and their step forms."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mechicl.algorithms.card import EACH, FILTER, ROUNDING, FitProblem, FittedAlgorithm, new_card
from mechicl.algorithms.gradient_descent import (
    gd_plus_plus,
    gd_plus_plus_filters,
    gradient_descent,
    gradient_descent_filter,
    momentum_filter,
)
from mechicl.algorithms.spectral_fit import MARGIN, SCREENING, SpectralLearner, SpectralProblem, largest_stable
from mechicl.algorithms.stepwise.base import StepwiseAlgorithm, count, query_of
from mechicl.algorithms.stepwise.descent import QueryDescent, ResidualDescent
from mechicl.algorithms.tuning import geometric_grid, least_squares, simplex, stable_step_size, tuned_each_step
from mechicl.prompts import Prompts

MOST_STEPS = 12  # of families with separate parameters for each step
FEW_STEPS = (2, 3, 4)
"""Numbers of steps that are tried in addition to the model's number of layers."""
# 65,536, where Fu et al. have 4,096, so that no layer's best lies at the end; any number of steps costs the same
PATH_STEPS = tuple(sorted({round(2 ** (i / 3)) for i in range(49)}))
TUNED_STEPS = 32  # with a tuned step size each
PAST = "each point from its past"
FEW, FEWER = 256, 128  # prompts on which step forms are fitted; fewer where every try runs the algorithm

Form = TypeVar("Form", bound=StepwiseAlgorithm)


def few_steps(problem: FitProblem) -> list[int]:
    """Return the numbers of steps to try of a family that is fitted anew for each."""
    return sorted({*FEW_STEPS, min(problem.steps, MOST_STEPS)})


def fewest_steps(fits: Sequence[tuple[float, int, Any]], problem: FitProblem) -> tuple[float, int, Any]:
    """Return the fit (error, steps, parameters) with the fewest steps of those with nearly the least error."""
    limit = 1.001 * min(fit[0] for fit in fits) + ROUNDING * problem.targets.square().mean().item()
    return min((fit for fit in fits if fit[0] <= limit), key=lambda fit: fit[1])


def _fit_descent(problem: FitProblem) -> Iterator[FittedAlgorithm]:
    spectral, steps = problem.spectral, problem.steps
    typical, largest = spectral.eigenvalues.amax(-1).mean().item(), MARGIN * spectral.eigenvalues.max().item()
    numbers = sorted({steps, *range(1, 9), *(2**i for i in range(4, 11))})

    def grid(k: int) -> list[float]:
        return geometric_grid(4e-3 / typical / k, min(20 / typical, largest_stable(k) / largest), 40)

    k, step_size, _ = spectral.least_steps(gradient_descent_filter, numbers, grid)
    name = GRADIENT_DESCENT.member(k)
    learner = SpectralLearner(partial(gradient_descent_filter, steps=k, step_size=step_size), name)
    yield FittedAlgorithm(name, learner, {"step_size": step_size}, 2)
    if steps > 1:
        yield fit_steps(spectral, min(steps, MOST_STEPS), gamma=False, per_step=True)


def split_parameters(values: Tensor, steps: int, *, gamma: bool, per_step: bool) -> tuple[Tensor, Tensor]:
    """Return a step size and a γ for each step from values with the step sizes first; missing γ are 0."""
    n_sizes = steps if per_step else 1
    a, g = values[:n_sizes], values[n_sizes:]
    if per_step:  # the last step's γ has no effect
        return a, torch.cat([g, torch.zeros_like(a[: n_sizes - len(g)])])
    a = a.expand(steps, *a.shape[1:])
    return a, g.expand(steps, *g.shape[1:]) if gamma else torch.zeros_like(a)


def descent_filter(values: Tensor, eigenvalues: Tensor, *, steps: int, gamma: bool, per_step: bool) -> Tensor:
    """Return the filter of gradient descent or GD++ by the values of `split_parameters`, which broadcast."""
    return gd_plus_plus_filters(eigenvalues, *split_parameters(values, steps, gamma=gamma, per_step=per_step))[-1]


def parameter_labels(steps: int, *, gamma: bool, per_step: bool) -> list[str]:
    """Return the names of the values of `descent_filter`."""
    if not per_step:
        return ["step_size", "gamma"][: 1 + gamma]
    return [f"step_size_{i + 1}" for i in range(steps)] + [f"gamma_{i + 1}" for i in range(max(steps - 1, 1) * gamma)]


def fit_steps(spectral: SpectralProblem, steps: int, *, gamma: bool, per_step: bool) -> FittedAlgorithm:
    """Fit gradient descent or GD++ with a given number of steps (Levenberg-Marquardt from several starts)."""
    labels = parameter_labels(steps, gamma=gamma, per_step=per_step)
    n_sizes = steps if per_step else 1
    family = partial(descent_filter, steps=steps, gamma=gamma, per_step=per_step)
    # γ shrinks the largest eigenvalues, so that later steps may be larger: by nothing, by 2 and by 5 a step
    size = 1 / spectral.eigenvalues.amax(-1).mean().item()
    steps_of = torch.arange(n_sizes), torch.arange(len(labels) - n_sizes)
    starts = [
        torch.cat([share * size * growth ** steps_of[0], g * size * growth ** steps_of[1]]).double()
        for share, g, growth in ((0.3, 0.1, 1), (1, 0.3, 1), (1, 0.05, 1.5), (2, 0.3, 1), (0.6, 0.3, 2), (0.6, 0.6, 5))
        if gamma or growth == 1
    ]

    def nearest(screening: SpectralProblem, whole: SpectralProblem) -> Tensor:
        screened = []
        for start in starts:
            screened.append(screening.descend(partial(family, eigenvalues=screening.eigenvalues), start))
            if screened[-1][1] < 1e-3 * ROUNDING * screening.targets.square().mean().item():
                break  # exact: no other start comes nearer
        screened.sort(key=lambda fit: fit[1])
        on_whole = partial(family, eigenvalues=whole.eigenvalues)
        polished = (whole.descend(on_whole, parameters, evaluations=100) for parameters, _ in screened[:2])
        return min(polished, key=lambda fit: fit[1])[0]

    few = spectral.first(SCREENING)
    best = nearest(few, spectral)
    if spectral.explodes(partial(family, best)):
        best = nearest(few.guarded(), spectral.guarded())
    hyperparameters = dict(zip(labels, best.tolist(), strict=False))
    card = GD_PLUS_PLUS if gamma else GRADIENT_DESCENT
    learner = SpectralLearner(partial(family, best), card.member(steps, EACH if per_step else ""), hyperparameters)
    return FittedAlgorithm(learner.name, learner, hyperparameters, len(best), n_given=1)


def _fit_momentum(problem: FitProblem) -> Iterator[FittedAlgorithm]:
    if problem.steps == 1:
        return
    spectral = problem.spectral
    few, largest = spectral.first(SCREENING), spectral.eigenvalues.max().item()

    def family(eigenvalues: Tensor, steps: int, values: Tensor) -> Tensor:
        """Take the logarithm of the step size and the logit of the momentum, which therefore stay in bounds."""
        return momentum_filter(eigenvalues, steps, values[0].exp(), values[1].sigmoid())

    sizes = torch.logspace(math.log10(0.02 / largest), math.log10(3 / largest), 16, dtype=torch.float64)
    starts = torch.cartesian_prod(sizes.log(), torch.linspace(-2.5, 2.5, 7, dtype=torch.float64))
    fits = []
    for k in few_steps(problem):
        errors = few.errors(family(few.eigenvalues, k, starts.T[:, :, None, None]))
        on_all = partial(family, spectral.eigenvalues, k)
        values, error = spectral.descend(on_all, starts[int(errors.argmin())], evaluations=40)
        fits.append((error, k, values))
    _, k, values = fewest_steps(fits, problem)
    settings = {"step_size": values[0].exp().item(), "momentum": values[1].sigmoid().item()}
    learner = SpectralLearner(partial(momentum_filter, steps=k, **settings), MOMENTUM.member(k), settings)
    yield FittedAlgorithm(learner.name, learner, settings, 3)


# ---- step forms ----


def named(algorithm: Form, name: str, *, causal: bool = False) -> Form:
    """Give a step form a name, with the addition that its points read only their past."""
    algorithm.name = f"{name}, {PAST}" if causal else name
    return algorithm


def _shared_step_size(spectral: SpectralProblem, steps: int) -> tuple[float, float]:
    largest = spectral.eigenvalues.max().item()
    grid = geometric_grid(1e-3 / largest, 2.2 / largest)
    return spectral.least(lambda a: gradient_descent_filter(spectral.eigenvalues, steps, a), grid)


def _descent_steps(problem: FitProblem) -> Iterator[StepwiseAlgorithm]:
    spectral, steps = problem.spectral, problem.steps
    fits = {k: _shared_step_size(spectral, k) for k in range(1, 2 * steps + 1)}
    least = min(fits, key=lambda k: fits[k][1])
    for k in dict.fromkeys((steps, least)):
        size = fits[k][0]
        yield QueryDescent(k, step_size=size)
        yield _causal_descent(problem, [size], k) if problem.causal else ResidualDescent(k, step_size=size)
    if steps == 1:
        return
    sizes, _ = _parameters_of_steps(problem, with_gammas=False)
    each = f"gradient descent, {steps} steps, a step size each"
    yield named(QueryDescent(steps, step_size=sizes), f"{each}, by the query alone")
    if problem.causal:
        yield _causal_descent(problem, sizes, steps)
    else:
        yield named(ResidualDescent(steps, step_size=sizes), f"{each}, residuals in the context")


def _gd_plus_plus_steps(problem: FitProblem) -> Iterator[StepwiseAlgorithm]:
    if problem.steps == 1:
        return
    sizes, gammas = _parameters_of_steps(problem, with_gammas=True)
    if problem.causal:
        yield _causal_descent(problem, [*sizes, *gammas[:-1]], problem.steps, with_gammas=True)
        return
    algorithm = ResidualDescent(problem.steps, step_size=sizes, gamma=gammas)
    yield named(algorithm, f"GD++, {problem.steps} steps, parameters for each")


def _momentum_steps(problem: FitProblem) -> Iterator[StepwiseAlgorithm]:
    if problem.steps == 1:
        return
    few, largest = problem.first(FEWER), problem.spectral.eigenvalues.max().item()
    grid = itertools.product(geometric_grid(0.02 / largest, 2 / largest, 12), (0.15, 0.3, 0.45, 0.6, 0.75, 0.9))
    form = partial(ResidualDescent, problem.steps, causal=problem.causal)

    def error(pair: Any) -> float:
        return few.error(form(step_size=float(pair[0]), momentum=float(pair[1])).predict(few.prompts))

    step_size, momentum = simplex(error, min(grid, key=error), xatol=1e-4, fatol=1e-4).tolist()
    algorithm = form(step_size=step_size, momentum=momentum)
    yield named(algorithm, algorithm.name, causal=problem.causal)


def _causal_descent(
    problem: FitProblem, start: Sequence[float], steps: int, *, with_gammas: bool = False
) -> StepwiseAlgorithm:
    """Fit descent whose points each read their own past, by step sizes and γ.

    `start`: one step size for the last prediction, or step sizes (and all γ but the last) for all predictions.
    """
    few, each = problem.first(FEWER), len(start) > 1
    targets = few.after_steps if each else few.targets[None]

    def make(values: Any) -> ResidualDescent:
        sizes, gammas = split_parameters(torch.as_tensor(values), steps, gamma=with_gammas, per_step=each)
        return ResidualDescent(steps, step_size=sizes.tolist(), gamma=gammas.tolist(), causal=True)

    def residuals(values: Any) -> Tensor:
        algorithm = make(values)
        states = algorithm.states(few.prompts)[-len(targets) :]
        return torch.stack([algorithm.read(query_of(state)) for state in states]) - targets

    starts = np.array([start, 0.5 * np.array(start)])
    fits = [least_squares(residuals, each, floor=1e-3 * abs(each).max(), evaluations=20) for each in starts]
    kind = f"gradient descent, {count(steps, 'step')}{', a step size each' if each else ''}"
    kind = f"GD++, {steps} steps, parameters for each" if with_gammas else kind
    return named(make(min(fits, key=lambda fit: fit.cost).x), kind, causal=True)


def _parameters_of_steps(problem: FitProblem, *, with_gammas: bool) -> tuple[list[float], list[float]]:
    """Return the step sizes, and γ, whose predictions after every step come nearest to the model's."""
    spectral, steps = problem.spectral, problem.steps
    few, targets = spectral.first(FEW), problem.after_steps[:, :FEW]
    unit, step_size = 1 / spectral.eigenvalues.max().item(), _shared_step_size(spectral, steps)[0]

    def split(values: Any) -> tuple[Tensor, Tensor]:
        return split_parameters(unit * torch.as_tensor(values), steps, gamma=with_gammas, per_step=True)

    def residuals(values: Any) -> Tensor:
        filtered = gd_plus_plus_filters(few.eigenvalues, *split(values))[1:]
        return (filtered[..., None] * few.contributions).sum(2) - targets

    fits = []
    for size, gamma, growth in ((step_size / unit, 0.05, 1.0), (0.6, 0.3, 1.0), (0.6, 0.3, 2.0), (0.6, 0.6, 3.0)):
        grown = growth ** torch.arange(steps, dtype=torch.float64)
        start = torch.cat([size * grown, gamma * grown[:-1]]) if with_gammas else size * grown
        fits.append(least_squares(residuals, start.numpy(), floor=1e-3, evaluations=60))
    sizes, gammas = split(min(fits, key=lambda fit: fit.cost).x)
    return sizes.tolist(), gammas.tolist()


def _tuned_path(prompts: Prompts) -> dict[str, Any]:
    def advance(k: int, eigenvalues: Tensor, before: Tensor, factor: float) -> Tensor:
        largest = eigenvalues.amax(-1, keepdim=True).clamp(min=1e-300)
        return before + factor / largest * (1 - eigenvalues * before)

    sizes = tuned_each_step(prompts, TUNED_STEPS, advance)
    return {"steps": tuple(range(1, TUNED_STEPS + 1)), "step_size": sizes, "per_prefix": True}


GRADIENT_DESCENT = new_card(
    name="gradient descent",
    holds=FILTER,
    violates=("scale of the inputs", "shift of the targets"),
    trajectory=gradient_descent,
    fit=_fit_descent,
    path=lambda _: {"steps": PATH_STEPS, "step_size": 1.0, "per_prefix": True},
    freedom="per prefix",
    other_paths={
        "fixed": lambda prompts: {"steps": PATH_STEPS, "step_size": stable_step_size(prompts)},
        "tuned per step": _tuned_path,
    },
    step_forms=_descent_steps,
    step_kinds={
        "gradient descent, residuals in the context": ("gradient descent", ""),
        "gradient descent by the query alone": ("gradient descent", "by the query alone"),
    },
    phrase="{count} of gradient descent",
    variants={EACH: f" with {EACH}"},
)
GD_PLUS_PLUS = new_card(
    name="GD++",
    holds=FILTER,
    violates=("scale of the inputs", "shift of the targets"),
    trajectory=gd_plus_plus,
    fit=lambda problem: [
        fit_steps(problem.spectral, min(problem.steps, MOST_STEPS), gamma=True, per_step=per_step)
        for per_step in ((False, True) if problem.steps > 1 else ())  # the last step's γ does nothing
    ],
    step_forms=_gd_plus_plus_steps,
    contains=("gradient descent",),
    phrase="{count} of GD++",
    variants={EACH: f" with {EACH}"},
)
MOMENTUM = new_card(
    name="gradient descent with momentum",
    holds=FILTER,
    violates=("scale of the inputs", "shift of the targets"),
    fit=_fit_momentum,
    step_forms=_momentum_steps,
    contains=("gradient descent",),
    phrase="{count} of gradient descent with momentum",
)
