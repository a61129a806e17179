"""What papers say of measured rows, and the one function that decides whether it is so."""

import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal

from mechicl.checkpoints import are_weights_random
from mechicl.reports.rows import Row

SLACK = 0.05
"""How far apart two numbers may be that agree, and how far from 0 or 1 what a paper calls near it."""
CAUSES = ("erratum", "size", "setting", "measure")
"""Why a claim may differ: the paper errs; the model is smaller or trained on less; another setting than the paper's;
another measure of the same thing."""
UNTRAINED = "untrained"
"""Label of the control that `run_script` measures by itself: the same rows of models with new initial weights."""
ADDED = ("controls", "cause", "control_verdicts")
Verdict = Literal["agrees", "agrees in part", "differs", "no evidence", "not printed", "open"]


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
        controls: rows of what the claim is held against, by label: the same quantities, or others, of a control.
        cause: why it differs, in a word or two ("erratum", "size", "setting", "measure"): one of `CAUSES` first.
        trained: whether it is said of a training; where not, an untrained model is no control.
        control_verdicts: the verdict that the claim would get with a control's rows in place of its own, by label.
    """

    source: str
    item: str
    what: str
    lines: Mapping[str, Sequence[Row]]
    check: str = ""
    published: str = ""
    why: str = ""
    controls: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    cause: str = ""
    trained: bool = True
    control_verdicts: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """The rows of all lines."""
        return [row for rows in self.lines.values() for row in rows]

    def outcomes(self) -> list[bool]:
        """What the paper says, value by value: see `outcomes`."""
        return outcomes(self) if self.lines else []

    @property
    def verdict(self) -> Verdict:
        """What the outcomes come to. Open: nothing measures yet what the paper says. Words for a number differ."""
        if not self.lines:
            return "open" if self.published else "not printed"
        try:
            results = self.outcomes()
        except TypeError:  # an untrained model may have words there
            return "differs"
        if not results:
            return "not printed"
        return "agrees" if all(results) else "agrees in part" if any(results) else "differs"

    @property
    def standing(self) -> Verdict:
        """The verdict that the index shows: "no evidence" for what agrees and of untrained models too.

        Such an entry says something of the quantity, and nothing of training, so that it is not counted as agreeing.
        """
        alike = self.trained and self.control_verdicts.get(UNTRAINED) == "agrees" == self.verdict
        return "no evidence" if alike else self.verdict

    @property
    def n_seeds(self) -> int | None:
        """The fewest seeds that a value is over; None where no value is over seeds."""
        counts = [row.n_seeds for row in self.rows]
        return min((count for count in counts if count is not None), default=None)

    @property
    def lacks(self) -> str:
        """What keeps it from standing as it is, in words; empty where nothing does.

        What differs needs a cause and, besides untrained models, a control that supports it; what is said of trained
        models needs untrained ones beside it. What these agree with stands as "no evidence" (see `standing`).
        """
        if self.verdict == "open":
            return "nothing measures it"
        lacking = []
        if self.verdict == "differs":
            lacking += [] if self.cause else ["a cause"]
            lacking += [] if set(self.controls) - {UNTRAINED} else ["a control that supports the cause"]
        if self.trained and self.lines:
            lacking += [] if UNTRAINED in self.control_verdicts else ["the untrained control"]
        return ", ".join(lacking)

    def to_json(self) -> dict[str, Any]:
        """The claim as data; of controls only what there is."""
        saved = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("lines", "controls"):
            saved[name] = {label: [row.to_json() for row in rows] for label, rows in saved[name].items()}
        if self.trained:
            del saved["trained"]
        return {name: value for name, value in saved.items() if value or name not in ADDED}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Claim":
        """A claim of a results file.

        Raises:
            ValueError: it is none.
        """
        try:
            rows_of = {
                name: {label: [Row.from_json(row) for row in rows] for label, rows in saved.get(name, {}).items()}
                for name in ("lines", "controls")
            }
            return cls(**{**saved, **rows_of})
        except (AttributeError, TypeError) as error:
            raise ValueError(f"saved is no claim of a results file: {error!r}") from error


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

        With `random_weights`, a row that is not there is one of the words "not measured".

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
            if not same and are_weights_random():  # a part that only a trained model has
                same = [Row(quantity, None, "not measured")]
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
        controls: Mapping[str, Sequence[str | Row]] | None = None,
        cause: str = "",
        trained: bool = True,
    ) -> None:
        """State a claim; arguments as `Claim` has them, with quantities in place of rows.

        Raises:
            ValueError: a row that the table does not have, a check that cannot be read, or a cause of which none of
                `CAUSES` is the first word.
            TypeError: a check needs a number, and words were measured.
        """
        if cause and cause.replace(",", " ").replace(":", " ").split()[0] not in CAUSES:
            raise ValueError(f"{item}: the cause {cause!r} does not begin with one of {', '.join(CAUSES)}")
        rows = {"": quantities} if quantities else lines or {}
        picked = {label: self.pick(*names) for label, names in rows.items()}
        beside = {label: self.pick(*names) for label, names in (controls or {}).items()}
        claim = Claim(self.source, item, what, picked, check, published, why, beside, cause, trained)
        if not are_weights_random():  # an untrained model may have words where a trained one has a number
            outcomes(claim)  # a check that cannot be read is a mistake of whoever stated it
        if trained and UNTRAINED in beside:  # measured by the script itself
            claim = replace(claim, control_verdicts={UNTRAINED: _verdict_with(claim, beside[UNTRAINED])})
        self.stated.append(claim)


def restated(saved: Sequence[Claim], stated: Sequence[Claim]) -> list[Claim]:
    """Claims that are stated anew on saved rows, with the untrained control that was measured for the saved ones.

    A claim is recognised by its item and words, or, where as many are stated as were saved, by its place. Where its
    check is another one now, the control's verdict is that of the new check.
    """
    by_words = {(claim.source, claim.item, claim.what): claim for claim in saved}
    same = len(saved) == len(stated)
    claims = []
    for i, claim in enumerate(stated):
        before = by_words.get((claim.source, claim.item, claim.what), saved[i] if same else None)
        if before is None or UNTRAINED in claim.controls or UNTRAINED not in before.controls or not claim.trained:
            claims.append(claim)
            continue
        rows = before.controls[UNTRAINED]
        verdict = before.control_verdicts[UNTRAINED]
        if claim.check != before.check:
            verdict = _verdict_with(claim, rows) or verdict
        controls = {**claim.controls, UNTRAINED: rows}
        claims.append(replace(claim, controls=controls, control_verdicts={UNTRAINED: verdict}))
    return claims


def _verdict_with(claim: Claim, rows: Sequence[Row]) -> str:
    """The verdict with other rows in the places of the claim's; empty where there are more or fewer of them."""
    if len(rows) != len(claim.rows):
        return ""
    rest = iter(rows)
    lines = {label: [next(rest) for _ in line] for label, line in claim.lines.items()}
    return replace(claim, lines=lines).verdict


def with_untrained(claims: Sequence[Claim], untrained: Sequence[Claim]) -> list[Claim]:
    """Claims with the same rows of untrained models as a control, and what these would be found to be.

    Args:
        claims: on trained models.
        untrained: the same, in the same order, on untrained ones.

    Raises:
        ValueError: another number of claims.
    """
    if len(claims) != len(untrained):
        raise ValueError(f"{len(untrained)} claims on untrained models for {len(claims)} on trained ones")
    joined = []
    for claim, other in zip(claims, untrained, strict=True):
        if not claim.trained or not claim.lines or UNTRAINED in claim.controls:
            joined.append(claim)
            continue
        controls = {**claim.controls, UNTRAINED: other.rows}
        verdicts = {**claim.control_verdicts, UNTRAINED: other.verdict}
        joined.append(replace(claim, controls=controls, control_verdicts=verdicts))
    return joined
