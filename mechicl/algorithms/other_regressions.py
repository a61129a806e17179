"""Regressions that a user may expect behind a model: gradient flow, kernel ridge, Huber's, and those on unit inputs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from mechicl.algorithms.baselines import lasso
from mechicl.algorithms.card import FILTER, KERNEL, LINEAR, Algorithm, FitProblem, FittedAlgorithm, new_card
from mechicl.algorithms.kernel_smoothing import log_kernel
from mechicl.algorithms.least_squares import EPSILON, LOST, ols, relative_noise, ridge, ridge_filter
from mechicl.algorithms.recursive import at_queries, error_of, nearest_scale, online_gradient_descent
from mechicl.algorithms.sizes import Sized
from mechicl.algorithms.spectra import (
    ConditioningWarning,
    earlier_points,
    in_parts,
    linear_trajectory,
    one_step,
    selected,
    spectral_trajectory,
)
from mechicl.algorithms.spectral_fit import SCREENING
from mechicl.algorithms.tuning import geometric_grid, minimize_on_grid
from mechicl.base.arguments import NonNegative, Positive, checked
from mechicl.base.warning import warn
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt

BLENDS = (0.0, 0.003, 0.03, 0.3, 1.0)
"""Shares of repeated least squares in the curvature of Huber's steps; the rest is Newton's, and the best is taken."""
MAX_REWEIGHTINGS = 100
"""Rounds of Huber's regression, which ends earlier where weights no longer change."""


def flow_filter(eigenvalues: Tensor, time: float) -> Tensor:
    """Return `(1 - exp(-λ t)) / λ`, and its limit t at λ = 0."""
    tiny = eigenvalues < 1e-300
    return torch.where(tiny, time, -torch.expm1(-time * eigenvalues) / eigenvalues.masked_fill(tiny, 1.0))


@checked
def gradient_flow(
    prompts: Sized, *, time: NonNegative, at: PointsAt = "points", with_weights: bool = False
) -> Trajectory:
    """Predict by gradient flow on the squared loss from 0: the limit of many small steps.

    It is the filter `(1 - exp(-λ t)) / λ` of S = XᵀX of the points before the predicted one. Source: Ali et al.
    2019, section 3.

    Args:
        time: t, which k steps of size a reach at `k a`.
    """
    return spectral_trajectory(
        prompts, lambda eigenvalues: flow_filter(eigenvalues, time)[None], name=f"gradient flow({time:g})", steps=(0,),
        at=at, with_weights=with_weights,
    )  # fmt: skip


@checked
def kernel_ridge(prompts: Sized, *, bandwidth: Positive, penalty: Positive, at: PointsAt = "points") -> Trajectory:
    """Predict by ridge regression with a Gaussian kernel, `k(x) (K + penalty I)⁻¹ Y` with `k = exp(-|x - x'|²/(2h²))`.

    It is the posterior mean of a Gaussian process. Source: Rasmussen & Williams 2006, equation 2.23.

    Args:
        bandwidth: h, in units of x.
        penalty: added to the diagonal of the kernel matrix: the variance of the noise over that of the function.

    Warns:
        ConditioningWarning: the kernel matrix plus `penalty` is nearly singular, as of equal points, so that few digits
            may be right. Directions at the level of rounding count as absent.
    """
    seen, n_points, errors = earlier_points(prompts, at), prompts.n_context + 1, []
    noise = EPSILON * n_points**2  # of the kernel matrix, whose eigenvalues are at most n

    def run(part: Prompts) -> Trajectory:
        xs = part.xs.double()
        values = (log_kernel(xs, xs) / bandwidth**2).exp()
        both = seen[:, :, None] & seen[:, None]
        identity = torch.eye(n_points).to(xs)
        matrices = torch.where(both, values[:, None], identity * ~seen[:, None])
        ys = torch.where(seen[..., None], part.ys.double()[:, None], 0.0)
        if penalty > noise / LOST:
            coefficients = torch.linalg.solve(matrices + penalty * identity, ys)
        else:
            eigenvalues, vectors = torch.linalg.eigh(matrices)
            filters = ridge_filter(eigenvalues.clamp(min=0), penalty, n_context=n_points)
            coefficients = vectors @ (filters[..., None] * (vectors.mT @ ys))
            errors.extend((noise / (eigenvalues.detach().clamp(min=0) + penalty)).amax((-2, -1)).tolist())
        return one_step(part, (selected(values, at)[:, :, None] @ coefficients)[:, :, 0], "kernel ridge")

    fitted = in_parts(prompts, n_points * n_points * max(3 * len(seen), prompts.x_dim), run)
    if (error := max(errors, default=0.0)) > LOST:
        warn(
            f"kernel_ridge(penalty={penalty:.3g}) on nearly equal points: coefficients of the kernel matrix's smallest "
            f"eigenvalues are right to about {min(error, 1.0):.1g}, or left out. Take a larger penalty",
            ConditioningWarning,
        )
    return fitted


@checked
def huber(prompts: Sized, *, threshold: Positive, at: PointsAt = "points", with_weights: bool = False) -> Trajectory:
    """Predict with weights that minimise Huber's loss: squared up to a residual of `threshold`, and linear beyond.

    Least squares is repeated with the weight `threshold / |residual|` for points beyond it, its curvature blended with
    that of Newton's method. Gradients flow to the query's input, not to the context. Each target dimension is fitted
    separately. Source: Huber 1964.

    Args:
        threshold: in units of y; one larger than every residual gives least squares, of least norm as in `ols`.

    Warns:
        ConditioningWarning: the loss is not at its minimum after 100 repetitions, as may happen if `threshold` is a
            thousandth of the residuals or less.
    """
    seen = earlier_points(prompts, at)
    unfinished: list[float] = []

    def run(part: Prompts) -> Trajectory:
        xs, ys = part.xs.detach().double(), part.ys.detach().double().mT[:, :, None]  # [prompt y 1 point]
        each = (len(part), part.y_dim, len(seen), -1)  # [prompt y t point]
        # on the span of each prefix's points, in an orthonormal basis of which the fit has its least norm (see `ols`)
        basis, lengths, right = torch.linalg.svd(xs[:, None, None] * seen[..., None], full_matrices=False)
        absent = lengths <= (relative_noise(prompts) * lengths.amax(-1, keepdim=True)).clamp(min=1e-300)
        basis = basis.masked_fill(absent[..., None, :], 0.0)  # [prompt 1 t point span]
        to_inputs = (right / lengths.masked_fill(absent, torch.inf)[..., None]).mT  # [prompt 1 t x span]

        def solved(shares: Tensor, right: Tensor) -> Tensor:
            weighted = (shares.expand(each)[..., None] * basis).mT  # [prompt y t span point]
            second = weighted @ basis
            total = second.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
            second = second + 1e-13 * total * torch.eye(basis.shape[-1]).to(xs)
            cross = (right.expand(each) * seen)[..., None, :] @ basis
            return torch.linalg.solve_ex(second, cross.mT)[0][..., 0].nan_to_num()

        def residuals_of(weights: Tensor) -> Tensor:
            return ys - (basis @ weights[..., None])[..., 0]

        def loss(weights: Tensor) -> Tensor:
            sizes = residuals_of(weights).abs()
            return (torch.where(sizes < threshold, sizes**2 / 2, threshold * (sizes - threshold / 2)) * seen).sum(-1)

        weights = solved(seen.double(), ys)
        for _ in range(MAX_REWEIGHTINGS):
            residuals = residuals_of(weights)
            shares = seen * (threshold / residuals.abs().clamp(min=1e-300)).clamp(max=1)
            quadratic, slope = seen * (residuals.abs() <= threshold), residuals.clamp(-threshold, threshold)
            candidates = torch.stack([weights + solved(b * shares + (1 - b) * quadratic, slope) for b in BLENDS])
            best = torch.stack([loss(candidate) for candidate in candidates]).nan_to_num(nan=torch.inf).argmin(0)
            before, weights = weights, candidates.gather(0, best[None, ..., None].expand(1, *weights.shape))[0]
            size = weights.abs().amax(-1)  # residuals move by as much as the weights of an orthonormal basis
            still = torch.full_like(size, 0.1 * LOST * threshold).clamp(1e-15 * size, 1e-11 * size)
            if ((weights - before).abs().amax(-1) <= still).all():
                break
        # weights may move for ever where several have the least loss; the slope of the loss is 0 there
        pull = ((residuals_of(weights).clamp(-threshold, threshold) * seen)[..., None, :] @ basis).abs()
        most = threshold * (seen.double()[:, None] @ basis.abs())
        unfinished.extend((pull / most.clamp(min=1e-300)).amax((-2, -1)).flatten().tolist())
        weights = (to_inputs @ weights[..., None])[..., 0]
        return linear_trajectory(part, weights.permute(0, 2, 3, 1), "Huber", at, with_weights)

    trajectory = in_parts(prompts, seen.numel() * prompts.x_dim**2 * prompts.y_dim, run)
    if max(unfinished, default=0.0) > LOST:
        warn(
            f"huber(threshold={threshold:.3g}) has not converged after {MAX_REWEIGHTINGS} repetitions: the slope of "
            f"its loss is up to {max(unfinished):.1g} of the largest possible. A larger threshold converges sooner",
            ConditioningWarning,
        )
    return trajectory


@checked
def on_unit_inputs(
    prompts: Sized,
    *,
    algorithm: Literal["least mean squares", "ridge"] = "least mean squares",
    strength: Positive = 1.0,
    scale: float = 1.0,
    at: PointsAt = "points",
    with_weights: bool = False,
) -> Trajectory:
    """Learn weights from the context's inputs divided by their length, `x / |x|`, and predict `scale * x W`.

    Layers that normalise their keys compute it: the delta rule is least mean squares on unit inputs (Yang et al.
    2024), and Mesa layers are ridge regression on them (von Oswald et al. 2025).

    Args:
        algorithm: "least mean squares" makes one pass, in the order of the prompt.
        strength: the step size of least mean squares, or the penalty of ridge.
        scale: factor on the prediction, which is made for the query unchanged.
    """
    xs = prompts.xs.double()
    units = Prompts(xs / xs.norm(dim=-1, keepdim=True).clamp(min=1e-300), prompts.ys.double())
    if algorithm == "ridge":
        learned = ridge(units, penalty=strength, at=at, with_weights=True)
    else:
        learned = online_gradient_descent(units, step_size=strength, at=at, with_weights=True)
    assert learned.weights is not None
    return linear_trajectory(prompts, scale * learned.weights[0], f"{algorithm} on unit inputs", at, with_weights)


# ---- cards ----


def _nearest(card: Algorithm, name: str, error: Callable[[float], float], grid: Sequence[float]) -> FittedAlgorithm:
    """Return the member with the value of least error, which is a limit of the family at an end of the grid."""
    value, _ = minimize_on_grid(error, grid)
    return replace(card.fitted({name: value}), is_limit=_at_end(value, grid))


def _at_end(value: float, grid: Sequence[float]) -> bool:
    return not 1.01 * grid[0] < value < grid[-1] / 1.01


def _fit_flow(problem: FitProblem) -> Iterator[FittedAlgorithm]:
    largest = problem.spectral.eigenvalues.max().item()

    def error(time: float) -> float:
        return problem.spectral.error(flow_filter(problem.spectral.eigenvalues, time)).item()

    yield _nearest(FLOW, "time", error, geometric_grid(1e-3 / largest, 1e4 / largest))


def _fit_lasso(problem: FitProblem) -> Iterator[FittedAlgorithm]:
    size = (problem.prompts.context.xs.mT @ problem.prompts.context.ys).abs().amax((1, 2)).mean().item()
    grid = geometric_grid(1e-4 * size / problem.prompts.n_context, size / problem.prompts.n_context, 14)
    yield _nearest(LASSO, "penalty", lambda penalty: error_of(problem, lasso, penalty=penalty), grid)


def _fit_huber(problem: FitProblem) -> Iterator[FittedAlgorithm]:
    context = problem.prompts.context.ys
    rest = ols(problem.prompts, at="query", with_weights=True).weights
    assert rest is not None
    residuals = (context - problem.prompts.context.xs @ rest[0, :, 0]).abs()
    largest, size = residuals.max().item(), context.square().mean().sqrt().item()
    if largest <= 1e-8 * size:  # without noise every threshold gives least squares
        yield replace(HUBER.fitted({"threshold": size}), is_limit=True)
        return
    some = problem.first(SCREENING // 4)
    grid = geometric_grid(0.03 * largest, largest, 8)
    yield _nearest(HUBER, "threshold", lambda threshold: error_of(some, huber, threshold=threshold), grid)


def _fit_kernel_ridge(problem: FitProblem) -> Iterator[FittedAlgorithm]:
    some = problem.first(2 * SCREENING)
    xs, ys, query = some.prompts.context.xs, some.prompts.context.ys, some.prompts.query.xs[:, None]
    size = xs.square().sum(-1).mean().sqrt().item()
    bandwidths, penalties = geometric_grid(0.1 * size, 10 * size, 12), geometric_grid(1e-6, 1e3, 19)

    def least(bandwidth: float) -> tuple[float, float]:
        """The best penalty at a bandwidth, and its error: one decomposition serves all penalties."""
        kernels = ((-torch.cdist(each, xs).square() / (2 * bandwidth**2)).exp() for each in (xs, query))
        values, vectors = torch.linalg.eigh(next(kernels))
        left, right = next(kernels) @ vectors, vectors.mT @ ys

        def error(penalty: float) -> float:
            return some.error((left @ (right / (values.clamp(min=0) + penalty)[..., None]))[:, 0])

        return minimize_on_grid(error, penalties)

    bandwidth, _ = minimize_on_grid(lambda h: least(h)[1], bandwidths)
    penalty, _ = least(bandwidth)
    fitted = KERNEL_RIDGE.fitted({"bandwidth": bandwidth, "penalty": penalty})
    yield replace(fitted, is_limit=_at_end(bandwidth, bandwidths) or _at_end(penalty, penalties))


def _fit_on_units(algorithm: str, grid: tuple[float, float], problem: FitProblem) -> Iterator[FittedAlgorithm]:
    values = geometric_grid(*grid, 14)

    def scaled(strength: float) -> tuple[float, Tensor]:
        unit = at_queries(problem, on_unit_inputs, algorithm=algorithm, strength=strength)
        return nearest_scale(problem, unit), unit

    def error(strength: float) -> float:
        scale, unit = scaled(strength)
        return problem.error(scale * unit)

    strength, _ = minimize_on_grid(error, values)
    card = UNIT_RIDGE if algorithm == "ridge" else UNIT_LMS
    fitted = card.fitted({"strength": strength, "scale": scaled(strength)[0]})
    yield replace(fitted, is_limit=_at_end(strength, values))


ORDERED = (*LINEAR, "rotation of the inputs")
ITS_OWN = ("order of the points", "linear in the query")
FLOW = new_card(
    name="gradient flow",
    holds=FILTER,
    violates=("scale of the inputs", "shift of the targets"),
    trajectory=gradient_flow,
    fit=_fit_flow,
)
LASSO = new_card(
    name="lasso",
    holds=(*ITS_OWN, "moments"),
    violates=("linear in the targets", "rotation of the inputs", "scale of the targets"),
    trajectory=lasso,
    fit=_fit_lasso,
    phrase="the lasso",
)
HUBER = new_card(
    name="Huber regression",
    holds=(*ITS_OWN, "rotation of the inputs", "scale of the inputs"),
    violates=("linear in the targets", "shift of the targets"),  # but for thresholds beyond every residual
    trajectory=huber,
    fit=_fit_huber,
    contains=("least squares",),
    phrase="Huber's regression",
)
KERNEL_RIDGE = new_card(
    name="kernel ridge",
    holds=KERNEL,
    violates=("linear in the query", "moments", "shift of the targets"),
    trajectory=kernel_ridge,
    fit=_fit_kernel_ridge,
    phrase="ridge regression with a Gaussian kernel",
)
UNIT_LMS = new_card(
    name="least mean squares on unit inputs",
    holds=ORDERED,
    violates=("order of the points", "moments"),
    trajectory=on_unit_inputs,
    fit=partial(_fit_on_units, "least mean squares", (0.02, 2.0)),
)
UNIT_RIDGE = new_card(
    name="ridge on unit inputs",
    holds=(*ORDERED, "order of the points"),
    violates=("moments", "shift of the targets"),
    trajectory=partial(on_unit_inputs, algorithm="ridge"),
    fit=partial(_fit_on_units, "ridge", (1e-3, 100.0)),
)
