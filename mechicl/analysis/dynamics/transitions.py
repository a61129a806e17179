"""The step at which a loss curve falls from its plateau."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.base.arguments import Fraction, Positive, checked
from mechicl.statistics import Interval, Result, interval


@dataclass(frozen=True, eq=False)
class Transitions(Result):
    """The steps at which the loss curves of a training fall from their plateau.

    Attributes:
        plateau: the loss that each seed starts from, `[seed]`.
        final: each seed's loss at the end, `[seed]`.
        before: the last evaluated step at which the loss is above the threshold, `[seed]`; NaN without a transition.
        after: the next evaluated step, `[seed]`. Both are the first step if the loss is always below the threshold.
        start: the first evaluated step after which a tenth of the fall is permanently done, `[seed]`.
        end: the first evaluated step after which nine tenths of it are; also NaN if they are not at the end, `[seed]`.
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
        """The middle between `before` and `after`."""
        return (self.before + self.after) / 2

    def mean_step(self, level: float = 0.95) -> Interval:
        """Mean transition step of the seeds that have one, with its interval over them (NaN if there is none)."""
        return interval(self.steps[self.fell], level)

    def spread(self) -> float:
        """Latest over earliest transition; NaN with fewer than two."""
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
    """Find the step at which each seed's loss falls from its plateau to its final value.

    The final value is the median of the last twentieth of the evaluations. The transition is where the loss has
    permanently fallen by half of the way; there is none if the last loss is above that.

    Args:
        steps: steps of the evaluations, increasing.
        losses: `[step seed]`, e.g. a checkpoint record's `curve["eval_loss"]`.
        plateau: the loss at which training lingers, such as that of predicting 0; by default the first loss.
        fall: least fall of a loss with a transition, relative to its plateau.

    Source: von Oswald et al. 2023, A.11.

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
    """The fields of `Transitions` for one seed, in their order."""
    final = losses[-max(1, len(losses) // 20) :].median().item()
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
