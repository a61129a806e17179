"""What a cut edge carries in place of what its sender writes."""

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.circuits.graph import record_writes
from mechicl.analysis.interventions.ablation import Method, check_reference
from mechicl.analysis.interventions.corruptions import derangement
from mechicl.analysis.interventions.metrics import Inputs
from mechicl.models.opening.adapter import ModelAdapter


def record_references(
    adapter: ModelAdapter, tokens: Tensor, method: Method, reference: Inputs | None, seed: int
) -> Float[Tensor, "node prompt pos d_model"]:
    """What each node writes where its edges are cut; raises what `ablate` raises."""
    others = None if reference is None else adapter.encode(reference)
    check_reference(tokens, method, others)
    if method == "zero":
        example = record_writes(adapter, tokens[:1])
        return example.new_zeros(1, 1, 1, 1).expand(len(example), len(tokens), *example.shape[2:])
    if method == "resample":
        order = derangement(len(tokens), torch.Generator().manual_seed(seed)).to(tokens.device)
        return record_writes(adapter, tokens)[:, order]
    writes = record_writes(adapter, tokens if others is None else others)
    if method == "counterfactual":
        return writes
    return writes.mean(1, keepdim=True).expand(-1, len(tokens), -1, -1)
