"""Two circuits compared: shared, missing and false nodes and edges."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import pandas as pd

from mechicl.base.arguments import checked
from mechicl.models.opening.edges import EMBEDDING, Edge, Node
from mechicl.statistics import Result

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
        The parts as `shared_edges`, `missing_edges` (in the truth only), `false_edges` (in the circuit only), and the
        same for nodes; `precision("edges")` and `recall("edges")` are shares from 0 to 1. The embedding is not counted
        as a node, since every circuit begins there.

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
