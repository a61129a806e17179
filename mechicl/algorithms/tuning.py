"""The searches that all fits of a few numbers use, and step sizes tuned on prompts."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import scipy
import torch
from torch import Tensor

from mechicl.algorithms.gradient_descent import gradient_descent_filter
from mechicl.algorithms.sizes import Sized
from mechicl.algorithms.spectra import PrefixSpectra, moments
from mechicl.base.arguments import Count, checked
from mechicl.prompts import Prompts

TUNED_ON = 512  # prompts for `tuned_each_step`
DIVERGED_ERROR = 1e50  # errors beyond count as this, so that no search computes with infinities


def minimize_on_grid(
    error: Callable[[float], float], grid: Sequence[float], *, tolerance: float = 1e-8
) -> tuple[float, float]:
    """Return the value with the least error, by grid and Brent's method around its best point, and that error.

    The ends of the ascending grid bound the search, and neighbours should lie in one valley. Below a relative tolerance
    of 1e-8, the square root of float64's precision, errors near the least one differ by rounding alone.
    """

    def finite(value: float) -> float:
        result = error(float(value))
        return min(result, DIVERGED_ERROR) if math.isfinite(result) else DIVERGED_ERROR

    errors = [finite(value) for value in grid]
    best = min(range(len(grid)), key=errors.__getitem__)
    low, high = max(best - 1, 0), min(best + 1, len(grid) - 1)
    # Brent's method needs a middle that is strictly below both ends of its bracket. At an end of the grid, or on a
    # plateau, there is none, and its bounded form looks between the neighbours instead.
    if low < best < high and errors[best] < min(errors[low], errors[high]):
        result = scipy.optimize.minimize_scalar(
            finite, bracket=(grid[low], grid[best], grid[high]), method="brent", tol=tolerance
        )
    else:
        result = scipy.optimize.minimize_scalar(
            finite, bounds=(grid[low], grid[high]), method="bounded", options={"xatol": tolerance * grid[high]}
        )
    return (float(result.x), float(result.fun)) if result.fun < errors[best] else (grid[best], errors[best])


def simplex(error: Callable[[Any], float], start: Any, *, xatol: float = 1e-7, fatol: float = 1e-14) -> Any:
    """Return the minimum that Nelder and Mead's method finds from a start."""
    options = {"maxfev": 150, "xatol": xatol, "fatol": fatol}
    minimize: Any = scipy.optimize.minimize
    return minimize(error, start, method="Nelder-Mead", options=options).x


def least_squares(residuals: Callable[[Any], Tensor], start: Any, *, floor: float, evaluations: int) -> Any:
    """Return scipy's fit of least squared residuals from a start; `floor` is added to the size of each number."""

    def finite(values: Any) -> Any:
        return residuals(values).flatten().nan_to_num(1e6).clamp(-1e6, 1e6).numpy()

    return scipy.optimize.least_squares(finite, start, x_scale=abs(start) + floor, max_nfev=evaluations)


def geometric_grid(low: float, high: float, n: int = 60) -> list[float]:
    """Return n numbers from low to high with equal ratios."""
    return torch.logspace(math.log10(low), math.log10(high), n, dtype=torch.float64).tolist()


@checked
def tuned_step_size(prompts: Sized, steps: Count = 1) -> float:
    """Return the step size of `gradient_descent` with the least mean squared error of the query's prediction.

    One step has a closed form, `Σ ŷ·y / Σ ŷ²` with ŷ the prediction for step size 1. More steps are searched: a
    geometric grid up to `4 / mean λ_max`, which starts low enough for early stopping on noisy targets, then Brent's
    method around the best point. Source: von Oswald et al. 2023, section 3.

    Args:
        prompts: prompts to tune on; their query targets are used, so evaluate on others. The paper tunes on 10,000.
        steps: number of steps that the step size is tuned for.

    Returns:
        a, the factor on the summed gradient. Von Oswald et al.'s η is `a * n_context`.
    """
    if len(prompts) == 0 or prompts.n_context == 0:
        raise ValueError(f"tuning needs prompts with context, got {prompts}")
    prompts = prompts.to(torch.float64)
    targets = prompts.query.ys
    # one step from 0 predicts a ŷ, linear in a, so that the least squared error is a regression of y on ŷ
    unit = (prompts.query.xs[:, None] @ moments(prompts.xs, prompts.ys, "query")[1][:, 0])[:, 0]
    if not unit.any():
        raise ValueError("every step size predicts 0 on these prompts: there is nothing to tune")
    if steps == 1:
        return ((unit * targets).sum() / unit.square().sum()).item()
    spectra = PrefixSpectra.decompose(prompts.xs, prompts.ys, at="query")

    def error(step_size: float) -> float:
        predictions = spectra.predict(gradient_descent_filter(spectra.eigenvalues, steps, step_size)[None])
        return (predictions[0, :, -1] - targets).square().mean().item()

    limit = 4 / spectra.eigenvalues.amax(-1).mean().item()
    n_grid = 80 + 10 * math.ceil(math.log2(steps))  # neighbours differ by 10% or less
    grid = [limit * (1000 * steps) ** (i / n_grid - 1) for i in range(n_grid + 1)]
    return minimize_on_grid(error, [0.0, *grid])[0]


def tuned_each_step(
    prompts: Prompts, steps: int, advance: Callable[[int, Tensor, Tensor, float], Tensor]
) -> list[float]:
    """Tune a factor for each step of a spectral iteration in turn, to the least mean squared error of all points.

    `advance` maps the step's number, the eigenvalues, the filter before the step (first 0) and its factor to the filter
    after it. The first 512 prompts are used.
    """
    prompts = prompts[:TUNED_ON].to(torch.float64)
    spectra = PrefixSpectra.decompose(prompts.xs, prompts.ys, at="points")
    current, factors = torch.zeros_like(spectra.eigenvalues), []
    for k in range(steps):

        def error(factor: float, k: int = k, before: Tensor = current) -> float:
            predictions = spectra.predict(advance(k, spectra.eigenvalues, before, factor)[None])[0]
            return (predictions - prompts.ys).square().mean().item()

        factors.append(minimize_on_grid(error, geometric_grid(0.1, 30, 30), tolerance=1e-4)[0])
        current = advance(k, spectra.eigenvalues, current, factors[-1])
    return factors


@checked
def stable_step_size(prompts: Sized) -> float:
    """Return `1 / λ_max`, with which `gradient_descent` converges on every prefix (factor on the summed gradient).

    λ_max is the largest eigenvalue of S = XᵀX over all contexts; prefixes have smaller ones.
    """
    context = prompts.context.xs.double()
    largest = torch.linalg.matrix_norm(context, ord=2).square().max().item() if context.numel() else 0.0
    if largest == 0:
        raise ValueError(f"prompts must have a context point other than 0, got {prompts}")
    return 1 / largest
