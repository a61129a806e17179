"""Metrics of interventions: functions of the predictions of a batch of prompts that return a number for each."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.learners import Learner
from mechicl.prompts import Prompts

Metric = Callable[[Tensor], Tensor]
"""Predictions `[prompt ...]` (the query's `[prompt y]`, or logits `[prompt d_vocab]`) to `[prompt]`."""


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


def distance_to(learner: Learner, prompts: Prompts) -> Metric:
    """Euclidean distance of the query's prediction to that of another learner on these prompts.

    Example:
        >>> distance_to(AlgorithmLearner(algorithms.ols), prompts)(model.predict(prompts)).shape
        torch.Size([4])
    """
    reference = learner.predict(prompts).detach()

    def distance(predictions: Tensor) -> Tensor:
        return (predictions - reference.to(predictions)).norm(dim=-1)

    return distance


def logit_difference(correct: Int[Tensor, "prompt"], wrong: Int[Tensor, "prompt"]) -> Metric:
    """Logit of the correct token minus that of the wrong one, at the last position (`at="query"`).

    The metric raises a ValueError for logits of another shape than `[prompt d_vocab]`.
    """

    def difference(logits: Tensor) -> Tensor:
        if logits.ndim != 2 or not len(logits) == len(correct) == len(wrong):
            raise ValueError(
                f"logits {tuple(logits.shape)} for {len(correct)} correct and {len(wrong)} wrong tokens: a difference "
                f"is of the last position, at='query'"
            )
        rows = torch.arange(len(logits), device=logits.device)
        return logits[rows, correct.to(logits.device)] - logits[rows, wrong.to(logits.device)]

    return difference


def next_token_loss(targets: Int[Tensor, "prompt"] | Int[Tensor, "prompt pos"]) -> Metric:
    """Cross entropy of the target tokens, in nats: at the last position, or averaged over all that are not -100.

    The second is for logits at all positions `[prompt pos d_vocab]` (`at="positions"`). The metric raises a
    ValueError for
    logits of another shape, and for a prompt without a target.
    """
    if ((targets >= 0).flatten(1).sum(1) == 0 if targets.ndim > 1 else targets < 0).any():
        raise ValueError("every prompt needs a target that is not -100")

    def loss(logits: Tensor) -> Tensor:
        wanted = targets.to(logits.device)
        if logits.shape[:-1] != wanted.shape:
            at = "query" if wanted.ndim == 1 else "positions"
            raise ValueError(f"logits {tuple(logits.shape)} for targets {tuple(wanted.shape)}: these need at={at!r}")
        if logits.ndim == 2:
            return F.cross_entropy(logits, wanted, reduction="none")
        nats = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)
        return nats.sum(1) / (wanted >= 0).sum(1)

    return loss


def all_measured(metrics: Mapping[str, Metric], predictions: Float[Tensor, "prompt ..."]) -> dict[str, Tensor]:
    """Every metric's value for each prompt, by name; errors as for `measured`."""
    return {name: measured(name, metric, predictions) for name, metric in metrics.items()}


def measured(name: str, metric: Metric, predictions: Float[Tensor, "prompt ..."]) -> Float[Tensor, "prompt"]:
    """A metric's value for each prompt.

    Raises:
        ValueError: it returned another shape than `[prompt]`, or no tensor.
    """
    values = metric(predictions)
    if not isinstance(values, Tensor) or values.shape != predictions.shape[:1]:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"the metric {name!r} must return a number a prompt, [{len(predictions)}], for predictions "
            f"{tuple(predictions.shape)}; got {got}. Do not average over prompts: the sweep keeps them apart"
        )
    return values if values.is_floating_point() else values.to(predictions.dtype)
