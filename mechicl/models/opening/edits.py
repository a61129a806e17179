"""Check on the model itself that an edit at a hook has an effect."""

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.sites import check_hook, hook_names, instead_of, silent_hook
from mechicl.models.temporary_hooks import without_user_hooks

_CHECKED: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()
"""By model, the hooks at which edits had an effect, with the parts that the model had then."""


def to_write(activation: Tensor, name: str) -> Tensor:
    """Return the tensor to which an edit at a hook is written: a copy, except at "resid_mid".

    Other readers of the activation keep the original: at `hook_mlp_in` of a bridge the stream around the MLP, at
    `hook_q_input` the other heads. But "resid_mid" is the stream itself, which has to be changed in place.
    """
    return activation if name.endswith("hook_resid_mid") else activation.clone()


def check_edits(adapter: ModelAdapter, tokens: Tensor, names: Sequence[str]) -> None:
    """Refuse (ValueError) hooks whose edits a model ignores: effects measured there would be 0, or wrong.

    Some hooks of a `TransformerBridge` are on copies of activations (attention patterns of OPT, GPT-J, GPT-Neo, XGLM),
    and a wrapped module may have parts whose results are unused. Checked on the first prompt, without the user's hooks:

    - Each hook fires once in a run.
    - Noise there changes the predictions, or NaN reaches them (for a head that writes zeros).
    - A stream between attention and MLP ("resid_mid") determines everything after it.

    A hook is checked once, as long as the model has the same parts.
    Of our models only "attn_in" is checked; the rest is tested with the model.
    """
    for name in names:
        check_hook(adapter.model, name)
    if adapter.ours:
        names = [name for name in names if name.endswith("hook_attn_in")]  # which split inputs bypass
    parts = _parts_of(adapter.model)
    known = _CHECKED.setdefault(adapter.model, set())
    names = [name for name in dict.fromkeys(names) if (name, parts) not in known]
    if not names or not len(tokens):
        return
    tokens = tokens[:1]
    with without_user_hooks(adapter.model), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some bridges only warn of a dropped edit
        for name in names:
            if not _has_effect(adapter, tokens, name):
                raise ValueError(f"this model ignores edits at {name!r}, so every effect would be 0{instead_of(name)}")
        for name in names:
            if name.endswith("hook_resid_mid") and not _decides_what_follows(adapter, tokens, name):
                raise ValueError(f"an edit at {name!r} reaches only some of the readers of the stream: take 'attn_out'")
    parts = _parts_of(adapter.model)  # some bridges add hooks in their first run
    known |= {(name, parts) for name in names}


def _parts_of(model: Any) -> tuple[Any, ...]:
    """Return what decides where edits have effects: the modules, their torch hooks and replaced methods."""
    modules = (module for module in model.modules() if not isinstance(module, HookPoint))
    return tuple(
        (id(module), *module._forward_hooks, *module._forward_pre_hooks, id(vars(module).get("forward")))
        for module in modules
    )


@torch.no_grad()
def _has_effect(adapter: ModelAdapter, tokens: Tensor, name: str) -> bool:
    fired: list[Any] = []
    plain = adapter.run(tokens, [(name, lambda activation, hook: fired.append(hook))])
    if not fired:
        raise silent_hook(name)
    if len(fired) > 1:
        raise ValueError(f"the hook {name!r} fires {len(fired)} times in a run, so an edit there is ambiguous")
    edits = (_add_noise, lambda activation, hook: torch.full_like(activation, torch.nan))
    edited = (adapter.run(tokens, [(name, edit)]) for edit in edits)
    return not all(torch.allclose(plain, run, rtol=0, atol=0, equal_nan=True) for run in edited)


@torch.no_grad()
def _decides_what_follows(adapter: ModelAdapter, tokens: Tensor, name: str) -> bool:
    """True if the stream of a run with an earlier edit, patched in, leads to that run's predictions."""
    before = name.replace("hook_resid_mid", "hook_resid_pre")
    if before not in hook_names(adapter.model):
        return True
    edited_stream: list[Tensor] = []

    def keep(activation: Tensor, hook: HookPoint) -> None:
        edited_stream.append(activation.clone())

    def put(activation: Tensor, hook: HookPoint) -> Tensor:
        activation[:] = edited_stream[0]
        return activation

    edited = adapter.run(tokens, [(before, _add_noise), (name, keep)])
    repeated = adapter.run(tokens, [(name, put)])
    return adapter.same_up_to_rounding(repeated, edited)


def _add_noise(activation: Tensor, hook: HookPoint) -> Tensor:
    noise = torch.randn(activation.shape, generator=torch.Generator().manual_seed(0)).to(activation)
    scale = activation[activation.isfinite()].square().mean().sqrt().nan_to_num() + 1e-3
    return activation + scale * noise
