"""Circuits: the fewest heads, MLPs and edges that carry a metric when everything else is ablated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from mechicl.analysis.interventions.ablation import Method, stand_ins
from mechicl.analysis.interventions.attribution import first_order
from mechicl.analysis.interventions.corruptions import derangement
from mechicl.analysis.interventions.edges import Edge, EdgeGraph, Node, check_graph, edges_of, nodes_of, written
from mechicl.analysis.interventions.metrics import Metric, measured
from mechicl.analysis.interventions.opened import Opened, Read
from mechicl.analysis.interventions.patching import Inputs, Metrics, hooks_of, named_metrics
from mechicl.analysis.interventions.runs import MEMORY, Base, base_run, run_cells
from mechicl.analysis.sites import Site
from mechicl.learners import Interval, interval, ratio_interval

Search = Literal["greedy", "attribution"]
Moved = Callable[[Tensor], float]  # how far a metric is from the whole model's


@dataclass(frozen=True, eq=False)
class Circuit:
    """The part of a model that carries a metric, and how well it does alone.

    Metrics are per prompt; "ablated" parts have what `method` puts in their place.

    Attributes:
        nodes: heads and MLPs of the circuit, in order of computation.
        edges: connections of the circuit, from the embedding to the output; none if they were not looked for.
        metric: its name.
        method: of ablation.
        full: the metric of the whole model, `[prompt]`.
        ablated: with every head and MLP ablated, `[prompt]`.
        alone: with all but the circuit's nodes ablated, `[prompt]`.
        without: with the circuit's nodes ablated and all others in place, `[prompt]`.
        edges_alone: with every edge cut but the circuit's, `[prompt]`; as `alone` where no edges were looked for.
        node_effects: change of the metric when the circuit loses one of its nodes too, `[node prompt]`.
        edge_effects: the same for one of its edges, `[edge prompt]`.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    metric: str
    method: Method
    full: Float[Tensor, "prompt"]
    ablated: Float[Tensor, "prompt"]
    alone: Float[Tensor, "prompt"]
    without: Float[Tensor, "prompt"]
    edges_alone: Float[Tensor, "prompt"]
    node_effects: Float[Tensor, "node prompt"]
    edge_effects: Float[Tensor, "edge prompt"]

    @property
    def heads(self) -> list[tuple[int, int]]:
        """Layer and number of its heads."""
        return [(node.layer, node.head) for node in self.nodes if node.head is not None]

    def faithfulness(self, level: float = 0.95) -> Interval:
        """Share of the metric that the circuit keeps when all else is ablated, 1 for all of it.

        `(alone - ablated) / (full - ablated)` of means over prompts, for the edges where there are edges.
        """
        return ratio_interval(self.edges_alone - self.ablated, self.full - self.ablated, level)

    def node_faithfulness(self, level: float = 0.95) -> Interval:
        """The same of the nodes with all edges between them."""
        return ratio_interval(self.alone - self.ablated, self.full - self.ablated, level)

    def completeness(self, level: float = 0.95) -> Interval:
        """Share of the metric that is lost without the circuit's nodes, 1 if the rest of the model has none of it."""
        return ratio_interval(self.full - self.without, self.full - self.ablated, level)

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """One row a node, then one an edge: the change of the metric without it, with its interval over prompts."""
        rows = []
        for kind, parts, effects in (
            ("node", self.nodes, self.node_effects),
            ("edge", self.edges, self.edge_effects),
        ):
            for part, effect in zip(parts, effects, strict=True):
                found = interval(effect, level)
                rows.append(
                    {"kind": kind, "part": str(part), "effect": found.mean, "low": found.low, "high": found.high}
                )
        return pd.DataFrame(rows, columns=["kind", "part", "effect", "low", "high"])

    def __str__(self) -> str:
        return (
            f"{', '.join(map(str, self.nodes)) or 'no node'}; {len(self.edges)} edges; faithfulness "
            f"{self.faithfulness()}, completeness {self.completeness()}"
        )


def find_circuit(
    model: Any,
    prompts: Inputs,
    metrics: Metrics = None,
    *,
    search: Search = "greedy",
    method: Method = "mean",
    reference: Inputs | None = None,
    tolerance: float = 0.05,
    edges: bool = True,
    read: Read = "query",
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = False,
) -> Circuit:
    """The heads and MLPs that a metric needs, and the edges between them, verified by ablating everything else.

    Nodes: "greedy" ablates one after the other, always the one whose loss changes the mean metric least, until the
    next would move it by more than `tolerance` of what ablating everything does. "attribution" orders nodes by one
    gradient and keeps as few of the first as the tolerance allows: quicker, and blind to what only shows together.
    Edges (our transformers only): among the nodes kept, as many of the least important are cut, by what cutting each
    alone does, as the same tolerance allows.

    Args:
        model: ours; without edges any of TransformerLens' protocol.
        prompts: `Prompts`, or token ids `[prompt pos]`.
        metrics: one metric, as for `patch`; by default the squared "loss".
        search: see above.
        method: of ablation, as for `ablate`.
        reference: the prompts that means are taken over.
        tolerance: of the mean metric, relative to the change when everything is ablated.
        edges: whether to look for edges too: a run for each edge between the nodes that are kept.
        read: as for `patch`.
        seed: of "resample".
        memory: bound in bytes on the sweeps over nodes; edges need what one run of all prompts takes a few times.
        progress: show a progress bar.

    Raises:
        ValueError: as for `ablate`; several metrics, a tolerance that is not positive, an unknown search, a metric
            that does not change when everything is ablated, or edges of a model of another kind.

    Example:
        >>> find_circuit(constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0), ids, loss).heads
        [(0, 0), (1, 0)]

    Source: Wang et al. 2023, section 4 (faithfulness, completeness); Conmy et al. 2023 (edges); Syed et al. 2023
    (attribution).
    """
    if search not in ("greedy", "attribution"):
        raise ValueError(f"search={search!r} is not one of ('greedy', 'attribution')")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    named = named_metrics(metrics, prompts, read)
    if len(named) != 1:
        raise ValueError(f"a circuit carries one metric, got {list(named) or 'none'}: give metrics=")
    opened = Opened(model, read)
    hooks_of(opened, "z")  # refuses a model without heads
    if edges:
        check_graph(opened)
    tokens = opened.tokens(prompts)
    if not len(tokens):
        raise ValueError("there are no prompts to find a circuit on")
    nodes = _Nodes(opened, tokens, named, method, reference, seed, memory)
    (name,) = named
    with tqdm(disable=not progress, unit="run", desc="circuit", leave=False) as bar:
        full, ablated = nodes.ablating([[], nodes.all], bar)
        scale = (full - ablated).mean().abs().item()
        if not scale > 1e-6 * (full.abs().mean().item() + 1e-30):
            raise ValueError(f"{name!r} does not change when every head and MLP is ablated: there is nothing to find")

        def moved(metric: Tensor) -> float:
            return abs((metric - full).mean().item()) / scale

        kept = (_greedy if search == "greedy" else _by_attribution)(nodes, moved, tolerance, bar)
        rest = [node for node in nodes.all if node not in kept]
        alone, without, *fewer = nodes.ablating([rest, kept, *([*rest, node] for node in kept)], bar)
        effects = torch.stack([metric - alone for metric in fewer]) if fewer else full.new_zeros(0, len(full))
        chosen: list[Edge] = []
        edges_alone, edge_effects = alone, full.new_zeros(0, len(full))
        if edges:
            chosen, edges_alone, edge_effects = _edges(nodes, kept, method, reference, seed, moved, tolerance, bar)
    return Circuit(
        tuple(kept), tuple(chosen), name, method, full, ablated, alone, without, edges_alone, effects, edge_effects
    )


class _Nodes:
    """The heads and MLPs of a model, and its metric without some of them."""

    def __init__(
        self,
        opened: Opened,
        tokens: Tensor,
        named: dict[str, Metric],
        method: Method,
        reference: Inputs | None,
        seed: int,
        memory: float,
    ):
        self.opened, self.tokens, (self.name,), self.named = opened, tokens, named, named
        self.all = [node for node in nodes_of(opened) if node.layer >= 0]
        names = sorted({self.site(node).hook_name for node in self.all})
        self.values = stand_ins(opened, tokens, names, method, reference, seed, memory)
        held = sum(of.untyped_storage().nbytes() for of in self.values.values())
        held += 4 * len(self.all) * len(tokens) * opened.run(tokens[:1]).nbytes
        self.base: Base = base_run(opened, tokens, held=held, memory=memory)

    @staticmethod
    def site(node: Node) -> Site:
        """Where a node's output is."""
        return Site("mlp_out", node.layer) if node.head is None else Site("z", node.layer, head=node.head)

    def ablating(self, groups: Sequence[Sequence[Node]], bar: tqdm) -> list[Tensor]:
        """The metric `[prompt]` with each group of nodes ablated."""
        some = [i for i, group in enumerate(groups) if group]
        cells = [tuple(self.site(node) for node in groups[i]) for i in some]
        _, found = run_cells(
            self.opened, self.base, cells, self.values, metrics=self.named, keep_predictions=False, bar=bar
        )
        out = [measured(self.name, self.named[self.name], self.base.unpatched)] * len(groups)
        for i, values in zip(some, found[self.name], strict=True):
            out[i] = values
        return out


def _greedy(nodes: _Nodes, moved: Moved, tolerance: float, bar: tqdm) -> list[Node]:
    kept = list(nodes.all)
    while kept:
        rest = [node for node in nodes.all if node not in kept]
        shifts = [moved(metric) for metric in nodes.ablating([[*rest, node] for node in kept], bar)]
        least = min(range(len(kept)), key=shifts.__getitem__)
        if shifts[least] > tolerance:
            break
        del kept[least]
    return kept


def _by_attribution(nodes: _Nodes, moved: Moved, tolerance: float, bar: tqdm) -> list[Node]:
    _, _, products = first_order(nodes.opened, nodes.tokens, nodes.values, nodes.named)
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


def _edges(
    nodes: _Nodes,
    kept: Sequence[Node],
    method: Method,
    reference: Inputs | None,
    seed: int,
    moved: Moved,
    tolerance: float,
    bar: tqdm,
) -> tuple[list[Edge], Tensor, Tensor]:
    """The edges of a circuit, the metric with only these, and its change without each."""
    opened, metric = nodes.opened, nodes.named[nodes.name]
    graph = EdgeGraph(opened, nodes.tokens, _references(opened, nodes.tokens, method, reference, seed))

    def keeping(edges: Sequence[Edge]) -> Tensor:
        bar.update()
        return measured(nodes.name, metric, graph.run(graph.keeping(edges)))

    inside = [
        edge
        for edge in edges_of(opened)
        if (edge.sender.layer < 0 or edge.sender in kept) and (edge.receiver is None or edge.receiver in kept)
    ]
    whole = keeping(inside)
    alone = {edge: abs((keeping([e for e in inside if e != edge]) - whole).mean().item()) for edge in inside}
    order = sorted(inside, key=alone.__getitem__)  # least important first
    low, high = 0, len(order)  # cutting `low` is fine
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if moved(keeping(order[middle:])) <= tolerance else (low, middle - 1)
    chosen = [edge for edge in inside if edge in set(order[low:])]
    found = keeping(chosen)
    fewer = [keeping([e for e in chosen if e != edge]) - found for edge in chosen]
    return chosen, found, torch.stack(fewer) if fewer else found.new_zeros(0, len(found))


def _references(
    opened: Opened, tokens: Tensor, method: Method, reference: Inputs | None, seed: int
) -> Float[Tensor, "node prompt pos d_model"]:
    """What each node writes where an edge is cut: what `stand_ins` puts in its place."""
    if method == "resample":
        return written(opened, tokens[derangement(len(tokens), torch.Generator().manual_seed(seed)).to(tokens.device)])
    writes = written(opened, tokens if reference is None else opened.tokens(reference))
    if method == "zero":
        return torch.zeros_like(writes)
    return writes.mean(1, keepdim=True).expand(-1, len(tokens), -1, -1)
