"""What cannot be answered is refused, with a message that names it and says what to do instead."""

import dataclasses
import re
from functools import partial
from typing import Any

import pytest
import torch

from mechicl import constructions
from mechicl.analysis.circuits import (
    EMBEDDING,
    Circuit,
    Edge,
    EdgeScores,
    Node,
    circuit_curve,
    compare_circuits,
    find_circuit,
    measure_circuit,
    score_edges,
)
from mechicl.models.opening.edges import list_edges, list_nodes
from tests.analysis.interventions.oracles import inputs, model_of, no_hook_left

MODEL = model_of("gpt")
PROMPTS, OTHERS = inputs(MODEL, 0, 4), inputs(MODEL, 1, 4)
EDGES = tuple(list_edges(MODEL))
SCORES = EdgeScores(EDGES, torch.ones(len(EDGES), 4), "loss", "eap-ig", "mean")


def circuit(**changes: Any) -> Circuit:
    ones = torch.ones(4, dtype=torch.float64)
    edges = (Edge(EMBEDDING, Node(0, 0), "v"), Edge(Node(0, 0), None))
    made = Circuit((Node(0, 0),), edges, "loss", "mean", ones, 3 * ones, ones, ones, ones, torch.zeros(1, 4).double(),
                   torch.zeros(2, 4).double(), len(list_nodes(MODEL)) - 1)  # fmt: skip
    return dataclasses.replace(made, **changes)


def constant(predictions: torch.Tensor) -> torch.Tensor:
    return predictions[:, 0] * 0 + 2


def detached(predictions: torch.Tensor) -> torch.Tensor:
    return predictions[:, 0].detach()


def counted(predictions: torch.Tensor) -> torch.Tensor:
    return (predictions[:, 0] * 100).long()


def undefined(predictions: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(len(predictions)) == 1, torch.nan, predictions[:, 0])


def averaged(predictions: torch.Tensor) -> torch.Tensor:
    return predictions.mean()


def undefined_when_cut() -> Any:
    calls: list[int] = []

    def metric(predictions: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return predictions[:, 0] * (1 if len(calls) == 1 else torch.nan)

    return metric


EVERYWHERE: dict[str, dict[str, Any]] = {  # whatever is asked of a metric
    "'metric' does not change when every head and MLP is ablated.*The metric is constant": {"metrics": constant},
    "'metric' of the whole model is not finite on 1 of 4 prompts.*a difference of logits": {"metrics": undefined},
    "'metric' with everything cut is not finite on 4 of 4 prompts": {"metrics": undefined_when_cut},
    "'metric' must return a number a prompt.*Do not average": {"metrics": averaged},
    "reference is equal to the prompts|equal to the prompts": {"method": "resample", "reference": PROMPTS},
    "needs one reference for each of 4 prompts, got 2": {"method": "resample", "reference": OTHERS[:2]},
    "reference must be prompts of the same length": {"method": "resample", "reference": OTHERS.prefix(1)},
}


ASK: dict[str, Any] = {
    "find": partial(find_circuit, MODEL, PROMPTS),
    "score": partial(score_edges, MODEL, PROMPTS),
    "measure": lambda method="zero", **others: measure_circuit(MODEL, circuit(method=method), PROMPTS, **others),
    "curve": partial(circuit_curve, MODEL, dict.fromkeys(EDGES, 1.0), PROMPTS),
}


@pytest.mark.parametrize("message", list(EVERYWHERE))
@pytest.mark.parametrize("asked", list(ASK))
def test_metrics_and_references_that_say_nothing_are_refused_everywhere(asked, message):
    asked_for: dict[str, Any] = {"progress": False} | EVERYWHERE[message]
    if asked_for.get("metrics") is undefined_when_cut:
        asked_for["metrics"] = undefined_when_cut()
    with pytest.raises(ValueError, match=message):
        ASK[asked](**asked_for)
    assert no_hook_left(MODEL)


@pytest.mark.parametrize("metric", [detached, counted])
def test_a_metric_without_a_gradient_is_refused_where_one_is_needed_and_serves_where_none_is(metric):
    with pytest.raises(ValueError, match="the metric has no gradient in the predictions: 'exact' and 'acdc'"):
        score_edges(MODEL, PROMPTS, metric, progress=False)
    with pytest.raises(ValueError, match="no gradient"):
        find_circuit(MODEL, PROMPTS, metric, search="eap-ig", progress=False)
    for search in ("exact", "acdc"):
        kept = find_circuit(MODEL, PROMPTS, detached, search=search, tolerance=0.3, progress=False)
        assert abs(kept.faithfulness().mean - 1) <= 0.3 + 1e-9
    assert len(circuit_curve(MODEL, dict.fromkeys(EDGES, 1.0), PROMPTS, detached, progress=False).alone) == 2


@pytest.mark.parametrize("method", ["mean", "resample"])
def test_what_rounding_alone_changes_is_no_circuit(method):
    same = constructions.induction(d_vocab=6, n_ctx=12)
    with torch.no_grad():
        same.unembed.W_U.mul_(torch.pi)
    ids = torch.tensor([[0, 1, 2, 3, 4, 0, 1]]).repeat(7, 1)
    with pytest.raises(ValueError, match=r"'largest change of an output' does not change.*another method"):
        find_circuit(same, ids, method=method, progress=False)


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning")  # of what torch.compile imports
def test_what_is_no_function_no_ids_and_no_open_model_are_refused_by_name():
    with pytest.raises(TypeError, match=r"metrics must be a function, .*, got 5"):
        find_circuit(MODEL, PROMPTS, 5, progress=False)  # type: ignore[arg-type]
    model = constructions.induction(d_vocab=6, n_ctx=12)
    with pytest.raises(IndexError, match="out of range: got 6 to 6, the vocabulary has 0 to 5"):
        find_circuit(model, torch.full((2, 4), 6), progress=False)
    with pytest.raises(ValueError, match=r"no prompts to find a circuit on: tokens have shape \(2, 0\)"):
        find_circuit(model, torch.zeros(2, 0, dtype=torch.long), progress=False)
    with pytest.raises(TypeError, match=r"compiled by torch\.compile.*pass the one it is of"):
        find_circuit(torch.compile(model), torch.zeros(2, 4, dtype=torch.long), progress=False)


OTHER_MODEL: dict[str, dict[str, Any]] = {
    "this model has no head 5.0. Measure it on the model that it was found in": {"nodes": (Node(5, 0),)},
    "this model has no head 5.0 → output": {"edges": (Edge(Node(5, 0), None),)},
    "this model has no head 0.0 → head 1.0 (x)": {"edges": (Edge(Node(0, 0), Node(1, 0), "x"),)},
    "another model: with 40 heads and MLPs instead of 6": {"n_nodes": 40},
}


@pytest.mark.parametrize("message", list(OTHER_MODEL))
@pytest.mark.parametrize("edges", [True, False])
def test_a_circuit_of_another_model_is_refused(message, edges):
    measured = circuit(**(({} if edges else {"edges": ()}) | OTHER_MODEL[message]))
    with pytest.raises(ValueError, match=re.escape(message)):
        measure_circuit(MODEL, measured, PROMPTS, progress=False)


def test_circuits_of_models_of_different_sizes_do_not_compare():
    with pytest.raises(ValueError, match="circuits of different models: one has 6 heads and MLPs, the other 40"):
        compare_circuits(circuit(), circuit(n_nodes=40))


def test_a_reference_where_cuts_carry_zero_is_refused():
    with pytest.raises(ValueError, match="method='zero' takes no reference"):
        measure_circuit(MODEL, circuit(method="zero"), PROMPTS, reference=OTHERS, progress=False)


def test_scores_with_other_cuts_than_the_circuits_are_refused():
    with pytest.raises(
        ValueError, match="the scores 'eap-ig' are of method='mean', and the circuits would be of 'zero': "
    ):
        circuit_curve(MODEL, SCORES, PROMPTS, method="zero", progress=False)
    mixed = {"mean": SCORES, "zero": dataclasses.replace(SCORES, method="zero")}
    with pytest.raises(ValueError, match="the scores 'zero' are of method='zero', and the circuits would be of 'mean'"):
        circuit_curve(MODEL, mixed, PROMPTS, progress=False)
    assert circuit_curve(MODEL, SCORES, PROMPTS, progress=False).method == "mean"
    by_edge = dict(zip(SCORES.edges, SCORES.scores.mean(1).tolist(), strict=True))  # as the message says
    assert circuit_curve(MODEL, by_edge, PROMPTS, method="zero", progress=False).method == "zero"
    of_any = dataclasses.replace(SCORES, method="any")
    assert circuit_curve(MODEL, of_any, PROMPTS, progress=False).method == "zero"


def test_what_is_no_score_is_refused():
    with pytest.raises(TypeError, match=r"scores must be EdgeScores.*, got a Circuit"):
        circuit_curve(MODEL, circuit(), PROMPTS, progress=False)  # type: ignore[arg-type]
    others = tuple(list_edges(model_of("gpt", n_layers=3)))
    deeper = dataclasses.replace(SCORES, edges=others, scores=torch.ones(len(others), 4))
    with pytest.raises(ValueError, match=r"'eap-ig' are of another model: this one has no edge MLP 0 → MLP 2"):
        circuit_curve(MODEL, deeper, PROMPTS, progress=False)
