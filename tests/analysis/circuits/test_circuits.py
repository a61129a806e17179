"""Circuits: a planted one is found exactly, and its numbers are those of hooked runs."""

import dataclasses
import math
from functools import cache
from typing import Any

import pytest
from torch.testing import assert_close

from mechicl import constructions
from mechicl.analysis.circuits import Circuit, Edge, Node, find_circuit, measure_circuit
from mechicl.analysis.circuits.measures import draw_subsets
from mechicl.analysis.interventions import Replacement, logit_difference, next_token_loss, squared_error
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edge_graph import EdgeGraph
from mechicl.models.opening.parts import record_writes
from mechicl.models.opening.sites import EMBEDDING, list_edges, list_nodes
from mechicl.tasks import RepeatedTokens
from tests.analysis.interventions import oracles
from tests.analysis.interventions.oracles import EXACT, hook_name, inputs, model_of, putting, recorded, run

PLANTED = (Node(0, 2), Node(1, 1))
SEQUENCES = RepeatedTokens(d_vocab=12, n_ctx=24, min_period=5, max_period=11).sample(16, seed=0)
LOSS = next_token_loss(SEQUENCES.targets())


@cache
def planted():
    return constructions.induction(d_vocab=12, n_ctx=24, n_heads=4, previous_token_head=2, induction_head=1, seed=0)


@cache
def circuit_of(method: Any) -> Circuit:
    return find_circuit(planted(), SEQUENCES.read, LOSS, method=method, at="positions")


def check_numbers(
    circuit: Circuit, model: Any, tokens: Any, metric: Any, at: str = "query", reference: Any = None, **tolerance: Any
) -> None:
    """The numbers of nodes are those of hooked runs with means in place of ablated nodes."""
    every = [node for node in list_nodes(model) if node.layer >= 0]
    rest = [node for node in every if node not in circuit.nodes]

    def without(nodes):
        hooks = []
        for node in nodes:
            component, where = ("mlp_out", {}) if node.head is None else ("z", {"head": node.head})
            values = recorded(model, tokens if reference is None else reference, hook_name(component, node.layer))
            mean = values.mean(0).expand(len(tokens), *values.shape[1:])
            hooks.append(putting(component, node.layer, where, mean))
        return metric(run(model, tokens, hooks, at))

    assert circuit.n_nodes == len(every)
    assert_close(circuit.full, without([]), **tolerance)
    assert_close(circuit.ablated, without(every), **tolerance)
    assert_close(circuit.alone, without(rest), **tolerance)
    assert_close(circuit.without, without(circuit.nodes), **tolerance)
    for node, effect in zip(circuit.nodes, circuit.node_effects, strict=True):
        assert_close(effect, without([*rest, node]) - without(rest), **tolerance)


def check_edges(circuit: Circuit, tokens: Any, metric: Any) -> None:
    """The numbers of edges are those of the graph."""
    adapter = ModelAdapter(planted(), "positions")
    writes = record_writes(adapter, tokens)
    graph = EdgeGraph(adapter, tokens, writes.mean(1, keepdim=True).expand_as(writes))
    assert_close(circuit.edges_alone, metric(graph.run(graph.mask(circuit.edges))))
    for i in (0, len(circuit.edges) - 1):
        fewer = metric(graph.run(graph.mask([edge for edge in circuit.edges if edge != circuit.edges[i]])))
        assert_close(circuit.edge_effects[i], fewer - circuit.edges_alone)


@pytest.mark.parametrize("method", ["mean", "resample", "zero"])
def test_the_edges_are_those_of_an_induction_circuit(method):
    circuit = circuit_of(method)
    assert circuit.nodes == PLANTED
    assert circuit.heads == [(0, 2), (1, 1)]
    assert circuit.completeness().mean == pytest.approx(1, abs=0.1)
    first, second = PLANTED
    expected = {
        *(Edge(EMBEDDING, first, by) for by in "qkv"), Edge(first, second, "k"), Edge(EMBEDDING, second, "q"),
        Edge(EMBEDDING, second, "v"), Edge(second, None),
    }  # fmt: skip
    # positions are the same in every prompt, so with others' embeddings the first head still attends one back
    if method != "zero":
        expected -= {Edge(EMBEDDING, first, "q"), Edge(EMBEDDING, first, "k")}
    assert set(circuit.edges) == expected
    assert circuit.faithfulness().mean == pytest.approx(1, abs=0.05)
    assert circuit.edge_effects.shape == (len(expected), 16)
    assert (circuit.edge_effects.mean(1).abs() > 0.05 * (circuit.full - circuit.ablated).mean().abs()).all()


def test_its_numbers_are_those_of_hooked_runs_and_of_the_graph():
    circuit = circuit_of("mean")
    check_numbers(circuit, planted(), SEQUENCES.read, LOSS, "positions")
    check_edges(circuit, SEQUENCES.read, LOSS)
    scale = (circuit.full - circuit.ablated).mean()
    for share, part in [
        (circuit.completeness(), circuit.full - circuit.without),
        (circuit.faithfulness(), circuit.edges_alone - circuit.ablated),
    ]:
        assert share.mean == pytest.approx((part.mean() / scale).item())
    table = circuit.to_dataframe()
    assert list(table["kind"]) == ["node"] * 2 + ["edge"] * len(circuit.edges)
    assert table["part"][0] == "head 0.2"
    assert table["effect"][2] == pytest.approx(circuit.edge_effects[0].mean().item())
    assert str(circuit).startswith(f"head 0.2, head 1.1; {len(circuit.edges)} edges; metric ")
    assert f"faithfulness {circuit.faithfulness()}" in str(circuit)


def test_a_loose_tolerance_keeps_nothing_and_a_tight_one_everything():
    model = model_of("gpt")
    prompts = inputs(model, 0, 5)
    empty = find_circuit(model, prompts, tolerance=1e6)
    assert empty.nodes == empty.edges == ()
    assert_close((empty.edges_alone, empty.without), (empty.ablated, empty.full))
    assert empty.completeness().mean == pytest.approx(0, abs=1e-12)
    full = find_circuit(model, prompts, tolerance=1e-12)
    assert len(full.nodes) == full.n_nodes == empty.n_nodes == 6
    assert math.isnan(full.completeness().mean)
    assert "(the whole model); " in str(full)
    assert full.faithfulness().mean == pytest.approx(1)


def test_the_edges_of_a_bridge():
    model, tokens, others = oracles.shared_bridge(), oracles.ids(0, n=4, d_vocab=20), oracles.ids(5, n=3, d_vocab=20)
    metric, other_metric = (logit_difference(read[:, 0], read[:, 1]) for read in (tokens, others))
    circuit = find_circuit(model, tokens, metric, search="eap-ig", method="mean", tolerance=0.3)
    assert (circuit.edges_alone - circuit.full).mean().abs() <= 0.3 * (circuit.full - circuit.ablated).mean().abs()
    measured = measure_circuit(model, circuit, others, other_metric)
    assert measured.nodes == circuit.nodes
    whole = dataclasses.replace(circuit, nodes=tuple(list_nodes(model)[1:]), edges=tuple(list_edges(model)))
    measured = measure_circuit(model, whole, others, other_metric)
    assert_close(measured.edges_alone, measured.full, atol=1e-4, rtol=1e-4)
    assert oracles.no_hook_left(model)


@pytest.mark.parametrize("reference", [None, SEQUENCES.read[:5]])
def test_numbers_on_other_prompts_are_those_of_hooked_runs_and_of_the_graph(reference):
    tokens = SEQUENCES.read.roll(3, 1)[:9]
    loss = next_token_loss(tokens.roll(-1, 1))
    measured = measure_circuit(planted(), circuit_of("mean"), tokens, loss, reference=reference, at="positions")
    check_numbers(measured, planted(), tokens, loss, "positions", reference=reference)
    if reference is None:
        check_edges(measured, tokens, loss)


NODES = [Node(layer, head) for layer in range(2) for head in (0, 1, None)]


def test_subsets_are_all_or_different_ones_with_every_node_in_half_of_them():
    for n in range(5):
        every = draw_subsets(NODES[:n], 100, 0)
        assert len(every) == len(set(every)) == 2**n - 1
        assert all(subset and list(subset) == [node for node in NODES if node in subset] for subset in every)
    some = draw_subsets([Node(layer, 0) for layer in range(40)], 400, seed=1)
    assert len(set(some)) == 400
    assert some == draw_subsets([Node(layer, 0) for layer in range(40)], 400, seed=1)
    assert some != draw_subsets([Node(layer, 0) for layer in range(40)], 400, seed=2)
    assert sum(map(len, some)) / 400 == pytest.approx(20, abs=4 * math.sqrt(10 / 400))
    assert draw_subsets(NODES, 0, 0) == ()
    assert len(draw_subsets(NODES, 5, 0)) == 5


def test_subsets_of_a_circuit_of_edges_lose_all_edges_from_their_nodes():
    model = model_of("gpt")
    prompts, others = inputs(model, 0, 5), inputs(model, 1, 5)
    circuit = find_circuit(
        model, prompts, method=Replacement("resample", others), tolerance=0.2, effects=False, progress=False
    )
    measured = measure_circuit(model, circuit, prompts, reference=others, n_subsets=5, progress=False)
    adapter, metric = ModelAdapter(model), squared_error(prompts)
    graph = EdgeGraph(adapter, adapter.encode(prompts), record_writes(adapter, adapter.encode(others)))
    assert len(measured.subsets) == 5
    assert measured.alone_without is not None
    assert measured.whole_without is not None
    for subset, alone, whole in zip(measured.subsets, measured.alone_without, measured.whole_without, strict=True):
        for values, edges in ((alone, circuit.edges), (whole, graph.edges)):
            left = [edge for edge in edges if edge.sender not in subset]
            assert_close(values, metric(graph.run(graph.mask(left))), **EXACT)
    assert measured.node_effects.isnan().all()
    assert measured.effects() == {}


def test_the_whole_model_is_complete_and_no_circuit_has_no_subset(tmp_path):
    model = model_of("gpt")
    prompts = inputs(model, 0, 5)
    whole = find_circuit(model, prompts, tolerance=1e-12, progress=False)
    measured = measure_circuit(model, whole, prompts, n_subsets=7, progress=False)
    assert len(measured.incompleteness()) == 7
    assert all(each.mean == pytest.approx(0, abs=1e-12) for each in measured.incompleteness().values())
    loaded = type(measured).load(measured.save(tmp_path))
    assert loaded.subsets == measured.subsets
    assert loaded.axis_names()["alone_without"] == ("subset",)
    assert list(loaded.incompleteness()) == list(measured.incompleteness())
    assert whole.incompleteness() == {}
    empty = find_circuit(model, prompts, tolerance=1e6, progress=False)
    assert measure_circuit(model, empty, prompts, n_subsets=7, progress=False).subsets == ()
