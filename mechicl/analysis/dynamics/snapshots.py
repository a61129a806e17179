"""What happens during training: alignment at the snapshots, and the step at which a loss curve falls."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.behaviour.alignment import align
from mechicl.analysis.heads.scores import score_heads
from mechicl.checkpoints import Checkpoint, CheckpointError
from mechicl.learners import Learner
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, interval


@dataclass(frozen=True, eq=False)
class AlignmentOverTraining:
    """Alignment with a learner at the snapshots of a training.

    Attributes:
        steps: of the snapshots.
        prediction_distance: means over prompts, `[step seed]`.
        sensitivity_cosine: likewise, over the prompts where it is defined.
        sensitivity_distance: likewise.
        mse: likewise.
    """

    steps: tuple[int, ...]
    prediction_distance: Float[Tensor, "step seed"]
    sensitivity_cosine: Float[Tensor, "step seed"]
    sensitivity_distance: Float[Tensor, "step seed"]
    mse: Float[Tensor, "step seed"]


def align_over_training(checkpoint: Checkpoint, learner: Learner, prompts: Prompts) -> AlignmentOverTraining:
    """Compare the models of a training with a learner as they were at each snapshot, in float64.

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
    if checkpoint.snapshots is None:
        raise CheckpointError(f"{checkpoint.name} was saved without snapshots")
    rows = []
    for index in range(len(checkpoint.snapshots.steps)):
        row = []
        for model in checkpoint.models_at(index):
            model = model.double()
            alignment = align(model, learner, prompts)
            with torch.no_grad():
                errors = (model.predict(prompts) - prompts.query.ys).double().square()
            row.append([value.nanmean() for _, value in alignment.samples().items()] + [errors.mean()])
        rows.append(torch.tensor(row))
    return AlignmentOverTraining(checkpoint.snapshots.steps, *torch.stack(rows).unbind(-1))


@dataclass(frozen=True, eq=False)
class HeadsOverTraining:
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
        n_prompts: how many of those.
        seed: and their seed.

    Raises:
        CheckpointError: the checkpoint was saved without snapshots.
        ValueError: as for `score_heads`.

    Source: Olsson et al. 2022, argument 1.

    Example:
        >>> score_heads_over_training(load_checkpoint("induction-2l")).scores["induction"].shape
        torch.Size([10, 3])
    """
    if checkpoint.snapshots is None:
        raise CheckpointError(f"{checkpoint.name} was saved without snapshots")
    rows: dict[str, list[list[float]]] = {name: [] for name in names}
    for index in range(len(checkpoint.snapshots.steps)):
        models = checkpoint.models_at(index)
        found = [score_heads(model, prompts=prompts, n_prompts=n_prompts, seed=seed) for model in models]
        for name in names:
            rows[name].append([of.mean(name).max().item() for of in found])
    return HeadsOverTraining(checkpoint.snapshots.steps, {name: torch.tensor(row) for name, row in rows.items()})


@dataclass(frozen=True, eq=False)
class Transitions:
    """Where the loss curves of a training fall from their plateau.

    Attributes:
        plateau: the loss that each seed starts from, `[seed]`.
        final: each seed's loss at the end, `[seed]`.
        before: the last evaluated step at which the loss is above the threshold, `[seed]`; NaN without a transition.
        after: the next evaluated step: the transition lies between the two, `[seed]`. Both are the first step where
            the loss is below the threshold from the first on.
        start: the first evaluated step from which a tenth of the fall is behind, `[seed]`.
        end: the same for nine tenths, `[seed]`; NaN also where they are not behind at the last evaluation.
    """

    plateau: Float[Tensor, "seed"]
    final: Float[Tensor, "seed"]
    before: Float[Tensor, "seed"]
    after: Float[Tensor, "seed"]
    start: Float[Tensor, "seed"]
    end: Float[Tensor, "seed"]

    @property
    def fell(self) -> Tensor:
        """Which seeds have a transition, `[seed]`."""
        return ~self.after.isnan()

    @property
    def steps(self) -> Float[Tensor, "seed"]:
        """The middle between `before` and `after`."""
        return (self.before + self.after) / 2

    def interval(self, level: float = 0.95) -> Interval:
        """Mean transition step of the seeds that have one, with its interval over them (NaN if there is none)."""
        return interval(self.steps[self.fell], level)

    def spread(self) -> float:
        """Latest over earliest transition; NaN with fewer than two."""
        steps = self.steps[self.fell]
        return (steps.max() / steps.min().clamp(min=1)).item() if len(steps) > 1 else float("nan")


def find_transitions(
    steps: Sequence[int],
    losses: Float[Tensor, "step seed"] | Sequence[Sequence[float]],
    *,
    plateau: float | None = None,
    fall: float = 0.1,
) -> Transitions:
    """Find the step at which each seed's loss falls from its plateau to its final value.

    The final value is the median of the last twentieth of the evaluations. The transition is where the loss has come
    half of the way from the plateau to it for good; there is none where the last loss is above that.

    Args:
        steps: of the evaluations, increasing.
        losses: `[step seed]`, e.g. a checkpoint record's `curve["eval_loss"]`.
        plateau: the loss at which training lingers, such as that of predicting 0; by default the first loss, which
            is the same where the initial weights are small.
        fall: how far a loss must fall, relative to its plateau, to have a transition at all.

    Raises:
        ValueError: fewer than two evaluations, steps that do not increase, losses of another length or that are not
            finite, a plateau that is not positive and finite, or a fall that is not between 0 and 1.

    Source: von Oswald et al. 2023, A.11, where transitions are looked at.

    Example:
        >>> curve = load_checkpoint("lsa-1l").record["curve"]
        >>> print(find_transitions(curve["eval_step"], curve["eval_loss"]).interval())
    """
    values = torch.as_tensor(losses, dtype=torch.float64)
    if values.ndim != 2 or values.shape[0] != len(steps) or len(steps) < 2:
        raise ValueError(f"losses must be [step seed] with {len(steps)} >= 2 steps, got shape {tuple(values.shape)}")
    if any(b <= a for a, b in itertools.pairwise(steps)):
        raise ValueError(f"steps must increase, got {list(steps)}")
    if not values.isfinite().all():
        raise ValueError("losses must be finite")
    if plateau is not None and not (plateau > 0 and math.isfinite(plateau)):
        raise ValueError(f"plateau must be positive and finite, got {plateau}")
    if not 0 <= fall <= 1:
        raise ValueError(f"fall must be between 0 and 1, got {fall}")
    found = [
        _transition(list(steps), own, own[0].item() if plateau is None else plateau, fall) for own in values.unbind(1)
    ]
    return Transitions(*torch.tensor(found, dtype=torch.float64).reshape(-1, 6).unbind(-1))


def _transition(steps: list[int], losses: Float[Tensor, "step"], plateau: float, fall: float) -> tuple[float, ...]:
    """Plateau, final, before, after, start, end of one seed."""
    final = losses[-max(1, len(losses) // 20) :].median().item()
    none = plateau, final, *[math.nan] * 4
    if final >= plateau or plateau - final < fall * plateau:
        return none

    def crossing(share: float) -> int:
        """Number of evaluations until the loss stays below plateau minus that share of the fall."""
        above = losses > plateau - share * (plateau - final)
        return int(above.nonzero().max()) + 1 if above.any() else 0

    start, middle, end = map(crossing, (0.1, 0.5, 0.9))
    if middle == len(steps):  # the last loss is above the threshold
        return none
    fallen = float(steps[end]) if end < len(steps) else math.nan
    return plateau, final, *map(float, (steps[max(middle - 1, 0)], steps[middle], steps[start])), fallen
