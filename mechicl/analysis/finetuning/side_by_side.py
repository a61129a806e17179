"""Several fine-tunings at once: at other learning rates, or on the contexts of other prompts."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.func import vjp, vmap

from mechicl.analysis.finetuning.forward_passes import Weights
from mechicl.analysis.finetuning.sgd import FineTuned, FineTuning, Tuner, diverged
from mechicl.base.progress import progress_bar
from mechicl.models.holding import holds_models
from mechicl.prompts import Shots

LARGEST_GROUP = 32  # more models at a time are hardly faster
LARGEST_JACOBIAN = 2**28  # bytes: of a small model, whose linearised fine-tuning then takes products of matrices alone


@holds_models
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
    in nothing but the learning rate; linearised ones that share small examples need no passes at all after the first.
    Else they take turns.
    """

    def __init__(self, model: Any, shots: Sequence[Shots], tunings: Sequence[FineTuning]):
        self.tunings = list(tunings)
        self._tuners = [Tuner(model, each, tuning) for each, tuning in zip(shots, tunings, strict=True)]
        first = self._tuners[0]
        settings = {(t.epochs, t.parameters, t.method, t.examples_per_step) for t in tunings}
        shapes = {tuple((*e.shape, *t.shape) for e, t in tuner.examples) for tuner in self._tuners}
        together = (
            len(self._tuners) > 1 and first.adapter.ours and first.adapter.model.vectorizes
            and len(settings) == len(shapes) == 1
        )  # fmt: skip
        # each tuner's changes are a row of these
        changes: Weights = {
            name: change.expand(len(self._tuners), *change.shape).clone()
            for name, change in (first.changes.items() if together else ())
        }
        self._changes = changes
        self._steps: Callable[[Sequence[int]], tuple[Tensor, Weights]] | None = None
        if together and tunings[0].method != "linearized":
            self._steps = self._of_changed_weights
        elif together and len(set(map(id, shots))) == 1 and _jacobian_bytes(first) <= LARGEST_JACOBIAN:
            self._steps = _Expansion(first, changes)

    def changes(self, i: int) -> Weights:
        """What has been added so far to each parameter of one of the models."""
        return {name: rows[i] for name, rows in self._changes.items()} if self._steps else self._tuners[i].changes

    def are_finite(self) -> Tensor:
        """Whether the changes of each model are."""
        all_changes = (self.changes(i).values() for i in range(len(self._tuners)))
        return torch.tensor([all(bool(change.isfinite().all()) for change in each) for each in all_changes])

    def epochs(self) -> Iterator[Float[Tensor, "model example"]]:
        """Losses of one epoch after another, each before its step; not finite for a model that has diverged."""
        if self._steps:
            yield from self._epochs_together(self._steps)
        else:
            for losses in zip(*(tuner.epochs() for tuner in self._tuners), strict=True):
                yield torch.stack(losses)

    def _epochs_together(
        self, losses_and_gradients: Callable[[Sequence[int]], tuple[Tensor, Weights]]
    ) -> Iterator[Float[Tensor, "model example"]]:
        tuning, n_examples = self.tunings[0], len(self._tuners[0].examples)
        rates = torch.tensor([-t.learning_rate for t in self.tunings], dtype=torch.float64)
        for _ in range(tuning.epochs):
            losses = []
            for first in range(0, n_examples, tuning.examples_per_step):
                batch = range(first, min(first + tuning.examples_per_step, n_examples))
                loss, gradients = losses_and_gradients(batch)
                losses.append(loss)
                for name, gradient in gradients.items():
                    steps = (rates / len(batch)).to(gradient).view(-1, *[1] * (gradient.ndim - 1))
                    self._changes[name].add_(steps * gradient)
            yield torch.cat(losses, 1)

    def _of_changed_weights(self, batch: Sequence[int]) -> tuple[Float[Tensor, "model example"], Weights]:
        """Every model's losses on some of its examples, and their summed gradients `[model ...]`."""
        losses: list[Tensor] = []
        total: Weights = {}
        for i in batch:
            loss, gradients = self._of_example(i)
            losses.append(loss)
            total = {name: total[name] + g if total else g for name, g in gradients.items()}
        return torch.stack(losses, 1), total

    def _of_example(self, example: int) -> tuple[Float[Tensor, "model"], Weights]:
        first = self._tuners[0]
        tokens, targets = (torch.stack(part) for part in zip(*(t.examples[example] for t in self._tuners), strict=True))
        with torch.enable_grad():
            weights = {
                name: (start + self._changes[name]).to(start.dtype).requires_grad_()
                for name, start in first.start.items()
            }
            outputs = vmap(first.forward_pass.with_weights)(weights, tokens)  # one a layer, layer by layer
            losses = _losses(outputs, targets, first.is_regression)
            return losses.detach(), first.gradients(losses.sum(), weights)


class _Expansion:
    """Losses and gradients of linearised models: the outputs of all examples are linear in the changes.

    Every step of every model takes the same Jacobian, which is worked out once.
    """

    def __init__(self, tuner: Tuner, changes: Weights):
        self.changes, self.is_regression = changes, tuner.is_regression
        self.targets = [target for _, target in tuner.examples]
        self.outputs: list[Float[Tensor, "d_out"]] = []
        self.jacobians: list[Weights] = []  # by example and name, `[d_out weight]`
        for tokens, _ in tuner.examples:
            with torch.enable_grad():
                forward = partial(tuner.forward_pass.with_weights, tokens=tokens)
                (outputs,), pull, *_ = vjp(forward, tuner.start)
                (rows,) = vmap(pull)(torch.eye(len(outputs)).to(outputs)[:, None])
            self.outputs.append(outputs.detach())
            self.jacobians.append({name: row.detach().flatten(1) for name, row in rows.items()})

    def __call__(self, batch: Sequence[int]) -> tuple[Float[Tensor, "model example"], Weights]:
        """As `Tuners._of_changed_weights`."""
        losses: list[Tensor] = []
        total = {name: torch.zeros_like(change) for name, change in self.changes.items()}
        for i in batch:
            slopes = [self.changes[name].flatten(1).to(row) @ row.T for name, row in self.jacobians[i].items()]
            with torch.enable_grad():
                outputs = (self.outputs[i] + torch.stack(slopes).sum(0)).requires_grad_()
                loss = _losses(outputs[:, None], self.targets[i].expand(len(outputs), *self.targets[i].shape),
                               self.is_regression)  # fmt: skip
                (at_output,) = torch.autograd.grad(loss.sum(), outputs)
            losses.append(loss.detach())
            for name, row in self.jacobians[i].items():
                total[name] += (at_output @ row).view_as(total[name])
        return torch.stack(losses, 1), total


def _jacobian_bytes(tuner: Tuner) -> int:
    """What the derivatives of all examples' outputs with respect to the tuned weights take."""
    weights = list(tuner.start.values())
    d_out = tuner.adapter.model.cfg.d_out
    return len(tuner.examples) * d_out * sum(weight.numel() for weight in weights) * weights[0].element_size()


def _losses(
    outputs: Float[Tensor, "model output d_out"], targets: Tensor, is_regression: bool
) -> Float[Tensor, "model"]:
    """Of each model's outputs with its target `[model 1 ...]`, summed over the outputs."""
    targets = targets.expand(*outputs.shape[:2], *targets.shape[2:])
    if is_regression:
        return (outputs - targets).square().sum((1, 2))
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten().long(), reduction="none").view_as(targets).sum(1)


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
