"""Search for the learning rate and the number of epochs of fine-tuning, on held-out queries."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.finetuning.forward_passes import predict_sequences
from mechicl.analysis.finetuning.sgd import FineTuning, FineTuningDivergedError, ParallelSGD
from mechicl.base.arguments import Count, Natural, Positive, checked
from mechicl.base.progress import progress_bar
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.prompts import Shots
from mechicl.statistics import Result
from mechicl.text.scores import Scored, scores_and_losses

SEARCHED_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
SEARCHED_EPOCHS = (1, 4, 16)


@dataclass(frozen=True, eq=False)
class TuningSearch(Scored, Result):
    """Fine-tuning at several learning rates and numbers of epochs, measured on held-out queries; NaN where it diverged.

    Attributes:
        score: right (1) or wrong (0), or minus the squared error.
        loss: cross entropy over the choices in nats, or squared error.
        tuning: the settings other than learning rate and epochs.
    """

    learning_rates: tuple[float, ...]
    epochs: tuple[int, ...]
    score: Float[Tensor, "learning_rate epoch query"]
    loss: Float[Tensor, "learning_rate epoch query"]
    tuning: FineTuning
    choose_by: Literal["score", "loss"] = "score"

    @property
    def best(self) -> FineTuning:
        """The settings with the highest mean score (among equals the lowest loss), or with the lowest mean loss."""
        score, loss = self.score.mean(-1).flatten(), self.loss.mean(-1).flatten()
        criteria = torch.stack([-score if self.choose_by == "score" else loss, loss], -1)
        ranked = criteria.masked_fill(~loss.isfinite()[:, None], math.inf).tolist()
        rate, epoch = divmod(ranked.index(min(ranked)), len(self.epochs))
        return replace(self.tuning, learning_rate=self.learning_rates[rate], epochs=self.epochs[epoch])

    @property
    def at_edge(self) -> bool:
        """True if the best learning rate or number of epochs (beyond one) is the largest or smallest tried."""
        return self.wider() != (self.learning_rates, self.epochs)

    def wider(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Return a grid with one more value, at the ratio of the last two, beyond each edge that the best lies on."""
        best, rates, epochs = self.best, list(self.learning_rates), list(self.epochs)
        if len(rates) > 1 and best.learning_rate in (rates[0], rates[-1]):
            first = best.learning_rate == rates[0]
            edge, neighbour = (rates[0], rates[1]) if first else (rates[-1], rates[-2])
            beyond = float(f"{edge * edge / neighbour:.2g}") if neighbour else edge
            rates = list(dict.fromkeys([beyond, *rates] if first else [*rates, beyond]))
        if best.epochs == epochs[-1] and best.epochs > 1:
            ratio = epochs[-1] / epochs[-2] if len(epochs) > 1 else 2
            epochs.append(max(epochs[-1] + 1, round(epochs[-1] * ratio)))
        return tuple(rates), tuple(epochs)


@checked(locks=True)
def search_tuning(
    model: Any,
    held_out: Shots,
    tuning: FineTuning | None = None,
    *,
    learning_rates: Sequence[Positive] = SEARCHED_RATES,
    epochs: Sequence[Count] = SEARCHED_EPOCHS,
    choose_by: Literal["score", "loss"] = "score",
    widen: Natural = 0,
    progress: bool | None = None,
) -> TuningSearch:
    """Search for the learning rate and number of epochs of fine-tuning that are best on held-out queries.

    Args:
        model: a mechicl model or a `TransformerBridge`, in eval mode; it stays unchanged.
        held_out: the demonstrations to tune on, with other queries than those to be measured later: `Shots`, made by
            `prompt_shots` or `mechicl.text.text_shots`.
        tuning: settings other than learning rate and epochs (`FineTuning`); by default plain SGD of all W_K and W_V.
        epochs: numbers of epochs to try; one run per learning rate is measured after each of them.
        choose_by: criterion of the best setting: the highest mean "score" of the held-out queries (accuracy, or minus
            the squared error), or their lowest mean "loss" (cross entropy in nats, or squared error).
        widen: how often the grid may be extended while the best setting lies on its border.

    Returns:
        A `TuningSearch`: `best`, the `FineTuning` settings with the best learning rate and epochs; `score` and `loss`
        `[learning_rate epoch query]`; `at_edge`, True if the best lies on the border.

    Raises:
        FineTuningDivergedError: all learning rates are too high.
        ValueError: parameters that the model does not have, or an example longer than its context.

    Example:
        >>> shots = prompt_shots(model, prompts[:1])
        >>> search_tuning(model, shots, learning_rates=(0.003, 0.01), epochs=(1, 2)).best
    """
    rates, numbers = tuple(learning_rates), tuple(sorted(set(epochs)))
    if not rates or not numbers:
        raise ValueError(f"learning_rates and epochs must not be empty, got {rates} and {numbers}")
    settings = tuning or FineTuning()
    while True:
        score, loss = _measure_grid(model, held_out, settings, rates, numbers, progress)
        search = TuningSearch(rates, numbers, score, loss, settings, choose_by)
        if not widen or not search.at_edge:
            return search
        widen, (rates, numbers) = widen - 1, search.wider()


def _measure_grid(
    model: Any, held_out: Shots, settings: FineTuning, rates: tuple[float, ...], numbers: tuple[int, ...],
    progress: bool | None,
) -> Float[Tensor, "measure learning_rate epoch query"]:  # fmt: skip
    adapter, linearized = ModelAdapter(model), settings.method == "linearized"
    measures = torch.full((2, len(rates), len(numbers), len(held_out)), math.nan, dtype=torch.float64)
    sgd = ParallelSGD(model, [held_out] * len(rates), replace(settings, epochs=numbers[-1]), rates)
    finite = torch.ones(len(rates), dtype=torch.bool)
    bar = progress_bar(sgd.epochs(), total=numbers[-1], unit="epoch", progress=progress)
    for epoch, losses in enumerate(bar, 1):
        finite &= losses.isfinite().all(1).cpu()
        for i in finite.nonzero()[:, 0].tolist() if epoch in numbers else ():
            outputs = predict_sequences(adapter, held_out.zero_shot, sgd.changes_of(i), linearized=linearized)
            finite[i] = bool(outputs.isfinite().all())  # the last step may have been the one too many
            if finite[i]:
                measures[:, i, numbers.index(epoch)] = torch.stack(scores_and_losses(outputs, held_out))
    if measures.isnan().all():
        raise FineTuningDivergedError(f"fine-tuning diverged at all learning rates {rates}: try lower ones")
    return measures
