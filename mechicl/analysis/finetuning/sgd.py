"""Fine-tuning on demonstrations by SGD: the whole model, its linearisation, or each layer separately."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import vmap

from mechicl.analysis.finetuning.forward_passes import (
    ForwardPass,
    LayerwisePass,
    Weights,
    check_lengths,
    value_and_derivative,
    weights_changed,
)
from mechicl.base.arguments import Count, NonNegative, check_fields, checked
from mechicl.base.progress import progress_bar
from mechicl.base.threads import holds_models
from mechicl.models import HookedTransformer
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.prompts import Shots
from mechicl.statistics import Result, storable
from mechicl.statistics.results import NOT_SAMPLES

Method = Literal["plain", "linearized", "per_layer"]
"""The loss that moves the weights: of the model, of the model linearised in them, or of each layer separately."""
METHOD_NAMES: dict[Method, str] = {"plain": "fine-tuned", "linearized": "linearised", "per_layer": "layer by layer"}
"""The methods' names in tables and figures."""
METHODS: tuple[Method, ...] = tuple(METHOD_NAMES)
"""All kinds of fine-tuning."""

LARGEST_GROUP = 32  # more models at a time are hardly faster


class FineTuningDivergedError(ValueError):
    """A learning rate at which the loss is no longer finite."""


@storable
@dataclass(frozen=True)
class FineTuning:
    """Settings of fine-tuning on demonstrations.

    Attributes:
        learning_rate: learning rate of SGD, without momentum or decay.
        epochs: passes over the demonstrations, always in their order.
        parameters: "key_value" for the key and value projections of all layers (those that demonstrations act on in
            context: Dai et al. 2023, section 3.3), "all", or names as in `model.named_parameters()`.
        method: "plain"; "linearized" for the model's first-order expansion around its weights; "per_layer" to read
            predictions off each attention layer's output, with the losses summed and no gradient from one layer to
            earlier ones.
        examples_per_step: consecutive demonstrations whose gradients are averaged for a step.
    """

    learning_rate: NonNegative = 0.1
    epochs: Count = 1
    parameters: Literal["key_value", "all"] | tuple[str, ...] = "key_value"
    method: Method = "plain"
    examples_per_step: Count = 1

    def __post_init__(self):
        check_fields(self)
        if not self.parameters:
            raise ValueError("parameters must name at least one parameter to tune, got none")


@dataclass(frozen=True, eq=False)
class FineTuned(Result):
    """The changes that fine-tuning makes to a model; the model itself stays unchanged. See `fine_tune`."""

    changes: dict[str, Tensor] = field(metadata=NOT_SAMPLES)
    tuning: FineTuning
    losses: Float[Tensor, "epoch example"]

    @property
    def linearized(self) -> bool:
        """True if the changes belong to the model's first-order expansion."""
        return self.tuning.method == "linearized"

    def applied(self, model: nn.Module) -> AbstractContextManager[None]:
        """Give the model the tuned weights inside a `with` block; its own are restored bit for bit afterwards.

        Example:
            >>> tuned = fine_tune(model, prompt_shots(model, prompts[:1]), FineTuning(learning_rate=0.01))
            >>> with tuned.applied(model):
            ...     predictions = model.predict(prompts)
        """
        if self.linearized:
            raise ValueError("a linearised tuning has no weights to apply: tune with another method")
        return weights_changed(model, self.changes)


@checked(locks=True)
def fine_tune(model: Any, shots: Shots, tuning: FineTuning | None = None, *, progress: bool | None = None) -> FineTuned:
    """Fine-tune a model on demonstrations, one after the other; the model itself stays unchanged.

    The loss is the cross entropy of each demonstration's label over the whole vocabulary, in nats, or the squared error
    of a regression, summed over the target's dimensions. Source: Dai et al. 2023, section 4.2; Bar Natan, Deutch &
    Magar, sections 2.3 and 3.1.

    Args:
        model: a mechicl model or a `TransformerBridge`, in eval mode.
        shots: demonstrations as tokens, made by `prompt_shots` (points) or `mechicl.text.text_shots`.
        tuning: learning rate, epochs, parameters and method; by default `FineTuning()`.

    Returns:
        A `FineTuned`: `changes` of the weights by the parameter's name, and `losses` `[epoch example]`, the loss of
        each demonstration before its step (summed over layers for "per_layer"). `with tuned.applied(model): ...` runs
        the model with the tuned weights.

    Raises:
        FineTuningDivergedError: a learning rate at which the loss is no longer finite.
        ValueError: parameters that the model does not have, or that its loss does not depend on, or an example longer
            than the model's context.

    Example:
        >>> fine_tune(model, prompt_shots(model, prompts[:1]), FineTuning(learning_rate=0.01, epochs=2)).losses
    """
    return fine_tune_each(model, [shots], tuning or FineTuning(), progress=progress)[0]


@holds_models
def fine_tune_each(
    model: Any, shots: Sequence[Shots], tuning: FineTuning, *, progress: bool | None = None
) -> list[FineTuned]:
    """Fine-tune a model on each set of demonstrations, always from its own weights, as `fine_tune` does.

    Sets with the same number and lengths of examples share vectorised passes in models of this package.
    """
    results = []
    with progress_bar(total=len(shots) * tuning.epochs, unit="epoch", progress=progress) as bar:
        for _, alike in groupby(shots, key=lambda each: [example.shape for example in each.examples]):
            sets = list(alike)
            for group in (sets[i : i + LARGEST_GROUP] for i in range(0, len(sets), LARGEST_GROUP)):
                sgd, losses = ParallelSGD(model, group, tuning), []
                for epoch in sgd.epochs():
                    losses.append(epoch)
                    bar.update(len(group))
                by_set = torch.stack(losses, 1)
                if not (by_set.isfinite().all() and all(c.isfinite().all() for c in sgd.changes.values())):
                    raise FineTuningDivergedError(
                        f"fine-tuning diverged at learning_rate={tuning.learning_rate:g}: take a lower one, which "
                        f"search_tuning finds"
                    )
                results += [FineTuned(sgd.changes_of(i), tuning, each) for i, each in enumerate(by_set)]
    return results


def find_tuned_parameters(model: Any, parameters: str | Sequence[str]) -> list[str]:
    """List the parameters that fine-tuning changes."""
    names = [name for name, parameter in model.named_parameters() if parameter.is_floating_point()]
    if parameters == "all":
        return names
    if parameters != "key_value":
        if unknown := sorted(set(parameters) - set(names)):
            raise ValueError(f"parameters must be of the model, such as {names[:8]}, got {unknown}")
        return list(parameters)
    if isinstance(model, HookedTransformer):
        kinds = ("W_K", "W_V", "b_K", "b_V")  # with "_" before them if groups of heads share them
        key_value = [name for name in names if name.rsplit(".", 1)[-1].removeprefix("_") in kinds]
    else:  # a bridge has a part for each projection, whatever the wrapped model calls it
        parts = [getattr(getattr(block, "attn", None), part, None) for block in model.blocks for part in ("k", "v")]
        of_parts = {id(weight) for part in parts if isinstance(part, nn.Module) for weight in part.parameters()}
        key_value = [name for name, parameter in model.named_parameters() if id(parameter) in of_parts]
    if not key_value:
        raise ValueError(
            f"{type(model).__name__} has no separate keys and values: name parameters, such as {names[0]!r}"
        )
    return key_value


class ParallelSGD:
    """SGD of copies of a model, each on its own examples or at its own learning rate, in one pass where possible.

    Only the `changes` of parameters are updated, an epoch at a time; example sets have the same shapes.
    """

    def __init__(
        self, model: Any, shots: Sequence[Shots], tuning: FineTuning, learning_rates: Sequence[float] | None = None
    ):
        adapter, n = ModelAdapter(model), len(shots)
        check_lengths(model, [example for each in shots for example in each.examples])
        parameters = dict(model.named_parameters())
        self.start = {name: parameters[name].detach() for name in find_tuned_parameters(model, tuning.parameters)}
        # small steps would be lost in half precision
        self.changes: Weights = {
            name: torch.zeros(n, *w.shape, dtype=torch.promote_types(w.dtype, torch.float32), device=w.device)
            for name, w in self.start.items()
        }
        device = next(iter(self.start.values())).device
        examples = zip(*(each.examples for each in shots), strict=True)
        self.tokens = [torch.stack([adapter.encode(tokens[None]) for tokens in sets]) for sets in examples]
        self.targets = torch.stack([each.example_targets.to(device) for each in shots], 1)
        self.rates = torch.tensor(learning_rates or [tuning.learning_rate] * n, dtype=torch.float64)
        self.tuning, self.is_regression = tuning, shots[0].choices is None
        self.forward_pass = (LayerwisePass if tuning.method == "per_layer" else ForwardPass)(adapter)
        self.vectorized = n > 1 and adapter.ours and model.vectorizes

    def changes_of(self, copy: int) -> Weights:
        """Return the changes of one copy's parameters so far."""
        return {name: rows[copy] for name, rows in self.changes.items()}

    def epochs(self) -> Iterator[Float[Tensor, "copy example"]]:
        """Yield the losses of each epoch, each before its step; not finite for a copy that has diverged."""
        for _ in range(self.tuning.epochs):
            losses: list[Tensor] = []
            for batch in torch.arange(len(self.tokens)).split(self.tuning.examples_per_step):
                parts = [self._losses_and_gradients(i) for i in batch.tolist()]
                losses += [loss for loss, _ in parts]
                for name, change in self.changes.items():
                    gradient = torch.stack([gradients[name] for _, gradients in parts]).sum(0)
                    change -= (self.rates / len(batch)).to(gradient).view(-1, *[1] * (gradient.ndim - 1)) * gradient
            yield torch.stack(losses, 1)

    def _losses_and_gradients(self, example: int) -> tuple[Float[Tensor, "copy"], Weights]:
        if self.vectorized:
            return self._of_copies(slice(None), example)
        turns = [self._of_copies(slice(copy, copy + 1), example) for copy in range(len(self.rates))]
        gradients = {name: torch.cat([gradients[name] for _, gradients in turns]) for name in self.start}
        return torch.cat([losses for losses, _ in turns]), gradients

    def _of_copies(self, copies: slice, example: int) -> tuple[Float[Tensor, "copy"], Weights]:
        tokens, changes = self.tokens[example][copies], {name: rows[copies] for name, rows in self.changes.items()}
        forward, start = self.forward_pass.with_weights, self.start

        def slope_of(changes: Weights, tokens: Tensor) -> Float[Tensor, "output d_out"]:
            return value_and_derivative(partial(forward, tokens=tokens), start, changes)[1]

        def over_copies(function: Callable[[Weights, Tensor], Tensor], weights: Weights) -> Tensor:
            if self.vectorized:
                return vmap(function)(weights, tokens)
            return function({name: rows[0] for name, rows in weights.items()}, tokens[0])[None]

        if self.tuning.method == "linearized":
            # The linearised model is f(w) + J(w) change at the start w. With a constant second term, the gradient of
            # its loss with respect to w is Jᵀ (d loss / d output), as the chain rule requires.
            with torch.no_grad():
                slope = over_copies(slope_of, changes)
            weights = {name: w.expand(len(tokens), *w.shape).contiguous() for name, w in start.items()}
        else:
            slope, weights = 0.0, {name: (w + changes[name]).to(w.dtype) for name, w in start.items()}
        with torch.enable_grad():
            weights = {name: w.requires_grad_() for name, w in weights.items()}
            losses = self._losses(over_copies(forward, weights) + slope, self.targets[example][copies])
            known = losses.requires_grad
            gradients = torch.autograd.grad(losses.sum(), list(weights.values()), allow_unused=True) if known else ()
        if all(gradient is None for gradient in gradients):
            raise ValueError(f"the loss does not depend on any of the parameters {list(weights)}")
        return losses.detach(), {
            name: torch.zeros_like(weight) if gradient is None else gradient
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
        }

    def _losses(self, outputs: Float[Tensor, "copy output d_out"], targets: Tensor) -> Float[Tensor, "copy"]:
        targets = targets[:, None].expand(*outputs.shape[:2], *targets.shape[1:])
        if self.is_regression:
            return (outputs - targets).square().sum((1, 2))
        losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten().long(), reduction="none")
        return losses.view_as(targets).sum(1)
