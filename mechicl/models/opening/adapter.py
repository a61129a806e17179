"""One way to run, resume and record any model with hooks: prompts in, predictions out."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_protocol import TransformerLensModel
from transformer_lens.utilities import get_act_name

from mechicl.models import HookedTransformer, PromptedModel
from mechicl.models.holding import Direction, adding, holding
from mechicl.models.layered import LayeredModel
from mechicl.models.opening.sites import check_hook, hook_names, silent_hook
from mechicl.models.opening.skipping import same_up_to_rounding, skipping_blocks
from mechicl.models.wrapping.module_hooks import NO_HOOKS
from mechicl.prompts import At, Prompts, TokenSequences

Hook = tuple[str, Callable[..., Tensor | None]]
N_TRIED = 8  # prompts on which a resumed run is compared with a whole one


class ModelAdapter:
    """A model, and which of its predictions are read.

    Our models are resumed at any layer and take their quick routes after the last hook. A `TransformerBridge` is
    resumed too where that gives what a whole run gives, which is tried (`resumes_exactly`), and unembeds only what is
    read. A wrapped module, and any other model of TransformerLens' protocol, is run as a whole.

    Args:
        model: in eval mode.
        at: "query" for the last position's prediction `[row y]` (or logits), "points" for those of all points
            `[row point y]` (ours, and wrapped modules that give them), "positions" for the outputs at all positions
            `[row pos d_out]`.

    Raises:
        TypeError: no model of the protocol, or a wrapped module whose layers were not declared.
        ValueError: a model in training mode, or predictions that it does not have.
    """

    def __init__(self, model: Any, at: At = "query"):
        if not isinstance(model, TransformerLensModel) or not hasattr(model, "hook_dict"):
            raise TypeError(f"{type(model).__name__} has no hooks to open it by (TransformerLens' protocol)")
        if hasattr(model, "_orig_mod"):
            raise TypeError("a model compiled by torch.compile has no hooks that can be changed: pass the one it is of")
        self.model: Any = model
        if not self.model.hook_dict:
            raise TypeError(f"{getattr(model, 'name', type(model).__name__)} {NO_HOOKS}")
        check_eval_mode(model)
        if at not in get_args(At):
            raise ValueError(f"at={at!r} is not one of {get_args(At)}")
        self.ours = isinstance(model, PromptedModel)
        self.reads_prompts = isinstance(model, LayeredModel)
        # whether a wrapped module gives all points is known when it has read prompts: it refuses by itself
        gives_points = self.model.cfg.one_pass if self.ours else self.reads_prompts
        if at == "points" and not gives_points:
            raise ValueError("at='points' is for our models on interleaved prompts with causal keys; take 'query'")
        self.at: At = at
        self._n_skipped: dict[int, int | None] = {}  # by layer, blocks that need not run; None where no run is resumed
        self.resumes = self.ours or "start_at_layer" in inspect.signature(self.model.forward).parameters

    @property
    def is_transformer(self) -> bool:
        """Whether it is a `HookedTransformer` of this package, where positions meet only in attention."""
        return isinstance(self.model, HookedTransformer)

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self.model.cfg.n_layers

    def stream_names(self) -> dict[int, str]:
        """The hooks of the streams that runs are resumed from, by layer; ours have that after the last layer too."""
        if not self.resumes:
            return {}
        names = {layer: get_act_name("resid_pre", layer) for layer in range(self.n_layers)}
        if self.ours:
            return names | {self.n_layers: get_act_name("resid_post", self.n_layers - 1)}
        known = hook_names(self.model)
        return names if all(name in known for name in names.values()) else {}

    def encode(self, prompts: Prompts | TokenSequences | Tensor) -> Tensor:
        """The tokens that the model reads, on its device.

        Raises:
            TypeError: neither prompts, sequences nor a tensor, or prompts of points for a model of another package.
        """
        if isinstance(prompts, TokenSequences):
            prompts = prompts.read
        if isinstance(prompts, Prompts):
            if not self.reads_prompts:
                raise TypeError(f"{type(self.model).__name__} reads token ids [prompt pos], got {prompts}")
            return self.model.encode(prompts)
        if not isinstance(prompts, Tensor):
            raise TypeError(
                f"a model reads Prompts, TokenSequences or token ids [prompt pos], got {type(prompts).__name__}"
            )
        return prompts.to(self.model.cfg.device)

    # ---- runs ----

    def run(self, tokens: Tensor, hooks: Sequence[Hook] = ()) -> Tensor:
        """Predictions of a run from the tokens on."""
        if not self.reads_prompts:
            return self._select_read(self._run_other(tokens, hooks))
        with self.model.hooks(fwd_hooks=list(hooks)):
            return self._select_read(self.model(tokens, at=self.at))

    def run_with_cache(self, tokens: Tensor) -> tuple[Tensor, Any]:
        """Predictions of a run, and all activations by hook name."""
        if self.reads_prompts:
            outputs, cache = self.model.run_with_cache(tokens, at=self.at)
        else:
            with holding(self.model):
                outputs, cache = self.model.run_with_cache(tokens)
        return self._select_read(outputs), cache

    def resume(self, streams: Tensor, layer: int, hooks: Sequence[Hook], last_hooked: int) -> Tensor:
        """Predictions of a run from the stream `[row pos d_model]` before a layer on, which may be changed in place.

        The hooks are at layers `layer` to `last_hooked`; no later layer has one. Not every bridge can: ask
        `resumes_exactly` first.
        """
        if not self.ours:
            return self._resume_skipping(self._n_skipped.get(layer) or 0, streams, layer, hooks)
        with self.model.hooks(fwd_hooks=list(hooks)):
            streams = self.model(streams, start_at_layer=layer, stop_at_layer=last_hooked + 1)
        return self._select_read(self.model(streams, start_at_layer=last_hooked + 1, at=self.at))

    def resumes_exactly(self, layer: int, tokens: Tensor, streams: Tensor) -> bool:
        """Whether a run from the stream before a layer on gives what a run from the tokens on does.

        Ours do. A model of another package is tried once for each layer, on the first prompts: `streams` are those
        before the layer in a run on `tokens`. What is resumed lacks what the tokens decide beside the stream, in BLOOM
        and Mamba for instance, or a part that an edit before would change.
        """
        if self.ours or not self.resumes:
            return self.ours
        if layer not in self._n_skipped:
            tokens, streams = tokens[:N_TRIED], streams[:N_TRIED]
            self._n_skipped[layer] = self._try_to_resume(layer, tokens, streams)
        return self._n_skipped[layer] is not None

    def run_layer(self, streams: Tensor, layer: int, hooks: Sequence[Hook]) -> Tensor:
        """The stream after one layer of our model."""
        with self.model.hooks(fwd_hooks=list(hooks)):
            return self.model(streams, start_at_layer=layer, stop_at_layer=layer + 1)

    def resume_from_row(
        self, base: Mapping[int, Tensor], layer: int, pos: int, prompts: Tensor, changed: Tensor
    ) -> Tensor:
        """Predictions of our transformer where the stream before a layer differs from the base run at one position.

        `base` has its streams before each layer and after the last, `[prompt pos d_model]`; `prompts` says which of
        its prompts each row of `changed`, the stream at that position `[row d_model]`, belongs to. Where keys are
        causal, only the rows from that position on are computed, up to the last layer; those before are the base run's.
        """
        model, n_layers = self.model, self.n_layers
        first = pos if model.cfg.keys == "causal" else 0
        streams = base[layer][prompts]
        streams[:, pos] = changed
        for current in range(layer, n_layers - 1):
            rows = model(streams, start_at_layer=current, stop_at_layer=current + 1, at=slice(first, None))
            streams = rows if first == 0 else torch.cat([base[current + 1][prompts, :first], rows], dim=1)
        return self._select_read(model(streams, start_at_layer=max(layer, n_layers - 1), at=self.at))

    def resume_from_end(self, streams: Tensor) -> Tensor:
        """Predictions from the stream after our model's last layer."""
        return self._select_read(self.model(streams, start_at_layer=self.n_layers, at=self.at))

    @torch.no_grad()
    def predict(self, tokens: Tensor, batch_size: int) -> Tensor:
        """Predictions of runs on all tokens, so many prompts at a time."""
        return torch.cat([self.run(part) for part in tokens.split(batch_size)])

    @torch.no_grad()
    def record(
        self, tokens: Tensor, names: Iterable[str], batch_size: int, *, before_user_hooks: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Activations of runs on all tokens by hook name `[prompt ...]`, so many prompts at a time.

        They are what the hooks that the user attached leave, except at `before_user_hooks`: there, what these hooks
        are given.

        Raises:
            ValueError: a hook that the model does not have, or that does not fire.
        """
        names = sorted(set(names))
        for name in names:
            check_hook(self.model, name)
        recorded: dict[str, Tensor] = {}

        def keep(activation: Tensor, hook: HookPoint, name: str, batch: slice) -> None:
            if name not in recorded:
                recorded[name] = activation.new_empty(len(tokens), *activation.shape[1:])
            recorded[name][batch] = activation

        for start in range(0, len(tokens), batch_size):
            batch = slice(start, start + batch_size)
            hooks = {name: partial(keep, name=name, batch=batch) for name in names}
            first: list[tuple[HookPoint, Callable[..., Any], Direction]] = [
                (self.model.hook_dict[name], hooks.pop(name), "fwd") for name in before_user_hooks
            ]
            with holding(self.model), adding(first, prepend=True):  # before those that the user attached
                self.run(tokens[batch], list(hooks.items()))
        silent = [name for name in names if name not in recorded]
        if silent and len(tokens):
            raise silent_hook(silent[0])
        return recorded

    # ---- hooks that the user attached ----

    def has_user_hooks(self) -> bool:
        """Whether the user has attached hooks to the model."""
        if self.ours:
            return self.model.has_hooks()
        with holding(self.model):
            return any(point.has_hooks() for point in self.model.hook_dict.values())

    def apply_user_hooks(self, name: str, activation: Tensor) -> Tensor:
        """What the hooks that the user attached there make of an activation."""
        with holding(self.model):
            return self.model.hook_dict[name](activation)

    # ---- memory ----

    @torch.no_grad()
    def bytes_per_row(self, tokens: Tensor) -> int:
        """A bound on the memory that a run takes for each prompt."""
        measure = getattr(self.model, "_bytes_per_row", None)
        if measure is not None:
            return int(measure(tokens))
        # Everything that the hooks of the largest layer see is counted as if it were alive twice at once, and the
        # outputs three times. The hooks of a recurrent network do not see its gates: its layer is counted twelve times.
        with holding(self.model):
            outputs, cache = self.model.run_with_cache(tokens[:1])
        blocks = [0] * (self.n_layers + 1)
        seen: set[int] = set()
        for name, activation in cache.items():
            if activation.data_ptr() not in seen:  # an alias
                seen.add(activation.data_ptr())
                layer = int(name.split(".")[1]) if name.startswith("blocks.") else -1
                blocks[layer] += activation.nbytes
        read = outputs.nbytes if self.at == "positions" or not self._unembed_hooks() else outputs[:, -1:].nbytes
        return (12 if self.ours and not self.is_transformer else 2) * max(blocks) + 3 * read

    @property
    def bytes_of_products(self) -> int:
        """A bound on the memory that a run takes whatever the number of prompts, for products of weights."""
        # the routes of transformer/fast.py: two products a head as wide as the stream, or q, k and v joined; copied
        if not self.is_transformer:
            return 0
        cfg = self.model.cfg
        width = cfg.d_model if "linear" in cfg.attention or 2 * cfg.d_head >= cfg.d_model else cfg.d_head
        return 8 * cfg.n_heads * cfg.d_model * width * cfg.torch_dtype.itemsize

    # ---- models of other packages ----

    @torch.no_grad()
    def _try_to_resume(self, layer: int, tokens: Tensor, streams: Tensor) -> int | None:
        """How many blocks before a layer need not run for a resumed run to be right; None where it never is."""
        whole = self.run(tokens)
        for n_skipped in dict.fromkeys((layer, 0)):
            try:
                resumed = self._resume_skipping(n_skipped, streams.clone(), layer, [])
            except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
                continue  # a block of another signature, or no layer to start at
            if same_up_to_rounding(resumed, whole):
                return n_skipped
        return None

    def _resume_skipping(self, n_skipped: int, streams: Tensor, layer: int, hooks: Sequence[Hook]) -> Tensor:
        with holding(self.model), skipping_blocks(self.model, n_skipped):
            return self._select_read(self._run_other(streams, hooks, start_at_layer=layer))

    def _run_other(self, inputs: Tensor, hooks: Sequence[Hook], **where: int) -> Tensor:
        """A run of another package's model, with its lock held."""
        with holding(self.model):
            return self.model.run_with_hooks(inputs, fwd_hooks=[*hooks, *self._unembed_hooks()], **where)

    def _unembed_hooks(self) -> list[Hook]:
        """A hook that leaves only the last position to unembed, where that is all that is read."""
        name = "unembed.hook_in"
        return [(name, _last_position)] if self.at == "query" and name in self.model.hook_dict else []

    def _select_read(self, outputs: Tensor) -> Tensor:
        return outputs[:, -1] if self.at == "query" else outputs


def check_eval_mode(model: Any) -> None:
    """Refuse (ValueError) a model in training mode, or with a part that is: dropout would make every run another."""
    wrapped = getattr(model, "original_model", None)
    for root in (model, wrapped) if isinstance(wrapped, torch.nn.Module) else (model,):
        training = next((name for name, part in root.named_modules() if part.training), None)
        if training is not None:
            raise ValueError(f"the model is in training mode ({training or 'all of it'}): call model.eval() first")


def _last_position(activation: Tensor, hook: HookPoint) -> Tensor:
    return activation[:, -1:]
