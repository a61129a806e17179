"""Metrics of interventions: functions that map predictions to one number per prompt `[prompt]`.

They raise a ValueError for predictions of another shape than their targets need, and for ids outside the vocabulary.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.base.arguments import calling, checked
from mechicl.base.precision import at_least_float32
from mechicl.prompts import At, Prompts, TokenSequences

Inputs = Prompts | TokenSequences | Tensor
"""Inputs of a model: prompts of points, sequences of tokens, or token ids `[prompt pos]`."""

Metric = Callable[[Tensor], Tensor]
"""Predictions `[prompt ...]` (the query's `[prompt y]`, or logits `[prompt d_vocab]`) to `[prompt]`. Predictions of
half-precision models are converted to float32 first."""


@checked
def squared_error(prompts: Prompts) -> Metric:
    """Make a metric for interventions: the squared error to these prompts' targets, averaged over their dimensions.

    The query's predictions `[prompt y]` are compared with its target, those of all points `[prompt point y]` with all
    targets, and averaged over points.

    Example:
        >>> patch(model, prompts, corrupt(prompts, "labels"), metrics=squared_error(prompts)).effect()
    """

    def loss(predictions: Tensor) -> Tensor:
        targets = prompts.ys.to(predictions)
        if predictions.ndim == 2:
            targets = targets[:, -1]
        if predictions.shape != targets.shape:
            raise ValueError(f"predictions {tuple(predictions.shape)} for targets {tuple(targets.shape)}")
        return (predictions - targets).square().flatten(1).mean(1)

    return loss


@checked
def logit_difference(correct: Int[Tensor, "prompt"], wrong: Int[Tensor, "prompt"]) -> Metric:
    """Make a metric for interventions: the logit of the correct token minus that of a wrong one, at the last position.

    It is a function of the last position's logits `[prompt d_vocab]` (`at="query"`).
    """
    for name, ids in (("correct", correct), ("wrong", wrong)):
        if (ids < 0).any():
            raise ValueError(f"{name} must be token ids of at least 0, got {int(ids.min())}")

    def difference(logits: Tensor) -> Tensor:
        if logits.ndim != 2 or not len(logits) == len(correct) == len(wrong):
            raise ValueError(f"logits must be [{len(correct)} d_vocab] (at='query'), got {[*logits.shape]}")
        _check_vocabulary(correct, logits, "correct")
        _check_vocabulary(wrong, logits, "wrong")
        rows = torch.arange(len(logits), device=logits.device)
        return logits[rows, correct.to(logits.device)] - logits[rows, wrong.to(logits.device)]

    return difference


@checked
def target_probability(targets: Int[Tensor, "prompt"]) -> Metric:
    """Make a metric for interventions: the probability of each prompt's target token, at the last position.

    It is a function of the last position's logits `[prompt d_vocab]` (`at="query"`).
    """
    loss = next_token_loss(targets)
    return lambda logits: (-loss(logits)).exp()


@checked
def next_token_loss(targets: Int[Tensor, "prompt"] | Int[Tensor, "prompt pos"]) -> Metric:
    """Make a metric for interventions: the cross entropy of target tokens in nats, as a mean over positions with one.

    Args:
        targets: the tokens to predict: one per prompt, for the last position (`at="query"`), or one per position
            (`at="positions"`): entry p is the token that follows position p, or -100 for none.

    Example:
        >>> next_token_loss(torch.tensor([1, 2]))(torch.randn(2, 5)).shape
        torch.Size([2])
    """
    if ((targets < 0) & (targets != -100)).any():
        raise ValueError(f"targets must be token ids of at least 0, or -100 for none, got {int(targets.min())}")
    if ((targets >= 0).flatten(1).sum(1) == 0 if targets.ndim > 1 else targets < 0).any():
        raise ValueError("every prompt needs a target that is not -100")

    def loss(logits: Tensor) -> Tensor:
        labels = targets.to(logits.device)
        if logits.shape[:-1] != labels.shape:
            at = "query" if labels.ndim == 1 else "positions"
            raise ValueError(f"logits {tuple(logits.shape)} for targets {tuple(labels.shape)}: these need at={at!r}")
        _check_vocabulary(labels, logits, "targets")
        if logits.ndim == 2:
            return F.cross_entropy(logits, labels, reduction="none")
        nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return nats.sum(1) / (labels >= 0).sum(1)

    return loss


def _check_vocabulary(ids: Tensor, logits: Tensor, name: str) -> None:
    if ids.numel() and (largest := int(ids.max())) >= logits.shape[-1]:
        raise ValueError(f"{name} must be ids in the vocabulary, 0 to {logits.shape[-1] - 1}, got {largest}")


SomeMetrics = Metric | Mapping[str, Metric] | None
"""The argument `metrics`: one, several by name, or None for the loss."""


def name_metrics(metrics: SomeMetrics, prompts: Inputs, at: At) -> dict[str, Metric]:
    """Name the metrics of an argument; None is the loss against the prompts' targets, if these predictions have any."""
    if metrics is not None:
        return dict(metrics) if isinstance(metrics, Mapping) else {"metric": metrics}
    if isinstance(prompts, Prompts) and at != "positions":
        return {"loss": squared_error(prompts)}
    if isinstance(prompts, TokenSequences):
        targets = prompts.targets()
        if at == "query" and (targets[:, -1] < 0).any():
            raise ValueError("a sequence's last token has no target: take at='positions', or give metrics=")
        return {"loss": next_token_loss(targets if at == "positions" else targets[:, -1])}
    return {}


def evaluate_metrics(metrics: Mapping[str, Metric], predictions: Float[Tensor, "prompt ..."]) -> dict[str, Tensor]:
    """Evaluate metrics for each prompt, by name; errors are those of `evaluate_metric`."""
    return {name: evaluate_metric(name, metric, predictions) for name, metric in metrics.items()}


def evaluate_metric(name: str, metric: Metric, predictions: Float[Tensor, "prompt ..."]) -> Float[Tensor, "prompt"]:
    """Evaluate a metric for each prompt; a ValueError if it does not return one number per prompt."""
    if not callable(metric) or isinstance(metric, type):
        raise TypeError(f"the metric {name!r} must be a function of predictions, got {metric!r}")
    predictions = at_least_float32(predictions)
    with calling(f"metric {name!r}, given predictions of {predictions.dtype},"):
        values = metric(predictions)
    if not isinstance(values, Tensor) or values.shape != predictions.shape[:1]:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"the metric {name!r} must return one number per prompt, [{len(predictions)}], got {got}")
    return at_least_float32(values if values.is_floating_point() else values.to(predictions.dtype))


def evaluate_part(
    name: str,
    metric: Metric,
    predictions: Float[Tensor, "row ..."],
    prompts: slice,
    others: Float[Tensor, "prompt ..."],
) -> Float[Tensor, "row"]:
    """Evaluate a metric, which is of all prompts, for the predictions of some; `others` has predictions of all."""
    stop = prompts.start + len(predictions)
    joined = torch.cat([others[: prompts.start], predictions, others[stop:]])
    return evaluate_metric(name, metric, joined)[prompts.start : stop]
