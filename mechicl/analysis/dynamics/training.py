"""Analyses of models at the snapshots of their training, and the step at which a loss curve falls from its plateau."""

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.analysis.behaviour.alignment import align
from mechicl.analysis.heads.scores import score_heads
from mechicl.base.arguments import Fraction, Positive, calling, checked
from mechicl.base.progress import progress_bar
from mechicl.checkpoints import Checkpoint, CheckpointError
from mechicl.checkpoints.study import takes_study
from mechicl.learners import Learner, squared_errors
from mechicl.prompts import Prompts
from mechicl.statistics import UNBOUNDED, Interval, Result, interval
from mechicl.statistics.results import COSINE


@dataclass(frozen=True, eq=False)
class OverTraining(Result):
    """Quantities, by name, at the snapshots (`steps`) of a training; see `measure_over_training`."""

    steps: tuple[int, ...]
    quantities: dict[str, Float[Tensor, "step sample"]]


@dataclass(frozen=True, eq=False)
class AlignmentOverTraining(Result):
    """Alignment with a learner at the snapshots of a training, means over prompts; see `align_over_training`."""

    steps: tuple[int, ...]
    prediction_distance: Float[Tensor, "step seed"]
    sensitivity_cosine: Float[Tensor, "step seed"] = field(metadata=COSINE)
    sensitivity_distance: Float[Tensor, "step seed"]
    mse: Float[Tensor, "step seed"]


Training = Checkpoint | Sequence[Any] | Mapping[int, Any]
"""A checkpoint with snapshots; models by training step, each given as it is or as a function without arguments that
loads it; or a list of models in the order of training, which count as steps 0, 1, 2, ... A list in place of a model has
one model for each seed."""


@takes_study
@checked
def measure_over_training(
    checkpoint: Training, measure: Callable[[Any], Result | Mapping[str, Any]], *, progress: bool | None = None
) -> OverTraining:
    """Repeat any analysis at each snapshot of a training; `viz.plot` draws the quantities as curves.

    Args:
        checkpoint: a checkpoint with snapshots, a list of models in the order of training (steps 0, 1, 2, ...), or
            models by step. Give large models as functions that load them: then one is in memory at a time.
        measure: function of a model that returns a `Result`, or tensors by name. Samples (prompts) are on the last
            axis; other axes are averaged. At the snapshots of a checkpoint it gets the same model with other weights.
            Seeds are in the order of the checkpoint, of a `Study` in that of its `seeds`.

    Returns:
        `steps`, and `quantities` by name: for a checkpoint the mean of each seed's model, `[step seed]`; for models the
        samples, `[step sample]`.

    Raises:
        CheckpointError: a checkpoint without snapshots.
        ValueError: no models, or quantities whose names or numbers of samples differ between snapshots.

    Example:
        >>> def measure(model):
        ...     return {"best induction score": score_heads(model, progress=False).mean("induction").max()}
        >>> curves = measure_over_training(load_checkpoint("induction-2l"), measure)
        >>> curves.quantities["best induction score"].shape    # [step seed]
        torch.Size([6, 3])
    """
    several_seeds = isinstance(checkpoint, Checkpoint)

    def samples(model: Any) -> dict[str, Tensor]:
        with calling("measure"):
            measured = measure(model)
        values = measured.samples() if isinstance(measured, Result) else measured
        tensors = {name: torch.as_tensor(value, dtype=torch.float64).detach().cpu() for name, value in values.items()}
        found = {name: t.reshape(-1, t.shape[-1] if t.ndim else 1).mean(0) for name, t in tensors.items()}
        return {name: value.mean()[None] for name, value in found.items()} if several_seeds else found

    steps, rows = measure_snapshots(checkpoint, samples, progress)
    snapshots = [{name: torch.cat([model[name] for model in row]) for name in row[0]} for row in rows]
    shapes = [{name: len(tensor) for name, tensor in snapshot.items()} for snapshot in snapshots]
    if differing := [i for i, shape in enumerate(shapes) if shape != shapes[0]]:
        at = f"steps {steps[0]} and {steps[differing[0]]}"
        raise ValueError(f"measure() must return as many samples at each snapshot, got at {at}: "
                         f"{shapes[0]} and {shapes[differing[0]]}")  # fmt: skip
    return OverTraining(steps, {name: torch.stack([each[name] for each in snapshots]) for name in snapshots[0]})


@takes_study
@checked
def align_over_training(
    checkpoint: Training, learner: Learner, prompts: Prompts, *, progress: bool | None = None
) -> AlignmentOverTraining:
    """Compare the models of a training with a learner at each snapshot (`align`), in float64.

    Shows whether, and when, a model comes to predict like an algorithm. Source: von Oswald et al. 2023, Fig. 2;
    Nertinger, Fig. 1.

    Args:
        checkpoint: a checkpoint with snapshots (else `CheckpointError`), or models (see `measure_over_training`).
        learner: the learner to compare with, such as an `AlgorithmLearner`.
        prompts: prompts to compare them on, at the query.

    Returns:
        The distances of `align`, and `mse`, the model's squared error at the query: means over prompts `[step seed]`; a
        list of models is one seed. `steps` are the training steps of the snapshots.

    Example:
        >>> step = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.6})
        >>> checkpoint = load_checkpoint("lsa-1l")
        >>> align_over_training(checkpoint, step, checkpoint.task.sample(100, seed=0)).sensitivity_cosine[-1].mean()
    """

    def measure(model: Any) -> list[Tensor]:
        alignment = align(model, learner, prompts, progress=False)
        means = [value.nanmean() for value in alignment.samples().values()]
        return [*means, squared_errors(model, prompts).mean()]

    steps, rows = measure_snapshots(checkpoint, measure, progress, dtype=torch.float64)
    return AlignmentOverTraining(steps, *torch.tensor(rows).unbind(-1))


@dataclass(frozen=True, eq=False)
class HeadsOverTraining(Result):
    """The highest score of any head at the snapshots of a training; see `score_heads_over_training`."""

    steps: tuple[int, ...]
    scores: dict[str, Float[Tensor, "step seed"]]


@takes_study
@checked
def score_heads_over_training(
    checkpoint: Training,
    names: Sequence[str] = ("previous_token", "induction"),
    *,
    prompts: Prompts | None = None,
    n_prompts: int = 64,
    seed: int = 0,
    progress: bool | None = None,
) -> HeadsOverTraining:
    """Measure when heads of some kinds form: their highest scores at each snapshot (Olsson et al. 2022, argument 1).

    Args:
        checkpoint: a checkpoint with snapshots (else `CheckpointError`), or models (see `measure_over_training`).
        names: names of scores, defined in `score_heads`.
        prompts: for models on prompts of points; token models draw sequences.

    Returns:
        `steps`, and `scores` by name, `[step seed]`: the mean score over prompts of the best head at that step.

    Example:
        >>> score_heads_over_training(load_checkpoint("induction-2l")).scores["induction"].shape
        torch.Size([6, 3])
    """

    def measure(model: Any) -> list[float]:
        scores = score_heads(model, prompts=prompts, n_prompts=n_prompts, seed=seed, progress=False)
        return [scores.mean(name).max().item() for name in names]

    steps, rows = measure_snapshots(checkpoint, measure, progress)
    return HeadsOverTraining(steps, dict(zip(names, torch.tensor(rows).unbind(-1), strict=True)))


def measure_snapshots(
    checkpoint: Training, measure: Callable[[Any], Any], progress: bool | None, *, dtype: torch.dtype | None = None
) -> tuple[tuple[int, ...], list[Any]]:
    """Return the snapshots' steps, and at each a list with the measure of every seed's model.

    Models are converted to `dtype`, those of the caller as copies. A checkpoint's models are the same objects at each
    snapshot: the measure cannot keep them.
    """
    bar = partial(progress_bar, unit="snapshot", progress=progress, desc="snapshots")
    if not isinstance(checkpoint, Checkpoint):
        if not checkpoint:
            raise ValueError("checkpoint must be a checkpoint, or one or more models, got none")
        models = checkpoint if isinstance(checkpoint, Mapping) else dict(enumerate(checkpoint))
        loaded = (models[step]() if inspect.isroutine(models[step]) or isinstance(models[step], partial)
                  else models[step] for step in sorted(models))  # fmt: skip
        rows = ([each] if not isinstance(each, list | tuple) else each for each in loaded)
        measured = [
            [measure(model if dtype is None else deepcopy(model).to(dtype)) for model in row]
            for row in bar(rows, total=len(models))
        ]
        return tuple(sorted(models)), measured
    if checkpoint.snapshots is None:
        raise CheckpointError(f"{checkpoint.name} was saved without snapshots")
    steps = tuple(checkpoint.snapshots.steps)
    snapshots = bar(checkpoint.iterate_snapshots(dtype), total=len(steps))
    return steps, [[measure(model) for model in models] for models in snapshots]


@dataclass(frozen=True, eq=False)
class Transitions(Result):
    """The steps at which the loss curves of a training fall from their plateau; see `find_transitions`.

    Attributes:
        plateau: the loss that each seed falls from, `[seed]`: the argument of that name, or the first loss.
        final: the median of each seed's last losses, `[seed]`.
        before: the last evaluated step at which less than half of the fall is done, `[seed]`; NaN without a transition.
        after: the next evaluated step, `[seed]`. Both are the first step if more than half is done at all steps.
        start: the first evaluated step after which a tenth of the fall is permanently done, `[seed]`.
        end: that for nine tenths, `[seed]`; NaN also if they are not done at the end.
    """

    plateau: Float[Tensor, "seed"]
    final: Float[Tensor, "seed"]
    before: Float[Tensor, "seed"]
    after: Float[Tensor, "seed"]
    start: Float[Tensor, "seed"]
    end: Float[Tensor, "seed"]

    @property
    def fell(self) -> Bool[Tensor, "seed"]:
        """True for seeds with a transition."""
        return ~self.after.isnan()

    @property
    def steps(self) -> Float[Tensor, "seed"]:
        """The transition steps: the middle between `before` and `after`, `[seed]`; NaN without a transition."""
        return (self.before + self.after) / 2

    def mean_step(self, level: float = 0.95) -> Interval:
        """Return the mean transition step of the seeds that have one, with its interval (NaN without any)."""
        return interval(self.steps[self.fell], level, within=UNBOUNDED)

    def spread(self) -> float:
        """Return the latest transition step divided by the earliest one; NaN with fewer than two transitions."""
        steps = self.steps[self.fell]
        return (steps.max() / steps.min().clamp(min=1)).item() if len(steps) > 1 else float("nan")


@checked
def find_transitions(
    steps: Sequence[int],
    losses: Float[Tensor, "step seed"] | Sequence[Sequence[float]],
    *,
    plateau: Positive | None = None,
    fall: Fraction = 0.1,
) -> Transitions:
    """Find the training step at which each seed's loss falls from its plateau to its final value.

    The final value is the median of the last twentieth of the evaluations. The transition is where the loss has
    permanently fallen by half of the way; there is none if the last loss is above that. Source: von Oswald et al. 2023,
    A.11.

    Args:
        steps: steps of the evaluations, increasing.
        losses: `[step seed]`, e.g. a checkpoint record's `curve["eval_loss"]`.
        plateau: the loss at which training lingers, such as that of predicting 0; by default each seed's first loss.
        fall: least fall of a loss with a transition, as a share of its plateau.

    Returns:
        A `Transitions`: `steps`, the transition step of each seed, `[seed]` (NaN without one); `mean_step()`.

    Example:
        >>> curve = load_checkpoint("lsa-1l").record["curve"]
        >>> print(find_transitions(curve["eval_step"], curve["eval_loss"]).mean_step())
    """
    values = torch.as_tensor(losses, dtype=torch.float64)
    if values.ndim != 2 or values.shape[0] != len(steps) or len(steps) < 2:
        raise ValueError(f"losses must be [step seed] with {len(steps)} >= 2 steps, got shape {tuple(values.shape)}")
    if any(b <= a for a, b in itertools.pairwise(steps)):
        raise ValueError(f"steps must increase, got {list(steps)}")
    if not values.isfinite().all():
        raise ValueError("losses must be finite")
    columns = [_transition(list(steps), curve, plateau or curve[0].item(), fall) for curve in values.unbind(1)]
    return Transitions(*torch.tensor(columns, dtype=torch.float64).reshape(-1, 6).unbind(-1))


def _transition(steps: list[int], losses: Float[Tensor, "step"], plateau: float, fall: float) -> tuple[float, ...]:
    final = losses[-max(1, len(losses) // 20) :].quantile(0.5).item()
    no_transition = plateau, final, *[math.nan] * 4
    if final >= plateau or plateau - final < fall * plateau:
        return no_transition

    def crossing(share: float) -> int:
        """Number of evaluations until the loss stays below the plateau minus that share of the fall."""
        above = losses > plateau - share * (plateau - final)
        return int(above.nonzero().max()) + 1 if above.any() else 0

    start, middle, end = map(crossing, (0.1, 0.5, 0.9))
    if middle == len(steps):  # the last loss is above the threshold
        return no_transition
    fallen = float(steps[end]) if end < len(steps) else math.nan
    return plateau, final, *map(float, (steps[max(middle - 1, 0)], steps[middle], steps[start])), fallen
