"""Fine-tuning on demonstrations by SGD: the whole model, its linearisation, or each layer by itself."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from mechicl.analysis.finetuning.runs import (
    LayerRun,
    Run,
    Weights,
    changed,
    first_order,
    forgetting_patterns,
    recomputing,
    trainable,
)
from mechicl.analysis.finetuning.sequences import check_lengths
from mechicl.checks import require_finite, require_whole
from mechicl.models import HookedTransformer
from mechicl.models.adapter import ModelAdapter
from mechicl.shots import Shots

How = Literal["plain", "linearized", "per_layer"]


class FineTuningDivergedError(ValueError):
    """A learning rate at which the loss is no longer finite."""


@dataclass(frozen=True)
class FineTuning:
    """How a model is fine-tuned on demonstrations.

    Attributes:
        learning_rate: of plain SGD, without momentum or decay.
        epochs: passes over the demonstrations, always in their order.
        parameters: "key_value" for the key and value projections of all layers (Dai et al. 2023, section 3.3: what
            demonstrations act on in context), "all", or names as in `model.named_parameters()`.
        how: "plain"; "linearized" for the model's first-order expansion around its weights; "per_layer" for each
            attention layer's output to the read-out, with the losses summed and no gradient from one layer to those
            before.
        examples_per_step: consecutive demonstrations whose gradients are averaged for a step.

    Raises:
        ValueError: a value out of range, or unknown.
    """

    learning_rate: float = 0.1
    epochs: int = 1
    parameters: Literal["key_value", "all"] | tuple[str, ...] = "key_value"
    how: How = "plain"
    examples_per_step: int = 1

    def __post_init__(self):
        require_whole(self, epochs=1, examples_per_step=1)
        require_finite(self, "learning_rate", least=0.0)
        if self.how not in get_args(How):
            raise ValueError(f"how={self.how!r} is not one of {get_args(How)}")
        if isinstance(self.parameters, str) and self.parameters not in ("key_value", "all"):
            raise ValueError(f"parameters={self.parameters!r} is not 'key_value', 'all' or a tuple of names")
        if not self.parameters:
            raise ValueError("parameters names none: there is nothing to tune")

    def replace(self, **changes: Any) -> "FineTuning":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, eq=False)
class FineTuned:
    """What fine-tuning made of a model, apart from the model, which is as it was.

    Attributes:
        changes: of each tuned parameter.
        tuning: how.
        losses: of each example, before its step, `[epoch example]`; for "per_layer" summed over the layers.
    """

    changes: dict[str, Tensor]
    tuning: FineTuning
    losses: Float[Tensor, "epoch example"]

    @property
    def linearized(self) -> bool:
        """Whether the changes belong into the model's first-order expansion."""
        return self.tuning.how == "linearized"

    def applied(self, model: nn.Module) -> Any:
        """A context in which the model has the tuned weights; behind it it is as before, bit for bit.

        Raises:
            ValueError: of a linearised tuning, whose changes are no weights of the model itself.

        Example:
            >>> with tuned.applied(model):
            ...     logits = model(tokens)
        """
        if self.linearized:
            raise ValueError("a linearised model is no model with other weights: read it with `linearized_outputs`")
        return changed(model, self.changes)


def fine_tune(model: Any, shots: Shots, tuning: FineTuning | None = None, *, progress: bool = False) -> FineTuned:
    """Fine-tune a model on demonstrations, one after the other, and put it back as it was.

    The loss is the cross entropy of each demonstration's label over the whole vocabulary, in nats, or the squared
    error of a regression, summed over the target's dimensions.

    Args:
        model: any of TransformerLens' protocol, ours or a `TransformerBridge`, in eval mode.
        shots: whose examples to tune on.
        tuning: how.
        progress: show a progress bar.

    Raises:
        TypeError: a model without hooks.
        ValueError: parameters that the model does not have, none that the loss depends on, an example longer than the
            model's context, or a learning rate at which the loss is no longer finite.

    Source: Dai et al. 2023, section 4.2; Bar Natan, Deutch & Magar, sections 2.3 and 3.1.

    Example:
        >>> tuned = fine_tune(model, shots, FineTuning(learning_rate=0.1, epochs=4))
    """
    tuning = tuning or FineTuning()
    tuner = Tuner(model, shots, tuning)
    epochs = tqdm(tuner.epochs(), total=tuning.epochs, unit="epoch", disable=not progress, leave=False)
    losses = torch.stack(list(epochs))
    if not (losses.isfinite().all() and all(of.isfinite().all() for of in tuner.changes.values())):
        raise FineTuningDivergedError(
            f"fine-tuning diverged at learning_rate={tuning.learning_rate:g}: take a lower one, or look for one with "
            f"search_tuning"
        )
    return FineTuned(tuner.changes, tuning, losses)


def tuned_parameters(model: Any, parameters: str | Sequence[str]) -> list[str]:
    """Names of the parameters that fine-tuning changes.

    Raises:
        ValueError: names that the model does not have, or no key and value projections to be found.
    """
    names = [name for name, of in model.named_parameters() if of.is_floating_point()]
    if parameters == "all":
        return names
    if parameters != "key_value":
        unknown = sorted(set(parameters) - set(names))
        if unknown:
            raise ValueError(f"the model has no parameters {unknown}; it has {names[:8]} and {len(names)} in all")
        return list(parameters)
    if isinstance(model, HookedTransformer):
        found = [name for name in names if name.rsplit(".", 1)[-1] in ("W_K", "W_V", "b_K", "b_V")]
    else:  # a bridge has a part for each projection, whatever the wrapped model calls it
        parts = [getattr(getattr(block, "attn", None), part, None) for block in model.blocks for part in ("k", "v")]
        own = {id(of) for part in parts if isinstance(part, nn.Module) for of in part.parameters()}
        found = [name for name, of in model.named_parameters() if id(of) in own]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no key and value projections that can be found: name its parameters, "
            f"parameters=({names[0]!r}, ...), or take 'all'"
        )
    return found


class Tuner:
    """SGD on the examples: an epoch at a time, between which the model is as it was."""

    def __init__(self, model: Any, shots: Shots, tuning: FineTuning):
        self.adapter, self.shots, self.tuning = ModelAdapter(model), shots, tuning
        check_lengths(model, shots.examples)
        own = dict(model.named_parameters())
        self.own = {name: own[name] for name in tuned_parameters(model, tuning.parameters)}
        self.start = {name: of.detach() for name, of in self.own.items()}
        # small steps would be lost in half precision
        self.changes: Weights = {name: torch.zeros_like(of, dtype=_precise(of)) for name, of in self.start.items()}
        device = next(iter(self.start.values())).device
        targets = shots.example_targets.to(device).split(1)
        tokens = [self.adapter.encode(of[None]) for of in shots.examples]
        self.examples = list(zip(tokens, targets, strict=True))

    def epochs(self) -> Iterator[Float[Tensor, "example"]]:
        """Losses of one epoch after another; `changes` are then those behind it."""
        for _ in range(self.tuning.epochs):
            losses = []
            for first in range(0, len(self.examples), self.tuning.examples_per_step):
                batch = self.examples[first : first + self.tuning.examples_per_step]
                loss, total = self._gradient(*batch[0])
                losses.append(loss)
                for tokens, target in batch[1:]:
                    loss, gradient = self._gradient(tokens, target)
                    losses.append(loss)
                    total = {name: of + gradient[name] for name, of in total.items()}
                for name, of in total.items():
                    self.changes[name].add_(of, alpha=-self.tuning.learning_rate / len(batch))
            yield torch.stack(losses)

    def _gradient(self, tokens: Tensor, target: Tensor) -> tuple[Tensor, Weights]:
        """An example's loss and its gradient."""
        with forgetting_patterns(self.adapter.model):
            return (self._linearized if self.tuning.how == "linearized" else self._as_it_is)(tokens, target)

    def _as_it_is(self, tokens: Tensor, target: Tensor) -> tuple[Tensor, Weights]:
        """The same of the model itself, or of its layers."""
        run = LayerRun(self.adapter) if self.tuning.how == "per_layer" else Run(self.adapter)
        with torch.enable_grad():
            weights = {n: (of + self.changes[n]).to(of.dtype).requires_grad_() for n, of in self.start.items()}
            loss = self._loss(run.at(weights, tokens), target)
            gradients = self._gradients(loss, weights)
        return loss.detach(), gradients

    def _linearized(self, tokens: Tensor, target: Tensor) -> tuple[Tensor, Weights]:
        """The same of the linearised model: the gradient at its output, pulled back through the model as it started."""
        run = Run(self.adapter)
        with torch.no_grad():
            outputs, slope = first_order(lambda weights: run.at(weights, tokens), self.start, self.changes)
        with torch.enable_grad():
            expanded = (outputs + slope).requires_grad_()
            loss = self._loss(expanded, target)
            (at_output,) = torch.autograd.grad(loss, expanded)
            with trainable(self.own.values()), recomputing(self.adapter):
                gradients = self._gradients((run(tokens) * at_output).sum(), self.own)
        return loss.detach(), gradients

    def _gradients(self, value: Tensor, weights: Mapping[str, Tensor]) -> Weights:
        known = value.requires_grad
        found = torch.autograd.grad(value, list(weights.values()), allow_unused=True) if known else ()
        if all(gradient is None for gradient in found):
            raise ValueError(f"the loss does not depend on any of {list(weights)}: there is nothing to tune")
        return {
            name: torch.zeros_like(of) if gradient is None else gradient
            for (name, of), gradient in zip(weights.items(), found, strict=True)
        }

    def _loss(self, outputs: Float[Tensor, "layer d_out"], target: Tensor) -> Tensor:
        """One output, or one a layer whose losses are summed."""
        targets = target.expand(len(outputs), *target.shape[1:])
        if self.shots.choices is None:
            return (outputs - targets).square().sum()
        return F.cross_entropy(outputs, targets.long(), reduction="sum")


def _precise(parameter: Tensor) -> torch.dtype:
    return torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype
