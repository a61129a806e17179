"""Overhead of argument checks: calls of public functions over the same calls without checks."""

from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import torch

from benchmarks.rows import Row, Settings, alternate, ratios, row, seconds
from mechicl import constructions
from mechicl.analysis import corrupt, patch
from mechicl.prompts import Prompts
from mechicl.statistics import interval
from mechicl.statistics.intervals import percentile_interval
from mechicl.tasks import LinearRegression

Calls = dict[str, tuple[Callable[..., Any], tuple[Any, ...], int, str]]


def measure(settings: Settings) -> list[Row]:
    """Measure small calls, where checks weigh most, and a long list.

    The plain call is that of `__wrapped__`. Functions that check values themselves are called without that check.
    """
    prompts = LinearRegression(x_dim=10, n_context=10).sample(64, seed=0)
    model = constructions.gradient_descent(x_dim=10, n_context=10, step_size=0.06, steps=2)
    samples, numbers = torch.randn(20, generator=torch.Generator().manual_seed(0)), [0.001 * i for i in range(100_000)]
    calls: Calls = {  # function, arguments, number of calls, bar
        "predict of one prompt": (type(model).predict, (model, prompts[:1]), 300, "<= 1.05"),
        "interval of 20 numbers": (interval, (samples,), 1000, "<= 1.15"),
        "Prompts(xs, ys)": (Prompts, (prompts.xs, prompts.ys), 1000, "<= 1.3"),
        "patch": (patch, (model, prompts, corrupt(prompts, "labels"), "z"), 5, "<= 1.02"),
        "percentile_interval of 100,000 floats": (percentile_interval, (1.0, numbers, 20), 20, "<= 1.2"),
    }
    return [_row(name, *call, rounds=settings.rounds) for name, call in calls.items()]


def _row(name: str, function: Any, arguments: tuple[Any, ...], n_calls: int, bar: str, *, rounds: int) -> Row:
    def best(function: Any) -> float:
        return min(seconds(lambda: [function(*arguments) for _ in range(n_calls)]) / n_calls for _ in range(5))

    def without_checks() -> float:
        with (
            mock.patch("mechicl.prompts.prompts.count_undefined", _zero),
            mock.patch("mechicl.models.layered.count_undefined", _zero),
        ):
            return best(getattr(function, "__wrapped__", function))

    without_checks()  # warm-up
    times = alternate({"checked": lambda: best(function), "plain": without_checks}, rounds)
    detail = " against ".join(f"{median(each) * 1e6:.0f}" for each in times.values())
    values = ratios(times["checked"], times["plain"])
    return row(f"{name}: arguments checked over not", values, bar, f"{detail} microseconds a call")


def _zero(values: torch.Tensor) -> int:
    return 0
