"""The setting of every search for edges: a model as a graph, the metric to keep, and what cut edges carry."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.analysis.interventions.ablation import Replacement, ReplacementMethod, encode_reference
from mechicl.analysis.interventions.corruptions import derangement
from mechicl.analysis.interventions.metrics import (
    Inputs,
    Metric,
    SomeMetrics,
    evaluate_metric,
    evaluate_part,
    name_metrics,
)
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edge_graph import EdgeGraph
from mechicl.models.opening.parts import record_writes
from mechicl.prompts import At, Prompts

OneMetric = SomeMetrics | Literal["outputs"]
"""A metric as the user gives it: one as for `patch`, None for the loss where there are targets, or "outputs"."""
OUTPUTS = "largest change of an output"
"""The name of the default metric without targets: the distance of the outputs from the whole model's."""
CutMethod = ReplacementMethod | Replacement
"""What a cut edge carries: see `find_circuit`."""
N_STREAMS = 256  # streams that runs of "any" start from in addition to prompts: rare values occur in some of them
N_MIXED = 3  # writes of one node that a random mixture combines
N_MIXTURES = 8  # mixtures that "any" takes at least, over all prompts: a single one can miss what a reader depends on


@dataclass(frozen=True, eq=False)
class Objective:
    """A number per prompt, and its distance from the whole model's on a scale where cutting everything is 1."""

    name: str
    # a function of predictions; None for the outputs themselves: the largest absolute change of any output.
    metric: Metric | None
    predictions: Float[Tensor, "prompt ..."]
    full: Float[Tensor, "prompt"]
    ablated: Float[Tensor, "prompt"]
    # the effect of cutting everything: on the mean, or for the outputs the largest change of any prompt.
    scale: float = 1.0

    def measure(self, predictions: Float[Tensor, "prompt ..."]) -> Float[Tensor, "prompt"]:
        """Evaluate the metric for these predictions."""
        return _evaluate(self.name, self.metric, predictions, self.predictions)

    def shift(self, values: Float[Tensor, "prompt"]) -> float:
        """Distance from the whole model: of the metric's mean, or for outputs the worst prompt's; inf if not finite."""
        moved = values.max() if self.metric is None else (values - self.full).mean().abs()
        return moved.item() / self.scale if moved.isfinite() else torch.inf

    def linear(self, predictions: Float[Tensor, "prompt ..."], prompts: slice, seed: int) -> Float[Tensor, "prompt"]:
        """The quantity to take gradients of: the metric, or a sum of the outputs with random signs."""
        if self.metric is not None:
            return evaluate_part(self.name, self.metric, predictions, prompts, self.predictions.detach())
        signs = torch.randint(2, self.predictions.shape[1:], generator=torch.Generator().manual_seed(seed)) * 2 - 1
        return (predictions * signs.to(predictions)).flatten(1).sum(1)

    def check(self) -> None:
        """Raise ValueError for a metric that is not finite, or that never changes."""
        for values, when in ((self.full, "of the whole model"), (self.ablated, "with everything cut")):
            if n_bad := int((~values.isfinite()).sum()):
                raise ValueError(f"{self.name!r} {when} is not finite on {n_bad} of {len(values)} prompts: drop them")
        size = self.full.abs().mean() if self.metric is not None else self.predictions.abs().max()
        if not self.scale > 1e-6 * (size.item() + 1e-30):  # smaller changes are rounding
            raise ValueError(
                f"{self.name!r} does not change when every head and MLP is ablated: the metric is constant, the "
                f"reference equals the prompts, or the model reads only its embedding. Give others, or another method"
            )


@dataclass(frozen=True, eq=False)
class Problem:
    """A model as a graph, and the metric that its circuit has to keep."""

    graphs: tuple[EdgeGraph, ...]  # of the model, on the prompts: one for each thing that a cut edge carries
    objectives: tuple[Objective, ...]  # for each, the metric, and its values when nothing and when everything is cut
    replacement: Replacement
    advance: Callable[[int], object] = lambda _: None  # called with the number of runs after each batch

    @property
    def graph(self) -> EdgeGraph:
        """The first of the graphs; all have the same nodes and edges."""
        return self.graphs[0]

    @property
    def objective(self) -> Objective:
        """The first of the objectives."""
        return self.objectives[0]

    def measure(
        self, kept: Bool[Tensor, "cut edge"], number: int = 0, base: Bool[Tensor, "edge"] | None = None
    ) -> Float[Tensor, "cut prompt"]:
        """Measure the metric of runs with all but these edges cut, in one graph; see `EdgeGraph.iterate_cuts`."""
        values = []
        for _, predictions in self.graphs[number].iterate_cuts(
            kept, base=kept.new_ones(()).expand(kept.shape[1]) if base is None else base
        ):
            values += [self.objectives[number].measure(each) for each in predictions]
            self.advance(len(predictions))
        return torch.stack(values)

    def shifts(self, kept: Bool[Tensor, "cut edge"]) -> list[float]:
        """Measure the distance of each of these runs from the whole model: the largest over the graphs."""
        farthest = [0.0] * len(kept)
        for number, objective in enumerate(self.objectives):
            moved = [objective.shift(values) for values in self.measure(kept, number)]
            farthest = [max(pair) for pair in zip(farthest, moved, strict=True)]
        return farthest

    def within(
        self, kept: Bool[Tensor, "cut edge"], tolerance: float, base: Bool[Tensor, "edge"], *, quick: bool = False
    ) -> list[bool]:
        """Return which of these runs stay within a tolerance of the whole model in every graph.

        The quick answer is that of the one graph that refuses the most.
        """
        stays = torch.ones(len(kept), dtype=torch.bool)
        order = (*range(1, len(self.graphs)), 0)  # runs refused by one graph are not tried in the others
        for number in order[:1] if quick else order:
            left = stays.nonzero().flatten()
            values = self.measure(kept[left], number, base) if len(left) else ()
            stays[left] = torch.tensor([self.objectives[number].shift(each) <= tolerance for each in values]).bool()
        return stays.tolist()


def make_problem(
    model: object,
    prompts: Inputs,
    metrics: OneMetric,
    *,
    method: CutMethod | str | None,
    at: At | None,
    advance: Callable[[int], object] = lambda _: None,
) -> Problem:
    """Take a model apart on some prompts; errors are those of `find_circuit`."""
    if at is None:  # the query of points; for tokens the last position, if there is a metric
        at = "query" if metrics not in (None, "outputs") or isinstance(prompts, Prompts) else "positions"
    adapter = ModelAdapter(model, at)
    tokens = adapter.encode(prompts)
    if not adapter.n_layers or not tokens.numel():
        raise ValueError(f"layers and prompts needed, got {adapter.n_layers} layers and tokens {list(tokens.shape)}")
    name, metric = _name_metric(metrics, prompts, at)
    if metric is None and adapter.is_transformer and adapter.model.cfg.torch_dtype != torch.float64:
        # effects that the weights rule out have to be distinguished from rounding
        adapter = ModelAdapter(copy.deepcopy(adapter.model).double(), at)
        tokens = adapter.encode(prompts)
    method = method or ("any" if metric is None else "zero")
    replacement = method if isinstance(method, Replacement) else Replacement(cast(ReplacementMethod, method))
    references = _record_references(adapter, tokens, replacement)
    if metric is not None:  # a metric is of these prompts: it has no targets for additional streams
        references = [each for each in references if each[1] is None or len(each[1]) == len(tokens)]
    graphs: list[EdgeGraph] = []
    for writes, start in references:
        edges = graphs[0].edges if graphs else None
        graphs.append(EdgeGraph(adapter, tokens, writes, embedded=start, edges=edges))
    nothing = torch.zeros(1, len(graphs[0].edges), dtype=torch.bool, device=tokens.device)
    objectives = []
    for graph in graphs:
        whole, ablated = graph.run_cuts(torch.cat([~nothing, nothing]), base=~nothing[0])
        full, cut = (_evaluate(name, metric, predictions, whole) for predictions in (whole, ablated))
        scale = cut.max() if metric is None else (cut - full).mean().abs()
        objectives.append(Objective(name, metric, whole, full, cut, scale.item()))
    # With zero on cut edges, cutting everything can have no effect, for instance in a model that outputs 0. The scale
    # is then that of the graph in which it has the largest effect.
    largest = max(objectives, key=lambda each: each.scale)
    scaled = [replace(o, scale=largest.scale) if o.scale <= 1e-6 * largest.scale else o for o in objectives]
    for objective in (largest, *scaled):
        objective.check()
    return Problem(tuple(graphs), tuple(scaled), replacement, advance)


def _name_metric(metrics: OneMetric, prompts: Inputs, at: At) -> tuple[str, Metric | None]:
    """The name and function of the one metric, by default the loss of prompts with targets; None for the outputs."""
    if metrics == "outputs":
        return OUTPUTS, None
    if isinstance(metrics, str):
        raise ValueError(f"metrics must be a function or 'outputs', got {metrics!r}")
    named = name_metrics(metrics, prompts, at)
    if len(named) > 1 or (metrics is not None and not named):
        raise ValueError(f"metrics must be one metric, got {list(named) or 'none'}")
    return next(iter(named.items()), (OUTPUTS, None))


def _evaluate(name: str, metric: Metric | None, predictions: Tensor, whole: Tensor) -> Float[Tensor, "prompt"]:
    if metric is not None:
        return evaluate_metric(name, metric, predictions)
    return (predictions - whole).abs().flatten(1).amax(1)


def _record_references(
    adapter: ModelAdapter, tokens: Tensor, replacement: Replacement
) -> list[tuple[Tensor, Tensor | None]]:
    """Writes over cut edges `[node prompt pos d_model]`, and starting streams (None: the embedded tokens).

    For "any", edges carry zero or random mixtures, in runs from the prompts and from mixed embeddings.
    """
    others, method = encode_reference(replacement, adapter, tokens), replacement.method
    n, generator = len(tokens), torch.Generator().manual_seed(replacement.seed)
    if method == "zero":
        return [(_zeros(record_writes(adapter, tokens[:1]), n), None)]
    writes = record_writes(adapter, tokens if others is None else others)
    if method == "mean":
        return [(writes.mean(1, keepdim=True).expand(-1, n, -1, -1), None)]
    if method == "resample":
        return [(writes if others is not None else writes[:, derangement(n, generator).to(tokens.device)], None)]
    mixed, zeros = _mix(writes, generator), _zeros(writes, n)
    references: list[tuple[Tensor, Tensor | None]] = [(zeros, None)]
    for _ in range(-(-N_MIXTURES // n)):
        # the embedding is the first node: its write is the stream that a run starts from
        references += [(mixed, None), (zeros, _mix(writes[:1], generator)[0])]
        mixed = _mix(writes, generator)
    many = _mix(writes[:1].repeat(1, -(-N_STREAMS // n), 1, 1)[:, :N_STREAMS], generator)[0]
    mixed = _mix(record_writes(adapter, tokens, many), generator)
    return [*references, (_zeros(writes, N_STREAMS), many), (mixed, many)]


def _zeros(writes: Tensor, n_prompts: int) -> Tensor:
    """Zeros that take no memory."""
    return writes.new_zeros(1, 1, 1, 1).expand(len(writes), n_prompts, *writes.shape[2:])


def _mix(writes: Float[Tensor, "node prompt pos d_model"], generator: torch.Generator) -> Tensor:
    """At each place a random linear combination of a node's writes at random places of any prompt.

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
