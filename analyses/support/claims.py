"""Claims of papers about measured rows, and the verdicts on them: the entries of the index of published results."""

import fnmatch
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from analyses.support.checks import named_check
from mechicl.reports import Row
from mechicl.reports.rows import NoNumberError, equal
from mechicl.statistics import Interval

SCRIPTS = Path(__file__).parents[1]
CAUSES = ("erratum", "size", "setting", "measure", "unresolved")
"""Why a claim may differ: the paper errs; the model is smaller or trained on less; another setting than the paper's;
another measure of the same thing. "unresolved" if no experiment supports any of these."""
UNTRAINED = "untrained"
"""Label of the control that `Script.run` measures itself: the same rows of models with new initial weights."""
Lines = Mapping[str, Sequence[Row]]
"""Rows by label; one label, the empty one, where there is a single line of them."""
Verdict = Literal["agrees", "agrees in part", "differs", "not printed", "open"]
Standing = Literal["agrees", "agrees in part", "differs", "unresolved", "no evidence", "not printed", "open"]


@dataclass(frozen=True, eq=False)
class Claim:
    """A claim of a paper's figure, table or theorem, and the rows it is checked on: an entry of analyses/README.md."""

    source: str  # the paper's key in sources.bib
    item: str  # figure, table or theorem
    what: str  # what it shows, values in the order of the rows
    lines: Lines  # measured rows. Empty if no script measures it
    # whether the paper is right, value by value or for all together; None if words were measured for a number
    outcomes: Sequence[bool] | None = ()
    check: str = ""  # a name of `support.checks`; empty if numbers printed in the rows decide
    published: str = ""  # the paper's words; empty if they are in the rows
    why: str = ""  # what a reader of the verdict should know
    # rows to compare the claim with, by label: the same quantities, or others, of a control
    controls: Lines = field(default_factory=dict)
    cause: str = ""  # why it differs, in a word or two: one of `CAUSES` first
    trained: bool = True  # whether it is about trained models; otherwise untrained models are not a control
    untrained_verdict: str = ""  # that the claim would get with the rows of untrained models

    @property
    def key(self) -> tuple[str, str, str]:
        """The paper, item and words that identify the claim."""
        return self.source, self.item, self.what

    @property
    def rows(self) -> list[Row]:
        return _all_rows(self.lines)

    @property
    def verdict(self) -> Verdict:
        """The overall verdict; "open" if no script measures the claim yet."""
        if not self.lines:
            return "open" if self.published else "not printed"
        return _verdict(self.outcomes)

    @property
    def standing(self) -> Standing:
        """The verdict in the index: "no evidence" if untrained models agree too, "unresolved" for an unknown cause.

        An entry that is true of untrained models is not evidence about training, so it does not count as agreeing. One
        that differs, or agrees in part, without an experiment on the cause does not count as differing.
        """
        unknown = self.cause.startswith("unresolved") and self.verdict in ("differs", "agrees in part")
        if unknown or (self.verdict == "differs" and not self.cause):
            return "unresolved"
        alike = self.trained and self.untrained_verdict == "agrees" == self.verdict
        return "no evidence" if alike else self.verdict

    @property
    def n_seeds(self) -> int | None:
        """The fewest seeds that a value is over; None if no value is over seeds."""
        return min(filter(None, map(seeds_of, self.rows)), default=None)

    @property
    def lacks(self) -> str:
        """The missing parts of the entry, as text; empty if it is complete.

        A claim that differs needs a cause and, besides untrained models, a control that supports it if it is known; a
        claim about trained models needs untrained ones as a control.
        """
        if self.verdict == "open":
            return "nothing measures it"
        lacking = []
        if self.verdict == "differs":
            lacking += [] if self.cause else ["a cause"]
            supported = set(self.controls) - {UNTRAINED} or self.cause.startswith("unresolved")
            lacking += [] if supported else ["a control that supports the cause"]
        if self.trained and self.lines and UNTRAINED not in self.controls:
            lacking.append("the untrained control")
        return ", ".join(lacking)


def _all_rows(lines: Lines) -> list[Row]:
    return [row for rows in lines.values() for row in rows]


def judge(lines: Lines, check: str = "") -> list[bool] | None:
    """Whether the paper is right, by a check or by the numbers printed in the rows; None if words were measured."""
    if not check:
        return [
            equal(row, row.published) for row in _all_rows(lines)
            if isinstance(row.published, int | float) and not isinstance(row.measured, str)
        ]  # fmt: skip
    try:
        return named_check(check)(list(lines.values())) if lines else []
    except NoNumberError:  # an untrained model may have words there
        return None


def _verdict(outcomes: Sequence[bool] | None) -> Verdict:
    if outcomes is None:
        return "differs"
    if not outcomes:
        return "not printed"
    return "agrees" if all(outcomes) else "agrees in part" if any(outcomes) else "differs"


def seeds_of(row: Row) -> int | None:
    """Number of seeds; None if the row is not over seeds."""
    if not re.search(r"\bseeds?\b", row.over):
        return None
    count = re.search(r"(\d+) (?:\w+ )?seeds?\b", row.over)
    if count or not isinstance(row.measured, Interval):
        return int(count[1]) if count else None
    return row.measured.n


def row_from_json(saved: Mapping[str, Any]) -> Row:
    """A row of a results file, in which numbers that are not finite are null; unknown fields are ignored.

    Raises:
        ValueError: it is not one.
    """
    try:
        measured = saved["measured"]
        if isinstance(measured, dict):
            ends = [math.nan if measured[name] is None else measured[name] for name in ("mean", "low", "high")]
            middle = measured.get("middle", "mean")
            measured = Interval(*ends, n=measured["n"], level=measured["level"], middle=middle)
        known = {field.name: saved[field.name] for field in fields(Row) if field.name in saved}
        agrees = {"agrees": True, "differs": False}.get(saved.get("verdict", ""))
        return Row(**{**known, "measured": math.nan if measured is None else measured, "agrees": agrees})
    except (KeyError, TypeError) as error:
        raise ValueError(f"saved is not a row of a results file: {error!r}") from error


@dataclass(frozen=True)
class Paper:
    """A paper's table of claims, `analyses/SOURCE/claims.toml`.

    A `[[claim]]` there has the attributes of `Claim`, with these differences: `results` is the shell pattern of the
    results files with its rows; `rows`, `lines` and `controls` name rows by quantity or shell pattern; `check` is a
    name of `support.checks`; `printed` are published values that replace those of the rows, in order; in `why` and
    `cause`, {quantity} is a row's value, {quantity : note} its note and {quantity : first note} that up to a semicolon;
    an `optional` claim is left out where a row is missing.
    """

    source: str  # the paper's key in sources.bib
    lead: str  # what to know before reading the numbers
    entries: Sequence[Mapping[str, Any]]  # the claims, as data


@cache
def read_papers() -> Sequence[Paper]:
    """All papers' tables, in the order of the index."""
    paths = SCRIPTS.glob("*/claims.toml")
    tables = {path.parent.name: tomllib.loads(path.read_text(encoding="utf-8")) for path in paths}
    in_order = sorted(tables.items(), key=lambda item: item[1]["order"])
    return [Paper(source, table["lead"], table["claim"]) for source, table in in_order]


def state_claims(name: str, table: Sequence[Row], untrained: Sequence[Row] = ()) -> list[Claim]:
    """State the claims of all papers on the rows of a results file, and on those of untrained models if there are any.

    Args:
        name: of the results file, without suffix.
        table: its rows, and those that its script derives from its data.
        untrained: the same of untrained models.
    """
    return [
        state_claim(paper.source, entry, table, untrained) for paper, entry in entries_on(name)
        if not _is_left_out(entry, table)
    ]  # fmt: skip


def entries_on(name: str) -> list[tuple[Paper, Mapping[str, Any]]]:
    """The entries of papers' tables that are about a results file."""
    return [(paper, entry) for paper in read_papers() for entry in paper.entries
            if fnmatch.fnmatchcase(name, entry["results"])]  # fmt: skip


def state_claim(source: str, entry: Mapping[str, Any], table: Sequence[Row], untrained: Sequence[Row] = ()) -> Claim:
    """State an entry of a paper's table on rows.

    Raises:
        ValueError: a row that the table does not have, or a cause of which none of `CAUSES` is the first word.
        NoNumberError: a check needs a number, and words were measured.
    """
    item, cause = entry["item"], entry.get("cause", "")
    if cause and cause.replace(",", " ").replace(":", " ").split()[0] not in CAUSES:
        raise ValueError(f"{item}: the cause {cause!r} does not begin with one of {', '.join(CAUSES)}")
    words = {
        name: re.sub(r"{(.+?)(?: : (note|first note))?}", lambda found: _words(table, *found.groups()), entry[name])
        for name in ("why", "cause") if name in entry
    }  # fmt: skip
    known: dict[str, Any] = {each.name: entry[each.name] for each in fields(Claim) if each.name in entry} | words
    known["lines"] = lines = _lines(entry, table)
    known["controls"] = {label: pick(table, *quantities) for label, quantities in entry.get("controls", {}).items()}
    claim = Claim(source, **known, outcomes=judge(lines, entry.get("check", "")))
    if claim.outcomes is None:
        measured = ", ".join(map(str, claim.rows))
        raise NoNumberError(f"{item}: a check needs a number, and words were measured: {measured}")
    if not (claim.trained and lines and (untrained or UNTRAINED in claim.controls)):
        return claim
    if UNTRAINED not in claim.controls:
        without = _lines(entry, untrained, may_lack=True)
    elif len(claim.controls[UNTRAINED]) == len(claim.rows):  # the script itself has measured it
        rows = iter(claim.controls[UNTRAINED])
        without = {label: [next(rows) for _ in line] for label, line in lines.items()}
    else:
        return claim
    controls = {**claim.controls, UNTRAINED: _all_rows(without)}
    return replace(claim, controls=controls, untrained_verdict=_verdict(judge(without, claim.check)))


def _lines(entry: Mapping[str, Any], table: Sequence[Row], *, may_lack: bool = False) -> Lines:
    """The rows that an entry is about, with the numbers that it prints."""
    named = {"": entry["rows"]} if "rows" in entry else entry.get("lines", {})
    lines = {label: pick(table, *quantities, may_lack=may_lack) for label, quantities in named.items()}
    if "printed" not in entry:
        return lines
    pairs = zip(_all_rows(lines), entry["printed"], strict=True)
    rows = iter([replace(row, published=printed) for row, printed in pairs])
    return {label: [next(rows) for _ in line] for label, line in lines.items()}


def pick(table: Sequence[Row], *quantities: str, may_lack: bool = False) -> list[Row]:
    """Rows by quantity or shell pattern, in this order.

    Args:
        may_lack: for a row that is missing, return one of the words "not measured": a part that only a trained model
            has.

    Raises:
        ValueError: there is no such row.
    """
    picked: list[Row] = []
    for quantity in quantities:
        same = [row for row in table if row.quantity == quantity]
        same = same or [row for row in table if fnmatch.fnmatchcase(row.quantity, quantity)]
        if not same and may_lack:
            same = [Row(quantity, None, "not measured")]
        if not same:
            raise ValueError(f"a claim needs a row {quantity!r}, which the comparison does not have")
        picked += same
    return picked


def _words(table: Sequence[Row], quantity: str, note: str | None) -> str:
    shown = {None: str, "note": lambda row: row.note, "first note": lambda row: row.note.partition(";")[0]}[note]
    return ", ".join(map(shown, pick(table, quantity)))


def _is_left_out(entry: Mapping[str, Any], table: Sequence[Row]) -> bool:
    """Whether an optional claim lacks a row."""
    if not entry.get("optional"):
        return False
    try:
        return not (entry.get("rows") and pick(table, *entry["rows"]))
    except ValueError:
        return True
