"""Probes of a few neurons for a property of texts, in each layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechicl.base.arguments import Count, checked
from mechicl.base.memory import Budget
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.sites import hook_name
from mechicl.prompts import TokenSequences
from mechicl.statistics import Result
from mechicl.statistics.results import NOT_SAMPLES, SHARE

PENALTY = 0.01  # ridge penalty of a probe, relative to the variance of its inputs


@dataclass(frozen=True, eq=False)
class SparseProbes(Result):
    """Accuracies of probes of a few neurons on held-out prompts; see `probe_neurons`.

    Attributes:
        ks: numbers of neurons.
        neurons: the neurons of each layer's largest probe, best first `[layer neuron]`.
        correct: 1 for a prompt that is classified correctly, else 0, `[layer k prompt]`.
        control: the same for probes of randomly permuted labels.
        untrained: the same for the untrained model, if one was given.
    """

    ks: tuple[int, ...]
    neurons: Int[Tensor, "layer neuron"] = field(metadata=NOT_SAMPLES)
    correct: Float[Tensor, "layer k prompt"] = field(metadata=SHARE)
    control: Float[Tensor, "layer k prompt"] = field(metadata=SHARE)
    untrained: Float[Tensor, "layer k prompt"] | None = field(default=None, metadata=SHARE)


@checked(locks=True)
@torch.no_grad()
def probe_neurons(
    model: Any,
    tokens: TokenSequences | Int[Tensor, "prompt pos"],
    labels: Bool[Tensor, "prompt"],
    component: str = "post",
    *,
    ks: Sequence[Count] = (1, 2, 4, 8, 16),
    untrained: Any = None,
    seed: int = 0,
) -> SparseProbes:
    """Classify texts from the k best neurons of each layer, at the last position, to see if few neurons have a feature.

    The neurons are those with the largest difference between the means of both classes, in units of their standard
    deviation. They are chosen and the probe is fitted on a random half of the prompts, with both classes weighted
    equally; the other half measures the accuracy. The control task has randomly permuted labels, for which neurons are
    chosen too. Source: Gurnee et al. 2023, section 3; controls as in Hewitt & Liang 2019.

    Args:
        model: a language model in eval mode: a `HookedTransformer` of token ids, or a `TransformerBridge`.
        tokens: token ids `[prompt pos]`, without padding, at least 8 prompts.
        labels: True for the prompts with the feature, `[prompt]`.
        component: the activation: "post" (neurons), or the dimensions of "resid_post", "mlp_out", "z" or another
            component.
        ks: numbers of neurons of the probes.
        untrained: a model of the same shape with random weights, to compare with.

    Returns:
        A `SparseProbes`; `to_dataframe()` has the accuracies of each layer and k, with 95% intervals.

    Raises:
        ValueError: fewer than 8 prompts, fewer than 2 prompts of a class in a half, or more neurons than a layer has.

    Example:
        >>> probe_neurons(model, tokens, tokens[:, -1] < 100).to_dataframe()
    """
    adapter = ModelAdapter(model)
    ids = adapter.encode(tokens)
    if len(ids) < 8 or labels.shape != ids.shape[:1]:
        raise ValueError(f"needs 8 prompts or more, and a label for each: {len(ids)} prompts, {len(labels)} labels")
    generator = torch.Generator().manual_seed(seed)
    halves = torch.randperm(len(ids), generator=generator).tensor_split(2)
    permuted = labels.cpu()[torch.randperm(len(ids), generator=generator)]
    activations = _last_activations(adapter, ids, component)
    neurons, correct = _classify(activations, labels.cpu(), ks, *halves)
    _, control = _classify(activations, permuted, ks, *halves)
    random = None
    if untrained is not None:
        other = ModelAdapter(untrained)
        _, random = _classify(_last_activations(other, other.encode(tokens), component), labels.cpu(), ks, *halves)
    return SparseProbes(tuple(ks), neurons, correct, control, random)


def _last_activations(adapter: ModelAdapter, ids: Tensor, component: str) -> list[Float[Tensor, "prompt neuron"]]:
    names = [hook_name(component, layer) for layer in range(adapter.n_layers)]
    one = sum(each.nbytes for each in adapter.record(ids[:1], names, 1).values())
    parts = ids.split(Budget().rows(adapter.bytes_per_row(ids) + one))
    recorded = [adapter.record(part, names, len(part)) for part in parts]
    return [torch.cat([each[name][:, -1].flatten(1) for each in recorded]).double().cpu() for name in names]


def _classify(
    activations: Sequence[Tensor], labels: Tensor, ks: Sequence[int], fitting: Tensor, held_out: Tensor
) -> tuple[Int[Tensor, "layer neuron"], Float[Tensor, "layer k prompt"]]:
    known, signs = labels[fitting], 2 * labels.double() - 1
    if min(int(half.sum()) for half in (known, ~known)) < 2:
        raise ValueError("each half of the prompts needs at least 2 prompts of each class: give more prompts")
    weights = torch.where(known, 1 / known.sum(), 1 / (~known).sum())[:, None] / 2
    chosen, correct = [], []
    for layer, all_of_it in enumerate(activations):
        if max(ks) > all_of_it.shape[1]:
            raise ValueError(f"ks must be at most {all_of_it.shape[1]}, the width of layer {layer}, got {max(ks)}")
        there = all_of_it[fitting]
        mean = (weights * there).sum(0)
        spread = (weights * (there - mean).square()).sum(0).sqrt()
        scaled = (all_of_it - mean) / spread.masked_fill(spread == 0, torch.inf)
        apart = (2 * weights * signs[fitting, None] * scaled[fitting]).sum(0).abs()
        chosen.append(apart.argsort(descending=True, stable=True)[: max(ks)])
        rows = []
        for k in ks:
            inputs = scaled[:, chosen[-1][:k]]
            weighed = weights * inputs[fitting]
            moments = inputs[fitting].T @ weighed + PENALTY * torch.eye(k, dtype=torch.float64)
            slopes = torch.linalg.solve(moments, weighed.T @ signs[fitting])
            rows.append((inputs[held_out] @ slopes * signs[held_out] > 0).double())
        correct.append(torch.stack(rows))
    return torch.stack(chosen), torch.stack(correct)
