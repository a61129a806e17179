"""Forward passes of a model with other weights: as they are, or by its first-order expansion around its own weights."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.utils.checkpoint import checkpoint
from transformer_lens.hook_points import HookPoint

from mechicl.models.holding import holding, holds_models
from mechicl.models.opening.adapter import Hook, ModelAdapter
from mechicl.models.opening.sites import check_hook
from mechicl.models.opening.skipping import replacing_forwards

Weights = dict[str, Tensor]


# ---- a model with other weights ----


@contextmanager
def weights_changed(model: nn.Module, changes: Mapping[str, Tensor]) -> Iterator[None]:
    """A model with something added to its parameters within the context, which holds it; after it exactly as before."""
    parameters = parameters_of(model, changes)
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


def parameters_of(model: nn.Module, changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that changes belong to.

    Raises:
        ValueError: a parameter that the model does not have, or has in another shape.
    """
    parameters = dict(model.named_parameters())
    unknown = sorted(set(changes) - set(parameters))
    if unknown:
        raise ValueError(f"the model has no parameters {unknown}")
    for name, change in changes.items():
        if change.shape != parameters[name].shape:
            shapes = tuple(change.shape), tuple(parameters[name].shape)
            raise ValueError(f"a change of {shapes[0]} for the parameter {name!r}, which is {shapes[1]}")
    return {name: parameters[name] for name in changes}


class ForwardPass(nn.Module):
    """A forward pass to the predictions at the last position, as a function of the model's parameters."""

    def __init__(self, adapter: ModelAdapter, hooks: Sequence[Hook] = ()):
        super().__init__()
        self.model = adapter.model
        self.adapter, self.hooks = adapter, list(hooks)
        # A parameter may be used in several places (tied embeddings, looped layers), and a bridge has modules that go
        # by several names, among which torch finds neither all places nor the way back. So each place is listed here,
        # once, and torch's own search for tied weights is turned off.
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._places = {
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
        values = {place: weights[name] for place, name in self._places.items() if name in weights}
        with holding(self.model):
            return functional_call(self, values, (tokens,), tie_weights=False)


class LayerwisePass(ForwardPass):
    """A forward pass on one prompt with one output a layer: its attention's output, put before the read-out.

    The stream is detached before each layer, so that no gradient flows from a layer to those before.

    Source: Bar Natan, Deutch & Magar, section 3.1 and Fig. 1.
    """

    def __init__(self, adapter: ModelAdapter):
        layers = range(adapter.n_layers)
        for layer in layers:
            for name in ("hook_resid_pre", "hook_attn_out", "hook_resid_post"):
                check_hook(adapter.model, f"blocks.{layer}.{name}")
        hooks: list[Hook] = [(f"blocks.{layer}.hook_resid_pre", self._detach) for layer in layers[1:]]
        hooks += [(f"blocks.{layer}.hook_attn_out", self._keep_output) for layer in layers]
        if not adapter.ours:  # a bridge cannot be run from after its last layer: its last stream is replaced instead
            hooks.append((f"blocks.{layers[-1]}.hook_resid_post", self._put_outputs))
        super().__init__(adapter, hooks)
        self.attention_outputs: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Predictions `[layer d_out]`."""
        self.attention_outputs.clear()
        outputs = super().forward(tokens)
        return self.adapter.resume_from_end(torch.cat(self.attention_outputs)) if self.adapter.ours else outputs

    def _detach(self, activation: Tensor, hook: HookPoint) -> Tensor:
        return activation.detach()

    def _keep_output(self, activation: Tensor, hook: HookPoint) -> None:
        self.attention_outputs.append(activation)

    def _put_outputs(self, activation: Tensor, hook: HookPoint) -> Tensor:
        return torch.cat(self.attention_outputs)


# ---- the first-order expansion ----


def value_and_derivative(function: Callable[[Weights], Any], weights: Weights, changes: Weights) -> tuple[Any, Any]:
    """A function of the weights, and its derivative along their changes, by forward-mode differentiation.

    No graph is kept: memory is that of two passes. `value + derivative` is the linearised model.

    Raises:
        ValueError: the function has no forward-mode derivative.
    """
    with warnings.catch_warnings():
        # torch's own forward mode still compiles its decompositions that way, at its first use
        warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)
        tangents = {name: change.to(weights[name].dtype) for name, change in changes.items()}
        try:
            return jvp(function, (weights,), (tangents,))[:2]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch's only sign that an operation has no forward-mode derivative
            function(weights)  # what fails without a derivative too fails here, as it would have without us
            words = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"this model cannot be differentiated forwards, as its linearisation needs ({words}); if its attention "
                f"is a fused one, load it with attn_implementation='eager'"
            ) from error


@holds_models
def linearized_outputs(model: Any, tokens: Tensor, changes: Weights) -> Float[Tensor, "prompt d_out"]:
    """Predictions at the last position of a model's first-order expansion around its weights.

    Args:
        model: of TransformerLens' protocol.
        tokens: as the model reads them, `[prompt pos ...]`.
        changes: what is added to its parameters, by name.

    Raises:
        ValueError: changes of parameters that the model does not have, or has in another shape.

    Source: Ortiz-Jimenez et al. 2023; Bar Natan, Deutch & Magar, equation 5.

    Example:
        >>> tuned = fine_tune(model, prompt_shots(model, prompts[:1]), FineTuning(0.01, method="linearized"))
        >>> linearized_outputs(model, model.encode(prompts), tuned.changes).shape
        torch.Size([64, 1])
    """
    adapter = ModelAdapter(model)
    return run_with_changes(adapter, adapter.encode(tokens), {}, changes, linearized=True)[0]


def run_with_changes(
    adapter: ModelAdapter,
    tokens: Tensor,
    parts: Mapping[str, Any],
    changes: Weights | None = None,
    *,
    linearized: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Predictions at the last position, and parts of activations by hook name.

    Args:
        adapter: of the model.
        tokens: sequences of one length.
        parts: which part of the activation at each hook to keep, as an index (`numpy.s_[:, -1]`).
        changes: what is added to parameters; none for the model as it is.
        linearized: expand predictions and activations to first order in the changes, instead of changing the weights.
    """
    kept: dict[str, Tensor] = {}

    def keep(activation: Tensor, hook: HookPoint, name: str) -> None:
        kept[name] = activation[parts[name]].clone()  # a copy, so that the whole need not be kept

    hooks: list[Hook] = [(name, partial(keep, name=name)) for name in parts]  # a bridge has other names for its hooks
    forward_pass = ForwardPass(adapter, [*hooks, *_hooks_forgetting_patterns(adapter)])
    with torch.no_grad(), patterns_forgotten(adapter.model):
        if not changes or not linearized:
            with weights_changed(adapter.model, changes or {}):
                outputs, activations = forward_pass(tokens), kept
        else:
            start = {name: weight.detach() for name, weight in parameters_of(adapter.model, changes).items()}

            def function(weights: Weights) -> tuple[Tensor, dict[str, Tensor]]:
                kept.clear()
                return forward_pass.with_weights(weights, tokens), dict(kept)

            (value, values), (slope, slopes) = value_and_derivative(function, start, changes)
            outputs, activations = value + slope, {name: values[name] + slopes[name] for name in values}
    silent = [name for name in parts if name not in activations]
    if silent:
        raise ValueError(
            f"the hook {silent[0]!r} does not fire in this model: attention cannot be read without it (a wrapped model "
            f"may need attn_implementation='eager')"
        )
    return outputs, activations


# ---- gradients and memory ----


@contextmanager
def gradients_required(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Parameters that gradients are taken for, for as long as the context lasts."""
    before = [(parameter, parameter.requires_grad) for parameter in parameters]
    try:
        for parameter, _ in before:
            parameter.requires_grad_()
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


@contextmanager
def patterns_forgotten(model: nn.Module) -> Iterator[None]:
    """A context after which a bridge's attention does not keep its last pattern, and with it the graph of the run."""
    try:
        yield
    finally:
        _forget_patterns(model)


def _forget_patterns(module: nn.Module) -> None:
    for part in module.modules():
        if vars(part).get("_pattern") is not None:
            vars(part)["_pattern"] = None


def _hooks_forgetting_patterns(adapter: ModelAdapter) -> list[Hook]:
    """Hooks by which a bridge's layers let go of their patterns while it runs: all of them together can be too much."""
    if adapter.ours:
        return []

    def forget(activation: Tensor, hook: HookPoint, block: nn.Module) -> None:
        _forget_patterns(block)

    blocks = enumerate(adapter.model.blocks)
    return [(f"blocks.{layer}.hook_resid_post", partial(forget, block=block)) for layer, block in blocks]


@contextmanager
def activations_recomputed(adapter: ModelAdapter) -> Iterator[None]:
    """Passes that keep only the stream between blocks; gradients work out again what is inside (checkpointing)."""
    model = adapter.model
    forwards = [(block, partial(checkpoint, block.forward, use_reentrant=False)) for block in model.blocks]
    # the second computation must not find keys and values that the first one has left
    wrapped: Any = getattr(getattr(model, "original_model", None), "config", None)
    caches = getattr(wrapped, "use_cache", None)
    with holding(model), replacing_forwards(forwards):
        try:
            if caches:
                wrapped.use_cache = False
            yield
        finally:
            if caches:
                wrapped.use_cache = caches
