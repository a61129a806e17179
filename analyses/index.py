"""Write analyses/README.md: every figure and table of the papers, with the measurements of these scripts.

python analyses/index.py             # after a script of this folder has saved new results
python analyses/index.py --check     # exit code 1 if README.md is not what would be written; lists what entries lack
python analyses/index.py --strict    # and exit code 1 if an entry lacks something (a cause, a control, to be measured)
"""

import argparse
import ast
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import get_args

from analyses.support.claims import UNTRAINED, Claim, Standing, read_papers, state_claims
from analyses.support.results import Results
from mechicl.reports import Row
from mechicl.reports.published import authors_and_year, read_sources
from mechicl.statistics import Interval

HERE = Path(__file__).parent
NOTHING = "—"
MANY = 6
"""Values of a control; more are shown by their range."""
REFERENCE = re.compile(r" \((?:Figs?\.|A\.|Theorem|eq\.) ?[^)]*\)$")
"""Suffixes of quantities that the first column repeats."""
INTRO = """# Published and measured

This page compares figures and tables of papers with the measurements of the scripts in this folder. It covers all
figures and tables of four papers and of a lecture text, and one figure of Raventós et al. 2023.

```sh
python analyses/index.py           # writes this file from analyses/results/; --check tells whether it is up to date
```

All numbers come from the results files. Intervals are 95%, with their population in brackets. The values of an entry
are in the order of the column "what". The papers' tables (`*/claims.toml`) state the entries; an entry's verdict is
computed by the check that it names, from `support/checks.py`:

- **agrees**: the published and the measured number are within 5%, or the published one is inside the measured interval.
  An interval that is wider than half of the published number agrees with nothing, whatever the check. A claim without a
  number is true of the measured rows: "near 1", "0", "none" and "small" mean within 0.05, with an interval no wider; a
  sign, an order, "above" and "below" must be true of whole intervals.
- **agrees in part**: true for some of an entry's values, which are counted. **differs**: true for none.
- **unresolved**: false for some or all values, and no experiment shows why.
- **no evidence**: untrained models agree too, so the entry is not evidence about training.
- **not printed**: the paper has no number or claim to compare with. **open**: no script measures it yet.

"n" is the smallest number of seeds of a value, or the number of prompts if one model is measured. A control is a
measurement for which the claim must fail, or which explains a difference. "Untrained" are models with new initial
weights, measured by the same script, with the verdict that they would get. A claim that differs has a cause: an
erratum; size (our models are smaller, or trained on less); or a setting or measure that is not the paper's. `make
verify` measures all entries again.
"""


# ---- results files ----


def read_results(folder: Path) -> dict[str, Results]:
    """All results files by name.

    Raises:
        ValueError: one does not hold a saved comparison.
    """
    return {path.stem: Results.read(path) for path in sorted(folder.glob("*.json"))}


def find_scripts() -> list[Path]:
    """All scripts: those of papers, in the folders that have claims, and the others."""
    folders = [HERE, *(table.parent for table in HERE.glob("*/claims.toml"))]
    return sorted(path for folder in folders for path in folder.glob("*.py"))


def command(comparison: Results) -> str:
    return comparison.data["command"].removeprefix("python ").removeprefix("analyses/")


def joined(comparisons: Sequence[Results]) -> dict[Claim, list[str]]:
    """Every claim with the commands that measure it; lines of one claim in several files come together."""
    unmeasured = state_claims("", ())
    claims: dict[tuple[str, str, str], tuple[Claim, list[str]]] = {claim.key: (claim, []) for claim in unmeasured}
    for comparison in comparisons:
        for claim in comparison.claims:
            empty = replace(claim, lines={}, controls={}, untrained_verdict="", outcomes=())
            first, commands = claims.get(claim.key, (empty, []))
            script, outcomes = command(comparison), (first.outcomes, claim.outcomes)
            verdicts = {each for each in (first.untrained_verdict, claim.untrained_verdict) if each} or {""}
            more = replace(
                first, lines=_joined_rows(first.lines, claim.lines),
                outcomes=None if None in outcomes else [each for part in outcomes for each in part or ()],
                controls=_joined_rows(first.controls, claim.controls),
                untrained_verdict=verdicts.pop() if len(verdicts) == 1 else "agrees in part",
                cause=first.cause or claim.cause,
            )  # fmt: skip
            claims[claim.key] = more, commands if script in commands else [*commands, script]
    return dict(claims.values())


def _joined_rows(first: Mapping[str, Sequence[Row]], second: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """Rows by label, those of the second after those of the first."""
    return {label: [*first.get(label, ()), *second.get(label, ())] for label in {**first, **second}}


def place(claim: Claim) -> tuple[int, int, str]:
    """Sort key of an item: theorems, sections, figures, tables, appendix; by number."""
    kinds = ("Abstract", "Prop", "Theorem", "Lemma", "Eq", "Section", "Fig", "Table", "A.", "Example", "Demonstration")
    kind = next(i for i, kind in enumerate(kinds) if claim.item.startswith(kind))
    number = re.search(r"\d+", claim.item)
    return kind, int(number[0]) if number else 0, claim.item


# ---- cells ----


def shown(row: Row) -> str:
    if isinstance(row.measured, str):
        return row.measured
    if not math.isfinite(row.ends[1]):
        return "not finite"
    known = not isinstance(row.measured, Interval) or math.isfinite(row.measured.half_width)
    return str(row) if known else f"{row.ends[1]:.4g}"


def over(row: Row) -> str:
    """Return the population of a measured value, for the brackets after it."""
    if isinstance(row.measured, Interval):
        return f"{row.measured.n:,} {row.over}".strip()
    return row.over if not isinstance(row.measured, str) or any(map(str.isdigit, row.over)) else ""


def measured_cell(claim: Claim) -> str:
    """Values, a line for each label, with what they are over where it is not the same for all."""
    lines = []
    for label, rows in claim.lines.items():
        runs = [(words, list(run)) for words, run in groupby(rows, key=over)]
        lines.append((f"{label}: " * bool(label), [(", ".join(map(shown, run)), words) for words, run in runs]))
    common = len({words for _, parts in lines for _, words in parts}) == 1
    texts = [
        label + ", ".join(values if common or not words else f"{values} ({words})" for values, words in parts)
        for label, parts in lines
    ]
    return "<br>".join(texts) or NOTHING


def n_cell(claim: Claim) -> str:
    """Return the population of the values; where it differs, the fewest seeds."""
    overs = list(dict.fromkeys(words for words in map(over, claim.rows) if words))
    if len(overs) <= 1:
        return "".join(overs) or NOTHING
    least = claim.n_seeds
    return NOTHING if least is None else f"{least} seed{'s' if least != 1 else ''}"


def control_cell(claim: Claim) -> str:
    """List the controls' measurements, each with the verdict that it would get in the claim's place."""
    if not claim.lines:
        return NOTHING
    cells = []
    for label, rows in claim.controls.items():
        values = ", ".join(map(shown, rows))
        if len(rows) > MANY:
            numbers = [row.ends[1] for row in rows if not isinstance(row.measured, str)]
            finite = [number for number in numbers if math.isfinite(number)]
            values = f"{min(finite):.3g} to {max(finite):.3g} ({len(rows)} values)" if finite else "not measured"
        verdict = claim.untrained_verdict if label == UNTRAINED else ""
        cells.append(f"{label}: {values}" + (f" (**{verdict}**)" if verdict else ""))
    if not claim.trained:
        cells.append("nothing trained")
    elif UNTRAINED not in claim.controls:
        cells.append(f"{UNTRAINED}: not measured yet")
    return "<br>".join(cells)


def published_cell(claim: Claim) -> str:
    """The paper's words, or its numbers in the same lines."""
    if claim.published:
        return claim.published
    lines = [
        [f"{p:g}" if isinstance(p, int | float) else REFERENCE.sub("", p) for p in printed if p is not None]
        for printed in ([row.published for row in rows] for rows in claim.lines.values())
    ]
    values = [value for line in lines for value in line]
    if len(set(values)) <= 1 or len(values) < len(claim.rows):
        return ", ".join(dict.fromkeys(values)) or NOTHING
    return "<br>".join(map(", ".join, lines))


def why_cell(claim: Claim) -> str:
    """How many values agree, measured over published, and the claim's own words."""
    results = claim.outcomes or []
    counts = [f"{sum(results)} of {len(results)}"] if claim.verdict == "agrees in part" else []
    ratios = [
        row.ends[1] / row.published for row in claim.rows if not claim.check
        and isinstance(row.published, int | float) and row.published and not isinstance(row.measured, str)
    ]  # fmt: skip
    if ratios:
        low, high = f"{min(ratios):.3f}", f"{max(ratios):.3f}"
        counts.append(f"ratio {low}" if low == high else f"ratios {low} to {high}")
    cause = f"cause: {claim.cause}" if claim.cause else ""
    return "; ".join(filter(None, [*counts, cause, claim.why]))


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in (header, *lines)]
    rows = [f"| {' | '.join(line)} |" for line in escaped]
    return [rows[0], "|" + "---|" * len(header), *rows[1:], ""]


# ---- the file ----


def write(comparisons: Sequence[Results], scripts: Sequence[Path]) -> str:
    """The whole README."""
    sources, claims = read_sources(), joined(comparisons)
    lines = [INTRO]
    for paper in read_papers():
        entries = sorted((claim for claim in claims if claim.source == paper.source), key=place)
        entry = sources[paper.source]
        lines += [f"## {authors_and_year(entry)}, {entry['title']}\n", f"{paper.lead}\n"]
        lines += table(
            ("item", "claim", "published", "measured", "n", "control", "verdict", "why", "script"),
            [
                (
                    claim.item, claim.what, published_cell(claim), measured_cell(claim), n_cell(claim),
                    control_cell(claim), f"**{claim.standing}**", why_cell(claim),
                    "<br>".join(f"`{text}`" for text in claims[claim]) or NOTHING,
                )
                for claim in entries
            ],
        )  # fmt: skip
    lines += ["## Scripts\n", "Run from the root of a checkout that is installed by `make setup` or `pip install -e .`."
              " Each saves a table as JSON and a page with figures.\n"]  # fmt: skip
    made = [
        (f"`python analyses/{command(c)}`", c.title, ", ".join(f"`{n}`" for n in c.data["checkpoints"]) or NOTHING,
         c.data["date"]) for c in comparisons
    ]  # fmt: skip
    measuring = {command(comparison).split()[0] for comparison in comparisons}
    for path in scripts:
        if (name := path.relative_to(HERE).as_posix()) not in measuring:
            words = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
            made.append((f"`python analyses/{name}`", words, NOTHING, NOTHING))
    lines += table(("command", "what", "checkpoints it opens", "saved on"), sorted(made))
    lines += ["## Sources\n", "All papers that the package cites; entries are in `mechicl/sources.bib`.\n"]
    cited = [(authors_and_year(entry), entry["title"], f"`{key}`") for key, entry in sources.items()]
    lines += table(("paper", "title", "key"), sorted(cited, key=lambda line: line[0].lower()))
    verdicts = Counter(claim.standing for claim in claims)
    counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in get_args(Standing))
    weak = sum(bool(claim.lacks) for claim in claims)
    return "\n".join([*lines, f"{verdicts.total()} entries: {counts}. {weak} lack something."]) + "\n"


def lacking(comparisons: Sequence[Results]) -> list[str]:
    """List entries that lack a measurement, a control or a cause."""
    claims = sorted(joined(comparisons), key=lambda claim: (claim.source, place(claim)))
    return [f"{claim.source}, {claim.item}, {claim.what[:70]}: lacks {claim.lacks}" for claim in claims if claim.lacks]


def main() -> None:
    """Write the README, or check it; without readable results, or if it is not up to date, say so with exit code 1."""
    parser = argparse.ArgumentParser(description="Write analyses/README.md from the results files.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if it is not up to date")
    parser.add_argument("--strict", action="store_true", help="as --check; exit code 1 if a claim lacks something too")
    args = parser.parse_args()
    try:
        results = list(read_results(HERE / "results").values())
        text = write(results, find_scripts())
    except (ValueError, TypeError) as error:
        sys.exit(f"index.py: {error}")
    path = HERE / "README.md"
    if not (args.check or args.strict):
        path.write_text(text, encoding="utf-8")
        print(path, text.splitlines()[-1], sep="\n")
    elif not path.is_file() or path.read_text(encoding="utf-8") != text:
        sys.exit(f"{path} is not what the results say: run `python analyses/index.py`")
    else:
        weak = lacking(results)
        print(*weak, f"{len(weak)} entries lack something", sep="\n", file=sys.stderr)
        sys.exit(int(args.strict and bool(weak)))


if __name__ == "__main__":
    main()
