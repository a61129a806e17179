"""Attribution patching: what patching would do, estimated for all cells at once from one gradient."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechicl.analysis.interventions.metrics import Metric, all_measured
from mechicl.analysis.interventions.patching import (
    Direction,
    Inputs,
    Metrics,
    Only,
    hooks_of,
    named_metrics,
    opened_runs,
    swept_axes,
    swept_indices,
)
from mechicl.analysis.interventions.sweeps import Sweep
from mechicl.models.adapter import ModelAdapter
from mechicl.models.sites import AXES
from mechicl.prompts import At
from mechicl.statistics import Interval, interval


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
) -> Sweep:
    """The first-order estimate of `patch`: the metric's gradient times the change of the activation.

    `m(corrupted) + Σ (clean - corrupted) ∂m/∂activation`, the sum over what a cell replaces. Exact where the metric
    is an affine function of the activation; two forward passes and one backward pass a metric, whatever the number of
    cells. All prompts are in memory at once. `agreement` says how well it does.

    Args and errors as for `patch`. For token ids, and outputs at all positions, a metric has to be given.

    Returns:
        A sweep without predictions, whose `values` are the estimates.

    Example:
        >>> estimate = attribute(model, prompts, corrupted, "z", ("layer", "pos", "head"))
        >>> agreement(estimate, patch(model, prompts, corrupted, "z", ("layer", "pos", "head"))).mean
        0.93

    Source: Nanda 2023, "Attribution Patching"; Syed et al. 2023, eq. 1.
    """
    adapter, into, source = opened_runs(model, clean, corrupted, direction, at)
    swept, named = swept_axes(component, axes), named_metrics(metrics, clean, at)
    if not named:
        raise ValueError("attribution is of a metric: give metrics=, for instance logit_difference(correct, wrong)")
    names = hooks_of(adapter, component, only)
    with torch.no_grad():
        values = adapter.record(source, names, len(source))
        source_predictions = adapter.run(source)
    indices = swept_indices(swept, component, adapter.n_layers, values, only)
    predictions, unpatched, products = first_order(adapter, into, values, named)
    estimates = {}
    for metric, of in products.items():
        summed = torch.stack([_per_cell(of[name], component, swept) for name in names])
        estimates[metric] = unpatched[metric] + _chosen(summed, component, swept, indices)
    return Sweep(
        what=f"{direction} {component}, attributed",
        axes=swept,
        indices=indices,
        predictions=None,
        unpatched=predictions,
        source=source_predictions,
        values=estimates,
        unpatched_values=unpatched,
        source_values=all_measured(named, source_predictions),
    )


def first_order(
    adapter: ModelAdapter, tokens: Tensor, values: Mapping[str, Tensor], metrics: Mapping[str, Metric]
) -> tuple[Tensor, dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """How each metric would change to first order with each entry of some activations put at other values.

    Args:
        adapter: of the model.
        tokens: of the run.
        values: what the activations would become, by hook name, `[prompt ...]`.
        metrics: by name.

    Returns:
        The predictions, the metrics `[prompt]`, and by metric and hook name the change that each entry makes, in the
        activation's shape.
    """
    probes: dict[str, Tensor] = {}
    changes: dict[str, Tensor] = {}
    with torch.enable_grad():
        predictions = adapter.run(tokens, [(name, _probe(name, of, probes, changes)) for name, of in values.items()])
        found = all_measured(metrics, predictions)
        at = [probes[name] for name in values]
        flat = next((name for name, of in found.items() if not of.requires_grad), None)
        if flat is not None:
            raise ValueError(f"the metric {flat!r} has no gradient in the predictions: patch with it instead")
        gradients = {name: torch.autograd.grad(of.sum(), at, retain_graph=True) for name, of in found.items()}
    products = {
        metric: {name: gradient * changes[name] for name, gradient in zip(values, of, strict=True)}
        for metric, of in gradients.items()
    }
    return predictions.detach(), {name: of.detach() for name, of in found.items()}, products


def agreement(estimate: Sweep, real: Sweep, metric: str | None = None, level: float = 0.95) -> Interval:
    """Pearson correlation of estimated and real effects over the cells: mean over prompts, with its interval.

    The ends of the interval are cut at -1 and 1. Prompts on which all effects are the same have no correlation and are
    left out; effects that are not finite make it NaN. A correlation says nothing of scale: the estimates may still be
    too large or too small all over.

    Raises:
        ValueError: sweeps of different cells or prompts, or no prompt left.
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
    found = interval(((a * b).sum(0) / scale)[scale != 0], level)
    return dataclasses.replace(found, low=max(found.low, -1.0), high=min(found.high, 1.0))


def _probe(name: str, source: Tensor, probes: dict[str, Tensor], changes: dict[str, Tensor]) -> Callable[..., Tensor]:
    """A hook that adds a zero to take the gradient of, and notes how far the source is."""

    def add(activation: Tensor, hook: HookPoint) -> Tensor:
        probes[name] = torch.zeros_like(activation, requires_grad=True)
        now = activation.detach()
        changes[name] = (source - now).masked_fill(source == now, 0)  # masked scores: infinite in both runs
        return activation + probes[name]

    return add


def _per_cell(products: Tensor, component: str, swept: Sequence[str]) -> Tensor:
    """Sums over features and over the axes that are not swept, `[prompt, *axes that are]`."""
    own = AXES[component]
    features = range(1 + len(own), products.ndim)
    unswept = [1 + i for i, axis in enumerate(own) if axis not in swept]
    over = [*features, *unswept]
    return products.sum(over) if over else products


def _chosen(products: Tensor, component: str, swept: Sequence[str], indices: Sequence[Sequence[int]]) -> Tensor:
    """`[layer prompt *axes]` of the swept layers as `[*axes prompt]` in the order asked for, at the indices chosen."""
    present = ["layer", "prompt", *(axis for axis in AXES[component] if axis in swept)]
    ordered = products.permute(*(present.index(axis) for axis in (*swept, "prompt")))
    for place, (axis, of) in enumerate(zip(swept, indices, strict=True)):
        if axis != "layer":
            ordered = ordered.index_select(place, torch.tensor(of, device=ordered.device))
    return ordered
