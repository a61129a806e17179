"""Attribution patching: the effects of patching, estimated for all cells at once from one gradient."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechicl.analysis.interventions.metrics import (
    Inputs,
    Metric,
    SomeMetrics,
    evaluate_metrics,
    evaluate_part,
    name_metrics,
)
from mechicl.analysis.interventions.patching import Axes, CellGrid, PatchDirection, encode_pair, make_grid
from mechicl.analysis.interventions.sweeps import InterventionSweep
from mechicl.base.arguments import checked
from mechicl.base.memory import Budget
from mechicl.base.progress import progress_bar
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.sites import axes_of
from mechicl.prompts import At
from mechicl.statistics import UNBOUNDED, Interval, interval


@checked(locks=True)
def attribute(
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
    """Estimate `patch` to first order: the metric's gradient times the change of the activation.

    Use it where patching every cell would take too long: the cost does not grow with the number of cells. The estimate
    of the patched run's metric m is `m(corrupted) + Σ (clean - corrupted) ∂m/∂activation` over the entries that a cell
    replaces, exact where m is affine in the activation; `correlate_effects` compares it with patching. Source: Nanda
    2023, "Attribution Patching"; Syed et al. 2023, eq. 1.

    The arguments that are not listed are those of `patch`.

    Args:
        axes: as for `patch`; "state" needs "pos" among them.
        metrics: as for `patch`, with a gradient; for plain token ids, and for outputs at all positions of points, one
            has to be given.

    Returns:
        A sweep as of `patch`, without predictions: `effect()` is the sum above, `[*axes prompt]`, NaN where activations
        overflow.

    Example:
        >>> corrupted = corrupt(prompts, "labels")
        >>> estimate = attribute(model, prompts, corrupted, "z", ("layer", "head"))
        >>> estimate.strongest(3)
    """
    adapter, into, source = encode_pair(model, clean, corrupted, direction, at)
    named = name_metrics(metrics, clean, at)
    if not named:
        raise ValueError("attribution is of a metric: give metrics=, for instance logit_difference(correct, wrong)")
    grid = make_grid(adapter, into, component, axes)
    if component == "state" and "pos" not in grid.axes:
        raise ValueError(
            "later states follow from earlier ones, so their gradients cannot be added up over positions: give axes "
            "with 'pos', or patch"
        )
    # a pass with gradients keeps the activations of all layers, and those at the hooks in three versions
    batch_size = Budget().rows(adapter.bytes_per_row(into, adapter.n_layers + 1) + 3 * grid.bytes_per_prompt)
    unpatched = adapter.predict(into, batch_size) if batch_size < len(into) else None
    from_source: list[Tensor] = []
    estimates: dict[str, list[Tensor]] = {name: [] for name in named}
    batches = [slice(start, start + batch_size) for start in range(0, len(into), batch_size)]
    for batch in progress_bar(batches, unit="gradient", progress=progress):
        predictions, values = adapter.predict_and_record(source[batch], grid.hook_names, batch_size)
        from_source.append(predictions)
        unpatched, changed = _linearize(adapter, into[batch], values, named, batch, unpatched)
        for metric, changes in changed.items():
            estimates[metric].append(_sum_cells([changes[name] for name in grid.hook_names], grid))
    assert unpatched is not None
    unpatched_values, source_predictions = evaluate_metrics(named, unpatched), torch.cat(from_source)
    return InterventionSweep(
        what=f"{direction} {component}, attributed",
        axes=grid.axes,
        indices=grid.indices,
        predictions=None,
        unpatched=unpatched,
        source=source_predictions,
        values={name: unpatched_values[name] + torch.cat(parts, -1) for name, parts in estimates.items()},
        unpatched_values=unpatched_values,
        source_values=evaluate_metrics(named, source_predictions),
    )


def _linearize(
    adapter: ModelAdapter,
    tokens: Tensor,
    values: Mapping[str, Tensor],
    metrics: Mapping[str, Metric],
    batch: slice,
    unpatched: Tensor | None,
) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """First-order change of each metric as a batch's activations move to `values`, by hook and entry.

    The predictions of all prompts come first: `unpatched`, or where there is one batch those of this run.
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

    changes = {}
    with torch.enable_grad():
        predictions = adapter.run(tokens, [(name, probe(name)) for name in values])
        unpatched = predictions.detach() if unpatched is None else unpatched
        for name, metric in metrics.items():
            measured = evaluate_part(name, metric, predictions, batch, unpatched)
            if not measured.requires_grad:
                raise ValueError(f"the metric {name!r} has no gradient in the predictions: patch with it instead")
            gradients = torch.autograd.grad(measured.sum(), [probes[hook] for hook in values], retain_graph=True)
            changes[name] = {hook: grad * distances[hook] for hook, grad in zip(values, gradients, strict=True)}
    return unpatched, changes


def _sum_cells(changes: Sequence[Tensor], grid: CellGrid) -> Tensor:
    known = axes_of(grid.component)
    summed = [i for i in range(1, changes[0].ndim) if i > len(known) or known[i - 1] not in grid.axes]
    by_layer = torch.stack([change.sum(summed) if summed else change for change in changes])
    present = ["layer", "prompt", *(axis for axis in known if axis in grid.axes)]
    cells = by_layer.permute(*(present.index(axis) for axis in (*grid.axes, "prompt")))
    for place, (axis, indices) in enumerate(zip(grid.axes, grid.indices, strict=True)):
        if axis != "layer":  # those were selected by their hooks
            cells = cells.index_select(place, torch.tensor(indices, device=cells.device))
    return cells


@checked
def correlate_effects(estimate: InterventionSweep, real: InterventionSweep, level: float = 0.95) -> Interval:
    """Correlate estimated and real effects over the cells (Pearson), to see if `attribute` may replace `patch`.

    Args:
        estimate: the estimates, from `attribute`.
        real: the sweep of `patch` over the same cells.

    Returns:
        The mean over prompts of each prompt's correlation, between -1 and 1, with its interval over prompts. Prompts on
        which all effects are the same have no correlation and are left out; effects that are not finite make it NaN. A
        correlation ignores scale: all estimates may still be too large or too small by one factor.

    Example:
        >>> corrupted = corrupt(prompts, "labels")
        >>> correlate_effects(attribute(model, prompts, corrupted), patch(model, prompts, corrupted)).mean
    """
    a, b = (sweep.effect().double().flatten(0, len(sweep.axes) - 1) for sweep in (estimate, real))
    if a.shape != b.shape or (estimate.axes, estimate.indices) != (real.axes, real.indices):
        raise ValueError(f"sweeps must have the same cells: {estimate.axes} {a.shape} and {real.axes} {b.shape}")
    a, b = a - a.mean(0), b - b.mean(0)
    scale = a.norm(dim=0) * b.norm(dim=0)
    if (scale == 0).all():
        raise ValueError("no prompt has effects that differ between cells")
    return interval(((a * b).sum(0) / scale)[scale != 0], level, within=UNBOUNDED).within(-1, 1)
