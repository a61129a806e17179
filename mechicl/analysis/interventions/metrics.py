"""Metrics of interventions: functions of the predictions of a batch of prompts that return a number for each."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.learners import Learner
from mechicl.prompts import At, Prompts, TokenSequences

Inputs = Prompts | TokenSequences | Tensor
"""What a model reads: prompts of points, sequences of tokens, or token ids `[prompt pos]`."""

Metric = Callable[[Tensor], Tensor]
"""Predictions `[prompt ...]` (the query's `[prompt y]`, or logits `[prompt d_vocab]`) to `[prompt]`."""


@checked
def squared_error(prompts: Prompts) -> Metric:
    """Squared error of the predictions to these prompts' targets, averaged over the target's dimensions.

    Predictions of the query alone `[prompt y]` are compared with its target, those of all points `[prompt point y]`
    with all of them. The metric raises a ValueError for predictions of another shape.

    Example:
        >>> squared_error(prompts)(model.predict(prompts)).shape
        torch.Size([4])
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
def distance_to(learner: Learner, prompts: Prompts) -> Metric:
    """Euclidean distance of the query's prediction to that of another learner on these prompts.

    The metric raises a ValueError for predictions of another shape, such as those of other prompts.

    Example:
        >>> distance_to(AlgorithmLearner(algorithms.ols), prompts)(model.predict(prompts)).shape
        torch.Size([4])
    """
    reference = learner.predict(prompts).detach()

    def distance(predictions: Tensor) -> Tensor:
        if predictions.shape != reference.shape:
            raise ValueError(
                f"predictions must be [prompt y] = {tuple(reference.shape)}, as the reference learner's on its "
                f"prompts, got {tuple(predictions.shape)}"
            )
        return (predictions - reference.to(predictions)).norm(dim=-1)

    return distance


@checked
def logit_difference(correct: Int[Tensor, "prompt"], wrong: Int[Tensor, "prompt"]) -> Metric:
    """Logit of the correct token minus that of the wrong one, at the last position (`at="query"`).

    The metric raises a ValueError for logits of another shape than `[prompt d_vocab]`, or ids beyond their vocabulary.

    Raises:
        ValueError: negative ids.

    Example:
        >>> logit_difference(torch.tensor([1, 2]), torch.tensor([0, 0]))(torch.randn(2, 5)).shape
        torch.Size([2])
    """
    for name, ids in (("correct", correct), ("wrong", wrong)):
        if (ids < 0).any():
            raise ValueError(f"{name} must be token ids of at least 0, got {int(ids.min())}")

    def difference(logits: Tensor) -> Tensor:
        if logits.ndim != 2 or not len(logits) == len(correct) == len(wrong):
            raise ValueError(
                f"logits {tuple(logits.shape)} for {len(correct)} correct and {len(wrong)} wrong tokens: a difference "
                f"is of the last position, at='query'"
            )
        _check_vocabulary(correct, logits, "correct")
        _check_vocabulary(wrong, logits, "wrong")
        rows = torch.arange(len(logits), device=logits.device)
        return logits[rows, correct.to(logits.device)] - logits[rows, wrong.to(logits.device)]

    return difference


@checked
def next_token_loss(targets: Int[Tensor, "prompt"] | Int[Tensor, "prompt pos"]) -> Metric:
    """Cross entropy of the target tokens, in nats: at the last position, or averaged over all that are not -100.

    The second is for logits at all positions `[prompt pos d_vocab]` (`at="positions"`). The metric raises a
    ValueError for logits of another shape, and for targets beyond their vocabulary.

    Raises:
        ValueError: a prompt without a target, or negative ids other than -100.

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


Metrics = Metric | Mapping[str, Metric] | None
"""Metrics as they are asked for: one, several by name, or None for the loss."""


def name_metrics(metrics: Metrics, prompts: Inputs, at: At) -> dict[str, Metric]:
    """Metrics by name; for None the loss against the prompts' targets, if there are any for what is read."""
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
    """Every metric's value for each prompt, by name; raises what `evaluate_metric` raises."""
    return {name: evaluate_metric(name, metric, predictions) for name, metric in metrics.items()}


def evaluate_metric(name: str, metric: Metric, predictions: Float[Tensor, "prompt ..."]) -> Float[Tensor, "prompt"]:
    """A metric's value for each prompt; refuses (ValueError) one that returns another shape, or no tensor.

    What is no function is a TypeError.
    """
    if not callable(metric) or isinstance(metric, type):
        raise TypeError(f"the metric {name!r} must be a function of predictions, got {metric!r}")
    values = metric(predictions)
    if not isinstance(values, Tensor) or values.shape != predictions.shape[:1]:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"the metric {name!r} must return a number a prompt, [{len(predictions)}], for predictions "
            f"{tuple(predictions.shape)}; got {got}. Do not average over prompts: the sweep keeps them apart"
        )
    return values if values.is_floating_point() else values.to(predictions.dtype)
