"""Circuits: a planted one is found exactly, and what is said of it is true."""

import dataclasses
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mechicl import constructions
from mechicl.analysis.interventions import (
    Edge,
    Node,
    ablate,
    find_circuit,
    logit_difference,
    measure_circuit,
    next_token_loss,
)
from mechicl.analysis.interventions.circuits import Circuit
from mechicl.analysis.interventions.edges import EMBEDDING, EdgeGraph, written
from mechicl.models.adapter import ModelAdapter
from mechicl.tasks import RepeatedTokens
from tests.analysis.interventions.oracles import (
    bridge,
    hook_name,
    ids,
    inputs,
    lstm,
    model_of,
    no_hook_left,
    putting,
    recorded,
    run,
)

PLANTED = [(0, 2), (1, 1)]
SEQUENCES = RepeatedTokens(d_vocab=12, n_ctx=24, min_period=5, max_period=11).sample(24, seed=0)
LOSS = next_token_loss(SEQUENCES.targets())


@cache
def planted():
    return constructions.induction(d_vocab=12, n_ctx=24, n_heads=4, previous_token_head=2, induction_head=1, seed=0)


@cache
def found(search: Any, method: Any, edges: bool = False) -> Circuit:
    return find_circuit(planted(), SEQUENCES.read, LOSS, search=search, method=method, edges=edges, at="positions")


@pytest.mark.parametrize("method", ["mean", "zero", "resample"])
@pytest.mark.parametrize("search", ["greedy", "attribution"])
def test_the_planted_heads_are_found(search, method):
    circuit = found(search, method)
    assert circuit.heads == PLANTED
    assert circuit.edges == ()
    assert circuit.faithfulness().mean == pytest.approx(1, abs=1e-6)
    assert circuit.completeness().mean == pytest.approx(1, abs=0.1)
    assert circuit.node_effects.shape == (2, 24)
    assert_close(circuit.edges_alone, circuit.alone)


@pytest.mark.parametrize("method", ["mean", "resample"])
def test_the_edges_are_those_of_an_induction_circuit(method):
    circuit = found("greedy", method, edges=True)
    first, second = Node(0, 2), Node(1, 1)
    expected = {
        *(Edge(EMBEDDING, first, by) for by in "qkv"),
        Edge(first, second, "k"),
        Edge(EMBEDDING, second, "q"),
        Edge(EMBEDDING, second, "v"),
        Edge(second, None),
    }
    # positions are the same in every prompt, so with others' embeddings the first head still looks one back
    expected -= {Edge(EMBEDDING, first, "q"), Edge(EMBEDDING, first, "k")}
    assert set(circuit.edges) == expected
    assert circuit.faithfulness().mean == pytest.approx(1, abs=0.05)
    assert circuit.edge_effects.shape == (5, 24)
    assert (circuit.edge_effects.mean(1).abs() > 0.05 * (circuit.full - circuit.ablated).mean().abs()).all()


def test_edges_from_nothing_include_the_positions():
    """Only the embedding at zero takes the positions away that the previous-token head looks by."""
    circuit = found("greedy", "zero", edges=True)
    assert {(str(edge.sender), str(edge.receiver), edge.by) for edge in circuit.edges} == {
        ("embedding", "head 0.2", "q"), ("embedding", "head 0.2", "k"), ("embedding", "head 0.2", "v"),
        ("head 0.2", "head 1.1", "k"), ("embedding", "head 1.1", "q"), ("embedding", "head 1.1", "v"),
        ("head 1.1", "None", ""),
    }  # fmt: skip
    assert circuit.faithfulness().mean == pytest.approx(1, abs=0.05)


def test_its_numbers_are_those_of_hooked_runs():
    circuit, model, tokens = found("greedy", "mean"), planted(), SEQUENCES.read
    values = {}
    for layer in range(2):
        z = recorded(model, tokens, hook_name("z", layer))
        values[layer] = z.mean(0).expand_as(z)

    def without(heads):
        return LOSS(run(model, tokens, [putting("z", at, {"head": h}, values[at]) for at, h in heads], "positions"))

    every = [(layer, head) for layer in range(2) for head in range(4)]
    rest = [place for place in every if place not in PLANTED]
    assert_close(circuit.full, without([]))
    assert_close(circuit.ablated, without(every))
    assert_close(circuit.alone, without(rest))
    assert_close(circuit.without, without(PLANTED))
    for i, place in enumerate(PLANTED):
        assert_close(circuit.node_effects[i], without([*rest, place]) - without(rest))
    scale = (circuit.full - circuit.ablated).mean()
    assert circuit.completeness().mean == pytest.approx(((circuit.full - circuit.without).mean() / scale).item())
    assert circuit.node_faithfulness().mean == pytest.approx(((circuit.alone - circuit.ablated).mean() / scale).item())


def test_its_edges_numbers_are_those_of_the_graph():
    circuit = found("greedy", "mean", edges=True)
    adapter = ModelAdapter(planted(), "positions")
    writes = written(adapter, SEQUENCES.read)
    graph = EdgeGraph(adapter, SEQUENCES.read, writes.mean(1, keepdim=True).expand_as(writes))
    assert_close(circuit.edges_alone, LOSS(graph.run(graph.keeping(circuit.edges))))
    fewer = LOSS(graph.run(graph.keeping(circuit.edges[1:])))
    assert_close(circuit.edge_effects[0], fewer - circuit.edges_alone)


def test_tables_and_words():
    circuit = found("greedy", "mean", edges=True)
    table = circuit.to_dataframe()
    assert list(table["kind"]) == ["node"] * 2 + ["edge"] * len(circuit.edges)
    assert table["part"][0] == "head 0.2"
    assert str(circuit).startswith(f"head 0.2, head 1.1; {len(circuit.edges)} edges; metric ")
    for words in (f"{circuit.full.mean():.4g} whole", f"{circuit.edges_alone.mean():.4g} alone",
                  f"{circuit.ablated.mean():.4g} ablated", f"faithfulness {circuit.faithfulness()}",
                  f"completeness {circuit.completeness()}"):  # fmt: skip
        assert words in str(circuit)
    assert "whole model" not in str(circuit)


def test_a_loose_tolerance_keeps_nothing_and_a_tight_one_all():
    model = model_of("gpt")
    prompts = inputs(model, 0, 5)
    empty = find_circuit(model, prompts, tolerance=1e6)
    assert empty.nodes == empty.edges == ()
    assert_close(empty.alone, empty.ablated)
    assert_close(empty.without, empty.full)
    assert empty.node_effects.shape == (0, 5)
    assert empty.n_nodes == 6
    assert empty.completeness().mean == 0
    assert str(empty).startswith("no node; 0 edges")
    assert len(empty.to_dataframe()) == 0
    full = find_circuit(model, prompts, tolerance=1e-12, edges=False)
    assert len(full.nodes) == full.n_nodes == 6
    assert math.isnan(full.completeness().mean)
    assert math.isnan(full.completeness().low)
    assert full.completeness().n == 5
    assert "(the whole model); 0 edges; loss " in str(full)
    assert "completeness" not in str(full)
    assert full.faithfulness().mean == pytest.approx(1)
    assert full.metric == "loss"


@pytest.mark.parametrize("kind", ["linear", "looped"])
def test_what_is_found_is_as_faithful_as_asked_for(kind):
    model = model_of(kind)
    prompts = inputs(model, 0, 6)
    for search in ("greedy", "attribution"):
        circuit = find_circuit(model, prompts, search=search, tolerance=0.2, method="zero")
        scale = (circuit.full - circuit.ablated).mean().abs()
        for alone in (circuit.alone, circuit.edges_alone):
            assert (alone - circuit.full).mean().abs() <= 0.2 * scale + 1e-9


def test_a_bridge_has_nodes_but_no_edges():
    model, tokens = bridge(), ids(0, n=4, d_vocab=20)
    metric = logit_difference(tokens[:, 0], tokens[:, 1])
    circuit = find_circuit(model, tokens, metric, edges=False, tolerance=0.3)
    rest = [node for node in [Node(layer, h) for layer in range(3) for h in (0, 1, None)] if node not in circuit.nodes]
    hooks = []
    for node in rest:
        component, where = ("mlp_out", {}) if node.head is None else ("z", {"head": node.head})
        values = recorded(model, tokens, hook_name(component, node.layer))
        hooks.append(putting(component, node.layer, where, values.mean(0).expand_as(values)))
    assert_close(circuit.alone, metric(run(model, tokens, hooks)), atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="not in TransformerBridge"):
        find_circuit(model, tokens, metric)
    assert no_hook_left(model)


def test_resampling_nodes_and_edges_agree():
    model = model_of("gpt")
    prompts = inputs(model, 0, 5)
    circuit = find_circuit(model, prompts, method="resample", seed=4, tolerance=1e-12)
    assert_close(circuit.edges_alone, circuit.full, atol=1e-9, rtol=1e-7)
    alone = ablate(model, prompts, method="resample", seed=4).effect()
    for node, effect in zip(circuit.nodes, circuit.node_effects, strict=True):
        if node.head is not None:
            assert_close(effect, alone[node.layer, node.head], atol=1e-10, rtol=1e-8)


BAD: dict[str, Any] = {
    "does not change": {"metrics": lambda p: torch.ones(len(p), dtype=torch.float64)},
    "carries one metric": {"metrics": {"a": lambda p: p[:, 0], "b": lambda p: p[:, 0]}},
    "carries one metric, got none": {"metrics": {}},
    "tolerance must be positive": {"tolerance": 0},
    "tolerance must be positive, got nan": {"tolerance": float("nan")},
    "not one of": {"search": "exhaustive"},
    "number a prompt": {"metrics": lambda p: p.mean()},
    "too little": {"memory": 10},
    "reference must be": {"reference": inputs(model_of("gpt"), 0).prefix(1)},
}


@pytest.mark.parametrize("message", list(BAD))
def test_bad_input_is_refused(message):
    model = model_of("gpt")
    with pytest.raises(Exception, match=f"{message}|type hint|Type-check"):
        find_circuit(model, inputs(model, 0, 4), **BAD[message])
    assert not model.has_hooks()


def test_models_and_prompts_without_a_circuit():
    model = model_of("clipped")
    with pytest.raises(ValueError, match="clips its stream"):
        find_circuit(model, inputs(model, 0))
    assert find_circuit(model, inputs(model, 0), edges=False).metric == "loss"
    with pytest.raises(ValueError, match=r"no hook 'blocks\.0\.attn\.hook_z'"):
        find_circuit(lstm(), inputs(lstm(), 0))
    empty = model_of("gpt", n_layers=0)
    with pytest.raises(ValueError, match="no layer"):
        find_circuit(empty, inputs(empty, 0))
    with pytest.raises(ValueError, match="no prompts"):
        find_circuit(model, inputs(model, 0)[:0], edges=False)
    with pytest.raises(ValueError, match="carries one metric, got none"):
        find_circuit(planted(), SEQUENCES.read)


# ---- on other prompts ----


def same_numbers(a: Circuit, b: Circuit, **tolerance: Any) -> None:
    for field in dataclasses.fields(Circuit):
        first, second = getattr(a, field.name), getattr(b, field.name)
        if isinstance(first, torch.Tensor):
            assert_close(first, second, **tolerance)
        else:
            assert first == second, field.name


@pytest.mark.parametrize("method", ["mean", "zero", "resample"])
@pytest.mark.parametrize("edges", [False, True])
def test_a_circuit_has_the_same_numbers_on_the_same_prompts(method, edges):
    circuit = found("greedy", method, edges)
    same_numbers(
        measure_circuit(planted(), circuit, SEQUENCES.read, LOSS, at="positions"), circuit, atol=1e-12, rtol=1e-10
    )
    named = dataclasses.replace(circuit, metric="loss")
    same_numbers(measure_circuit(planted(), circuit, SEQUENCES, at="positions"), named, atol=1e-12, rtol=1e-10)


def test_numbers_on_other_prompts_are_those_of_hooked_runs_there():
    model, others, reference = planted(), SEQUENCES.ids.flip(0)[:7].roll(3, 1), SEQUENCES.read[:5]
    circuit = found("greedy", "mean")
    loss = next_token_loss(others[:, -1])
    choices: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (others[:, :-1], {}),
        (reference, {"reference": reference}),
    ]
    for means_of, more in choices:
        measured = measure_circuit(model, circuit, others[:, :-1], loss, **more)
        values = [recorded(model, means_of, hook_name("z", layer)).mean(0).expand(7, -1, -1, -1) for layer in range(2)]

        def without(heads, values=values):
            hooks = [putting("z", layer, {"head": head}, values[layer]) for layer, head in heads]
            return loss(run(model, others[:, :-1], hooks))

        every = [(layer, head) for layer in range(2) for head in range(4)]
        rest = [place for place in every if place not in PLANTED]
        assert (measured.nodes, measured.method, measured.n_nodes) == (circuit.nodes, "mean", 8)
        assert_close(measured.full, without([]))
        assert_close(measured.ablated, without(every))
        assert_close(measured.alone, without(rest))
        assert_close(measured.edges_alone, measured.alone)
        assert_close(measured.without, without(PLANTED))
        for i, place in enumerate(PLANTED):
            assert_close(measured.node_effects[i], without([*rest, place]) - without(rest))


def test_edges_on_other_prompts_are_those_of_the_graph_there():
    circuit, others = found("greedy", "mean", edges=True), SEQUENCES.read.roll(3, 1)[:9]
    loss = next_token_loss(others.roll(-1, 1))
    measured = measure_circuit(planted(), circuit, others, loss, at="positions")
    adapter = ModelAdapter(planted(), "positions")
    writes = written(adapter, others)
    graph = EdgeGraph(adapter, others, writes.mean(1, keepdim=True).expand_as(writes))
    assert measured.edges == circuit.edges
    assert_close(measured.edges_alone, loss(graph.run(graph.keeping(circuit.edges))))
    fewer = loss(graph.run(graph.keeping(circuit.edges[:-1])))
    assert_close(measured.edge_effects[-1], fewer - measured.edges_alone)


def test_a_circuit_of_another_model_is_refused():
    circuit, model = found("greedy", "mean"), model_of("ids")
    tokens = inputs(model, 0)
    with pytest.raises(ValueError, match=r"the circuit is of another model: this one has no head 0\.2"):
        measure_circuit(model, circuit, tokens, logit_difference(tokens[:, 0], tokens[:, 1]))
    odd: list[Any] = [
        {"nodes": (Node(0, None),)},
        {"nodes": (Node(2, 0),)},
        {"edges": (Edge(Node(1, 1), Node(0, 2), "q"),)},
        {"edges": (Edge(Node(0, 2), Node(1, 1), ""),)},
    ]
    for changes in odd:
        with pytest.raises(ValueError, match="of another model: this one has no "):
            measure_circuit(planted(), dataclasses.replace(circuit, **changes), SEQUENCES, at="positions")
    with pytest.raises(ValueError, match="one metric"):
        measure_circuit(planted(), circuit, SEQUENCES.read)
    with pytest.raises(ValueError, match="no prompts"):
        measure_circuit(planted(), circuit, SEQUENCES[:0], LOSS)
    assert no_hook_left(planted())


def test_a_circuit_of_a_bridge_on_other_prompts():
    model, tokens, others = bridge(), ids(0, n=4, d_vocab=20), ids(5, n=3, d_vocab=20)
    circuit = find_circuit(model, tokens, logit_difference(tokens[:, 0], tokens[:, 1]), edges=False, tolerance=0.3)
    metric = logit_difference(others[:, 0], others[:, 1])
    measured = measure_circuit(model, circuit, others, metric)
    assert (measured.nodes, measured.n_nodes) == (circuit.nodes, 9)
    assert_close(measured.full, metric(run(model, others)), atol=2e-5, rtol=1e-4)
    hooks = []
    for node in circuit.nodes:
        component, where = ("mlp_out", {}) if node.head is None else ("z", {"head": node.head})
        values = recorded(model, others, hook_name(component, node.layer))
        hooks.append(putting(component, node.layer, where, values.mean(0).expand_as(values)))
    assert_close(measured.without, metric(run(model, others, hooks)), atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="not in TransformerBridge"):
        measure_circuit(model, dataclasses.replace(circuit, edges=(Edge(EMBEDDING, None),)), others, metric)
    assert no_hook_left(model)
