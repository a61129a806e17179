"""What a model predicts when its streams are changed after some layer: the twins of `algorithms.stepwise.Runs`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import get_act_name

from mechicl.algorithms.stepwise.counterfactuals import Place
from mechicl.models.opening.adapter import Hook, ModelAdapter
from mechicl.models.opening.sites import hook_names
from mechicl.prompts import Prompts

SCORES = "attn.hook_attn_scores"


class ModelRuns:
    """A model's streams on the prompts that are intervened in and on those that streams are taken from.

    Each method returns the query's prediction `[prompt y]` of the run that went on after an intervention. An exchange
    happens after so many layers; layers are counted from 0.

    Args:
        adapter: of the model.
        tokens: of the prompts.
        base: their streams, as `record_streams` gives them.
        source: those of the sources.
        tokens_per_point: 1 for paired prompts, 2 for interleaved ones.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        tokens: Tensor,
        base: Sequence[Tensor],
        source: Sequence[Tensor],
        tokens_per_point: int,
    ):
        self.adapter, self.tokens, self.tokens_per_point = adapter, tokens, tokens_per_point
        self.n_layers, self.last = adapter.n_layers, tokens.shape[1] - 1
        self.base, self.source = base, source

    def exchange(
        self,
        after: int,
        place: Place,
        basis: Float[Tensor, "d_model dim"] | None = None,
        point: int | None = None,
        *,
        rest: bool = False,
    ) -> Float[Tensor, "prompt y"]:
        """The streams of the query, or of the context, after so many layers come from the source.

        The prediction can be differentiated by the basis, where that requires a gradient.

        Args:
            after: number of layers.
            place: "query" or "context".
            basis: only what lies in these orthonormal columns.
            point: of the context, only this point's tokens.
            rest: what does not lie in the basis, in place of what does.
        """
        where = self._positions(place)
        if point is not None:
            where = slice(point * self.tokens_per_point, (point + 1) * self.tokens_per_point)
        streams = self.base[after].clone()
        moved = self.source[after][:, where] - streams[:, where]
        if basis is not None:
            inside = moved @ basis.to(moved) @ basis.to(moved).T
            streams[:, where] += moved - inside if rest else inside
        else:
            streams[:, where] = self.source[after][:, where]
        return self._run_query(streams, after) if place == "query" else self._run(streams, after)

    def skip(self, layers: range, place: Place) -> Float[Tensor, "prompt y"]:
        """What some layers leave at the query, or in the context, is taken back after them."""
        return self.freeze((layers.start, layers.stop), place)

    def repeat(self, layers: range, place: Place) -> Float[Tensor, "prompt y"]:
        """The query, or the context, goes through some layers twice, the second time beside the other's start."""
        where = self._positions(place)
        streams = self.base[layers.start].clone()
        streams[:, where] = self.base[layers.stop][:, where]
        again = self._run(streams, layers.start, until=layers.stop)
        after = self.base[layers.stop].clone()
        after[:, where] = again[:, where]
        return self._run(after, layers.stop)

    def freeze(self, stops: Sequence[int], place: Place) -> Float[Tensor, "prompt y"]:
        """From so many layers on, the streams of the query, or of the context, stay as they are.

        Args:
            stops: numbers of layers from which on, and then after which, they are put back to what they were.
            place: "query" or "context".
        """
        where, held = self._positions(place), self.base[stops[0]]
        put = partial(_put, where=where, values=held[:, where])
        hooks = [(get_act_name("resid_post", stop - 1), put) for stop in stops[1:]]
        return self._run(held, stops[0], hooks)

    def stop_reading(self, layers: range) -> Float[Tensor, "prompt y"]:
        """In these layers attention writes nothing at the query."""
        hooks = [(get_act_name("attn_out", layer), partial(_put, where=slice(self.last, None), values=None))
                 for layer in layers]  # fmt: skip
        return self._run(self.base[layers.start], layers.start, hooks)

    def isolate(self, layers: range) -> Float[Tensor, "prompt y"]:
        """In these layers each point of the context attends only to its own tokens; the query attends as ever."""
        points = torch.arange(self.last + 1, device=self.tokens.device) // self.tokens_per_point
        others = points[:, None] != points
        others[self.last] = False
        cut = partial(_cut, others=others)
        return self._run(self.base[layers.start], layers.start, [(f"blocks.{i}.{SCORES}", cut) for i in layers])

    # ---- runs ----

    def _positions(self, place: Place) -> slice:
        return slice(self.last, None) if place == "query" else slice(0, self.last)

    def _run(self, streams: Tensor, layer: int, hooks: Sequence[Hook] = (), until: int | None = None) -> Tensor:
        """Predictions, or the stream after `until` layers, of a run whose stream after `layer` layers is this."""
        with torch.set_grad_enabled(streams.requires_grad):  # the weights' derivatives are never wanted
            return self._continue(streams, layer, hooks, until)

    def _run_query(self, streams: Tensor, layer: int) -> Tensor:
        """`_run` where only the query's stream is another: where no token reads it, only its own row is computed."""
        adapter = self.adapter
        if not adapter.is_transformer or adapter.model.cfg.keys != "causal" or adapter.has_user_hooks():
            return self._run(streams, layer)
        base, prompts = dict(enumerate(self.base)), torch.arange(len(streams), device=streams.device)
        with torch.set_grad_enabled(streams.requires_grad):
            return adapter.resume_from_row(base, layer, self.last, prompts, streams[:, self.last])

    def _continue(self, streams: Tensor, layer: int, hooks: Sequence[Hook], until: int | None) -> Tensor:
        adapter = self.adapter
        if adapter.ours and until is not None:
            for each in range(layer, until):
                streams = adapter.run_layer(streams, each, hooks)
            return streams
        if adapter.ours:
            end = self.n_layers
            return adapter.resume_from_end(streams) if layer == end else adapter.resume(
                streams.clone(), layer, hooks, end - 1 if hooks else layer
            )  # fmt: skip
        kept: list[Tensor] = []
        hooks = [(stream_names(adapter)[layer], partial(_put, where=slice(None), values=streams)), *hooks]
        if until is not None:
            hooks.append((stream_names(adapter)[until], partial(_keep, kept=kept)))
        predictions = adapter.run(self.tokens, hooks)
        return kept[0] if until is not None else predictions


def stream_names(adapter: ModelAdapter) -> list[str]:
    """The hooks of the streams before each layer and after the last."""
    names = [get_act_name("resid_pre", layer) for layer in range(adapter.n_layers)]
    return [*names, get_act_name("resid_post", adapter.n_layers - 1)]


def record_streams(adapter: ModelAdapter, tokens: Tensor) -> list[Tensor]:
    """The streams `[prompt pos d_model]` before each layer and after the last."""
    recorded = adapter.record(tokens, stream_names(adapter), len(tokens))
    return [recorded[name] for name in stream_names(adapter)]


def _put(activation: Tensor, hook: HookPoint, where: slice, values: Tensor | None) -> Tensor:
    """Values, or zeros, in the place of an activation at some positions."""
    changed = activation.clone()
    changed[:, where] = 0.0 if values is None else values
    return changed


def _cut(scores: Tensor, hook: HookPoint, others: Tensor) -> Tensor:
    """Scores `[prompt head query key]` without some pairs: what masked ones are, -inf before a softmax and 0 else."""
    return scores.masked_fill(others, -torch.inf if scores.isneginf().any() else 0.0)


def _keep(activation: Tensor, hook: HookPoint, kept: list[Tensor]) -> None:
    kept.append(activation.clone())


def hears_scores(model: Any) -> bool:
    """Whether a model has the hooks by which single pairs of positions are cut off from each other."""
    return f"blocks.0.{SCORES}" in hook_names(model)


def tokens_per_point(model: Any) -> int:
    """1 for models that read a point as one token, 2 where its target is a token of its own.

    Raises:
        TypeError: a model that does not read prompts of points.
    """
    layouts: dict[str, int] = {"paired": 1, "interleaved": 2}
    name = getattr(getattr(model, "cfg", None), "prompt_format", None)
    if name not in layouts:
        raise TypeError(f"{type(model).__name__} does not read prompts of points (prompt_format={name!r})")
    return layouts[name]


@torch.no_grad()
def reads_ahead(adapter: ModelAdapter, prompts: Prompts, per_point: int) -> bool:
    """Whether the context's first point reads later ones: asked of its stream, with another last point."""
    xs, ys = prompts.xs.clone(), prompts.ys.clone()
    xs[:, -2], ys[:, -2] = xs[:, -2] + 1.0, ys[:, -2] + 1.0
    both = prompts, Prompts(xs, ys)
    before, after = (record_streams(adapter, adapter.encode(each))[-1][:, :per_point] for each in both)
    return prompts.n_context > 1 and not before.equal(after)


def hears_attention(model: Any) -> bool:
    """Whether a model has the hooks by which what attention writes is cut off."""
    return get_act_name("attn_out", 0) in hook_names(model)
