"""Whether what a hook puts in place of an activation is what a model goes on with, tried on the model itself."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechicl.models.holding import holding
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.sites import check_hook, hook_names, instead_of, silent_hook
from mechicl.models.opening.skipping import same_up_to_rounding


def to_write(activation: Tensor, name: str) -> Tensor:
    """The tensor that an edit at a model's hook is written to: a copy, unless the hook is "resid_mid".

    Other readers of the activation keep the original: at `hook_mlp_in` of a bridge the stream around the MLP, at
    `hook_q_input` the other heads. But "resid_mid" is the stream itself, which has to be changed in place.
    """
    return activation if name.endswith("hook_resid_mid") else activation.clone()


def check_edits(adapter: ModelAdapter, tokens: Tensor, names: Sequence[str]) -> None:
    """Refuse (ValueError) hooks whose edits a model ignores: effects measured there would be 0, or wrong.

    A `TransformerBridge` has hooks on copies of what the model computes elsewhere (attention patterns of OPT, GPT-J,
    GPT-Neo, XGLM), and a wrapped module may have parts whose results are unused. Three things are checked, on the first
    prompt and without the user's hooks:

    - Each hook fires once in a run.
    - The predictions depend on the hook's output: it is in their graph. That separates an ignored edit from one without
      effect (a head that writes zeros). Without a graph, where the model detaches its activations, large noise has to
      change the predictions, or NaN to reach them.
    - A stream between attention and MLP ("resid_mid") that is patched in determines everything that follows: with the
      stream that an earlier edit led to, the predictions are those of that edit.

    Args:
        adapter: of the model; of ours only "attn_in" is checked, the rest is tested with the model.
        tokens: `[prompt pos ...]`.
        names: of the hooks.
    """
    for name in names:
        check_hook(adapter.model, name)
    if adapter.ours:
        names = [name for name in names if name.endswith("hook_attn_in")]  # which split inputs bypass
    if not names or not len(tokens):
        return
    tokens, names = tokens[:1], list(dict.fromkeys(names))
    with without_user_hooks(adapter.model), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some bridges warn of an edit that they drop, and go on
        for name in _not_in_graph(adapter, tokens, names):
            if not any(_changes(adapter, tokens, name, edit) for edit in (_add_noise, _put_nan)):
                raise ValueError(f"this model ignores edits at {name!r}, so every effect would be 0{instead_of(name)}")
        for name in names:
            if name.endswith("hook_resid_mid") and not _decides_what_follows(adapter, tokens, name):
                raise ValueError(
                    f"an edit at {name!r} reaches only some of the parts that read the stream: take "
                    f"'attn_out', or 'resid_post' of the layer before"
                )


@contextmanager
def without_user_hooks(model: Any) -> Iterator[None]:
    """A context in which the hooks attached to a model's hook points do not run, and which holds the model's lock."""
    with holding(model):
        points = dict.fromkeys(point for point in model.hook_dict.values() if isinstance(point, HookPoint))
        before = [(point, dict(point._forward_hooks)) for point in points if point._forward_hooks]
        try:
            for point, _ in before:
                point._forward_hooks.clear()
            yield
        finally:
            for point, hooks in before:
                point._forward_hooks.update(hooks)


def _not_in_graph(adapter: ModelAdapter, tokens: Tensor, names: Sequence[str]) -> list[str]:
    """The hooks whose output the predictions do not depend on, as far as torch's graph says."""
    fired: Counter[str] = Counter()
    probes: dict[str, Tensor] = {}

    def probe(name: str) -> Callable[..., Tensor]:
        def add_probe(activation: Tensor, hook: HookPoint) -> Tensor:
            fired[name] += 1
            probes[name] = torch.zeros_like(activation, requires_grad=True)
            return activation + probes[name]

        return add_probe

    try:
        with torch.inference_mode(False), torch.enable_grad():
            predictions = adapter.run(tokens, [(name, probe(name)) for name in names])
            in_graph = predictions.requires_grad and bool(probes)
            gradients = [None] * len(probes)
            if in_graph:
                gradients = torch.autograd.grad(predictions.sum(), list(probes.values()), allow_unused=True)
    except (RuntimeError, NotImplementedError):  # a model that cannot be differentiated: edits will say
        fired.clear()
        for name in names:
            adapter.run(tokens, [(name, lambda activation, hook, name=name: fired.update([name]))])
        gradients = [None] * len(names)
        probes = dict.fromkeys(names, tokens)
    for name in names:
        if not fired[name]:
            raise silent_hook(name)
        if fired[name] > 1:
            raise ValueError(f"the hook {name!r} fires {fired[name]} times in a run, so an edit there is ambiguous")
    return [name for name, gradient in zip(probes, gradients, strict=True) if gradient is None]


@torch.no_grad()
def _changes(adapter: ModelAdapter, tokens: Tensor, name: str, edit: Callable[..., Tensor]) -> bool:
    """Whether an edit changes the predictions in any bit."""
    # both on the route with hooks
    plain, edited = (adapter.run(tokens, [(name, hook)]) for hook in (lambda activation, hook: None, edit))
    return not torch.equal(plain.nan_to_num(), edited.nan_to_num()) or not torch.equal(plain.isnan(), edited.isnan())


@torch.no_grad()
def _decides_what_follows(adapter: ModelAdapter, tokens: Tensor, name: str) -> bool:
    """Whether the stream that an edit before the layer leads to gives that edit's predictions when it is put in."""
    before = name.replace("hook_resid_mid", "hook_resid_pre")
    if before not in hook_names(adapter.model):
        return True
    led_to: list[Tensor] = []

    def keep(activation: Tensor, hook: HookPoint) -> None:
        led_to.append(activation.clone())

    def put(activation: Tensor, hook: HookPoint) -> Tensor:
        activation[:] = led_to[0]
        return activation

    edited = adapter.run(tokens, [(before, _add_noise), (name, keep)])
    repeated = adapter.run(tokens, [(name, put)])
    return same_up_to_rounding(repeated, edited)


def _add_noise(activation: Tensor, hook: HookPoint) -> Tensor:
    """Noise as large as the activation, the same every time."""
    noise = torch.randn(activation.shape, generator=torch.Generator().manual_seed(0)).to(activation)
    scale = activation[activation.isfinite()].square().mean().sqrt().nan_to_num() + 1e-3
    return activation + scale * noise


def _put_nan(activation: Tensor, hook: HookPoint) -> Tensor:
    return torch.full_like(activation, torch.nan)
