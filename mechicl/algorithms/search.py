"""Where a function of one number is least: the one search that all tuning uses."""

import math
from collections.abc import Callable, Sequence

import torch
from scipy.optimize import minimize_scalar

DIVERGED = 1e50  # errors beyond count as this, so that no search computes with infinities


def minimize_on_grid(
    error: Callable[[float], float], grid: Sequence[float], *, tolerance: float = 1e-8
) -> tuple[float, float]:
    """The value with the least error, by grid and Brent's method between the best one's neighbours, and that error.

    Args:
        error: of a value; one that is not finite counts as diverged.
        grid: ascending values, whose ends bound the search; neighbours should lie in one valley.
        tolerance: of the value, relative. Below 1e-8, the square root of float64's precision, errors near the least
            one differ by rounding alone.
    """

    def finite(value: float) -> float:
        result = error(float(value))
        return min(result, DIVERGED) if math.isfinite(result) else DIVERGED

    errors = [finite(value) for value in grid]
    best = min(range(len(grid)), key=errors.__getitem__)
    low, high = max(best - 1, 0), min(best + 1, len(grid) - 1)
    # Brent's method needs a middle that is strictly below both ends of its bracket. At an end of the grid, or on a
    # plateau, there is none, and its bounded form looks between the neighbours instead.
    if low < best < high and errors[best] < min(errors[low], errors[high]):
        result = minimize_scalar(finite, bracket=(grid[low], grid[best], grid[high]), method="brent", tol=tolerance)
    else:
        result = minimize_scalar(
            finite, bounds=(grid[low], grid[high]), method="bounded", options={"xatol": tolerance * grid[high]}
        )
    return (float(result.x), float(result.fun)) if result.fun < errors[best] else (grid[best], errors[best])


def geometric_grid(low: float, high: float, n: int = 60) -> list[float]:
    """Numbers from low to high, each the same factor above the one before."""
    return torch.logspace(math.log10(low), math.log10(high), n, dtype=torch.float64).tolist()
