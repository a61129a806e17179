"""What a cut edge carries in place of what its sender writes."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.circuits.parts import record_writes
from mechicl.analysis.interventions.ablation import check_reference
from mechicl.analysis.interventions.corruptions import derangement
from mechicl.analysis.interventions.metrics import Inputs
from mechicl.models.opening.adapter import ModelAdapter

Method = Literal["zero", "mean", "resample", "counterfactual", "scrambled", "any"]
"""What a cut edge carries: see `find_circuit`."""
N_STREAMS = 256  # that runs of "any" start from, beside prompts: what is rarely seen shows in some of them
N_MIXED = 3  # writes of one node that a scrambled one mixes
N_SCRAMBLED = 8  # scrambled prompts that "any" takes at least: one alone can miss what a reader listens to


@dataclass(frozen=True, eq=False)
class Reference:
    """What each node writes where its edges are cut, `[node prompt pos d_model]`, and the stream that runs start from.

    `embedded` is None where runs start from the embedded tokens; there may be more streams than prompts.
    """

    writes: Float[Tensor, "node prompt pos d_model"]
    embedded: Float[Tensor, "prompt pos d_model"] | None = None


def record_references(
    adapter: ModelAdapter, tokens: Tensor, method: Method, reference: Inputs | None, seed: int
) -> list[Reference]:
    """What cut edges carry; for "any" zero and something scrambled, both also in runs from scrambled streams.

    Of fewer than `N_SCRAMBLED` prompts "any" scrambles each several times.

    Raises:
        ValueError: an unknown method, or a reference that it does not go with; see `find_circuit`.
    """
    if method not in get_args(Method):
        raise ValueError(f"method={method!r} is not one of {get_args(Method)}")
    others = None if reference is None else adapter.encode(reference)
    plain = "zero" if method in ("any", "scrambled") else method
    check_reference(tokens, plain, others)
    if method == "zero":
        return [Reference(_zeros(record_writes(adapter, tokens[:1]), len(tokens)))]
    if method in ("any", "scrambled"):
        writes = record_writes(adapter, tokens)
        generator = torch.Generator().manual_seed(seed)
        scrambled = _scramble(writes, generator)
        if method == "scrambled":
            return [Reference(scrambled)]
        zeros = _zeros(writes, len(tokens))
        references = [Reference(zeros)]
        for _ in range(-(-N_SCRAMBLED // len(tokens))):
            # the embedding is the first node: what it writes is the stream that a run starts from
            references += [Reference(scrambled), Reference(zeros, _scramble(writes[:1], generator)[0])]
            scrambled = _scramble(writes, generator)
        many = _scramble(writes[:1].repeat(1, -(-N_STREAMS // len(tokens)), 1, 1)[:, :N_STREAMS], generator)[0]
        there = _scramble(record_writes(adapter, tokens, many), generator)
        return [*references, Reference(_zeros(writes, N_STREAMS), many), Reference(there, many)]
    if method == "resample":
        order = derangement(len(tokens), torch.Generator().manual_seed(seed)).to(tokens.device)
        return [Reference(record_writes(adapter, tokens)[:, order])]
    writes = record_writes(adapter, tokens if others is None else others)
    if method == "counterfactual":
        return [Reference(writes)]
    return [Reference(writes.mean(1, keepdim=True).expand(-1, len(tokens), -1, -1))]


def _zeros(writes: Tensor, n_prompts: int) -> Tensor:
    """Zeros that take no memory."""
    return writes.new_zeros(1, 1, 1, 1).expand(len(writes), n_prompts, *writes.shape[2:])


def _scramble(writes: Float[Tensor, "node prompt pos d_model"], generator: torch.Generator) -> Tensor:
    """At each place a random mixture of what the node writes at places drawn at random, of this or other prompts.

    It is in the span of what the node can write, so it shows nothing to who does not read it; but its size and sign are
    none that the model is used to, so that a reader that is saturated, or to which all prompts are alike, is moved too.
    """
    flat = writes.flatten(1, 2)
    mixed = torch.zeros_like(flat)
    for _ in range(N_MIXED):
        places = torch.randint(flat.shape[1], (flat.shape[1],), generator=generator).to(flat.device)
        weights = torch.randn(flat.shape[1], 1, generator=generator, dtype=torch.float64)
        mixed += weights.to(flat) * flat[:, places]
    return mixed.view_as(writes)
