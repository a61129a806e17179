"""What a line of the index is, and the predicates that decide whether words agree with a measurement."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mechicl.statistics import Interval

CONSTRUCTIONS = "constructions"
"""In place of a results file's name: what `mechicl.constructions.certificates` finds while the index is made."""


@dataclass(frozen=True)
class Measured:
    """What a results file says was measured, an interval, a number or words.

    Attributes:
        value: as it is.
        over: what an interval is over.
    """

    value: Interval | float | str
    over: str = ""

    @property
    def mean(self) -> float:
        """The number, or the middle of the interval.

        Raises:
            TypeError: it was measured in words.
        """
        if isinstance(self.value, str):
            raise TypeError(f"a number is needed, and {self.value!r} was measured")
        return self.value.mean if isinstance(self.value, Interval) else self.value

    @property
    def low(self) -> float:
        """Lower end of the interval, or the number."""
        return self.value.low if isinstance(self.value, Interval) else self.mean

    @property
    def high(self) -> float:
        """Upper end of the interval, or the number."""
        return self.value.high if isinstance(self.value, Interval) else self.mean

    @property
    def words(self) -> str:
        """Words; empty where a number was measured."""
        return self.value if isinstance(self.value, str) else ""

    @property
    def numbers(self) -> list[float]:
        """The numbers in its words, in order."""
        return [float(found) for found in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", self.words.replace(",", ""))]


@dataclass(frozen=True)
class Row:
    """A row of a results file; `bound` says that the measurement is an upper bound."""

    quantity: str
    published: float | str | None
    measured: Measured
    note: str = ""
    bound: bool = False


@dataclass(frozen=True)
class Pattern:
    """All rows whose quantity matches a shell pattern: at least one, at most `limit`."""

    text: str
    limit: int


@dataclass(frozen=True)
class Derived:
    """A row made of other data in the results file, because no row of its table has it.

    Attributes:
        quantity: what it is.
        value: from the whole file's data; raises KeyError where they are missing.
        over: what an interval is over.
    """

    quantity: str
    value: Callable[[dict[str, Any]], Interval | float | str]
    over: str = ""


@dataclass(frozen=True)
class Source:
    """Rows of one results file, by quantity, in order.

    Attributes:
        results: the file's name, without its ending; or `CONSTRUCTIONS`.
        quantities: exact ones, patterns, and derived ones.
    """

    results: str
    quantities: tuple[str | Pattern | Derived, ...]


Sources = tuple[Source, ...]


def rows(results: str, *quantities: str | Pattern | Derived) -> Sources:
    """Rows of one results file; add two of these for rows of two files."""
    return (Source(results, quantities),)


@dataclass(frozen=True)
class Entry:
    """A line of the index: one thing that a figure or table shows.

    Numbers agree if the published one is within the measured interval or within 5%. Words need `holds` or `compare`.

    Attributes:
        item: figure, table, or theorem.
        what: what it shows.
        sources: the rows that measure it; none if there is no script yet.
        claim: the paper's words, where the rows have none or those of another figure. Never a number to compare with.
        holds: says of each row without a published number whether its measurement agrees with the words.
        compare: says so of all rows together, or of each beside the others; then no other rule counts.
        labels: names of equally many rows each, to tell them apart in a cell.
        agrees: why, if all agree. Like the next two it may cite `{name}` from `cites`.
        in_part: why some agree and others do not; `differs` where empty.
        differs: why none does.
        cites: by name, rows whose measured values a sentence quotes.
        notes: whether the rows' notes follow.
        published: for an entry without a script, what will be compared.
        remark: for an entry without sources, why there is nothing to show.
        measurable: False for an illustration.
    """

    item: str
    what: str
    sources: Sources = ()
    claim: str = ""
    holds: Callable[[Measured], bool] | None = None
    compare: Callable[[Sequence[Row]], bool | Sequence[bool]] | None = None
    labels: tuple[str, ...] = ()
    agrees: str = ""
    in_part: str = ""
    differs: str = ""
    cites: Mapping[str, Sources] = field(default_factory=dict)
    notes: bool = False
    published: str = ""
    remark: str = ""
    measurable: bool = True


@dataclass(frozen=True)
class Paper:
    """The section of one paper.

    Attributes:
        title: author, title, year.
        lead: what to know before reading the numbers.
        entries: in the paper's order.
    """

    title: str
    lead: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Made:
    """How a results file is made.

    Attributes:
        command: one line.
        needs: checkpoints, or words for them.
    """

    command: str
    needs: tuple[str, ...] | str


# ---- predicates; the index's introduction says what they mean ----


SLACK = 0.05
"""How far apart two numbers may be that agree, and how far from 0 or 1 what a paper calls near it."""


def near(value: float) -> Callable[[Measured], bool]:
    """A mean within 0.05 of a value, known that well: ends of its interval no farther from it than that."""
    return lambda m: abs(m.mean - value) <= SLACK and m.high - m.low <= 2 * SLACK


near_0, near_1 = near(0), near(1)


def agrees_with(published: float, m: Measured) -> bool:
    """The rule for numbers: within 5%, or in the measured interval; one wider than half the published number tells
    nothing."""
    known = m.high - m.low <= abs(published) / 2
    return known and (m.low <= published <= m.high or abs(m.mean - published) <= SLACK * abs(published))


def equals(value: float) -> Callable[[Measured], bool]:
    """A number that is published among words, by the rule for numbers."""
    return lambda m: agrees_with(value, m)


def above(value: float) -> Callable[[Measured], bool]:
    """The whole interval is above a value."""
    return lambda m: m.low > value


def below(value: float) -> Callable[[Measured], bool]:
    """The whole interval is below a value."""
    return lambda m: m.high < value


def at_most(value: float) -> Callable[[Measured], bool]:
    """A number is at most a value."""
    return lambda m: m.mean <= value


def says(word: str) -> Callable[[Measured], bool]:
    """Words were measured, and these."""
    return lambda m: m.words == word


def all_of_them(m: Measured) -> bool:
    """Words such as "5 of 5 seeds"."""
    return m.numbers[0] == m.numbers[1]


def first_is_largest(rows: Sequence[Row]) -> bool:
    """The first row's interval is above those of all others."""
    return all(rows[0].measured.low > row.measured.high for row in rows[1:])


def falls(rows: Sequence[Row]) -> bool:
    """Each row's mean is below the one before."""
    means = [row.measured.mean for row in rows]
    return all(later < earlier for earlier, later in itertools.pairwise(means))
