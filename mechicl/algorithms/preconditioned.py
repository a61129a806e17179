"""Gradient descent with a matrix in front of every step's gradient, and with an intercept; their cards."""

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.card import LINEAR, ROUNDING, FitProblem, FittedAlgorithm, new_card
from mechicl.algorithms.descent_cards import FEW, few_steps, fewest_steps, named
from mechicl.algorithms.sizes import Sized
from mechicl.algorithms.spectra import (
    TOLERANCE,
    Steps,
    context_moments,
    in_parts,
    iterates,
    linear_trajectory,
    n_before,
    step_numbers,
    warn_where_most_diverge,
)
from mechicl.algorithms.spectral_fit import SCREENING
from mechicl.algorithms.stepwise.base import StepwiseAlgorithm
from mechicl.algorithms.stepwise.descent import ResidualDescent
from mechicl.base.arguments import checked
from mechicl.learners import AlgorithmLearner, Trajectory
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt

MOST_MATRIX_NUMBERS = 600  # in a matrix that several steps share: 24 dimensions


@checked
def preconditioned_gd(
    prompts: Sized,
    steps: Steps = 1,
    *,
    preconditioner: Float[Tensor, "x x"] | Sequence[Float[Tensor, "x x"]],
    at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:
    """Run preconditioned gradient descent on the mean squared error: `W_{k+1} = W_k - A_k (S W_k - B) / n`, from 0.

    S = XᵀX and B = XᵀY sum over the n points before the predicted one; before the first point it predicts 0. Source:
    Nertinger 2025, Theorem 1 and section 2, where the sign is printed as plus.

    Args:
        preconditioner: matrix A `[x x]`, or one for each step (at least the largest of `steps`).

    Warns:
        DivergenceWarning: repeating the steps makes errors grow (the product of all `I - A_k S / n` has a spectral
            radius above 1) on more than half of the full contexts of the first 256 prompts, in more than one step.
    """
    numbers = step_numbers(steps)
    last, shape = max(numbers), (prompts.x_dim, prompts.x_dim)
    shared = isinstance(preconditioner, Tensor)
    matrices = [preconditioner] * last if isinstance(preconditioner, Tensor) else list(preconditioner)
    if len(matrices) < last or any(matrix.shape != shape for matrix in matrices):
        shapes = [tuple(matrix.shape) for matrix in matrices]
        raise ValueError(f"preconditioner must be [x x] = {shape}, one or {last} of them, got {shapes}")

    def run(part: Prompts) -> Trajectory:
        n = n_before(part, at).clamp(min=1)[:, None, None]
        second, cross = (each / n for each in context_moments(part, at))
        weights = iterates(
            lambda k, weights: weights - matrices[k].to(cross) @ (second @ weights - cross),
            torch.zeros_like(cross),
            numbers,
        )
        return linear_trajectory(part, weights, "preconditioned GD", at, with_weights, numbers)

    if last > 1:
        _warn_of_growth(prompts[:256], matrices[: 1 if shared else last])
    return in_parts(prompts, (prompts.n_context + 1) * prompts.x_dim * max(prompts.x_dim, prompts.y_dim), run)


def _warn_of_growth(prompts: Prompts, matrices: Sequence[Tensor]) -> None:
    context = prompts.context.xs.detach().double()
    second = context.mT @ context / max(1, prompts.n_context)
    steps = [torch.eye(prompts.x_dim).to(context) - matrix.detach().to(context) @ second for matrix in matrices]
    # the product of all steps' matrices, last one first: W_K - W is this times W_0 - W
    errors = functools.reduce(lambda before, step: step @ before, steps)
    finite = errors.isfinite().all(-1).all(-1)
    radius = torch.linalg.eigvals(errors.where(finite[:, None, None], 0.0)).abs().amax(-1)
    radius = radius.where(finite, math.inf)
    quantity = "the spectral radius of " + ("I - A S / n" if len(matrices) == 1 else "the product of all I - A_k S / n")
    warn_where_most_diverge("preconditioned GD", radius > 1 + TOLERANCE, f"if {quantity} is at most 1", "it", radius)


def descend_on_features(
    prompts: Prompts, *, matrix: Float[Tensor, "*any feature feature"], steps: int, constant: bool
) -> Float[Tensor, "prompt y"]:
    """Return the query's prediction after preconditioned gradient descent from 0 on the mean squared error."""
    xs = prompts.xs
    features = torch.cat([torch.ones_like(xs[..., :1]), xs], dim=-1) if constant else xs
    context, query = features[:, :-1], features[:, -1:]
    left, predicted = prompts.context.ys, torch.zeros_like(prompts.ys[:, :1])
    matrix = matrix.to(features) / max(1, prompts.n_context)
    for _ in range(steps):
        change = matrix @ (context.mT @ left)
        left, predicted = left - context @ change, predicted + query @ change
    return predicted[:, 0]


# ---- fits ----


def _fit_preconditioned(problem: FitProblem) -> Iterator[FittedAlgorithm]:
    prompts = problem.prompts
    matrix = _first_matrix(problem, constant=False)
    learner = AlgorithmLearner(preconditioned_gd, {"preconditioner": matrix})
    yield FittedAlgorithm(PRECONDITIONED.member(1), learner, _described(matrix), matrix.numel(), n_given=1)
    if problem.steps == 1 or prompts.x_dim**2 > MOST_MATRIX_NUMBERS:
        return
    # several steps: Gauss-Newton with damping, each number of steps from the previous one's matrix
    n, numbers = max(SCREENING, 4 * prompts.x_dim**2), few_steps(problem)
    few, targets = prompts[:n], problem.targets[:n]
    matrix, fits = matrix / numbers[0], []
    for before, k in zip((numbers[0], *numbers), numbers, strict=False):
        matrix, error = _nearest_matrix(few, targets, matrix * before / k, k)
        fits.append((error, k, matrix))
    _, k, matrix = fewest_steps(fits, problem.first(n))
    learner = AlgorithmLearner(descend_on_features, {"matrix": matrix, "steps": k, "constant": False})
    yield FittedAlgorithm(PRECONDITIONED.member(k), learner, _described(matrix), matrix.numel() + 1)


def _fit_with_constant(problem: FitProblem) -> Iterator[FittedAlgorithm]:
    d = problem.prompts.x_dim
    matrix = _first_matrix(problem, constant=True)
    learner = AlgorithmLearner(descend_on_features, {"matrix": matrix, "steps": 1, "constant": True})
    yield FittedAlgorithm(WITH_CONSTANT.member(1), learner, _described(matrix), matrix.numel(), n_given=1)
    design, _ = _slopes(problem.prompts, torch.zeros(d + 1, d + 1, dtype=torch.float64), 1, constant=True)
    diagonal = design.unflatten(1, (d + 1, d + 1)).diagonal(dim1=1, dim2=2)
    columns = torch.stack([diagonal[:, 0], diagonal[:, 1:].sum(1)], dim=1)
    c, a = torch.linalg.lstsq(columns, problem.targets.flatten()[:, None], driver="gelsd").solution[:, 0].tolist()
    matrix = torch.diag(torch.tensor([c] + [a] * d, dtype=torch.float64))
    learner = AlgorithmLearner(descend_on_features, {"matrix": matrix, "steps": 1, "constant": True})
    yield FittedAlgorithm(WITH_CONSTANT.member(1, "two numbers"), learner, {"of 1": c, "of x": a}, 2, n_given=1)


def _described(matrix: Tensor) -> dict[str, float]:
    values = torch.linalg.svdvals(matrix)
    return {"largest singular value": values[0].item(), "smallest": values[-1].item()}


def _first_matrix(problem: FitProblem, *, constant: bool) -> Tensor:
    size = problem.prompts.x_dim + constant
    design, _ = _slopes(problem.prompts, torch.zeros(size, size, dtype=torch.float64), 1, constant=constant)
    solution = torch.linalg.lstsq(design, problem.targets.flatten()[:, None], driver="gelsd").solution
    return solution.reshape(size, size)


def _nearest_matrix(prompts: Prompts, targets: Tensor, matrix: Tensor, steps: int) -> tuple[Tensor, float]:
    """Fit the matrix of several steps, starting from one (Levenberg-Marquardt); returns it and its squared error."""
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
    # every prompt gets a copy of the matrix: one backward pass from the sum then gives the slopes of all of them
    each = matrix.expand(len(prompts), *matrix.shape).clone().requires_grad_()
    with torch.enable_grad():
        predicted = descend_on_features(prompts, matrix=each, steps=steps, constant=constant)
        slopes = [torch.autograd.grad(y.sum(), each, retain_graph=True)[0].flatten(1) for y in predicted.unbind(-1)]
    return torch.stack(slopes, dim=1).flatten(0, 1), predicted.detach()


def _preconditioned_steps(problem: FitProblem) -> Iterator[StepwiseAlgorithm]:
    """Yield one step; and a matrix for each step, one after the other: the change in a step is linear in its matrix."""
    prompts, causal, n, d = problem.prompts, problem.causal, max(1, problem.prompts.n_context), problem.prompts.x_dim
    yield ResidualDescent(1, step_size=1 / n, preconditioner=_first_matrix(problem, constant=False))
    if problem.steps == 1:
        return
    few, targets = prompts[: 4 * FEW], problem.after_steps[:, : 4 * FEW]
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
    yield named(algorithm, f"preconditioned gradient descent, {len(matrices)} steps, a matrix each", causal=causal)


PRECONDITIONED = new_card(
    name="preconditioned gradient descent",
    holds=(*LINEAR, "order of the points", "moments"),
    violates=("scale of the inputs", "shift of the targets"),
    trajectory=preconditioned_gd,
    fit=_fit_preconditioned,
    step_forms=_preconditioned_steps,
    contains=("gradient descent",),
    phrase="{count} of preconditioned gradient descent",
)
WITH_CONSTANT = new_card(
    name="kernel gradient descent on 1 and x",
    holds=("linear in the targets", "scale of the targets", "order of the points"),
    violates=("linear in the query",),
    fit=_fit_with_constant,
    contains=("gradient descent",),
    phrase="{count} of gradient descent with an intercept",
)
