"""Fine-tuning on demonstrations by SGD: the whole model, its linearisation, or each layer by itself."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformer_lens.hook_points import HookPoint

from mechicl.analysis.finetuning.runs import (
    Run,
    Weights,
    changed,
    first_order,
    forgetting_patterns,
    read,
    recomputing,
    trainable,
)
from mechicl.analysis.interventions.opened import Hook, Opened
from mechicl.analysis.interventions.sites import check_hook
from mechicl.checks import require_finite, require_whole
from mechicl.learners import Interval, interval
from mechicl.models import HookedTransformer
from mechicl.shots import Shots

How = Literal["plain", "linearized", "per_layer"]
LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
EPOCHS = (1, 4, 16)


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
    tuner = _Tuner(model, shots, tuning)
    epochs = tqdm(tuner.epochs(), total=tuning.epochs, unit="epoch", disable=not progress, leave=False)
    losses = torch.stack(list(epochs))
    if not (losses.isfinite().all() and all(of.isfinite().all() for of in tuner.changes.values())):
        raise ValueError(
            f"fine-tuning diverged at learning_rate={tuning.learning_rate:g}: take a lower one, or look for one with "
            f"search_tuning"
        )
    return FineTuned(tuner.changes, tuning, losses)


@dataclass(frozen=True, eq=False)
class TuningSearch:
    """Fine-tuning at several learning rates and numbers of epochs, measured on held-out queries.

    Attributes:
        learning_rates: that were tried.
        epochs: that were tried.
        score: right (1) or wrong (0), or minus the squared error, `[rate epoch query]`.
        loss: cross entropy over the choices, or squared error, `[rate epoch query]`.
        tuning: the settings, but for these two.
    """

    learning_rates: tuple[float, ...]
    epochs: tuple[int, ...]
    score: Float[Tensor, "rate epoch query"]
    loss: Float[Tensor, "rate epoch query"]
    tuning: FineTuning

    @property
    def best(self) -> FineTuning:
        """The settings with the highest mean score; among equals the lowest mean loss, then the first."""
        means = zip(self.score.mean(-1).flatten().tolist(), self.loss.mean(-1).flatten().tolist(), strict=True)
        ranked = [(-score, loss) if math.isfinite(loss) else (math.inf, math.inf) for score, loss in means]
        rate, epoch = divmod(min(range(len(ranked)), key=ranked.__getitem__), len(self.epochs))
        return self.tuning.replace(learning_rate=self.learning_rates[rate], epochs=self.epochs[epoch])

    @property
    def at_edge(self) -> bool:
        """Whether the best learning rate or number of epochs is the largest or smallest tried, so that more may help.

        A single epoch, the fewest there can be, is no edge.
        """
        best = self.best
        edges = {self.learning_rates[0], self.learning_rates[-1]} if len(self.learning_rates) > 1 else set()
        return best.learning_rate in edges or (best.epochs == self.epochs[-1] and best.epochs > 1)

    def at(self, tuning: FineTuning) -> Interval:
        """The mean score of some of the settings, with its interval over the held-out queries."""
        place = self.learning_rates.index(tuning.learning_rate), self.epochs.index(tuning.epochs)
        return interval(self.score[place])


def search_tuning(
    model: Any,
    held_out: Shots,
    tuning: FineTuning | None = None,
    *,
    learning_rates: Sequence[float] = LEARNING_RATES,
    epochs: Sequence[int] = EPOCHS,
    batch_size: int = 16,
    progress: bool = False,
) -> TuningSearch:
    """Fine-tune at several learning rates and numbers of epochs, and measure on held-out queries.

    Args:
        model: as for `fine_tune`.
        held_out: the demonstrations to tune on, with queries that are not those to be measured later.
        tuning: the other settings.
        learning_rates: to try.
        epochs: to try; one run a learning rate gives them all.
        batch_size: queries in memory at a time.
        progress: show a progress bar.

    Raises:
        ValueError: nothing to try, or divergence at all learning rates; else as for `fine_tune`.
    """
    rates, wanted = tuple(learning_rates), tuple(sorted(set(epochs)))
    if not rates or not wanted:
        raise ValueError(f"a search needs learning rates and epochs, got {rates} and {wanted}")
    if wanted[0] < 1:
        raise ValueError(f"epochs must be ints of at least 1, got {wanted}")
    base, opened = tuning or FineTuning(), Opened(model)
    score, loss = torch.full((2, len(rates), len(wanted), len(held_out)), math.nan, dtype=torch.float64).unbind(0)
    with tqdm(total=len(rates) * wanted[-1], unit="epoch", disable=not progress, leave=False) as bar:
        for i, rate in enumerate(rates):
            tuner = _Tuner(model, held_out, base.replace(learning_rate=rate, epochs=wanted[-1]))
            for epoch, losses in enumerate(tuner.epochs(), 1):
                bar.update()
                if not losses.isfinite().all():
                    break  # diverged: NaN from here on
                if epoch in wanted:
                    place = i, wanted.index(epoch)
                    outputs = predictions(
                        opened, held_out.zero_shot, tuner.changes, linearized=base.how == "linearized",
                        batch_size=batch_size,
                    )  # fmt: skip
                    if not outputs.isfinite().all():
                        break  # the last step was the one too many
                    score[place], loss[place] = scores_and_losses(outputs, held_out.targets, held_out.choices)
            bar.update(wanted[-1] - epoch)
    if score.isnan().all():
        raise ValueError(f"fine-tuning diverged at all learning rates {rates}: try lower ones")
    return TuningSearch(rates, wanted, score, loss, base)


def scores_and_losses(
    outputs: Float[Tensor, "query d_out"],
    targets: Int[Tensor, "query"] | Float[Tensor, "query y"],
    choices: Int[Tensor, "choice"] | None,
) -> tuple[Float[Tensor, "query"], Float[Tensor, "query"]]:
    """How good predictions are: score (the higher the better) and loss of each, float64 on the CPU.

    Among choices: 1 where the right one has the highest logit and 0 elsewhere; cross entropy over the choices, in nats.
    In a regression: squared error summed over the target's dimensions, and minus it as the score.
    """
    outputs, targets = outputs.detach().cpu().double(), targets.cpu()
    if choices is None:
        loss = (outputs - targets.double()).square().sum(-1)
        return -loss, loss
    logits = outputs[:, choices.cpu()]
    right = (targets[:, None] == choices.cpu()).int().argmax(-1)
    return (logits.argmax(-1) == right).double(), F.cross_entropy(logits, right, reduction="none")


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


class _Tuner:
    """SGD on the examples: an epoch at a time, between which the model is as it was."""

    def __init__(self, model: Any, shots: Shots, tuning: FineTuning):
        self.opened, self.shots, self.tuning = Opened(model), shots, tuning
        check_lengths(model, shots.examples)
        own = dict(model.named_parameters())
        self.own = {name: own[name] for name in tuned_parameters(model, tuning.parameters)}
        self.start = {name: of.detach() for name, of in self.own.items()}
        # small steps would be lost in half precision
        self.changes: Weights = {name: torch.zeros_like(of, dtype=_precise(of)) for name, of in self.start.items()}
        device = next(iter(self.start.values())).device
        self.examples = [(self.opened.tokens(of[None]), target) for of, target in self._pairs(device)]

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
        with forgetting_patterns(self.opened.model):
            return (self._linearized if self.tuning.how == "linearized" else self._as_it_is)(tokens, target)

    def _as_it_is(self, tokens: Tensor, target: Tensor) -> tuple[Tensor, Weights]:
        """The same of the model itself, or of its layers."""
        run = LayerRun(self.opened) if self.tuning.how == "per_layer" else Run(self.opened)
        with torch.enable_grad():
            weights = {n: (of + self.changes[n]).to(of.dtype).requires_grad_() for n, of in self.start.items()}
            loss = self._loss(run.at(weights, tokens), target)
            gradients = self._gradients(loss, weights)
        return loss.detach(), gradients

    def _linearized(self, tokens: Tensor, target: Tensor) -> tuple[Tensor, Weights]:
        """The same of the linearised model: the gradient at its output, pulled back through the model as it started."""
        run = Run(self.opened)
        with torch.no_grad():
            outputs, slope = first_order(lambda weights: run.at(weights, tokens), self.start, self.changes)
        with torch.enable_grad():
            expanded = (outputs + slope).requires_grad_()
            loss = self._loss(expanded, target)
            (at_output,) = torch.autograd.grad(loss, expanded)
            with trainable(self.own.values()), recomputing(self.opened):
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

    def _pairs(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.shots.examples, self.shots.example_targets.to(device).split(1), strict=True))


class LayerRun(Run):
    """A run on one prompt with one output a layer: its attention's output, put before the read-out.

    The stream is cut from what made it before each layer, so that no gradient flows from a layer to those before.

    Source: Bar Natan, Deutch & Magar, section 3.1 and Fig. 1.
    """

    def __init__(self, opened: Opened):
        layers = range(opened.n_layers)
        for layer in layers:
            for name in ("hook_resid_pre", "hook_attn_out", "hook_resid_post"):
                check_hook(opened.model, f"blocks.{layer}.{name}")
        hooks: list[Hook] = [(f"blocks.{layer}.hook_resid_pre", self._cut) for layer in layers[1:]]
        hooks += [(f"blocks.{layer}.hook_attn_out", self._keep) for layer in layers]
        if not opened.ours:  # a bridge cannot be run from behind its last layer
            hooks.append((f"blocks.{layers[-1]}.hook_resid_post", self._put))
        super().__init__(opened, hooks)
        self.written: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Predictions `[layer d_out]`."""
        self.written.clear()
        outputs = super().forward(tokens)
        return self.opened.resume_from_end(torch.cat(self.written)) if self.opened.ours else outputs

    def _cut(self, activation: Tensor, hook: HookPoint) -> Tensor:
        return activation.detach()

    def _keep(self, activation: Tensor, hook: HookPoint) -> None:
        self.written.append(activation)

    def _put(self, activation: Tensor, hook: HookPoint) -> Tensor:
        return torch.cat(self.written)


def _precise(parameter: Tensor) -> torch.dtype:
    return torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype


def check_lengths(model: Any, sequences: Sequence[Tensor]) -> None:
    """Refuse sequences that a model has no positions for.

    Raises:
        ValueError: gives the numbers and the fix.
    """
    cfg = model.cfg
    if getattr(cfg, "positional_embedding_type", "standard") in ("none", "sinusoidal"):
        return
    longest = max(map(len, sequences))
    if longest > cfg.n_ctx:
        raise ValueError(
            f"a prompt of {longest} tokens is longer than the model's context of n_ctx={cfg.n_ctx}: take fewer or "
            f"shorter demonstrations"
        )


def predictions(
    opened: Opened,
    sequences: Sequence[Tensor],
    changes: Weights | None = None,
    *,
    linearized: bool = False,
    batch_size: int = 16,
) -> Float[Tensor, "query d_out"]:
    """Predictions at the end of sequences of different lengths; changes as for `read`."""
    parts = {}
    for index, tokens in batches(sequences, batch_size):
        outputs, _ = read(opened, opened.tokens(tokens), {}, changes, linearized=linearized)
        parts |= dict(zip(index, outputs, strict=True))
    return torch.stack([parts[i] for i in range(len(sequences))])


def batches(sequences: Sequence[Tensor], batch_size: int) -> Iterator[tuple[list[int], Tensor]]:
    """Sequences of equal length together, at most so many: their indices and tokens `[prompt pos ...]`.

    There is no padding, which architectures treat differently.
    """
    by_length: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        by_length.setdefault(len(sequence), []).append(i)
    for index in by_length.values():
        for first in range(0, len(index), batch_size):
            part = index[first : first + batch_size]
            yield part, torch.stack([sequences[i] for i in part])
