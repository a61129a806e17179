"""Edges, circuits and ablations of layers with a state, against plain loops over heads and positions."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mechicl.analysis import ablate
from mechicl.analysis.circuits import score_edges
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edge_graph import EdgeGraph
from mechicl.models.opening.parts import record_writes
from mechicl.models.opening.sites import list_edges
from mechicl.tasks import LinearRegression
from tests.analysis.circuits.oracles import everything, run_edges, write_all, zeros
from tests.models.transformer.recurrent_loop import head_by_loop
from tests.strategies import random_model

KINDS = ("delta", "gated_linear", "mamba2", "mesa")
SIZES: dict[str, Any] = {
    "x_dim": 2, "n_context": 3, "prompt_format": "interleaved", "n_layers": 2, "n_heads": 2, "d_model": 6, "d_head": 3,
    "normalization_type": "LN", "d_mlp": 4, "dtype": "float64",
}  # fmt: skip
TASK = LinearRegression(x_dim=2, n_context=3)
PROMPTS, OTHERS = (TASK.sample(4, seed=seed, dtype=torch.float64) for seed in (0, 1))


def model_of(attention: str, **fields: Any) -> HookedTransformer:
    return random_model(TransformerConfig(**(SIZES | {"conv_width": 2, "attention": attention} | fields)), 0)


@pytest.mark.parametrize("attention", KINDS)
@torch.no_grad()
def test_cut_edges_equal_a_plain_loop(attention: str):
    model = model_of(attention)
    adapter = ModelAdapter(model)
    tokens, others = model.encode(PROMPTS), model.encode(OTHERS)
    graph = EdgeGraph(adapter, tokens, record_writes(adapter, others))
    references = write_all(model, others)
    generator = torch.Generator().manual_seed(0)
    for share in (0.2, 0.8):
        kept = torch.rand(len(graph.edges), generator=generator) < share
        weights = {edge: float(keep) for edge, keep in zip(graph.edges, kept.tolist(), strict=True)}
        expected = run_edges(model, tokens, references, weights)[:, -1]
        assert_close(graph.run(kept), expected, atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("attention", KINDS)
@torch.no_grad()
def test_edge_scores_are_derivatives_of_a_plain_loop(attention: str):
    model = model_of(attention, n_layers=1, d_mlp=None)
    tokens, edges, small = model.encode(PROMPTS), list_edges(model), 1e-5
    scores = score_edges(model, PROMPTS, scoring="eap-ig", steps=1, method="zero", progress=False).scores

    def loss(weights: dict[Any, float]) -> Tensor:
        return (run_edges(model, tokens, zeros(model, tokens), weights)[:, -1] - PROMPTS.query.ys).square().mean(-1)

    for i in range(0, len(edges), 2):
        up, down = (loss(everything(model) | {edges[i]: 1 + sign * small}) for sign in (1, -1))
        assert_close(scores[i], (down - up) / (2 * small), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("attention", KINDS)
@torch.no_grad()
def test_ablated_heads_equal_a_plain_loop(attention: str):
    model = model_of(attention, n_layers=1, d_mlp=None)
    stream, block = model.embed_tokens(model.encode(PROMPTS)), model.blocks[0]
    ablated = ablate(model, PROMPTS, "z", ("layer", "head"), method="zero", progress=False).predictions
    assert ablated is not None
    for head in range(2):
        normed = block.ln1(stream)
        other = torch.stack([head_by_loop(block.attn, 1 - head, (each, each, each))[0] for each in normed])
        assert_close(ablated[0, head], model.read_out(stream + other + block.attn.b_O)[:, -1], atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("attention", ["gated_linear", "mamba2"])
@torch.no_grad()
def test_states_in_half_precision_are_near_those_in_double(attention: str, dtype: Any):
    """Sums of products lose digits; the other two kinds solve linear systems and refuse half precision."""
    model = model_of(attention)
    half = model_of(attention, dtype=dtype, use_attn_state=True)
    half.load_state_dict(model.state_dict())
    expected, epsilon = model.predict(PROMPTS), torch.finfo(getattr(torch, dtype)).eps
    with half.hooks([(lambda name: name.endswith("hook_state"), lambda states, hook: None)]):
        predicted = half.predict(PROMPTS).double()
    assert_close(predicted, expected, rtol=0, atol=30 * epsilon * expected.abs().max().item())
