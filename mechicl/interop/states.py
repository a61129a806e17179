"""States of the layers of Mamba, Mamba-2 and gated delta nets, as hooks of a bridge."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from mechicl.base.arguments import checked
from mechicl.models.layered import has_torch_hooks

Carry = Callable[[Tensor, int], Tensor]


@checked
def open_states(bridge: nn.Module) -> list[int]:
    """Give a bridge of TransformerLens the component "state", in its layers that keep a state.

    It is the activation of the hook "blocks.0.attn.hook_state", `[batch head pos d_key d_value]`: the state after each
    position, as in the recurrent layers of `HookedTransformer`. A hook that changes states at some positions sets them
    there, and the states after them follow by the recurrence. So `patch`, `ablate` and `attribute` take "state", and a
    cache has what a probe reads. TransformerLens' own `hook_ssm_state` changes only what the same position reads.

    Mamba has a head for each channel, with states `[d_state]`; Mamba-2 has states `[d_head d_state]`, and gated delta
    nets (Qwen3-Next, Qwen3.5) `[d_key d_value]`. From now on runs compute states one position after the other, as
    TransformerLens' `eager_scan` does, which is slower and agrees up to rounding; runs that continue a cache have none.

    Args:
        bridge: the model, changed in place.

    Returns:
        The layers that have states. Layers of attention have none.

    Raises:
        TypeError: if the model is not a bridge.
        ValueError: if no layer keeps a state of these kinds.

    Example:
        >>> bridge = load_language_model("state-spaces/mamba-130m-hf").model
        >>> layers = open_states(bridge)
        >>> patch(bridge, clean, corrupted, "state", {"layer": layers, "pos": None})
    """
    if not hasattr(bridge, "original_model") or not hasattr(bridge, "blocks"):
        raise TypeError(f"states are opened in a TransformerBridge, got {type(bridge).__name__}")
    model: Any = bridge
    layers = []
    for layer, block in enumerate(model.blocks):
        for mixer in block.children():
            if _kind(mixer):
                layers.append(layer)
                if "hook_state" not in dict(mixer.named_children()):
                    _open(mixer)
                mixer.hook_state.name = f"blocks.{layer}.attn.hook_state"
                model._hook_registry[mixer.hook_state.name] = mixer.hook_state
    model.original_model.config.use_cache = False  # a run that fills a cache takes the quick scan, without states
    if not layers:
        raise ValueError("no layer of this model is a Mamba, Mamba-2 or gated delta net: it keeps no state")
    return layers


def _kind(mixer: nn.Module) -> str:
    """The name of a layer's kind in `_CARRIED`, or "": TransformerLens' bridges are not imported for those without."""
    names = [kind.__name__ for kind in type(mixer).__mro__ if kind.__name__ in _CARRIED]
    empty = not hasattr(mixer, "conv1d") and "GatedDeltaNetBridge" not in names  # hybrids have such where they attend
    return "" if empty or not names else names[0]


def _open(mixer: Any) -> None:
    """Add `hook_state` to a layer; its effects follow from the states of the scan."""
    mixer.eager_scan = True
    mixer.add_module("hook_state", HookPoint().train(mixer.training))
    names, make_carry = _CARRIED[_kind(mixer)]
    by_head = _kind(mixer) != "SSMMixerBridge"  # [batch pos head ...]; Mamba has [batch channel pos d_state]
    seen: dict[str, Tensor] = {}
    handles: list[Any] = []

    def keep(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: seen.update({name: output})

    def hooked(module: nn.Module, inputs: Any, states: Tensor) -> Tensor:
        states = states.transpose(1, 2) if by_head else states
        states = _set_changed(states, mixer.hook_state(states.clone()), make_carry(mixer, seen))
        return states.transpose(1, 2) if by_head else states

    def start(module: nn.Module, inputs: Any, options: dict[str, Any]) -> None:
        if has_torch_hooks(mixer.hook_state):  # added now, so that they run after the user's hooks at the same places
            if options.get("cache_params") is not None:
                raise ValueError("states are not hooked in runs that fill or continue a cache: pass use_cache=False")
            handles.extend(mixer.get_submodule(name).register_forward_hook(keep(name)) for name in names)
            handles.append(mixer.hook_ssm_state.register_forward_hook(hooked))

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        while handles:
            handles.pop().remove()
        seen.clear()

    mixer.register_forward_pre_hook(start, with_kwargs=True)
    mixer.register_forward_hook(end, always_call=True)


def _set_changed(states: Tensor, given: Tensor, carry: Carry) -> Tensor:
    """Set the states `[batch head pos ...]` that a hook changed, and let the others follow."""
    if given.shape != states.shape:
        raise ValueError(f"states must stay {list(states.shape)} [batch head pos ...], got {list(given.shape)}")
    changed = (given != states).flatten(3).any(-1).reshape(*states.shape[:3], *[1] * (states.ndim - 3))
    differences = [given[:, :, 0] - states[:, :, 0]]
    for t in range(1, states.shape[2]):
        carried = torch.where(changed[:, :, t], 0.0, carry(differences[-1], t))
        differences.append(given[:, :, t] - states[:, :, t] + carried)
    return states + torch.stack(differences, dim=2)


# ---- how a difference of states `[batch head ...]` is carried to position t: all recurrences are linear in the state


def _carry_mamba(mixer: Any, seen: dict[str, Tensor]) -> Carry:
    log_gates = -mixer.A_log.float().exp() * F.softplus(seen["dt_proj.hook_out"]).float()[..., None]
    return lambda state, t: log_gates[:, t].exp() * state


def _carry_mamba2(mixer: Any, seen: dict[str, Tensor]) -> Carry:
    steps = F.softplus(seen["in_proj.hook_out"][..., -mixer.num_heads :].float() + mixer.dt_bias.float())
    gates = (-mixer.A_log.float().exp() * steps.clamp(*mixer.time_step_limit)).exp()
    return lambda state, t: gates[:, t, :, None, None] * state


def _carry_delta_net(mixer: Any, seen: dict[str, Tensor]) -> Carry:
    # keys as in the scan: of unit length, one for each value head
    keys = seen["hook_k"].float()
    keys = keys / (keys.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    gates, steps = seen["hook_log_decay"].float().exp(), seen["hook_beta"].float()
    keys = keys.repeat_interleave(gates.shape[-1] // keys.shape[2], dim=2)

    def carry(state: Tensor, t: int) -> Tensor:
        state, k = gates[:, t, :, None, None] * state, keys[:, t]
        return state - (steps[:, t, :, None] * k)[..., :, None] * (k[..., None, :] @ state)

    return carry


_CARRIED: dict[str, tuple[tuple[str, ...], Callable[[Any, dict[str, Tensor]], Carry]]] = {
    "GatedDeltaNetBridge": (("hook_k", "hook_log_decay", "hook_beta"), _carry_delta_net),
    "SSM2MixerBridge": (("in_proj.hook_out",), _carry_mamba2),
    "SSMMixerBridge": (("dt_proj.hook_out",), _carry_mamba),
}
"""By kind of layer: the hooks that decide the recurrence, and the function that makes it from their activations."""
