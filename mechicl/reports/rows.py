"""A measured quantity beside what was published of it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mechicl.statistics import Interval

ROUNDING = 1e-6
"""Numbers whose whole interval is this near to a whole number (for 0: a thousandth of it) differ from it by rounding
errors of float32 sums, which are no finding."""


@dataclass(frozen=True)
class Row:
    """A line of the table "published / measured / interval".

    Attributes:
        quantity: what it is.
        published: as printed in the paper; None where the paper prints no number.
        measured: with its interval; a plain number where there is nothing to take an interval over, or words.
        over: what the interval is over: "seeds" or "prompts".
        note: how to read it.
        check: when the paper is right, for `claims.outcomes`; empty where `published` is a number.
        source: the key in sources.bib of the paper that published it.
        section: title of the section that shows it.
    """

    quantity: str
    published: float | str | None
    measured: Interval | float | str
    over: str = ""
    note: str = ""
    check: str = ""
    source: str = ""
    section: str = ""

    def cells(self) -> tuple[str, str, str, str, str]:
        """The line as words."""
        published = "—" if self.published is None else str(self.published)
        samples = self.over
        if isinstance(self.measured, Interval):
            samples = f"{100 * self.measured.level:g}%, {self.measured.n} {self.over}"
        return self.quantity, published, str(self), samples, self.note

    def __str__(self) -> str:
        """The measured value alone."""
        return self.measured if isinstance(self.measured, str) else in_words(self.measured)

    @property
    def ends(self) -> tuple[float, float, float]:
        """Lower end, mean and upper end of the interval; three times the number where there is none.

        Raises:
            TypeError: it was measured in words.
        """
        if isinstance(self.measured, str):
            raise TypeError(f"{self.quantity!r} needs a number to be checked, and {self.measured!r} was measured")
        if isinstance(self.measured, Interval):
            return self.measured.low, self.measured.mean, self.measured.high
        return self.measured, self.measured, self.measured

    def to_json(self) -> dict[str, Any]:
        """The row as data; what only pages need is left out where there is none."""
        saved = asdict(self)
        return {name: value for name, value in saved.items() if value or name not in ("check", "source", "section")}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Row":
        """A row of a results file, in which numbers that are not finite are null; what is no field is left out."""
        measured = saved["measured"]
        if isinstance(measured, dict):
            ends = [math.nan if measured[name] is None else measured[name] for name in ("mean", "low", "high")]
            measured = Interval(*ends, n=measured["n"], level=measured["level"])
        known = {field.name: saved[field.name] for field in fields(cls) if field.name in saved}
        return cls(**{**known, "measured": math.nan if measured is None else measured})


def in_words(value: Interval | float) -> str:
    """A number or an interval, to as many digits as it is known; one that is whole but for rounding says so.

    Example:
        >>> in_words(Interval(1.000000012, 1.00000001, 1.000000014, n=5))
        '1 (to rounding)'
    """
    if not isinstance(value, Interval):
        return f"{value:.4g}"
    if not (math.isfinite(value.low) and math.isfinite(value.high)):
        return f"{value.mean:.4g}"  # of one sample
    whole = round(value.mean)
    if max(value.high - whole, whole - value.low) < (ROUNDING if whole else ROUNDING / 1000):
        return f"{whole} (to rounding)" if value.half_width else f"{whole}"
    if value.half_width < ROUNDING * abs(value.mean):
        return f"{value.mean:.6g}"
    return str(value)
