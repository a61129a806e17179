"""Ablation: what a model predicts without a head, a layer's output, a position, a direction of the stream."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.interventions.corruptions import derangement
from mechicl.analysis.interventions.grids import CellGrid, Only, make_grid
from mechicl.analysis.interventions.metrics import Inputs, Metrics
from mechicl.analysis.interventions.patching import make_experiment, make_sweep, sweep_grid
from mechicl.analysis.interventions.runs import CellResults, Experiment, record_within
from mechicl.analysis.interventions.sweeps import InterventionSweep
from mechicl.base.arguments import checked
from mechicl.base.memory import MEMORY, Budget, count_bytes
from mechicl.base.progress import progress_bar
from mechicl.models.holding import holds_models
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.prompts import At

Method = Literal["mean", "zero", "resample"]


@checked
@holds_models
def ablate(
    model: Any,
    prompts: Inputs,
    component: str = "z",
    axes: Sequence[str] | None = None,
    *,
    method: Method = "mean",
    reference: Inputs | None = None,
    directions: Float[Tensor, "direction d_model"] | None = None,
    pairs: bool = False,
    metrics: Metrics = None,
    only: Only | None = None,
    at: At = "query",
    keep_predictions: bool | None = None,
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> InterventionSweep:
    """What the model predicts when part of its activations is taken away; one call sweeps all heads, or all pairs.

    `metrics`, `only`, `at`, `keep_predictions`, `memory` and `progress` are as for `patch`.

    Args:
        model: as for `patch`.
        prompts: what it runs on.
        component: as for `patch`: "z" is a head's output, "attn_out" and "mlp_out" a layer's, "resid_pre" the stream.
        axes: what to sweep, as for `patch`; axes that are not named are ablated as a whole.
        method: what replaces the activation: its "mean" over prompts at the same position, "zero", or that of another
            prompt ("resample").
        reference: the prompts that means are taken over; by default those ablated. Means of few prompts are noisy,
            which adds to every effect and is not in the intervals: with fewer than some 200, give a reference. For
            "resample" the prompts that take the place of each of those ablated; by default they are shuffled.
        directions: ablate only the activation's coordinate along each of these, one at a time: the sweep gets a last
            axis "direction". Only for components with the width of the stream; directions need no unit length.
        pairs: ablate every two cells together: the sweep gets its axes twice, the second with "_2", and on the
            diagonal cells alone.
        seed: of the other prompts of "resample".

    Returns:
        Predictions and metrics of every cell; `effect()` is the change that an ablation makes.

    Raises:
        ValueError: as for `patch`; one prompt to resample from, a reference of another length, equal to the prompts
            ("resample") or for "zero", scores set to zero (which would unmask keys), directions of another width or
            zero, or directions in pairs.

    Example:
        >>> swept = ablate(model, prompts, "z", ("layer", "head"))
        >>> swept.effect().shape, swept.strongest(3)["head"].tolist()
        (torch.Size([8, 4, 64]), [1, 2, 0])

    Source: Olsson et al. 2022 (heads); Wang et al. 2023, section 2 (mean); Chan et al. 2022 (resample).
    """
    if pairs and directions is not None:
        raise ValueError("pairs of directions are not swept: give their sums, or ablate one after the other")
    adapter = ModelAdapter(model, at)
    tokens = adapter.encode(prompts)
    if not len(tokens):
        raise ValueError("there are no prompts to ablate on")
    grid = make_grid(adapter, tokens, component, axes, only)
    experiment = make_experiment(adapter, tokens, prompts, metrics, keep_predictions, memory)
    values = record_replacements(adapter, tokens, grid.hook_names, method, reference, seed, experiment.budget)
    what = f"{method} ablation of {component}"
    if directions is not None:
        return _sweep_directions(experiment, grid, values, directions, what, progress)
    if pairs:
        return _sweep_pairs(experiment, grid, values, what, progress)
    return sweep_grid(experiment, grid, values, what, progress=progress)


def record_replacements(
    adapter: ModelAdapter,
    tokens: Tensor,
    names: Sequence[str],
    method: Method,
    reference: Inputs | None,
    seed: int,
    budget: Budget,
) -> dict[str, Tensor]:
    """What an ablation puts in place of each activation, by hook name `[prompt ...]`; raises what `ablate` raises."""
    others = None if reference is None else adapter.encode(reference)
    check_reference(tokens, method, others)
    n = len(tokens)
    if method == "zero":
        if any(name.endswith("hook_attn_scores") for name in names):
            raise ValueError("scores set to zero would unmask the keys that a position does not see: ablate 'pattern'")
        examples = adapter.record(tokens[:1], names, 1)
        return {name: torch.zeros_like(example).expand(n, *example.shape[1:]) for name, example in examples.items()}
    if method == "resample":
        other = derangement(n, torch.Generator().manual_seed(seed)).to(tokens.device)
        return record_within(adapter, tokens[other] if others is None else others, names, budget)
    recorded = record_within(adapter, tokens if others is None else others, names, budget)
    return {name: values.mean(0, keepdim=True).expand(n, *values.shape[1:]) for name, values in recorded.items()}


def check_reference(tokens: Tensor, method: Method, others: Tensor | None) -> None:
    """Refuse (ValueError) tokens of a reference, or none, that a method cannot take its replacements from."""
    if others is None:
        if method != "zero" and len(tokens) < 2:
            raise ValueError(f"method={method!r} needs another prompt, got {len(tokens)}: give more, or reference=")
        return
    if method == "zero":
        raise ValueError("method='zero' takes no reference: it is for 'mean' and 'resample'")
    if others.shape[1:] != tokens.shape[1:] or not len(others):
        raise ValueError(
            f"reference must be prompts of the same length: {tuple(others.shape)} for {tuple(tokens.shape)}"
        )
    if method == "resample" and len(others) != len(tokens):
        raise ValueError(f"method='resample' needs one reference for each of {len(tokens)} prompts, got {len(others)}")
    if method == "resample" and torch.equal(others, tokens):
        raise ValueError("the reference is equal to the prompts, so nothing would change: give other prompts")


def _sweep_directions(
    experiment: Experiment,
    grid: CellGrid,
    values: Mapping[str, Tensor],
    directions: Float[Tensor, "direction d_model"],
    what: str,
    progress: bool,
) -> InterventionSweep:
    """Each cell once for each direction, with only the activation's coordinate along it replaced."""
    activations = record_within(
        experiment.adapter, experiment.tokens, grid.hook_names, experiment.budget.holding(values)
    )
    example = activations[grid.hook_names[0]]
    units, cells = _unit_directions(directions, example), grid.cells()

    def replace_along(unit: Tensor) -> dict[str, Tensor]:
        return {name: x + ((values[name] - x) @ unit)[..., None] * unit for name, x in activations.items()}

    # beside the activations, what replaces them, with two of one layer as it is made; results once more as one tensor
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
        raise ValueError(
            f"directions must be [direction d_model] for a component as wide as the stream, got "
            f"{tuple(directions.shape)} for activations {tuple(activation.shape)}"
        )
    if not len(directions):
        raise ValueError("there is no direction to ablate")
    directions = directions.detach().to(activation)
    norms = directions.norm(dim=1, keepdim=True)
    if not (norms > 0).all() or not directions.isfinite().all():
        raise ValueError("a direction of length zero, or one that is not finite, has no coordinate to ablate")
    return directions / norms


def _sweep_pairs(
    experiment: Experiment, grid: CellGrid, values: Mapping[str, Tensor], what: str, progress: bool
) -> InterventionSweep:
    """Every two cells together; each pair is run once and stands in the sweep in both orders."""
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
