"""Runs of a model with other weights: as they are, or by the model's first-order expansion around its own."""

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

from mechicl.models.adapter import Hook, ModelAdapter
from mechicl.models.sites import check_hook

Weights = dict[str, Tensor]


@contextmanager
def changed(model: nn.Module, changes: Mapping[str, Tensor]) -> Iterator[None]:
    """A model with something added to some of its parameters within the context; behind it as before, exactly.

    Raises:
        ValueError: a parameter that the model does not have, or has in another shape.
    """
    parameters = parameters_of(model, changes)
    before = {name: parameters[name].detach().clone() for name in changes}
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
    own = dict(model.named_parameters())
    unknown = sorted(set(changes) - set(own))
    if unknown:
        raise ValueError(f"the model has no parameters {unknown}")
    for name, change in changes.items():
        if change.shape != own[name].shape:
            raise ValueError(
                f"a change of {tuple(change.shape)} for the parameter {name!r}, which is {tuple(own[name].shape)}"
            )
    return {name: own[name] for name in changes}


@contextmanager
def trainable(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Parameters that gradients are taken for, for as long as the context lasts."""
    before = [(of, of.requires_grad) for of in parameters]
    try:
        for of, _ in before:
            of.requires_grad_()
        yield
    finally:
        for of, required in before:
            of.requires_grad_(required)


@contextmanager
def forgetting_patterns(model: nn.Module) -> Iterator[None]:
    """Runs behind which a bridge's attention does not keep its last pattern, and with it the graph of the run."""
    try:
        yield
    finally:
        _forget(model)


def _forget(module: nn.Module) -> None:
    for part in module.modules():
        if vars(part).get("_pattern") is not None:
            vars(part)["_pattern"] = None


def _forgetting_hooks(adapter: ModelAdapter) -> list[Hook]:
    """Hooks by which a bridge's layers let go of their patterns while it runs: all of them together can be too much."""
    if adapter.ours:
        return []

    def forget(activation: Tensor, hook: HookPoint, block: nn.Module) -> None:
        _forget(block)

    blocks = enumerate(adapter.model.blocks)
    return [(f"blocks.{layer}.hook_resid_post", partial(forget, block=block)) for layer, block in blocks]


@contextmanager
def recomputing(adapter: ModelAdapter) -> Iterator[None]:
    """Runs that keep only the stream between blocks; gradients work out again what is inside (checkpointing)."""
    blocks = list(adapter.model.blocks)
    own = [vars(block) for block in blocks]  # setattr would reach what a bridge wraps
    before = [attributes.get("forward") for attributes in own]
    # blocks of ours are called only where a hook is attached
    noticed = adapter.model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", _look)])
    # what is worked out again must not find keys and values that the first time has left
    wrapped: Any = getattr(getattr(adapter.model, "original_model", None), "config", None)
    caches = getattr(wrapped, "use_cache", None)
    try:
        if caches:
            wrapped.use_cache = False
        for block, attributes in zip(blocks, own, strict=True):
            attributes["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
        with noticed:
            yield
    finally:
        if caches:
            wrapped.use_cache = caches
        for attributes, forward in zip(own, before, strict=True):
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward


def _look(activation: Tensor, hook: HookPoint) -> None:
    """Changes nothing."""


class Run(nn.Module):
    """A run of a model as a function of its parameters.

    Args:
        adapter: of the model; its predictions at the last position are read.
        hooks: attached in every run.
    """

    def __init__(self, adapter: ModelAdapter, hooks: Sequence[Hook] = ()):
        super().__init__()
        self.model = adapter.model
        self.adapter, self.hooks = adapter, list(hooks)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predictions `[prompt d_out]`."""
        return self.adapter.run(tokens, self.hooks)

    def at(self, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Predictions with other values of some parameters."""
        own = dict(self.model.named_parameters())
        at = {id(own[name]): value for name, value in weights.items()}
        # wherever a parameter is used, and each place once: a bridge has modules of several names, and then torch finds
        # neither all places nor the way back
        values = {
            f"{place}.{key}": at[id(of)]
            for place, part in self.named_modules()
            for key, of in part._parameters.items()
            if id(of) in at
        }
        return functional_call(self, values, (tokens,), tie_weights=False)


class LayerRun(Run):
    """A run on one prompt with one output a layer: its attention's output, put before the read-out.

    The stream is cut from what made it before each layer, so that no gradient flows from a layer to those before.

    Source: Bar Natan, Deutch & Magar, section 3.1 and Fig. 1.
    """

    def __init__(self, adapter: ModelAdapter):
        layers = range(adapter.n_layers)
        for layer in layers:
            for name in ("hook_resid_pre", "hook_attn_out", "hook_resid_post"):
                check_hook(adapter.model, f"blocks.{layer}.{name}")
        hooks: list[Hook] = [(f"blocks.{layer}.hook_resid_pre", self._cut) for layer in layers[1:]]
        hooks += [(f"blocks.{layer}.hook_attn_out", self._keep) for layer in layers]
        if not adapter.ours:  # a bridge cannot be run from after its last layer
            hooks.append((f"blocks.{layers[-1]}.hook_resid_post", self._put))
        super().__init__(adapter, hooks)
        self.written: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Predictions `[layer d_out]`."""
        self.written.clear()
        outputs = super().forward(tokens)
        return self.adapter.resume_from_end(torch.cat(self.written)) if self.adapter.ours else outputs

    def _cut(self, activation: Tensor, hook: HookPoint) -> Tensor:
        return activation.detach()

    def _keep(self, activation: Tensor, hook: HookPoint) -> None:
        self.written.append(activation)

    def _put(self, activation: Tensor, hook: HookPoint) -> Tensor:
        return torch.cat(self.written)


def first_order(function: Callable[[Weights], Any], weights: Weights, changes: Weights) -> tuple[Any, Any]:
    """A function of the weights, and its derivative along their changes, by forward-mode differentiation.

    No graph is kept: memory is that of two passes. `f + derivative` is the linearised model (Ortiz-Jimenez et al.
    2023; equation 5 of Bar Natan, Deutch & Magar).
    """
    with warnings.catch_warnings():
        # torch's own forward mode still compiles its decompositions that way, at its first use
        warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)
        tangents = {name: change.to(weights[name].dtype) for name, change in changes.items()}
        try:
            value, derivative = jvp(function, (weights,), (tangents,))[:2]
        except RuntimeError as error:  # as torch says that a function has no forward-mode derivative
            if not isinstance(error, NotImplementedError) and "setup_context" not in str(error):
                raise
            words = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"this model cannot be differentiated forwards, as its linearisation needs ({words}); if its attention "
                f"is a fused one, load it with attn_implementation='eager'"
            ) from error
    return value, derivative


def linearized_outputs(model: Any, tokens: Tensor, changes: Weights) -> Float[Tensor, "prompt d_out"]:
    """Predictions at the last position of a model's first-order expansion around its weights.

    Args:
        model: of TransformerLens' protocol.
        tokens: as the model reads them, `[prompt pos ...]`.
        changes: of some of its parameters, by name.

    Raises:
        ValueError: changes of parameters that the model does not have, or has in another shape.

    Source: Ortiz-Jimenez et al. 2023; Bar Natan, Deutch & Magar, equation 5.

    Example:
        >>> tuned = fine_tune(model, shots, FineTuning(how="linearized"))
        >>> logits = linearized_outputs(model, tokens, tuned.changes)
    """
    adapter = ModelAdapter(model)
    return read(adapter, adapter.encode(tokens), {}, changes, linearized=True)[0]


def read(
    adapter: ModelAdapter,
    tokens: Tensor,
    wanted: Mapping[str, Callable[[Tensor], Tensor]],
    changes: Weights | None = None,
    *,
    linearized: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Predictions at the last position, and parts of activations by hook name.

    Args:
        adapter: of the model.
        tokens: sequences of one length.
        wanted: what to keep of the activation at each hook.
        changes: of parameters; none for the model as it is.
        linearized: expand predictions and activations to first order in the changes, instead of changing the weights.

    Raises:
        ValueError: a hook that does not fire, or changes of parameters that the model does not have.
    """
    found: dict[str, Tensor] = {}

    def keep(activation: Tensor, hook: HookPoint, name: str) -> None:
        found[name] = wanted[name](activation).clone()  # a copy, so that the whole need not be kept

    hooks: list[Hook] = [(name, partial(keep, name=name)) for name in wanted]  # a bridge has other names for its hooks
    run = Run(adapter, [*hooks, *_forgetting_hooks(adapter)])
    with torch.no_grad(), forgetting_patterns(adapter.model):
        if not changes or not linearized:
            with changed(adapter.model, changes or {}):
                return run(tokens), _all_of(wanted, found)
        weights = {name: of.detach() for name, of in parameters_of(adapter.model, changes).items()}

        def function(weights: Weights) -> tuple[Tensor, dict[str, Tensor]]:
            found.clear()
            return run.at(weights, tokens), dict(found)

        (outputs, kept), (slope, slopes) = first_order(function, weights, changes)
        return outputs + slope, _all_of(wanted, {name: kept[name] + slopes[name] for name in kept})


def _all_of(wanted: Mapping[str, Any], found: dict[str, Tensor]) -> dict[str, Tensor]:
    silent = [name for name in wanted if name not in found]
    if silent:
        raise ValueError(
            f"the hook {silent[0]!r} does not fire in this model: attention cannot be read without it (a wrapped model "
            f"may need attn_implementation='eager')"
        )
    return found
