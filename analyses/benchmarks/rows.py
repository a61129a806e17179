"""Settings of the benchmark, and its rows: a ratio with its spread over rounds that alternate, and its bar."""

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from benchmarks.apart import Apart, peers
from mechicl.statistics import Interval

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Settings of all parts."""

    rounds: int = 5  # number of measurements of each ratio; fewer where one takes minutes
    every: int = 1  # only every n-th of the compiled programs
    # measure 500 cells of a sweep, cells of a minute, all steps of trained readouts, and more programs
    full: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    quantity: str
    value: float  # median over rounds, or mean
    low: float  # range over rounds, or 95% interval
    high: float
    spread: str  # which of the two, and over how many
    bar: str = "shown"  # bound on the value, such as ">= 4" or "0.99 to 1.01"; other texts are not bounds
    detail: str = ""  # the numbers that a ratio is made of, and sizes
    data: Mapping[str, Any] | None = None  # measurements for a picture, which the table leaves out

    @property
    def is_met(self) -> bool | None:
        """True if the value is within its bar; None without a bar."""
        number = r"(-?[\d.]+(?:e-?\d+)?)"
        if one := re.fullmatch(rf"(<=|>=|<|) ?{number}", self.bar):
            sign, bound = one[1], float(one[2])
            tests = {"<=": self.value <= bound, ">=": self.value >= bound, "<": self.value < bound}
            return tests.get(sign, self.value == bound)
        if two := re.fullmatch(rf"{number} to {number}", self.bar):
            return float(two[1]) <= self.value <= float(two[2])
        return None


def row(
    quantity: str, values: Sequence[float] | Interval, bar: str = "shown", detail: str = "", over: str = "seeds",
    data: Mapping[str, Any] | None = None,
) -> Row:  # fmt: skip
    """A row of values of rounds (median and range), or of an interval over `over`."""
    if isinstance(values, Interval):
        spread = f"mean, 95% over {values.n} {over}"
        return Row(quantity, float(values.mean), float(values.low), float(values.high), spread, bar, detail, data)
    spread = f"median, {len(values)} rounds" if len(values) > 1 else "one run"
    return Row(quantity, statistics.median(values), min(values), max(values), spread, bar, detail, data)


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """How long a call takes, and what it returns."""
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    return timed(call)[0]


def alternate(measures: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Take each measure once per round, one after another, and return the values of all rounds."""
    values: dict[str, list[T]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            values[name].append(measure())
    return values


def compare_speeds(
    make: Mapping[str, Callable[[], Apart]], steps: Callable[[str], int], rounds: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Steps per second of each training by name, in rounds that alternate, and the forms of those that choose one.

    Args:
        make: the trainings, each in its own process.
        steps: number of steps of a training, by its name.
    """
    with peers(make) as made:
        forms = {name: one.call("form") for name, one in made.items() if one.make == "jax_twins:Quickest"}
        measures = {name: partial(one.call, "steps_per_second", steps(name)) for name, one in made.items()}
        return alternate(measures, rounds), forms


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'quantity':74} {'value':>10} {'low':>10} {'high':>10}  bar"]
    for r in rows:
        missed = "   MISSED" if r.is_met is False else ""
        lines.append(f"{r.quantity:74} {r.value:10.5g} {r.low:10.5g} {r.high:10.5g}  {r.bar}{missed}")
        lines.append("    " + "; ".join(filter(None, (r.spread, r.detail))))
    return "\n".join(lines)
