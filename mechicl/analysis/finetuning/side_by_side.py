"""Several fine-tunings at once: at other learning rates, or on the contexts of other prompts."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.func import vmap

from mechicl.analysis.finetuning.forward_passes import Weights
from mechicl.analysis.finetuning.sgd import FineTuned, FineTuning, Tuner, diverged
from mechicl.progress import progress_bar
from mechicl.shots import Shots

LARGEST_GROUP = 32  # more models at a time are hardly faster


def fine_tune_each(model: Any, shots: Sequence[Shots], tuning: FineTuning, *, progress: bool = True) -> list[FineTuned]:
    """Fine-tune a model on each set of demonstrations, always from its own weights: as many calls of `fine_tune`.

    Models of this package go side by side where the sets have the same number and lengths of examples.

    Args:
        model: as for `fine_tune`.
        shots: the sets.
        tuning: the settings.
        progress: show a progress bar.

    Raises:
        FineTuningDivergedError: a learning rate at which a loss is no longer finite; else as for `fine_tune`.

    Example:
        >>> shots = [prompt_shots(model, prompt) for prompt in prompts[:4].split(1)]
        >>> tuned = fine_tune_each(model, shots, FineTuning(learning_rate=0.01))
    """
    results = []
    with progress_bar(total=len(shots) * tuning.epochs, unit="epoch", progress=progress) as bar:
        for group in _groups(shots):
            tuners = Tuners(model, group, [tuning] * len(group))
            losses = []
            for epoch in tuners.epochs():
                losses.append(epoch)
                bar.update(len(group))
            by_set = torch.stack(losses, 1)
            if not by_set.isfinite().all() or not tuners.are_finite().all():
                raise diverged(tuning)
            results += [FineTuned(tuners.changes(i), tuning, each) for i, each in enumerate(by_set)]
    return results


class Tuners:
    """SGD of several models that start alike, each on its own examples with its own settings, an epoch at a time.

    One pass serves all of them where the model vectorizes, the examples have the same shapes, and the settings differ
    in nothing but the learning rate; else they take turns.
    """

    def __init__(self, model: Any, shots: Sequence[Shots], tunings: Sequence[FineTuning]):
        self.tunings = list(tunings)
        self._tuners = [Tuner(model, each, tuning) for each, tuning in zip(shots, tunings, strict=True)]
        first = self._tuners[0]
        settings = {(t.epochs, t.parameters, t.method, t.examples_per_step) for t in tunings}
        shapes = {tuple((*e.shape, *t.shape) for e, t in tuner.examples) for tuner in self._tuners}
        self._together = (
            len(self._tuners) > 1 and first.adapter.ours and first.adapter.model.vectorizes
            and len(settings) == len(shapes) == 1 and tunings[0].method == "plain"
        )  # fmt: skip
        if self._together:  # each tuner's changes are a row of these
            self._changes: Weights = {
                name: change.expand(len(self._tuners), *change.shape).clone() for name, change in first.changes.items()
            }

    def changes(self, i: int) -> Weights:
        """What has been added so far to each parameter of one of the models."""
        return {name: rows[i] for name, rows in self._changes.items()} if self._together else self._tuners[i].changes

    def are_finite(self) -> Tensor:
        """Whether the changes of each model are."""
        all_changes = (self.changes(i).values() for i in range(len(self._tuners)))
        return torch.tensor([all(bool(change.isfinite().all()) for change in each) for each in all_changes])

    def epochs(self) -> Iterator[Float[Tensor, "model example"]]:
        """Losses of one epoch after another, each before its step; not finite for a model that has diverged."""
        if self._together:
            yield from self._epochs_together()
        else:
            for losses in zip(*(tuner.epochs() for tuner in self._tuners), strict=True):
                yield torch.stack(losses)

    def _epochs_together(self) -> Iterator[Float[Tensor, "model example"]]:
        tuning, n_examples = self.tunings[0], len(self._tuners[0].examples)
        rates = torch.tensor([-t.learning_rate for t in self.tunings], dtype=torch.float64)
        for _ in range(tuning.epochs):
            losses = []
            for first in range(0, n_examples, tuning.examples_per_step):
                batch = range(first, min(first + tuning.examples_per_step, n_examples))
                total: Weights = {}
                for i in batch:
                    loss, gradients = self._losses_and_gradients(i)
                    losses.append(loss)
                    total = {name: total[name] + g if total else g for name, g in gradients.items()}
                for name, gradient in total.items():
                    steps = (rates / len(batch)).to(gradient).view(-1, *[1] * (gradient.ndim - 1))
                    self._changes[name].add_(steps * gradient)
            yield torch.stack(losses, 1)

    def _losses_and_gradients(self, example: int) -> tuple[Float[Tensor, "model"], Weights]:
        """Every model's loss on one of its examples, and the gradients `[model ...]`."""
        first = self._tuners[0]
        tokens, targets = (torch.stack(part) for part in zip(*(t.examples[example] for t in self._tuners), strict=True))
        with torch.enable_grad():
            weights = {
                name: (start + self._changes[name]).to(start.dtype).requires_grad_()
                for name, start in first.start.items()
            }
            outputs = vmap(first.forward_pass.with_weights)(weights, tokens)[:, 0]
            if first.is_regression:
                losses = (outputs - targets[:, 0]).square().sum(-1)
            else:
                losses = F.cross_entropy(outputs, targets[:, 0].long(), reduction="none")
            return losses.detach(), first.gradients(losses.sum(), weights)


def _groups(shots: Sequence[Shots]) -> Iterator[Sequence[Shots]]:
    """Consecutive sets whose examples have the same shapes, not too many at a time."""
    group: list[Shots] = []
    for each in shots:
        alike = not group or [e.shape for e in each.examples] == [e.shape for e in group[0].examples]
        if group and (not alike or len(group) == LARGEST_GROUP):
            yield group
            group = []
        group.append(each)
    if group:
        yield group
