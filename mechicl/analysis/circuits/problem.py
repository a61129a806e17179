"""What every search for edges starts from: a model taken apart, what it has to keep, and runs with some edges cut."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.analysis.circuits.graph import EdgeGraph
from mechicl.analysis.circuits.objectives import Objective, make_objective
from mechicl.analysis.circuits.references import record_references
from mechicl.analysis.interventions.ablation import Method
from mechicl.analysis.interventions.metrics import Inputs, Metrics
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.prompts import At, Prompts


@dataclass(frozen=True, eq=False)
class Problem:
    """A graph, what its circuit has to keep, and how many runs were made.

    Attributes:
        graph: of the model, on the prompts.
        objective: the metric, and what it is when nothing and when everything is cut.
        advance: called with the number of runs after each batch.
    """

    graph: EdgeGraph
    objective: Objective
    advance: Callable[[int], object] = lambda _: None

    def measure(self, kept: Bool[Tensor, "cut edge"], start: int = 0) -> Float[Tensor, "cut prompt"]:
        """The metric of runs in which only these edges carry what the run writes; see `EdgeGraph.iterate_cuts`."""
        values = []
        for _, predictions in self.graph.iterate_cuts(kept, start=start):
            values += [self.objective.measure(each) for each in predictions]
            self.advance(len(predictions))
        return torch.stack(values)

    def shifts(self, kept: Bool[Tensor, "cut edge"], start: int = 0) -> list[float]:
        """How far each of these runs is from the whole model."""
        return [self.objective.shift(values) for values in self.measure(kept, start)]


def make_problem(
    model: Any,
    prompts: Inputs,
    metrics: Metrics,
    *,
    method: Method,
    reference: Inputs | None,
    at: At | None,
    seed: int,
    memory: float,
    advance: Callable[[int], object] = lambda _: None,
) -> Problem:
    """Take a model apart on some prompts; raises what `find_circuit` says."""
    if at is None:  # the query of points; of tokens the last position, if a metric says what of it
        at = "query" if metrics is not None or isinstance(prompts, Prompts) else "positions"
    adapter = ModelAdapter(model, at)
    tokens = adapter.encode(prompts)
    if not adapter.n_layers:
        raise ValueError("there is no layer to find a circuit in")
    if not len(tokens):
        raise ValueError("there are no prompts to find a circuit on")
    graph = EdgeGraph(adapter, tokens, record_references(adapter, tokens, method, reference, seed), memory=memory)
    nothing = torch.zeros(1, len(graph.edges), dtype=torch.bool, device=tokens.device)
    ablated = graph.run_cuts(nothing)[0]
    whole = graph.run_cuts(~nothing)[0]
    return Problem(graph, make_objective(metrics, prompts, at, whole, ablated), advance)
