"""Hand-written weights compared with their theorem: the library's algorithm, or the theorem's formula.

python analyses/theorems.py
"""

from dataclasses import dataclass
from math import inf

from mechicl.constructions.certificates import certificates
from mechicl.reports import Comparison, Row
from support.checks import at_most, every, numbers, together
from support.claims import Claim, Claims
from support.script import ScriptArgs, run_script

BOUNDS = (1e-12, 1e-9, 1e-6, 1e-4, 1e-3, 1e-2, 1.0, inf)
"""Errors are rounded up to one of these: their digits are rounding, and differ between machines."""


@dataclass(frozen=True)
class Args(ScriptArgs):
    """Largest errors over random prompts."""

    n_prompts: int = 64
    """Random prompts."""
    seed: int = 0
    """Seed of the prompts."""


def compare(args: Args) -> Comparison:
    """Error and size of every construction."""
    rows, sizes = [], []
    for certificate in certificates(args.seed, args.n_prompts):
        name = f"{certificate.theorem}: {certificate.construction}"
        bound = next(bound for bound in BOUNDS if certificate.max_relative_error <= bound)
        note = f"{certificate.layers} layers"
        statement = certificate.statement.split(",")[0]
        rows.append(Row(f"{name}, {statement}", certificate.statement, f"at most {bound:g}", "", note))
        sizes.append({k: v for k, v in certificate._asdict().items() if k != "max_relative_error"})
    lead = (
        f"Largest difference over {args.n_prompts} random prompts (seed {args.seed}), relative to the largest expected "
        "value, at 6 dimensions, 2 targets, 12 points and 5 steps, in float64."
    )
    return Comparison("Constructions against their theorems", lead, rows, (), {"sizes": sizes})


def claims(comparison: Comparison) -> list[Claim]:
    """Theorems of three papers."""
    papers = {source: Claims(source, comparison.rows) for source in ("vonoswald2023", "fu2024", "nertinger2025")}

    def exact(
        source: str,
        item: str,
        what: str,
        *quantities: str,
        reference: str = "the library's algorithm",
        why: str = "rounding",
    ) -> None:
        rows = papers[source].pick(*(f"*{quantity}, exact" for quantity in quantities))
        papers[source].add(item, f"{what}: largest relative error against {reference}", *rows,
        check=together(lambda *rows: all(_bound(row) <= 1e-12 for row in rows)),
                           published="exact", why=why, trained=False)  # fmt: skip

    exact("vonoswald2023", "Prop. 1", "linear attention that is gradient descent by its weights",
          "Proposition 1: gradient_descent", why="rounding; W_0 other than 0 too")  # fmt: skip
    exact("vonoswald2023", "Prop. 2", "an MLP before it, gradient descent on m(x)",
          "Proposition 2: kernel_gradient_descent")  # fmt: skip
    exact(
        "vonoswald2023", "Prop. 3", "one layer that copies targets to their inputs' tokens, linear, softmax, and with "
        "gradient descent after it", "Proposition 3 (linear): copy_targets", "Proposition 3 (softmax): copy_targets",
        "Propositions 3 and 1: copy_then_gradient_descent", reference="the targets and the library's algorithm",
        why="rounding; softmax with a hard mask, or to O(n e^(-scale / 2)) with large scores",
    )  # fmt: skip
    exact("vonoswald2023", "A.10, eq. 23", "GD++ in one head, 5 steps", "A.10: gd_plus_plus")
    sink, centred = papers["vonoswald2023"].pick("*A.9, with a sink: *", "*A.9, to the centred sum: *")
    papers["vonoswald2023"].add(
        "A.9, eq. 16 to 21", "two softmax heads of opposite sign, small scores: relative distance from the *centred* "
        "sum Σ y (s - mean s)", centred, check=every(lambda row: _bound(row) > 1e-3),
        published="the plain sum, gradient descent",
        why="the argument drops the normaliser: the limit is the centred sum; with a sink it is gradient descent "
        f"({sink})", cause="erratum", controls={"with a sink": [sink]}, trained=False,
    )  # fmt: skip
    exact("fu2024", "Theorem 1", "5 iterations of Newton in weights, linear and ReLU attention",
          "Theorem 1 (linear): newton", "Theorem 1 (relu): newton",
          why="rounding; a shorter construction than the paper's. The printed α = 2 / ‖SSᵀ‖₂ does not converge, "
          "anything below it does")  # fmt: skip
    operations = ("mov", "aff", "mul")
    exact("fu2024", "Proposition 1", "mov, aff, mul as one layer each",
          *(f"Proposition 1 ({name}): {name}" for name in operations), reference="the formula")  # fmt: skip
    (division,) = papers["fu2024"].pick("*Proposition 1 (div): div, *")
    layers = Row("layers of div", None, numbers(division.note)[0])
    noted = [papers["fu2024"].pick(f"*Proposition 1 ({name}): *")[0].note for name in operations]
    others = [Row(f"layers of {name}", None, numbers(note)[0]) for name, note in zip(operations, noted, strict=True)]
    papers["fu2024"].add("Proposition 1", "div: layers", layers, check=every(at_most, 1), published="one",
                         why=f"by Newton's method, and three of them make the divisor; error {division}. The proof "
                         "that is cited divides by a layer norm", trained=False,
                         cause="setting: attention and MLPs alone",
                         controls={"layers of mov, aff, mul": others})  # fmt: skip
    exact("fu2024", "Lemma 1", "one layer that sums the hidden states", "Lemma 1: total",
          reference="the formula")  # fmt: skip
    exact("nertinger2025", "Theorem 1", "linear attention as preconditioned gradient descent, 5 steps",
          "Theorem 1: preconditioned_gd",
          why="rounding; section 2 prints PGD with + before the gradient, it is -")  # fmt: skip
    exact("nertinger2025", "Theorem 2", "the best weights of one linear layer",
          "Theorem 2: linear_optimum", reference="the theorem's formula")  # fmt: skip
    exact("nertinger2025", "Theorem 4", "the best weights of one ReLU layer",
          "Theorem 4: relu_optimum", reference="the theorem's formula",
          why="rounding; with the sign corrected")  # fmt: skip
    return [claim for paper in papers.values() for claim in paper.stated]


def _bound(row: Row) -> float:
    return numbers(str(row.measured))[0]


if __name__ == "__main__":
    run_script(Args, compare, "theorems", claims)
