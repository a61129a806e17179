"""What every search for edges starts from: a model taken apart, what it has to keep, and runs with some edges cut."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.analysis.circuits.graph import EdgeGraph
from mechicl.analysis.circuits.objectives import Objective, OneMetric, check_objectives, make_objective, name_metric
from mechicl.analysis.circuits.references import Method, record_references
from mechicl.analysis.interventions.metrics import Inputs
from mechicl.models import HookedTransformer
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.prompts import At, Prompts


@dataclass(frozen=True, eq=False)
class Problem:
    """A model as a graph, what its circuit has to keep, and how many runs were made.

    Attributes:
        graphs: of the model, on the prompts: one for each thing that a cut edge carries.
        objectives: for each, the metric, and what it is when nothing and when everything is cut.
        method: what a cut edge carries.
        advance: called with the number of runs after each batch.
    """

    graphs: tuple[EdgeGraph, ...]
    objectives: tuple[Objective, ...]
    method: Method
    advance: Callable[[int], object] = lambda _: None

    @property
    def graph(self) -> EdgeGraph:
        """The first of the graphs, whose nodes and edges are those of all."""
        return self.graphs[0]

    @property
    def objective(self) -> Objective:
        """The first of the objectives."""
        return self.objectives[0]

    @property
    def scored(self) -> tuple[EdgeGraph, ...]:
        """Those that gradients are taken in: the ones with as many runs as there are prompts."""
        return tuple(graph for graph in self.graphs if len(graph.tokens) == len(self.graph.tokens))

    def measure(self, kept: Bool[Tensor, "cut edge"]) -> Float[Tensor, "cut prompt"]:
        """The metric of runs in which only these edges carry what the run writes, with the first of the graphs."""
        return self._measure(0, kept, 0, None)

    def shifts(
        self, kept: Bool[Tensor, "cut edge"], start: int = 0, base: Bool[Tensor, "edge"] | None = None
    ) -> list[float]:
        """How far each of these runs is from the whole model, at most; see `EdgeGraph.iterate_cuts`."""
        farthest = [0.0] * len(kept)
        for number, objective in enumerate(self.objectives):
            moved = [objective.shift(values) for values in self._measure(number, kept, start, base)]
            farthest = [max(pair) for pair in zip(farthest, moved, strict=True)]
        return farthest

    def within(
        self, kept: Bool[Tensor, "cut edge"], tolerance: float, start: int, base: Bool[Tensor, "edge"]
    ) -> list[bool]:
        """Whether each of these runs stays within a tolerance of the whole model, whatever the cut edges carry."""
        stays = torch.ones(len(kept), dtype=torch.bool)
        for number in (*range(1, len(self.graphs)), 0):  # what one refuses, the others need not try
            left = stays.nonzero().flatten()
            values = self._measure(number, kept[left], start, base) if len(left) else ()
            stays[left] = torch.tensor([self.objectives[number].shift(each) <= tolerance for each in values]).bool()
        return stays.tolist()

    def _measure(self, number: int, kept: Tensor, start: int, base: Tensor | None) -> Float[Tensor, "cut prompt"]:
        values = []
        for _, predictions in self.graphs[number].iterate_cuts(kept, start=start, base=base):
            values += [self.objectives[number].measure(each) for each in predictions]
            self.advance(len(predictions))
        return torch.stack(values)


def make_problem(
    model: Any,
    prompts: Inputs,
    metrics: OneMetric,
    *,
    method: Method | None,
    reference: Inputs | None,
    at: At | None,
    seed: int,
    memory: float,
    advance: Callable[[int], object] = lambda _: None,
) -> Problem:
    """Take a model apart on some prompts; raises what `find_circuit` says."""
    adapter, tokens = read_inputs(model, prompts, metrics, at)
    exact = name_metric(metrics, prompts, adapter.at)[1] is None
    if exact and adapter.is_transformer and adapter.model.cfg.torch_dtype == torch.float32:
        # what is not there in the weights has to be told from rounding
        adapter, tokens = read_inputs(_in_double(adapter.model), prompts, metrics, at)
    method = method or ("any" if exact else "zero")
    references = record_references(adapter, tokens, method, reference, seed)
    if not exact:  # a metric is of these prompts: there is no target for more streams than prompts
        references = [each for each in references if each.embedded is None or len(each.embedded) == len(tokens)]
    graphs = tuple(
        EdgeGraph(adapter, tokens, each.writes, embedded=each.embedded, memory=memory) for each in references
    )
    nothing = torch.zeros(1, len(graphs[0].edges), dtype=torch.bool, device=tokens.device)
    objectives = []
    for graph in graphs:
        whole, ablated = graph.run_cuts(~nothing)[0], graph.run_cuts(nothing)[0]
        objectives.append(make_objective(metrics, prompts, adapter.at, whole, ablated))
    return Problem(graphs, check_objectives(objectives), method, advance)


def read_inputs(model: Any, prompts: Inputs, metrics: OneMetric, at: At | None) -> tuple[ModelAdapter, Tensor]:
    """A model to run on some prompts, and their tokens.

    Raises:
        ValueError: a model without layers, or no prompts.
    """
    if at is None:  # the query of points; of tokens the last position, if a metric says what of it
        at = "query" if metrics not in (None, "outputs") or isinstance(prompts, Prompts) else "positions"
    adapter = ModelAdapter(model, at)
    if not adapter.n_layers:
        raise ValueError("there is no layer to find a circuit in")
    tokens = adapter.encode(prompts)
    if not tokens.numel():
        raise ValueError(f"there are no prompts to find a circuit on: tokens have shape {tuple(tokens.shape)}")
    return adapter, tokens


def _in_double(model: HookedTransformer) -> HookedTransformer:
    """The same model in float64, with the hooks that are attached."""
    return copy.deepcopy(model).double()
