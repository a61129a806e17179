"""What papers say of measured rows, and the one function that decides whether it is so."""

import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal

from mechicl.reports.rows import Row

SLACK = 0.05
"""How far apart two numbers may be that agree, and how far from 0 or 1 what a paper calls near it."""
Verdict = Literal["agrees", "agrees in part", "differs", "not printed", "open"]


@dataclass(frozen=True, eq=False)
class Claim:
    """What a figure, table or theorem of a paper says, and the rows it is checked on: an entry of analyses/README.md.

    Attributes:
        source: the paper's key in sources.bib.
        item: figure, table or theorem.
        what: what it shows, values in the order of the rows.
        lines: measured rows; by label where there are several lines of them. Empty where nothing measures it.
        check: when the paper is right, for `outcomes`; empty where its numbers are in the rows, or there are none.
        published: the paper's words; empty where they are in the rows.
        why: what a reader of the verdict should know.
    """

    source: str
    item: str
    what: str
    lines: Mapping[str, Sequence[Row]]
    check: str = ""
    published: str = ""
    why: str = ""

    @property
    def rows(self) -> list[Row]:
        """The rows of all lines."""
        return [row for rows in self.lines.values() for row in rows]

    def outcomes(self) -> list[bool]:
        """What the paper says, value by value: see `outcomes`."""
        return outcomes(self) if self.lines else []

    @property
    def verdict(self) -> Verdict:
        """What the outcomes come to. Open: nothing measures yet what the paper says."""
        if not self.lines:
            return "open" if self.published else "not printed"
        results = self.outcomes()
        if not results:
            return "not printed"
        return "agrees" if all(results) else "agrees in part" if any(results) else "differs"

    def to_json(self) -> dict[str, Any]:
        """The claim as data."""
        lines = {label: [row.to_json() for row in rows] for label, rows in self.lines.items()}
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"lines": lines}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Claim":
        """A claim of a results file."""
        lines = {label: [Row.from_json(row) for row in rows] for label, rows in saved["lines"].items()}
        return cls(**{**saved, "lines": lines})


def verdict_of(row: Row) -> Verdict:
    """Whether what a paper says of one row holds, by the row's own check: see `outcomes`.

    Example:
        >>> verdict_of(Row("loss over gradient descent's", "1 (Fig. 2)", 1.02, check="= 1"))
        'agrees'
    """
    if row.published is None:
        return "not printed"
    return Claim(row.source, "", row.quantity, {"": [row]}, row.check).verdict


def outcomes(claim: Claim) -> list[bool]:
    """Whether what a paper says holds of what was measured: a result for each value, or one for all together.

    Without a check, published numbers decide by the rule of "=" below. A check is one or more of these, joined by
    "and", where `a, b, ...` are the claim's rows, `A, B, ...` its labelled lines (compared value by value), and a
    condition that names neither is put to every row:

        < 1    0.5 < a < 0.95    A > B      of whole intervals; also <= and >=
        = 3                                 within 5%, or inside the interval, and this no wider than half the number
        near 0    not near 1                within 0.05, with an interval no wider
        covers 0                            the interval does
        within 5% of 21    A within 10% of B (of "printed": of the row's published number), by the means
        falls    rises                      each row's interval lies below, above the one before
        is linear                           what was measured in words
        all    none                         of words such as "5 of 5 seeds"

    Raises:
        ValueError: a condition that is none of these.
        TypeError: a number is needed, and words were measured.
    """
    rows = claim.rows
    if not claim.check:
        printed = [row for row in rows if isinstance(row.published, int | float) and not isinstance(row.measured, str)]
        return [_equal(row, float(row.published or 0)) for row in printed]
    names: dict[str, Sequence[Row]] = {chr(ord("a") + i): [row] for i, row in enumerate(rows)}
    names |= {chr(ord("A") + i): line for i, line in enumerate(claim.lines.values())}
    conditions = [_condition(text, rows, names) for text in claim.check.split(" and ")]
    n = max(map(len, conditions))
    return [all(results[i if len(results) > 1 else 0] for results in conditions) for i in range(n)]


_RELATIONS: dict[str, Callable[[Row, Row], bool]] = {
    "<": lambda a, b: a.ends[2] < b.ends[0],
    ">": lambda a, b: a.ends[0] > b.ends[2],
    "<=": lambda a, b: a.ends[2] <= b.ends[0],
    ">=": lambda a, b: a.ends[0] >= b.ends[2],
    "=": lambda a, b: _equal(a, b.ends[1]),
}


def _condition(text: str, every: Sequence[Row], names: Mapping[str, Sequence[Row]]) -> list[bool]:
    """The results of one condition."""
    first, _, rest = text.partition(" ")
    subject, predicate = (names[first], rest) if first in names else (every, text)
    words = predicate.split()
    match words:
        case ["near", value]:
            return [_near(row, float(value)) for row in subject]
        case ["not", "near", value]:
            return [not _near(row, float(value)) for row in subject]
        case ["covers", value]:
            return [row.ends[0] <= float(value) <= row.ends[2] for row in subject]
        case ["is", *rest_of_it]:
            return [row.measured == " ".join(rest_of_it) for row in subject]
        case ["all" | "none" as how]:
            counts = [numbers(str(row.measured)) for row in subject]
            return [count[0] == (count[1] if how == "all" else 0) for count in counts]
        case ["falls" | "rises" as how]:
            return [all(_RELATIONS[">" if how == "falls" else "<"](a, b) for a, b in pairwise(subject))]
        case ["within", share, "of", other]:
            return [_within(row, share, other, names, i) for i, row in enumerate(subject)]
        case [relation, *_] if relation in _RELATIONS:
            return _chain([subject, *_operands(words[1::2], names)], words[::2])
        case _ if words[1::2] and set(text.split()[1::2]) <= set(_RELATIONS):
            return _chain(_operands(text.split()[::2], names), text.split()[1::2])
    raise ValueError(f"a claim cannot be checked by {text!r}: see mechicl.reports.claims.outcomes for what it may be")


def _operands(words: Sequence[str], names: Mapping[str, Sequence[Row]]) -> list[Sequence[Row]]:
    """Rows that words name; a number is a row that is exactly that."""
    return [names[word] if word in names else [Row(word, None, float(word))] for word in words]


def _chain(operands: Sequence[Sequence[Row]], relations: Sequence[str]) -> list[bool]:
    """`a < b < c`, value by value; an operand of one value is held against every other."""
    n = max(map(len, operands))
    filled = [list(rows) * (n if len(rows) == 1 else 1) for rows in operands]
    return [
        all(_RELATIONS[relation](a[i], b[i]) for relation, (a, b) in zip(relations, pairwise(filled), strict=True))
        for i in range(n)
    ]


def _within(row: Row, share: str, other: str, names: Mapping[str, Sequence[Row]], i: int) -> bool:
    if other == "printed":
        reference = float(row.published or math.nan)
    else:
        (values,) = _operands([other], names)
        reference = values[i if len(values) > 1 else 0].ends[1]
    return abs(row.ends[1] / reference - 1) <= float(share.removesuffix("%")) / 100


def _near(row: Row, value: float) -> bool:
    low, mean, high = row.ends
    return abs(mean - value) <= SLACK and high - low <= 2 * SLACK


def _equal(row: Row, value: float) -> bool:
    """Within 5%, or in the interval; one wider than half the number tells nothing."""
    low, mean, high = row.ends
    return high - low <= abs(value) / 2 and (low <= value <= high or abs(mean - value) <= SLACK * abs(value))


def numbers(words: str) -> list[float]:
    """The numbers in words, in order."""
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", words.replace(",", ""))]


class Claims:
    """What one paper says, stated on the rows of a comparison.

    Attributes:
        source: the paper's key in sources.bib.
        table: the comparison's rows.
        stated: the claims so far.
    """

    def __init__(self, source: str, table: Sequence[Row]):
        self.source, self.table = source, table
        self.stated: list[Claim] = []

    def __getitem__(self, quantity: str) -> Row:
        """The row of a quantity.

        Raises:
            ValueError: there is none.
        """
        return self.pick(quantity)[0]

    def pick(self, *quantities: str | Row) -> list[Row]:
        """Rows by quantity or shell pattern, in this order; rows that are not in the table as they are.

        Raises:
            ValueError: there is no such row.
        """
        picked: list[Row] = []
        for quantity in quantities:
            if isinstance(quantity, Row):
                picked.append(quantity)
                continue
            same = [row for row in self.table if row.quantity == quantity]
            same = same or [row for row in self.table if fnmatch.fnmatchcase(row.quantity, quantity)]
            if not same:
                raise ValueError(f"a claim needs a row {quantity!r}, which the comparison does not have")
            picked += same
        return picked

    def add(
        self,
        item: str,
        what: str,
        *quantities: str | Row,
        lines: Mapping[str, Sequence[str | Row]] | None = None,
        check: str = "",
        published: str = "",
        why: str = "",
    ) -> None:
        """State a claim; arguments as `Claim` has them, with quantities in place of rows."""
        rows = {"": quantities} if quantities else lines or {}
        picked = {label: self.pick(*names) for label, names in rows.items()}
        claim = Claim(self.source, item, what, picked, check, published, why)
        outcomes(claim)  # a check that cannot be read is a mistake of whoever stated it
        self.stated.append(claim)
