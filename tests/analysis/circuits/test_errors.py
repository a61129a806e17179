"""Errors of circuits name the argument, and leave no hook on the model."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from mechicl import constructions
from mechicl.analysis import Replacement
from mechicl.analysis.circuits import (
    EMBEDDING,
    Circuit,
    Edge,
    EdgeScores,
    Node,
    Ranked,
    circuit_curve,
    compare_circuits,
    find_circuit,
    measure_circuit,
    score_edges,
)  # fmt: skip
from mechicl.analysis.circuits.scores import read_scores
from mechicl.base.settings import settings
from mechicl.models.opening.sites import list_edges, list_nodes
from mechicl.prompts import TokenSequences
from tests.analysis.interventions.oracles import inputs, model_of, no_hook_left

MODEL, IDS = model_of("gpt"), constructions.induction(d_vocab=6, n_ctx=12)
PROMPTS, OTHERS = inputs(MODEL, 0, 4), inputs(MODEL, 1, 4)
EDGES = tuple(list_edges(MODEL))
ALL = dict.fromkeys(EDGES, 1.0)
SCORES = EdgeScores(EDGES, torch.ones(len(EDGES), 4), "loss", "eap-ig", "mean")
OF_ZERO = dataclasses.replace(SCORES, method="zero")
DEEPER = tuple(list_edges(model_of("gpt", n_layers=3)))
QUIET: dict[str, Any] = {"progress": False}
NO_CONTROL: dict[str, Any] = {"ranked": Ranked(n_random=0)}
HIDDEN = TokenSequences(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.bool))


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


def undefined(predictions: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(len(predictions)) == 1, torch.nan, predictions[:, 0])


def finite(n_calls: int) -> Any:
    """A metric that is finite in its first calls: of the whole model, then with everything cut."""
    calls = itertools.count()
    return lambda predictions: predictions[:, 0] * (1.0 if next(calls) < n_calls else torch.inf)


def find(model: Any = MODEL, prompts: Any = PROMPTS, metrics: Any = None, **options: Any) -> Any:
    return find_circuit(model, prompts, metrics, **QUIET | options)


def score(metrics: Any = None, **options: Any) -> Any:
    return score_edges(MODEL, PROMPTS, metrics, **QUIET | options)


def measure(made: Circuit | None = None, **options: Any) -> Any:
    replacement = options.pop("method", Replacement("zero"))
    made = made or circuit(method=replacement.method)
    return measure_circuit(MODEL, made, PROMPTS, reference=replacement.reference, **QUIET | options)


def curve(scores: Any = ALL, **options: Any) -> Any:
    return circuit_curve(MODEL, scores, PROMPTS, **QUIET | NO_CONTROL | options)


EVERYWHERE: list[tuple[Any, str]] = [  # errors of all four functions
    (lambda: {"metrics": constant}, "'metric' does not change"),
    (lambda: {"metrics": undefined}, "'metric' of the whole model is not finite on 1 of 4 prompts"),
    (lambda: {"metrics": finite(1)}, "'metric' with everything cut is not finite on 4 of 4 prompts"),
    (lambda: {"metrics": lambda p: p.mean()}, "'metric' must return one number per prompt"),
    (lambda: {"metrics": {"a": detached, "b": detached}}, "metrics must be one metric"),
    (lambda: {"method": Replacement("resample", PROMPTS)}, "reference is equal"),
    (lambda: {"method": Replacement("resample", OTHERS[:2])}, "method='resample' needs a reference for each of 4"),
    (lambda: {"method": Replacement("zero", OTHERS)}, "method='zero' takes no reference"),
]


@pytest.mark.parametrize(("options", "named"), EVERYWHERE)
@pytest.mark.parametrize("function", [find, score, measure, curve])
def test_errors_of_all_functions_name_the_argument(function, options, named):
    with pytest.raises(ValueError, match=named):
        function(**options())
    assert no_hook_left(MODEL)


@pytest.mark.parametrize("function", [find, score, measure, curve])
def test_too_little_memory_is_refused(function):
    with settings(memory=10), pytest.raises(ValueError, match="memory="):
        function()


CASES: list[tuple[Any, str]] = [
    (lambda: find(method=Replacement("any", OTHERS)), "method='any' takes no reference"),
    (lambda: find(metrics=detached, search="eap-ig"), "no gradient"),
    (lambda: find(prompts=PROMPTS[:0]), "prompts needed"),
    (lambda: find(model_of("gpt", n_layers=0)), "layers and prompts needed, got 0 layers"),
    (lambda: find(IDS, HIDDEN, at="query"), "at='positions'"),
    (lambda: score(detached), "no gradient in the predictions: 'exact' and 'acdc'"),
    (lambda: measure(circuit(nodes=(Node(5, 0),))), "another model: this one has no head 5.0"),
    (lambda: measure(circuit(edges=(Edge(Node(5, 0), None),))), "no head 5.0 → output"),
    (lambda: measure(circuit(n_nodes=40)), "6 heads and MLPs, not 40"),
    (lambda: measure(circuit(method="scrambled")), "method must be .*, got 'scrambled'"),
    (lambda: compare_circuits(circuit(), circuit(n_nodes=40)), "one has 6 heads and MLPs, the other 40"),
    (lambda: curve(SCORES, method="zero"), "method must be 'mean', that of the scores 'eap-ig', got 'zero'"),
    (lambda: curve({"a": SCORES, "b": OF_ZERO}), "method must be 'zero', that of the scores 'b', got 'mean'"),
    (lambda: curve(dataclasses.replace(SCORES, edges=DEEPER, scores=torch.ones(len(DEEPER), 4))),
     "'eap-ig' are of another model: this one has no edge MLP 0 → MLP 2"),
    (lambda: curve(metrics=finite(2)), "not finite on some circuit"),
    *((lambda bad=bad: Ranked(bad), "fractions must increase")
      for bad in ((0.5, 0.1), (), (0.0, 1.0), (0.5, 1.5))),
    (lambda: curve().cpr("eap"), r"name must be one of \['scores'\], got 'eap'"),
    (lambda: read_scores({Edge(Node(7, 0), None): 1.0, **ALL}, EDGES), r"no edge head 7\.0 → output"),
    (lambda: read_scores({**ALL, EDGES[0]: float("nan")}, EDGES), "not finite for 1 edges, such as embedding"),
    (lambda: SCORES.auroc([]), "truth must have some of the edges, but not all: got 0 of"),
    (lambda: SCORES.auroc([Edge(Node(7, 0), None)]), r"1 true edges have no score, such as head 7\.0 → output"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning")  # raised by imports of torch.compile
@pytest.mark.parametrize(("call", "named"), CASES)
def test_errors_name_the_argument(call, named):
    with pytest.raises((ValueError, TypeError, IndexError), match=named):
        call()
    assert no_hook_left(MODEL)


@pytest.mark.parametrize("method", ["mean", "resample"])
def test_changes_by_rounding_alone_are_refused(method):
    same = constructions.induction(d_vocab=6, n_ctx=12)
    with torch.no_grad():
        same.unembed.W_U.mul_(torch.pi)
    with pytest.raises(ValueError, match="'largest change of an output' does not change"):
        find(same, torch.tensor([[0, 1, 2, 3, 4, 0, 1]]).repeat(7, 1), method=method)


def test_a_metric_without_a_gradient_is_enough_for_searches_and_curves_by_runs():
    for search in ("exact", "acdc"):
        kept = find(metrics=detached, search=search, tolerance=0.3)
        assert abs(kept.faithfulness().mean - 1) <= 0.3 + 1e-9
    assert len(curve(metrics=detached).alone) == 1


def test_curves_take_the_method_of_their_scores():
    assert curve(SCORES).method == "mean"
    assert curve(ALL, method="mean").method == "mean"
    assert curve(dataclasses.replace(SCORES, method="any")).method == "zero"
