"""A model as interventions see it: any that keeps TransformerLens' protocol, with prompts in and predictions out."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_protocol import TransformerLensModel

from mechicl.models import HookedTransformer, PromptedModel
from mechicl.models.sites import check_hook
from mechicl.prompts import At, Prompts
from mechicl.tokens import TokenSequences

Hook = tuple[str, Callable[..., Tensor | None]]


class Opened:
    """A model, and which of its predictions are read.

    Ours is resumed at any layer and, behind the last hook, takes its quick routes. A `TransformerBridge` is resumed
    too, without running the blocks before where that makes no difference, and unembeds only what is read. Any other
    model of TransformerLens' protocol is run as a whole.

    Args:
        model: in eval mode.
        at: "query" for the last position's prediction `[row y]` (or logits), "points" for those of all points
            `[row point y]` (ours on prompts), "positions" for the outputs at all positions `[row pos d_out]`.

    Raises:
        TypeError: no model of the protocol.
        ValueError: a model in training mode, or predictions that it does not have.
    """

    def __init__(self, model: Any, at: At = "query"):
        if not isinstance(model, TransformerLensModel) or not hasattr(model, "hook_dict"):
            raise TypeError(f"{type(model).__name__} has no hooks to open it by (TransformerLens' protocol)")
        check_eval_mode(model)
        if at not in get_args(At):
            raise ValueError(f"at={at!r} is not one of {get_args(At)}")
        self.model: Any = model
        self.ours = isinstance(model, PromptedModel)
        if at == "points" and not (self.ours and getattr(model.cfg, "one_pass", False)):
            raise ValueError("at='points' is for our models on interleaved prompts with causal keys; take 'query'")
        self.at = at
        self._skips: bool | None = None  # not known yet
        self.resumes = self.ours or "start_at_layer" in inspect.signature(self.model.forward).parameters

    @property
    def is_transformer(self) -> bool:
        """Whether it is ours, and positions meet only in attention."""
        return isinstance(self.model, HookedTransformer)

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self.model.cfg.n_layers

    def tokens(self, prompts: Prompts | TokenSequences | Tensor) -> Tensor:
        """What the model reads, on its device.

        Raises:
            TypeError: neither prompts, sequences nor a tensor, or prompts of points for a model of another kind.
        """
        if isinstance(prompts, TokenSequences):
            prompts = prompts.read
        if isinstance(prompts, Prompts):
            if not self.ours:
                raise TypeError(f"{type(self.model).__name__} reads token ids [prompt pos], got {prompts}")
            return self.model.encode(prompts)
        if not isinstance(prompts, Tensor):
            raise TypeError(
                f"a model reads Prompts, TokenSequences or token ids [prompt pos], got {type(prompts).__name__}"
            )
        return prompts.to(self.model.cfg.device)

    def run(self, tokens: Tensor, hooks: Sequence[Hook] = ()) -> Tensor:
        """Predictions of a whole run."""
        if not self.ours:
            return self._taken(self.model.run_with_hooks(tokens, fwd_hooks=[*hooks, *self._cut()]))
        with self.model.hooks(fwd_hooks=list(hooks)):
            return self._taken(self.model(tokens, at=self.at))

    def resume(self, streams: Tensor, layer: int, hooks: Sequence[Hook], last_hooked: int) -> Tensor:
        """Predictions of a run from the stream before a layer on.

        Args:
            streams: `[row pos d_model]`; may be changed in place.
            layer: that stands before.
            hooks: at layers `layer` to `last_hooked`.
            last_hooked: nothing is hooked behind it.
        """
        if not self.ours:
            if self._skips is None and layer:
                self._skips = self._skipping_works(streams[:1], layer)
            hooks = [*hooks, *self._cut()]
            with self._handing_on(layer if self._skips else 0):
                return self._taken(self.model.run_with_hooks(streams, start_at_layer=layer, fwd_hooks=hooks))
        with self.model.hooks(fwd_hooks=list(hooks)):
            streams = self.model(streams, start_at_layer=layer, stop_at_layer=last_hooked + 1)
        return self._taken(self.model(streams, start_at_layer=last_hooked + 1, at=self.at))

    def run_layer(self, streams: Tensor, layer: int, hooks: Sequence[Hook]) -> Tensor:
        """The stream behind one layer of ours."""
        with self.model.hooks(fwd_hooks=list(hooks)):
            return self.model(streams, start_at_layer=layer, stop_at_layer=layer + 1)

    def resume_from_row(
        self, base: Mapping[int, Tensor], layer: int, pos: int, prompts: Tensor, changed: Tensor
    ) -> Tensor:
        """Predictions of our transformer where the stream before a layer differs from the base run at one position.

        Where keys are causal, only the rows from there on are computed, up to the last layer; the others are the base
        run's.

        Args:
            base: streams of the base run before each layer and behind the last `[prompt pos d_model]`.
            layer: that stands before; the number of layers, if all lies behind.
            pos: the position.
            prompts: which prompt of the base run each row belongs to, `[row]`.
            changed: the stream there `[row d_model]`.
        """
        model, n_layers = self.model, self.n_layers
        first = pos if model.cfg.keys == "causal" else 0
        streams = base[layer][prompts]
        streams[:, pos] = changed
        for current in range(layer, n_layers - 1):
            rows = model(streams, start_at_layer=current, stop_at_layer=current + 1, at=slice(first, None))
            streams = rows if first == 0 else torch.cat([base[current + 1][prompts, :first], rows], dim=1)
        return self._taken(model(streams, start_at_layer=max(layer, n_layers - 1), at=self.at))

    def resume_from_end(self, streams: Tensor) -> Tensor:
        """Predictions of the stream behind our model's last layer."""
        return self._taken(self.model(streams, start_at_layer=self.n_layers, at=self.at))

    @torch.no_grad()
    def predictions(self, tokens: Tensor, batch_size: int) -> Tensor:
        """Predictions of whole runs, in batches of so many prompts."""
        first = self.run(tokens[:batch_size])
        if len(tokens) <= batch_size:
            return first
        out = first.new_empty(len(tokens), *first.shape[1:])
        out[:batch_size] = first
        for start in range(batch_size, len(tokens), batch_size):
            out[start : start + batch_size] = self.run(tokens[start : start + batch_size])
        return out

    @torch.no_grad()
    def record(
        self, tokens: Tensor, names: Iterable[str], batch_size: int, *, ahead: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Activations of a run by hook name `[prompt ...]`, in batches of so many prompts.

        They are those that the user's own hooks leave, except `ahead`: there, those that the user's hooks are given.

        Raises:
            ValueError: a hook that the model does not have, or that does not fire.
        """
        names = sorted(set(names))
        for name in names:
            check_hook(self.model, name)
        kept: dict[str, Tensor] = {}

        for start in range(0, len(tokens), batch_size):
            part = slice(start, start + batch_size)

            def keep(activation: Tensor, hook: HookPoint, name: str, part: slice = part) -> None:
                if name not in kept:
                    kept[name] = activation.new_empty(len(tokens), *activation.shape[1:])
                kept[name][part] = activation

            hooks = {name: _named(keep, name) for name in names}
            with self._ahead({name: hooks.pop(name) for name in ahead}):
                self.run(tokens[part], list(hooks.items()))
        silent = [name for name in names if name not in kept]
        if silent and len(tokens):
            hint = ": call model.set_use_attn_result(True) first" if silent[0].endswith("hook_result") else ""
            raise ValueError(f"the hook {silent[0]!r} does not fire in this model{hint}")
        return kept

    def through(self, name: str, activation: Tensor) -> Tensor:
        """What the user's own hooks there make of an activation."""
        return self.model.hook_dict[name](activation)

    def has_hooks(self) -> bool:
        """Whether the user has attached any to a model of ours."""
        return self.ours and self.model.has_hooks()

    @torch.no_grad()
    def bytes_per_row(self, tokens: Tensor) -> int:
        """A bound on the memory that a run takes for each prompt.

        Everything that the hooks of the largest layer see is counted as if it were alive twice at once, and the outputs
        three times. The hooks of a recurrent network do not see its gates: it is counted twelve times.
        """
        outputs, cache = self.model.run_with_cache(tokens[:1])
        blocks = [0] * (self.n_layers + 1)
        seen: set[int] = set()
        for name, activation in cache.items():
            if activation.data_ptr() not in seen:  # an alias
                seen.add(activation.data_ptr())
                layer = int(name.split(".")[1]) if name.startswith("blocks.") else -1
                blocks[layer] += activation.nbytes
        read = outputs.nbytes if self.at == "positions" or not self._cut() else outputs[:, -1:].nbytes
        return (12 if self.ours and not self.is_transformer else 2) * max(blocks) + 3 * read

    @property
    def bytes_of_products(self) -> int:
        """A bound on the memory that a run takes whatever the number of prompts: products of weights, by quick routes.

        Two products a head as wide as the stream (see `models/fast.py`), or weights of q, k and v joined; with copies.
        """
        if not self.is_transformer:
            return 0
        cfg = self.model.cfg
        width = cfg.d_model if "linear" in cfg.attention or 2 * cfg.d_head >= cfg.d_model else cfg.d_head
        return 8 * cfg.n_heads * cfg.d_model * width * cfg.torch_dtype.itemsize

    @contextmanager
    def _handing_on(self, n_blocks: int) -> Iterator[None]:
        """The first blocks of a bridge hand on what they are given: it runs them and throws away what they make."""
        own = [vars(block) for block in list(self.model.blocks)[:n_blocks]]  # setattr would reach what a bridge wraps
        before = [attributes.get("forward") for attributes in own]
        try:
            for attributes in own:
                attributes["forward"] = _hand_on
            yield
        finally:
            for attributes, forward in zip(own, before, strict=True):
                attributes.pop("forward")
                if forward is not None:
                    attributes["forward"] = forward

    def _skipping_works(self, stream: Tensor, layer: int) -> bool:
        """Whether a run from a layer on is the same when the blocks before it do nothing."""
        plain = self.model.run_with_hooks(stream, start_at_layer=layer, fwd_hooks=[])
        try:
            with self._handing_on(layer):
                return torch.equal(self.model.run_with_hooks(stream, start_at_layer=layer, fwd_hooks=[]), plain)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False  # a block of another signature

    @contextmanager
    def _ahead(self, hooks: Mapping[str, Callable[..., None]]) -> Iterator[None]:
        """Hooks that come before all others."""
        level = 10**6  # of no other context
        points = [(self.model.hook_dict[name], hook) for name, hook in hooks.items()]
        try:
            for point, hook in points:
                point.add_hook(hook, level=level, prepend=True)
            yield
        finally:
            for point, _ in points:
                point.remove_hooks("fwd", level=level)

    def _cut(self) -> list[Hook]:
        """A hook that leaves only the last position to unembed, where that is all that is read."""
        name = "unembed.hook_in"
        return [(name, _last_position)] if self.at == "query" and name in self.model.hook_dict else []

    def _taken(self, outputs: Tensor) -> Tensor:
        return outputs[:, -1] if self.at == "query" else outputs


def check_eval_mode(model: Any) -> None:
    """Refuse a model in training mode, whose dropout would make every run another.

    Raises:
        ValueError: it is, or a part of it.
    """
    wrapped = getattr(model, "original_model", None)
    for root in (model, wrapped) if isinstance(wrapped, torch.nn.Module) else (model,):
        training = next((name for name, part in root.named_modules() if part.training), None)
        if training is not None:
            raise ValueError(f"the model is in training mode ({training or 'all of it'}): call model.eval() first")


def _hand_on(*args: Any, **kwargs: Any) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _last_position(activation: Tensor, hook: HookPoint) -> Tensor:
    return activation[:, -1:]


def _named(function: Callable[..., None], name: str) -> Callable[..., None]:
    def hook_function(activation: Tensor, hook: HookPoint) -> None:
        function(activation, hook, name)

    return hook_function
