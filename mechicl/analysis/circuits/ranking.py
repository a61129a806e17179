"""Edges in the order of their scores, and how well the order tells true edges from others."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from scipy.stats import rankdata
from torch import Tensor

from mechicl.analysis.circuits.comparison import NodesAndEdges
from mechicl.analysis.circuits.cuts import on_paths
from mechicl.analysis.circuits.graph import EdgeGraph
from mechicl.base.arguments import checked
from mechicl.models.opening.edges import EMBEDDING, Edge, Node


@runtime_checkable
class ScoredEdges(Protocol):
    """What `score_edges` returns, or anything like it."""

    @property
    def edges(self) -> Sequence[Edge]:
        """In any order."""
        ...

    @property
    def scores(self) -> Float[Tensor, "edge prompt"]:
        """How the metric changes when each is cut."""
        ...


Scores = ScoredEdges | Mapping[Edge, float] | Float[Tensor, "edge"]
"""How the metric changes when each edge is cut: by edge, or in the order of `list_edges`."""


def read_scores(scores: Scores, edges: Sequence[Edge], name: str = "scores") -> Float[Tensor, "edge"]:
    """A score for each of these edges.

    Raises:
        ValueError: scores of other edges, or that are not finite.
        TypeError: something else.
    """
    if not isinstance(scores, Tensor | Mapping | ScoredEdges):
        raise TypeError(
            f"{name} must be what score_edges returns, a number for each edge, or a tensor in the order of "
            f"list_edges(model): got {type(scores).__name__}"
        )
    if isinstance(scores, Tensor):
        if scores.shape != (len(edges),):
            raise ValueError(
                f"{name} must be [{len(edges)}], one for each of the model's edges: got {tuple(scores.shape)}"
            )
        values = scores.detach().cpu().double()
    else:
        by_edge = scores if isinstance(scores, Mapping) else _means(scores)
        known = set(edges)
        other = [edge for edge in by_edge if edge not in known]
        missing = [edge for edge in edges if edge not in by_edge]
        if other:
            raise ValueError(f"{name} are of another model: this one has no edge {other[0]}")
        if missing:
            raise ValueError(f"{name} miss {len(missing)} of the model's {len(edges)} edges, such as {missing[0]}")
        values = torch.tensor([float(by_edge[edge]) for edge in edges], dtype=torch.float64)
    bad = (~values.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"{name} are not finite for {len(bad)} edges, such as {edges[bad[0]]}: {values[bad[0]]}")
    return values


@checked
def auroc(scores: Scores, truth: NodesAndEdges | Collection[Edge], edges: Sequence[Edge] | None = None) -> float:
    """The chance that a true edge scores higher, in absolute value, than one that is not true; ties count one half.

    The area under the receiver operating characteristic: 1 if all true edges come first, 0.5 for scores that know
    nothing.

    Args:
        scores: by edge; those without an edge's name in the order of `edges`.
        truth: the true edges, or what has them.
        edges: those to tell apart, by default those that have scores.

    Raises:
        ValueError: no true edge or no other, true edges without a score, scores that are not finite.

    Example:
        >>> scores = {Edge(EMBEDDING, Node(0, head), "v"): float(head) for head in range(4)}
        >>> auroc(scores, [Edge(EMBEDDING, Node(0, head), "v") for head in (1, 3)])
        0.75
    """
    if edges is None:
        if isinstance(scores, Tensor):
            raise ValueError("scores without names need edges=list_edges(model)")
        edges = list(scores) if isinstance(scores, Mapping) else scores.edges
    values = read_scores(scores, edges).abs().numpy()
    true: Iterable[Edge] = truth.edges if isinstance(truth, NodesAndEdges) else truth
    true = set(true)
    absent = true - set(edges)
    if absent:
        raise ValueError(f"{len(absent)} true edges have no score, such as {next(iter(absent))}")
    n_true, n_false = len(true), len(edges) - len(true)
    if not n_true or not n_false:
        raise ValueError(f"there is nothing to tell apart: {n_true} true edges and {n_false} others")
    ranks = rankdata(values)[[edge in true for edge in edges]]  # ties share the mean of their ranks
    return float((ranks.sum() - n_true * (n_true + 1) / 2) / (n_true * n_false))


def rank_edges(scores: Float[Tensor, "edge"], *, absolute: bool = True, towards: float = 1.0) -> list[int]:
    """Numbers of the edges, the best first; ties in the order of computation.

    Args:
        scores: how the metric changes when each is cut.
        absolute: by size; otherwise by how far the metric goes towards where cutting everything takes it.
        towards: the change that cutting everything makes, of which the sign counts.
    """
    worth = scores.abs() if absolute else scores * (1 if towards > 0 else -1)
    return worth.argsort(descending=True, stable=True).tolist()


def keep_paths(graph: EdgeGraph, kept: Bool[Tensor, "edge"]) -> Bool[Tensor, "edge"]:
    """Which of the edges kept lie on a path of such edges from the embedding to the output."""
    fed: set[Node | None] = {EMBEDDING}
    forward = torch.zeros(len(graph.edges), dtype=torch.bool)
    for number, edge in enumerate(graph.edges):  # edges are in order of computation
        if kept[number] and edge.sender in fed:
            forward[number] = True
            fed |= set(graph.reached[number])
    return on_paths(graph, forward)


def _means(scores: ScoredEdges) -> dict[Edge, float]:
    return dict(zip(scores.edges, scores.scores.detach().double().mean(1).tolist(), strict=True))
