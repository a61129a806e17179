"""Kinds of learners of tables: which changes of a table they ignore, and how local and calibrated they are.

python analyses/table_kinds.py
"""

from typing import Any

from analyses.support.script import Option, script
from analyses.table_models import rivals
from mechicl.analysis import fingerprint_on_tables
from mechicl.checkpoints import load_checkpoint, random_weights
from mechicl.reports import Comparison, Row
from mechicl.statistics import interval

N_CONTEXT, SEED = 50, 3_000_017


@script(
    checkpoints=Option(("table-regression", "table-classification"), "models of tables"),
    n_tables=Option(24, "tables, each with 8 rows to predict"),
)
def compare(args: Any) -> Comparison:
    """Measure each property of the trained models, of the same models untrained, and of three estimators."""
    rows = []
    for name in args.checkpoints:
        checkpoint = load_checkpoint(name)
        with random_weights():
            untrained = load_checkpoint(name).models[0]
        task: Any = checkpoint.task
        task = task.replace(n_context=N_CONTEXT)
        learners = {name: checkpoint.best, "untrained": untrained, **rivals(task.has_classes)}
        for label, learner in learners.items():
            found = fingerprint_on_tables(learner, task, n_tables=args.n_tables, seed=SEED, progress=False)
            start = label if label == name else f"{name}, {label}"
            rows += [Row(f"{start}: {each}", None, found.violation(each), "tables") for each in found.violations]
            rows.append(
                Row(f"{start}: influence of the nearest quarter over the farthest", None, found.locality, "tables")
            )
            if task.has_classes:
                rows.append(Row(f"{start}: overconfidence", None, interval(found.overconfidence), "tables"))
    lead = (
        f"{args.n_tables} tables of 4 columns, {N_CONTEXT} rows with labels and 8 to predict. Violations are "
        "mean squared differences of predictions, relative to their squared distance from the mean label."
    )
    return Comparison("Kinds of learners of tables", lead, rows)


if __name__ == "__main__":
    compare.run()
