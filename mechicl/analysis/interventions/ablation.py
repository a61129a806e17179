"""Ablation: predictions without a head, a layer's output, a position, a direction of the stream."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.interventions.corruptions import derangement
from mechicl.analysis.interventions.metrics import Inputs, SomeMetrics
from mechicl.analysis.interventions.patching import Axes, CellGrid, make_experiment, make_grid, make_sweep, sweep_grid
from mechicl.analysis.interventions.runs import CellResults, Experiment, record_within
from mechicl.analysis.interventions.sweeps import InterventionSweep
from mechicl.base.arguments import check_fields, checked
from mechicl.base.memory import count_bytes
from mechicl.base.progress import progress_bar
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.prompts import At

ReplacementMethod = Literal["mean", "zero", "resample", "any"]


@dataclass(frozen=True, eq=False)
class Replacement:
    """A replacement of the activations that `ablate` removes, or of the writes over edges that `find_circuit` cuts.

    Attributes:
        method: the "mean" over prompts at the same position, "zero", the activation of another prompt ("resample"), or
            for edges "any" (zeros and random mixtures; see `find_circuit`).
        reference: for "mean" the prompts to average over, by default those of the analysis. Its 95% intervals treat
            this mean as exact: with fewer than about 200 prompts, give a reference. For "resample" the prompts to take
            activations from, one for each; by default the same ones shuffled.
        seed: seed of the shuffling and of mixtures.

    Example:
        >>> ablate(model, prompts[:32], method=Replacement("mean", reference=prompts)).effect().shape
        torch.Size([8, 4, 32])
    """

    method: ReplacementMethod = "mean"
    reference: Inputs | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


def encode_reference(replacement: Replacement, adapter: ModelAdapter, tokens: Tensor) -> Tensor | None:
    """Return the reference's tokens; ValueError if the method cannot take replacements from them, or from none."""
    method, n, uses_prompts = replacement.method, len(tokens), replacement.method in ("mean", "resample")
    others = None if replacement.reference is None else adapter.encode(replacement.reference)
    if others is None:
        if uses_prompts and n < 2:
            raise ValueError(f"method={method!r} needs another prompt, got {n}: give more, or a reference")
    elif not uses_prompts:
        raise ValueError(f"method={method!r} takes no reference: it is for 'mean' and 'resample'")
    elif others.shape[1:] != tokens.shape[1:] or not len(others):
        raise ValueError(f"reference must have the prompts' length: {(*others.shape,)} for {(*tokens.shape,)}")
    elif method == "resample" and len(others) != n:
        raise ValueError(f"method='resample' needs a reference for each of {n} prompts, got {len(others)}")
    elif method == "resample" and torch.equal(others, tokens):
        raise ValueError("reference is equal to the prompts, so nothing would change: give other prompts")
    return others


@checked(locks=True)
def ablate(
    model: Any,
    prompts: Inputs,
    component: str = "z",
    axes: Axes | None = None,
    *,
    method: Literal["mean", "zero", "resample"] | Replacement = "mean",
    directions: Float[Tensor, "direction d_model"] | None = None,
    metrics: SomeMetrics = None,
    at: At = "query",
    progress: bool | None = None,
) -> InterventionSweep:
    """Ablate each cell of a grid (for example each head) on its own.

    For each cell the model is run once with the component replaced there; along an axis not in `axes`, as a whole.
    Source: Olsson et al. 2022 (heads); Wang et al. 2023, section 2 (mean); Chan et al. 2022 (resample).

    Args:
        model: in eval mode: a mechicl model, or for token ids any of TransformerLens' protocol (`TransformerBridge`).
        prompts: prompts of points, sequences of tokens, or token ids `[prompt pos]`.
        component: the activation to replace: "z" (each head's output), "attn_out", "mlp_out", "resid_post", "pattern",
            or another name listed in `patch`.
        axes: what to sweep, as for `patch`: `{"layer": [3], "head": None}` for all heads of layer 3. By default layer
            and head, or layer and pos for components without heads.
        method: the replacement, described in `Replacement(method, reference)`, which takes means and activations from
            other prompts; with fewer than about 200 prompts, give means a reference.
        directions: vectors to ablate one at a time, of any length: only the activation's component along the vector is
            replaced. The sweep gets a last axis "direction". Only for components as wide as the stream.
        metrics: a function of predictions `[prompt ...]` that returns `[prompt]`, or several by name. By default the
            "loss" against the prompts' targets (squared error, or cross entropy in nats); without targets only
            predictions are kept.
        at: "query" for the last point or token only, "points" for every prefix, "positions" for all positions.

    Returns:
        A sweep, as of `patch`: `effect()` is the change of the metric, ablated minus intact, `[*axes prompt]`.

    Example:
        >>> swept = ablate(model, prompts, "z", ("layer", "head"))
        >>> swept.effect().shape, swept.strongest(3)["head"].tolist()
        (torch.Size([8, 4, 64]), [1, 2, 0])
    """
    replacement = method if isinstance(method, Replacement) else Replacement(method)
    adapter = ModelAdapter(model, at)
    tokens = adapter.encode(prompts)
    if not len(tokens):
        raise ValueError("there are no prompts to ablate on")
    grid = make_grid(adapter, tokens, component, axes)
    experiment = make_experiment(adapter, tokens, prompts, metrics)
    values = _record_replacements(experiment, grid.hook_names, replacement)
    what = f"{replacement.method} ablation of {component}"
    if directions is not None:
        return _sweep_directions(experiment, grid, values, directions, what, progress)
    return sweep_grid(experiment, grid, values, what, progress=progress)


def _record_replacements(experiment: Experiment, names: Sequence[str], replacement: Replacement) -> dict[str, Tensor]:
    adapter, tokens, budget = experiment.adapter, experiment.tokens, experiment.budget
    if replacement.method == "any":
        raise ValueError("method='any' is for edges of circuits: ablate with 'mean', 'zero' or 'resample'")
    others, n = encode_reference(replacement, adapter, tokens), len(tokens)
    if replacement.method == "zero":
        if any(name.endswith("hook_attn_scores") for name in names):
            raise ValueError("scores of zero would unmask hidden keys: ablate 'pattern'")
        examples = adapter.record(tokens[:1], names, 1)
        return {name: torch.zeros_like(example).expand(n, *example.shape[1:]) for name, example in examples.items()}
    if replacement.method == "resample":
        other = derangement(n, torch.Generator().manual_seed(replacement.seed)).to(tokens.device)
        return record_within(adapter, tokens[other] if others is None else others, names, budget)
    recorded = record_within(adapter, tokens if others is None else others, names, budget)
    return {name: values.mean(0, keepdim=True).expand(n, *values.shape[1:]) for name, values in recorded.items()}


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
