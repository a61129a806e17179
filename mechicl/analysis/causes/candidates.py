"""The algorithms that a model might run, each with the parameters that come nearest to its predictions."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import least_squares, minimize
from torch import Tensor

from mechicl.algorithms.gradient_descent import gd_plus_plus_filters, gradient_descent_filter
from mechicl.algorithms.newton import newton_filter
from mechicl.algorithms.stepwise import (
    AfterCopying,
    KernelReading,
    NewtonSteps,
    OnlineDescent,
    QueryDescent,
    ResidualDescent,
    RidgeByDirections,
    RidgePath,
    StepwiseAlgorithm,
    nearest,
    query_of,
)
from mechicl.algorithms.stepwise.descent import in_words
from mechicl.analysis.behaviour.algorithm_families import (
    fit_online,
    fit_preconditioned,
    fit_ridge,
    geometric_grid,
)
from mechicl.analysis.behaviour.spectral import SpectralProblem
from mechicl.prompts import Prompts
from mechicl.tasks import Task

MOST_ITERATIONS = 12  # of Newton's method
N_PENALTIES = 12  # of a ridge path, each half of the one before
FEW = 256  # prompts on which numbers of iterations are chosen
FEWER = 128  # and where every try runs the algorithm
PAST = "each point from its past"


def candidate_algorithms(
    prompts: Prompts, after_layers: Float[Tensor, "layer prompt y"], task: Task, *, tokens_per_point: int = 1,
    causal: bool = False, clip: float | None = None,
) -> dict[str, StepwiseAlgorithm]:  # fmt: skip
    """Algorithms step by step, fitted to a model's predictions, by name.

    Gradient descent (one step size, a step size each, with momentum; as many steps as layers, and as many as fit best,
    up to two a layer), its steps held as residuals in the context or by the query alone; GD++; preconditioned gradient
    descent in one step and with a matrix for each; Newton with the answer at the end, read anew, and running; the ridge
    path, and its end in one step; ridge by eigendirections; online gradient descent; the nearest neighbour; softmax
    smoothing. Those with as many steps as layers have one less where targets are tokens of their own, to be put
    together with their inputs.

    Parameters of single steps are fitted to what the model predicts after each of its layers: its last prediction alone
    does not decide them, since different ways lead to the same end.

    Args:
        prompts: to fit on.
        after_layers: the model's predictions for them where the query reads nothing any more after 1, 2, ... layers; at
            least the last one, its prediction.
        task: that they are of.
        tokens_per_point: 2 where a target is a token of its own: each algorithm then begins with copying.
        causal: the context's points read only those before them: algorithms that hold something in the context are then
            other ones, whose points each learn from their own past.
        clip: bound on tokens after each layer: gradient descent and GD++ that hold residuals have it too.

    Raises:
        ValueError: predictions that are not finite.
    """
    prompts, after_layers = prompts.to(dtype=torch.float64), after_layers.detach().cpu().double()
    if not after_layers.isfinite().all():
        raise ValueError("the model's predictions after its layers are not finite: no algorithm can be fitted to them")
    copies = tokens_per_point > 1 and len(after_layers) > 1
    after_steps = after_layers[1:] if copies else after_layers
    problem = SpectralProblem.from_prompts(prompts, after_layers[-1])
    algorithms: dict[str, StepwiseAlgorithm] = {}
    for algorithm in _fitted(problem, prompts, task, after_steps, causal):
        if clip is not None and isinstance(algorithm, ResidualDescent):
            algorithm.clip = clip
        algorithm = AfterCopying(algorithm) if tokens_per_point > 1 else algorithm
        algorithms[algorithm.name] = algorithm
    return algorithms


def _fitted(
    problem: SpectralProblem, prompts: Prompts, task: Task, after_steps: Tensor, causal: bool
) -> Iterator[StepwiseAlgorithm]:
    yield from _descents(problem, prompts, after_steps, causal)
    matrix = fit_preconditioned(problem, prompts).learner.hyperparameters["preconditioner"]  # type: ignore[attr-defined]
    yield ResidualDescent(1, step_size=1 / max(1, prompts.n_context), preconditioner=matrix)
    if len(after_steps) > 1:
        yield _preconditioned_steps(prompts, after_steps, causal)
    yield from _causal_newtons(problem, prompts) if causal else _newtons(problem)
    penalty = fit_ridge(problem, task).hyperparameters["penalty"]
    floor = 1e-3 * problem.eigenvalues.mean().item()
    at_once = RidgePath([penalty])
    at_once.name = "ridge regression in one step"
    yield at_once
    yield RidgePath([max(penalty, floor) * 2.0**k for k in range(N_PENALTIES - 2, -1, -1)] + [penalty])
    yield RidgeByDirections(prompts.x_dim, penalty=penalty)
    online = fit_online(problem, prompts).hyperparameters.get("step_size")
    yield OnlineDescent(prompts.n_context, step_size=online)
    yield KernelReading(nearest, name="nearest neighbour")
    yield _smoothing(problem, prompts)


def _descents(
    problem: SpectralProblem, prompts: Prompts, after_steps: Tensor, causal: bool
) -> Iterator[StepwiseAlgorithm]:
    steps, largest = len(after_steps), problem.eigenvalues.max().item()
    grid = geometric_grid(1e-3 / largest, 2.2 / largest)
    fits = {
        count: problem.least(lambda a, k=count: gradient_descent_filter(problem.eigenvalues, k, a), grid)
        for count in range(1, 2 * steps + 1)
    }
    least = min(fits, key=lambda count: fits[count][1])
    for count in dict.fromkeys((steps, least)):
        size = fits[count][0]
        yield QueryDescent(count, step_size=size)
        if causal:
            yield _fit_causal_descent(prompts, problem.targets[None], [size], count, with_gammas=False)
        else:
            yield ResidualDescent(count, step_size=size)
    if steps == 1:
        return
    yield _with_momentum(problem, prompts, steps, causal)
    step_size = fits[steps][0]
    sizes, _ = _parameters_of_steps(problem, after_steps, step_size, with_gammas=False)
    by_query = QueryDescent(steps, step_size=sizes)
    by_query.name = f"gradient descent, {steps} steps, a step size each, by the query alone"
    yield by_query
    both = sizes, *_parameters_of_steps(problem, after_steps, step_size, with_gammas=True)
    if causal:
        yield _fit_causal_descent(prompts, after_steps, both[0], steps, with_gammas=False)
        yield _fit_causal_descent(prompts, after_steps, [*both[1], *both[2][:-1]], steps, with_gammas=True)
        return
    in_context = ResidualDescent(steps, step_size=sizes)
    in_context.name = f"gradient descent, {steps} steps, a step size each, residuals in the context"
    yield in_context
    refined = ResidualDescent(steps, step_size=both[1], gamma=both[2])
    refined.name = f"GD++, {steps} steps, parameters for each"
    yield refined


def _fit_causal_descent(
    prompts: Prompts, after_steps: Tensor, start: Sequence[float], steps: int, *, with_gammas: bool
) -> StepwiseAlgorithm:
    """Descent whose points each see their own past, with the step sizes, and γ, that come nearest to predictions.

    Args:
        prompts: to fit on.
        after_steps: predictions after each step, or the last one alone `[1 prompt y]`.
        start: one step size for all steps, or one a step and then a γ for all but the last.
        steps: their number.
        with_gammas: GD++.
    """
    few, targets = prompts[:FEWER], after_steps[:, :FEWER]

    def make(values: Any) -> ResidualDescent:
        sizes = [float(v) for v in values]
        gammas = [*sizes[steps:], 0.0] if with_gammas else 0.0
        return ResidualDescent(
            steps, step_size=sizes[:steps] if len(sizes) > 1 else sizes[0], gamma=gammas, causal=True
        )

    def residuals(values: Any) -> Any:
        algorithm = make(values)
        reached = torch.stack([algorithm.read(query_of(state)) for state in algorithm.states(few)[-len(targets) :]])
        return (reached - targets).flatten().nan_to_num(1e6).clamp(-1e6, 1e6).numpy()

    starts = np.array([start, 0.5 * np.array(start)])
    fits = [least_squares(residuals, each, x_scale=abs(each) + 1e-3 * abs(each).max(), max_nfev=20) for each in starts]
    algorithm = make(min(fits, key=lambda fit: fit.cost).x)
    kind = (
        f"GD++, {steps} steps, parameters for each" if with_gammas else f"gradient descent, {in_words(steps, 'step')}"
    )
    kind += ", a step size each" if len(start) > 1 and not with_gammas else ""
    algorithm.name = f"{kind}, {PAST}"
    return algorithm


def _parameters_of_steps(
    problem: SpectralProblem, after_steps: Tensor, step_size: float, *, with_gammas: bool
) -> tuple[list[float], list[float]]:
    """The step sizes, and γ, with which the predictions after every step come nearest to the model's."""
    few, targets, steps = problem.first(FEW), after_steps[:, :FEW], len(after_steps)
    unit = 1 / problem.eigenvalues.max().item()

    def split(values: Any) -> tuple[Tensor, Tensor]:
        values = unit * torch.as_tensor(values)
        gammas = torch.cat([values[steps:], values.new_zeros(1)]) if with_gammas else torch.zeros_like(values)
        return values[:steps], gammas  # the last γ moves nothing any more

    def residuals(values: Any) -> Any:
        filtered = gd_plus_plus_filters(few.eigenvalues, *split(values))[1:]
        predicted = (filtered[..., None] * few.contributions).sum(2)
        return (predicted - targets).flatten().nan_to_num(1e6).clamp(-1e6, 1e6).numpy()

    fits = []
    for size, gamma, growth in ((step_size / unit, 0.05, 1.0), (0.6, 0.3, 1.0), (0.6, 0.3, 2.0), (0.6, 0.6, 3.0)):
        grown = growth ** torch.arange(steps, dtype=torch.float64)
        start = torch.cat([size * grown, gamma * grown[:-1]]) if with_gammas else size * grown
        fits.append(least_squares(residuals, start.numpy(), x_scale=abs(start.numpy()) + 1e-3, max_nfev=60))
    sizes, gammas = split(min(fits, key=lambda fit: fit.cost).x)
    return sizes.tolist(), gammas.tolist()


def _preconditioned_steps(prompts: Prompts, after_steps: Tensor, causal: bool) -> StepwiseAlgorithm:
    """A matrix for each step, one after the other: what a step adds is linear in its matrix, given those before."""
    few, targets, n, d = prompts[: 4 * FEW], after_steps[:, : 4 * FEW], max(1, prompts.n_context), prompts.x_dim
    x, residual = few.context.xs, few.context.ys
    query, before, matrices = few.query.xs, torch.zeros_like(targets[0]), []
    for target in targets:
        cross = x.mT @ residual / n
        design = torch.einsum("pi,pjy->pyij", query, cross).flatten(0, 1).flatten(1)
        added = (target - before).flatten()[:, None]
        matrix = torch.linalg.lstsq(design, added, driver="gelsd").solution.reshape(d, d)
        before = before + torch.einsum("pi,ij,pjy->py", query, matrix, cross)
        scores = x @ matrix @ x.mT / n
        residual = residual - (scores.tril() if causal else scores) @ residual
        matrices.append(matrix)
    algorithm = ResidualDescent(len(matrices), step_size=1 / n, preconditioner=matrices, causal=causal)
    algorithm.name = f"preconditioned gradient descent, {len(matrices)} steps, a matrix each"
    algorithm.name += f", {PAST}" if causal else ""
    return algorithm


def _with_momentum(problem: SpectralProblem, prompts: Prompts, steps: int, causal: bool) -> StepwiseAlgorithm:
    few, targets = prompts[:FEWER], problem.targets[:FEWER]
    largest = problem.eigenvalues.max().item()
    grid = itertools.product(geometric_grid(0.02 / largest, 2 / largest, 12), (0.15, 0.3, 0.45, 0.6, 0.75, 0.9))

    def error(pair: Any) -> float:
        predicted = ResidualDescent(steps, step_size=pair[0], momentum=pair[1], causal=causal).predict(few)
        return (predicted - targets).square().mean().nan_to_num(1e12, 1e12).item()

    nearest_on_grid = min(grid, key=error)
    step_size, momentum = minimize(error, nearest_on_grid, method="Nelder-Mead", options={"maxfev": 150}).x.tolist()
    algorithm = ResidualDescent(steps, step_size=step_size, momentum=momentum, causal=causal)
    algorithm.name += f", {PAST}" if causal else ""
    return algorithm


def _newtons(problem: SpectralProblem) -> Iterator[StepwiseAlgorithm]:
    few = problem.first(FEW)
    norms = few.eigenvalues.square().norm(dim=-1, keepdim=True).clamp(min=1e-300)
    largest = few.eigenvalues.max().item() ** 2
    fits = []
    for iterations in range(MOST_ITERATIONS + 1):
        grids = {"share": geometric_grid(1e-3, 1.9, 20), "alpha": geometric_grid(1e-4 / largest, 1.9 / largest, 20)}
        for name, grid in grids.items():
            unit = 1 / norms if name == "share" else 1.0
            value, error = few.least(lambda v, k=iterations, u=unit: newton_filter(few.eigenvalues, k, v * u), grid)
            fits.append((error, iterations, {name: value}))
    least = min(error for error, *_ in fits)
    _, iterations, parameters = min((fit for fit in fits if fit[0] <= 1.001 * least), key=lambda fit: fit[1])
    for answer in ("at the end", "anew", "running"):
        yield NewtonSteps(iterations, answer=answer, **parameters)


def _causal_newtons(problem: SpectralProblem, prompts: Prompts) -> Iterator[StepwiseAlgorithm]:
    """Newton whose points each iterate on their own past, with the number of iterations and the α that fit best."""
    few, targets = prompts[:FEWER], problem.targets[:FEWER]

    def error(iterations: int, parameter: str, value: float) -> float:
        predicted = NewtonSteps(iterations, causal=True, **{parameter: value}).predict(few)  # type: ignore[arg-type]
        return (predicted - targets).square().mean().nan_to_num(1e12, 1e12).item()

    largest = problem.eigenvalues.max().item() ** 2
    grids = {"share": geometric_grid(1e-2, 1.9, 8), "alpha": geometric_grid(1e-3 / largest, 1.9 / largest, 8)}
    choices = [(k, name, v) for k in range(MOST_ITERATIONS + 1) for name, grid in grids.items() for v in grid]
    iterations, parameter, value = min(choices, key=lambda choice: error(*choice))
    for answer in ("at the end", "anew", "running"):
        algorithm = NewtonSteps(iterations, answer=answer, causal=True, **{parameter: value})  # type: ignore[arg-type]
        algorithm.name += f", {PAST}"
        yield algorithm


def _smoothing(problem: SpectralProblem, prompts: Prompts) -> StepwiseAlgorithm:
    few, targets = prompts[:FEW], problem.targets[:FEW]
    size = prompts.xs.square().sum(-1).mean().item()

    def smoother(bandwidth: float) -> KernelReading:
        def weights(readers: Tensor, points: Tensor) -> Tensor:
            return (readers @ points.mT / bandwidth).softmax(-1)

        return KernelReading(weights, name=f"softmax smoothing, bandwidth {bandwidth:.3g}")

    bandwidths = geometric_grid(0.01 * size, 10 * size, 16)
    return smoother(min(bandwidths, key=lambda h: (smoother(h).predict(few) - targets).square().mean().item()))
