"""Measures of any model: losses, regret, alignment, the nearest algorithm, when the loss falls."""

import copy
from typing import Any

import torch

from mechicl.algorithms import references
from mechicl.analysis.behaviour import align, identify, regret
from mechicl.analysis.dynamics import find_transitions
from mechicl.checkpoints import Checkpoint, CheckpointError
from mechicl.tasks import TokenDistribution

HELD_OUT = 1_000_003
"""Seed of the held-out prompts."""
Measured = dict[str, float]


def one_model(checkpoint: Checkpoint) -> Any:
    """A copy of the one model of a checkpoint, which a measure may change."""
    if len(checkpoint.models) != 1:
        raise ValueError(f"a measure takes a checkpoint with one model; {checkpoint.name} has {len(checkpoint.models)}")
    return copy.deepcopy(checkpoint.models[0])


def loss(checkpoint: Checkpoint, *, n_prompts: int = 4000) -> Measured:
    """Held-out loss on new prompts, and that of the best learner of the task on the same ones (see `mean_regret`)."""
    measured = mean_regret(checkpoint, n_prompts=n_prompts)
    return {name: measured[name] for name in ("held_out_loss", "best_known_loss")}


def mean_regret(checkpoint: Checkpoint, *, n_prompts: int = 4000) -> Measured:
    """Held-out loss minus that of the best known learner of the task, on the same prompts: `analysis.regret`.

    Args:
        checkpoint: with one model.
        n_prompts: held-out prompts.

    Returns:
        `regret`, `held_out_loss` and `best_known_loss`: squared errors of what the model was trained to predict (the
        query, or all points), or nats per token.

    Raises:
        TypeError: a task without reference learners.
    """
    model, task = one_model(checkpoint), checkpoint.task
    at = "points" if isinstance(task, TokenDistribution) or model.cfg.one_pass else "query"
    result = regret(model, task, with_references=False, at=at, n_prompts=n_prompts, seed=HELD_OUT, progress=False)
    return {
        "regret": result.mean().mean,
        "held_out_loss": result.losses[result.learner].mean().item(),
        "best_known_loss": result.losses[result.reference].mean().item(),
    }


def alignment(checkpoint: Checkpoint, *, learner: str | None = None, n_prompts: int = 2000) -> Measured:
    """How alike the model and a reference learner of its task are: `analysis.align`, means over prompts.

    Args:
        checkpoint: with one model.
        learner: a name in `algorithms.references(task)`; by default the best known one.
        n_prompts: held-out prompts.

    Returns:
        `prediction_distance`, `sensitivity_cosine` (over the prompts where it is defined) and `sensitivity_distance`.

    Raises:
        KeyError: the task has no reference learner of that name.
        TypeError: a task without reference learners.

    Example:
        >>> to_ridge = functools.partial(alignment, learner="ridge")
    """
    known = references(checkpoint.task)
    name = learner or next(iter(known))
    if name not in known:
        raise KeyError(f"{type(checkpoint.task).__name__} has no reference learner {name!r}; it has {list(known)}")
    model, prompts = one_model(checkpoint), checkpoint.task.sample(n_prompts, seed=HELD_OUT)
    return {
        quantity: values.nanmean().item() for quantity, values in align(model, known[name], prompts).samples().items()
    }


def identified(checkpoint: Checkpoint, *, n_prompts: int = 2048) -> Measured:
    """How near each family of algorithms comes to the model's predictions: `analysis.identify`.

    Args:
        checkpoint: with one model.
        n_prompts: to fit the families on, and to measure on.

    Returns:
        `relative_distance: FAMILY`, the root of the mean squared distance over that of the model's predictions, for
        each family, and `confidence` in the answer.
    """
    result = identify(one_model(checkpoint), checkpoint.task, n_prompts=n_prompts, with_limits=False, progress=False)
    scale = result.squared_predictions.mean().clamp(min=1e-300)
    distances: Measured = {}
    for match in result.matches:  # the nearest member of a family first
        name = f"relative_distance: {match.family}"
        distances.setdefault(name, (match.squared_distances.mean() / scale).sqrt().item())
    return {**distances, "confidence": result.confidence}


def transition(checkpoint: Checkpoint, *, plateau: float | None = None) -> Measured:
    """The step at which the held-out loss falls from its plateau, by the record's curve: `analysis.find_transitions`.

    Args:
        checkpoint: with one model.
        plateau: as for `find_transitions`: by default the first loss.

    Returns:
        `transition_step` and its `transition_width` (from a tenth to nine tenths of the fall), NaN where there is none;
        `fell`, 1 or 0; and the `final_loss`.

    Raises:
        CheckpointError: a record without a curve.
    """
    one_model(checkpoint)
    curve = checkpoint.record.get("curve", {})
    if not curve.get("eval_loss"):
        raise CheckpointError(f"{checkpoint.name}: its record has no curve of held-out losses")
    losses = torch.tensor(curve["eval_loss"], dtype=torch.float64)
    falls = find_transitions(list(curve["eval_step"]), losses, plateau=plateau)
    return {
        "transition_step": falls.steps[0].item(),
        "transition_width": (falls.end - falls.start)[0].item(),
        "fell": float(falls.fell[0]),
        "final_loss": falls.final[0].item(),
    }
