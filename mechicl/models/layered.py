"""`LayeredModel`: a network on prompts with hooks and a stream at every layer, ours or a wrapped module."""

import copy
import copyreg
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechicl.base.arguments import checked, count_undefined
from mechicl.base.precision import at_least_float32
from mechicl.base.settings import settings
from mechicl.base.threads import holding, holds_models
from mechicl.base.warning import warn
from mechicl.models.cache import SummingCache
from mechicl.models.opening.sites import hook_names, nearest_name
from mechicl.prompts import At, Prompts

FAST_BYTES, FEWEST = 2**24, 64
"""Bytes of a batch of predictions on a CPU, small enough that freed memory is used again, and its fewest prompts."""

HookAt = tuple[str | Callable[[str], bool], Callable[..., Any]]


def fast_batch(bytes_per_prompt: float) -> int:
    """Return the number of prompts whose activations fit into a processor's cache."""
    return max(FEWEST, int(FAST_BYTES / max(bytes_per_prompt, 1)))


class LayeredModel(HookedRootModule):
    """A learner with hooks whose stream can be read at every layer.

    `predict` and `predict_prefixes` take any number of prompts in bounded memory. Their results carry gradients to the
    prompts, if these require them, and not to the weights: to train, differentiate the network's own outputs. Those of
    a half-precision model are float32.

    Threads may predict with one model at the same time. A thread that adds hooks (`hooks`, `run_with_hooks`,
    `run_with_cache`, and all analyses that intervene) locks the model: runs in other threads wait.

    Attributes:
        cfg: with at least `n_layers`, `n_heads`, `d_model`, `one_pass` (True if one pass predicts every point from the
            points before it), `prompt_format`, `format`, `device` and `torch_dtype`.
    """

    cfg: Any
    blocks: Any

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def config(self) -> Any:
        """The model's `cfg`, under the name that other libraries look for."""
        return self.cfg

    @property
    def device(self) -> torch.device:
        """The device of the model's weights."""
        return torch.device(self.cfg.device)

    @holds_models
    def has_hooks(self) -> bool:
        """Return True if a hook is attached to any part of the model, or a part was replaced.

        Hooks of a `with model.hooks(...)` in another thread are never seen: this thread waits until they are removed.
        """
        return self._is_hooked()

    def _is_hooked(self) -> bool:
        return any(map(has_torch_hooks, self.modules()))

    def _in_parts(self, predict: Callable[[Prompts], Tensor], prompts: Prompts) -> Tensor:
        """Predictions without a graph, in batches that take at most `settings.memory` bytes, on a CPU fewer.

        If the prompts require gradients, the predictions carry them; attached hooks see all prompts in one run.
        """
        if prompts.xs.requires_grad or prompts.ys.requires_grad or self.has_hooks():
            return _checked(predict(prompts))
        if len(prompts) == 1:  # which cannot be divided; for a single prompt, planning takes as long as a layer
            with torch.no_grad():
                return _checked(predict(prompts))
        each = max(self.bytes_per_prompt(prompts), 1)
        n = max(1, int(settings.memory / each))
        if prompts.xs.device.type == "cpu":
            n = min(n, fast_batch(each))
        with torch.no_grad():
            parts = [predict(part) for part in prompts.split(n)]
        return _checked(parts[0] if len(parts) == 1 else torch.cat(parts))

    # ---- the stream, layer by layer ----

    @checked
    def count_points(self, prompts: Prompts) -> Int[Tensor, "pos"]:
        """Count the context points that each position can depend on: those whose y comes before or at it.

        Raises:
            ValueError: positions see later points, or the positions of the points are not known.
        """
        self.encode(prompts[:1])  # after which the config of a wrapped module is complete
        if not getattr(self.cfg, "causal", self.cfg.one_pass):
            raise ValueError(
                "the model's positions see later points, or the points' positions are not known: take an interleaved "
                "model with causal keys, or a wrapped one with Reading(points=) at which no later point is seen"
            )
        n_pos = next(iter(self.layer_streams(prompts[:1], "positions"))).shape[1]
        positions = torch.arange(n_pos)
        return torch.searchsorted(positions[self._positions("points", n_pos)].contiguous(), positions)

    def _points(self, n_pos: int) -> slice:
        return self.cfg.format.prediction_positions(n_pos)

    def _positions(self, at: At | slice, n_pos: int) -> slice:
        if isinstance(at, slice):
            return at
        if at not in get_args(At):
            raise ValueError(f"at={at!r} is not one of {get_args(At)}")
        if at == "points":
            return self._points(n_pos)
        return slice(n_pos - 1, n_pos) if at == "query" else slice(None)

    @property
    def reads_out(self) -> bool:
        """True if the model has `read_out`; a wrapped module may not."""
        return True

    def to_tokens(self, prompts: Prompts | Tensor | Any, *, prepend_bos: bool | None = None) -> Tensor:
        """Encode prompts as tokens; tokens are returned unchanged."""
        if not isinstance(prompts, Prompts | Tensor):
            raise TypeError(f"{type(self).__name__} reads prompts and tokens, got {type(prompts).__name__}")
        return self.encode(prompts) if isinstance(prompts, Prompts) else prompts

    # ---- hooks ----

    @checked
    @contextmanager
    def hooks(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        fwd_hooks: Sequence[HookAt] = (),
        bwd_hooks: Sequence[HookAt] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Any]:
        """Attach hooks to the model during a `with` block, as in TransformerLens.

        Other threads cannot run the model during the block. At its end only the hooks that it added are removed.

        Args:
            fwd_hooks: pairs of a hook's name (or a function of names that selects hooks) and a function of the
                activation and the keyword `hook`; a tensor that it returns replaces the activation.
            bwd_hooks: such pairs with functions of the activation's gradient.
            reset_hooks_end: False to keep the hooks until `reset_hooks`.
            clear_contexts: empty the dictionaries `ctx` of all hook points at the end.
        """
        for name, _ in (*fwd_hooks, *bwd_hooks):
            self._check_point(name)
        with holding(self), super().hooks(list(fwd_hooks), list(bwd_hooks), reset_hooks_end, clear_contexts):
            yield self

    def _check_point(self, name: str | Callable[[str], bool]) -> None:
        if callable(name):
            if any(map(name, self.hook_dict)):
                return
            raise ValueError("a function of names selects no hook of this model: see hook_dict for the names")
        if isinstance(self.mod_dict.get(name), HookPoint):
            return
        if name in self.mod_dict:
            raise TypeError(f"{name!r} is not a hook but a part of the model ({type(self.mod_dict[name]).__name__})")
        raise KeyError(f"name: this model has no hook {name!r}{nearest_name(name, hook_names(self))}")

    @checked
    @holds_models
    def add_hook(self, name: str | Callable[[str], bool], hook: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Add a hook that stays until `reset_hooks` and runs in all threads; as in TransformerLens.

        Raises:
            KeyError: a hook that the model does not have.
        """
        self._check_point(name)
        super().add_hook(name, hook, *args, **kwargs)

    add_caching_hooks = holds_models(HookedRootModule.add_caching_hooks)
    remove_all_hook_fns = holds_models(HookedRootModule.remove_all_hook_fns)

    # ---- copies ----

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy without temporary hooks, made while no other thread has hooks on the model."""
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__setstate__(self._copy_state(memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickling: the state of a copy without temporary hooks."""
        return copyreg.__newobj__, (type(self),), self._copy_state({id(self): self})  # type: ignore[attr-defined]

    def _copy_state(self, memo: dict[int, Any]) -> dict[str, Any]:
        with holding(self):
            state = copy.deepcopy(self.__dict__, memo)
        for point in state["hook_dict"].values():
            for level in range(1, state["context_level"] + 1):
                point.remove_hooks("both", level=level)
        return state | {"context_level": 0}

    state_dict: Any = holds_models(HookedRootModule.state_dict)  # not while another thread has replaced weights

    def run_with_cache(
        self, input: Tensor | Prompts | str | list[str], *args: Any, return_cache_object: bool = True, **kwargs: Any
    ) -> Any:
        """Run the model and record activations; return the outputs and an `ActivationCache` by hook name.

        Args:
            input: prompts, tokens, or texts for a model with a tokenizer.
            args: further arguments of `forward`.
            return_cache_object: False to return a plain dictionary.
            kwargs: TransformerLens' options: `names_filter` (the hooks to record; by default all), `device`,
                `remove_batch_dim`, `pos_slice`. For gradients, which `incl_bwd` takes of a single output only, attach
                `bwd_hooks` with `hooks`.
        """
        names = kwargs.get("names_filter")
        names = [names] if isinstance(names, str) else names
        if isinstance(names, Sequence) and (unknown := [str(name) for name in names if name not in hook_names(self)]):
            raise ValueError(f"names_filter: no hook {unknown[0]!r}{nearest_name(unknown[0], hook_names(self))}")
        outputs, cache = super().run_with_cache(self._checked_dtype(self.to_tokens(input)), *args, **kwargs)
        if return_cache_object:
            cache = SummingCache(cache, self, has_batch_dim=not kwargs.get("remove_batch_dim", False))
        return outputs, cache

    def _checked_dtype(self, tokens: Tensor) -> Tensor:
        return tokens

    # ---- queries ----

    def _checked_queries(self, prompts: Prompts, queries: Tensor, at: At) -> tuple[Prompts, Tensor, range]:
        """Prompts and queries on the network's device, and the numbers of context points that precede the queries."""
        n, cfg = prompts.n_context, self.cfg
        prompts = prompts.to(cfg.device, cfg.torch_dtype)
        self.encode(prompts[:0])  # refuses prompts of another kind
        if at not in ("points", "query"):
            raise ValueError(f"at={at!r} is not one of ('points', 'query'), where queries can be")
        points = range(n + 1) if at == "points" else range(n, n + 1)
        if queries.ndim != 4 or (*queries.shape[:2], queries.shape[3]) != (len(prompts), len(points), prompts.x_dim):
            shape = f"[{len(prompts)}, {len(points)}, any, {prompts.x_dim}]"
            raise ValueError(f"queries must be [prompt point query x] = {shape}, got {tuple(queries.shape)}")
        return prompts, queries.to(cfg.device, cfg.torch_dtype), points

    def _query_streams_one_by_one(self, prompts: Prompts, queries: Tensor, points: range) -> Iterator[Tensor]:
        n_queries, passes = queries.shape[2], []
        for t, queries_at_t in zip(points, queries.unbind(1), strict=True):
            xs, ys = (part.repeat_interleave(n_queries, dim=0) for part in (prompts.xs, prompts.ys))
            alone = Prompts(xs, ys).prefix(t).with_query(queries_at_t.flatten(0, 1))
            passes.append(self.layer_streams(alone, at="query"))
        for streams in zip(*passes, strict=True):
            joined = torch.cat(streams, dim=1)  # [(prompt query) point d_model]
            yield joined.unflatten(0, (len(prompts), n_queries)).transpose(1, 2)


def has_torch_hooks(part: torch.nn.Module) -> bool:
    """True if torch calls any hook when the module runs."""
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


def _checked(predictions: Tensor) -> Tensor:
    """Predictions for metrics, in at least float32; a warning if some are not finite."""
    if not torch.compiler.is_compiling() and (n_bad := count_undefined(predictions)):
        warn(
            f"{n_bad} of {predictions.numel()} predictions are not finite: the model's weights are not, or the prompts "
            f"are too large for its dtype",
            RuntimeWarning,
        )
    return at_least_float32(predictions)
