"""What a circuit has to keep: a metric, or the outputs themselves; and how far a run is from it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.interventions.metrics import Inputs, Metric, Metrics, evaluate_metric, name_metrics
from mechicl.prompts import At

OneMetric = Metrics | Literal["outputs"]
"""A metric as the user gives it: one as for `patch`, None for the loss where there are targets, or "outputs"."""
OUTPUTS = "largest change of an output"
"""The name of the default metric without targets: how far the outputs are from the whole model's."""


@dataclass(frozen=True, eq=False)
class Objective:
    """A number per prompt, and its distance from the whole model's on a scale where cutting everything is 1.

    Attributes:
        name: of the metric.
        metric: None for the outputs themselves: the largest absolute change of any output.
        predictions: of the whole model.
        full: the metric of the whole model, `[prompt]`.
        ablated: with everything cut, `[prompt]`.
        scale: the effect of cutting everything: on the mean, or for the outputs the largest change of any prompt.
    """

    name: str
    metric: Metric | None
    predictions: Float[Tensor, "prompt ..."]
    full: Float[Tensor, "prompt"]
    ablated: Float[Tensor, "prompt"]
    scale: float = 0.0

    def __post_init__(self):
        if not self.scale:
            moved = self.ablated.max() if self.metric is None else (self.ablated - self.full).mean().abs()
            object.__setattr__(self, "scale", moved.item())

    def measure(self, predictions: Float[Tensor, "prompt ..."]) -> Float[Tensor, "prompt"]:
        """The metric of these predictions."""
        return evaluate(self.name, self.metric, predictions, self.predictions)

    def shift(self, values: Float[Tensor, "prompt"]) -> float:
        """Distance of a metric `[prompt]` from the whole model's: of its mean, or for the outputs on the worst prompt.

        Infinite if the distance is not finite.
        """
        moved = values.max() if self.metric is None else (values - self.full).mean().abs()
        return moved.item() / self.scale if moved.isfinite() else torch.inf

    def linear(self, predictions: Float[Tensor, "prompt ..."], prompts: slice, seed: int) -> Float[Tensor, "prompt"]:
        """What gradients are taken of: the metric, or a sum of the outputs with random signs."""
        if self.metric is None:
            signs = torch.randint(2, self.predictions.shape[1:], generator=torch.Generator().manual_seed(seed)) * 2 - 1
            return (predictions * signs.to(predictions)).flatten(1).sum(1)
        others = self.predictions.detach()
        whole = torch.cat([others[: prompts.start], predictions, others[prompts.start + len(predictions) :]])
        return self.measure(whole)[prompts.start : prompts.start + len(predictions)]


def check_objectives(objectives: Sequence[Objective]) -> tuple[Objective, ...]:
    """The objectives of the graphs of one problem, with a scale where cutting everything has no effect.

    With zero on cut edges, cutting everything can have no effect, for instance in a model that outputs 0: the scale is
    then that of the graph in which it has the largest effect.

    Raises:
        ValueError: a metric that is not finite, or that never changes.
    """
    largest = max(objectives, key=lambda each: each.scale)
    _check(largest)
    several = [replace(o, scale=largest.scale) if o.scale <= 1e-6 * largest.scale else o for o in objectives]
    for objective in several:
        _check(objective)
    return tuple(several)


def _check(objective: Objective) -> None:
    name, full = objective.name, objective.full
    for values, when in ((full, "of the whole model"), (objective.ablated, "with everything cut")):
        if not values.isfinite().all():
            raise ValueError(
                f"{name!r} {when} is not finite on {int((~values.isfinite()).sum())} of {len(values)} prompts: give a "
                f"metric that is finite for all predictions, such as a difference of logits, or leave these prompts out"
            )
    size = full.abs().mean() if objective.metric is not None else objective.predictions.abs().max()
    if not objective.scale > 1e-6 * (size.item() + 1e-30):  # smaller changes are rounding
        raise ValueError(
            f"{name!r} does not change when every head and MLP is ablated: there is nothing to find. The metric is "
            f"constant, the reference equals the prompts, or the model only reads its embedding. "
            f"Give other prompts, another metric, or another method of cutting"
        )


def name_metric(metrics: OneMetric, prompts: Inputs, at: At) -> tuple[str, Metric | None]:
    """The name and function of the one metric, by default the loss of prompts with targets; None for the outputs.

    Raises:
        ValueError: several metrics, none in a dictionary, or a word other than "outputs".
    """
    if metrics == "outputs":
        return OUTPUTS, None
    if isinstance(metrics, str):
        raise ValueError(f'metrics={metrics!r} is not "outputs", the only metric with a name: give a function')
    named = name_metrics(metrics, prompts, at)
    if len(named) > 1 or (metrics is not None and not named):
        raise ValueError(f"a circuit carries one metric, got {list(named) or 'none'}: give one, metrics=")
    return next(iter(named.items()), (OUTPUTS, None))


def evaluate(name: str, metric: Metric | None, predictions: Tensor, whole: Tensor) -> Float[Tensor, "prompt"]:
    """A metric's value per prompt; without one, the largest absolute change of any output."""
    if metric is not None:
        return evaluate_metric(name, metric, predictions)
    return (predictions - whole).abs().flatten(1).amax(1)
