"""The member of each family of algorithms that comes nearest to given predictions, or to a task's targets."""

import math
from collections.abc import Callable, Iterator, Sequence
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
from mechicl.learners import AlgorithmLearner, Learner
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression

MOST_STEPS = 12  # of families with parameters of their own in each step
N_KNOTS = 20
SCREENING = 512  # prompts on which step numbers and starts are chosen, before the fit on all
MOST_GROWTH, MARGIN = 100, 1.25  # of residuals on contexts whose eigenvalues exceed all those seen by this factor
SAME = 1e-10  # distances below are rounding and the searches' tolerance: the same predictions


@dataclass(frozen=True, eq=False)
class Candidate:
    """A member of a family with its fitted hyperparameters and how many numbers were fitted."""

    name: str
    learner: Learner
    hyperparameters: dict[str, float] = field(default_factory=dict)
    n_fitted: int = 0


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
    found = gd_plus_plus(SpectralProblem.of(prompts, prompts.query.ys), steps, per_step=per_step, gamma=gamma).learner
    assert isinstance(found, SpectralLearner)
    return found


def families(problem: SpectralProblem, prompts: Prompts, steps: int, task: LinearRegression) -> Iterator[Candidate]:
    """Each family's member nearest to the problem's targets."""
    largest = problem.eigenvalues.max().item()
    few = min(steps, MOST_STEPS)
    yield _gradient_descent(problem, steps)
    if steps > 1:
        yield gd_plus_plus(problem, few, per_step=False, gamma=True)
        yield gd_plus_plus(problem, few, per_step=True, gamma=False)
        yield gd_plus_plus(problem, few, per_step=True, gamma=True)
    yield _preconditioned(problem, prompts)
    yield _newton(problem, list(range(16)))
    yield _ridge(problem, task)
    yield Candidate("least squares", AlgorithmLearner(algorithms.ols))
    yield _chebyshev(problem)
    if steps > 1:  # one step of gradient descent is the only one of its order
        yield _polynomial(problem, steps, largest, "any first-order learner")
    knots = torch.quantile(problem.eigenvalues.flatten()[:100_000], torch.linspace(0, 1, N_KNOTS).double()).unique()
    if len(knots) > 1:
        coefficients, basis = problem.linear(hats(knots)), hats(knots)
        name = "any function of S"
        learner = SpectralLearner(lambda eigenvalues: basis(eigenvalues) @ coefficients, name)
        yield Candidate(name, learner, {}, len(knots))
    yield Candidate("averaging", AlgorithmLearner(algorithms.averaging))
    yield _online(problem, prompts)
    yield _neighbours(problem, prompts)


def limits(problem: SpectralProblem, steps: int, task: LinearRegression) -> Iterator[Candidate]:
    """The best learners of each order for the problem's targets, the task's own."""
    yield _polynomial(problem, steps, problem.eigenvalues.max().item(), "first order")
    yield _newton(problem, [steps], "second order")
    yield _ridge(problem, task, "ridge")


def _grid(low: float, high: float, n: int = 60) -> list[float]:
    return torch.logspace(math.log10(low), math.log10(high), n, dtype=torch.float64).tolist()


def _plural(steps: int) -> str:
    return f"{steps} step{'s' if steps != 1 else ''}"


def _iterations(number: int) -> str:
    return f"{number} iteration{'s' if number != 1 else ''}"


def _steps_and_value(
    problem: SpectralProblem,
    family: Callable[[Tensor, int, float | Tensor], Tensor],
    numbers: Sequence[int],
    grid: Callable[[int], list[float]],
) -> tuple[int, float, float]:
    """The number of steps, the value and the error of the nearest member; the fewest steps that come as near."""
    few, screened = problem.first(SCREENING), {}

    def screen(k: int) -> None:
        values = torch.tensor(grid(k), dtype=torch.float64)
        for _ in range(7):  # a grid in the best valley of the last one: all of its values at once, unlike Brent's
            filtered = family(few.eigenvalues, k, values[:, None, None])
            predicted = torch.einsum("vpx,pxy->vpy", filtered, few.contributions)
            errors = (predicted - few.targets).square().mean((1, 2)).nan_to_num(math.inf)
            i = int(errors.argmin())
            screened[k] = (errors[i].item(), values[i].item())
            ends = values[max(i - 1, 0)].item(), values[min(i + 1, len(values) - 1)].item()
            values = torch.linspace(*ends, 13, dtype=torch.float64)

    for k in numbers:
        screen(k)
    while True:  # between the best number and its neighbours
        best = min(screened, key=screened.__getitem__)
        below = max((k for k in screened if k < best), default=best)
        above = min((k for k in screened if k > best), default=best)
        between = {(below + best) // 2, (best + above + 1) // 2} - screened.keys()
        if not between:
            break
        for k in between:
            screen(k)
    found = []
    for k in sorted(screened, key=screened.__getitem__)[:3]:
        value = screened[k][1]
        near = _grid(0.6 * value, min(1.5 * value, grid(k)[-1]), 5)
        found.append((k, *problem.least(lambda value, k=k: family(problem.eigenvalues, k, value), near)))
    least_error = min(error for _, _, error in found)
    return min(fit for fit in found if fit[2] <= 1.001 * least_error)


def _stable(factors: int) -> float:
    """The largest s for which so many factors `1 - s` do not grow beyond MOST_GROWTH."""
    return 1 + MOST_GROWTH ** (1 / factors)


def _gradient_descent(problem: SpectralProblem, steps: int) -> Candidate:
    typical, largest = problem.eigenvalues.amax(-1).mean().item(), MARGIN * problem.eigenvalues.max().item()
    numbers = sorted({steps, *range(1, 9), *(2**i for i in range(4, 11))})
    k, step_size, _ = _steps_and_value(
        problem,
        gradient_descent_filter,
        numbers,
        lambda k: _grid(4e-3 / typical / k, min(20 / typical, _stable(k) / largest), 40),
    )
    name = f"gradient descent, {_plural(k)}"
    learner = SpectralLearner(partial(gradient_descent_filter, steps=k, step_size=step_size), name)
    return Candidate(name, learner, {"step_size": step_size}, 2)


def gd_plus_plus(problem: SpectralProblem, steps: int, *, per_step: bool, gamma: bool) -> Candidate:
    """Gradient descent or GD++ with so many steps (Levenberg-Marquardt from several starts)."""
    count = steps if per_step else 1
    n_gammas = (max(count - 1, 1) if per_step else 1) if gamma else 0  # the last step's γ moves nothing any more

    def spread(parameters: Tensor) -> tuple[Tensor, Tensor]:
        a, g = parameters[:count], parameters[count:]
        if per_step:
            return a, torch.cat([g, torch.zeros_like(a[: count - n_gammas])])
        a = a.expand(steps, *a.shape[1:])
        return a, g.expand(steps, *g.shape[1:]) if gamma else torch.zeros_like(a)

    # γ shrinks the largest eigenvalues, so that later steps may be larger: by nothing, by 2 and by 5 a step
    size = 1 / problem.eigenvalues.amax(-1).mean().item()
    starts = [
        torch.cat([share * size * growth ** torch.arange(count), g * size * growth ** torch.arange(n_gammas)]).double()
        for share, g, growth in ((0.3, 0.1, 1), (1, 0.3, 1), (2, 0.3, 1), (0.6, 0.3, 2), (0.6, 0.6, 5))
        if gamma or growth == 1
    ]

    def family(parameters: Tensor, eigenvalues: Tensor = problem.eigenvalues) -> Tensor:
        return gd_plus_plus_filters(eigenvalues, *spread(parameters))[-1]

    def nearest(few: SpectralProblem, all_of: SpectralProblem) -> Tensor:
        screened = []
        for start in starts:
            screened.append(few.descend(partial(family, eigenvalues=few.eigenvalues), start))
            if screened[-1][1] < 1e-3 * SAME * few.targets.square().mean().item():
                break
        screened.sort(key=lambda fit: _or_inf(fit[1]))
        on_all = partial(family, eigenvalues=all_of.eigenvalues)
        polished = (all_of.descend(on_all, found, evaluations=30) for found, _ in screened[:2])
        return min(polished, key=lambda fit: _or_inf(fit[1]))[0]

    few = problem.first(SCREENING)
    best = nearest(few, problem)
    if _explodes(problem, partial(family, best)):
        best = nearest(few.guarded(MARGIN), problem.guarded(MARGIN))
    a, g = spread(best)
    kind, each = "GD++" if gamma else "gradient descent", ", parameters for each step" if per_step else ""
    name = f"{kind}, {_plural(steps)}{each}"
    labels = ["step_size", "gamma"]
    if per_step:
        labels = [f"step_size_{i + 1}" for i in range(count)] + [f"gamma_{i + 1}" for i in range(n_gammas)]
    hyperparameters = dict(zip(labels, best.tolist(), strict=False))
    learner = SpectralLearner(lambda eigenvalues: gd_plus_plus_filters(eigenvalues, a, g)[-1], name, hyperparameters)
    return Candidate(name, learner, learner.hyperparameters, len(best))


def _explodes(problem: SpectralProblem, filtered: Callable[[Tensor], Tensor]) -> bool:
    """Whether a residual beyond the largest eigenvalue seen is more than MOST_GROWTH times the target."""
    beyond = torch.linspace(0, MARGIN, 400, dtype=torch.float64)[1:, None] * problem.eigenvalues.max()
    return not bool(((1 - beyond * filtered(beyond)).abs() <= MOST_GROWTH).all())


def _or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf  # diverged


def _preconditioned(problem: SpectralProblem, prompts: Prompts) -> Candidate:
    context, d = prompts.context, prompts.x_dim
    cross = context.xs.mT @ context.ys / max(prompts.n_context, 1)
    design = torch.einsum("pi,pjy->pyij", prompts.query.xs, cross).flatten(0, 1).flatten(1)
    matrix = torch.linalg.lstsq(design, problem.targets.flatten()[:, None], driver="gelsd").solution.reshape(d, d)
    learner = AlgorithmLearner(algorithms.preconditioned_gd, {"preconditioner": matrix})
    values = torch.linalg.svdvals(matrix)
    described = {"largest singular value": values[0].item(), "smallest": values[-1].item()}
    return Candidate("preconditioned gradient descent, 1 step", learner, described, d * d)


def _newton(problem: SpectralProblem, numbers: list[int], name: str = "Newton") -> Candidate:
    def size(eigenvalues: Tensor) -> Tensor:
        return eigenvalues.square().norm(dim=-1, keepdim=True).clamp(min=1e-300)

    def relative(eigenvalues: Tensor, k: int, share: float | Tensor) -> Tensor:
        return newton_filter(eigenvalues, k, share / size(eigenvalues))

    def grid(k: int, typical: float, largest: float) -> list[float]:
        return _grid(1e-4 / typical, min(1e2 / typical, _stable(2**k) / largest), 20)

    typical, largest = size(problem.eigenvalues).mean().item(), (MARGIN * problem.eigenvalues.max().item()) ** 2
    fits = []
    for family, sizes, label in (
        (relative, (1, 1), "alpha over 1/|SSᵀ|"),
        (newton_filter, (typical, largest), "alpha"),
    ):
        near = partial(grid, typical=sizes[0], largest=sizes[1])
        fits.append((_steps_and_value(problem, family, numbers, near), family, label))
    (k, alpha, _), family, label = min(fits, key=lambda fit: fit[0][2])
    title = f"{name}, {_iterations(k)}" if name == "Newton" else f"{name}: Newton, {_iterations(k)}"
    own = family is newton_filter
    learner = SpectralLearner(lambda eigenvalues: family(eigenvalues, k, alpha), title, {label: alpha}, elementwise=own)
    return Candidate(title, learner, {label: alpha}, 1 + (len(numbers) > 1))


def _ridge(problem: SpectralProblem, task: LinearRegression, name: str = "ridge") -> Candidate:
    mean = problem.eigenvalues.mean().item()
    penalty, _ = problem.least(
        lambda value: ridge_filter(problem.eigenvalues, value, n_context=task.n_context),
        _grid(1e-8 * mean, 1e2 * mean, 100),
    )
    learner = AlgorithmLearner(algorithms.ridge, {"penalty": penalty})
    return Candidate(name, learner, {"penalty": penalty}, 1)


def _chebyshev(problem: SpectralProblem) -> Candidate:
    degrees = range(1, 2 * problem.eigenvalues.shape[1] + 1)
    best = min(degrees, key=lambda degree: problem.error(chebyshev_filter(problem.eigenvalues, degree)).item())
    learner = AlgorithmLearner(algorithms.chebyshev, {"steps": best})
    return Candidate(f"Chebyshev, {_plural(best)}", learner, {"degree": best}, 1)


def _polynomial(problem: SpectralProblem, steps: int, largest: float, name: str) -> Candidate:
    basis = polynomials(steps, largest)
    coefficients = problem.linear(basis)
    if _explodes(problem, lambda eigenvalues: basis(eigenvalues) @ coefficients):
        coefficients = problem.guarded(MARGIN).linear(basis)
    title = f"{name}, {_plural(steps)}"
    learner = SpectralLearner(lambda eigenvalues: basis(eigenvalues) @ coefficients, title)
    return Candidate(title, learner, {}, steps)


def _online(problem: SpectralProblem, prompts: Prompts) -> Candidate:
    def error(step_size: float | None) -> float:
        found = algorithms.online_gradient_descent(prompts, step_size=step_size, at="query").predictions[0, :, -1]
        return (found - problem.targets).square().mean().item()

    typical = 1 / prompts.context.xs.square().sum(-1).mean().item()
    step_size, least_error = minimize_on_grid(error, _grid(0.01 * typical, 4 * typical, 16))
    best = None if error(None) <= least_error else step_size  # None: 1 / |x|²
    learner = AlgorithmLearner(algorithms.online_gradient_descent, {"step_size": best})
    settings = {} if best is None else {"step_size": best}
    return Candidate("online gradient descent", learner, settings, len(settings))


def _neighbours(problem: SpectralProblem, prompts: Prompts) -> Candidate:
    distances = (prompts.context.xs - prompts.query.xs[:, None]).square().sum(-1)
    order = distances.sort(dim=1, stable=True).indices[..., None]
    sums = prompts.context.ys.take_along_dim(order, dim=1).cumsum(1)
    means = sums / torch.arange(1, prompts.n_context + 1)[:, None]  # of the nearest 1, 2, ... points
    best = int((means - problem.targets[:, None]).square().mean((0, 2)).argmin()) + 1
    learner = AlgorithmLearner(algorithms.nearest_neighbours, {"n_neighbours": best})
    return Candidate("nearest neighbours", learner, {"n_neighbours": best}, 1)
