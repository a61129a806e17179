"""The part of reports on training: loss, transitions and what was measured at the snapshots, on one axis of steps."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from mechicl import viz
from mechicl.algorithms import references
from mechicl.analysis import find_transitions
from mechicl.analysis.dynamics import OverTraining, Transitions, track_strategies
from mechicl.checkpoints.study import Models, Study
from mechicl.prompts import Prompts, TokenSequences
from mechicl.reports.comparison import Measured, Section
from mechicl.reports.rows import Row
from mechicl.statistics import Interval

TITLE = "How it came about"
ABOUT = """The training on one axis of steps. Above: the loss of each seed on held-out prompts. Dotted lines mark the
    step at which a seed's loss has permanently fallen half of the way. Below: quantities at the saved snapshots, means
    over seeds with 95% intervals. The table has the step at which each of them has permanently made half of its
    change."""
STRATEGIES = """ Strategies are the task's reference learners: the weights of the mixture that predicts most like the
    models, and the residual that no mixture explains."""
MIXTURE, COEFFICIENT = "weight in the mixture of strategies", "local learning coefficient"  # titles of panels


def no_history(checkpoint: Models) -> str:
    """Return the reason why the training of a checkpoint cannot be shown; empty if it can."""
    if checkpoint.snapshots is None:
        return "no snapshots of the training were saved"
    if isinstance(checkpoint, Study) and checkpoint.is_own:
        return "the models were trained on another task"
    losses = checkpoint.record.get("curve", {}).get("eval_loss", ())
    whole = all(loss is not None and math.isfinite(loss) for row in losses for loss in row)
    few = min(len(losses), len(checkpoint.snapshots.steps)) < 2
    return "a change needs two snapshots and a curve of finite losses" if few or not whole else ""


def strategies(study: Study, prompts: Prompts | TokenSequences) -> dict[str, Any]:
    """Return the weights of the task's reference learners at the snapshots, as a panel; none without competing ones."""
    try:
        learners = references(study.task)
    except TypeError:  # no reference learner is known
        return {}
    if len(learners) < 2 or "ols" in learners:  # ridge regression and least squares predict nearly the same
        return {}
    track = track_strategies(study, learners, prompts)
    weights = dict(zip(track.learners, track.weights, strict=True))
    return {MIXTURE: OverTraining(track.steps, weights | {"residual": track.residual})}


def history(checkpoint: Models, traced: Mapping[str, Any], *, loss: str, plateau: float | None = None) -> Measured:
    """Draw the training of a checkpoint, and find the step of each change.

    `traced` has results over the snapshots by the title of their panel; `plateau` is the loss from which training falls
    (default: the first). The local learning coefficient is drawn if the record has it: "learning_coefficient" with
    "steps" and "coefficients" `[step][seed]`.
    """
    curve, saved = checkpoint.record["curve"], checkpoint.record.get("learning_coefficient")
    if saved is not None:
        values = torch.tensor(saved["coefficients"], dtype=torch.float64)
        traced = {**traced, COEFFICIENT: OverTraining(tuple(saved["steps"]), {"coefficient": values})}
    falls = find_transitions(curve["eval_step"], curve["eval_loss"], plateau=plateau)
    rows = [_row(loss, falls)]
    for result in traced.values():
        for name, values in result.samples().items():
            if values.isfinite().all():
                rows.append(_row(name.replace("_", " "), find_transitions(result.steps, (values - values[-1]).abs())))
    drawn = viz.training_history(curve, traced, transitions=falls, loss=loss)
    data = {title: {name: values.tolist() for name, values in each.samples().items()} for title, each in traced.items()}
    section = Section(TITLE, ABOUT + STRATEGIES * (MIXTURE in traced), drawn)
    return rows, [section], {"history": {"transitions": falls.steps.tolist(), **data}}


def _row(name: str, changes: Transitions) -> Row:
    found, n = changes.mean_step(), len(changes.steps)
    measured = "no such step" if not changes.fell.any() else found if found.n > 1 else found.mean
    over = "seeds" if isinstance(measured, Interval) else ""
    return Row(f"step of half the change: {name}", None, measured, over, f"{int(changes.fell.sum())} of {n} seeds")
