"""Runs of a causal language model from one position on, with the keys and values of earlier positions cached."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformer_lens import TransformerLensKeyValueCache
from transformers.cache_utils import DynamicLayer

from mechicl.models.opening.adapter import Hook, ModelAdapter

N_TRIED = 8  # prompts on which a run with cached keys and values is compared with a whole one
MOST_ROWS = 128
"""Largest number of rows in a run: more rows take as long."""


class SuffixRuns:
    """Runs that compute only the positions from `first` on, for several copies of the prompts (if all fit) at once.

    In a causal model, an edit at a position changes no earlier one: the keys and values before the first edited
    position are computed once, by the cache of `transformers` or ours, and every run reads them.
    """

    @torch.no_grad()
    def __init__(self, adapter: ModelAdapter, tokens: Tensor, first: int, batch_size: int, copies: int = 1):
        self.adapter, self.first, self.copies = adapter, first, copies
        self.tokens = tokens.repeat(copies, 1)
        self.parts = [slice(start, start + batch_size) for start in range(0, len(tokens), batch_size)]
        self.caches = [adapter.run_cached(tokens[part, :first])[1] for part in self.parts]
        if copies > 1:
            self.parts = [slice(0, len(self.tokens))]
            _repeat(self.caches[0], torch.arange(len(tokens), device=tokens.device).repeat(copies))

    @torch.no_grad()
    def run(
        self,
        hooks_of: Callable[[slice], Sequence[Hook]],
        n_rows: int | None = None,
        layers: tuple[int, int] | None = None,
        streams: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Return predictions of the first `n_rows` rows (by default all); positions in hooks count from `first`.

        Given the first and last layer with hooks, our models resume from the `streams` before the first.
        """
        outputs, n_rows = [], len(self.tokens) if n_rows is None else n_rows
        for part, cache in zip(self.parts, self.caches, strict=True):
            rows = slice(part.start, min(part.stop, n_rows))
            hooks, fork = hooks_of(rows), partial(fork_cache, cache, rows.stop - rows.start)
            if layers is not None and streams is not None and self.adapter.is_transformer:
                later = streams[layers[0]][:, self.first :]
                later = later[torch.arange(rows.start, rows.stop, device=later.device) % len(later)]
                outputs.append(self.adapter.resume(later, layers[0], hooks, layers[1], fork))
            else:
                outputs.append(self.adapter.run(self.tokens[rows, self.first :], hooks, fork()))
        return torch.cat(outputs)


def fork_cache(cache: Any, n_rows: int | None = None) -> Any:
    """Return a cache of the first texts for a run that appends positions; None if its tensors would change in place.

    The run's cache could not be cut back instead: layers with a sliding window drop positions.
    """
    if isinstance(cache, TransformerLensKeyValueCache):
        entries = [
            dataclasses.replace(entry, past_keys=entry.past_keys[:n_rows], past_values=entry.past_values[:n_rows])
            for entry in cache.entries
        ]
        return dataclasses.replace(
            cache, entries=entries, previous_attention_mask=cache.previous_attention_mask[:n_rows]
        )
    if not all(isinstance(layer, DynamicLayer) for layer in getattr(cache, "layers", [None])):
        return None
    forked = copy.copy(cache)
    forked.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in forked.layers:
        layer.keys, layer.values = layer.keys[:n_rows], layer.values[:n_rows]
    return forked


def _repeat(cache: Any, rows: Tensor) -> None:
    """Make a cache of these rows of its texts."""
    if not isinstance(cache, TransformerLensKeyValueCache):
        cache.batch_select_indices(rows)
        return
    cache.previous_attention_mask = cache.previous_attention_mask[rows]
    for entry in cache.entries:
        entry.past_keys, entry.past_values = entry.past_keys[rows], entry.past_values[rows]


def suffix_runs(adapter: ModelAdapter, tokens: Tensor, first: int, n_cells: int, batch_size: int) -> SuffixRuns | None:
    """Return runs from a position on; None if the model has no such cache, or too little memory for it.

    Caches and runs take at most the memory of a run of `batch_size` whole prompts. The route is tried once for each
    length of prompts: models whose cached runs differ from whole runs have none.
    """
    if not adapter.caches or first < 1 or adapter.at != "query" or adapter.has_user_hooks():
        return None
    n_pos = tokens.shape[1]
    if n_pos not in adapter.bytes_of_cache:
        adapter.bytes_of_cache[n_pos] = _try(adapter, tokens[: min(N_TRIED, max(batch_size // 2, 1))])
    known = adapter.bytes_of_cache[n_pos]
    if known is None:
        return None
    of_cache, memory = first * known[0], batch_size * known[1]
    of_run = of_cache + known[1] * (n_pos - first) / n_pos  # each run copies the keys and values
    copies = min(int(memory / (of_cache + of_run)), MOST_ROWS) // len(tokens)
    if copies:
        return SuffixRuns(adapter, tokens, first, len(tokens), min(copies, n_cells))
    rows = min(int((memory - len(tokens) * of_cache) / of_run), MOST_ROWS)  # all prompts' caches are kept
    return SuffixRuns(adapter, tokens, first, rows) if 2 * rows >= min(batch_size, len(tokens)) else None


def _bytes_per_position(cache: Any) -> int:
    if isinstance(cache, TransformerLensKeyValueCache):
        return sum(entry.past_keys[:, :1].nbytes + entry.past_values[:, :1].nbytes for entry in cache.entries)
    return sum(layer.keys[:, :, :1].nbytes + layer.values[:, :, :1].nbytes for layer in cache.layers)


@torch.no_grad()
def _try(adapter: ModelAdapter, tokens: Tensor) -> tuple[float, float] | None:
    """The bytes of the cache for each position of a prompt, and of a whole run of it; None if runs with it go wrong.

    Models of other packages are tried.
    """
    n_pos = tokens.shape[1]
    if adapter.is_transformer:  # ours
        return _bytes_per_position(adapter.run_cached(tokens[:1, :1])[1]), adapter.bytes_per_row(tokens)
    try:
        again = [SuffixRuns(adapter, tokens, 1, len(tokens)).run(lambda part: ())]
        runs = SuffixRuns(adapter, tokens, n_pos - 1, len(tokens), 2)
        n_bytes = _bytes_per_position(runs.caches[0])
        again += [runs.run(lambda part: ())[-len(tokens) :] for _ in range(2)]  # the first may not change the cache
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None  # another kind of cache, or none
    if not all(adapter.same_up_to_rounding(each, adapter.run(tokens)) for each in again):
        return None
    return n_bytes / len(runs.tokens), adapter.bytes_per_row(tokens)
