"""More families of descent for `identify`: with momentum, with a matrix in front of several steps, with a constant."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.behaviour.algorithm_families import MOST_STEPS, ROUNDING, SCREENING, FittedAlgorithm
from mechicl.analysis.behaviour.spectral import SpectralLearner, SpectralProblem
from mechicl.learners import AlgorithmLearner
from mechicl.prompts import Prompts

KERNEL = "kernel gradient descent on 1 and x"
FEW_STEPS = (2, 3, 4)
"""Numbers of steps that are tried beside the model's number of layers."""
MOST_NUMBERS = 600  # in a matrix that several steps share: 24 dimensions


def descent_fits(problem: SpectralProblem, prompts: Prompts, steps: int) -> list[Callable[[], FittedAlgorithm]]:
    """The fit of the nearest member of each of these families, to be called; of several steps only where there are.

    Args:
        problem: the prompts in their eigenbases, and what is to be predicted.
        prompts: the same prompts.
        steps: of the learner.
    """
    fits: list[Callable[[], FittedAlgorithm]] = [
        partial(_with_constant, problem, prompts),
        partial(_with_two_numbers, problem, prompts),
    ]
    if steps > 1:
        numbers = sorted({*FEW_STEPS, min(steps, MOST_STEPS)})
        fits.append(partial(_with_momentum, problem, numbers))
        if prompts.x_dim**2 <= MOST_NUMBERS:
            fits.append(partial(_preconditioned_steps, problem, prompts, numbers))
    return fits


def momentum_filter(
    eigenvalues: Float[Tensor, "*any"], steps: int, step_size: float | Tensor, momentum: float | Tensor
) -> Float[Tensor, "..."]:
    """The filter of gradient descent with momentum (heavy ball): `v ← β v + a (1 - λ f)`, `f ← f + v`, from 0.

    Args:
        eigenvalues: λ >= 0.
        steps: how many.
        step_size: a, a number or a tensor that broadcasts against the eigenvalues.
        momentum: β, likewise.

    Source: Polyak 1964.
    """
    total = velocity = torch.zeros_like(eigenvalues)
    for _ in range(steps):
        velocity = momentum * velocity + step_size * (1 - eigenvalues * total)
        total = total + velocity
    return total


def descend_on_features(
    prompts: Prompts, *, matrix: Float[Tensor, "*any feature feature"], steps: int, constant: bool
) -> Float[Tensor, "prompt y"]:
    """Preconditioned gradient descent from 0 on the mean squared error, the query's prediction after the last step.

    Args:
        prompts: with a context.
        matrix: in front of every step's gradient, one for all prompts or one a prompt.
        steps: how many.
        constant: whether a 1 stands before every input, so that the predictor has an intercept.
    """
    xs = prompts.xs
    features = torch.cat([torch.ones_like(xs[..., :1]), xs], dim=-1) if constant else xs
    context, query = features[:, :-1], features[:, -1:]
    left, predicted = prompts.context.ys, torch.zeros_like(prompts.ys[:, :1])
    matrix = matrix.to(features) / max(1, prompts.n_context)
    for _ in range(steps):
        change = matrix @ (context.mT @ left)
        left, predicted = left - context @ change, predicted + query @ change
    return predicted[:, 0]


def _with_constant(problem: SpectralProblem, prompts: Prompts) -> FittedAlgorithm:
    """One step of kernel gradient descent with the kernel `[1 x] M [1 x']ᵀ`: M is a least-squares problem."""
    return _on_features(problem, prompts, _first_matrix(problem, prompts, constant=True), 1, constant=True)


def _with_two_numbers(problem: SpectralProblem, prompts: Prompts) -> FittedAlgorithm:
    """The same with the kernel `c + a <x, x'>`, for few prompts."""
    design, _ = _slopes(prompts, torch.zeros(2 * (prompts.x_dim + 1,), dtype=torch.float64), 1, constant=True)
    diagonal = design.unflatten(1, 2 * (prompts.x_dim + 1,)).diagonal(dim1=1, dim2=2)
    columns = torch.stack([diagonal[:, 0], diagonal[:, 1:].sum(1)], dim=1)
    c, a = torch.linalg.lstsq(columns, problem.targets.flatten()[:, None], driver="gelsd").solution[:, 0].tolist()
    matrix = torch.diag(torch.tensor([c] + [a] * prompts.x_dim, dtype=torch.float64))
    learner = AlgorithmLearner(descend_on_features, {"matrix": matrix, "steps": 1, "constant": True})
    return FittedAlgorithm(f"{KERNEL}, 1 step, two numbers", learner, {"of 1": c, "of x": a}, 2, n_given=1)


def _preconditioned_steps(problem: SpectralProblem, prompts: Prompts, numbers: Sequence[int]) -> FittedAlgorithm:
    """Several steps with one matrix (Gauss-Newton with damping, each number of steps from the last one's matrix)."""
    n = max(SCREENING, 4 * prompts.x_dim**2)
    few, targets = prompts[:n], problem.targets[:n]
    matrix, least = _first_matrix(problem, prompts, constant=False) / numbers[0], math.inf
    fits = []
    for before, k in zip((numbers[0], *numbers), numbers, strict=False):
        matrix, error = _nearest_matrix(few, targets, matrix * before / k, k)
        fits.append((error, k, matrix))
        least = min(least, error)
    close = 1.001 * least + ROUNDING * targets.square().mean().item()
    _, k, matrix = min((fit for fit in fits if fit[0] <= close), key=lambda fit: fit[1])
    return _on_features(problem, prompts, matrix, k, constant=False)


def _on_features(
    problem: SpectralProblem, prompts: Prompts, matrix: Tensor, steps: int, *, constant: bool
) -> FittedAlgorithm:
    values = torch.linalg.svdvals(matrix)
    settings = {"matrix": matrix, "steps": steps, "constant": constant}
    kind = KERNEL if constant else "preconditioned gradient descent"
    return FittedAlgorithm(
        f"{kind}, {steps} step{'' if steps == 1 else 's'}",
        AlgorithmLearner(descend_on_features, settings),
        {"largest singular value": values[0].item(), "smallest": values[-1].item()},
        matrix.numel() + (steps > 1),
        n_given=int(steps == 1),
    )


def _first_matrix(problem: SpectralProblem, prompts: Prompts, *, constant: bool) -> Tensor:
    """Of one step, whose prediction is linear in it."""
    size = prompts.x_dim + constant
    design, _ = _slopes(prompts, torch.zeros(size, size, dtype=torch.float64), 1, constant=constant)
    solution = torch.linalg.lstsq(design, problem.targets.flatten()[:, None], driver="gelsd").solution
    return solution.reshape(size, size)


def _nearest_matrix(prompts: Prompts, targets: Tensor, matrix: Tensor, steps: int) -> tuple[Tensor, float]:
    """The matrix of several steps downhill from one (Levenberg-Marquardt), and its mean squared error."""
    design, predicted = _slopes(prompts, matrix, steps)
    error, damping = (predicted - targets).square().mean().item(), 1e-3
    for _ in range(25):
        moments = design.T @ design
        moments.diagonal().mul_(1 + damping).add_(1e-12 * moments.diagonal().mean().clamp(min=1e-300))
        step = torch.linalg.solve(moments, design.T @ (targets - predicted).flatten())
        trial = matrix + step.reshape(matrix.shape)
        tried_design, tried = _slopes(prompts, trial, steps)
        tried_error = (tried - targets).square().mean().nan_to_num(math.inf).item()
        if tried_error >= error:
            damping *= 10
            if damping > 1e9:
                break
            continue
        gained, (matrix, design, predicted, error) = error - tried_error, (trial, tried_design, tried, tried_error)
        damping = max(damping / 10, 1e-9)
        if gained < 1e-4 * error or error < 1e-3 * ROUNDING * targets.square().mean().item():
            break
    return matrix, error


def _slopes(prompts: Prompts, matrix: Tensor, steps: int, *, constant: bool = False) -> tuple[Tensor, Tensor]:
    """The slope of each prediction with respect to the matrix's entries, and the predictions."""
    # every prompt gets a copy of the matrix: one backward pass from the sum then gives the slopes of all of them
    each = matrix.expand(len(prompts), *matrix.shape).clone().requires_grad_()
    predicted = descend_on_features(prompts, matrix=each, steps=steps, constant=constant)
    slopes = [torch.autograd.grad(y.sum(), each, retain_graph=True)[0].flatten(1) for y in predicted.unbind(-1)]
    return torch.stack(slopes, dim=1).flatten(0, 1), predicted.detach()


def _with_momentum(problem: SpectralProblem, numbers: Sequence[int]) -> FittedAlgorithm:
    """Gradient descent with momentum, its step size and momentum fitted from the best of a grid."""
    few, largest = problem.first(SCREENING), problem.eigenvalues.max().item()
    sizes = torch.logspace(math.log10(0.02 / largest), math.log10(3 / largest), 16, dtype=torch.float64)
    starts = torch.cartesian_prod(sizes.log(), torch.linspace(-2.5, 2.5, 7, dtype=torch.float64))
    fits = []
    for k in numbers:
        filtered = _momentum_of(few.eigenvalues, starts.T[:, :, None, None], steps=k)  # [start prompt x]
        predicted = torch.einsum("vpx,pxy->vpy", filtered, few.contributions)
        errors = (predicted - few.targets).square().mean((1, 2)).nan_to_num(math.inf)
        family = partial(_momentum_of, problem.eigenvalues, steps=k)
        fits.append((*problem.descend(family, starts[int(errors.argmin())], evaluations=40), k))
    close = 1.001 * min(fit[1] for fit in fits) + ROUNDING * problem.targets.square().mean().item()
    values, _, k = min((fit for fit in fits if fit[1] <= close), key=lambda fit: fit[2])
    settings = {"step_size": values[0].exp().item(), "momentum": values[1].sigmoid().item()}
    name = f"gradient descent with momentum, {k} steps"
    return FittedAlgorithm(
        name, SpectralLearner(partial(momentum_filter, steps=k, **settings), name, settings), settings, 3
    )


def _momentum_of(eigenvalues: Tensor, values: Tensor, steps: int) -> Tensor:
    """The filter by the logarithm of the step size and the logit of the momentum, which therefore stay in bounds."""
    return momentum_filter(eigenvalues, steps, values[0].exp(), values[1].sigmoid())
