"""Predicates that decide whether measured rows agree with a paper's claim, and the checks made from them, by name.

A check is a function of a claim's lines of rows that returns one boolean for each value, or one for all of them.
Papers' tables (`analyses/*/claims.toml`) name it: "near 1" for a predicate that every row must satisfy, or a key of
`CHECKS` for one that compares rows. Checks are made from predicates by `every`, `by_value` and `together`:

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


def narrow(row: Row, number: float) -> bool:
    """The interval is at most half of a number wide: a wider one agrees with nothing."""
    return ends(row)[2] - ends(row)[0] <= abs(number) / 2


def covers(row: Row, value: float) -> bool:
    return ends(row)[0] <= value <= ends(row)[2] and narrow(row, value)


def within(row: Row, share: float, other: Row | float | str | None) -> bool:
    """The mean differs from another by no more than a share of it, and the interval is narrow."""
    reference = float("nan") if other is None else float(other) if isinstance(other, str) else ends(other)[1]
    return abs(ends(row)[1] / reference - 1) <= share and narrow(row, reference)


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


# ---- checks by name ----


EVERY = {
    "near": near, "far": far, "equal": equal, "above": above, "below": below, "at most": at_most,
    "at least": at_least, "between": between, "covers": covers, "within": within, "reads": reads,
    "counts": count_is,
}  # fmt: skip
"""Predicates of every row; "near 1", "within 0.05 1" or "counts all" name a check."""
CHECKS = {
    "first line above second": by_value(above),
    "first line below second": by_value(below),
    "second line above first": by_value(lambda a, b: above(b, a)),
    "first line below 0": by_value(lambda first, *_: below(first, 0)),
    "first line above 0": by_value(lambda first, *_: above(first, 0)),
    "all lines above 0": by_value(lambda *rows: all(above(row, 0) for row in rows)),
    "first line within 1% of second": by_value(lambda a, b: within(a, 0.01, b)),
    "first line within 5% of second": by_value(lambda a, b: within(a, 0.05, b)),
    "first line above second by at most half": by_value(lambda a, b: above(a, b) and within(a, 0.5, b)),
    "first line above 0 and below second": by_value(lambda a, b: above(a, 0) and below(a, b)),
    "first line below 1, second below 1.5": by_value(lambda a, b: below(a, 1) and below(b, 1.5)),
    "first line below 1.05, second within half of 1": by_value(lambda a, b: below(a, 1.05) and within(b, 0.5, 1)),
    "first two lines below third": by_value(lambda a, b, c: below(a, c) and below(b, c)),
    "first line between third and second": by_value(lambda a, b, c: below(c, a) and below(a, b)),
    "second line below 0.9 of first": by_value(lambda a, b: below(b, 0.9 * ends(a)[1])),
    "within 10% of its printed value": every(lambda row: within(row, 0.1, row.published)),
    "error above 1e-3": every(lambda row: numbers(str(row.measured))[0] > 1e-3),
    "errors at most 1e-12": together(lambda *rows: all(numbers(str(row.measured))[0] <= 1e-12 for row in rows)),
    "falls": together(falls),
    "rises": together(rises),
    "all between 0.5 and 1": together(lambda *rows: all(between(row, 0.5, 1) for row in rows)),
    "first above twice the second": together(lambda a, b: above(a, 2 * ends(b)[2])),
    "first above the others": together(lambda first, *others: all(above(first, other) for other in others)),
    "first below second, second near 1": together(lambda a, b: below(a, b) and near(b, 1)),
    "first equals 0.988, second at least 256": together(lambda a, b: equal(a, 0.988) and at_least(b, 256)),
    "first below 0.95, second below 0.5": together(lambda a, b: below(a, 0.95) and below(b, 0.5)),
    "first covers 1, second above 2": together(lambda a, b: covers(a, 1) and above(b, 2)),
    "none counted, second below 1.5": together(lambda a, b: count_is(a, "none") and below(b, 1.5)),
    "all counted, second below third": together(lambda a, b, c: count_is(a, "all") and below(b, c)),
    "one step, not two": together(lambda a, one, two: equal(a, 1) and above(a, ends(two)[1] / ends(one)[1])),
    "first learner early, second late": together(
        lambda a, b, c, d: above(a, b) and above(d, c) and near(a, 1) and near(d, 1)
    ),
    "falls at 0.75, diverges undamped": together(
        lambda a, b, c, d, e, f: below(b, 1) and below(e, 1) and reads(c, "diverges") and reads(f, "diverges")
    ),
}
"""Checks that compare rows, by name."""


def named_check(name: str) -> Check:
    """Return the check of this name; " and " joins two, both of which must hold.

    Raises:
        ValueError: there is none.
    """
    if name in CHECKS:
        return CHECKS[name]
    if " and " in name:
        return both(*map(named_check, name.split(" and ")))
    for words, predicate in EVERY.items():
        if name.startswith(f"{words} "):
            return every(predicate, *map(_value, name.removeprefix(words).split()))
    raise ValueError(f"no check is named {name!r}: the names are those of EVERY and CHECKS in support/checks.py")


def _value(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word
