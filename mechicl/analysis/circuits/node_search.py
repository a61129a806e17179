"""How a circuit is looked for: the metric of a model with some nodes or edges ablated, and the order to try them in."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.circuits.graph import EdgeGraph, check_graph, record_writes
from mechicl.analysis.interventions.ablation import Method, record_replacements
from mechicl.analysis.interventions.attribution import linearize_metrics
from mechicl.analysis.interventions.corruptions import derangement
from mechicl.analysis.interventions.metrics import Inputs, Metrics, evaluate_metric, name_metrics
from mechicl.analysis.interventions.runs import Experiment
from mechicl.memory import Budget
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edges import Edge, Node, list_edges, list_nodes
from mechicl.models.opening.sites import Site, check_hook
from mechicl.prompts import At

Shift = Callable[..., float]
"""How far the mean of a metric `[prompt]` is from the whole model's, or from that of a second argument."""


class PartialModel:
    """A model of which only some heads, MLPs or edges run; the others are ablated.

    Args:
        with_edges: refuse a model whose edges cannot be cut.
        advance: called after each run.

    The others as for `find_circuit`, which says what is refused too.
    """

    def __init__(
        self,
        model: Any,
        prompts: Inputs,
        metrics: Metrics,
        *,
        at: At,
        method: Method,
        reference: Inputs | None,
        seed: int,
        memory: float,
        with_edges: bool,
        advance: Callable[[], Any],
    ):
        adapter, named = ModelAdapter(model, at), name_metrics(metrics, prompts, at)
        if len(named) != 1:
            raise ValueError(f"a circuit carries one metric, got {list(named) or 'none'}: give metrics=")
        if not adapter.n_layers:
            raise ValueError("there is no layer to find a circuit in")
        check_hook(model, "blocks.0.attn.hook_z")
        if with_edges:
            check_graph(adapter)
        tokens = adapter.encode(prompts)
        if not len(tokens):
            raise ValueError("there are no prompts to find a circuit on")
        ((self.metric_name, self._metric),) = named.items()
        self.adapter, self.tokens, self._advance = adapter, tokens, advance
        self.method: Method = method
        self._reference, self._seed = reference, seed
        self.nodes = [node for node in list_nodes(adapter.model) if node.layer >= 0]
        self._experiment = Experiment(adapter, tokens, named, False, Budget(memory))
        names = sorted({site_of(node).hook_name for node in self.nodes})
        self._replacements = record_replacements(adapter, tokens, names, method, reference, seed, Budget(memory))
        # at most the metric without each node, and some more, in four copies
        self._baseline = self._experiment.run_baseline(4 * (len(self.nodes) + 4), self._replacements)

    def metric_without(self, groups: Sequence[Sequence[Node]]) -> list[Float[Tensor, "prompt"]]:
        """The metric with each group of nodes ablated."""
        cells = [tuple(site_of(node) for node in group) for group in groups if group]
        results = self._experiment.run_cells(self._baseline, cells, self._replacements, self._advance)
        ablated = iter(results.values[self.metric_name])
        whole = evaluate_metric(self.metric_name, self._metric, self._baseline.predictions)
        return [next(ablated) if group else whole for group in groups]

    def metric_with_only(self, edges: Sequence[Edge]) -> Float[Tensor, "prompt"]:
        """The metric with every edge cut but these."""
        self._advance()
        return evaluate_metric(self.metric_name, self._metric, self._graph.run(self._graph.mask(edges)))

    def estimate_effects(self) -> dict[Node, float]:
        """How much ablating each node would move the mean metric, to first order; all prompts are in memory at once."""
        named = self._experiment.metrics
        _, _, changes = linearize_metrics(self.adapter, self.tokens, self._replacements, named)
        effects = {}
        for node in self.nodes:
            change = changes[self.metric_name][site_of(node).hook_name]  # [prompt pos ...]
            change = change if node.head is None else change[:, :, node.head]
            effects[node] = change.flatten(1).sum(1).mean().abs().item()
        return effects

    @cached_property
    def _graph(self) -> EdgeGraph:
        """The model edge by edge; a cut edge carries what ablating its sender would put there."""
        if self.method == "resample":
            order = derangement(len(self.tokens), torch.Generator().manual_seed(self._seed))
            references = record_writes(self.adapter, self.tokens[order.to(self.tokens.device)])
        else:
            origin = self.tokens if self._reference is None else self.adapter.encode(self._reference)
            writes = record_writes(self.adapter, origin)
            mean = writes.mean(1, keepdim=True).expand(-1, len(self.tokens), -1, -1)
            references = torch.zeros_like(mean) if self.method == "zero" else mean
        return EdgeGraph(self.adapter, self.tokens, references)


def site_of(node: Node) -> Site:
    """Where a node's output is."""
    return Site("mlp_out", node.layer) if node.head is None else Site("z", node.layer, head=node.head)


def search_greedily(partial: PartialModel, shift: Shift, tolerance: float) -> list[Node]:
    """The nodes that are left when the one that matters least is taken away, as long as one matters little enough."""
    kept = list(partial.nodes)
    while kept:
        ablated = [node for node in partial.nodes if node not in kept]
        shifts = [shift(metric) for metric in partial.metric_without([[*ablated, node] for node in kept])]
        least = min(range(len(kept)), key=shifts.__getitem__)
        if shifts[least] > tolerance:
            break
        del kept[least]
    return kept


def search_by_attribution(partial: PartialModel, shift: Shift, tolerance: float) -> list[Node]:
    """As few of the nodes as the tolerance allows, in the order of a first-order estimate of what they do."""
    effects = partial.estimate_effects()
    order = sorted(partial.nodes, key=effects.__getitem__)  # least important first
    shifts = [shift(metric) for metric in partial.metric_without([order[:n] for n in range(len(order) + 1)])]
    n_ablated = max(n for n, moved in enumerate(shifts) if moved <= tolerance)
    return [node for node in partial.nodes if node not in order[:n_ablated]]


def search_edges(partial: PartialModel, kept: Sequence[Node], shift: Shift, tolerance: float) -> list[Edge]:
    """The edges between the embedding, the nodes kept and the output that the metric needs."""
    inside = [
        edge
        for edge in list_edges(partial.adapter.model)
        if (edge.sender.layer < 0 or edge.sender in kept) and (edge.receiver is None or edge.receiver in kept)
    ]
    whole = partial.metric_with_only(inside)
    alone = {edge: shift(partial.metric_with_only([e for e in inside if e != edge]), whole) for edge in inside}
    order = sorted(inside, key=alone.__getitem__)  # least important first
    low, high = 0, len(order)  # cutting the first `low` moves the metric little enough
    while low < high:
        middle = (low + high + 1) // 2
        if shift(partial.metric_with_only(order[middle:]), whole) <= tolerance:
            low = middle
        else:
            high = middle - 1
    needed = set(order[low:])
    return [edge for edge in inside if edge in needed]
