"""Claims of papers about measured rows, and the verdicts on them: the entries of the index of published results."""

import fnmatch
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from analyses.support.checks import Check, named_check
from mechicl.checkpoints import are_weights_random
from mechicl.reports import Row
from mechicl.reports.rows import NoNumberError, equal
from mechicl.statistics import Interval

SCRIPTS = Path(__file__).parents[1]
CAUSES = ("erratum", "size", "setting", "measure", "unresolved")
"""Why a claim may differ: the paper errs; the model is smaller or trained on less; another setting than the paper's;
another measure of the same thing. "unresolved" if no experiment supports any of these."""
UNTRAINED = "untrained"
"""Label of the control that `run_script` measures itself: the same rows of models with new initial weights."""
ADDED = ("controls", "cause", "control_verdicts")
Standing = Literal["agrees", "agrees in part", "differs", "unresolved", "no evidence", "not printed", "open"]


@dataclass(frozen=True, eq=False)
class Claim:
    """A claim of a paper's figure, table or theorem, and the rows it is checked on: an entry of analyses/README.md."""

    source: str  # the paper's key in sources.bib
    item: str  # figure, table or theorem
    what: str  # what it shows, values in the order of the rows
    # measured rows; by label where there are several lines of them. Empty if no script measures it
    lines: Mapping[str, Sequence[Row]]
    # decides value by value whether the paper is right (`support.checks`); None if numbers printed in the rows decide,
    # or where the claim was read from a file
    check: Check | None = None
    published: str = ""  # the paper's words; empty if they are in the rows
    why: str = ""  # what a reader of the verdict should know
    # rows to compare the claim with, by label: the same quantities, or others, of a control
    controls: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    cause: str = ""  # why it differs, in a word or two: one of `CAUSES` first
    trained: bool = True  # whether it is about trained models; otherwise untrained models are not a control
    # by label, the verdict that the claim would get with a control's rows
    control_verdicts: Mapping[str, str] = field(default_factory=dict)
    # results of the check, of a claim that was read from a file; None if words were measured for a number
    saved_outcomes: tuple[bool, ...] | None = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """The paper, item and words that identify the claim."""
        return self.source, self.item, self.what

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.lines.values() for row in rows]

    @property
    def outcomes(self) -> list[bool] | None:
        """Whether the paper is right, value by value or for all together; None if words were measured for a number."""
        if self.check is None and self.saved_outcomes != ():
            return None if self.saved_outcomes is None else list(self.saved_outcomes)
        if self.check is None:
            return [
                equal(row, row.published) for row in self.rows
                if isinstance(row.published, int | float) and not isinstance(row.measured, str)
            ]  # fmt: skip
        try:
            return self.check(list(self.lines.values())) if self.lines else []
        except NoNumberError:  # an untrained model may have words there
            return None

    @property
    def verdict(self) -> Standing:
        """The overall verdict; "open" if no script measures the claim yet."""
        if not self.lines:
            return "open" if self.published else "not printed"
        results = self.outcomes
        if results is None:
            return "differs"
        if not results:
            return "not printed"
        return "agrees" if all(results) else "agrees in part" if any(results) else "differs"

    @property
    def standing(self) -> Standing:
        """The verdict in the index: "no evidence" if untrained models agree too, "unresolved" for an unknown cause.

        An entry that is true of untrained models is not evidence about training, so it does not count as agreeing. One
        that differs, or agrees in part, without an experiment on the cause does not count as differing.
        """
        unknown = self.cause.startswith("unresolved") and self.verdict in ("differs", "agrees in part")
        if unknown or (self.verdict == "differs" and not self.cause):
            return "unresolved"
        alike = self.trained and self.control_verdicts.get(UNTRAINED) == "agrees" == self.verdict
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
        if self.trained and self.lines and UNTRAINED not in self.control_verdicts:
            lacking.append("the untrained control")
        return ", ".join(lacking)

    def with_rows(self, rows: Sequence[Row]) -> "Claim":
        rest = iter(rows)
        return replace(self, lines={label: [next(rest) for _ in line] for label, line in self.lines.items()})

    def to_json(self) -> dict[str, Any]:
        """The claim as data; empty controls and causes are omitted."""
        saved = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("lines", "controls"):
            saved[name] = {label: [row.to_json() for row in rows] for label, rows in saved[name].items()}
        del saved["check"], saved["saved_outcomes"]
        if self.trained:
            del saved["trained"]
        if self.lines and (self.check is not None or self.saved_outcomes != ()):
            saved["outcomes"] = self.outcomes
        return {name: value for name, value in saved.items() if value or name not in ADDED}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Claim":
        """A claim of a results file.

        Raises:
            ValueError: it is not one.
        """
        try:
            values = dict(saved)
            for name in ("lines", "controls"):
                rows = values.get(name, {}).items()
                values[name] = {label: [row_from_json(row) for row in line] for label, line in rows}
            outcomes = values.pop("outcomes", ())
            return cls(**values, saved_outcomes=None if outcomes is None else tuple(outcomes))
        except (AttributeError, TypeError) as error:
            raise ValueError(f"saved is not a claim of a results file: {error!r}") from error


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


def state_claims(name: str, rows: Callable[[], Sequence[Row]]) -> list[Claim]:
    """State the claims of all papers on the rows of a results file.

    Args:
        name: of the results file, without suffix.
        rows: returns its rows, and those that its script derives from its data; called if there is a claim on them.
    """
    found = [(paper, entry) for paper in read_papers() for entry in paper.entries
             if fnmatch.fnmatchcase(name, entry["results"])]  # fmt: skip
    table = rows() if found else ()
    return [state_claim(paper.source, entry, table) for paper, entry in found if not _is_left_out(entry, table)]


def state_claim(source: str, entry: Mapping[str, Any], table: Sequence[Row]) -> Claim:
    """State an entry of a paper's table on rows.

    Raises:
        ValueError: a row that the table does not have, or a cause of which none of `CAUSES` is the first word.
        NoNumberError: a check needs a number, and words were measured.
    """
    entry = dict(entry)
    item, cause = entry["item"], entry.get("cause", "")
    if cause and cause.replace(",", " ").replace(":", " ").split()[0] not in CAUSES:
        raise ValueError(f"{item}: the cause {cause!r} does not begin with one of {', '.join(CAUSES)}")
    lines = {"": entry.pop("rows")} if "rows" in entry else entry.get("lines", {})
    for name, labelled in (("lines", lines), ("controls", entry.get("controls", {}))):
        entry[name] = {label: pick(table, *quantities) for label, quantities in labelled.items()}
    for name in {"why", "cause"} & set(entry):
        entry[name] = re.sub(
            r"{(.+?)(?: : (note|first note))?}", lambda found: _words(table, *found.groups()), entry[name]
        )
    check, printed = entry.pop("check", ""), entry.pop("printed", ())
    known = {each.name: entry[each.name] for each in fields(Claim) if each.name in entry}
    claim = Claim(source, **known, check=named_check(check) if check else None)
    if printed:
        claim = claim.with_rows([replace(row, published=p) for row, p in zip(claim.rows, printed, strict=True)])
    if claim.outcomes is None and not are_weights_random():  # an untrained model may have words for a number
        words = ", ".join(map(str, claim.rows))
        raise NoNumberError(f"{item}: a check needs a number, and words were measured: {words}")
    return _with_verdict(claim, claim.controls[UNTRAINED]) if claim.trained and UNTRAINED in claim.controls else claim


def pick(table: Sequence[Row], *quantities: str) -> list[Row]:
    """Rows by quantity or shell pattern, in this order.

    With `random_weights`, a row that is missing is one of the words "not measured".

    Raises:
        ValueError: there is no such row.
    """
    picked: list[Row] = []
    for quantity in quantities:
        same = [row for row in table if row.quantity == quantity]
        same = same or [row for row in table if fnmatch.fnmatchcase(row.quantity, quantity)]
        if not same and are_weights_random():  # a part that only a trained model has
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


def restated(saved: Sequence[Claim], stated: Sequence[Claim]) -> list[Claim]:
    """Claims that are stated anew on saved rows, with the untrained control that was measured for the saved ones.

    A claim is recognised by its item and words, or by its place if as many are stated as were saved.
    """
    by_words, same, claims = {claim.key: claim for claim in saved}, len(saved) == len(stated), []
    for i, claim in enumerate(stated):
        before = by_words.get(claim.key, saved[i] if same else None)
        known = before is not None and UNTRAINED in before.controls
        if before is not None and known and claim.trained and UNTRAINED not in claim.controls:
            claim = _with_verdict(claim, before.controls[UNTRAINED], before.control_verdicts[UNTRAINED])
        claims.append(claim)
    return claims


def _with_verdict(claim: Claim, rows: Sequence[Row], otherwise: str = "") -> Claim:
    """A claim with the rows of untrained models as its control, and its verdict on them if there are as many."""
    verdict = claim.with_rows(rows).verdict if len(rows) == len(claim.rows) else otherwise
    controls = {**claim.controls, UNTRAINED: rows}
    return replace(claim, controls=controls, control_verdicts={**claim.control_verdicts, UNTRAINED: verdict})


def with_untrained(claims: Sequence[Claim], untrained: Sequence[Claim]) -> list[Claim]:
    """Claims with the same rows of untrained models as a control, and their verdicts.

    Args:
        claims: on trained models.
        untrained: the same, in the same order, on untrained ones.

    Raises:
        ValueError: another number of claims.
    """
    if len(claims) != len(untrained):
        raise ValueError(f"{len(untrained)} claims on untrained models for {len(claims)} on trained ones")
    return [
        claim if not claim.trained or not claim.lines or UNTRAINED in claim.controls
        else _with_verdict(claim, other.rows, other.verdict)
        for claim, other in zip(claims, untrained, strict=True)
    ]  # fmt: skip
