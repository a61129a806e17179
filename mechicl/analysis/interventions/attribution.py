"""Attribution patching: what patching would do, estimated for all cells at once from one gradient."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechicl.analysis.interventions.grids import CellGrid, Only, make_grid
from mechicl.analysis.interventions.metrics import Inputs, Metric, Metrics, evaluate_metrics, name_metrics
from mechicl.analysis.interventions.patching import Direction, encode_pair
from mechicl.analysis.interventions.sweeps import InterventionSweep
from mechicl.base.arguments import checked
from mechicl.models.holding import holds_models
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.sites import axes_of
from mechicl.prompts import At
from mechicl.statistics import Interval, interval


@checked
@holds_models
def attribute(
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
) -> InterventionSweep:
    """The first-order estimate of `patch`: the metric's gradient times the change of the activation.

    `m(corrupted) + Σ (clean - corrupted) ∂m/∂activation`, the sum over what a cell replaces. Exact where the metric
    is an affine function of the activation; two forward passes and one backward pass a metric, whatever the number of
    cells. All prompts are in memory at once. `correlate_effects` says how well it does.

    Args and errors as for `patch`. For token ids, and outputs at all positions, a metric has to be given.

    Returns:
        A sweep without predictions, whose `values` are the estimates.

    Example:
        >>> corrupted = corrupt(prompts, "labels")
        >>> estimate = attribute(model, prompts, corrupted, "z", ("layer", "head"))
        >>> estimate.strongest(3)

    Source: Nanda 2023, "Attribution Patching"; Syed et al. 2023, eq. 1.
    """
    adapter, into, source = encode_pair(model, clean, corrupted, direction, at)
    named = name_metrics(metrics, clean, at)
    if not named:
        raise ValueError("attribution is of a metric: give metrics=, for instance logit_difference(correct, wrong)")
    grid = make_grid(adapter, into, component, axes, only)
    names = grid.hook_names
    with torch.no_grad():
        values = adapter.record(source, names, len(source))
        source_predictions = adapter.run(source)
    predictions, unpatched, changes = linearize_metrics(adapter, into, values, named)
    estimates = {}
    for metric, by_hook in changes.items():
        summed = torch.stack([_sum_within_cells(by_hook[name], grid) for name in names])
        estimates[metric] = unpatched[metric] + _select_cells(summed, grid)
    return InterventionSweep(
        what=f"{direction} {component}, attributed",
        axes=grid.axes,
        indices=grid.indices,
        predictions=None,
        unpatched=predictions,
        source=source_predictions,
        values=estimates,
        unpatched_values=unpatched,
        source_values=evaluate_metrics(named, source_predictions),
    )


def linearize_metrics(
    adapter: ModelAdapter, tokens: Tensor, values: Mapping[str, Tensor], metrics: Mapping[str, Metric]
) -> tuple[Tensor, dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The change of each metric, to first order, as each entry of the activations goes to these values (by hook name).

    Returns:
        The predictions, the metrics `[prompt]`, and by metric and hook name the change that each entry makes, in the
        activation's shape.

    Raises:
        ValueError: a metric without a gradient.
    """
    probes: dict[str, Tensor] = {}  # zeros added to the activations, so that gradients can be taken there
    distances: dict[str, Tensor] = {}

    def probe(name: str) -> Callable[..., Tensor]:
        def add_probe(activation: Tensor, hook: HookPoint) -> Tensor:
            probes[name] = torch.zeros_like(activation, requires_grad=True)
            now = activation.detach()
            # where both are equal the distance is 0: masked scores are -inf in both runs
            distances[name] = (values[name] - now).masked_fill(values[name] == now, 0)
            if name.endswith("hook_resid_mid"):
                return activation.add_(probes[name])  # in place: the stream around the MLP is the same tensor
            return activation + probes[name]

        return add_probe

    with torch.enable_grad():
        predictions = adapter.run(tokens, [(name, probe(name)) for name in values])
        measured = evaluate_metrics(metrics, predictions)
        flat = next((name for name, metric in measured.items() if not metric.requires_grad), None)
        if flat is not None:
            raise ValueError(f"the metric {flat!r} has no gradient in the predictions: patch with it instead")
        changes = {}
        for metric, per_prompt in measured.items():
            gradients = torch.autograd.grad(per_prompt.sum(), [probes[name] for name in values], retain_graph=True)
            changes[metric] = {name: grad * distances[name] for name, grad in zip(values, gradients, strict=True)}
    return predictions.detach(), {name: metric.detach() for name, metric in measured.items()}, changes


@checked
def correlate_effects(
    estimate: InterventionSweep, real: InterventionSweep, metric: str | None = None, level: float = 0.95
) -> Interval:
    """Pearson correlation of estimated and real effects over the cells: mean over prompts, with its interval.

    The ends of the interval are cut at -1 and 1. Prompts on which all effects are the same have no correlation and are
    left out; effects that are not finite make it NaN. A correlation says nothing of scale: the estimates may still be
    too large or too small all over.

    Raises:
        ValueError: sweeps of different cells or prompts, or no prompt left.

    Example:
        >>> corrupted = corrupt(prompts, "labels")
        >>> correlate_effects(attribute(model, prompts, corrupted), patch(model, prompts, corrupted)).mean
    """
    a, b = (sweep.effect(metric).double().flatten(0, len(sweep.axes) - 1) for sweep in (estimate, real))
    if a.shape != b.shape or (estimate.axes, estimate.indices) != (real.axes, real.indices):
        raise ValueError(
            f"sweeps over {estimate.axes} {tuple(a.shape)} and {real.axes} {tuple(b.shape)} do not compare"
        )
    a, b = a - a.mean(0), b - b.mean(0)
    scale = a.norm(dim=0) * b.norm(dim=0)
    if (scale == 0).all():
        raise ValueError("no prompt has effects that differ between cells")
    mean = interval(((a * b).sum(0) / scale)[scale != 0], level)
    return dataclasses.replace(mean, low=max(mean.low, -1.0), high=min(mean.high, 1.0))


def _sum_within_cells(changes: Tensor, grid: CellGrid) -> Tensor:
    """Sums over features and over the axes that are not swept, `[prompt, *axes that are]`."""
    known = axes_of(grid.component)
    features = range(1 + len(known), changes.ndim)
    unswept = [1 + i for i, axis in enumerate(known) if axis not in grid.axes]
    summed = [*features, *unswept]
    return changes.sum(summed) if summed else changes


def _select_cells(changes: Tensor, grid: CellGrid) -> Tensor:
    """`[layer prompt *axes]` of the swept layers as `[*axes prompt]` in the grid's order, at its indices."""
    present = ["layer", "prompt", *(axis for axis in axes_of(grid.component) if axis in grid.axes)]
    ordered = changes.permute(*(present.index(axis) for axis in (*grid.axes, "prompt")))
    for place, (axis, indices) in enumerate(zip(grid.axes, grid.indices, strict=True)):
        if axis != "layer":
            ordered = ordered.index_select(place, torch.tensor(indices, device=ordered.device))
    return ordered
