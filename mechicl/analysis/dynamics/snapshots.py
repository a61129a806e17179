"""Analyses of the models of a training at its snapshots."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.behaviour.alignment import align
from mechicl.analysis.heads.scores import score_heads
from mechicl.base.arguments import checked
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


@checked
def align_over_training(checkpoint: Checkpoint, learner: Learner, prompts: Prompts) -> AlignmentOverTraining:
    """Compare the models of a training with a learner at each snapshot (`align`), in float64.

    Args:
        checkpoint: with snapshots, else a `CheckpointError`.
        learner: to compare with, such as tuned gradient descent.
        prompts: to compare on.

    Source: von Oswald et al. 2023, Fig. 2; Nertinger, Fig. 1.

    Example:
        >>> step = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.6})
        >>> checkpoint = load_checkpoint("lsa-1l")
        >>> align_over_training(checkpoint, step, checkpoint.task.sample(100, seed=0)).sensitivity_cosine[-1].mean()
    """

    def measure(model: Model) -> list[Tensor]:
        alignment = align(model.double(), learner, prompts)
        means = [value.nanmean() for value in alignment.samples().values()]
        return [*means, squared_errors(model, prompts).mean()]

    steps, rows = _measure_snapshots(checkpoint, measure)
    return AlignmentOverTraining(steps, *torch.tensor(rows).unbind(-1))


@dataclass(frozen=True, eq=False)
class HeadsOverTraining(Result):
    """The highest score of any head at the snapshots of a training.

    Attributes:
        steps: of the snapshots.
        scores: by name, the mean over prompts of the best head, `[step seed]`.
    """

    steps: tuple[int, ...]
    scores: dict[str, Float[Tensor, "step seed"]]


@checked
def score_heads_over_training(
    checkpoint: Checkpoint,
    names: Sequence[str] = ("previous_token", "induction"),
    *,
    prompts: Prompts | None = None,
    n_prompts: int = 64,
    seed: int = 0,
) -> HeadsOverTraining:
    """Measure when heads of some kinds form: their highest scores at each snapshot.

    Args:
        checkpoint: with snapshots, else a `CheckpointError`.
        names: of scores of `score_heads`.
        prompts: for models on prompts of points; token models draw sequences.
        n_prompts: number of sequences to draw.
        seed: of these sequences.

    Source: Olsson et al. 2022, argument 1.

    Example:
        >>> score_heads_over_training(load_checkpoint("induction-2l")).scores["induction"].shape
        torch.Size([6, 3])
    """

    def measure(model: Model) -> list[float]:
        scores = score_heads(model, prompts=prompts, n_prompts=n_prompts, seed=seed)
        return [scores.mean(name).max().item() for name in names]

    steps, rows = _measure_snapshots(checkpoint, measure)
    return HeadsOverTraining(steps, dict(zip(names, torch.tensor(rows).unbind(-1), strict=True)))


def _measure_snapshots(checkpoint: Checkpoint, measure: Callable[[Model], Any]) -> tuple[tuple[int, ...], list[Any]]:
    """The snapshots' steps, and a measure of the models of all seeds at each."""
    if checkpoint.snapshots is None:
        raise CheckpointError(f"{checkpoint.name} was saved without snapshots")
    steps = tuple(checkpoint.snapshots.steps)
    return steps, [[measure(model) for model in checkpoint.models_at(index)] for index in range(len(steps))]
