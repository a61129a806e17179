"""Statistics that every analysis shares: means with intervals, and the base of all results.

>>> from mechicl.statistics import interval
>>> print(interval((model.predict(prompts) - prompts.query.ys).square()))    # a mean, with its 95% interval
>>> print(alignment.intervals()["sensitivity_cosine"])                       # the same, of any result's fields
"""

from mechicl.statistics.intervals import (
    UNBOUNDED,
    Interval,
    crossed_interval,
    difference_interval,
    interval,
    mean_of_intervals,
    median_interval,
    ratio_interval,
)
from mechicl.statistics.results import Result, load_result
from mechicl.statistics.storage import storable

__all__ = [
    "UNBOUNDED", "Interval", "Result", "crossed_interval", "difference_interval", "interval", "load_result",
    "mean_of_intervals", "median_interval", "ratio_interval", "storable",
]  # fmt: skip
