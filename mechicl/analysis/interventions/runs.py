"""Many interventions in few passes: runs share batches, and each starts where it begins to differ from the others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import get_act_name

from mechicl.analysis.interventions.metrics import Metric, measured
from mechicl.models import TransformerConfig
from mechicl.models.adapter import Hook, ModelAdapter
from mechicl.models.sites import Site

MEMORY = 2**30
DELAY = 2.0  # seconds after which a progress bar appears
NEAR = 2**26  # bytes that a batch of ours may take, however much memory there is
Cell = tuple[Site, ...]
LOCAL = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z", "result", "q", "attn_scores", "pattern")
"""Components which at one position (of scores and patterns, the query's) bear on no other position of their layer."""
AVERAGED = ("q", "attn_scores", "pattern")
"""Those of them that do bear on the later ones, where momentum averages outputs over positions."""


@dataclass(frozen=True, eq=False)
class Base:
    """The run that is intervened in, as far as the other runs need it.

    Attributes:
        tokens: `[prompt pos ...]`.
        unpatched: its predictions `[prompt ...]`.
        streams: `[prompt pos d_model]` before each layer and behind the last; none for a model that cannot be resumed.
        batch: how many prompts a run may hold.
    """

    tokens: Tensor
    unpatched: Tensor
    streams: dict[int, Float[Tensor, "prompt pos d_model"]]
    batch: int

    def __len__(self) -> int:
        return len(self.tokens)


@torch.no_grad()
def base_run(adapter: ModelAdapter, tokens: Tensor, *, held: float, memory: float) -> Base:
    """Run the model without intervention, and keep the streams that others resume from.

    Args:
        adapter: of the model.
        tokens: `[prompt pos ...]`.
        held: bytes that whoever asks holds beside this: values to put in, results.
        memory: bound in bytes on all of it.

    Raises:
        ValueError: less memory than one run of one prompt takes.
    """
    names: dict[int, str] = {}
    if adapter.resumes:
        names = {layer: get_act_name("resid_pre", layer) for layer in range(adapter.n_layers)}
        names[adapter.n_layers] = get_act_name("resid_post", adapter.n_layers - 1)
    streams = len(names) and len(names) * adapter.record(tokens[:1], [names[0]], 1)[names[0]].nbytes
    # a layer's streams once more, where every head's is kept for a while
    heads = getattr(adapter.model.cfg, "n_heads", 1) * streams // max(adapter.n_layers, 1)
    batch = rows_within(adapter, tokens, held + len(tokens) * (streams + heads), memory)
    streams_before_hooks = [name for layer, name in names.items() if layer < adapter.n_layers]
    recorded = adapter.record(tokens, names.values(), batch, before_user_hooks=streams_before_hooks) if names else {}
    unpatched = adapter.predict(tokens, batch)
    return Base(tokens, unpatched, {layer: recorded[name] for layer, name in names.items()}, batch)


def bytes_held(values: Mapping[str, Tensor]) -> int:
    """The memory behind some tensors; expanded ones take no more than what they are expanded from."""
    return sum(of.untyped_storage().nbytes() for of in values.values())


def rows_within(adapter: ModelAdapter, tokens: Tensor, held: float, memory: float) -> int:
    """How many prompts a run may hold beside so many bytes.

    Raises:
        ValueError: not one.
    """
    per_row, held = adapter.bytes_per_row(tokens), held + adapter.bytes_of_products
    needed = held + per_row
    if not needed <= memory:
        raise ValueError(
            f"memory={memory:.4g} bytes is too little: what is kept of {len(tokens)} prompts takes {held:.4g}, and "
            f"each prompt of a run {per_row:.4g}. Give at least {needed:.4g}, or fewer prompts or cells"
        )
    most = (
        NEAR / per_row if adapter.ours else 2**31
    )  # larger batches of a small model only leave the processor's caches
    return int(max(min((memory - held) / per_row, most), 1))


def record_within(
    adapter: ModelAdapter, tokens: Tensor, names: Sequence[str], memory: float, held: float = 0
) -> dict[str, Tensor]:
    """Activations by hook name `[prompt ...]`, with all that is computed within a bound on memory.

    Args:
        adapter: of the model.
        tokens: `[prompt pos ...]`.
        names: of the hooks.
        memory: the bound, in bytes.
        held: bytes that whoever asks holds beside this.

    Raises:
        ValueError: too little memory; a hook that the model does not have, or that does not fire.
    """
    one = sum(of.nbytes for of in adapter.record(tokens[:1], names, 1).values())
    return adapter.record(tokens, names, rows_within(adapter, tokens, held + len(tokens) * one, memory))


@torch.no_grad()
def run_cells(
    adapter: ModelAdapter,
    base: Base,
    cells: Sequence[Cell],
    values: Mapping[str, Tensor],
    *,
    metrics: Mapping[str, Metric],
    keep_predictions: bool,
    bar: tqdm | None = None,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Predictions and metrics of each cell: a run in which the activations at its sites are replaced.

    Args:
        adapter: of the model.
        base: the run that is intervened in.
        cells: sites to replace, together, in one run.
        values: what to put there, by hook name, `[prompt ...]`: only the part at the site is read.
        metrics: each takes a cell's predictions `[prompt ...]` and returns `[prompt]`.
        keep_predictions: whether to return them.
        bar: to advance by one for each cell.

    Returns:
        Predictions `[cell prompt ...]` or None, and metrics `[cell prompt]`.

    Raises:
        ValueError: a metric returns another shape.
    """
    predictions = base.unpatched.new_empty(len(cells), *base.unpatched.shape) if keep_predictions else None
    found = {name: _empty(len(cells), measured(name, metric, base.unpatched)) for name, metric in metrics.items()}
    cfg = adapter.model.cfg
    local = adapter.is_transformer and not adapter.has_user_hooks() and all(_is_local(cell, cfg) for cell in cells)
    each_cell = _each_local_cell if local else _each_cell
    for index, predicted in each_cell(adapter, base, cells, values):
        if predictions is not None:
            predictions[index] = predicted
        for name, metric in metrics.items():
            found[name][index] = measured(name, metric, predicted)
        if bar is not None:
            bar.update()
    return predictions, found


def _empty(n_cells: int, like: Tensor) -> Tensor:
    return like.new_empty(n_cells, *like.shape)


def _each_cell(
    adapter: ModelAdapter, base: Base, cells: Sequence[Cell], values: Mapping[str, Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Cells and their predictions, from batches that may hold many cells or only part of one.

    Cells that begin at the same layer and end at the same one share batches, which start there and take the quick
    routes behind.
    """
    n_prompts = len(base)

    def span(index: int) -> tuple[int, int]:
        layers = [site.layer for site in cells[index]]
        return min(layers), max(layers)

    for (layer, last_hooked), group in groupby(sorted(range(len(cells)), key=span), key=span):
        own = list(group)
        from_here = base.streams[layer] if adapter.resumes else base.tokens
        done: list[Tensor] = []
        finished = iter(own)
        for start in range(0, len(own) * n_prompts, base.batch):
            stop = min(start + base.batch, len(own) * n_prompts)
            rows = from_here[torch.arange(start, stop, device=from_here.device) % n_prompts]
            first, last = start // n_prompts, (stop - 1) // n_prompts
            taking_part = [cells[i] for i in own[first : last + 1]]
            hooks = _hooks(taking_part, values, n_prompts, start - first * n_prompts, stop - start)
            done.append(
                adapter.resume(rows, layer, hooks, last_hooked) if adapter.resumes else adapter.run(rows, hooks)
            )
            while sum(map(len, done)) >= n_prompts:
                joined = torch.cat(done) if len(done) > 1 else done[0]
                yield next(finished), joined[:n_prompts]
                done = [joined[n_prompts:]]


def _hooks(
    cells: Sequence[Cell], values: Mapping[str, Tensor], n_prompts: int, skipped: int, n_rows: int
) -> list[Hook]:
    """Hooks that give each row of a batch its cell's activations.

    The rows are the cells' prompts in order, but for the first `skipped` ones.
    """
    edits: dict[str, list[tuple[slice, slice, Site]]] = {}
    for i, cell in enumerate(cells):
        shift = skipped - i * n_prompts
        begin, end = max(-shift, 0), min(n_prompts - shift, n_rows)
        for site in cell:
            edits.setdefault(site.hook_name, []).append((slice(begin, end), slice(begin + shift, end + shift), site))
    return [(name, _replacing(of, values[name])) for name, of in edits.items()]


def _replacing(edits: Sequence[tuple[slice, slice, Site]], values: Tensor) -> Callable[..., Tensor]:
    def replace(activation: Tensor, hook: HookPoint) -> Tensor:
        for rows, prompts, site in edits:
            activation[(rows, *site.index)] = values[(prompts, *site.index)]
        return activation

    return replace


# ---- cells of one position: nothing changes before it in a causal model, nor elsewhere in the patched layer ----


def _is_local(cell: Cell, cfg: TransformerConfig) -> bool:
    if len(cell) != 1 or cell[0].component not in LOCAL or _pos(cell[0]) is None or cell[0].key is not None:
        return False
    return not (cfg.momentum and cfg.momentum_over == "outputs" and cell[0].component in AVERAGED)


def _pos(site: Site) -> int | None:
    return site.query if site.pos is None else site.pos


def _each_local_cell(
    adapter: ModelAdapter, base: Base, cells: Sequence[Cell], values: Mapping[str, Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """As `_each_cell` for cells of one position.

    The patched layer is run once for all positions, with the component replaced everywhere: a position's row is then
    what it would be if only that position had been patched. Later layers compute the rows from that position on.
    """

    def layer_of(index: int) -> int:
        return cells[index][0].layer

    def pos_of(index: int) -> int:
        return _pos(cells[index][0]) or 0

    n_prompts = len(base)
    for layer, group in groupby(sorted(range(len(cells)), key=layer_of), key=layer_of):
        own = list(group)
        after: dict[int | None, Tensor] = {}
        for head in {cells[i][0].head for i in own}:
            whole = Site(cells[own[0]][0].component, layer, head=head)
            after[head] = torch.cat([*_patched_layer(adapter, base, whole, values)])
        following = layer + (cells[own[0]][0].component != "resid_pre")
        for pos, at_pos in groupby(sorted(own, key=pos_of), key=pos_of):
            here = list(at_pos)
            changed = torch.cat([after[cells[i][0].head][:, pos] for i in here])  # [cell * prompt, d_model]
            parts = [
                adapter.resume_from_row(base.streams, following, pos, rows, part)
                for rows, part in zip(
                    torch.arange(len(changed), device=changed.device).remainder(n_prompts).split(base.batch),
                    changed.split(base.batch),
                    strict=True,
                )
            ]
            yield from zip(here, torch.cat(parts).split(n_prompts), strict=True)


def _patched_layer(adapter: ModelAdapter, base: Base, site: Site, values: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """The stream behind a layer in which the site is replaced at all positions; for "resid_pre", that stream itself."""
    whole = values[site.hook_name]
    if site.component == "resid_pre":
        yield whole
        return
    for start in range(0, len(base), base.batch):
        prompts = slice(start, start + base.batch)
        hook = (site.hook_name, _replacing([(slice(None), prompts, site)], whole))
        yield adapter.run_layer(base.streams[site.layer][prompts], site.layer, [hook])
