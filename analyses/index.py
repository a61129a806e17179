"""Every figure and table of the four papers beside what the scripts here measured: writes analyses/README.md.

python analyses/index.py           # after a script of this folder has saved new results
python analyses/index.py --check   # exit code 1 if README.md is not what would be written
"""

import argparse
import fnmatch
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from index_entries import MADE, NOT_INDEXED, PAPERS, UNSAVED
from index_entries.entry import (
    CONSTRUCTIONS,
    Derived,
    Entry,
    Made,
    Measured,
    Paper,
    Pattern,
    Row,
    Source,
    Sources,
    agrees_with,
)

from mechicl import constructions
from mechicl.statistics import Interval

HERE = Path(__file__).parent
VERDICTS = ("agrees", "agrees in part", "differs", "not printed", "open")
BOUNDS = (1e-12, 1e-9, 1e-6, 1e-4, 1e-3, 1e-2, 1.0, math.inf)
"""Errors of constructions are rounded up to one of these: their digits are rounding, and differ between machines."""
NOTHING = "—"
REFERENCE = re.compile(r" \((?:Figs?\.|A\.|Theorem) ?[^)]*\)$")
"""What results files append to words, and the first column says."""
INTRO = """# Published and measured

Every figure and table of the four papers, what it shows, and what the scripts in this folder found.

```sh
python analyses/index.py           # writes this file from analyses/results/; --check says whether it is up to date
```

Every number is read from the results files; only claims in words and reasons are written down, and which reason stands
here depends on the numbers. Intervals are 95%, with what they are over in brackets; an entry's values are in the order
that "what" names. Verdicts are computed:

- **agrees**: published and measured numbers are within 5% (the ratio is measured over published), or the published one
  is inside the measured interval and this no wider than half of it; a claim in words holds of what was measured. "Near
  1", "0", "none" and "small" mean within 0.05, with an interval no wider; a sign, an order, "above" and "below" hold of
  whole intervals.
- **agrees in part**: so for some of an entry's values, which are counted; **differs**: for none.
- **not printed**: the paper has no number or claim to compare with. **open**: no script measures it yet.
"""


class MissingResultsError(ValueError):
    """A results file, or a row of one, is not there."""


@dataclass
class Library:
    """Results files by name, read once.

    Attributes:
        folder: of the results files.
        made: how to make each.
    """

    folder: Path
    made: dict[str, Made]
    read: dict[str, dict[str, Any]] = field(default_factory=dict)

    def data(self, name: str) -> dict[str, Any]:
        """A whole results file.

        Raises:
            MissingResultsError: there is none.
        """
        if name not in self.read:
            path = self.folder / f"{name}.json"
            if name == CONSTRUCTIONS:
                self.read[name] = _certified()
            elif path.is_file():
                self.read[name] = json.loads(path.read_text(encoding="utf-8"))
            else:
                raise MissingResultsError(f"there is no {path}: make it with `{self.made[name].command}`")
        return self.read[name]

    def rows(self, source: Source) -> list[Row]:
        """The rows that a source names, in its order; those of a pattern in the file's.

        Raises:
            MissingResultsError: there is no such file or row, or a pattern matches more rows than its limit.
        """
        data = self.data(source.results)
        table = [_row(row) for row in data["table"]]
        found = []
        for quantity in source.quantities:
            if isinstance(quantity, Derived):
                try:
                    found.append(Row(quantity.quantity, None, Measured(quantity.value(data), quantity.over)))
                except (KeyError, IndexError) as error:
                    raise self._missing(source.results, f"data for {quantity.quantity!r} ({error!r})") from error
                continue
            text, limit = (quantity.text, quantity.limit) if isinstance(quantity, Pattern) else (quantity, 1)
            exact = not isinstance(quantity, Pattern)
            matches = [r for r in table if (r.quantity == text if exact else fnmatch.fnmatchcase(r.quantity, text))]
            if not matches:
                raise self._missing(source.results, f"row {text!r}")
            if len(matches) > limit:
                raise MissingResultsError(
                    f"{len(matches)} rows of {self.folder / source.results}.json match {text!r}, more than {limit}"
                )
            found += matches
        return found

    def all_rows(self, sources: Sources) -> list[Row]:
        """The rows of several sources."""
        return [row for source in sources for row in self.rows(source)]

    def _missing(self, name: str, what: str) -> MissingResultsError:
        return MissingResultsError(
            f"{self.folder / name}.json has no {what}: make it anew with `{self.made[name].command}`, or correct the "
            f"entry"
        )


def _row(row: dict[str, Any]) -> Row:
    measured = row["measured"] if row["measured"] is not None else math.nan
    if isinstance(measured, dict):
        ends = {key: math.nan if measured[key] is None else measured[key] for key in ("mean", "low", "high")}
        measured = Interval(**ends, n=measured["n"], level=measured["level"])
    return Row(row["quantity"], row["published"], Measured(measured, row["over"]), row["note"], row.get("bound", False))


def _certified() -> dict[str, Any]:
    """The certificates of the constructions, as a results file would have them: two rows each."""
    table = []
    for found in constructions.certificates():
        name = f"{found.theorem}: {found.construction}"
        kind = found.statement.split(",")[0]
        error = next(bound for bound in BOUNDS if found.max_relative_error <= bound)
        plain = {"over": "", "note": ""}
        table += [
            {"quantity": f"{name}, {kind}", "published": found.statement, "measured": error, "bound": True, **plain},
            {"quantity": f"{name}, layers", "published": None, "measured": found.layers, **plain},
        ]
    return {"title": "Constructions against their theorems", "table": table}


# ---- verdicts ----


@dataclass(frozen=True)
class Judged:
    """An entry with what was found.

    Attributes:
        rows: its rows.
        verdict: one of `VERDICTS`.
        why: reason, with the counts or ratios behind the verdict.
    """

    entry: Entry
    rows: list[Row]
    verdict: str
    why: str


def judge(entry: Entry, library: Library) -> Judged:
    """Compare published with measured.

    Raises:
        MissingResultsError: a row is not there.
        ValueError: the entry does not say how words are to be compared, or says how where there is nothing to compare.
    """
    if not entry.sources:
        return Judged(entry, [], "open" if entry.measurable else "not printed", entry.remark)
    rows = library.all_rows(entry.sources)
    outcomes = _outcomes(entry, rows)
    if not outcomes:
        notes = [entry.remark] if entry.remark else []
        return Judged(entry, rows, "not printed", "; ".join(notes + (_notes(rows) if entry.notes else [])))
    verdict = "agrees" if all(outcomes) else "agrees in part" if any(outcomes) else "differs"
    sentence = {
        "agrees": entry.agrees,
        "agrees in part": entry.in_part or entry.differs,
        "differs": entry.differs or entry.in_part,
    }[verdict]
    quoted = {name: ", ".join(_shown(row) for row in library.all_rows(cited)) for name, cited in entry.cites.items()}
    count = [f"{sum(outcomes)} of {len(outcomes)}"] if verdict == "agrees in part" else []
    reasons = [*count, *_ratios(entry, rows), sentence.format(**quoted), *(_notes(rows) if entry.notes else [])]
    return Judged(entry, rows, verdict, "; ".join(filter(None, reasons)))


def _outcomes(entry: Entry, rows: Sequence[Row]) -> list[bool]:
    """Whether each value agrees; of rows that nothing was published for, none."""
    if entry.compare is not None:
        if not entry.claim and all(row.published is None for row in rows):
            raise ValueError(f"{entry.item}, {entry.what}: a comparison needs a claim")
        found = entry.compare(rows)
        return [found] if isinstance(found, bool) else list(found)
    outcomes = []
    for row in rows:
        if _is_number(row.published) and not row.measured.words:
            outcomes.append(agrees_with(float(row.published or 0), row.measured))
        elif row.published is not None or entry.claim:
            if entry.holds is None:
                raise ValueError(
                    f"{entry.item}: {row.quantity!r} needs a predicate for {entry.claim or row.published!r}"
                )
            outcomes.append(entry.holds(row.measured))
    return outcomes


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def _ratios(entry: Entry, rows: Sequence[Row]) -> list[str]:
    """Measured over published, the range of it where there are several."""
    if entry.compare is not None:
        return []
    found = [
        row.measured.mean / row.published
        for row in rows
        if isinstance(row.published, (int, float)) and row.published and not row.measured.words
    ]
    if not found:
        return []
    low, high = f"{min(found):.3f}", f"{max(found):.3f}"
    return [f"ratio {low}" if low == high else f"ratios {low} to {high}"]


def _notes(rows: Sequence[Row]) -> list[str]:
    return [row.note for row in rows if row.note]


# ---- cells ----


def _shown(row: Row) -> str:
    """A measured value alone."""
    value = row.measured.value
    if isinstance(value, str):
        return value
    if not math.isfinite(row.measured.mean):
        return "not finite"
    if isinstance(value, Interval):
        return str(value) if math.isfinite(value.half_width) else f"{value.mean:.4g}"
    return f"at most {value:g}" if row.bound else f"{value:.4g}"


def _over(row: Row) -> str:
    """What a measured value is over, for the brackets behind it."""
    over, value = row.measured.over, row.measured.value
    if isinstance(value, Interval):
        return f"{value.n:,} {over}".strip()
    return over if not isinstance(value, str) or any(map(str.isdigit, over)) else ""


def measured_cell(entry: Entry, rows: Sequence[Row]) -> str:
    """Values in groups, a line for each label, what they are over once where it is the same."""
    lines = []
    for label, group in _groups(entry, rows):
        runs = groupby(group, key=_over)
        parts = [(", ".join(_shown(row) for row in run), over) for over, run in ((o, list(r)) for o, r in runs)]
        lines.append((label, parts))
    overs = {over for _, parts in lines for _, over in parts}
    common = overs.pop() if len(overs) == 1 else None
    texts = [
        label + ", ".join(values if common is not None or not over else f"{values} ({over})" for values, over in parts)
        for label, parts in lines
    ]
    return "<br>".join(texts) + (f" ({common})" if common else "")


def published_cell(entry: Entry, rows: Sequence[Row]) -> str:
    """Published numbers in the same groups; words once."""
    if entry.claim or not rows:
        return entry.claim or entry.published or NOTHING
    values = [row.published for row in rows if row.published is not None]
    if not values:
        return NOTHING
    texts = [f"{value:g}" if isinstance(value, (int, float)) else REFERENCE.sub("", value) for value in values]
    if len(set(texts)) == 1:
        return texts[0]
    if len(texts) < len(rows):
        return ", ".join(dict.fromkeys(texts))
    groups = _groups(entry, rows)
    size = len(rows) // len(groups)
    return "<br>".join(", ".join(texts[i * size : (i + 1) * size]) for i in range(len(groups)))


def _groups(entry: Entry, rows: Sequence[Row]) -> list[tuple[str, Sequence[Row]]]:
    if not entry.labels:
        return [("", rows)]
    size, rest = divmod(len(rows), len(entry.labels))
    if rest:
        raise ValueError(f"{entry.item}, {entry.what}: {len(rows)} rows for {len(entry.labels)} labels")
    return [(f"{label}: ", rows[i * size : (i + 1) * size]) for i, label in enumerate(entry.labels)]


def _scripts(entry: Entry, made: dict[str, Made]) -> str:
    commands = dict.fromkeys(made[source.results].command for source in entry.sources)
    return "<br>".join(f"`{command.removeprefix('python analyses/')}`" for command in commands) or NOTHING


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


# ---- the file ----


def write(library: Library, papers: Sequence[Paper]) -> str:
    """The whole README."""
    lines, verdicts = [INTRO], Counter()
    for paper in papers:
        lines += [f"## {paper.title}\n", *([paper.lead + "\n"] if paper.lead else [])]
        lines += [_line(("item", "what", "script", "published", "measured", "verdict", "why")), "|" + "---|" * 7]
        for entry in paper.entries:
            judged = judge(entry, library)
            verdicts[judged.verdict] += 1
            measured = measured_cell(entry, judged.rows) if judged.rows else NOTHING
            published = published_cell(entry, judged.rows)
            script = _scripts(entry, library.made)
            lines.append(
                _line((entry.item, entry.what, script, published, measured, f"**{judged.verdict}**", judged.why))
            )
        lines.append("")
    lines += ["## Scripts\n", "Run from the repository's root. Each saves a table as JSON and a page with figures.\n"]
    lines += [_line(("command", "what", "checkpoints it needs", "saved on")), "|" + "---|" * 4]
    for name, made in sorted(library.made.items(), key=lambda item: item[1].command):
        if name == CONSTRUCTIONS:
            continue
        data = library.data(name)
        needs = made.needs if isinstance(made.needs, str) else ", ".join(f"`{name}`" for name in made.needs)
        lines.append(_line((f"`{made.command}`", data["title"], needs, data["date"])))
    for command, what in UNSAVED.items():
        lines.append(_line((f"`{command}`", what, NOTHING, NOTHING)))
    counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS)
    lines += ["", *(f"Not in the tables: `{name}`, {why}." for name, why in NOT_INDEXED.items())]
    lines.append(f"{verdicts.total()} entries: {counts}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the README, or check it; without all results, or if it is not up to date, say so with exit code 1."""
    parser = argparse.ArgumentParser(description="Write analyses/README.md from the results files.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if it is not up to date")
    check = parser.parse_args().check
    try:
        text = write(Library(HERE / "results", MADE), PAPERS)
    except (MissingResultsError, TypeError, ValueError) as error:
        sys.exit(f"index.py: {error}")
    path = HERE / "README.md"
    if not check:
        path.write_text(text, encoding="utf-8")
        print(path, text.splitlines()[-1], sep="\n")
    elif not path.is_file() or path.read_text(encoding="utf-8") != text:
        sys.exit(f"{path} is not what the results say: run `python analyses/index.py`")


if __name__ == "__main__":
    main()
