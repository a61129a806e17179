"""The point of a sweep's axis at which a value passes a level, with an interval over seeds."""

import math

import numpy as np
import pandas as pd

from mechicl.base.arguments import checked
from mechicl.statistics import Interval
from mechicl.statistics.grids import SEED, GridTable
from mechicl.statistics.intervals import student_t_quantile


@checked
def find_threshold(
    table: GridTable | pd.DataFrame, x: str, value: str, *, level: float = 0.0, rising: bool = True
) -> Interval:
    """Find the x above which the mean over seeds of a measured value stays above a level, on a logarithmic axis.

    Between the last point at or below the level and the next, the value is interpolated linearly in log x. The 95%
    interval is a jackknife over seeds (Tukey 1958) on the logarithm, with Student's t; a bootstrap of few seeds would
    be too narrow. Source: Raventós et al. 2023, section 3, where the threshold is read off curves.

    Args:
        table: table of a sweep (`Sweep.run`, `load_table`) with the columns x, value and "seed"; seeds without a value
            at some x are left out.
        x: name of the column of the axis, for instance "task.n_tasks": positive numbers, or their text.
        value: name of the column of the measured value.
        level: number that the value must pass.
        rising: True to look for a value that rises above the level along the axis, False for one that falls below it.

    Returns:
        The threshold as an `Interval`: `mean` is the x, `low` and `high` its 95% interval, `n` the number of seeds.
        `mean` is 0 if all values are past the level and infinite if the last one is not. An end of the interval beyond
        the axis is 0 or infinite. If `mean`, or the threshold without one of the seeds, is beyond it, the interval is
        0 to infinity, unless all these thresholds are equal. With one seed both ends are NaN.

    Example:
        >>> frame = pd.DataFrame({"n": [2, 8, 32] * 2, "seed": [0] * 3 + [1] * 3, "ratio": [-1.0, 1, 2, -1, 1, 3]})
        >>> print(find_threshold(frame, "n", "ratio").mean)
        4.0
    """
    frame = table.frame if isinstance(table, GridTable) else table
    for name in (x, value, SEED):
        if name not in frame.columns:
            raise KeyError(f"the table has no column {name!r}; it has {', '.join(map(str, frame.columns))}")
    try:
        frame = frame.assign(**{x: pd.to_numeric(frame[x])})
    except (ValueError, TypeError) as error:
        raise ValueError(f"a threshold on a logarithmic axis needs positive values of {x!r}: {error}") from error
    if not (frame[x] > 0).all():
        raise ValueError(f"a threshold on a logarithmic axis needs positive values of {x!r}, got {min(frame[x])}")
    if frame.duplicated([SEED, x]).any():
        raise ValueError(f"several rows have the same seed and {x!r}: choose one value of each other axis first")
    wide = frame.pivot(index=SEED, columns=x, values=value).sort_index(axis=1).astype(float).dropna()
    places, n = np.asarray(wide.columns, dtype=float), len(wide)
    if not n:
        raise ValueError(f"no seed has {value!r} at all {len(places)} values of {x!r}")
    if np.isinf(wide.to_numpy()).any():
        raise ValueError(f"{value!r} has infinite values, to which a line cannot be drawn: leave out their rows")
    values = (wide.to_numpy() - level) * (1 if rising else -1)
    middle = passed(places, values.mean(0))
    low, high = _jackknife(places, values, middle)
    return Interval(middle, low, high, n, middle="median")  # like a median's, its ends may be at different distances


def _jackknife(places: np.ndarray, values: np.ndarray, middle: float) -> tuple[float, float]:
    n = len(values)
    if n < 2:
        return math.nan, math.nan
    without = [passed(places, np.delete(values, i, axis=0).mean(0)) for i in range(n)]
    if set(without) == {middle}:  # also where all are beyond the axis
        return middle, middle
    if not all(0 < each < math.inf for each in (*without, middle)):
        return 0.0, math.inf
    logs = np.log(without)
    error = math.sqrt((n - 1) / n * float(np.square(logs - logs.mean()).sum()))
    half = student_t_quantile(0.975, n - 1) * error
    low, high = middle * math.exp(-half), middle * math.exp(half)
    return (low if low >= places[0] else 0.0), (high if high <= places[-1] else math.inf)


def passed(places: np.ndarray, values: np.ndarray) -> float:
    """The place at which values pass 0 for good: 0 if all are above it, infinite if the last is below."""
    above = values > 0
    if not above[-1]:
        return math.inf
    if above.all():
        return 0.0
    i = int(np.flatnonzero(~above)[-1])
    low, high = np.log(places[i]), np.log(places[i + 1])
    return float(np.exp(low + (high - low) * -values[i] / (values[i + 1] - values[i])))
