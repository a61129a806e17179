"""Analyses of models at the snapshots of their training."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.behaviour.alignment import align
from mechicl.analysis.heads.scores import score_heads
from mechicl.base.arguments import checked
from mechicl.base.memory import MEMORY
from mechicl.base.progress import progress_bar
from mechicl.checkpoints import Checkpoint, CheckpointError
from mechicl.learners import Learner, squared_errors
from mechicl.prompts import Prompts
from mechicl.statistics import Result
from mechicl.statistics.results import COSINE


@dataclass(frozen=True, eq=False)
class AlignmentOverTraining(Result):
    """Alignment with a learner at the snapshots of a training.

    Attributes:
        steps: training steps of the snapshots.
        prediction_distance: mean over prompts, like the other quantities, `[step seed]`.
        sensitivity_cosine: mean over the prompts where it is defined.
        sensitivity_distance: distance between the derivatives of both learners' predictions.
        mse: the models' mean squared errors.
    """

    steps: tuple[int, ...]
    prediction_distance: Float[Tensor, "step seed"]
    sensitivity_cosine: Float[Tensor, "step seed"] = field(metadata=COSINE)
    sensitivity_distance: Float[Tensor, "step seed"]
    mse: Float[Tensor, "step seed"]


Training = Checkpoint | Sequence[Any]
"""A checkpoint with snapshots, or a list of models in the order of training, which count as steps 0, 1, 2, ..."""


@checked
def align_over_training(
    checkpoint: Training, learner: Learner, prompts: Prompts, *, memory: float = MEMORY, progress: bool = True
) -> AlignmentOverTraining:
    """Compare the models of a training with a learner at each snapshot (`align`), in float64.

    Args:
        checkpoint: a checkpoint with snapshots, or a list of models in the order of training.
        learner: a learner to compare with, such as tuned gradient descent.
        prompts: prompts to compare on.

    Raises:
        CheckpointError: a checkpoint without snapshots.

    Source: von Oswald et al. 2023, Fig. 2; Nertinger, Fig. 1.

    Example:
        >>> step = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.6})
        >>> checkpoint = load_checkpoint("lsa-1l")
        >>> align_over_training(checkpoint, step, checkpoint.task.sample(100, seed=0)).sensitivity_cosine[-1].mean()
    """

    def measure(model: Any) -> list[Tensor]:
        model = deepcopy(model).double()
        alignment = align(model, learner, prompts, memory=memory, progress=False)
        means = [value.nanmean() for value in alignment.samples().values()]
        return [*means, squared_errors(model, prompts, memory=memory).mean()]

    steps, rows = _measure_snapshots(checkpoint, measure, progress)
    return AlignmentOverTraining(steps, *torch.tensor(rows).unbind(-1))


@dataclass(frozen=True, eq=False)
class HeadsOverTraining(Result):
    """The highest score of any head at the snapshots of a training.

    Attributes:
        steps: training steps of the snapshots.
        scores: by name, the mean over prompts of the best head, `[step seed]`.
    """

    steps: tuple[int, ...]
    scores: dict[str, Float[Tensor, "step seed"]]


@checked
def score_heads_over_training(
    checkpoint: Training,
    names: Sequence[str] = ("previous_token", "induction"),
    *,
    prompts: Prompts | None = None,
    n_prompts: int = 64,
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> HeadsOverTraining:
    """Measure when heads of some kinds form: their highest scores at each snapshot.

    Args:
        checkpoint: a checkpoint with snapshots, or a list of models in the order of training.
        names: names of scores of `score_heads`.
        prompts: for models on prompts of points; token models draw sequences.
        n_prompts: number of sequences to draw.
        seed: seed of these sequences.

    Raises:
        CheckpointError: a checkpoint without snapshots.

    Source: Olsson et al. 2022, argument 1.

    Example:
        >>> score_heads_over_training(load_checkpoint("induction-2l")).scores["induction"].shape
        torch.Size([6, 3])
    """

    options: dict[str, Any] = {"n_prompts": n_prompts, "seed": seed, "memory": memory, "progress": False}

    def measure(model: Any) -> list[float]:
        scores = score_heads(model, prompts=prompts, **options)
        return [scores.mean(name).max().item() for name in names]

    steps, rows = _measure_snapshots(checkpoint, measure, progress)
    return HeadsOverTraining(steps, dict(zip(names, torch.tensor(rows).unbind(-1), strict=True)))


def _measure_snapshots(
    checkpoint: Training, measure: Callable[[Any], Any], progress: bool
) -> tuple[tuple[int, ...], list[Any]]:
    """The snapshots' steps, and a measure of the models of all seeds at each."""
    bar = partial(progress_bar, unit="snapshot", progress=progress, desc="snapshots")
    if not isinstance(checkpoint, Checkpoint):
        if not checkpoint:
            raise ValueError("checkpoint must be a checkpoint or a list of one or more models, got an empty list")
        return tuple(range(len(checkpoint))), [[measure(model)] for model in bar(checkpoint)]
    if checkpoint.snapshots is None:
        raise CheckpointError(f"{checkpoint.name} was saved without snapshots")
    steps = tuple(checkpoint.snapshots.steps)
    return steps, [[measure(model) for model in checkpoint.models_at(i)] for i in bar(range(len(steps)))]
