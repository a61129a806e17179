"""Circuits read off weights: worked out by hand on constructions, in hidden models, and for parts without effect."""

import pytest
import torch

from mechicl import constructions
from mechicl.constructions import Head, Layer, Stream, assemble, hide, weights_circuit
from mechicl.constructions.vocabulary import Hidden
from mechicl.models import HookedTransformer
from mechicl.models.opening.sites import EMBEDDING, Edge, Node, list_edges, list_nodes
from tests.constructions.reference import random_model

STREAM = Stream(x=2, y=1, a=1, b=1, c=1)


def edges_as_text(model: HookedTransformer, **options) -> set[str]:
    return {str(edge).replace("embedding", "e").replace(" → ", ">") for edge in weights_circuit(model, **options).edges}


def reads(sender: str, receiver: str, by: str = "qkv") -> set[str]:
    return {f"{sender}>{receiver} ({each})" for each in by}


def head(value: str, output: str, *, query: str = "x", key: str = "x") -> Head:
    """Return a head whose scores are a product of subspaces, and that moves a number from one to another."""
    value_weights, output_weights = STREAM.read(value)[:, :1], STREAM.write(output)[:1]
    return Head(STREAM.read(query), STREAM.read(key), value_weights, output_weights)


def unit(source: str, target: str, bias: float = 0.0) -> Hidden:
    return Hidden(STREAM.read(source)[:, :1], STREAM.write(target)[:1], torch.full((1,), bias).double())


def test_induction_is_two_heads_and_seven_edges():
    model = constructions.induction(d_vocab=5, n_ctx=6, n_heads=3, previous_token_head=1, induction_head=2, seed=0)
    circuit = weights_circuit(model)
    assert circuit.nodes == (Node(0, 1), Node(1, 2))
    matching = reads("e", "head 1.2", "qv") | reads("head 0.1", "head 1.2", "k")
    assert edges_as_text(model) == reads("e", "head 0.1") | matching | {"head 1.2>output"}


def test_gradient_descent_reads_inputs_by_query_and_key_and_residuals_by_value():
    model = constructions.gradient_descent(x_dim=3, n_context=5, step_size=0.1, steps=2)
    # the value is -y here, which the first step changes; x never changes
    steps = reads("e", "head 0.0") | reads("e", "head 1.0") | reads("head 0.0", "head 1.0", "v")
    assert edges_as_text(model) == steps | {"e>output", "head 0.0>output", "head 1.0>output"}


def test_newtons_inverse_is_read_by_the_keys_of_the_last_layer():
    model = constructions.newton(x_dim=2, n_context=5, steps=1, alpha=0.1)
    start = reads("e", "head 0.0")  # alpha S x, the first guess of the inverse times x
    step = {"e>head 1.0 (q)", "head 0.0>head 1.0 (k)", "head 0.0>head 1.0 (v)", "head 0.0>MLP 1", "head 1.0>MLP 1"}
    inverse = {f"{sender}>head 2.0 (k)" for sender in ("head 0.0", "head 1.0", "MLP 1")}
    last = {"e>head 2.0 (q)", "e>head 2.0 (v)", "e>output", "head 2.0>output"}
    assert edges_as_text(model) == start | step | inverse | last


def test_parts_without_readers_or_keys_have_no_edges():
    dead_end = head("y", "a")  # only a unit without readers reads a
    unanswered = head("y", "y", query="b", key="c")  # nothing writes b or c: all scores are 0
    half_answered = head("y", "y", query="y", key="c")
    layers = [Layer([dead_end, unanswered, half_answered], unit("a", "b")), Layer([head("y", "y")], None)]
    second = reads("e", "head 1.0") | {"head 1.0>output", "e>output"}
    linear = assemble(STREAM, layers, n_context=4, act_fn="relu")
    assert edges_as_text(linear) == second
    # softmax gives weight to scores of 0, so that values move without queries and keys
    softmax = assemble(STREAM, layers, n_context=4, act_fn="relu", attention="softmax")
    moving = {f"{a}>{b}" for a in ("head 0.1", "head 0.2") for b in ("head 1.0 (v)", "output")}
    assert edges_as_text(softmax) == second | moving | {"e>head 0.1 (v)", "e>head 0.2 (v)"}
    assert weights_circuit(softmax).nodes == (Node(0, 1), Node(0, 2), Node(1, 0))


def test_a_chain_is_followed_unit_by_unit_and_not_part_by_part():
    # the MLP reads a and b, and only what it makes of b is read later
    read, write = (STREAM.read("a"), STREAM.read("b")), (STREAM.write("c"), STREAM.write("y"))
    both = Hidden(torch.cat(read, dim=1), torch.cat(write))
    model = assemble(STREAM, [Layer([head("y", "a"), head("y", "b")], both)], n_context=4, act_fn="relu")
    assert edges_as_text(model) == reads("e", "head 0.1") | {"head 0.1>MLP 0", "MLP 0>output", "e>output"}


def test_biases_count_and_a_part_that_reads_nothing_is_on_no_path():
    constant = unit("a", "b", bias=1.0)  # nothing writes a: the unit is 1
    reads_it = unit("b", "y")
    model = assemble(STREAM, [Layer([head("x", "c")], constant), Layer([], reads_it)], n_context=4, act_fn="relu")
    assert edges_as_text(model) == {"e>output"}
    silent = assemble(
        STREAM, [Layer([head("x", "a")], unit("a", "b", bias=1.0)), Layer([], reads_it)], n_context=4, act_fn="relu"
    )
    assert {"head 0.0>MLP 0", "MLP 0>MLP 1", "MLP 1>output"} <= edges_as_text(silent)
    never = assemble(STREAM, [Layer([head("x", "c")], unit("a", "y", bias=-1.0))], n_context=4, act_fn="relu")
    assert edges_as_text(never) == {"e>output"}


@pytest.mark.parametrize("distractors", [0, 2])
@pytest.mark.parametrize("make", [
    lambda: constructions.gd_plus_plus(x_dim=3, n_context=5, step_size=0.1, gamma=0.1, steps=3),
    lambda: constructions.gradient_descent(x_dim=3, n_context=5, step_size=0.1, steps=3),
    lambda: constructions.newton(x_dim=2, n_context=5, steps=2, alpha=0.1),
    lambda: constructions.copy_then_gradient_descent(x_dim=2, n_context=4, step_size=0.1),
    lambda: constructions.induction(d_vocab=5, n_ctx=6, n_heads=2, seed=1),
])  # fmt: skip
def test_hiding_does_not_change_the_circuit(make, distractors):
    model = make()
    circuit = weights_circuit(model)
    assert 0 < len(circuit.edges) <= len(list_edges(model))
    assert weights_circuit(hide(model, seed=3, distractors=distractors).model) == circuit


@pytest.mark.parametrize("config", [
    {},
    {"d_mlp": 5, "attn_bias": True, "read_bias": True},
    {"attention": "softmax", "sink": "learned", "d_mlp": 3, "act_fn": "relu"},
    {"prompt_format": "interleaved", "positional_embedding_type": "sinusoidal", "d_pos": 6},
    {"mlp_location": "input", "d_mlp": 4, "recurrent": True},
], ids=str)  # fmt: skip
def test_in_random_weights_everything_reads_everything(config):
    model = random_model(**config)
    circuit = weights_circuit(model)
    assert circuit.edges == tuple(list_edges(model))
    assert circuit.nodes == tuple(list_nodes(model)[1:])


def test_edges_disappear_with_their_weights():
    model = random_model(d_mlp=5, act_fn="relu", attention="softmax")
    with torch.no_grad():
        model.blocks[1].attn.W_K[0] = 0
    assert {edge.by for edge in weights_circuit(model).edges if edge.receiver == Node(1, 0)} == {"v"}
    with torch.no_grad():
        model.blocks[1].attn.W_O[0] = 0
    assert Node(1, 0) not in weights_circuit(model).nodes


def test_biases_count_as_queries_and_keys():
    """A key that matches only a bias of the query is read; a query that matches only a bias is not, under softmax."""
    for attention, query_reads in (("softmax", False), ("linear", True)):
        model = random_model(attention=attention, attn_bias=True)
        attn = model.blocks[1].attn
        with torch.no_grad():
            attn.W_Q[0] = 0
            attn.W_K[1] = 0
        edges = weights_circuit(model).edges
        assert Edge(EMBEDDING, Node(1, 0), "k") in edges
        assert Edge(EMBEDDING, Node(1, 0), "q") not in edges
        assert (Edge(EMBEDDING, Node(1, 1), "q") in edges) == query_reads
