"""Interventions on a model's streams between layers, with gradients if they are recorded with gradients."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import get_act_name

from mechicl.models.layered import LayeredModel
from mechicl.models.opening.adapter import Hook, ModelAdapter
from mechicl.models.opening.sites import hook_names

SCORES_HOOK = "attn.hook_attn_scores"
_Place = Literal["query", "context"]


class StreamRuns:
    """A model's streams on base prompts, in which it intervenes, and on sources, one per layer from `compute_streams`.

    Each method returns the query's prediction `[prompt y]` after an intervention, as in `algorithms.stepwise.Runs`,
    with gradients with respect to the streams and, if these were recorded with gradients, to the weights.
    """

    def __init__(self, adapter: ModelAdapter, tokens: Tensor, base: Sequence[Tensor], source: Sequence[Tensor]):
        self.adapter, self.tokens, self.tokens_per_point = adapter, tokens, tokens_per_point(adapter.model)
        self.n_layers, self.last = adapter.n_layers, tokens.shape[1] - 1
        self.base, self.source = base, source
        if self.last % self.tokens_per_point or base[0].shape[1] != tokens.shape[1]:
            raise ValueError(f"{self.last + 1} tokens are not {self.tokens_per_point} a point and one for the query")

    def exchange(
        self,
        after: int,
        place: _Place,
        basis: Float[Tensor, "d_model dim"] | None = None,
        point: int | range | None = None,
        *,
        rest: bool = False,
    ) -> Float[Tensor, "prompt y"]:
        """Replace the streams of the query, or of the context (or some points of it), by the source's at some layer.

        With a `basis` only the part in the span of its orthonormal columns (`rest`: the part orthogonal to them).
        """
        where = self._positions(place)
        if point is not None:
            chosen = [point] if isinstance(point, int) else list(point)
            tokens = torch.arange(self.last, device=self.tokens.device).unflatten(0, (-1, self.tokens_per_point))
            where = tokens[chosen].flatten()
        streams = self.base[after].clone()
        moved = self.source[after][:, where] - streams[:, where]
        if basis is not None:
            inside = moved @ basis.to(moved) @ basis.to(moved).T
            streams[:, where] += moved - inside if rest else inside
        else:
            streams[:, where] = self.source[after][:, where]
        return self._run_query(streams, after) if place == "query" else self._run(streams, after)

    def skip(self, layers: range, place: _Place) -> Float[Tensor, "prompt y"]:
        """Undo the change that some layers make at the query, or in the context."""
        return self.freeze((layers.start, layers.stop), place)

    def repeat(self, layers: range, place: _Place) -> Float[Tensor, "prompt y"]:
        """Run the query, or the context, through some layers twice, next to the other's first streams both times."""
        where = self._positions(place)
        streams = self.base[layers.start].clone()
        streams[:, where] = self.base[layers.stop][:, where]
        again = self._run(streams, layers.start, until=layers.stop)
        after = self.base[layers.stop].clone()
        after[:, where] = again[:, where]
        return self._run(after, layers.stop)

    def freeze(self, stops: Sequence[int], place: _Place) -> Float[Tensor, "prompt y"]:
        """Keep the streams of the query, or of the context, constant from the first stop (in layers) to the last."""
        where, frozen = self._positions(place), self.base[stops[0]]
        put = partial(_put, where=where, values=frozen[:, where])
        hooks = [(get_act_name("resid_post", stop - 1), put) for stop in stops[1:]]
        return self._run(frozen, stops[0], hooks)

    def stop_reading(self, layers: range) -> Float[Tensor, "prompt y"]:
        """Remove the attention's output at the query in these layers."""
        put = partial(_put, where=slice(self.last, None), values=None)
        hooks = [(get_act_name("attn_out", layer), put) for layer in layers]
        return self._run(self.base[layers.start], layers.start, hooks)

    def isolate(self, layers: range) -> Float[Tensor, "prompt y"]:
        """Let each context point attend only to its own tokens in these layers; the query attends as usual."""
        points = torch.arange(self.last + 1, device=self.tokens.device) // self.tokens_per_point
        others = points[:, None] != points
        others[self.last] = False
        scores_of_hidden = {"softmax": -torch.inf, "linear": 0.0}  # for other kinds, the first without NaN

        def hide(scores: Tensor, hook: HookPoint, layer: int, otherwise: float) -> Tensor:
            kind = self.adapter.model.cfg.for_layer(layer).attention if self.adapter.is_transformer else ""
            return scores.masked_fill(others, scores_of_hidden.get(kind, otherwise))

        for otherwise in scores_of_hidden.values():
            hooks = [(f"blocks.{i}.{SCORES_HOOK}", partial(hide, layer=i, otherwise=otherwise)) for i in layers]
            predicted = self._run(self.base[layers.start], layers.start, hooks)
            if predicted.isfinite().all():
                break
        return predicted

    # ---- runs ----

    def _positions(self, place: _Place) -> slice:
        return slice(self.last, None) if place == "query" else slice(0, self.last)

    def _run_query(self, streams: Tensor, layer: int) -> Tensor:
        """`_run` after a change of the query's stream: if no other token reads it, only its row is computed."""
        adapter = self.adapter
        if not adapter.is_transformer or adapter.model.cfg.keys != "causal" or adapter.has_user_hooks():
            return self._run(streams, layer)
        base, prompts = dict(enumerate(self.base)), torch.arange(len(streams), device=streams.device)
        with torch.set_grad_enabled(streams.requires_grad):
            return adapter.resume_from_row(base, layer, self.last, prompts, streams[:, self.last])

    def _run(self, streams: Tensor, layer: int, hooks: Sequence[Hook] = (), until: int | None = None) -> Tensor:
        """Resume a run from a stream after some layers; returns predictions, or the stream after `until` layers."""
        adapter = self.adapter
        with torch.set_grad_enabled(streams.requires_grad):
            if adapter.ours and until is not None:
                for each in range(layer, until):
                    streams = adapter.run_layer(streams, each, hooks)
                return streams
            if adapter.ours and layer == self.n_layers:
                return adapter.resume_from_end(streams)
            if adapter.ours:
                return adapter.resume(streams.clone(), layer, hooks, self.n_layers - 1 if hooks else layer)
            kept: list[Tensor] = []
            hooks = [(adapter.stream_names()[layer], partial(_put, where=slice(None), values=streams)), *hooks]
            if until is not None:
                hooks.append((adapter.stream_names()[until], lambda stream, hook: kept.append(stream.clone())))
            predictions = adapter.run(self.tokens, hooks)
            return kept[0] if until is not None else predictions


def record_streams(adapter: ModelAdapter, tokens: Tensor) -> list[Tensor]:
    """Record the streams `[prompt pos d_model]` before each layer and after the last."""
    names = adapter.stream_names().values()
    recorded = adapter.record(tokens, names, len(tokens))
    return [recorded[name] for name in names]


def compute_streams(adapter: ModelAdapter, tokens: Tensor) -> list[Tensor]:
    """Compute the same streams of our model, with gradients with respect to its weights."""
    streams = [adapter.model(tokens, stop_at_layer=0)]
    for layer in range(adapter.n_layers):
        streams.append(adapter.run_layer(streams[-1], layer, ()))
    return streams


def has_scores(model: Any) -> bool:
    """True if a model has the hooks at which attention between positions is cut, in all layers."""
    names = hook_names(model)
    return all(f"blocks.{layer}.{SCORES_HOOK}" in names for layer in range(max(model.cfg.n_layers, 1)))


def has_attention(model: Any) -> bool:
    """True if a model has the hooks at which the attention's output is removed."""
    return get_act_name("attn_out", 0) in hook_names(model)


def tokens_per_point(model: Any) -> int:
    """Return 1 for models that read a point as one token, 2 if its target is a separate token."""
    number = getattr(model, "tokens_per_point", None)
    if number is None:
        hint = ": give the positions of its points, Reading(encode, points=slice(0, None, 2)) for two tokens a point"
        own = isinstance(model, LayeredModel) and model.cfg.prompt_format == "own"
        raise TypeError(f"{type(model).__name__} does not read prompts of points{hint if own else ''}")
    return number


def _put(activation: Tensor, hook: HookPoint, where: slice, values: Tensor | None) -> Tensor:
    changed = activation.clone()
    changed[:, where] = 0.0 if values is None else values
    return changed
