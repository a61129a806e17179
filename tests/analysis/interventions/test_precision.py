"""Metrics of half-precision models are computed in float32, whatever measures them; weights of NaN are refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mechicl.analysis.circuits import circuit_curve, find_circuit, score_edges
from mechicl.analysis.interventions import ablate, attribute, logit_difference, patch, patch_paths
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.opening.adapter import ModelAdapter
from tests.strategies import random_model, random_tokens

CONFIG = TransformerConfig(
    prompt_format="token_ids", d_vocab=40, n_ctx=6, n_layers=2, n_heads=4, d_model=16, attention="softmax",
    normalization_type="LN", attn_only=True,
)  # fmt: skip
CLEAN, CORRUPTED = random_tokens(CONFIG, 30), random_tokens(CONFIG, 30, seed=1)
Run = Callable[[HookedTransformer, Any], Any]
RUNS: dict[str, Run] = {
    "patch": lambda model, metric: patch(model, CLEAN, CORRUPTED, "z", ("layer", "head"), metrics=metric),
    "ablate": lambda model, metric: ablate(model, CLEAN, "z", ("layer", "head"), metrics=metric),
    "attribute": lambda model, metric: attribute(model, CLEAN, CORRUPTED, "z", ("layer", "head"), metrics=metric),
    "patch_paths": lambda model, metric: patch_paths(model, CLEAN, CORRUPTED, metrics=metric),
    "score_edges": lambda model, metric: score_edges(model, CLEAN, metric, method="zero"),
    "find_circuit": lambda model, metric: find_circuit(model, CLEAN, metric, method="zero", tolerance=0.5),
    "circuit_curve": lambda model, metric: circuit_curve(
        model, {"all": score_edges(model, CLEAN, metric, method="zero")}, CLEAN, metrics=metric, method="zero"
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", RUNS)
def test_metrics_get_predictions_in_float32_or_more(name: str, dtype: torch.dtype):
    model, seen = random_model(CONFIG).to(dtype), set[torch.dtype]()
    plain = logit_difference(CLEAN[:, 0], CLEAN[:, 1])

    def metric(logits: Tensor) -> Tensor:
        seen.add(logits.dtype)
        return plain(logits)

    RUNS[name](model, metric)
    assert seen == {torch.promote_types(dtype, torch.float32)}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", RUNS)
def test_models_with_undefined_weights_are_refused(name: str, value: float):
    model = copy.deepcopy(random_model(CONFIG))
    with torch.no_grad():
        model.blocks[1].attn.W_O[0, 0, 0] = value
    with pytest.raises(ValueError, match=r"1 of 256 weights of blocks\.1\.attn\.W_O that are NaN or infinite"):
        RUNS[name](model, logit_difference(CLEAN[:, 0], CLEAN[:, 1]))


@torch.no_grad()
def test_resumed_runs_are_compared_in_the_models_precision():
    adapter = ModelAdapter(random_model(CONFIG).to(torch.bfloat16))
    outputs = adapter.run(CLEAN)
    assert outputs.dtype == torch.float32
    assert adapter.same_up_to_rounding(outputs, outputs * (1 + 2**-8))
    assert not adapter.same_up_to_rounding(outputs, 2 * outputs)
