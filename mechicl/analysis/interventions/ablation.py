"""Ablation: predictions without a head, a layer's output, a position, a direction of the stream."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.interventions.corruptions import derangement
from mechicl.analysis.interventions.grids import CellGrid, Only, make_grid
from mechicl.analysis.interventions.metrics import Inputs, SomeMetrics
from mechicl.analysis.interventions.patching import make_experiment, make_sweep, sweep_grid
from mechicl.analysis.interventions.runs import CellResults, Experiment, record_within
from mechicl.analysis.interventions.sweeps import InterventionSweep
from mechicl.base.arguments import checked
from mechicl.base.memory import count_bytes
from mechicl.base.progress import progress_bar
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.prompts import At

AblationMethod = Literal["mean", "zero", "resample"]


@checked(locks=True)
def ablate(
    model: Any,
    prompts: Inputs,
    component: str = "z",
    axes: Sequence[str] | None = None,
    *,
    method: AblationMethod = "mean",
    reference: Inputs | None = None,
    directions: Float[Tensor, "direction d_model"] | None = None,
    pairs: bool = False,
    metrics: SomeMetrics = None,
    only: Only | None = None,
    at: At = "query",
    keep_predictions: bool | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> InterventionSweep:
    """Ablate each cell of a grid (for example each head) on its own, or all pairs of cells.

    For each cell the model is run once with the component replaced there; along an axis not in `axes`, as a whole.
    Source: Olsson et al. 2022 (heads); Wang et al. 2023, section 2 (mean); Chan et al. 2022 (resample).

    Args:
        model: in eval mode: a mechicl model, or for token ids any of TransformerLens' protocol (`TransformerBridge`).
        prompts: prompts of points, sequences of tokens, or token ids `[prompt pos]`.
        component: the activation to replace: "z" (each head's output), "attn_out", "mlp_out", "resid_post", "pattern",
            or another name listed in `patch`.
        axes: what to sweep: "layer" and any of the component's other axes, for "z" "pos" and "head" (`patch` lists
            them). By default layer and head, or layer and pos for components without heads.
        method: the replacement: the activation's "mean" over prompts at the same position, "zero", or the activation of
            another prompt ("resample").
        reference: for "mean" the prompts to average over, by default those ablated. The 95% intervals treat this mean
            as exact: with fewer than about 200 prompts, give a reference. For "resample" the prompts to take
            activations from, by default the same ones shuffled.
        directions: vectors to ablate one at a time, of any length: only the activation's component along the vector is
            replaced. The sweep gets a last axis "direction". Only for components as wide as the stream.
        pairs: ablate every two cells together: the sweep has its axes twice, the second time with the suffix "_2"; its
            diagonal contains the single cells.
        metrics: a function of predictions `[prompt ...]` that returns `[prompt]`, or several by name. By default the
            "loss" against the prompts' targets (squared error, or cross entropy in nats); without targets only
            predictions are kept.
        only: sweep only some layers, positions, ...: `{"layer": [3], "pos": range(10, 20)}`.
        at: "query" for the last point or token only, "points" for every prefix, "positions" for all positions.
        keep_predictions: keep each cell's predictions; by default unless these are logits and there are metrics.

    Returns:
        A sweep: `effect()` is the change of the first metric by each ablation, ablated minus intact, `[*axes prompt]`;
        `strongest(n)` is a table of the largest mean effects with 95% intervals over prompts; `predictions` are
        `[*axes prompt y]` (or logits, if they are kept).

    Example:
        >>> swept = ablate(model, prompts, "z", ("layer", "head"))
        >>> swept.effect().shape, swept.strongest(3)["head"].tolist()
        (torch.Size([8, 4, 64]), [1, 2, 0])
    """
    if pairs and directions is not None:
        raise ValueError("directions cannot be ablated in pairs: leave out pairs= or directions=")
    adapter = ModelAdapter(model, at)
    tokens = adapter.encode(prompts)
    if not len(tokens):
        raise ValueError("there are no prompts to ablate on")
    grid = make_grid(adapter, tokens, component, axes, only)
    experiment = make_experiment(adapter, tokens, prompts, metrics, keep_predictions)
    values = _record_replacements(experiment, grid.hook_names, method, reference, seed)
    what = f"{method} ablation of {component}"
    if directions is not None:
        return _sweep_directions(experiment, grid, values, directions, what, progress)
    if pairs:
        return _sweep_pairs(experiment, grid, values, what, progress)
    return sweep_grid(experiment, grid, values, what, progress=progress)


def _record_replacements(
    experiment: Experiment, names: Sequence[str], method: AblationMethod, reference: Inputs | None, seed: int
) -> dict[str, Tensor]:
    adapter, tokens, budget = experiment.adapter, experiment.tokens, experiment.budget
    others = None if reference is None else adapter.encode(reference)
    check_reference(tokens, method, others)
    n = len(tokens)
    if method == "zero":
        if any(name.endswith("hook_attn_scores") for name in names):
            raise ValueError("scores of zero would unmask hidden keys: ablate 'pattern'")
        examples = adapter.record(tokens[:1], names, 1)
        return {name: torch.zeros_like(example).expand(n, *example.shape[1:]) for name, example in examples.items()}
    if method == "resample":
        other = derangement(n, torch.Generator().manual_seed(seed)).to(tokens.device)
        return record_within(adapter, tokens[other] if others is None else others, names, budget)
    recorded = record_within(adapter, tokens if others is None else others, names, budget)
    return {name: values.mean(0, keepdim=True).expand(n, *values.shape[1:]) for name, values in recorded.items()}


def check_reference(tokens: Tensor, method: str, others: Tensor | None) -> None:
    """Raise ValueError if a method cannot take its replacements from the tokens of a reference, or from none."""
    n, uses_prompts = len(tokens), method in ("mean", "resample")
    if others is None:
        if uses_prompts and n < 2:
            raise ValueError(f"method={method!r} needs another prompt, got {n}: give more, or reference=")
    elif not uses_prompts:
        raise ValueError(f"method={method!r} takes no reference: it is for 'mean' and 'resample'")
    elif others.shape[1:] != tokens.shape[1:] or not len(others):
        raise ValueError(f"reference must have the prompts' length: {tuple(others.shape)} for {tuple(tokens.shape)}")
    elif method == "resample" and len(others) != n:
        raise ValueError(f"method='resample' needs a reference for each of {n} prompts, got {len(others)}")
    elif method == "resample" and torch.equal(others, tokens):
        raise ValueError("reference is equal to the prompts, so nothing would change: give other prompts")


def _sweep_directions(
    experiment: Experiment,
    grid: CellGrid,
    values: Mapping[str, Tensor],
    directions: Float[Tensor, "direction d_model"],
    what: str,
    progress: bool | None,
) -> InterventionSweep:
    activations = record_within(
        experiment.adapter, experiment.tokens, grid.hook_names, experiment.budget.holding(values)
    )
    example = activations[grid.hook_names[0]]
    units, cells = _unit_directions(directions, example), grid.cells()

    def replace_along(unit: Tensor) -> dict[str, Tensor]:
        return {name: x + ((values[name] - x) @ unit)[..., None] * unit for name, x in activations.items()}

    # memory: the activations, their replacements, and two of one layer while these are computed; results twice
    replacing = count_bytes(activations) + 2 * example.nbytes
    baseline = experiment.run_baseline(2 * len(units) * len(cells), values, activations, replacing)
    with progress_bar(total=len(units) * len(cells), unit="run", progress=progress) as bar:
        by_direction = [experiment.run_cells(baseline, cells, replace_along(unit), bar.update) for unit in units]
    kept = [results.predictions for results in by_direction if results.predictions is not None]
    results = CellResults(
        torch.stack(kept, 1) if kept else None,
        {name: torch.stack([results.values[name] for results in by_direction], 1) for name in experiment.metrics},
    ).map(lambda tensor: tensor.unflatten(0, grid.shape))
    axes, indices = (*grid.axes, "direction"), (*grid.indices, tuple(range(len(units))))
    return make_sweep(experiment, baseline, results, what, axes, indices)


def _unit_directions(directions: Tensor, activation: Tensor) -> Tensor:
    if directions.ndim != 2 or activation.ndim != 3 or directions.shape[1] != activation.shape[2]:
        shapes = f"{tuple(directions.shape)} for activations {tuple(activation.shape)}"
        raise ValueError(f"directions must be [direction d_model], for a component as wide as the stream, got {shapes}")
    directions = directions.detach().to(activation)
    norms = directions.norm(dim=1, keepdim=True)
    if not len(norms) or not (norms > 0).all():
        raise ValueError("directions must be one or more, of lengths above 0")
    return directions / norms


def _sweep_pairs(
    experiment: Experiment, grid: CellGrid, values: Mapping[str, Tensor], what: str, progress: bool | None
) -> InterventionSweep:
    """Run every two cells together; each pair runs once and is in the sweep in both orders."""
    cells = grid.cells()
    n = len(cells)
    pairs = list(itertools.combinations_with_replacement(range(n), 2))
    together = [cells[i] + cells[j] if i != j else cells[i] for i, j in pairs]
    baseline = experiment.run_baseline(len(pairs) + n**2, values)
    with progress_bar(total=len(pairs), unit="run", progress=progress) as bar:
        results = experiment.run_cells(baseline, together, values, bar.update)
    pair_of = torch.empty(n, n, dtype=torch.long)
    for number, (i, j) in enumerate(pairs):
        pair_of[i, j] = pair_of[j, i] = number
    results = results.map(lambda flat: flat[pair_of.flatten().to(flat.device)].unflatten(0, grid.shape * 2))
    axes = (*grid.axes, *(f"{axis}_2" for axis in grid.axes))
    return make_sweep(experiment, baseline, results, f"{what}, in pairs", axes, grid.indices * 2)
