"""The part of reports on training: loss, transitions and what was measured at the snapshots, on one axis of steps."""

import math
from collections.abc import Mapping
from typing import Any

from mechicl import viz
from mechicl.analysis import find_transitions
from mechicl.analysis.dynamics import Transitions
from mechicl.checkpoints import Checkpoint
from mechicl.reports.comparison import Measured, Section
from mechicl.reports.rows import Row
from mechicl.reports.study import Study

TITLE = "How it came about"
WORDS = """The training on one axis of steps. Above: the loss of each seed on held-out prompts. Dotted lines mark the
    step at which a seed's loss has permanently fallen half of the way. Below: quantities at the saved snapshots, means
    over seeds with 95% intervals. The table has the step at which each of them has permanently made half of its
    change."""


def no_history(checkpoint: Checkpoint) -> str:
    """Return the reason why the training of a checkpoint cannot be shown; empty if it can."""
    if checkpoint.snapshots is None:
        return "no snapshots of the training were saved"
    if isinstance(checkpoint, Study) and checkpoint.is_own:
        return "the models were trained on another task"
    losses = checkpoint.record.get("curve", {}).get("eval_loss", ())
    whole = all(loss is not None and math.isfinite(loss) for row in losses for loss in row)
    few = min(len(losses), len(checkpoint.snapshots.steps)) < 2
    return "a change needs two snapshots and a curve of finite losses" if few or not whole else ""


def history(checkpoint: Checkpoint, traced: Mapping[str, Any], *, loss: str, plateau: float | None = None) -> Measured:
    """Draw the training of a checkpoint, and find the step of each change.

    Args:
        checkpoint: models with snapshots and a curve; see `no_history`.
        traced: results over the snapshots, by the title of their panel.
        loss: name of the loss.
        plateau: the loss from which training falls; by default its first one.
    """
    curve = checkpoint.record["curve"]
    falls = find_transitions(curve["eval_step"], curve["eval_loss"], plateau=plateau)
    rows = [_row(loss, falls)]
    for result in traced.values():
        for name, values in result.samples().items():
            if values.isfinite().all():
                rows.append(_row(name.replace("_", " "), find_transitions(result.steps, (values - values[-1]).abs())))
    drawn = viz.training_history(curve, traced, transitions=falls, loss=loss)
    data = {title: {name: values.tolist() for name, values in each.samples().items()} for title, each in traced.items()}
    return rows, [Section(TITLE, WORDS, drawn)], {"history": {"transitions": falls.steps.tolist(), **data}}


def _row(name: str, changes: Transitions) -> Row:
    found, n = changes.mean_step(), len(changes.steps)
    measured = "no such step" if not changes.fell.any() else found if found.n > 1 else found.mean
    return Row(f"half of the change: {name}", None, measured, "seeds", f"step; {int(changes.fell.sum())} of {n} seeds")
