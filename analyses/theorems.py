"""Hand-written weights compared with their theorem: the library's algorithm, or the theorem's formula."""

from math import inf
from typing import Any

from analyses.support.checks import numbers
from analyses.support.script import Option, script
from mechicl.constructions.certificates import certificates
from mechicl.reports import Comparison, Row

BOUNDS = (1e-12, 1e-9, 1e-6, 1e-4, 1e-3, 1e-2, 1.0, inf)
"""Errors are rounded up to one of these: their digits are rounding, and differ between machines."""


@script(n_prompts=Option(64, "random prompts"), seed=0)
def compare(args: Any) -> Comparison:
    """Error and size of every construction."""
    rows = []
    for certificate in certificates(args.seed, args.n_prompts):
        name = f"{certificate.theorem}: {certificate.construction}"
        bound = next(bound for bound in BOUNDS if certificate.max_relative_error <= bound)
        note = f"{certificate.layers} layers"
        statement = certificate.statement.split(",")[0]
        rows.append(Row(f"{name}, {statement}", certificate.statement, f"at most {bound:g}", "", note))
    lead = (
        f"Largest difference over {args.n_prompts} random prompts (seed {args.seed}), relative to the largest expected "
        "value, at 6 dimensions, 2 targets, 12 points and 5 steps, in float64."
    )
    return Comparison("Constructions against their theorems", lead, rows)


@compare.derive
def derived_rows(comparison: Comparison) -> list[Row]:
    """Return the numbers of layers of the operations of Proposition 1, from the rows' notes."""
    noted = {
        row.quantity.split("(")[1].split(")")[0]: row for row in comparison.rows if "Proposition 1 (" in row.quantity
    }
    return [Row(f"layers of {name}", None, numbers(row.note)[0]) for name, row in noted.items()]


if __name__ == "__main__":
    compare.run()
