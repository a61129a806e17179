"""Activation patching: activations of one run put into another, cell by cell (Meng et al. 2022; Wang et al. 2023)."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformer_lens.utilities import get_act_name

from mechicl.analysis.interventions.metrics import Metric, all_measured, next_token_loss, squared_error
from mechicl.analysis.interventions.runs import DELAY, MEMORY, Cell, base_run, bytes_held, record_within, run_cells
from mechicl.analysis.interventions.sweeps import Sweep
from mechicl.models.adapter import ModelAdapter
from mechicl.models.sites import AXES, Site, axes_of, check_hook, nearest
from mechicl.prompts import At, Prompts
from mechicl.tokens import TokenSequences

Direction = Literal["denoising", "noising"]
Inputs = Prompts | TokenSequences | Tensor
Metrics = Metric | Mapping[str, Metric] | None
Only = Mapping[str, Sequence[int] | int]


def patch(
    model: Any,
    clean: Inputs,
    corrupted: Inputs,
    component: str = "z",
    axes: Sequence[str] | None = None,
    *,
    direction: Direction = "denoising",
    metrics: Metrics = None,
    only: Only | None = None,
    at: At = "query",
    keep_predictions: bool | None = None,
    memory: float = MEMORY,
    progress: bool = True,
) -> Sweep:
    """What the model predicts when part of its activations comes from another run.

    Each cell of the sweep is one run on the corrupted prompts in which the component, at one layer and at the cell's
    position, head, ..., is replaced by that of the clean run. Axes that are not swept are replaced as a whole:
    `("layer", "head")` replaces a head's output at all positions. Cells are run in batches, each from the stream
    before the patched layer on; the results do not depend on how they are batched.

    Works on our models (given `Prompts`, or token ids), and given token ids on any model of TransformerLens' protocol
    such as a `TransformerBridge`, where results agree with `transformer_lens.patching`.

    Args:
        model: in eval mode.
        clean: the prompts whose activations are put in (denoising).
        corrupted: the prompts on which the model runs, as many and as long; see `corrupt`.
        component: "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z", "result" (where
            the model computes it), "attn_scores" or "pattern".
        axes: what to sweep: "layer" and any of "pos", and "head" for parts of attention, or "head", "query" and "key"
            (positions) for scores and patterns; by default layer and head, or layer and pos for streams.
        direction: "denoising" puts clean activations into the corrupted run, "noising" corrupted ones into the clean.
        metrics: one, or several by name: functions of predictions `[prompt ...]` that return `[prompt]`. By default
            the "loss" of what is read against the clean prompts' targets: squared error, or cross entropy in nats for
            `TokenSequences`; none for plain token ids, and for outputs at all positions of points.
        only: to sweep only some layers, positions, ...: `{"layer": [3], "pos": range(10, 20)}`.
        at: which predictions: of the "query" (the last position), of all "points", or the outputs at all "positions".
        keep_predictions: keep the predictions of each cell; by default where they are not logits beside metrics.
        memory: bound in bytes on what the sweep allocates.
        progress: show a progress bar, if it takes more than two seconds.

    Returns:
        Predictions `[*axes prompt y]` (or logits), and each metric `[*axes prompt]`.

    Raises:
        TypeError: a model without hooks, or prompts that it does not read.
        ValueError: prompts of unequal number or length, a model in training mode, an unknown component or axis, a hook
            that the model does not have, a metric that returns another shape than `[prompt]`, or too little memory.

    Example:
        >>> swept = patch(model, prompts, corrupt(prompts, "labels"), "z", ("layer", "pos", "head"))
        >>> swept.predictions.shape, swept.recovered().shape
        (torch.Size([8, 41, 4, 64, 1]), torch.Size([8, 41, 4]))

    Source: Wang et al. 2023, section 3; Heimersheim and Nanda 2024 for the two directions.
    """
    adapter, into, source = opened_runs(model, clean, corrupted, direction, at)
    swept = swept_axes(component, axes)
    named = named_metrics(metrics, clean, at)
    names = hooks_of(adapter, component, only)
    values = record_within(adapter, source, names, memory)
    indices = swept_indices(swept, component, adapter.n_layers, values, only)
    keep = keeps_predictions(keep_predictions, clean, named)
    return swept_result(
        adapter,
        into,
        f"{direction} {component}",
        swept,
        indices,
        cells_of(component, swept, indices),
        values,
        source,
        metrics=named,
        keep_predictions=keep,
        memory=memory,
        progress=progress,
    )


def swept_result(
    adapter: ModelAdapter,
    tokens: Tensor,
    what: str,
    axes: Sequence[str],
    indices: Sequence[Sequence[int]],
    cells: Sequence[Cell],
    values: Mapping[str, Tensor],
    source: Tensor | None = None,
    *,
    metrics: Mapping[str, Metric],
    keep_predictions: bool,
    memory: float,
    progress: bool,
    held: float = 0,
) -> Sweep:
    """Run the cells, and put what was found into the shape of the axes.

    Args:
        adapter: of the model.
        tokens: of the run that is intervened in.
        what: the sweep in words.
        axes: its axes.
        indices: and what they run over.
        cells: one for each combination of indices.
        values: what to put at their sites, by hook name.
        source: tokens of the run that those come from.
        metrics: by name.
        keep_predictions: whether the cells' predictions are kept.
        memory: bound in bytes.
        progress: show a progress bar, if it takes more than two seconds.
        held: bytes that whoever asks holds beside the values.
    """
    held += bytes_of_results(adapter, tokens, len(cells), len(metrics), keep_predictions)
    held += bytes_held(values)
    base = base_run(adapter, tokens, held=held, memory=memory)
    source_predictions = None if source is None else adapter.predict(source, base.batch)
    with tqdm(total=len(cells), disable=not progress, unit="run", leave=False, delay=DELAY) as bar:
        predictions, found = run_cells(
            adapter, base, cells, values, metrics=metrics, keep_predictions=keep_predictions, bar=bar
        )
    shape = tuple(map(len, indices))
    compared = {}
    if source_predictions is not None:
        compared = all_measured(metrics, source_predictions)
    return Sweep(
        what=what,
        axes=tuple(axes),
        indices=tuple(map(tuple, indices)),
        predictions=None if predictions is None else predictions.unflatten(0, shape),
        unpatched=base.unpatched,
        source=source_predictions,
        values={name: value.unflatten(0, shape) for name, value in found.items()},
        unpatched_values=all_measured(metrics, base.unpatched),
        source_values=compared,
    )


def keeps_predictions(asked: bool | None, prompts: Inputs, metrics: Mapping[str, Metric]) -> bool:
    """Whether a sweep keeps its predictions: where nothing was asked, unless they are logits beside metrics."""
    return isinstance(prompts, Prompts) or not metrics if asked is None else asked


def bytes_of_results(
    adapter: ModelAdapter, tokens: Tensor, n_cells: int, n_metrics: int, keep_predictions: bool
) -> int:
    """The memory that the results of a sweep take, with a few cells' predictions that are worked on."""
    with torch.no_grad():
        example = adapter.run(tokens[:1])
    predictions = (n_cells * keep_predictions + 8) * example.nbytes
    return len(tokens) * (predictions + n_metrics * n_cells * 8)


def opened_runs(
    model: Any, clean: Inputs, corrupted: Inputs, direction: Direction, at: At
) -> tuple[ModelAdapter, Tensor, Tensor]:
    """The adapter, the tokens of the run that is intervened in, and those that activations are taken from.

    Raises:
        ValueError: unequal prompts, or an unknown direction.
    """
    if direction not in ("denoising", "noising"):
        raise ValueError(f"direction={direction!r} is not one of ('denoising', 'noising')")
    adapter = ModelAdapter(model, at)
    into, origin = adapter.encode(corrupted), adapter.encode(clean)
    if into.shape != origin.shape:
        raise ValueError(
            f"clean and corrupted prompts must be as many and as long: {len(origin)} of {origin.shape[1]} positions, "
            f"and {len(into)} of {into.shape[1]}"
        )
    if not len(into):
        raise ValueError("there are no prompts to patch")
    return (adapter, into, origin) if direction == "denoising" else (adapter, origin, into)


def swept_axes(component: str, axes: Sequence[str] | None) -> tuple[str, ...]:
    """The axes of a sweep, "layer" among them.

    Raises:
        ValueError: an unknown component, an axis that it does not have, one twice, or no layer.
    """
    known = ("layer", *axes_of(component))
    axes = (axes,) if isinstance(axes, str) else axes
    if axes is None:
        return ("layer", "head") if "head" in known else ("layer", "pos")
    wrong = [axis for axis in axes if axis not in known]
    if wrong:
        raise ValueError(f"{component!r} has the axes {known}, not {wrong[0]!r}{nearest(wrong[0], known)}")
    if len(set(axes)) < len(axes) or "layer" not in axes:
        raise ValueError(f"a sweep needs 'layer' among its axes, and each once; got {tuple(axes)}")
    return tuple(axes)


def hooks_of(adapter: ModelAdapter, component: str, only: Only | None = None) -> list[str]:
    """The component's hooks, in all layers or those of `only`.

    Raises:
        ValueError: a layer or hook that the model does not have, or no layer.
    """
    names, layers = [], _wanted(only, "layer", range(adapter.n_layers))
    if not layers:
        raise ValueError("there is no layer to sweep")
    for layer in layers:
        if not 0 <= layer < adapter.n_layers:
            raise ValueError(f"layer {layer}: the model has layers 0 to {adapter.n_layers - 1}")
        names.append(get_act_name(component, layer))
        check_hook(adapter.model, names[-1])
    return names


def swept_indices(
    swept: Sequence[str], component: str, n_layers: int, values: Mapping[str, Tensor], only: Only | None
) -> tuple[tuple[int, ...], ...]:
    """The layers, positions, ... of a sweep, for each of its axes.

    Raises:
        ValueError: `only` has an axis that is not swept, or an index that the activations do not have.
    """
    shape = next(iter(values.values())).shape
    sizes = {"layer": n_layers} | {axis: shape[1 + i] for i, axis in enumerate(AXES[component])}
    only = only or {}
    extra = [axis for axis in only if axis not in swept]
    if extra:
        raise ValueError(f"only={extra[0]!r} is no axis of this sweep over {tuple(swept)}")
    indices = tuple(_wanted(only, axis, range(sizes[axis])) for axis in swept)
    for axis, of in zip(swept, indices, strict=True):
        bad = [i for i in of if not 0 <= i < sizes[axis]]
        if bad or not of:
            raise ValueError(f"{axis} must be 0 to {sizes[axis] - 1}, got {bad or 'none'}")
    return indices


def _wanted(only: Only | None, axis: str, every: range) -> tuple[int, ...]:
    """The indices along an axis, one or several of which may have been asked for."""
    wanted = (only or {}).get(axis, every)
    return tuple(int(i) for i in np.atleast_1d(wanted))


def cells_of(component: str, swept: Sequence[str], indices: Sequence[Sequence[int]]) -> list[Cell]:
    """One site for each combination of indices."""
    return [(Site(component, **dict(zip(swept, place, strict=True))),) for place in itertools.product(*indices)]


def named_metrics(metrics: Metrics, prompts: Inputs, at: At) -> dict[str, Metric]:
    """Metrics by name; where none is given, the loss against the prompts' targets, if there are any for what is read.

    Raises:
        ValueError: the last token of a sequence is not to be predicted, so it has no loss.
    """
    if metrics is not None:
        return dict(metrics) if isinstance(metrics, Mapping) else {"metric": metrics}
    if isinstance(prompts, Prompts) and at != "positions":
        return {"loss": squared_error(prompts)}
    if isinstance(prompts, TokenSequences):
        targets = prompts.targets()
        if at == "query" and (targets[:, -1] < 0).any():
            raise ValueError("a sequence's last token has no target: take at='positions', or give metrics=")
        return {"loss": next_token_loss(targets if at == "positions" else targets[:, -1])}
    return {}
