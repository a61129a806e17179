"""Functions over a grid of queries against predictions one by one."""

from typing import Any

import pytest
import torch

from mechicl import algorithms
from mechicl.analysis.weights import adapted_functions
from mechicl.learners import AlgorithmLearner
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.tasks import SineRegression
from tests.strategies import random_model

GRID = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]


def model(**fields: Any) -> HookedTransformer:
    return random_model(TransformerConfig(
        x_dim=1, n_context=6, d_model=7, d_mlp=11, mlp_location="input", read_in="linear", read_out="identity",
        dtype="float64", **fields,
    ))  # fmt: skip


def learners() -> dict[str, Any]:
    lstm = HookedLSTM(LSTMConfig(x_dim=1, n_context=6, n_layers=1, d_model=5), seed=0).double()
    return {
        "model": model(),
        "hooked": model(attention_weights="gradient_descent"),
        "lstm": lstm,
        "algorithm": AlgorithmLearner(algorithms.kernel_smoothing, {"bandwidth": 0.5}),
    }


@pytest.mark.parametrize("name", learners())
def test_adapted_functions_are_predictions_one_by_one(name):
    learner = learners()[name]
    prompts = SineRegression(n_context=6).sample(4, seed=0, dtype=torch.float64)
    if name == "hooked":
        learner.blocks[0].attn.hook_pattern.add_hook(lambda value, hook: 2 * value)
    per_prompt = learner.bytes_per_prompt(prompts) if hasattr(learner, "bytes_per_prompt") else 64 * 7 * 4
    got = adapted_functions(learner, prompts, GRID, memory=3 * len(GRID) * per_prompt)
    assert got.shape == (4, 5, 1)
    assert not got.requires_grad
    for j, x in enumerate(GRID):
        torch.testing.assert_close(got[:, j], learner.predict(prompts.with_query(x.expand(4, 1))).detach())


def test_grids_in_another_dtype_and_none_at_all():
    prompts = SineRegression(n_context=6).sample(4, seed=0, dtype=torch.float64)
    attention = model()
    single, double = (adapted_functions(attention, prompts, grid) for grid in (GRID.float(), GRID))
    torch.testing.assert_close(single, double)
    assert adapted_functions(attention, prompts[:0], GRID).shape == (0, 5, 1)
    with pytest.raises(ValueError, match="grid must be"):
        adapted_functions(attention, prompts, GRID.expand(5, 2))
