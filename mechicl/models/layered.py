"""What is asked of any network on prompts whose layers can be looked into: the base of ours and of wrapped modules."""

import copy
import copyreg
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechicl.base.arguments import count_undefined
from mechicl.base.memory import MEMORY
from mechicl.base.warning import warn
from mechicl.models.holding import holding, in_a_pass
from mechicl.models.opening.sites import hook_names, nearest
from mechicl.prompts import At, Prompts

HookAt = tuple[str | Callable[[str], bool], Callable[..., Any]]


class LayeredModel(HookedRootModule):
    """A learner with hooks whose stream can be read at every layer.

    `predict` and `predict_prefixes` take any number of prompts in bounded memory. Their results carry gradients to the
    prompts, where these require them, and not to the weights: to train, differentiate what the network itself returns.

    Threads may predict with one model side by side. Who adds hooks (`hooks`, `run_with_hooks`, `run_with_cache`, and
    all analyses that intervene) holds the model meanwhile: other threads' runs wait, and see nothing of it.

    `PromptedModel` (ours, which can also be resumed at any layer) and `WrappedModel` (anybody's module) are of this
    kind. Analyses ask for no more than this unless they say so.

    Attributes:
        cfg: with at least `n_layers`, `n_heads`, `d_model`, `one_pass` (whether one pass predicts every point from the
            points before it), `prompt_format`, `format`, `device` and `torch_dtype`.
    """

    cfg: Any

    def encode(self, prompts: Prompts) -> Tensor:
        """Prompts as what the network reads, on its device and in its dtype."""
        raise NotImplementedError(f"{type(self).__name__} does not define encode(prompts)")

    def decode(self, outputs: Any) -> Float[Tensor, "prompt point y"]:
        """The predictions in the outputs."""
        raise NotImplementedError(f"{type(self).__name__} does not define decode(outputs)")

    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """The query's prediction."""
        raise NotImplementedError(f"{type(self).__name__} does not define predict(prompts)")

    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """The prediction of each point t from the points before it; the last one is the query's."""
        raise NotImplementedError(f"{type(self).__name__} does not define predict_prefixes(prompts)")

    @property
    def config(self) -> Any:
        """The model's `cfg`, under the name by which other libraries look for it."""
        return self.cfg

    @property
    def device(self) -> torch.device:
        """The device of the model's weights."""
        return torch.device(self.cfg.device)

    @in_a_pass
    def has_hooks(self) -> bool:
        """True if anything is attached that sees a run or changes it: a torch hook on any part, or a replaced part.

        Hooks of a `with model.hooks(...)` in another thread are never seen: this thread waits until they are removed.
        """
        return self._is_hooked()

    def _is_hooked(self) -> bool:
        return any(map(has_torch_hooks, self.modules()))

    def _in_parts(self, predict: Callable[[Prompts], Tensor], prompts: Prompts) -> Tensor:
        """Predictions without a graph, in batches that take `memory.MEMORY` bytes.

        Where the prompts require gradients these flow, and where a hook is attached it sees all prompts in one run.
        """
        if prompts.xs.requires_grad or prompts.ys.requires_grad or self.has_hooks():
            return _heard_if_undefined(predict(prompts))
        at_a_time = max(1, int(MEMORY / max(self.bytes_per_prompt(prompts), 1)))
        with torch.no_grad():
            if len(prompts) <= at_a_time:
                return _heard_if_undefined(predict(prompts))
            return _heard_if_undefined(torch.cat([predict(part) for part in prompts.split(at_a_time)]))

    def bytes_per_prompt(self, prompts: Prompts) -> float:
        """An upper estimate of what a pass without gradients holds at once for each prompt, with hooks or without."""
        raise NotImplementedError

    def layer_streams(self, prompts: Prompts, at: At = "points") -> Iterator[Float[Tensor, "prompt row d_model"]]:
        """The residual stream before the first layer and then after each: n_layers + 1 tensors, from one pass."""
        raise NotImplementedError

    def query_streams(
        self, prompts: Prompts, queries: Float[Tensor, "prompt point query x"], at: At = "points"
    ) -> Iterator[Float[Tensor, "prompt point query d_model"]]:
        """The stream of other queries, each as if it stood at point t in place of that point."""
        raise NotImplementedError

    @property
    def reads_out(self) -> bool:
        """Whether `read_out` is known; of a wrapped module it may not be."""
        return True

    def read_out(self, residual: Float[Tensor, "batch row d_model"]) -> Float[Tensor, "batch row d_out"]:
        """The final residual stream as outputs."""
        raise NotImplementedError

    def to_tokens(self, prompts: Prompts | Tensor | Any, *, prepend_bos: bool | None = None) -> Tensor:
        """Prompts as tokens; tokens unchanged."""
        if not isinstance(prompts, Prompts | Tensor):
            raise TypeError(f"{type(self).__name__} reads prompts and tokens, got {type(prompts).__name__}")
        return self.encode(prompts) if isinstance(prompts, Prompts) else prompts

    # ---- hooks ----

    @contextmanager
    def hooks(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        fwd_hooks: Sequence[HookAt] = (),
        bwd_hooks: Sequence[HookAt] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Any]:
        """A context with hooks, as in TransformerLens, which gives the model.

        Within it this thread holds the model's lock: runs in other threads wait until it is left. At its end the hooks
        that it added are removed, and no others.

        Args:
            fwd_hooks: names of hooks, or functions of names, and what to call there with the activation and `hook=`.
            bwd_hooks: likewise, with the gradient.
            reset_hooks_end: False to let the hooks stay after it, until `reset_hooks`.
            clear_contexts: empty the `ctx` of all hook points at its end.

        Raises:
            KeyError: when entered, a hook that the model does not have.
        """
        for name, _ in (*fwd_hooks, *bwd_hooks):
            self._check_point(name)
        with holding(self), super().hooks(list(fwd_hooks), list(bwd_hooks), reset_hooks_end, clear_contexts):
            yield self

    def _check_point(self, name: str | Callable[[str], bool]) -> None:
        if callable(name) or isinstance(self.mod_dict.get(name), HookPoint):
            return
        if name in self.mod_dict:
            raise TypeError(f"{name!r} is no hook but a part of the model ({type(self.mod_dict[name]).__name__})")
        raise KeyError(f"name: this model has no hook {name!r}{nearest(name, hook_names(self))}")

    def add_hook(self, name: str | Callable[[str], bool], hook: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Add a hook that stays until `reset_hooks`, and that all threads' runs see; as in TransformerLens.

        Raises:
            KeyError: a hook that the model does not have.
        """
        self._check_point(name)
        with holding(self):
            super().add_hook(name, hook, *args, **kwargs)

    def add_caching_hooks(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Add hooks that keep all activations, and stay until `reset_hooks`; as in TransformerLens."""
        with holding(self):
            return super().add_caching_hooks(*args, **kwargs)

    def remove_all_hook_fns(self, *args: Any, **kwargs: Any) -> None:
        """Remove what was added at hook points, of both directions or one ("fwd", "bwd"), and of one level if given."""
        with holding(self):
            super().remove_all_hook_fns(*args, **kwargs)

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

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's, when no other thread has changed the weights for a while."""
        with holding(self):
            return super().state_dict(*args, **kwargs)

    def run_with_cache(
        self, input: Tensor | Prompts | str | list[str], *args: Any, return_cache_object: bool = True, **kwargs: Any
    ) -> Any:
        """Outputs and an `ActivationCache` of every hook (a plain dict with `return_cache_object=False`).

        Arguments as in TransformerLens: `names_filter`, `device`, `remove_batch_dim`, `pos_slice`. For gradients,
        which `incl_bwd` takes of a single output only, attach `bwd_hooks` with `hooks`.

        Raises:
            ValueError: a name in `names_filter` that no hook has.
        """
        names = kwargs.get("names_filter")
        names = [names] if isinstance(names, str) else names
        if isinstance(names, Sequence) and (unknown := [str(name) for name in names if name not in hook_names(self)]):
            raise ValueError(
                f"names_filter: this model has no hook {unknown[0]!r}{nearest(unknown[0], hook_names(self))}"
            )
        outputs, cache = super().run_with_cache(self._checked_dtype(self.to_tokens(input)), *args, **kwargs)
        if return_cache_object:
            cache = ActivationCache(cache, self, has_batch_dim=not kwargs.get("remove_batch_dim", False))
        return outputs, cache

    def _checked_dtype(self, tokens: Tensor) -> Tensor:
        """Tokens; raises ValueError if no part of the network takes their dtype."""
        return tokens

    # ---- queries ----

    def _checked_queries(self, prompts: Prompts, queries: Tensor, at: At) -> tuple[Prompts, Tensor, range]:
        """Prompts and queries as the network takes them, and the numbers of context points that the queries follow."""
        n, cfg = prompts.n_context, self.cfg
        prompts = prompts.to(cfg.device, cfg.torch_dtype)
        self.encode(prompts[:0])  # refuses prompts of another kind
        if at not in ("points", "query"):
            raise ValueError(f"at={at!r} is not one of ('points', 'query'): queries stand at points")
        points = range(n + 1) if at == "points" else range(n, n + 1)
        if queries.ndim != 4 or (*queries.shape[:2], queries.shape[3]) != (len(prompts), len(points), prompts.x_dim):
            raise ValueError(
                f"queries must be [prompt point query x] = [{len(prompts)}, {len(points)}, any, {prompts.x_dim}], "
                f"got {tuple(queries.shape)}"
            )
        return prompts, queries.to(cfg.device, cfg.torch_dtype), points

    def _query_streams_one_by_one(self, prompts: Prompts, queries: Tensor, points: range) -> Iterator[Tensor]:
        """`query_streams` at the prefixes `points`, with every query in a prompt of its own."""
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


def _heard_if_undefined(predictions: Tensor) -> Tensor:
    """Predictions as they are, with a warning if some are NaN or infinite."""
    if not torch.compiler.is_compiling() and (n_bad := count_undefined(predictions)):
        warn(
            f"{n_bad} of {predictions.numel()} predictions are not finite: the model's weights are not, or the prompts "
            f"are too large for its dtype",
            RuntimeWarning,
        )
    return predictions
