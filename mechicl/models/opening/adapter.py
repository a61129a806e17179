"""`ModelAdapter`: run, resume and record any model with hooks."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from transformer_lens import TransformerLensKeyValueCache
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_protocol import TransformerLensModel
from transformer_lens.utilities import get_act_name

from mechicl.base.arguments import count_undefined
from mechicl.base.precision import at_least_float32
from mechicl.models import HookedTransformer, PromptedModel, TableTransformer
from mechicl.models.layered import LayeredModel
from mechicl.models.opening.sites import check_hook, silent_hook
from mechicl.models.temporary_hooks import Direction, adding, in_this_thread
from mechicl.models.wrapping.module_hooks import NO_HOOKS
from mechicl.models.wrapping.trials import refuse_training_mode
from mechicl.prompts import At, Prompts, TokenSequences

Hook = tuple[str, Callable[..., Tensor | None]]


class ModelAdapter:
    """A model in eval mode, and the positions of its predictions. The analysis that uses it has the model's lock.

    Our models are resumed at any layer and take their quick routes after the last hook. Others are run as a whole; a
    `TransformerBridge` unembeds only the positions that are read. `at` is "query" for `[row y]` (or logits) of the last
    position, "points" for `[row point y]`, or "positions" for all outputs `[row pos d_out]`; those of half-precision
    models become float32.
    """

    def __init__(self, model: Any, at: At = "query"):
        if not isinstance(model, TransformerLensModel) or not hasattr(model, "hook_dict"):
            raise TypeError(f"{type(model).__name__} has no hooks to open it by (TransformerLens' protocol)")
        if hasattr(model, "_orig_mod"):
            raise TypeError("a model compiled by torch.compile cannot be hooked: pass the original")
        self.model: Any = model
        if not self.model.hook_dict:
            raise TypeError(f"{getattr(model, 'name', type(model).__name__)} {NO_HOOKS}")
        check_eval_mode(model)
        if at not in get_args(At):
            raise ValueError(f"at={at!r} is not one of {get_args(At)}")
        self.ours = isinstance(model, PromptedModel)
        self.reads_prompts = isinstance(model, LayeredModel)
        # a wrapped module checks this when it reads prompts
        gives_points = self.model.cfg.one_pass if self.ours else self.reads_prompts
        if at == "points" and not gives_points:
            raise ValueError("at='points' is for our models on interleaved prompts with causal keys; take 'query'")
        self.at: At = at
        self.bytes_of_cache: dict[int, tuple[float, float] | None] = {}  # by length of prompts; see `suffix_runs`

    @property
    def is_transformer(self) -> bool:
        """True for a `HookedTransformer` of this package, in which positions interact only in attention."""
        return isinstance(self.model, HookedTransformer)

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self.model.cfg.n_layers

    def stream_names(self) -> dict[int, str]:
        """Return the hooks of the streams before each layer and after the last, by the number of layers before them."""
        names = {layer: get_act_name("resid_pre", layer) for layer in range(self.n_layers)}
        return names | {self.n_layers: get_act_name("resid_post", self.n_layers - 1)}

    def encode(self, prompts: Prompts | TokenSequences | Tensor) -> Tensor:
        """Encode prompts as the model's tokens, on its device."""
        if isinstance(prompts, TokenSequences):
            prompts = prompts.read
        elif isinstance(prompts, Tensor):
            refuse_padding(self.model, prompts)
        if isinstance(prompts, Prompts):
            if not self.reads_prompts:
                raise TypeError(f"{type(self.model).__name__} reads token ids [prompt pos], got {prompts}")
            return self.model.encode(prompts)
        if not isinstance(prompts, Tensor):
            kind = type(prompts).__name__
            raise TypeError(f"a model reads Prompts, TokenSequences or token ids [prompt pos], got {kind}")
        has_rows = not {"pos_embed.hook_out", "hook_pos_embed"}.isdisjoint(self.model.hook_dict)
        n_ctx = getattr(self.model.cfg, "n_ctx", None) if has_rows else None
        if n_ctx is not None and prompts.ndim == 2 and prompts.shape[1] > n_ctx:
            raise ValueError(f"prompts have {prompts.shape[1]} tokens, and the model reads at most {n_ctx}")
        return prompts.to(self.model.cfg.device)

    # ---- runs ----

    def run(self, tokens: Tensor, hooks: Sequence[Hook] = (), cache: Any = None) -> Tensor:
        """Return the predictions of a run from the tokens on, after those whose keys and values are in a cache."""
        options = {} if cache is None else {"past_kv_cache" if self.reads_prompts else "past_key_values": cache}
        if not self.reads_prompts:
            own = [(name, in_this_thread(hook)) for name, hook in (*hooks, *self._unembed_hooks())]
            return self._select_read(self.model.run_with_hooks(tokens, fwd_hooks=own, **options))
        with self.model.hooks(fwd_hooks=list(hooks)) if hooks else nullcontext():
            return self._select_read(self.model(tokens, at=self.at, **options, **self._seeing_all(tokens)))

    def run_with_cache(self, tokens: Tensor) -> tuple[Tensor, Any]:
        """Return the predictions of a run, and all activations by hook name."""
        options = {"at": self.at} if self.reads_prompts else {}
        outputs, cache = self.model.run_with_cache(tokens, **options, **self._seeing_all(tokens))
        return self._select_read(outputs), cache

    def _seeing_all(self, tokens: Tensor) -> dict[str, Tensor]:
        """The mask of a run in which no token id of our model is padding, as in runs that resume from a stream."""
        is_ids = self.ours and not tokens.is_floating_point()
        # made anew: under vmap a tensor like the tokens could not be looked at
        return {"attention_mask": torch.ones(tokens.shape, dtype=torch.int64, device=tokens.device)} if is_ids else {}

    @property
    def caches(self) -> bool:
        """True if runs of the model may keep keys and values; models of other packages are tried."""
        if not self.reads_prompts:
            return True
        return self.is_transformer and self.model.cfg.prompt_format == "token_ids" and self.model.continues

    def run_cached(self, tokens: Tensor) -> tuple[Tensor, Any]:
        """Return the predictions of a run, and its cache of keys and values; see `caches`."""
        if self.reads_prompts:
            cache = TransformerLensKeyValueCache.init_cache(self.model.cfg, tokens.device, len(tokens))
            return self.run(tokens, cache=cache), cache
        options = {"return_type": "logits_and_cache", "use_cache": True}
        outputs, cache = self.model.run_with_hooks(tokens, fwd_hooks=self._unembed_hooks(), **options)
        return self._select_read(outputs), cache

    def resume(
        self,
        streams: Tensor,
        layer: int,
        hooks: Sequence[Hook],
        last_hooked: int,
        cache_of_earlier: Callable[[], Any] | None = None,
    ) -> Tensor:
        """Resume a run of our model from the stream `[row pos d_model]` before a layer, which may be changed in place.

        The hooks are at layers `layer` to `last_hooked`. The run continues positions whose keys and values
        `cache_of_earlier` gives, anew at each call.
        """

        def earlier() -> dict[str, Any]:
            return {} if cache_of_earlier is None else {"past_kv_cache": cache_of_earlier()}

        with self.model.hooks(fwd_hooks=list(hooks)):
            streams = self.model(streams, start_at_layer=layer, stop_at_layer=last_hooked + 1, **earlier())
        return self._select_read(self.model(streams, start_at_layer=last_hooked + 1, at=self.at, **earlier()))

    def run_layer(self, streams: Tensor, layer: int, hooks: Sequence[Hook]) -> Tensor:
        """Run one layer of our model on a stream."""
        with self.model.hooks(fwd_hooks=list(hooks)):
            return self.model(streams, start_at_layer=layer, stop_at_layer=layer + 1)

    def resume_from_row(
        self, base: Mapping[int, Tensor], layer: int, pos: int, prompts: Tensor, changed: Tensor
    ) -> Tensor:
        """Resume our transformer with a stream before a layer that differs from the base run at one position.

        `base` has the streams `[prompt pos d_model]` of all layers; `prompts` are the indices of the rows of `changed`
        `[row d_model]`. With causal keys, only positions from there on are computed.
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
        """Compute predictions from the stream after our model's last layer."""
        return self._select_read(self.model(streams, start_at_layer=self.n_layers, at=self.at))

    @torch.no_grad()
    def predict(self, tokens: Tensor, batch_size: int) -> Tensor:
        """Run the model on all tokens in batches, and return its predictions."""
        return torch.cat([self.run(part) for part in tokens.split(batch_size)])

    @torch.no_grad()
    def record(
        self, tokens: Tensor, names: Iterable[str], batch_size: int, *, before_user_hooks: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Run the model on all tokens in batches, and return activations by hook name `[prompt ...]`.

        Activations are recorded after the user's own hooks, except at `before_user_hooks`.
        """
        return self.predict_and_record(tokens, names, batch_size, before_user_hooks=before_user_hooks)[1]

    @torch.no_grad()
    def predict_and_record(
        self, tokens: Tensor, names: Iterable[str], batch_size: int, *, before_user_hooks: Collection[str] = ()
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the predictions of `predict` and the activations of `record`, from the same runs."""
        names = sorted(set(names))
        for name in names:
            check_hook(self.model, name)
        recorded: dict[str, Tensor] = {}
        predictions: list[Tensor] = []

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
            with adding(first, prepend=True):
                predictions.append(self.run(tokens[batch], list(hooks.items())))
        silent = [name for name in names if name not in recorded]
        if silent and len(tokens):
            raise silent_hook(silent[0])
        return torch.cat(predictions) if predictions else self.run(tokens), recorded

    # ---- the user's hooks ----

    def has_user_hooks(self) -> bool:
        """True if the user has attached hooks to the model."""
        if self.ours:
            return self.model.has_hooks()
        return any(point.has_hooks() for point in self.model.hook_dict.values())

    def apply_user_hooks(self, name: str, activation: Tensor) -> Tensor:
        """Apply the user's hooks of that name to an activation."""
        return self.model.hook_dict[name](activation)

    # ---- memory ----

    @torch.no_grad()
    def bytes_per_row(self, tokens: Tensor, n_layers: int = 1) -> int:
        """Bound the memory of a run for each prompt, in bytes, if the activations of some layers are kept at a time."""
        measure = getattr(self.model, "_bytes_per_row", None)
        if measure is not None:
            return n_layers * int(measure(tokens))
        # Activations at the hooks of the largest layer are counted twice, as if all were alive at once, and the outputs
        # three times. A recurrent network has no hooks at its gates: its layer is counted twelve times.
        outputs, cache = self.model.run_with_cache(tokens[:1])
        blocks = [0] * (self.n_layers + 1)
        seen: set[int] = set()
        for name, activation in cache.items():
            if activation.data_ptr() not in seen:  # an alias
                seen.add(activation.data_ptr())
                layer = int(name.split(".")[1]) if name.startswith("blocks.") else -1
                blocks[layer] += activation.nbytes
        read = outputs.nbytes if self.at == "positions" or not self._unembed_hooks() else outputs[:, -1:].nbytes
        *blocks, around = blocks  # what is outside of layers (embedding, logits) is kept once
        largest = max(blocks, default=0)
        kept = max(largest, around) if n_layers == 1 else n_layers * largest + around
        return (12 if self.ours and not self.is_transformer else 2) * kept + 3 * read

    @property
    def bytes_of_products(self) -> int:
        """A bound in bytes on the memory of a run for products of weights, whatever the number of prompts."""
        # the routes of transformer/fast.py: two products a head as wide as the stream, or q, k and v joined; copied
        if not self.is_transformer:
            return 0
        cfg = self.model.cfg
        width = cfg.d_model if "linear" in cfg.attention or 2 * cfg.d_head >= cfg.d_model else cfg.d_head
        return 8 * cfg.n_heads * cfg.d_model * width * cfg.torch_dtype.itemsize

    # ---- the positions that are read ----

    def _unembed_hooks(self) -> list[Hook]:
        """Hooks with which a model of another package unembeds the last position only, if it is read alone."""
        name = "unembed.hook_in"
        only_last = self.at == "query" and name in self.model.hook_dict
        return [(name, lambda stream, hook: stream[:, -1:])] if only_last else []

    def _select_read(self, outputs: Tensor) -> Tensor:
        if isinstance(self.model, TableTransformer):  # predictions of classes are probabilities
            outputs = self.model.decode(outputs)
        # metrics, probabilities and their differences need more digits than half precision has
        return at_least_float32(outputs[:, -1] if self.at == "query" else outputs)

    def same_up_to_rounding(self, a: Tensor, b: Tensor) -> bool:
        """True if predictions agree up to rounding in the model's dtype, and are infinite or NaN in the same places."""
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), a.dtype)
        return same_up_to_rounding(a.to(dtype), b.to(dtype))


def same_up_to_rounding(a: Tensor, b: Tensor) -> bool:
    """True if two tensors agree up to rounding of the largest entry, and are infinite or NaN in the same places."""
    if a.shape != b.shape:
        return False
    largest = max((float(part[part.isfinite()].abs().amax()) for part in (a, b) if part.isfinite().any()), default=0.0)
    return torch.allclose(a, b, rtol=0, atol=16 * torch.finfo(a.dtype).eps * largest, equal_nan=True)


def refuse_padding(model: Any, ids: Tensor) -> None:
    """Refuse (ValueError) ids `[prompt pos]` with padding, which runs without an attention mask read as text.

    A padding id that also begins or ends texts may occur once at an end, if it does in all texts.
    """
    source = getattr(model, "tokenizer", None) or getattr(getattr(model, "original_model", None), "config", None)
    pad, bos, eos = (getattr(source, f"{name}_token_id", None) for name in ("pad", "bos", "eos"))
    if pad is None or ids.ndim != 2:
        return
    shared = pad in (bos, *(eos if isinstance(eos, list) else [eos]))
    for at_end in (ids == pad, (ids == pad).flip(1)):
        n = at_end.int().cumprod(1).sum(1)
        if n.any() and not (shared and (n == 1).all()):
            also = ", unless all begin or end with one" if shared else ""
            raise ValueError(
                f"texts must not be padded (with the id {pad}{also}), as no mask hides it: give those of one length"
            )


def check_eval_mode(model: Any) -> None:
    """Refuse (ValueError) a model in training mode, or with weights of NaN."""
    wrapped = getattr(model, "original_model", None)
    for root in (model, wrapped) if isinstance(wrapped, torch.nn.Module) else (model,):
        refuse_training_mode(root)
    for name, weight in model.named_parameters():
        if (n_bad := count_undefined(weight)) and not name.endswith("A_log"):  # there -inf is a decay of 1
            raise ValueError(f"the model has {n_bad} of {weight.numel()} weights of {name} that are NaN or infinite")
