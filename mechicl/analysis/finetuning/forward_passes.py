"""Forward passes of a model with other weights, or of its first-order expansion around its own weights."""

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jvp
from transformer_lens.hook_points import HookPoint

from mechicl.base.memory import Budget
from mechicl.base.threads import holding
from mechicl.models.opening.adapter import Hook, ModelAdapter
from mechicl.models.opening.sites import check_hook

Weights = dict[str, Tensor]
LARGEST_BATCH = 16  # more sequences at a time are hardly faster


# ---- weights that are replaced ----


def find_parameters(model: nn.Module, changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters that changes belong to; a ValueError names one that the model lacks or has otherwise."""
    parameters = dict(model.named_parameters())
    for name, change in changes.items():
        if name not in parameters or parameters[name].shape != change.shape:
            found = f"of shape {tuple(parameters[name].shape)}" if name in parameters else "not in the model"
            raise ValueError(f"a change of shape {tuple(change.shape)} is for the parameter {name!r}, which is {found}")
    return {name: parameters[name] for name in changes}


@contextmanager
def weights_changed(model: nn.Module, changes: Mapping[str, Tensor]) -> Generator[None]:
    """Add changes to a model's parameters within the context, which locks the model; restore them bit for bit."""
    parameters = find_parameters(model, changes)
    with holding(model):
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        try:
            with torch.no_grad():
                for name, change in changes.items():
                    parameters[name].add_(change)
            yield
        finally:
            with torch.no_grad():
                for name, value in before.items():
                    parameters[name].copy_(value)


class ForwardPass(nn.Module):
    """A forward pass to the predictions at the last position, as a function of the model's parameters."""

    def __init__(self, adapter: ModelAdapter, hooks: Sequence[Hook] = ()):
        super().__init__()
        self.model, self.adapter = adapter.model, adapter
        self.hooks = [*hooks, *_hooks_dropping_patterns(adapter)]
        # A parameter may be used in several places (tied embeddings, looped layers), and a bridge has modules that go
        # by several names, among which torch finds neither all places nor the way back. So each place is listed here,
        # once, and torch's own search for tied weights is turned off.
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._names = {
            f"{place}.{key}": names[id(parameter)]
            for place, module in self.named_modules()
            for key, parameter in module._parameters.items()
            if id(parameter) in names
        }

    def forward(self, tokens: Tensor) -> Tensor:
        """Predictions `[prompt d_out]`."""
        return self.adapter.run(tokens, self.hooks)

    def with_weights(self, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Predictions with other values of the parameters that `weights` names."""
        values = {place: weights[name] for place, name in self._names.items() if name in weights}
        return functional_call(self, values, (tokens,), tie_weights=False)


class LayerwisePass(ForwardPass):
    """A forward pass with one output per layer: the read-out of its attention, without gradients to earlier layers.

    Source: Bar Natan, Deutch & Magar, section 3.1 and Fig. 1.
    """

    def __init__(self, adapter: ModelAdapter):
        written: list[Tensor] = []
        layers = range(adapter.n_layers)
        for layer in layers:
            for name in ("hook_resid_pre", "hook_attn_out", "hook_resid_post"):
                check_hook(adapter.model, f"blocks.{layer}.{name}")
        hooks: list[Hook] = [
            *((f"blocks.{layer}.hook_resid_pre", lambda stream, hook: stream.detach()) for layer in layers[1:]),
            *((f"blocks.{layer}.hook_attn_out", lambda output, hook: written.append(output)) for layer in layers),
        ]
        if not adapter.ours:  # a bridge cannot be run from after its last layer: its last stream is replaced instead
            hooks.append((f"blocks.{layers[-1]}.hook_resid_post", lambda stream, hook: torch.cat(written)))
        super().__init__(adapter, hooks)
        self.written = written

    def forward(self, tokens: Tensor) -> Tensor:
        """Predictions `[layer d_out]`."""
        self.written.clear()
        outputs = super().forward(tokens)
        return self.adapter.resume_from_end(torch.cat(self.written)) if self.adapter.ours else outputs


def _hooks_dropping_patterns(adapter: ModelAdapter) -> list[Hook]:
    """Hooks that drop a bridge's attention patterns, which its layers would keep, with the graph that made them."""

    def drop(activation: Tensor, hook: HookPoint, block: nn.Module) -> None:
        for part in block.modules():
            if vars(part).get("_pattern") is not None:
                vars(part)["_pattern"] = None

    blocks = [] if adapter.ours else adapter.model.blocks
    return [(f"blocks.{layer}.hook_resid_post", partial(drop, block=block)) for layer, block in enumerate(blocks)]


# ---- first-order expansion ----


def value_and_derivative(function: Callable[[Weights], Any], weights: Weights, changes: Weights) -> tuple[Any, Any]:
    """Compute a function of the weights and its derivative along their changes, in forward mode without a graph.

    `value + derivative` is the linearised model; ValueError without a forward-mode derivative.
    """
    with warnings.catch_warnings():
        # torch's forward mode compiles its decompositions that way at its first use
        warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)
        tangents = {name: change.to(weights[name].dtype) for name, change in changes.items()}
        try:
            return jvp(function, (weights,), (tangents,))[:2]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch's only sign that an operation has no forward-mode derivative
            function(weights)  # an error that has nothing to do with derivatives is raised here
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"this model has no forward-mode derivative, which its linearisation needs ({first_line}); if its "
                f"attention is fused, load it with attn_implementation='eager'"
            ) from error


@torch.no_grad()
def run_with_changes(
    adapter: ModelAdapter,
    tokens: Tensor,
    parts: Mapping[str, Any],
    changes: Weights | None = None,
    *,
    linearized: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute predictions at the last position, and the `parts` (index by hook name) of activations.

    `changes` are added to parameters, or, with `linearized`, predictions and activations expanded in them.
    """
    kept: dict[str, Tensor] = {}

    def keep(activation: Tensor, hook: HookPoint, name: str) -> None:
        kept[name] = activation[parts[name]].clone()  # a copy, so that the whole need not be kept

    forward_pass = ForwardPass(adapter, [(name, partial(keep, name=name)) for name in parts])

    def run(weights: Weights) -> tuple[Tensor, dict[str, Tensor]]:
        kept.clear()
        return forward_pass.with_weights(weights, tokens), dict(kept)

    changes = changes or {}
    start = {name: weight.detach() for name, weight in find_parameters(adapter.model, changes).items()}
    if changes and linearized:
        (value, values), (slope, slopes) = value_and_derivative(run, start, changes)
        outputs, activations = value + slope, {name: values[name] + slopes[name] for name in values}
    else:
        outputs, activations = run({name: (w + changes[name]).to(w.dtype) for name, w in start.items()})
    if silent := [name for name in parts if name not in activations]:
        raise ValueError(f"the hook {silent[0]!r} does not fire in this model: try attn_implementation='eager'")
    return outputs, activations


# ---- sequences of unequal lengths ----


def check_lengths(model: Any, sequences: Sequence[Tensor]) -> None:
    """Raise ValueError for sequences that a model has no positions for."""
    cfg, longest = model.cfg, max(map(len, sequences))
    unlimited = getattr(cfg, "positional_embedding_type", "standard") in ("none", "sinusoidal", "rotary")
    if not unlimited and longest > cfg.n_ctx:
        raise ValueError(
            f"a prompt of {longest} tokens is longer than the model's context of n_ctx={cfg.n_ctx}: take fewer or "
            f"shorter demonstrations"
        )


def predict_sequences(
    adapter: ModelAdapter, sequences: Sequence[Tensor], changes: Weights | None = None, *, linearized: bool = False
) -> Float[Tensor, "query d_out"]:
    """Predict the end of each of several sequences of unequal lengths; changes as for `run_with_changes`."""
    outputs: dict[int, Tensor] = {}
    for index, tokens in equal_length_batches(adapter.model, sequences):
        batch, _ = run_with_changes(adapter, adapter.encode(tokens), {}, changes, linearized=linearized)
        outputs |= dict(zip(index, batch, strict=True))
    return torch.stack([outputs[i] for i in range(len(sequences))])


def equal_length_batches(model: Any, sequences: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """Yield batches that fit into memory, of equal length (no padding): indices and tokens `[prompt pos ...]`."""
    by_length: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        by_length.setdefault(len(sequence), []).append(i)
    cfg = model.cfg
    heads, d_head = getattr(cfg, "n_heads", 1), getattr(cfg, "d_head", None) or cfg.d_model
    widths = 8 * cfg.d_model + 2 * (getattr(cfg, "d_mlp", None) or 0) + 6 * heads * d_head
    for length, index in by_length.items():
        # about two layers' activations and a layer's scores, each with its derivative
        n_numbers = 2 * length * (2 * widths + 4 * heads * length)
        n = Budget().rows(n_numbers * next(model.parameters()).element_size(), at_most=LARGEST_BATCH)
        for first in range(0, len(index), n):
            batch = index[first : first + n]
            yield batch, torch.stack([sequences[i] for i in batch])
