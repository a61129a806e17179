"""Where, along an axis of a sweep, a value passes a level: with an interval over seeds."""

import math
from typing import Any

import numpy as np
import pandas as pd

from mechicl.statistics import Interval, student_t_quantile

SEED = "seed"


def find_threshold(
    table: Any,
    x: str,
    value: str,
    *,
    level: float = 0.0,
    rising: bool = True,
) -> Interval:
    """Where the mean over seeds of a value rises over a level for good, on a logarithmic axis, with its interval.

    Between the last point at or below the level and the next the value is a straight line over the logarithm of x. The
    95% interval is a jackknife over seeds (Tukey 1958): from the thresholds without each, on the logarithm, and
    Student's t of n - 1 degrees of freedom. A bootstrap would be too narrow: for the mean of three normal values its
    95% interval holds 73% of the time, of five 83%. What lies beyond the axis is 0 or infinite: so are both ends where
    only some of those thresholds are on it. With one seed they are NaN.

    Args:
        table: of a sweep, or a pandas frame, with the columns x, value and "seed"; rows without the value are left out,
            and so are seeds that lack a point.
        x: the axis, positive.
        value: the column.
        level: which is passed.
        rising: False for a value that falls below the level along the axis.

    Raises:
        KeyError: no such column.
        TypeError: a table that is neither of a sweep nor a frame.
        ValueError: an x that is not positive, several rows of one seed at one point, or no seed with all points.

    Source: Raventós et al. 2023, section 3, where the threshold is read off curves.

    Example:
        >>> frame = pd.DataFrame({"n": [2, 8, 32] * 2, "seed": [0] * 3 + [1] * 3, "ratio": [-1.0, 1, 2, -1, 1, 3]})
        >>> print(find_threshold(frame, "n", "ratio").mean)
        4.0
    """
    frame = table if isinstance(table, pd.DataFrame) else getattr(table, "frame", None)
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(f"table must be of a sweep, or a pandas frame, got {type(table).__name__}")
    for name in (x, value, SEED):
        if name not in frame.columns:
            raise KeyError(f"the table has no column {name!r}; it has {', '.join(map(str, frame.columns))}")
    if frame.duplicated([SEED, x]).any():
        raise ValueError(f"several rows have the same seed and {x!r}: choose one value of each other axis first")
    wide = frame.pivot(index=SEED, columns=x, values=value).sort_index(axis=1).astype(float).dropna()
    places = np.asarray(wide.columns, dtype=float)
    if not len(wide):
        raise ValueError(f"no seed has {value!r} at all {len(places)} values of {x!r}")
    if not (places > 0).all():
        raise ValueError(f"a threshold on a logarithmic axis needs positive values of {x!r}, got {places.tolist()}")
    values = (wide.to_numpy() - level) * (1 if rising else -1)
    middle = passed(places, values.mean(0))
    low, high = _jackknife(places, values, middle)
    # its ends need not be equally far away: it prints as medians do
    return Interval(middle, low, high, len(values), middle="median")


def _jackknife(places: np.ndarray, values: np.ndarray, middle: float) -> tuple[float, float]:
    """Ends of the threshold's interval, of values `[seed place]`."""
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
    """Where values over increasing places pass 0 for good: 0 if all are above it, infinite if the last is below."""
    above = values > 0
    if not above[-1]:
        return math.inf
    if above.all():
        return 0.0
    i = int(np.flatnonzero(~above)[-1])
    low, high = np.log(places[i]), np.log(places[i + 1])
    return float(np.exp(low + (high - low) * -values[i] / (values[i + 1] - values[i])))
