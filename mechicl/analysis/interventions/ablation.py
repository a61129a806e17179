"""Ablation: predictions without a head, a layer's output, a position."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mechicl.analysis.interventions.corruptions import derangement
from mechicl.analysis.interventions.metrics import Inputs, SomeMetrics
from mechicl.analysis.interventions.patching import Axes, make_experiment, make_grid, sweep_grid
from mechicl.analysis.interventions.runs import Experiment, record_within
from mechicl.analysis.interventions.sweeps import InterventionSweep
from mechicl.base.arguments import check_fields, checked
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
    metrics: SomeMetrics = None,
    at: At = "query",
    progress: bool | None = None,
) -> InterventionSweep:
    """Ablate each cell of a grid (for example each head) on its own.

    For each cell the model is run once with the component replaced there; along an axis not in `axes`, as a whole.
    Source: Olsson et al. 2022 (heads); Wang et al. 2023, section 2 (mean); Chan et al. 2022 (resample).

    The arguments that are not listed are those of `patch`.

    Args:
        method: the replacement, described in `Replacement(method, reference)`, which takes means and activations from
            other prompts; with fewer than about 200 prompts, give means a reference.

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
    values = record_replacements(experiment, grid.hook_names, replacement)
    return sweep_grid(experiment, grid, values, f"{replacement.method} ablation of {component}", progress=progress)


def record_replacements(experiment: Experiment, names: Sequence[str], replacement: Replacement) -> dict[str, Tensor]:
    """Record the values that replace activations, by hook name `[prompt ...]`."""
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
