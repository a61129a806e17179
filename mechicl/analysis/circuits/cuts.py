"""Exact cuts: every edge whose removal changes nothing is removed, in groups, from the output back to the embedding."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.analysis.circuits.problem import Problem
from mechicl.models.opening.edges import EMBEDDING, Edge, Node


def cut_exactly(
    problem: Problem, sizes: Float[Tensor, "edge"], tolerance: float, *, candidates: Bool[Tensor, "edge"] | None = None
) -> Bool[Tensor, "edge"]:
    """The edges that are left when as many as can be are cut within a tolerance.

    Stages are taken from the output back. What writes only to nodes that nothing reads is cut without a run, since it
    cannot matter. Edges into the others are cut in groups: a group whose joint removal keeps the metric within the
    tolerance goes, another is halved, and an edge that cannot go alone stays. Runs start at the stage, since all before
    it is still whole. So at most about (edges kept) × log2(edges) runs are made, and little more than there are edges
    kept where the sizes tell them apart.

    Args:
        problem: the model, and what it has to keep.
        sizes: how much each edge is thought to matter: the order in which they are grouped, no more.
        tolerance: how far all cuts together may move it.
        candidates: the edges to begin with; by default all.
    """
    graph = problem.graph
    kept = torch.ones(len(graph.edges), dtype=torch.bool) if candidates is None else candidates.clone()
    kept &= on_paths(graph.edges, kept)
    whole_before = candidates is None or bool(candidates.all())
    for number in range(len(graph.stages) - 1, -1, -1):
        kept &= on_paths(graph.edges, kept)
        into = [edge for edge in graph.stages[number].numbers() if kept[edge]]
        _thin(problem, kept, into, sizes, tolerance, number if whole_before else 0)
    return kept & on_paths(graph.edges, kept)


def on_paths(edges: Sequence[Edge], kept: Bool[Tensor, "edge"]) -> Bool[Tensor, "edge"]:
    """Which of the edges kept lead to the output along edges that are kept; edges are in order of computation."""
    chosen, read = torch.zeros(len(edges), dtype=torch.bool), set[Node | None]([None])
    for number in range(len(edges) - 1, -1, -1):
        edge = edges[number]
        if kept[number] and edge.receiver in read:
            chosen[number] = True
            read.add(edge.sender)
    return chosen


def from_embedding(edges: Sequence[Edge], kept: Bool[Tensor, "edge"]) -> Bool[Tensor, "edge"]:
    """Which of the edges kept can be reached from the embedding along edges that are kept."""
    chosen, written = torch.zeros(len(edges), dtype=torch.bool), {EMBEDDING}
    for number, edge in enumerate(edges):
        if kept[number] and edge.sender in written:
            chosen[number] = True
            if edge.receiver is not None:
                written.add(edge.receiver)
    return chosen


def _thin(problem: Problem, kept: Tensor, into: Sequence[int], sizes: Tensor, tolerance: float, start: int) -> None:
    """Cut, in place, what can be cut of some edges into one stage."""
    groups = _first_groups(into, sizes)
    while groups:
        refused = _remove(problem, kept, groups, tolerance, start)
        halved = [(group[: len(group) // 2], group[len(group) // 2 :]) for group in refused if len(group) > 1]
        groups = [half for halves in halved for half in halves]


def _first_groups(into: Sequence[int], sizes: Tensor) -> list[list[int]]:
    """The edges that are thought to matter one by one, and the others, least important first, as one group."""
    order = sorted(into, key=lambda edge: (float(sizes[edge]), edge))
    largest = float(sizes.max()) if len(sizes) else 0.0
    rest = [edge for edge in order if not float(sizes[edge]) > 1e-6 * largest]
    return ([rest] if rest else []) + [[edge] for edge in order[len(rest) :]]


def _remove(problem: Problem, kept: Tensor, groups: list[list[int]], tolerance: float, start: int) -> list[list[int]]:
    """Cut, in place, as many of the groups as may go together; returns the others."""
    if not groups:
        return []
    alone = problem.shifts(torch.stack([_without(kept, group) for group in groups]), start)
    refused = [group for group, shift in zip(groups, alone, strict=True) if not shift <= tolerance]
    free = [group for group, shift in zip(groups, alone, strict=True) if shift <= tolerance]
    together = [edge for group in free for edge in group]
    if len(free) > 1 and not problem.shifts(_without(kept, together)[None], start)[0] <= tolerance:
        # one can stand in for another: one half first, then what may go beside it
        middle = len(free) // 2
        refused += _remove(problem, kept, free[:middle], tolerance, start)
        return refused + _remove(problem, kept, free[middle:], tolerance, start)
    kept[together] = False
    return refused


def _without(kept: Tensor, edges: Sequence[int]) -> Tensor:
    mask = kept.clone()
    mask[list(edges)] = False
    return mask
