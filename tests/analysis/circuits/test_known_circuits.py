"""Circuits found in models whose circuits are known: constructions on continuous tokens, plain and hidden."""

from typing import Any

import pytest
import torch

from mechicl import constructions
from mechicl.analysis.circuits import find_circuit
from mechicl.constructions import hide, weights_circuit
from mechicl.interop import from_tracr
from mechicl.models.opening.edges import EMBEDDING, Edge, list_edges
from mechicl.tasks import LinearRegression
from tests.interop.compiling import compile_program

SIZES: dict[str, Any] = {"x_dim": 2, "n_context": 4}
PROMPTS = LinearRegression(**SIZES).sample(24, seed=0, dtype=torch.float64)
MODELS = {
    "gradient descent": constructions.gradient_descent(**SIZES, step_size=0.1, steps=3),
    "newton": constructions.newton(**SIZES, steps=1, alpha=0.1),
    "copying": constructions.copy_then_gradient_descent(**SIZES, step_size=0.1),
    "softmax": constructions.softmax_gradient_descent(**SIZES, step_size=0.1, score_scale=0.1, sink=True),
}


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_edges_of_constructions_on_points_are_those_of_their_weights(name, hidden):
    model = hide(MODELS[name], seed=1).model if hidden else MODELS[name]
    circuit = find_circuit(model, PROMPTS, method="any", effects=False, progress=False)
    known = weights_circuit(MODELS[name])
    assert circuit.edges == known.edges
    assert circuit.nodes == known.nodes
    assert not hidden or len(known.edges) < len(list_edges(model))


@pytest.mark.parametrize("seed", range(3))
def test_one_prompt_is_enough_for_several_random_mixtures(seed):
    model = from_tracr(compile_program("reverse"))
    circuit = find_circuit(model, model.sample_ids(1, seed=seed), seed=seed, effects=False, progress=False)
    assert circuit.edges == model.true_circuit.edges


def test_prompts_alone_do_not_show_reads_of_zeros():
    """A query's target is unknown, 0: no prompt shows that the output reads it off the token."""
    model = MODELS["gradient descent"]
    edge = Edge(EMBEDDING, None)
    assert edge in weights_circuit(model).edges
    assert edge not in find_circuit(model, PROMPTS, effects=False, progress=False).edges
