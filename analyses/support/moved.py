"""Whether a number that is measured again is the one that is written."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from analyses.support.claims import Claim
from mechicl.reports.rows import ROW_ROUNDING, Row
from mechicl.statistics import Interval

DETERMINISTIC = 1e-6
"""How far apart two measurements of a number without an interval may be, relative to the larger."""


@dataclass(frozen=True)
class Moved:
    """A value that is another one than is written."""

    entry: str  # the index's entry, or "table" for a row of the script's table
    quantity: str  # of the row
    written: str  # as in the results file
    measured: str  # now
    apart: str  # how far: in half-widths of the interval, or relative


def apart(written: Row, measured: Row) -> str:
    """Describe how far a row moved; empty if it did not.

    A sampled quantity may move within the interval that is written with it; a number without one, or whose interval is
    rounding, by a millionth of itself; words not at all. Numbers at the level of rounding are the same.

    Example:
        >>> apart(Row("loss", None, Interval(1.0, 0.9, 1.1, 10)), Row("loss", None, Interval(1.2, 1.1, 1.3, 10)))
        '2.0 half-widths'
    """
    before, now = written.measured, measured.measured
    if isinstance(before, str) or isinstance(now, str):
        return "" if before == now else "words"
    if isinstance(before, Interval) != isinstance(now, Interval):
        return "an interval" if isinstance(now, Interval) else "no interval"
    a, b = written.ends[1], measured.ends[1]
    if a == b or (math.isnan(a) and math.isnan(b)):
        return ""
    if not (math.isfinite(a) and math.isfinite(b)):
        return "not finite"
    if max(abs(a), abs(b)) < ROW_ROUNDING / 1000:
        return ""
    relative = abs(a - b) / max(abs(a), abs(b))
    if relative <= DETERMINISTIC:
        return ""
    half = before.half_width if isinstance(before, Interval) else 0.0
    if isinstance(before, Interval) and math.isfinite(half) and half > DETERMINISTIC * abs(a):
        return "" if before.low <= b <= before.high else f"{abs(a - b) / half:.1f} half-widths"
    return f"{relative:.1e}"


def moved_rows(written: Sequence[Row], measured: Sequence[Row], entry: str) -> list[Moved]:
    """The rows that moved, are gone or are new; of several with one name, in their order."""
    now: dict[str, list[Row]] = defaultdict(list)
    for row in measured:
        now[row.quantity].append(row)
    moved = []
    for row in written:
        if not now[row.quantity]:
            moved.append(Moved(entry, row.quantity, str(row), "nothing", "gone"))
            continue
        other = now[row.quantity].pop(0)
        if words := apart(row, other):
            moved.append(Moved(entry, row.quantity, str(row), str(other), words))
    new = [row for rows in now.values() for row in rows]
    return moved + [Moved(entry, row.quantity, "nothing", str(row), "new") for row in new]


def moved_claims(written: Sequence[Claim], measured: Sequence[Claim]) -> list[Moved]:
    """List changes of entries of the index."""
    now = {claim.key: claim for claim in measured}
    return [moved for claim in written for moved in _moved_values(claim, now.get(claim.key))]


def _moved_values(claim: Claim, now: Claim | None) -> list[Moved]:
    entry = f"{claim.source}, {claim.item}, {claim.what}"
    if now is None:
        return [Moved(entry, "the entry", claim.verdict, "nothing", "gone")]
    if len(now.rows) != len(claim.rows):
        return [Moved(entry, "values", str(len(claim.rows)), str(len(now.rows)), "other rows")]
    changes = [Moved(entry, row.quantity, str(row), str(other), words)
               for row, other in zip(claim.rows, now.rows, strict=True) if (words := apart(row, other))]  # fmt: skip
    if now.verdict != claim.verdict and not changes:
        changes.append(Moved(entry, "verdict", claim.verdict, now.verdict, "within the intervals"))
    return changes
