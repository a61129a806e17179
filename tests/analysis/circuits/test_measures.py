"""Completeness over subsets: against hooked runs, against the graph, and on circuits with a known answer."""

import math

import pytest
from torch.testing import assert_close

from mechicl.analysis.circuits import Node, find_circuit, measure_circuit
from mechicl.analysis.circuits.measures import draw_subsets
from mechicl.analysis.interventions import squared_error
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edge_graph import EdgeGraph
from mechicl.models.opening.parts import record_writes
from tests.analysis.interventions.oracles import EXACT, inputs, model_of

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
    circuit = find_circuit(model, prompts, method="resample", reference=others, tolerance=0.2, progress=False)
    measured = measure_circuit(model, circuit, prompts, reference=others, n_subsets=5, effects=False, progress=False)
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
