"""Rules that select edges: exact cuts in groups, ACDC's cuts one by one, or the strongest by their scores."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.analysis.circuits.problem import Problem
from mechicl.models.opening.edge_graph import EdgeGraph
from mechicl.models.opening.edges import EMBEDDING, Node


def cut_exactly(
    problem: Problem, sizes: Float[Tensor, "edge"], tolerance: float, *, candidates: Bool[Tensor, "edge"] | None = None
) -> Bool[Tensor, "edge"]:
    """Cut as many edges as possible within a tolerance (the change of the metric by all cuts); return the others.

    Stages are taken from the output back. Edges are cut in groups, ordered by `sizes`: a group whose removal keeps the
    metric is cut, another is halved, and an edge that cannot be cut alone stays. That takes about
    (edges kept) × log2(edges) runs, each of the nodes after the group only; edges into unread nodes take none.
    """
    edges, stages = problem.graph.edges, problem.graph.stages
    candidates = torch.ones(len(edges), dtype=torch.bool) if candidates is None else candidates
    cutter = _Cutter(problem, tolerance, on_paths(problem.graph, candidates))
    for number in range(len(stages) - 1, -1, -1):
        cutter.kept &= on_paths(problem.graph, cutter.kept)
        cutter.thin(number, sizes)
    return cutter.kept & on_paths(problem.graph, cutter.kept)


class _Cutter:
    """The edges that are kept so far, and attempts to cut more of them."""

    def __init__(self, problem: Problem, tolerance: float, kept: Bool[Tensor, "edge"]):
        self.problem, self.tolerance, self.kept, self.base = problem, tolerance, kept, kept

    def thin(self, stage: int, sizes: Float[Tensor, "edge"]) -> None:
        """Cut the edges into one stage that can be cut; those into later stages were thinned before."""
        self.base = self.kept.clone()
        into = [edge for edge in self.problem.graph.stages[stage].numbers() if self.kept[edge]]
        order = sorted(into, key=lambda edge: (float(sizes[edge]), edge))
        # edges with a size one by one, the others as one group
        small = [edge for edge in order if not float(sizes[edge]) > 1e-6 * float(sizes.max())]
        groups = ([small] if small else []) + [[edge] for edge in order[len(small) :]]
        while groups:
            refused = self._remove(groups)
            groups = [half for g in refused if len(g) > 1 for half in (g[: len(g) // 2], g[len(g) // 2 :])]

    def _remove(self, groups: list[list[int]]) -> list[list[int]]:
        """Cut as many of the groups as can be cut together; returns the others."""
        if not groups:
            return []
        alone = self._can_be_cut(groups, quick=True)
        refused = [group for group, free in zip(groups, alone, strict=True) if not free]
        cut = [group for group, free in zip(groups, alone, strict=True) if free]
        together = [edge for group in cut for edge in group]
        if cut and not self._can_be_cut([together])[0]:
            if len(cut) == 1:
                return refused + cut
            # some cannot be cut, or one can compensate for another: cut one half first, then the other
            middle = len(cut) // 2
            refused += self._remove(cut[:middle])
            return refused + self._remove(cut[middle:])
        self.kept[together] = False
        return refused

    def _can_be_cut(self, groups: Sequence[Sequence[int]], *, quick: bool = False) -> list[bool]:
        masks = torch.stack([_without(self.kept, group) for group in groups])
        # a graph computes the nodes of its base once, so the graphs that are seldom run keep one for the whole stage
        return self.problem.within(masks, self.tolerance, self.kept if quick else self.base, quick=quick)


def cut_one_by_one(problem: Problem, tolerance: float) -> Bool[Tensor, "edge"]:
    """Cut edges by ACDC's greedy rule: if that moves the metric by less than the tolerance (Conmy et al. 2023).

    From the output back, and from the last sender to the first; unread nodes are cut without a run. Several runs
    are made ahead, and those after the first edge that stays are discarded.
    """
    edges, stages = problem.graph.edges, problem.graph.stages
    kept, moved = torch.ones(len(edges), dtype=torch.bool), 0.0
    for number in range(len(stages) - 1, -1, -1):
        kept &= on_paths(problem.graph, kept)
        left, ahead = [edge for edge in reversed(stages[number].numbers()) if kept[edge]], 1
        while left:
            tried = left[:ahead]
            masks = torch.stack([_without(kept, tried[: i + 1]) for i in range(len(tried))])
            n_cut = 0
            for shift in problem.shifts(masks):
                if not shift - moved < tolerance:
                    break
                moved, n_cut = shift, n_cut + 1
            kept[tried[:n_cut]] = False
            ahead = 2 * ahead if n_cut == len(tried) else max(ahead // 2, 1)
            left = left[n_cut + (n_cut < len(tried)) :]
    return kept & on_paths(problem.graph, kept)


def keep_strongest(problem: Problem, sizes: Float[Tensor, "edge"], tolerance: float) -> Bool[Tensor, "edge"]:
    """Keep the largest edges that keep the metric within tolerance and reach the output, by bisection."""
    order = sizes.argsort(descending=True, stable=True)

    def strongest(n: int) -> Tensor:
        mask = torch.zeros(len(order), dtype=torch.bool)
        mask[order[:n]] = True
        return mask

    low, high = -1, len(order)  # too few; enough
    while high - low > 1:
        middle = (low + high) // 2
        if problem.shifts(strongest(middle)[None])[0] <= tolerance:
            high = middle
        else:
            low = middle
    return on_paths(problem.graph, strongest(high))


def on_paths(graph: EdgeGraph, kept: Bool[Tensor, "edge"]) -> Bool[Tensor, "edge"]:
    """Return the kept edges that lead to the output along kept edges."""
    edges, reached = graph.edges, graph.reached
    chosen, read = torch.zeros(len(edges), dtype=torch.bool), set[Node | None]([None])
    for number in range(len(edges) - 1, -1, -1):  # edges are in order of computation
        if kept[number] and not read.isdisjoint(reached[number]):
            chosen[number] = True
            read.add(edges[number].sender)
    return chosen


def between_ends(graph: EdgeGraph, kept: Bool[Tensor, "edge"]) -> Bool[Tensor, "edge"]:
    """Return the kept edges on a path of kept edges from the embedding to the output."""
    fed: set[Node | None] = {EMBEDDING}
    forward = torch.zeros(len(graph.edges), dtype=torch.bool)
    for number, edge in enumerate(graph.edges):  # edges are in order of computation
        if kept[number] and edge.sender in fed:
            forward[number] = True
            fed |= set(graph.reached[number])
    return on_paths(graph, forward)


def _without(kept: Bool[Tensor, "edge"], edges: Sequence[int]) -> Bool[Tensor, "edge"]:
    mask = kept.clone()
    mask[list(edges)] = False
    return mask
