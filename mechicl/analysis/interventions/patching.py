"""Activation patching over the cells of a grid: activations of one run replace those of another.

Source: Meng et al. 2022; Wang et al. 2023.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from mechicl.analysis.interventions.metrics import Inputs, SomeMetrics, evaluate_metrics, name_metrics
from mechicl.analysis.interventions.runs import Baseline, CellResults, Experiment, Sites, record_within
from mechicl.analysis.interventions.sweeps import InterventionSweep
from mechicl.base.arguments import checked
from mechicl.base.memory import Budget
from mechicl.base.progress import progress_bar
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edits import check_edits
from mechicl.models.opening.sites import Site, axes_of, has_axes_of, hook_name, nearest_name
from mechicl.prompts import At, Prompts

Axes = Sequence[str] | Mapping[str, Sequence[int] | int | None]
"""Axes to sweep, or for each the layers, positions, ... to sweep (None: all)."""


@dataclass(frozen=True)
class CellGrid:
    """The cells of a sweep."""

    component: str
    # the swept axes, "layer" among them; along its other axes the component is replaced as a whole.
    axes: tuple[str, ...]
    indices: tuple[tuple[int, ...], ...]  # the layers, positions, ... for each of the axes
    bytes_per_prompt: int  # of the component in the layers that are swept

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of cells along each axis."""
        return tuple(map(len, self.indices))

    @property
    def hook_names(self) -> list[str]:
        """The component's hooks in the layers that are swept."""
        return [hook_name(self.component, layer) for layer in self.indices[self.axes.index("layer")]]

    def cells(self) -> list[Sites]:
        """One site for each combination of indices, in order."""
        places = itertools.product(*self.indices)
        return [(Site(self.component, **dict(zip(self.axes, place, strict=True))),) for place in places]


def make_grid(adapter: ModelAdapter, tokens: Tensor, component: str, axes: Axes | None) -> CellGrid:
    """Make the cells of a sweep; ValueError if a run on one token shows that the model lacks or ignores one."""
    known, chosen = ("layer", *axes_of(component)), axes if isinstance(axes, Mapping) else {}
    if axes is None:
        axes = ("layer", "head") if "head" in known else ("layer", known[1])
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    if wrong := [axis for axis in axes if axis not in known]:
        raise ValueError(f"{component!r} has the axes {known}, not {wrong[0]!r}{nearest_name(wrong[0], known)}")
    if len(set(axes)) < len(axes) or "layer" not in axes:
        raise ValueError(f"axes must contain 'layer', and each axis once; got {axes}")

    def indices_along(axis: str, size: int) -> tuple[int, ...]:
        given = chosen.get(axis)
        places = tuple(int(i) for i in np.atleast_1d(range(size) if given is None else given))
        outside = [i for i in places if not 0 <= i < size]
        if outside or not places:
            raise ValueError(f"{axis} must be 0 to {size - 1}, got {outside or 'none'}")
        return places

    layers = indices_along("layer", adapter.n_layers)
    activations = adapter.record(tokens[:1], [hook_name(component, layer) for layer in layers], 1)
    recorded = activations[hook_name(component, layers[0])].shape
    if not has_axes_of(component, recorded):
        raise ValueError(f"the model has no hook for {component!r}: it is a component of models of tables")
    sizes = dict(zip(known, (adapter.n_layers, *recorded[1:]), strict=False))  # features come last
    n_bytes = sum(activation.nbytes for activation in activations.values())
    grid = CellGrid(component, axes, tuple(indices_along(axis, sizes[axis]) for axis in axes), n_bytes)
    check_edits(adapter, tokens, grid.hook_names)
    return grid


PatchDirection = Literal["denoising", "noising"]


@checked(locks=True)
def patch(
    model: Any,
    clean: Inputs,
    corrupted: Inputs,
    component: str = "z",
    axes: Axes | None = None,
    *,
    direction: PatchDirection = "denoising",
    metrics: SomeMetrics = None,
    at: At = "query",
    progress: bool | None = None,
) -> InterventionSweep:
    """Patch activations of one run into another, one cell of a sweep at a time, and measure the predictions.

    Each cell is a run on the corrupted prompts in which the component, at one layer and at the cell's position, head,
    and so on, is replaced by that of the clean run; along axes that are not swept it is replaced as a whole. So
    `("layer", "head")` replaces a head's output at all positions. It shows which activations carry what differs between
    both runs. Source: Wang et al. 2023, section 3; Heimersheim and Nanda 2024 for the two directions.

    Args:
        model: a mechicl model in eval mode, or for token ids any model of TransformerLens' protocol such as a
            `TransformerBridge`, where results agree with `transformer_lens.patching`.
        clean: the prompts whose activations replace the others ("denoising").
        corrupted: the prompts on which the model runs, of the same number and length; see `corrupt`.
        component: "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z" (a head's output),
            "attn_scores", "pattern", "pre" or "post" (the MLP's hidden layer), in recurrent layers "gate" and "step";
            where the model computes them, "state" (of a recurrent layer: later states follow from it), "result",
            "attn_in", "q_input", "k_input", "v_input" and "mlp_in".
        axes: what to sweep: "layer" and any of "pos", and "head" for parts of attention, or "head", "query" and "key"
            (positions) for scores and patterns, or "pos" and "neuron" for an MLP's hidden layer; by default layer and
            head, or layer and pos for components without heads. A mapping sweeps only some layers, positions, ... of
            each axis, or all for None: `{"layer": [3], "pos": range(10, 20), "head": None}`.
        direction: "denoising" patches clean activations into the corrupted run, "noising" the other way round.
        metrics: a function of predictions `[prompt ...]` that returns `[prompt]`, or several by name. By default the
            "loss" against the clean prompts' targets, where there are any: squared error, or cross entropy in nats for
            `TokenSequences`. Token models' predictions (logits) are kept only without metrics, `metrics={}`.
        at: "query" for the last point or token only, "points" for every prefix, "positions" for all positions.

    Returns:
        A sweep: `recovered()` is the share of the difference between both runs' mean metric that each cell recovers (0:
        as without the patch, 1: as in the run that activations come from), `[*axes]`; `effect()` the change of the
        metric by each patch, patched minus unpatched, `[*axes prompt]`; `strongest(n)` a table of the largest mean
        effects with 95% intervals over prompts; `predictions` are `[*axes prompt y]` (or logits, if they are kept).

    Raises:
        TypeError: a model without hooks, or prompts that it does not read.
        ValueError: prompts of unequal number or length, padded texts, a model in training mode, an unknown component
            or axis, a hook that the model lacks or ignores, a metric that is not `[prompt]`, or too little memory.

    Example:
        >>> swept = patch(model, prompts, corrupt(prompts, "labels"), "z", ("layer", "head"))
        >>> swept.predictions.shape, swept.recovered().shape
        (torch.Size([8, 4, 64, 1]), torch.Size([8, 4]))
    """
    adapter, into, source = encode_pair(model, clean, corrupted, direction, at)
    grid = make_grid(adapter, into, component, axes)
    experiment = make_experiment(adapter, into, clean, metrics)
    values = record_within(adapter, source, grid.hook_names, experiment.budget)
    return sweep_grid(experiment, grid, values, f"{direction} {component}", source=source, progress=progress)


def make_experiment(adapter: ModelAdapter, tokens: Tensor, prompts: Inputs, metrics: SomeMetrics) -> Experiment:
    """Make the experiment of arguments of `patch`; by default the loss is against the targets of `prompts`.

    Predictions are kept unless they are logits and there are metrics.
    """
    named = name_metrics(metrics, prompts, adapter.at)
    return Experiment(adapter, tokens, named, isinstance(prompts, Prompts) or not named, Budget())


def sweep_grid(
    experiment: Experiment,
    grid: CellGrid,
    values: Mapping[str, Tensor],
    what: str,
    *,
    source: Tensor | None = None,
    progress: bool | None,
) -> InterventionSweep:
    """Run the cells of a grid with `values` by hook name patched in, which come from a run on the tokens `source`."""
    cells = grid.cells()
    baseline = experiment.run_baseline(len(cells), values)
    with progress_bar(total=len(cells), unit="run", progress=progress) as bar:
        results = experiment.run_cells(baseline, cells, values, bar.update)
    results = results.map(lambda tensor: tensor.unflatten(0, grid.shape))
    return make_sweep(experiment, baseline, results, what, grid.axes, grid.indices, source)


def make_sweep(
    experiment: Experiment,
    baseline: Baseline,
    results: CellResults,
    what: str,
    axes: tuple[str, ...],
    indices: tuple[tuple[int, ...], ...],
    source: Tensor | None = None,
) -> InterventionSweep:
    """Make the sweep of results `[*axes prompt ...]`, with the runs without intervention on both kinds of tokens."""
    from_source = None if source is None else experiment.adapter.predict(source, baseline.batch_size)
    return InterventionSweep(
        what=what,
        axes=axes,
        indices=indices,
        predictions=results.predictions,
        unpatched=baseline.predictions,
        source=from_source,
        values=results.values,
        unpatched_values=evaluate_metrics(experiment.metrics, baseline.predictions),
        source_values={} if from_source is None else evaluate_metrics(experiment.metrics, from_source),
    )


def encode_pair(
    model: Any, clean: Inputs, corrupted: Inputs, direction: PatchDirection, at: At
) -> tuple[ModelAdapter, Tensor, Tensor]:
    """Return the adapter, the tokens of the run that is intervened in, and those that activations are taken from."""
    adapter = ModelAdapter(model, at)
    into, source = adapter.encode(corrupted), adapter.encode(clean)
    if into.shape != source.shape:
        raise ValueError(f"clean and corrupted need the same number and length: {[*source.shape]}, {[*into.shape]}")
    if not len(into):
        raise ValueError("there are no prompts to patch")
    return (adapter, into, source) if direction == "denoising" else (adapter, source, into)
