"""Many interventions in few passes: runs share batches, and each starts at the layer where it begins to differ."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechicl.analysis.interventions.metrics import Metric, evaluate_metric
from mechicl.base.memory import Budget, Kept
from mechicl.base.threads import threads_worth, using_threads
from mechicl.models import TransformerConfig
from mechicl.models.opening.adapter import Hook, ModelAdapter
from mechicl.models.opening.edits import to_write
from mechicl.models.opening.sites import Site
from mechicl.models.opening.suffix_runs import suffix_runs

CACHE_SIZE = 2**26  # bytes of a batch of ours at most: larger batches of a small model leave the processor's caches
Sites = tuple[Site, ...]  # of one cell of a sweep
LOCAL = (
    "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_in", "pre", "post", "mlp_out",
    "z", "result", "q_input", "q", "attn_scores", "pattern",
)  # fmt: skip
"""Components that, at one position (for scores and patterns the query's), affect no other position of their layer."""
AVERAGED = ("q_input", "q", "attn_scores", "pattern")
"""Those of them that do affect later positions where momentum averages outputs over positions."""


@dataclass(frozen=True, eq=False)
class Baseline:
    """The run that is intervened in, as far as the other runs need it."""

    tokens: Tensor
    predictions: Tensor
    # before each layer and after the last, for our models and on request
    streams: dict[int, Float[Tensor, "prompt pos d_model"]]
    batch_size: int  # largest number of prompts in a run

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class CellResults:
    """Predictions `[cell prompt ...]` (None where they are not kept) and metrics `[cell prompt]` of some cells."""

    predictions: Tensor | None
    values: dict[str, Tensor]

    def map(self, function: Callable[[Tensor], Tensor]) -> "CellResults":
        """The results with a function applied to each tensor."""
        predictions = None if self.predictions is None else function(self.predictions)
        return CellResults(predictions, {name: function(values) for name, values in self.values.items()})


def threads_for_runs(adapter: ModelAdapter, baseline: Baseline) -> int | None:
    """The number of threads that a run is worth, by the multiplications of a layer; None for torch's default."""
    tokens = baseline.tokens
    if tokens.device.type != "cpu":
        return None
    weights = sum(weight.numel() for weight in adapter.model.parameters()) / max(adapter.n_layers, 1)
    n_pos = tokens.shape[1] if tokens.ndim > 1 else 1
    return threads_worth(min(baseline.batch_size, len(baseline)) * n_pos * weights)


@dataclass(frozen=True, eq=False)
class Experiment:
    """Settings that all sweeps share: the model and its prompts, what is kept of each intervention, and the memory."""

    adapter: ModelAdapter
    tokens: Tensor  # [prompt pos ...]
    metrics: Mapping[str, Metric]
    keep_predictions: bool
    budget: Budget

    @torch.no_grad()
    def run_baseline(self, n_cells: int, *kept: Kept, keep_streams: bool = False) -> Baseline:
        """Run the model without intervention, and keep its streams, of which other runs of our models resume.

        The budget must suffice for the results of `n_cells`, the caller's `kept`, and a run of at least one prompt.
        """
        adapter, tokens = self.adapter, self.tokens
        names = adapter.stream_names() if adapter.ours or keep_streams else {}
        one_stream = adapter.record(tokens[:1], [names[0]], 1)[names[0]].nbytes if names else 0
        # cells of one position keep the stream after a layer for each of its heads, and join them
        streams = (len(names) + getattr(adapter.model.cfg, "n_heads", 1) + 2) * one_stream
        # metrics are at most doubles; eight cells' predictions are worked on
        one_prediction = adapter.run(tokens[:1]).nbytes
        results = (n_cells * self.keep_predictions + 8) * one_prediction + 8 * n_cells * len(self.metrics)
        batch_size = rows_at_once(adapter, tokens, self.budget.holding(*kept, len(tokens) * (streams + results)))
        before_user_hooks = [name for layer, name in names.items() if layer < adapter.n_layers]
        recorded = {}
        if names:
            recorded = adapter.record(tokens, names.values(), batch_size, before_user_hooks=before_user_hooks)
        predictions = adapter.predict(tokens, batch_size)
        return Baseline(tokens, predictions, {layer: recorded[name] for layer, name in names.items()}, batch_size)

    @torch.no_grad()
    def run_cells(
        self,
        baseline: Baseline,
        cells: Sequence[Sites],
        values: Mapping[str, Tensor],
        advance: Callable[[], Any] | None = None,
    ) -> CellResults:
        """Run each cell: the model with the activations at all of the cell's sites replaced; `advance` after each.

        Replacements are the part at the site of `values`, by hook name, `[prompt ...]`.
        """
        plain = baseline.predictions
        predictions = plain.new_empty(len(cells), *plain.shape) if self.keep_predictions else None
        measured: dict[str, Tensor] = {}
        for name, metric in self.metrics.items():
            example = evaluate_metric(name, metric, plain)
            measured[name] = example.new_empty(len(cells), len(example))
        with using_threads(threads_for_runs(self.adapter, baseline)):
            for index, predicted in _run_each(self.adapter, baseline, cells, values):
                if predictions is not None:
                    predictions[index] = predicted
                for name, metric in self.metrics.items():
                    measured[name][index] = evaluate_metric(name, metric, predicted)
                if advance is not None:
                    advance()
        return CellResults(predictions, measured)


def _run_each(
    adapter: ModelAdapter, baseline: Baseline, cells: Sequence[Sites], values: Mapping[str, Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Yield cells and their predictions: from their first position on, where keys and values are cached; or whole."""
    firsts = [min((-1 if site.pos is None else site.pos for site in cell), default=-1) for cell in cells]
    spans = _spans(cells) if adapter.is_transformer else [(0, adapter.n_layers)] * len(cells)  # others run all layers
    whole: list[int] = []
    for first, members in _grouped(range(len(cells)), firsts):
        suffix = None
        if len(members) > 1:
            suffix = suffix_runs(adapter, baseline.tokens, first, len(members), baseline.batch_size)
        if suffix is None:
            whole += members
            continue
        later = {name: value[:, first:] for name, value in values.items()}
        for layers, batch in _grouped(members, spans):
            for start in range(0, len(batch), suffix.copies):
                together = batch[start : start + suffix.copies]
                shifted = [tuple(replace(site, pos=(site.pos or 0) - first) for site in cells[i]) for i in together]
                hooks_of = partial(_replacing_hooks, shifted, later, len(baseline), copy=True)
                predicted = suffix.run(hooks_of, len(together) * len(baseline), layers, baseline.streams)
                yield from zip(together, predicted.split(len(baseline)), strict=True)
    rest = [cells[i] for i in whole]
    local = adapter.is_transformer and not adapter.has_user_hooks()
    run = _run_local_cells if local and all(_is_local(cell, adapter.model.cfg) for cell in rest) else _run_any_cells
    yield from ((whole[i], predicted) for i, predicted in run(adapter, baseline, rest, values))


def _grouped(indices: Iterable[int], keys: Sequence[Any]) -> Iterator[tuple[Any, list[int]]]:
    """Yield each key with its indices, in the order of keys."""
    for key, group in groupby(sorted(indices, key=keys.__getitem__), key=keys.__getitem__):
        yield key, list(group)


def _spans(cells: Sequence[Sites]) -> list[tuple[int, int]]:
    """The first and last layer of each cell."""
    layers = [[site.layer for site in cell] for cell in cells]
    return [(min(each), max(each)) for each in layers]


def rows_at_once(adapter: ModelAdapter, tokens: Tensor, budget: Budget) -> int:
    """The number of prompts that one run may have within a budget, at least one."""
    per_row = adapter.bytes_per_row(tokens)
    weights = sum(weight.nbytes for weight in adapter.model.parameters())  # large ones leave the caches in any case
    at_most = CACHE_SIZE / per_row if adapter.ours and weights < CACHE_SIZE else 2**31
    return budget.holding(adapter.bytes_of_products).rows(per_row, at_most=at_most)


def record_within(adapter: ModelAdapter, tokens: Tensor, names: Sequence[str], budget: Budget) -> dict[str, Tensor]:
    """Record activations by hook name, `[prompt ...]`, within a budget."""
    one_prompt = sum(activation.nbytes for activation in adapter.record(tokens[:1], names, 1).values())
    return adapter.record(tokens, names, rows_at_once(adapter, tokens, budget.holding(len(tokens) * one_prompt)))


# ---- cells of any kind ----


def _run_any_cells(
    adapter: ModelAdapter, baseline: Baseline, cells: Sequence[Sites], values: Mapping[str, Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Yield cells and their predictions; cells with the same first and last layer share batches."""
    n_prompts = len(baseline)
    for (layer, last_hooked), members in _grouped(range(len(cells)), _spans(cells)):
        batch_size, tokens = baseline.batch_size, baseline.tokens
        from_here = baseline.streams[layer] if adapter.ours else tokens
        if adapter.has_user_hooks():  # one may treat prompts by their place in the batch
            batch_size = min(batch_size, n_prompts)
        done: list[Tensor] = []  # predictions of cells that are not complete
        unfinished = iter(members)
        for start in range(0, len(members) * n_prompts, batch_size):
            stop = min(start + batch_size, len(members) * n_prompts)
            rows = from_here[torch.arange(start, stop, device=from_here.device) % n_prompts]
            first, last = start // n_prompts, (stop - 1) // n_prompts
            in_batch = [cells[i] for i in members[first : last + 1]]
            in_rows = slice(start - first * n_prompts, stop - first * n_prompts)
            hooks = _replacing_hooks(in_batch, values, n_prompts, in_rows, copy=not adapter.ours)
            if adapter.ours:
                done.append(adapter.resume(rows, layer, hooks, last_hooked))
            else:
                done.append(adapter.run(rows, hooks))
            while sum(map(len, done)) >= n_prompts:
                joined = torch.cat(done) if len(done) > 1 else done[0]
                yield next(unfinished), joined[:n_prompts]
                done = [joined[n_prompts:]]


def _replacing_hooks(
    cells: Sequence[Sites], values: Mapping[str, Tensor], n_prompts: int, rows: slice, *, copy: bool
) -> list[Hook]:
    """Hooks that give each row of a batch (some `rows` of the cells' prompts in order) its cell's activations.

    Other packages' activations are copied; nothing else reads those that ours give to hooks.
    """
    edits: dict[str, list[tuple[slice, slice, Site]]] = {}
    for i, cell in enumerate(cells):
        shift = rows.start - i * n_prompts
        begin, end = max(-shift, 0), min(n_prompts - shift, rows.stop - rows.start)
        for site in cell:
            edits.setdefault(site.hook_name, []).append((slice(begin, end), slice(begin + shift, end + shift), site))
    return [(name, replacing_hook(parts, values[name], copy=copy)) for name, parts in edits.items()]


def replacing_hook(
    edits: Sequence[tuple[slice, slice, Site]], values: Tensor, *, copy: bool = False
) -> Callable[..., Tensor]:
    """A hook that replaces, in some rows of the activation, what is at a site by the values of some prompts."""

    def replace(activation: Tensor, hook: HookPoint) -> Tensor:
        if activation.shape[1:] != values.shape[1:]:
            got, made = ([*each.shape[1:]] for each in (activation, values))
            raise ValueError(f"{hook.name} is {got} in this run and {made} in that of the patches: run whole prompts "
                             f"of their length, without cached keys and values")  # fmt: skip
        if copy:
            activation = to_write(activation, edits[0][-1].hook_name)
        for rows, prompts, site in edits:
            activation[(rows, *site.index)] = values[(prompts, *site.index)]
        return activation

    return replace


# ---- cells of one position: nothing changes before it in a causal model, nor elsewhere in the patched layer ----


def _is_local(cell: Sites, cfg: TransformerConfig) -> bool:
    if len(cell) != 1 or cell[0].component not in LOCAL or position_of(cell[0]) is None:
        return False
    if cell[0].key is not None or cell[0].neuron is not None:  # of neurons there are too many to keep a stream for each
        return False
    return not (cfg.momentum and cfg.momentum_over == "outputs" and cell[0].component in AVERAGED)


def position_of(site: Site) -> int | None:
    """Return the position at which a site is; the query's of scores and patterns."""
    return site.query if site.pos is None else site.pos


def _run_local_cells(
    adapter: ModelAdapter, baseline: Baseline, cells: Sequence[Sites], values: Mapping[str, Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Yield cells of one position each, and their predictions.

    The patched layer is run once with the component replaced everywhere, which for a local component gives each
    position's own row; later layers compute the rows from that position on.
    """
    n_prompts, batch_size = len(baseline), baseline.batch_size
    positions = [position_of(site) for (site,) in cells]
    for layer, members in _grouped(range(len(cells)), [site.layer for (site,) in cells]):
        component = cells[members[0]][0].component
        after: dict[int | None, Tensor] = {}
        for head in {cells[i][0].head for i in members}:
            after[head] = _patched_layer(adapter, baseline, Site(component, layer, head=head), values)
        following = layer + (component != "resid_pre")
        for pos, here in _grouped(members, positions):
            changed = torch.cat([after[cells[i][0].head][:, pos] for i in here])  # [cell * prompt, d_model]
            prompts = torch.arange(len(changed), device=changed.device).remainder(n_prompts)
            parts = [
                adapter.resume_from_row(baseline.streams, following, pos, rows, part)
                for rows, part in zip(prompts.split(batch_size), changed.split(batch_size), strict=True)
            ]
            yield from zip(here, torch.cat(parts).split(n_prompts), strict=True)


def _patched_layer(adapter: ModelAdapter, baseline: Baseline, site: Site, values: Mapping[str, Tensor]) -> Tensor:
    """The stream after a layer in which the site is replaced at all positions; for "resid_pre", that stream itself."""
    replacement = values[site.hook_name]
    if site.component == "resid_pre":
        return replacement
    parts = []
    for start in range(0, len(baseline), baseline.batch_size):
        prompts = slice(start, start + baseline.batch_size)
        hook = (site.hook_name, replacing_hook([(slice(None), prompts, site)], replacement))
        parts.append(adapter.run_layer(baseline.streams[site.layer][prompts], site.layer, [hook]))
    return torch.cat(parts)
