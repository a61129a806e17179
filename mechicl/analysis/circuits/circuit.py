"""A circuit: its nodes and edges, the metric with and without them, and its difference from another circuit."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.models.opening.sites import EMBEDDING, Edge, Node
from mechicl.statistics import UNBOUNDED, Interval, Result, interval, ratio_interval
from mechicl.statistics.results import largest

PartKind = Literal["nodes", "edges"]
KINDS: tuple[PartKind, ...] = ("nodes", "edges")
STANDINGS = ("shared", "missing", "false")


@runtime_checkable
class NodesAndEdges(Protocol):
    """Anything with nodes (heads, MLPs, perhaps the embedding) and edges, from the embedding to the output."""

    @property
    def nodes(self) -> Iterable[Node]: ...  # noqa: D102
    @property
    def edges(self) -> Iterable[Edge]: ...  # noqa: D102


@dataclass(frozen=True, eq=False)
class CircuitComparison(Result):
    """The difference of a circuit from the truth, or from another circuit.

    "Shared" nodes and edges are in both, "missing" ones in the truth only, "false" ones in the circuit only.
    """

    shared_nodes: tuple[Node, ...]
    missing_nodes: tuple[Node, ...]
    false_nodes: tuple[Node, ...]
    shared_edges: tuple[Edge, ...]
    missing_edges: tuple[Edge, ...]
    false_edges: tuple[Edge, ...]

    @property
    def is_exact(self) -> bool:
        """True if nothing is missing and nothing is false."""
        return not (self.missing_nodes or self.false_nodes or self.missing_edges or self.false_edges)

    def precision(self, kind: PartKind = "edges") -> float:
        """Return the share of the circuit's nodes or edges that are in the truth; NaN if it has none."""
        shared, _, false = self._parts(kind)
        return len(shared) / n if (n := len(shared) + len(false)) else math.nan

    def recall(self, kind: PartKind = "edges") -> float:
        """Return the share of the truth's nodes or edges that are in the circuit; NaN if it has none."""
        shared, missing, _ = self._parts(kind)
        return len(shared) / n if (n := len(shared) + len(missing)) else math.nan

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """Make a table of nodes, then edges: each is shared, missing or false; `level` is unused."""
        rows = [(kind[:-1], str(part), standing) for standing, kind, parts in self._by_standing() for part in parts]
        return pd.DataFrame(rows, columns=["kind", "part", "standing"])

    def counts(self) -> list[str]:
        """Return the numbers of nodes and edges that are found and false, as text: "3 of 4 nodes found, 1 false"."""
        several = ((kind, self._parts(kind)) for kind in KINDS)
        return [f"{len(s)} of {len(s) + len(m)} {kind} found, {len(f)} false" for kind, (s, m, f) in several]

    def _parts(self, kind: PartKind) -> list[Sequence[Node | Edge]]:
        return [getattr(self, f"{standing}_{kind}") for standing in STANDINGS]

    def _by_standing(self) -> list[tuple[str, PartKind, Sequence[Node | Edge]]]:
        return [(s, kind, parts) for kind in KINDS for s, parts in zip(STANDINGS, self._parts(kind), strict=True)]

    def __str__(self) -> str:
        wrong = dict.fromkeys(KINDS, "")
        for standing, kind, parts in self._by_standing():
            if parts and standing != "shared":
                wrong[kind] += f"; {standing}: {_listed(parts)}"
        return "\n".join(line + wrong[kind] for kind, line in zip(KINDS, self.counts(), strict=True))

    def _lines(self) -> list[tuple[str, str]]:
        return [(f"{standing} {kind}", _listed(parts) or "none") for standing, kind, parts in self._by_standing()]


@checked
def compare_circuits(circuit: NodesAndEdges, truth: NodesAndEdges) -> CircuitComparison:
    """Compare a circuit with the truth, or with another circuit: shared, missing and false nodes and edges.

    Args:
        circuit: anything with `nodes` and `edges`, such as the result of `find_circuit`.
        truth: the true circuit, or another one of the same model.

    Returns:
        A `CircuitComparison`; `precision("edges")` and `recall("edges")` are shares from 0 to 1. The embedding is not
        counted as a node, since every circuit begins there.

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=2, seed=0)
        >>> ids = torch.randint(16, (16, 16)).repeat(1, 2)
        >>> kinds = [find_circuit(induction, ids, next_token_loss(ids[:, 0]), method=m) for m in ("zero", "mean")]
        >>> print(compare_circuits(*kinds))
    """
    sizes = [getattr(graph, "n_nodes", None) for graph in (circuit, truth)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ValueError(f"circuits of different models: one has {sizes[0]} heads and MLPs, the other {sizes[1]}")
    nodes, true_nodes = (set(graph.nodes) - {EMBEDDING} for graph in (circuit, truth))
    edges, true_edges = set(circuit.edges), set(truth.edges)
    shared_nodes, missing_nodes, false_nodes = (
        tuple(sorted(some, key=_place)) for some in (nodes & true_nodes, true_nodes - nodes, nodes - true_nodes)
    )
    shared, missing, false = map(order_edges, (edges & true_edges, true_edges - edges, edges - true_edges))
    return CircuitComparison(shared_nodes, missing_nodes, false_nodes, shared, missing, false)


def order_edges(edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """Sort edges by receiver in order of computation, then by its input, then by sender."""
    return tuple(sorted(edges, key=lambda edge: (_place(edge.receiver), "qkv".find(edge.by), _place(edge.sender))))


def _place(node: Node | None) -> tuple[float, float]:
    if node is None:  # the output comes last
        return math.inf, 0.0
    return node.layer, math.inf if node.head is None else node.head


def _listed(parts: Sequence[Node | Edge], most: int = 12) -> str:
    names = ", ".join(map(str, parts[:most]))
    return f"{names}, and {len(parts) - most} more" if len(parts) > most else names


if TYPE_CHECKING:
    import networkx

OUTPUT = "output"
"""The name of the read-out in a graph."""
N_LISTED = 5
"""Parts that a printed circuit lists."""


@dataclass(frozen=True, eq=False)
class Circuit(Result):
    """The part of a model that carries a metric, and how well it does alone; see `find_circuit`.

    Attributes:
        nodes: heads and MLPs of the circuit, in order of computation.
        edges: connections of the circuit, from the embedding to the output.
        method: replacement of ablated parts' writes and cut edges' values, such as "zero"; see `find_circuit`.
        full: the metric of the whole model, `[prompt]`.
        ablated: with all edges cut, `[prompt]`.
        alone: with all but the circuit's nodes ablated, `[prompt]`.
        without: with the circuit's nodes ablated and all others in place, `[prompt]`.
        edges_alone: with every edge cut but the circuit's, `[prompt]`.
        node_effects: change of the metric when the circuit loses one of its nodes too, `[node prompt]`; NaN where it
            was not measured.
        edge_effects: the same for its edges, `[edge prompt]`.
        n_nodes: number of heads and MLPs of the model.
        subsets: sets of the circuit's nodes that were removed from it and from the model; see `measure_circuit`.
        alone_without: the metric of the circuit without each subset, `[subset prompt]`.
        whole_without: the metric of the model without each subset, `[subset prompt]`.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    metric: str
    method: str
    full: Float[Tensor, "prompt"]
    ablated: Float[Tensor, "prompt"]
    alone: Float[Tensor, "prompt"]
    without: Float[Tensor, "prompt"]
    edges_alone: Float[Tensor, "prompt"]
    node_effects: Float[Tensor, "node prompt"]
    edge_effects: Float[Tensor, "edge prompt"]
    n_nodes: int
    subsets: tuple[tuple[Node, ...], ...] = ()
    alone_without: Float[Tensor, "subset prompt"] | None = None
    whole_without: Float[Tensor, "subset prompt"] | None = None

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The heads of the circuit, as (layer, head)."""
        return [(node.layer, node.head) for node in self.nodes if node.head is not None]

    def faithfulness(self, level: float = 0.95) -> Interval:
        """Measure the share of the metric that the circuit's edges keep when everything else is cut, 1 for all of it.

        `(edges_alone - ablated) / (full - ablated)` of means over prompts. On the prompts that the circuit was found on
        it is within the tolerance of 1 by construction: see `measure_circuit`. Where `full` is near 0, as a good
        model's loss is, at a share of 0.95 the metric may still be many times `full`.
        """
        return ratio_interval(self.edges_alone - self.ablated, self.full - self.ablated, level)

    def completeness(self, level: float = 0.95) -> Interval:
        """Measure the share of the metric that is lost without the circuit's nodes, 1 if the others carry none of it.

        `(full - without) / (full - ablated)` of means over prompts; NaN for a circuit of all nodes. Wang et al. 2023
        remove subsets of the circuit from it and from the model; here it is the whole circuit, and `incompleteness` has
        smaller subsets.
        """
        if len(self.nodes) == self.n_nodes:
            return Interval(math.nan, math.nan, math.nan, len(self.full), level)
        return ratio_interval(self.full - self.without, self.full - self.ablated, level)

    def incompleteness(self, level: float = 0.95) -> dict[tuple[Node, ...], Interval]:
        """Measure the difference of circuit and model without each subset of nodes, as a share of the whole effect.

        `(alone_without - whole_without) / (full - ablated)` of means over prompts: near 0 for every subset if the
        circuit has everything that does the task (Wang et al. 2023, section 4, who take the absolute value). Empty
        without `measure_circuit(n_subsets=...)`.
        """
        if self.alone_without is None or self.whole_without is None:
            return {}
        differences, gained = self.alone_without - self.whole_without, self.full - self.ablated
        pairs = zip(self.subsets, differences, strict=True)
        return {subset: ratio_interval(difference, gained, level) for subset, difference in pairs}

    def minimality(self, level: float = 0.95) -> dict[Node | Edge, Interval]:
        """Measure the share of the metric that the circuit loses without each of its parts: 0 if it is not needed.

        `effect / (ablated - full)` of means over prompts; parts whose effect was not measured are left out. Wang et al.
        2023 remove a part together with others that may compensate for it; here each is removed alone.
        """
        gained = self.ablated - self.full
        return {part: ratio_interval(effect, gained, level) for part, effect in self._measured()}

    def effects(self, level: float = 0.95) -> dict[Node | Edge, Interval]:
        """Return the mean change of the metric without each node, then each edge, if measured, with intervals."""
        return {part: interval(effect, level, within=UNBOUNDED) for part, effect in self._measured()}

    def _measured(self) -> list[tuple[Node | Edge, Tensor]]:
        parts: list[Node | Edge] = [*self.nodes, *self.edges]
        pairs = zip(parts, [*self.node_effects, *self.edge_effects], strict=True)
        return [(part, effect) for part, effect in pairs if not effect.isnan().all()]

    # ---- as tables, text and graphs ----

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """Make a table of nodes, then edges: the change of the metric without each, with its interval over prompts."""
        effects, rows = self.effects(level), []
        for part in (*self.nodes, *self.edges):
            mean = effects.get(part, Interval(math.nan, math.nan, math.nan, len(self.full), level))
            rows.append(("node" if isinstance(part, Node) else "edge", str(part), mean.mean, mean.low, mean.high))
        return pd.DataFrame(rows, columns=["kind", "part", "effect", "low", "high"])

    def edge_list(self) -> str:
        """List the edges, a line each, by receiver in order of computation, with the metric's change without them."""
        effects = self.effects()
        return _table_of([(edge, effects.get(edge)) for edge in order_edges(self.edges)]) or "no edges"

    def to_networkx(self) -> "networkx.MultiDiGraph":
        """Convert the circuit to a graph of networkx, from "embedding" to "output".

        Nodes are named as they print ("head 0.2", "MLP 1") and have their `kind`, `layer` and `head`; the key of an
        edge is the receiver's input: "q", "k", "v" or "". Where it was measured, both have their `effect` with the ends
        of its interval, `low` and `high`. No attribute is None, since most file formats of networkx cannot write it.
        """
        import networkx  # takes 0.1 s, and few users need it

        effects = self.effects()

        def measured(part: Node | Edge) -> dict[str, float]:
            mean = effects.get(part)
            return {} if mean is None else mean.columns("effect")

        graph = networkx.MultiDiGraph(metric=self.metric, method=self.method)
        graph.add_node(str(EMBEDDING), kind="embedding", layer=-1)
        for node in self.nodes:
            where: dict[str, Any] = {"kind": "MLP"} if node.head is None else {"kind": "head", "head": node.head}
            graph.add_node(str(node), layer=node.layer, **where, **measured(node))
        graph.add_node(OUTPUT, kind="output", layer=1 + max((node.layer for node in self.nodes), default=-1))
        for edge in self.edges:
            receiver = OUTPUT if edge.receiver is None else str(edge.receiver)
            graph.add_edge(str(edge.sender), receiver, key=edge.by, by=edge.by, **measured(edge))
        return graph

    def __str__(self) -> str:
        """Summarize the circuit, and list the edges (or nodes) with the strongest effects, if these were measured."""
        metrics = {"whole": self.full, "alone": self.edges_alone, "ablated": self.ablated}
        whole = len(self.nodes) == self.n_nodes
        names = ", ".join(map(str, self.nodes[:N_LISTED])) or "no node"
        if len(self.nodes) > N_LISTED:
            names = f"{len(self.nodes)} of {self.n_nodes} nodes"
        summary = (
            f"{names}{' (the whole model)' if whole else ''}; {len(self.edges)} edges; {self.metric} "
            f"{', '.join(f'{metric.mean():.4g} {name}' for name, metric in metrics.items())}; "
            f"faithfulness {self.faithfulness()}{'' if whole else f', completeness {self.completeness()}'}"
        )
        if not whole and len(self.nodes) > self.n_nodes / 2:
            summary += "\nMost of the model is needed for this share; `circuit_curve` has sizes for smaller ones."
        effects = self.effects()
        edges = [part for part in effects if isinstance(part, Edge)] or list(effects)
        order, tie = largest([abs(effects[part].mean) for part in edges], N_LISTED)
        strongest = [edges[i] for i in order]
        if not strongest:
            return summary
        kind = "edges" if isinstance(strongest[0], Edge) else "nodes"
        counts = f"{len(strongest)} strongest of {len(edges)} {kind}{tie and f' ({tie})'}"
        title = f"change of the metric without each of the {counts}:"
        return f"{summary}\n{title}\n{_table_of([(part, effects[part]) for part in strongest])}"


def _table_of(parts: Sequence[tuple[Node | Edge, Interval | None]]) -> str:
    width = max((len(str(part)) for part, _ in parts), default=0)
    return "\n".join(str(part) if effect is None else f"{part!s:<{width}}  {effect}" for part, effect in parts)
