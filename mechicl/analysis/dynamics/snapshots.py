"""Analyses of the models of a training as they were at its snapshots."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.behaviour.alignment import align
from mechicl.analysis.heads.scores import score_heads
from mechicl.checkpoints import Checkpoint, CheckpointError
from mechicl.learners import Learner, squared_errors
from mechicl.models import Model
from mechicl.prompts import Prompts
from mechicl.statistics import Result


@dataclass(frozen=True, eq=False)
class AlignmentOverTraining(Result):
    """Alignment with a learner at the snapshots of a training.

    Attributes:
        steps: of the snapshots.
        prediction_distance: mean over prompts, like the other quantities, `[step seed]`.
        sensitivity_cosine: over the prompts where it is defined.
        sensitivity_distance: between the derivatives of both learners' predictions.
        mse: the models' mean squared errors.
    """

    steps: tuple[int, ...]
    prediction_distance: Float[Tensor, "step seed"]
    sensitivity_cosine: Float[Tensor, "step seed"]
    sensitivity_distance: Float[Tensor, "step seed"]
    mse: Float[Tensor, "step seed"]


def align_over_training(checkpoint: Checkpoint, learner: Learner, prompts: Prompts) -> AlignmentOverTraining:
    """Compare the models of a training with a learner as they were at each snapshot, in float64: `align` at each.

    Args:
        checkpoint: with snapshots.
        learner: what to compare with, such as tuned gradient descent.
        prompts: what to compare on.

    Raises:
        CheckpointError: the checkpoint was saved without snapshots.

    Source: von Oswald et al. 2023, Fig. 2; Nertinger, Fig. 1.

    Example:
        >>> step = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.6})
        >>> checkpoint = load_checkpoint("lsa-1l")
        >>> align_over_training(checkpoint, step, checkpoint.task.sample(100, seed=0)).sensitivity_cosine[-1].mean()
    """
    steps, rows = [], []
    for step, models in _snapshots(checkpoint):
        row = []
        for model in models:
            alignment = align(model.double(), learner, prompts)
            means = [value.nanmean() for value in alignment.samples().values()]
            row.append([*means, squared_errors(model, prompts).mean()])
        steps.append(step)
        rows.append(torch.tensor(row))
    return AlignmentOverTraining(tuple(steps), *torch.stack(rows).unbind(-1))


@dataclass(frozen=True, eq=False)
class HeadsOverTraining(Result):
    """The highest score of any head at the snapshots of a training.

    Attributes:
        steps: of the snapshots.
        scores: by name, means over prompts of the head that has the most, `[step seed]`.
    """

    steps: tuple[int, ...]
    scores: dict[str, Float[Tensor, "step seed"]]


def score_heads_over_training(
    checkpoint: Checkpoint,
    names: Sequence[str] = ("previous_token", "induction"),
    *,
    prompts: Prompts | None = None,
    n_prompts: int = 64,
    seed: int = 0,
) -> HeadsOverTraining:
    """When heads of some kinds form: their highest scores at each snapshot.

    Args:
        checkpoint: with snapshots.
        names: of scores of `score_heads`.
        prompts: for models on prompts of points; token models draw sequences.
        n_prompts: number of sequences to draw.
        seed: of these sequences.

    Raises:
        CheckpointError: the checkpoint was saved without snapshots.
        ValueError: as for `score_heads`.

    Source: Olsson et al. 2022, argument 1.

    Example:
        >>> score_heads_over_training(load_checkpoint("induction-2l")).scores["induction"].shape
        torch.Size([6, 3])
    """
    steps, rows = [], []
    for step, models in _snapshots(checkpoint):
        scores = [score_heads(model, prompts=prompts, n_prompts=n_prompts, seed=seed) for model in models]
        steps.append(step)
        rows.append([[score.mean(name).max().item() for score in scores] for name in names])
    by_name = torch.tensor(rows).unbind(1)
    return HeadsOverTraining(tuple(steps), dict(zip(names, by_name, strict=True)))


def _snapshots(checkpoint: Checkpoint) -> Iterator[tuple[int, list[Model]]]:
    """Each snapshot's step, and the models of all seeds as they were then."""
    if checkpoint.snapshots is None:
        raise CheckpointError(f"{checkpoint.name} was saved without snapshots")
    for index, step in enumerate(checkpoint.snapshots.steps):
        yield step, checkpoint.models_at(index)
