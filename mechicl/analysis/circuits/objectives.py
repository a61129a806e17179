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
"""A metric as it is asked for: one as for `patch`, None for the loss where there are targets, or "outputs"."""
OUTPUTS = "largest change of an output"
"""The name of the metric that stands in where none is given: how far the outputs are from the whole model's."""


@dataclass(frozen=True, eq=False)
class Objective:
    """A number for each prompt, and how far it is from the whole model's, on a scale where ablating everything is 1.

    Attributes:
        name: of the metric.
        metric: None for the outputs themselves: the largest absolute change of any output that is read.
        predictions: of the whole model.
        full: the metric of the whole model, `[prompt]`.
        ablated: with everything cut, `[prompt]`.
    """

    name: str
    metric: Metric | None
    predictions: Float[Tensor, "prompt ..."]
    full: Float[Tensor, "prompt"]
    ablated: Float[Tensor, "prompt"]
    scale: float = 0.0
    """What cutting everything does: the change of the mean, or of the outputs the largest change of any prompt."""

    def __post_init__(self):
        if not self.scale:
            moved = self.ablated.max() if self.metric is None else (self.ablated - self.full).mean().abs()
            object.__setattr__(self, "scale", moved.item())

    def measure(self, predictions: Float[Tensor, "prompt ..."]) -> Float[Tensor, "prompt"]:
        """The metric of these predictions."""
        return evaluate(self.name, self.metric, predictions, self.predictions)

    def shift(self, values: Float[Tensor, "prompt"]) -> float:
        """How far a metric `[prompt]` is from the whole model's: of its mean, or of the outputs on any prompt.

        Not a number is as far as can be.
        """
        moved = values.max() if self.metric is None else (values - self.full).mean().abs()
        return moved.item() / self.scale if moved.isfinite() else torch.inf

    def linear(self, predictions: Float[Tensor, "prompt ..."], prompts: slice, seed: int) -> Float[Tensor, "prompt"]:
        """What gradients are taken of: the metric, or a sum of the outputs with random signs, which mixes them."""
        if self.metric is None:
            signs = torch.randint(2, self.predictions.shape[1:], generator=torch.Generator().manual_seed(seed)) * 2 - 1
            return (predictions * signs.to(predictions)).flatten(1).sum(1)
        others = self.predictions.detach()
        whole = torch.cat([others[: prompts.start], predictions, others[prompts.start + len(predictions) :]])
        return self.measure(whole)[prompts.start : prompts.start + len(predictions)]


def check_objectives(objectives: Sequence[Objective]) -> tuple[Objective, ...]:
    """The same, for what cut edges carry one thing after the other.

    Where cutting everything changes nothing with one of them, as zero does in a model that says 0, the scale is that of
    the one with which it changes most.

    Raises:
        ValueError: a metric that is not finite, or that changes with none of them.
    """
    largest = max(objectives, key=lambda each: each.scale)
    check_objective(largest)
    return tuple(
        check_objective(replace(each, scale=largest.scale) if each.scale <= 1e-6 * largest.scale else each)
        for each in objectives
    )


def make_objective(
    metrics: OneMetric,
    prompts: Inputs,
    at: At,
    whole: Float[Tensor, "prompt ..."],
    ablated: Float[Tensor, "prompt ..."],
) -> Objective:
    """The one metric that is asked for, on the predictions of the whole model and with everything cut.

    Raises:
        ValueError: several metrics.
    """
    name, metric = name_metric(metrics, prompts, at)
    full, cut = (evaluate(name, metric, predictions, whole) for predictions in (whole, ablated))
    return Objective(name, metric, whole, full, cut)


def name_metric(metrics: OneMetric, prompts: Inputs, at: At) -> tuple[str, Metric | None]:
    """The metric that is asked for, or the loss of prompts with targets; None for the outputs themselves.

    Raises:
        ValueError: several metrics, none in a dictionary, or a word other than "outputs".
    """
    if metrics == "outputs":
        return OUTPUTS, None
    if isinstance(metrics, str):
        raise ValueError(f'metrics={metrics!r} is not "outputs", the only one with a name: give a function')
    named = name_metrics(metrics, prompts, at)
    if len(named) > 1 or (metrics is not None and not named):
        raise ValueError(f"a circuit carries one metric, got {list(named) or 'none'}: give one, metrics=")
    return next(iter(named.items()), (OUTPUTS, None))


def check_objective(objective: Objective) -> Objective:
    """The same; refuses (ValueError) a metric that is not finite, or the same when everything is cut."""
    name, full = objective.name, objective.full
    for values, when in ((full, "of the whole model"), (objective.ablated, "with everything cut")):
        if not values.isfinite().all():
            raise ValueError(
                f"{name!r} {when} is not finite on {int((~values.isfinite()).sum())} of {len(values)} prompts: give a "
                f"metric that is finite whatever is predicted, such as a difference of logits, or leave them out"
            )
    size = full.abs().mean() if objective.metric is not None else objective.predictions.abs().max()
    if not objective.scale > 1e-6 * (size.item() + 1e-30):  # what rounding does is no change
        raise ValueError(
            f"{name!r} does not change when every head and MLP is ablated: there is nothing to find. A metric that is "
            f"constant, a reference equal to the prompts, or a model that only reads its embedding does that. "
            f"Give other prompts, another metric, or another method of cutting"
        )
    return objective


def evaluate(name: str, metric: Metric | None, predictions: Tensor, whole: Tensor) -> Float[Tensor, "prompt"]:
    """A metric's value for each prompt; without one, the largest absolute change of any output."""
    if metric is not None:
        return evaluate_metric(name, metric, predictions)
    return (predictions - whole).abs().flatten(1).amax(1)
