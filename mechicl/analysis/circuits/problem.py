"""What every search for edges starts from: a model taken apart, the metric to keep, and what cut edges carry."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.analysis.circuits.objectives import Objective, OneMetric, check_objectives, evaluate, name_metric
from mechicl.analysis.interventions.ablation import check_reference
from mechicl.analysis.interventions.corruptions import derangement
from mechicl.analysis.interventions.metrics import Inputs
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edge_graph import EdgeGraph
from mechicl.models.opening.parts import record_writes
from mechicl.prompts import At, Prompts

Method = Literal["zero", "mean", "resample", "any"]
"""What a cut edge carries: see `find_circuit`."""
N_STREAMS = 256  # streams that runs of "any" start from besides prompts: rare values occur in some of them
N_MIXED = 3  # writes of one node that a random mixture combines
N_MIXTURES = 8  # mixtures that "any" takes at least, over all prompts: a single one can miss what a reader depends on


@dataclass(frozen=True, eq=False)
class Problem:
    """A model as a graph, and what its circuit has to keep.

    Attributes:
        graphs: of the model, on the prompts: one for each thing that a cut edge carries.
        objectives: for each, the metric, and its values when nothing and when everything is cut.
        method: what a cut edge carries.
        advance: called with the number of runs after each batch.
    """

    graphs: tuple[EdgeGraph, ...]
    objectives: tuple[Objective, ...]
    method: Method
    advance: Callable[[int], object] = lambda _: None

    @property
    def graph(self) -> EdgeGraph:
        """The first of the graphs; all have the same nodes and edges."""
        return self.graphs[0]

    @property
    def objective(self) -> Objective:
        """The first of the objectives."""
        return self.objectives[0]

    def measure(
        self,
        kept: Bool[Tensor, "cut edge"],
        number: int = 0,
        start: int = 0,
        base: Bool[Tensor, "edge"] | None = None,
    ) -> Float[Tensor, "cut prompt"]:
        """The metric of runs with all but these edges cut, in one of the graphs; see `EdgeGraph.iterate_cuts`."""
        values = []
        for _, predictions in self.graphs[number].iterate_cuts(kept, start=start, base=base):
            values += [self.objectives[number].measure(each) for each in predictions]
            self.advance(len(predictions))
        return torch.stack(values)

    def shifts(self, kept: Bool[Tensor, "cut edge"], start: int = 0) -> list[float]:
        """How far each of these runs is from the whole model: the largest distance over the graphs."""
        farthest = [0.0] * len(kept)
        for number, objective in enumerate(self.objectives):
            moved = [objective.shift(values) for values in self.measure(kept, number, start)]
            farthest = [max(pair) for pair in zip(farthest, moved, strict=True)]
        return farthest

    def within(
        self, kept: Bool[Tensor, "cut edge"], tolerance: float, start: int, base: Bool[Tensor, "edge"]
    ) -> list[bool]:
        """Whether each of these runs stays within a tolerance of the whole model in every graph."""
        stays = torch.ones(len(kept), dtype=torch.bool)
        for number in (*range(1, len(self.graphs)), 0):  # runs refused by one graph are not tried in the others
            left = stays.nonzero().flatten()
            values = self.measure(kept[left], number, start, base) if len(left) else ()
            stays[left] = torch.tensor([self.objectives[number].shift(each) <= tolerance for each in values]).bool()
        return stays.tolist()


def make_problem(
    model: object,
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
    """Take a model apart on some prompts; raises what `find_circuit` raises."""
    if at is None:  # the query of points; for tokens the last position, if there is a metric
        at = "query" if metrics not in (None, "outputs") or isinstance(prompts, Prompts) else "positions"
    adapter = ModelAdapter(model, at)
    if not adapter.n_layers:
        raise ValueError("there is no layer to find a circuit in")
    tokens = adapter.encode(prompts)
    if not tokens.numel():
        raise ValueError(f"there are no prompts to find a circuit on: tokens have shape {tuple(tokens.shape)}")
    name, metric = name_metric(metrics, prompts, at)
    if metric is None and adapter.is_transformer and adapter.model.cfg.torch_dtype == torch.float32:
        # effects that the weights rule out have to be distinguished from rounding
        adapter = ModelAdapter(copy.deepcopy(adapter.model).double(), at)
        tokens = adapter.encode(prompts)
    method = method or ("any" if metric is None else "zero")
    references = _record_references(adapter, tokens, method, reference, seed)
    if metric is not None:  # a metric is of these prompts: it has no targets for additional streams
        references = [each for each in references if each[1] is None or len(each[1]) == len(tokens)]
    graphs = tuple(EdgeGraph(adapter, tokens, writes, embedded=start, memory=memory) for writes, start in references)
    nothing = torch.zeros(1, len(graphs[0].edges), dtype=torch.bool, device=tokens.device)
    objectives = []
    for graph in graphs:
        whole, ablated = graph.run_cuts(~nothing)[0], graph.run_cuts(nothing)[0]
        full, cut = (evaluate(name, metric, predictions, whole) for predictions in (whole, ablated))
        objectives.append(Objective(name, metric, whole, full, cut))
    return Problem(graphs, check_objectives(objectives), method, advance)


def _record_references(
    adapter: ModelAdapter, tokens: Tensor, method: Method, reference: Inputs | None, seed: int
) -> list[tuple[Tensor, Tensor | None]]:
    """What each node writes over cut edges `[node prompt pos d_model]`, and the streams that runs start from.

    The latter are None where runs start from the embedded tokens. For "any" cut edges carry zero or random mixtures,
    in runs that start from the prompts and from mixtures of their embeddings.
    """
    others = None if reference is None else adapter.encode(reference)
    check_reference(tokens, "zero" if method == "any" else method, others)
    generator = torch.Generator().manual_seed(seed)
    if method == "zero":
        return [(_zeros(record_writes(adapter, tokens[:1]), len(tokens)), None)]
    if method == "any":
        writes = record_writes(adapter, tokens)
        mixed = _mix(writes, generator)
        zeros = _zeros(writes, len(tokens))
        references: list[tuple[Tensor, Tensor | None]] = [(zeros, None)]
        for _ in range(-(-N_MIXTURES // len(tokens))):
            # the embedding is the first node: its write is the stream that a run starts from
            references += [(mixed, None), (zeros, _mix(writes[:1], generator)[0])]
            mixed = _mix(writes, generator)
        many = _mix(writes[:1].repeat(1, -(-N_STREAMS // len(tokens)), 1, 1)[:, :N_STREAMS], generator)[0]
        there = _mix(record_writes(adapter, tokens, many), generator)
        return [*references, (_zeros(writes, N_STREAMS), many), (there, many)]
    writes = record_writes(adapter, tokens if others is None else others)
    if method == "mean":
        return [(writes.mean(1, keepdim=True).expand(-1, len(tokens), -1, -1), None)]
    return [(writes if others is not None else writes[:, derangement(len(tokens), generator).to(tokens.device)], None)]


def _zeros(writes: Tensor, n_prompts: int) -> Tensor:
    """Zeros that take no memory."""
    return writes.new_zeros(1, 1, 1, 1).expand(len(writes), n_prompts, *writes.shape[2:])


def _mix(writes: Float[Tensor, "node prompt pos d_model"], generator: torch.Generator) -> Tensor:
    """At each place a random linear combination of what the node writes at random places of any prompt.

    It lies in the span of the node's writes, so a receiver that does not read the node is unaffected. Its size and sign
    are unusual, so a receiver that is saturated, or that gets the same from all prompts, is affected too.
    """
    flat = writes.flatten(1, 2)
    mixed = torch.zeros_like(flat)
    for _ in range(N_MIXED):
        places = torch.randint(flat.shape[1], (flat.shape[1],), generator=generator).to(flat.device)
        weights = torch.randn(flat.shape[1], 1, generator=generator, dtype=torch.float64)
        mixed += weights.to(flat) * flat[:, places]
    return mixed.view_as(writes)
