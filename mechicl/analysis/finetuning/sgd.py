"""Fine-tuning on demonstrations by SGD: the whole model, its linearisation, or each layer by itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mechicl.analysis.finetuning.forward_passes import (
    ForwardPass,
    LayerwisePass,
    Weights,
    activations_recomputed,
    gradients_required,
    patterns_forgotten,
    value_and_derivative,
    weights_changed,
)
from mechicl.analysis.finetuning.predictions import check_lengths
from mechicl.base.checks import require_finite, require_whole
from mechicl.base.progress import progress_bar
from mechicl.models import HookedTransformer
from mechicl.models.holding import holds_models
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.prompts import Shots
from mechicl.statistics import Result, storable

Method = Literal["plain", "linearized", "per_layer"]
"""How the weights are moved: by the loss of the model, of the model linearised in them, or of each layer by itself."""
METHOD_NAMES: dict[Method, str] = {"plain": "fine-tuned", "linearized": "linearised", "per_layer": "layer by layer"}
"""What tables and pictures call them."""
METHODS: tuple[Method, ...] = tuple(METHOD_NAMES)
"""All kinds of fine-tuning."""


class FineTuningDivergedError(ValueError):
    """A learning rate at which the loss is no longer finite."""


@storable
@dataclass(frozen=True)
class FineTuning:
    """How a model is fine-tuned on demonstrations.

    Attributes:
        learning_rate: of plain SGD, without momentum or decay.
        epochs: passes over the demonstrations, always in their order.
        parameters: "key_value" for the key and value projections of all layers (Dai et al. 2023, section 3.3: what
            demonstrations act on in context), "all", or names as in `model.named_parameters()`.
        method: "plain"; "linearized" for the model's first-order expansion around its weights; "per_layer" for each
            attention layer's output to the read-out, with the losses summed and no gradient from one layer to those
            before.
        examples_per_step: consecutive demonstrations whose gradients are averaged for a step.

    Raises:
        ValueError: a value out of range, or unknown.
    """

    learning_rate: float = 0.1
    epochs: int = 1
    parameters: Literal["key_value", "all"] | tuple[str, ...] = "key_value"
    method: Method = "plain"
    examples_per_step: int = 1

    def __post_init__(self):
        require_whole(self, epochs=1, examples_per_step=1)
        require_finite(self, "learning_rate", least=0.0)
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is not one of {get_args(Method)}")
        if isinstance(self.parameters, str) and self.parameters not in ("key_value", "all"):
            raise ValueError(f"parameters={self.parameters!r} is not 'key_value', 'all' or a tuple of names")
        if not self.parameters:
            raise ValueError("parameters names none: there is nothing to tune")


@dataclass(frozen=True, eq=False)
class FineTuned(Result):
    """What fine-tuning made of a model, apart from the model, which is as it was.

    Attributes:
        changes: what is added to each tuned parameter, by name.
        tuning: the settings.
        losses: of each example, before its step; for "per_layer" summed over the layers.
    """

    changes: dict[str, Tensor]
    tuning: FineTuning
    losses: Float[Tensor, "epoch example"]

    def samples(self) -> dict[str, Tensor]:
        """The losses alone: changes of weights are no samples."""
        return {"losses": self.losses}

    @property
    def linearized(self) -> bool:
        """Whether the changes belong into the model's first-order expansion."""
        return self.tuning.method == "linearized"

    def applied(self, model: nn.Module) -> Any:
        """A context in which the model has the tuned weights; after it the model is as before, bit for bit.

        Raises:
            ValueError: of a linearised tuning, whose changes are no weights of the model itself.

        Example:
            >>> tuned = fine_tune(model, prompt_shots(model, prompts[:1]), FineTuning(learning_rate=0.01))
            >>> with tuned.applied(model):
            ...     predictions = model.predict(prompts)
        """
        if self.linearized:
            raise ValueError("a linearised model is no model with other weights: read it with `linearized_outputs`")
        return weights_changed(model, self.changes)


@holds_models
def fine_tune(model: Any, shots: Shots, tuning: FineTuning | None = None, *, progress: bool = True) -> FineTuned:
    """Fine-tune a model on demonstrations, one after the other, and put it back as it was.

    The loss is the cross entropy of each demonstration's label over the whole vocabulary, in nats, or the squared
    error of a regression, summed over the target's dimensions.

    Args:
        model: any of TransformerLens' protocol, ours or a `TransformerBridge`, in eval mode.
        shots: whose examples to tune on.
        tuning: the settings.
        progress: show a progress bar.

    Raises:
        TypeError: a model without hooks.
        ValueError: parameters that the model does not have, none that the loss depends on, an example longer than the
            model's context, or a learning rate at which the loss is no longer finite.

    Source: Dai et al. 2023, section 4.2; Bar Natan, Deutch & Magar, sections 2.3 and 3.1.

    Example:
        >>> fine_tune(model, prompt_shots(model, prompts[:1]), FineTuning(learning_rate=0.01, epochs=2)).losses
    """
    tuning = tuning or FineTuning()
    tuner = Tuner(model, shots, tuning)
    epochs = progress_bar(tuner.epochs(), total=tuning.epochs, unit="epoch", progress=progress)
    losses = torch.stack(list(epochs))
    if not (losses.isfinite().all() and all(change.isfinite().all() for change in tuner.changes.values())):
        raise diverged(tuning)
    return FineTuned(tuner.changes, tuning, losses)


def diverged(tuning: FineTuning) -> FineTuningDivergedError:
    """The error of a learning rate that is too high."""
    return FineTuningDivergedError(
        f"fine-tuning diverged at learning_rate={tuning.learning_rate:g}: take a lower one, or look for one with "
        f"search_tuning"
    )


def find_tuned_parameters(model: Any, parameters: str | Sequence[str]) -> list[str]:
    """Names of the parameters that fine-tuning changes."""
    names = [name for name, parameter in model.named_parameters() if parameter.is_floating_point()]
    if parameters == "all":
        return names
    if parameters != "key_value":
        unknown = sorted(set(parameters) - set(names))
        if unknown:
            raise ValueError(f"the model has no parameters {unknown}; it has {names[:8]} and {len(names)} in all")
        return list(parameters)
    if isinstance(model, HookedTransformer):
        key_value = [name for name in names if name.rsplit(".", 1)[-1] in ("W_K", "W_V", "b_K", "b_V")]
    else:  # a bridge has a part for each projection, whatever the wrapped model calls it
        parts = [getattr(getattr(block, "attn", None), part, None) for block in model.blocks for part in ("k", "v")]
        of_parts = {id(weight) for part in parts if isinstance(part, nn.Module) for weight in part.parameters()}
        key_value = [name for name, parameter in model.named_parameters() if id(parameter) in of_parts]
    if not key_value:
        raise ValueError(
            f"{type(model).__name__} has no key and value projections that can be found: name its parameters, "
            f"parameters=({names[0]!r}, ...), or take 'all'"
        )
    return key_value


class Tuner:
    """SGD on the examples, an epoch at a time: `changes` of the parameters grow, and the model stays as it was."""

    def __init__(self, model: Any, shots: Shots, tuning: FineTuning):
        self.adapter, self.tuning = ModelAdapter(model), tuning
        check_lengths(model, shots.examples)
        parameters = dict(model.named_parameters())
        self.parameters = {name: parameters[name] for name in find_tuned_parameters(model, tuning.parameters)}
        self.start = {name: parameter.detach() for name, parameter in self.parameters.items()}
        # small steps would be lost in half precision
        self.changes: Weights = {
            name: torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
            for name, weight in self.start.items()
        }
        device = next(iter(self.start.values())).device
        targets = shots.example_targets.to(device).split(1)
        tokens = [self.adapter.encode(example[None]) for example in shots.examples]
        self.examples = list(zip(tokens, targets, strict=True))
        self.is_regression = shots.choices is None
        self.forward_pass = (LayerwisePass if tuning.method == "per_layer" else ForwardPass)(self.adapter)

    def epochs(self) -> Iterator[Float[Tensor, "example"]]:
        """Losses of one epoch after another."""
        for _ in range(self.tuning.epochs):
            losses = []
            for first in range(0, len(self.examples), self.tuning.examples_per_step):
                batch = self.examples[first : first + self.tuning.examples_per_step]
                loss, total = self._loss_and_gradient(*batch[0])
                losses.append(loss)
                for tokens, target in batch[1:]:
                    loss, gradient = self._loss_and_gradient(tokens, target)
                    losses.append(loss)
                    total = {name: partial_sum + gradient[name] for name, partial_sum in total.items()}
                for name, gradient in total.items():
                    self.changes[name].add_(gradient, alpha=-self.tuning.learning_rate / len(batch))
            yield torch.stack(losses)

    def _loss_and_gradient(self, tokens: Tensor, target: Tensor) -> tuple[Tensor, Weights]:
        """An example's loss at the weights reached so far, and its gradient with respect to the tuned ones."""
        with patterns_forgotten(self.adapter.model):
            if self.tuning.method == "linearized":
                return self._of_expansion(tokens, target)
            return self._of_changed_weights(tokens, target)

    def _of_changed_weights(self, tokens: Tensor, target: Tensor) -> tuple[Tensor, Weights]:
        """Loss and gradient of the model with changed weights, or of its layers each by itself."""
        with torch.enable_grad():
            weights = {
                name: (weight + self.changes[name]).to(weight.dtype).requires_grad_()
                for name, weight in self.start.items()
            }
            loss = self._loss(self.forward_pass.with_weights(weights, tokens), target)
            return loss.detach(), self.gradients(loss, weights)

    def _of_expansion(self, tokens: Tensor, target: Tensor) -> tuple[Tensor, Weights]:
        """Loss and gradient of the linearised model f(w) + J(w) change, whose Jacobian J is that of the start.

        By the chain rule the gradient is J^T (d loss / d output), with the latter at the linearised output: one pass
        forwards along the changes, and one backwards through the model as it started.
        """
        with torch.no_grad():
            outputs, slope = value_and_derivative(
                lambda weights: self.forward_pass.with_weights(weights, tokens), self.start, self.changes
            )
        with torch.enable_grad():
            expanded = (outputs + slope).requires_grad_()
            loss = self._loss(expanded, target)
            (at_output,) = torch.autograd.grad(loss, expanded)
            with gradients_required(self.parameters.values()), activations_recomputed(self.adapter):
                gradients = self.gradients((self.forward_pass(tokens) * at_output).sum(), self.parameters)
        return loss.detach(), gradients

    def _loss(self, outputs: Float[Tensor, "layer d_out"], target: Tensor) -> Tensor:
        """Loss of one output, or of one a layer, summed."""
        targets = target.expand(len(outputs), *target.shape[1:])
        if self.is_regression:
            return (outputs - targets).square().sum()
        return F.cross_entropy(outputs, targets.long(), reduction="sum")

    @staticmethod
    def gradients(value: Tensor, weights: Mapping[str, Tensor]) -> Weights:
        """Gradients with respect to the tuned weights; 0 for those that the value does not depend on.

        Raises:
            ValueError: it depends on none of them.
        """
        known = value.requires_grad
        gradients = torch.autograd.grad(value, list(weights.values()), allow_unused=True) if known else ()
        if all(gradient is None for gradient in gradients):
            raise ValueError(f"the loss does not depend on any of {list(weights)}: there is nothing to tune")
        return {
            name: torch.zeros_like(weight) if gradient is None else gradient
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
        }
