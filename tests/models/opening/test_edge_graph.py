"""The graph of edges: all, none, and an example by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from mechicl.analysis.circuits import Edge, Node
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edge_graph import EdgeGraph
from mechicl.models.opening.edges import EMBEDDING, list_edges, list_nodes
from mechicl.models.opening.parts import record_writes
from tests.analysis.interventions.oracles import (
    EXACT,
    bridge,
    hook_name,
    inputs,
    model_of,
    pair,
    putting,
    recorded,
    run,
)
from tests.strategies import configs, random_model


def graph_of(model, prompts, others) -> EdgeGraph:
    """A graph whose cut edges carry what another run writes."""
    adapter = ModelAdapter(model)
    return EdgeGraph(adapter, adapter.encode(prompts), record_writes(adapter, adapter.encode(others)))


def check_all_and_none(model, **tolerance):
    prompts, others = pair(model)
    graph = graph_of(model, prompts, others)
    everything = torch.ones(len(graph.edges), dtype=torch.bool)
    assert_close(graph.run(everything), run(model, prompts), **tolerance)
    assert_close(graph.run(~everything), run(model, others), **tolerance)
    assert not model.has_hooks()


@pytest.mark.parametrize("kind", ["gpt", "sink", "linear", "full", "looped", "mixed", "ids"])
@torch.no_grad()
def test_all_edges_are_the_model_and_none_the_reference(kind):
    model = model_of(kind)
    check_all_and_none(model, **EXACT)
    prompts, adapter = inputs(model, 0), ModelAdapter(model)
    # what the nodes write adds up to the final stream
    total = record_writes(adapter, adapter.encode(prompts)).sum(0)
    for block in model.blocks if model.cfg.attn_bias else ():
        total = total + model.cfg.damping * block.attn.b_O
    assert_close(total, recorded(model, prompts, hook_name("resid_post", model.cfg.n_layers - 1)), **EXACT)


@pytest.mark.parametrize("kind", ["gpt", "looped"])
@torch.no_grad()
def test_cutting_all_edges_out_of_a_node_ablates_it(kind):
    model = model_of(kind)
    prompts, others = pair(model)
    graph = graph_of(model, prompts, others)
    for node in graph.nodes[1:]:
        kept = torch.tensor([edge.sender != node for edge in graph.edges])
        component = "mlp_out" if node.head is None else "z"
        where = {} if node.head is None else {"head": node.head}
        values = recorded(model, others, hook_name(component, node.layer))
        assert_close(graph.run(kept), run(model, prompts, [putting(component, node.layer, where, values)]), **EXACT)
    kept = torch.tensor([edge.sender != EMBEDDING for edge in graph.edges])
    stream = recorded(model, others, hook_name("resid_pre", 0))

    def put(activation, hook):
        return stream

    assert_close(graph.run(kept), run(model, prompts, [(hook_name("resid_pre", 0), put)]), **EXACT)


@torch.no_grad()
def test_two_layers_of_one_head_by_hand():
    """softmax(q k) v with each of q, k, v, and the output reading one stream or the other."""
    model = model_of("gpt", n_heads=1, d_mlp=None, normalization_type=None, attn_bias=False, d_head=3)
    prompts, others = pair(model)
    graph = graph_of(model, prompts, others)
    stream, reference = (model.embed_tokens(model.encode(p)) for p in (prompts, others))
    first, second = Node(0, 0), Node(1, 0)

    def head(layer, by):
        attn = model.blocks[layer].attn
        q, k, v = (by[w] @ getattr(attn, f"W_{w.upper()}")[0] for w in ("q", "k", "v"))
        scores = model.cfg.score_scale * q @ k.mT
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v @ attn.W_O[0]

    def everywhere(read):
        return dict.fromkeys(("q", "k", "v"), read)

    reference_first = head(0, everywhere(reference))
    reference_second = head(1, everywhere(reference + reference_first))
    stream_first = head(0, everywhere(stream))
    cut = {Edge(first, second, "k"), Edge(EMBEDDING, second, "v"), Edge(first, None), Edge(EMBEDDING, first, "q")}
    first_out = head(0, {"q": reference, "k": stream, "v": stream})
    second_out = head(1, {"q": stream + first_out, "k": stream + reference_first, "v": reference + first_out})
    expected = (stream + reference_first + second_out) @ model.W_U + model.b_U
    kept = torch.tensor([edge not in cut for edge in graph.edges])
    assert_close(graph.run(kept), expected[:, -1], **EXACT)
    assert_close(graph.run(graph.mask([])), (reference + reference_first + reference_second)[:, -1] @ model.W_U)
    only_output = graph.mask([Edge(EMBEDDING, None)])
    assert_close(graph.run(only_output), (stream + reference_first + reference_second)[:, -1] @ model.W_U)
    chain = graph.mask([Edge(EMBEDDING, first, by) for by in "qkv"] + [Edge(first, None)])
    assert_close(graph.run(chain), (reference + stream_first + reference_second)[:, -1] @ model.W_U)


@settings(max_examples=6)
@given(configs(token_clip=None), st.integers(0, 5))
def test_any_config(cfg, seed):
    model = random_model(cfg.replace(dtype="float64"), seed, scale=0.2).eval()
    check_all_and_none(model, atol=1e-8, rtol=1e-6, equal_nan=True)


def test_names_and_numbers_of_nodes_and_edges():
    adapter = ModelAdapter(model_of("gpt"))
    assert list(map(str, list_nodes(adapter.model))) == [
        "embedding", "head 0.0", "head 0.1", "MLP 0", "head 1.0", "head 1.1", "MLP 1",
    ]  # fmt: skip
    edges = list_edges(adapter.model)
    # heads of layer 0: 2 * 3 ways * 1; MLP 0: 3; heads of layer 1: 2 * 3 * 4; MLP 1: 6; output: 7
    assert len(edges) == len(set(edges)) == 6 + 3 + 24 + 6 + 7
    assert str(edges[0]) == "embedding → head 0.0 (q)"
    assert str(Edge(Node(1), None)) == "MLP 1 → output"
    graph = graph_of(adapter.model, *pair(adapter.model))
    assert graph.mask(edges[3:5]).nonzero().flatten().tolist() == [3, 4]
    assert [str(node) for node in list_nodes(bridge())][:3] == ["embedding", "head 0.0", "head 0.1"]
