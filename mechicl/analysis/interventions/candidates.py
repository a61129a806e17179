"""What a circuit is looked for among: a model's heads and MLPs, and its metric without some of them."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from mechicl.analysis.interventions.ablation import Method, stand_ins
from mechicl.analysis.interventions.attribution import first_order
from mechicl.analysis.interventions.corruptions import derangement
from mechicl.analysis.interventions.edges import Edge, EdgeGraph, Node, check_graph, edges_of, nodes_of, written
from mechicl.analysis.interventions.metrics import measured
from mechicl.analysis.interventions.patching import Inputs, Metrics, hooks_of, named_metrics
from mechicl.analysis.interventions.runs import Base, base_run, bytes_held, run_cells
from mechicl.models.adapter import ModelAdapter
from mechicl.models.sites import Site
from mechicl.prompts import At

Moved = Callable[..., float]  # how far a metric is from the whole model's, or from another one


class Candidates:
    """The heads and MLPs of a model, and its metric without some of them or of the edges between them.

    Args as for `find_circuit`; `with_edges` asks for a model whose edges can be cut.
    """

    def __init__(
        self,
        model: Any,
        prompts: Inputs,
        metrics: Metrics,
        at: At,
        method: Method,
        reference: Inputs | None,
        seed: int,
        memory: float,
        with_edges: bool,
    ):
        self.named = named_metrics(metrics, prompts, at)
        if len(self.named) != 1:
            raise ValueError(f"a circuit carries one metric, got {list(self.named) or 'none'}: give metrics=")
        (self.name,) = self.named
        self.adapter, self._reference, self._seed = ModelAdapter(model, at), reference, seed
        self.method: Method = method
        hooks_of(self.adapter, "z")  # refuses a model without heads
        if with_edges:
            check_graph(self.adapter)
        self.tokens = self.adapter.encode(prompts)
        if not len(self.tokens):
            raise ValueError("there are no prompts to find a circuit on")
        self.all = [node for node in nodes_of(self.adapter) if node.layer >= 0]
        names = sorted({self.site(node).hook_name for node in self.all})
        self.values = stand_ins(self.adapter, self.tokens, names, method, reference, seed, memory)
        held = bytes_held(self.values)
        held += 4 * len(self.all) * len(self.tokens) * self.adapter.run(self.tokens[:1]).nbytes
        self.base: Base = base_run(self.adapter, self.tokens, held=held, memory=memory)

    @cached_property
    def graph(self) -> EdgeGraph:
        """The model edge by edge."""
        references = _references(self.adapter, self.tokens, self.method, self._reference, self._seed)
        return EdgeGraph(self.adapter, self.tokens, references)

    def keeping(self, edges: Sequence[Edge], bar: tqdm) -> Tensor:
        """The metric `[prompt]` with every edge cut but these."""
        bar.update()
        return measured(self.name, self.named[self.name], self.graph.run(self.graph.keeping(edges)))

    @staticmethod
    def site(node: Node) -> Site:
        """Where a node's output is."""
        return Site("mlp_out", node.layer) if node.head is None else Site("z", node.layer, head=node.head)

    def ablating(self, groups: Sequence[Sequence[Node]], bar: tqdm) -> list[Tensor]:
        """The metric `[prompt]` with each group of nodes ablated."""
        some = [i for i, group in enumerate(groups) if group]
        cells = [tuple(self.site(node) for node in groups[i]) for i in some]
        _, found = run_cells(
            self.adapter, self.base, cells, self.values, metrics=self.named, keep_predictions=False, bar=bar
        )
        out = [measured(self.name, self.named[self.name], self.base.unpatched)] * len(groups)
        for i, values in zip(some, found[self.name], strict=True):
            out[i] = values
        return out


def greedy(nodes: Candidates, moved: Moved, tolerance: float, bar: tqdm) -> list[Node]:
    """The nodes that are left when the one that matters least is taken away, as long as one matters little enough."""
    kept = list(nodes.all)
    while kept:
        rest = [node for node in nodes.all if node not in kept]
        shifts = [moved(metric) for metric in nodes.ablating([[*rest, node] for node in kept], bar)]
        least = min(range(len(kept)), key=shifts.__getitem__)
        if shifts[least] > tolerance:
            break
        del kept[least]
    return kept


def by_attribution(nodes: Candidates, moved: Moved, tolerance: float, bar: tqdm) -> list[Node]:
    """As few of the nodes as the tolerance allows, in the order of a first-order estimate of what they do."""
    _, _, products = first_order(nodes.adapter, nodes.tokens, nodes.values, nodes.named)
    effects = {}
    for node in nodes.all:
        product = products[nodes.name][nodes.site(node).hook_name]
        effects[node] = (
            (product if node.head is None else product[:, :, node.head]).flatten(1).sum(1).mean().abs().item()
        )
    order = sorted(nodes.all, key=effects.__getitem__)  # least important first
    shifts = [moved(metric) for metric in nodes.ablating([order[:n] for n in range(len(order) + 1)], bar)]
    most = max(n for n, shift in enumerate(shifts) if shift <= tolerance)
    return [node for node in nodes.all if node not in order[:most]]


def needed_edges(nodes: Candidates, kept: Sequence[Node], moved: Moved, tolerance: float, bar: tqdm) -> list[Edge]:
    """The edges between the embedding, the nodes kept and the output that the metric needs."""
    inside = [
        edge
        for edge in edges_of(nodes.adapter)
        if (edge.sender.layer < 0 or edge.sender in kept) and (edge.receiver is None or edge.receiver in kept)
    ]
    whole = nodes.keeping(inside, bar)
    alone = {edge: moved(nodes.keeping([e for e in inside if e != edge], bar), whole) for edge in inside}
    order = sorted(inside, key=alone.__getitem__)  # least important first
    low, high = 0, len(order)  # cutting `low` is fine
    while low < high:
        middle = (low + high + 1) // 2
        fine = moved(nodes.keeping(order[middle:], bar), whole) <= tolerance
        low, high = (middle, high) if fine else (low, middle - 1)
    needed = set(order[low:])
    return [edge for edge in inside if edge in needed]


def _references(
    adapter: ModelAdapter, tokens: Tensor, method: Method, reference: Inputs | None, seed: int
) -> Float[Tensor, "node prompt pos d_model"]:
    """What each node writes where an edge is cut: what `stand_ins` puts in its place."""
    if method == "resample":
        return written(adapter, tokens[derangement(len(tokens), torch.Generator().manual_seed(seed)).to(tokens.device)])
    writes = written(adapter, tokens if reference is None else adapter.encode(reference))
    if method == "zero":
        return torch.zeros_like(writes)
    return writes.mean(1, keepdim=True).expand(-1, len(tokens), -1, -1)
