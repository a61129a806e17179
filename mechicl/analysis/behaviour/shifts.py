"""How learners' losses change when prompts are drawn from another distribution than they were made for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.base.memory import MEMORY
from mechicl.base.progress import progress_bar
from mechicl.learners import Learner, squared_errors
from mechicl.statistics import Interval, Result, ratio_interval
from mechicl.statistics.results import index_of
from mechicl.tasks import LinearRegression

Scaled = Literal["input_scale", "weight_scale"]
FOREIGN_INPUTS = ("gaussian", "exponential", "laplace")
"""The three input distributions of von Oswald et al. 2023, A.2; each prompt draws one of them."""


@dataclass(frozen=True, eq=False)
class ShiftedLosses(Result):
    """Squared errors of several learners at several scales of the inputs or the weights.

    Attributes:
        learners: their names.
        scaled: which field of the task was scaled.
        scales: the factors.
        squared_errors: `[learner scale prompt]`, averaged over the target's dimensions; the same underlying random
            numbers at every scale.
    """

    learners: tuple[str, ...]
    scaled: str
    scales: tuple[float, ...]
    squared_errors: Float[Tensor, "learner scale prompt"]

    def mean(self) -> Float[Tensor, "learner scale"]:
        """Mean squared error."""
        return self.squared_errors.mean(-1)

    def ratio(self, learner: str, reference: str) -> list[Interval]:
        """Loss of one learner over another's at each scale, with an interval from the paired prompts (delta method)."""
        errors, others = (
            self.squared_errors[index_of("learner", name, self.learners)] for name in (learner, reference)
        )
        return [ratio_interval(*pair) for pair in zip(errors, others, strict=True)]


@checked
def measure_shifted_losses(
    learners: Mapping[str, Learner],
    task: LinearRegression,
    scales: Sequence[float] = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0),
    *,
    scaled: Scaled = "input_scale",
    n_prompts: int = 10_000,
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> ShiftedLosses:
    """Measure losses while the task's inputs or weights are scaled.

    For input distributions that training never showed, pass `task.replace(inputs=FOREIGN_INPUTS)`.

    Args:
        learners: the learners by name.
        task: the task to scale; scale 1 is the task itself.
        scales: factors on the task's own scale.
        scaled: "input_scale" or "weight_scale".
        n_prompts: number of prompts at each scale.
        seed: seed of the prompts; every scale uses the same random numbers.

    Source: von Oswald et al. 2023, A.2 and Fig. 6.

    Example:
        >>> step = AlgorithmLearner(algorithms.gradient_descent, dict(steps=1, step_size=0.6))
        >>> learners = {"trained": load("lsa-1l"), "step": step}
        >>> measure_shifted_losses(learners, LinearRegression(), n_prompts=512).ratio("trained", "step")
    """
    if not learners or not scales:
        raise ValueError("measure_shifted_losses() needs at least one learner and one scale")
    errors = []
    for scale in progress_bar(scales, unit="scale", progress=progress, desc="shifts"):
        prompts = task.replace(**{scaled: getattr(task, scaled) * scale}).sample(n_prompts, seed=seed)
        errors.append(torch.stack([squared_errors(each, prompts, memory=memory)[:, 0] for each in learners.values()]))
    return ShiftedLosses(tuple(learners), scaled, tuple(map(float, scales)), torch.stack(errors, dim=1))
