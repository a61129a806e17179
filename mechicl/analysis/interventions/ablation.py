"""Ablation: what a model predicts without a head, a layer's output, a position, a direction of the stream."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.interventions.corruptions import derangement
from mechicl.analysis.interventions.patching import (
    Inputs,
    Metrics,
    Only,
    bytes_of_results,
    cells_of,
    hooks_of,
    keeps_predictions,
    named_metrics,
    swept_axes,
    swept_indices,
    swept_result,
)
from mechicl.analysis.interventions.runs import MEMORY, bytes_held, record_within
from mechicl.analysis.interventions.sweeps import Sweep
from mechicl.models.adapter import ModelAdapter
from mechicl.prompts import At

Method = Literal["mean", "zero", "resample"]


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
) -> Sweep:
    """What the model predicts when part of its activations is taken away; one call sweeps all heads, or all pairs.

    Args:
        model: ours, or any of TransformerLens' protocol; in eval mode.
        prompts: `Prompts`, or token ids `[prompt pos]`.
        component: as for `patch`: "z" is a head's output, "attn_out" and "mlp_out" a layer's, "resid_pre" the stream.
        axes: what to sweep, as for `patch`; axes that are not named are ablated as a whole.
        method: what stands in for the activation: its "mean" over prompts at the same position, "zero", or that of
            another prompt ("resample").
        reference: the prompts that means are taken over; by default those ablated. Means of few prompts are noisy,
            which adds to every effect and is not in the intervals: with fewer than some 200, give a reference.
        directions: ablate only the activation's coordinate along each of these, one at a time: the sweep gets a last
            axis "direction". Only for components with the width of the stream; directions need no unit length.
        pairs: ablate every two cells together: the sweep gets its axes twice, the second with "_2", and on the
            diagonal cells alone.
        metrics: as for `patch`; by default the squared "loss" against the prompts' targets.
        only: as for `patch`.
        at: as for `patch`.
        keep_predictions: as for `patch`.
        seed: of the other prompts of "resample".
        memory: bound in bytes on what the sweep allocates.
        progress: show a progress bar, if it takes more than two seconds.

    Returns:
        Predictions and metrics of every cell; `effect()` is the change that an ablation makes.

    Raises:
        ValueError: as for `patch`; an unknown method, one prompt to resample from, a reference of another length
            or for another method than "mean", scores set to zero (which would unmask keys), directions of another width
            or zero, or directions in pairs.

    Example:
        >>> swept = ablate(model, prompts, "z", ("layer", "head"))
        >>> swept.effect().shape, swept.strongest(3)["head"].tolist()
        (torch.Size([8, 4, 64]), [1, 2, 0])

    Source: Olsson et al. 2022 (heads); Wang et al. 2023, section 2 (mean); Chan et al. 2022 (resample).
    """
    if method not in get_args(Method):
        raise ValueError(f"method={method!r} is not one of {get_args(Method)}")
    if pairs and directions is not None:
        raise ValueError("pairs of directions are not swept: give their sums, or ablate one after the other")
    adapter = ModelAdapter(model, at)
    tokens = adapter.encode(prompts)
    if not len(tokens):
        raise ValueError("there are no prompts to ablate on")
    swept, named = swept_axes(component, axes), named_metrics(metrics, prompts, at)
    names = hooks_of(adapter, component, only)
    values = stand_ins(adapter, tokens, names, method, reference, seed, memory)
    indices = swept_indices(swept, component, adapter.n_layers, values, only)
    cells = cells_of(component, swept, indices)
    options: dict[str, Any] = {
        "metrics": named,
        "keep_predictions": keeps_predictions(keep_predictions, prompts, named),
        "memory": memory,
        "progress": progress,
    }
    what = f"{method} ablation of {component}"
    if directions is not None:
        held = bytes_held(values)
        activations = record_within(adapter, tokens, names, memory, held)
        units = _units(directions, activations[names[0]])
        held += sum(of.nbytes for of in activations.values()) + 2 * activations[names[0]].nbytes
        each = bytes_of_results(adapter, tokens, len(cells), len(named), options["keep_predictions"])
        sweeps = []
        for unit in units:
            along = {
                name: activations[name] + ((values[name] - activations[name]) @ unit)[..., None] * unit
                for name in names
            }
            options["held"] = held + 2 * len(units) * each
            sweeps.append(swept_result(adapter, tokens, what, swept, indices, cells, along, **options))
        return _stacked(sweeps)
    if pairs:
        n = len(cells)
        places = list(itertools.combinations_with_replacement(range(n), 2))
        together = [cells[i] + cells[j] if i != j else cells[i] for i, j in places]
        options["held"] = bytes_of_results(adapter, tokens, n**2, len(named), options["keep_predictions"])
        flat = swept_result(adapter, tokens, what, ["pair"], [range(len(together))], together, values, **options)
        return _square(flat, places, n, swept, indices)
    return swept_result(adapter, tokens, what, swept, indices, cells, values, **options)


def stand_ins(
    adapter: ModelAdapter,
    tokens: Tensor,
    names: Sequence[str],
    method: Method,
    reference: Inputs | None,
    seed: int,
    memory: float,
) -> dict[str, Tensor]:
    """What stands in for each activation, `[prompt ...]`.

    Raises:
        ValueError: as for `ablate`.
    """
    n = len(tokens)
    if reference is not None and method != "mean":
        raise ValueError(f"reference is what means are taken over; method={method!r} takes none")
    if method == "zero":
        if any(name.endswith("hook_attn_scores") for name in names):
            raise ValueError("scores set to zero would unmask the keys that a position does not see: ablate 'pattern'")
        shapes = adapter.record(tokens[:1], names, 1)
        return {name: torch.zeros_like(of).expand(n, *of.shape[1:]) for name, of in shapes.items()}
    if method == "resample":
        if n < 2:
            raise ValueError(f"resampling takes activations from another prompt, and there is {n}")
        other = derangement(n, torch.Generator().manual_seed(seed)).to(tokens.device)
        return record_within(adapter, tokens[other], names, memory)
    if reference is None and n < 2:
        raise ValueError("the mean over one prompt is that prompt's own activation: give more, or reference=")
    origin = tokens if reference is None else adapter.encode(reference)
    if origin.shape[1:] != tokens.shape[1:] or not len(origin):
        raise ValueError(
            f"reference must be prompts of the same length: {tuple(origin.shape)} for {tuple(tokens.shape)}"
        )
    return {
        name: of.mean(0, keepdim=True).expand(n, *of.shape[1:])
        for name, of in record_within(adapter, origin, names, memory).items()
    }


def _units(directions: Tensor, activation: Tensor) -> Tensor:
    if directions.ndim != 2 or activation.ndim != 3 or directions.shape[1] != activation.shape[2]:
        raise ValueError(
            f"directions must be [direction d_model] for a component as wide as the stream, got "
            f"{tuple(directions.shape)} for activations {tuple(activation.shape)}"
        )
    if not len(directions):
        raise ValueError("there is no direction to ablate")
    directions = directions.to(activation)
    norms = directions.norm(dim=1, keepdim=True)
    if not (norms > 0).all() or not directions.isfinite().all():
        raise ValueError("a direction of length zero, or one that is not finite, has no coordinate to ablate")
    return directions / norms


def _stacked(sweeps: Sequence[Sweep]) -> Sweep:
    """Sweeps of the same cells as one, with a last axis for the directions."""
    first, at = sweeps[0], len(sweeps[0].axes)
    kept = [of.predictions for of in sweeps if of.predictions is not None]
    return dataclasses.replace(
        first,
        axes=(*first.axes, "direction"),
        indices=(*first.indices, tuple(range(len(sweeps)))),
        predictions=torch.stack(kept, dim=at) if kept else None,
        values={name: torch.stack([of.values[name] for of in sweeps], dim=at) for name in first.values},
    )


def _square(
    flat: Sweep, places: Sequence[tuple[int, int]], n: int, axes: Sequence[str], indices: Sequence[Sequence[int]]
) -> Sweep:
    """A sweep of pairs in both orders."""
    order = torch.empty(n, n, dtype=torch.long)
    for k, (i, j) in enumerate(places):
        order[i, j] = order[j, i] = k
    twice = [*indices, *indices]
    shape = tuple(map(len, twice))

    def spread(of: Tensor) -> Tensor:
        return of[order.flatten().to(of.device)].unflatten(0, shape)

    return dataclasses.replace(
        flat,
        what=f"{flat.what}, in pairs",
        axes=(*axes, *(f"{axis}_2" for axis in axes)),
        indices=tuple(map(tuple, twice)),
        predictions=None if flat.predictions is None else spread(flat.predictions),
        values={name: spread(value) for name, value in flat.values.items()},
    )
