"""Predicates that decide whether measured rows agree with a paper's claim.

A check is a function of a claim's lines of rows that returns one boolean for each value, or one for all of them. Checks
are made from predicates of rows by `every`, `by_value` and `together`:

    every(near, 1)                           every row is near 1
    by_value(above)                         the first line lies above the second, value by value
    together(lambda a, b: above(a, b))      one result for all rows
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from mechicl.reports.rows import Row, above, below, ends, near
from mechicl.reports.rows import equal as equal

Check = Callable[[Sequence[Sequence[Row]]], list[bool]]
"""Takes a claim's lines of rows."""


# ---- checks from predicates ----


def every(predicate: Callable[..., bool], *values: Any) -> Check:
    """Put a predicate, with further arguments, to every row."""
    return lambda lines: [predicate(row, *values) for rows in lines for row in rows]


def by_value(predicate: Callable[..., bool]) -> Check:
    """Put a predicate to the lines' first values, their second ones and so on; a line of one value goes with all."""

    def check(lines: Sequence[Sequence[Row]]) -> list[bool]:
        n = max(map(len, lines))
        return [predicate(*rows) for rows in zip(*(rows * n if len(rows) == 1 else rows for rows in map(list, lines)),
                                                 strict=True)]  # fmt: skip

    return check


def together(predicate: Callable[..., bool]) -> Check:
    """Put a predicate to all rows at once."""
    return lambda lines: [bool(predicate(*(row for rows in lines for row in rows)))]


def both(*checks: Check) -> Check:
    """All of several checks; one that has a single result counts for every value."""

    def check(lines: Sequence[Sequence[Row]]) -> list[bool]:
        results = [each_of(lines) for each_of in checks]
        n = max(map(len, results))
        return [all(result[i if len(result) > 1 else 0] for result in results) for i in range(n)]

    return check


# ---- predicates, besides near, equal, below and above of `mechicl.reports.rows` ----


def far(row: Row, value: float) -> bool:
    """Not near a value."""
    return not near(row, value)


def at_most(row: Row, other: Row | float) -> bool:
    """The whole interval is at or below another, or a number."""
    return ends(row)[2] <= ends(other)[0]


def at_least(row: Row, other: Row | float) -> bool:
    """The whole interval is at or above another, or a number."""
    return ends(row)[0] >= ends(other)[2]


def between(row: Row, low: float, high: float) -> bool:
    """The whole interval lies between two numbers."""
    return above(row, low) and below(row, high)


def covers(row: Row, value: float) -> bool:
    """The interval contains a value."""
    return ends(row)[0] <= value <= ends(row)[2]


def within(row: Row, share: float, other: Row | float | str | None) -> bool:
    """The mean differs from another by no more than a share of it."""
    reference = float("nan") if other is None else float(other) if isinstance(other, str) else ends(other)[1]
    return abs(ends(row)[1] / reference - 1) <= share


def reads(row: Row, words: str) -> bool:
    """It was measured as this text."""
    return row.measured == words


def count_is(row: Row, how: str) -> bool:
    """Text such as "5 of 5 seeds" counts "all", or "none"."""
    counts = numbers(str(row.measured))
    return counts[0] == (counts[1] if how == "all" else 0)


def falls(*rows: Row) -> bool:
    """Each interval lies below the one before."""
    return all(above(a, b) for a, b in pairwise(rows))


def rises(*rows: Row) -> bool:
    """Each interval lies above the one before."""
    return all(below(a, b) for a, b in pairwise(rows))


def numbers(words: str) -> list[float]:
    """Return the numbers in a text, in order."""
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", words.replace(",", ""))]
