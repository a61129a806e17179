"""Bar Natan, Deutch and Magar."""

from mechicl.report import published

from .entry import Entry


def _printed(key: str, *names: str) -> str:
    """Printed numbers, a line for each name."""
    table = published(key)
    return "<br>".join(f"{name.replace('_', ' ')}: {', '.join(f'{x:g}' for x in table[name])}" for name in names)


_FOUR = ("SimAOU_random", "SimAOU_finetuned", "SimAM_before", "SimAM_after")

NATAN = (
    Entry(
        "Eq. 1 to 4", "attention over demonstrations as an update of the zero-shot weight",
        published="equal for linear attention", remark="`mechicl.analysis.dual_form` has it; no script yet",
    ),
    Entry(
        "Fig. 1", "per-layer training as a drawing: each layer has a loss of its own",
        remark="no script yet",
    ),
    Entry(
        "Table 1", "SimAOU and SimAM of the linearised GPT 1.3B: SST2, SST5, MR, Subj",
        published=_printed("003_table1_linearized", *_FOUR),
        remark="no script yet",
    ),
    Entry(
        "Table 2a", "the same of the model itself: SST2, SST5, MR, Subj, AGNews, CB",
        published=_printed("003_table2_original", *_FOUR),
        remark="no script yet",
    ),
    Entry(
        "Table 2b", "the same after training layer by layer",
        published=_printed("003_table2_per_layer", *_FOUR),
        remark="no script yet",
    ),
)  # fmt: skip
