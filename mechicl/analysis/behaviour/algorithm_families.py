"""The member of each family of algorithms that comes nearest to a model's predictions, or to a task's targets."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mechicl import algorithms
from mechicl.algorithms.first_order import chebyshev_filter
from mechicl.algorithms.gradient_descent import gd_plus_plus_filters, gradient_descent_filter
from mechicl.algorithms.least_squares import ridge_filter
from mechicl.algorithms.newton import newton_filter
from mechicl.algorithms.search import minimize_on_grid
from mechicl.analysis.behaviour.spectral import SpectralLearner, SpectralProblem, hats, polynomials
from mechicl.learners import AlgorithmFamily, AlgorithmLearner, Learner
from mechicl.prompts import Prompts
from mechicl.tasks import Task

MOST_STEPS = 12  # of families with parameters of their own in each step
N_KNOTS = 20
SCREENING = 512  # prompts on which step numbers and starts are chosen, before the fit on all
MOST_GROWTH, MARGIN = 100, 1.25  # of residuals on contexts whose eigenvalues exceed all those seen by this factor
ROUNDING = 1e-10  # squared distances, relative to squared predictions: below, two learners predict the same


@dataclass(frozen=True, eq=False)
class FittedAlgorithm:
    """A member of a family with its fitted hyperparameters, how many numbers were fitted, and how many were given."""

    name: str
    learner: Learner
    hyperparameters: dict[str, float] = field(default_factory=dict)
    n_fitted: int = 0
    differentiable: bool = True  # with respect to the query
    n_given: int = 0  # 1 where the number of steps is 1, or the model's number of layers, and not fitted


def tuned_descent(prompts: Prompts, steps: int, *, gamma: bool = False, per_step: bool = False) -> SpectralLearner:
    """Gradient descent or GD++ with the least squared error on prompts, as the papers tune what they compare with.

    Args:
        prompts: the tasks to tune on. Deep GD++ needs many: rare contexts with large eigenvalues decide its loss.
        steps: number of steps.
        gamma: GD++ instead of gradient descent; more than one step.
        per_step: a step size (and γ) for each step instead of one for all; the last γ, which does nothing, is left out.

    Raises:
        ValueError: no prompts or no context, or steps < 1.

    Source: von Oswald et al. 2023, section 3 and A.10.

    Example:
        >>> best = tuned_descent(LinearRegression().sample(8192, seed=0), 2, gamma=True)
        >>> sorted(best.hyperparameters)
        ['gamma', 'step_size']
    """
    if gamma and steps == 1:
        raise ValueError("one step of GD++ is one of gradient descent: its γ does nothing")
    if steps < 1 or len(prompts) == 0 or prompts.n_context == 0:
        raise ValueError(f"tuning needs prompts with context and at least one step, got {prompts} and steps={steps}")
    problem = SpectralProblem.from_prompts(prompts, prompts.query.ys)
    learner = _gd_plus_plus(problem, steps, per_step=per_step, gamma=gamma).learner
    assert isinstance(learner, SpectralLearner)
    return learner


def family_fits(
    problem: SpectralProblem, prompts: Prompts, steps: int, task: Task
) -> list[Callable[[], FittedAlgorithm]]:
    """For each family, the fit of its member nearest to the problem's targets, to be called."""
    deep = min(steps, MOST_STEPS)
    fits = [partial(_gradient_descent, problem, steps)]
    if steps > 1:  # one step of gradient descent is the only first-order learner with one step
        fits += [
            partial(_gd_plus_plus, problem, deep, per_step=per_step, gamma=gamma)
            for per_step, gamma in ((False, True), (True, False), (True, True))
        ]
        fits.append(partial(_polynomial, problem, steps, "any first-order learner"))
    return [
        *fits,
        partial(fit_preconditioned, problem, prompts),
        partial(_newton, problem, range(16)),
        partial(fit_ridge, problem, task),
        partial(FittedAlgorithm, "least squares", AlgorithmLearner(algorithms.ols)),
        partial(_chebyshev, problem),
        partial(_any_filter, problem),
        partial(FittedAlgorithm, "averaging", AlgorithmLearner(algorithms.averaging)),
        partial(fit_online, problem, prompts),
        partial(_neighbours, problem, prompts),
    ]


def nearest_member(
    name: str, learner: Learner, prompts: Prompts, targets: Tensor, predict: Callable[[Learner, Prompts], Tensor]
) -> FittedAlgorithm:
    """A learner of the user's, as it is; of an `AlgorithmFamily`, the member nearest to the targets on these prompts.

    Raises:
        ValueError: no member predicts finite numbers.
    """
    if not isinstance(learner, AlgorithmFamily):
        return FittedAlgorithm(name, learner)
    errors = {
        value: (predict(member, prompts) - targets).square().mean().nan_to_num(math.inf, math.inf).item()
        for value, member in zip(learner.values, learner.members(), strict=True)
    }
    best = min(errors, key=lambda value: errors[value])
    if not math.isfinite(errors[best]):
        raise ValueError(f"{name!r} predicts no finite numbers at any {learner.hyperparameter} of {learner.values}")
    member = learner.members()[learner.values.index(best)]
    return FittedAlgorithm(name, member, {learner.hyperparameter: float(best)}, 1)


def limits(problem: SpectralProblem, steps: int, task: Task) -> list[FittedAlgorithm]:
    """The best learners of each order for the problem's targets, the task's own."""
    newton = _newton(problem, [steps])
    second_order = dataclasses.replace(newton, name=f"second order: {newton.name}")
    return [_polynomial(problem, steps, "first order"), second_order, fit_ridge(problem, task)]


def geometric_grid(low: float, high: float, n: int = 60) -> list[float]:
    """Numbers from low to high, each the same factor above the one before."""
    return torch.logspace(math.log10(low), math.log10(high), n, dtype=torch.float64).tolist()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


# Bounds of the searches. A filter f leaves the share 1 - λ f(λ) of the target along an eigendirection: (1 - aλ)^k for k
# steps of gradient descent, (1 - αλ²)^(2^k) for k iterations of Newton's method. Each is a power of 1 - s, which must
# not explode on contexts whose eigenvalues are somewhat larger than those seen: |1 - s|^power <= MOST_GROWTH bounds s
# at MARGIN times the largest eigenvalue, and with it the value that is searched. At the lower end of the grids a whole
# run does less than 1% of the way along the typical largest eigendirection.


def _largest_stable(power: int) -> float:
    return 1 + MOST_GROWTH ** (1 / power)


def _fit_steps_and_value(
    problem: SpectralProblem,
    family: Callable[[Tensor, int, float | Tensor], Tensor],
    numbers: Sequence[int],
    grid: Callable[[int], list[float]],
) -> tuple[int, float, float]:
    """The number of steps, the value and the error of the nearest member; the fewest steps that come as near."""
    few, screened = problem.first(SCREENING), {}

    def screen(k: int) -> None:
        # A grid in the best valley of the last grid, seven times over: unlike Brent's method it evaluates many values
        # at once, and there are dozens of step numbers to screen.
        values = torch.tensor(grid(k), dtype=torch.float64)
        for _ in range(7):
            filtered = family(few.eigenvalues, k, values[:, None, None])
            predicted = torch.einsum("vpx,pxy->vpy", filtered, few.contributions)
            errors = (predicted - few.targets).square().mean((1, 2)).nan_to_num(math.inf)
            i = int(errors.argmin())
            screened[k] = (errors[i].item(), values[i].item())
            ends = values[max(i - 1, 0)].item(), values[min(i + 1, len(values) - 1)].item()
            values = torch.linspace(*ends, 13, dtype=torch.float64)

    for k in numbers:
        screen(k)
    while True:  # bisect between the best number and its neighbours
        best = min(screened, key=screened.__getitem__)
        below = max((k for k in screened if k < best), default=best)
        above = min((k for k in screened if k > best), default=best)
        between = {(below + best) // 2, (best + above + 1) // 2} - screened.keys()
        if not between:
            break
        for k in between:
            screen(k)
    fits = []
    for k in sorted(screened, key=screened.__getitem__)[:3]:
        value = screened[k][1]
        near = geometric_grid(0.6 * value, min(1.5 * value, grid(k)[-1]), 5)
        fits.append((k, *problem.least(lambda value, k=k: family(problem.eigenvalues, k, value), near)))
    least_error = min(error for _, _, error in fits)
    return min(fit for fit in fits if fit[2] <= 1.001 * least_error)


def _gradient_descent(problem: SpectralProblem, steps: int) -> FittedAlgorithm:
    typical, largest = problem.eigenvalues.amax(-1).mean().item(), MARGIN * problem.eigenvalues.max().item()
    numbers = sorted({steps, *range(1, 9), *(2**i for i in range(4, 11))})

    def grid(k: int) -> list[float]:
        return geometric_grid(4e-3 / typical / k, min(20 / typical, _largest_stable(k) / largest), 40)

    k, step_size, _ = _fit_steps_and_value(problem, gradient_descent_filter, numbers, grid)
    name = f"gradient descent, {_count(k, 'step')}"
    learner = SpectralLearner(partial(gradient_descent_filter, steps=k, step_size=step_size), name)
    return FittedAlgorithm(name, learner, {"step_size": step_size}, 2)


def _gd_plus_plus(problem: SpectralProblem, steps: int, *, per_step: bool, gamma: bool) -> FittedAlgorithm:
    """Gradient descent or GD++ with so many steps (Levenberg-Marquardt from several starts)."""
    count = steps if per_step else 1
    n_gammas = (max(count - 1, 1) if per_step else 1) if gamma else 0  # the last step's γ moves nothing any more

    def spread(parameters: Tensor) -> tuple[Tensor, Tensor]:
        a, g = parameters[:count], parameters[count:]
        if per_step:
            return a, torch.cat([g, torch.zeros_like(a[: count - n_gammas])])
        a = a.expand(steps, *a.shape[1:])
        return a, g.expand(steps, *g.shape[1:]) if gamma else torch.zeros_like(a)

    def filtered(parameters: Tensor, eigenvalues: Tensor) -> Tensor:
        return gd_plus_plus_filters(eigenvalues, *spread(parameters))[-1]

    # γ shrinks the largest eigenvalues, so that later steps may be larger: by nothing, by 2 and by 5 a step
    size = 1 / problem.eigenvalues.amax(-1).mean().item()
    starts = [
        torch.cat([share * size * growth ** torch.arange(count), g * size * growth ** torch.arange(n_gammas)]).double()
        for share, g, growth in ((0.3, 0.1, 1), (1, 0.3, 1), (2, 0.3, 1), (0.6, 0.3, 2), (0.6, 0.6, 5))
        if gamma or growth == 1
    ]

    def nearest(screening: SpectralProblem, whole: SpectralProblem) -> Tensor:
        screened = []
        for start in starts:
            screened.append(screening.descend(partial(filtered, eigenvalues=screening.eigenvalues), start))
            if screened[-1][1] < 1e-3 * ROUNDING * screening.targets.square().mean().item():
                break  # exact: no other start comes nearer
        screened.sort(key=lambda fit: fit[1])
        on_whole = partial(filtered, eigenvalues=whole.eigenvalues)
        polished = (whole.descend(on_whole, parameters, evaluations=30) for parameters, _ in screened[:2])
        return min(polished, key=lambda fit: fit[1])[0]

    few = problem.first(SCREENING)
    best = nearest(few, problem)
    if _explodes(problem, partial(filtered, best)):
        best = nearest(few.guarded(MARGIN), problem.guarded(MARGIN))
    kind, each = "GD++" if gamma else "gradient descent", ", parameters for each step" if per_step else ""
    labels = ["step_size", "gamma"]
    if per_step:
        labels = [f"step_size_{i + 1}" for i in range(count)] + [f"gamma_{i + 1}" for i in range(n_gammas)]
    hyperparameters = dict(zip(labels, best.tolist(), strict=False))
    learner = SpectralLearner(partial(filtered, best), f"{kind}, {_count(steps, 'step')}{each}", hyperparameters)
    return FittedAlgorithm(learner.name, learner, hyperparameters, len(best), n_given=1)


def _explodes(problem: SpectralProblem, filtered: Callable[[Tensor], Tensor]) -> bool:
    """Whether a residual beyond the largest eigenvalue seen is more than MOST_GROWTH times the target."""
    beyond = torch.linspace(0, MARGIN, 400, dtype=torch.float64)[1:, None] * problem.eigenvalues.max()
    return not bool(((1 - beyond * filtered(beyond)).abs() <= MOST_GROWTH).all())


def fit_preconditioned(problem: SpectralProblem, prompts: Prompts) -> FittedAlgorithm:
    """One step of preconditioned gradient descent, with the matrix nearest to the targets."""
    # the prediction xᵀ P B / n is linear in P: its entries are a least-squares problem with one column an entry x_i B_j
    context, d = prompts.context, prompts.x_dim
    cross = context.xs.mT @ context.ys / max(prompts.n_context, 1)
    design = torch.einsum("pi,pjy->pyij", prompts.query.xs, cross).flatten(0, 1).flatten(1)
    matrix = torch.linalg.lstsq(design, problem.targets.flatten()[:, None], driver="gelsd").solution.reshape(d, d)
    learner = AlgorithmLearner(algorithms.preconditioned_gd, {"preconditioner": matrix})
    values = torch.linalg.svdvals(matrix)
    described = {"largest singular value": values[0].item(), "smallest": values[-1].item()}
    return FittedAlgorithm("preconditioned gradient descent, 1 step", learner, described, d * d, n_given=1)


def _newton(problem: SpectralProblem, numbers: Sequence[int]) -> FittedAlgorithm:
    """Newton's method from αS, with one α for all contexts or with α relative to each context's 1/|SSᵀ|."""

    def norms(eigenvalues: Tensor) -> Tensor:
        return eigenvalues.square().norm(dim=-1, keepdim=True).clamp(min=1e-300)

    def relative(eigenvalues: Tensor, k: int, share: float | Tensor) -> Tensor:
        return newton_filter(eigenvalues, k, share / norms(eigenvalues))

    def grid(k: int, typical: float, largest: float) -> list[float]:
        return geometric_grid(1e-4 / typical, min(1e2 / typical, _largest_stable(2**k) / largest), 20)

    typical, largest = norms(problem.eigenvalues).mean().item(), (MARGIN * problem.eigenvalues.max().item()) ** 2
    # filter, label, whether f(λ) depends on λ alone, and the typical and largest λ² in the unit of 1/α
    choices = (
        (relative, "alpha over 1/|SSᵀ|", False, partial(grid, typical=1, largest=1)),
        (newton_filter, "alpha", True, partial(grid, typical=typical, largest=largest)),
    )
    fits = [(*_fit_steps_and_value(problem, choice[0], numbers, choice[3]), choice[:3]) for choice in choices]
    k, alpha, _, (family, label, elementwise) = min(fits, key=lambda fit: fit[2])
    name = f"Newton, {_count(k, 'iteration')}"
    learner = SpectralLearner(
        lambda eigenvalues: family(eigenvalues, k, alpha), name, {label: alpha}, elementwise=elementwise
    )
    return FittedAlgorithm(name, learner, {label: alpha}, 1 + (len(numbers) > 1))


def fit_ridge(problem: SpectralProblem, task: Task) -> FittedAlgorithm:
    """Ridge regression with the penalty nearest to the targets."""
    mean = problem.eigenvalues.mean().item()
    penalty, _ = problem.least(
        lambda value: ridge_filter(problem.eigenvalues, value, n_context=task.n_context),
        geometric_grid(1e-8 * mean, 1e2 * mean, 100),
    )
    learner = AlgorithmLearner(algorithms.ridge, {"penalty": penalty})
    return FittedAlgorithm("ridge", learner, {"penalty": penalty}, 1)


def _chebyshev(problem: SpectralProblem) -> FittedAlgorithm:
    degrees = range(1, 2 * problem.eigenvalues.shape[1] + 1)
    best = min(degrees, key=lambda degree: problem.error(chebyshev_filter(problem.eigenvalues, degree)).item())
    learner = AlgorithmLearner(algorithms.chebyshev, {"steps": best})
    return FittedAlgorithm(f"Chebyshev, {_count(best, 'step')}", learner, {"degree": best}, 1)


def _polynomial(problem: SpectralProblem, steps: int, name: str) -> FittedAlgorithm:
    """The best polynomial in S with `steps` terms: what any first-order method reaches in so many steps."""
    basis = polynomials(steps, problem.eigenvalues.max().item())
    coefficients = problem.linear(basis)
    if _explodes(problem, lambda eigenvalues: basis(eigenvalues) @ coefficients):
        coefficients = problem.guarded(MARGIN).linear(basis)
    title = f"{name}, {_count(steps, 'step')}"
    learner = SpectralLearner(lambda eigenvalues: basis(eigenvalues) @ coefficients, title)
    return FittedAlgorithm(title, learner, {}, steps, n_given=1)


def _any_filter(problem: SpectralProblem) -> FittedAlgorithm:
    """The best piecewise linear function of the eigenvalues, with knots at their quantiles."""
    knots = torch.quantile(problem.eigenvalues.flatten()[:100_000], torch.linspace(0, 1, N_KNOTS).double()).unique()
    basis = hats(knots)
    coefficients = problem.linear(basis)
    learner = SpectralLearner(lambda eigenvalues: basis(eigenvalues) @ coefficients, "any function of S")
    return FittedAlgorithm(learner.name, learner, {}, len(knots))


def fit_online(problem: SpectralProblem, prompts: Prompts) -> FittedAlgorithm:
    """One pass over the context with the step size nearest to the targets, or 1 / |x|² if that is nearer."""

    def error(step_size: float | None) -> float:
        predicted = algorithms.online_gradient_descent(prompts, step_size=step_size, at="query").predictions[0, :, -1]
        return (predicted - problem.targets).square().mean().item()

    typical = 1 / prompts.context.xs.square().sum(-1).mean().item()
    step_size, least_error = minimize_on_grid(error, geometric_grid(0.01 * typical, 4 * typical, 16))
    best = None if error(None) <= least_error else step_size  # None: 1 / |x|²
    learner = AlgorithmLearner(algorithms.online_gradient_descent, {"step_size": best})
    settings = {} if best is None else {"step_size": best}
    return FittedAlgorithm("online gradient descent", learner, settings, len(settings))


def _neighbours(problem: SpectralProblem, prompts: Prompts) -> FittedAlgorithm:
    distances = (prompts.context.xs - prompts.query.xs[:, None]).square().sum(-1)
    order = distances.sort(dim=1, stable=True).indices[..., None]
    sums = prompts.context.ys.take_along_dim(order, dim=1).cumsum(1)
    means = sums / torch.arange(1, prompts.n_context + 1)[:, None]  # of the nearest 1, 2, ... points
    best = int((means - problem.targets[:, None]).square().mean((0, 2)).argmin()) + 1
    learner = AlgorithmLearner(algorithms.nearest_neighbours, {"n_neighbours": best})
    # constant wherever it has a derivative
    return FittedAlgorithm("nearest neighbours", learner, {"n_neighbours": best}, 1, differentiable=False)
