"""Which edges stay: exact cuts in groups, ACDC's one by one, or the strongest by their scores."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.analysis.circuits.graph import EdgeGraph
from mechicl.analysis.circuits.problem import Problem
from mechicl.models.opening.edges import Node


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
    edges, stages = problem.graph.edges, problem.graph.stages
    candidates = torch.ones(len(edges), dtype=torch.bool) if candidates is None else candidates
    cutter = _Cutter(problem, tolerance, candidates & on_paths(problem.graph, candidates))
    for number in range(len(stages) - 1, -1, -1):
        cutter.kept &= on_paths(problem.graph, cutter.kept)
        cutter.thin(number, sizes)
    return cutter.kept & on_paths(problem.graph, cutter.kept)


class _Cutter:
    """Edges that are kept so far, and tries of cutting more of them.

    Args:
        problem: the model, and what it has to keep.
        tolerance: how far all cuts together may move it.
        base: the edges to begin with.
    """

    def __init__(self, problem: Problem, tolerance: float, base: Bool[Tensor, "edge"]):
        self.problem, self.tolerance, self.base = problem, tolerance, base
        self.kept = base.clone()

    def thin(self, stage: int, sizes: Float[Tensor, "edge"]) -> None:
        """Cut what can be cut of the edges into one stage; those into later ones were thinned before."""
        groups = _first_groups([edge for edge in self.problem.graph.stages[stage].numbers() if self.kept[edge]], sizes)
        while groups:
            refused = self._remove(groups, stage)
            halved = [(group[: len(group) // 2], group[len(group) // 2 :]) for group in refused if len(group) > 1]
            groups = [half for halves in halved for half in halves]

    def _remove(self, groups: list[list[int]], stage: int) -> list[list[int]]:
        """Cut as many of the groups as may go together; returns the others."""
        if not groups:
            return []
        alone = self._may_go(groups, stage)
        refused = [group for group, may in zip(groups, alone, strict=True) if not may]
        free = [group for group, may in zip(groups, alone, strict=True) if may]
        together = [edge for group in free for edge in group]
        if len(free) > 1 and not self._may_go([together], stage)[0]:
            # one can stand in for another: one half first, then what may go beside it
            middle = len(free) // 2
            refused += self._remove(free[:middle], stage)
            return refused + self._remove(free[middle:], stage)
        self.kept[together] = False
        return refused

    def _may_go(self, groups: Sequence[Sequence[int]], stage: int) -> list[bool]:
        masks = torch.stack([_without(self.kept, group) for group in groups])
        return self.problem.within(masks, self.tolerance, stage, self.base)


def cut_one_by_one(problem: Problem, tolerance: float) -> Bool[Tensor, "edge"]:
    """ACDC's greedy rule: an edge is cut if that moves the metric less than the tolerance beyond where it is already.

    Receivers are taken from the output back, and edges into each from the last sender to the first; what writes only to
    nodes that nothing reads is cut without a run, since it moves nothing. Most edges go, so runs are made ahead, each
    with one more edge cut than the one before, and those after the first edge that stays are thrown away.

    Source: Conmy et al. 2023, algorithm 1.
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
            for shift in problem.shifts(masks, number):
                if not shift - moved < tolerance:
                    break
                moved, n_cut = shift, n_cut + 1
            kept[tried[:n_cut]] = False
            ahead = 2 * ahead if n_cut == len(tried) else max(ahead // 2, 1)
            left = left[n_cut + (n_cut < len(tried)) :]
    return kept & on_paths(problem.graph, kept)


def keep_strongest(problem: Problem, sizes: Float[Tensor, "edge"], tolerance: float) -> Bool[Tensor, "edge"]:
    """As few of the edges with the largest sizes as keep the metric within the tolerance, and lead to the output.

    Found by bisection: there may be fewer that would do.
    """
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
    """Which of the edges kept lead to the output along edges that are kept."""
    edges, reached = graph.edges, graph.reached
    chosen, read = torch.zeros(len(edges), dtype=torch.bool), set[Node | None]([None])
    for number in range(len(edges) - 1, -1, -1):  # edges are in order of computation
        if kept[number] and not read.isdisjoint(reached[number]):
            chosen[number] = True
            read.add(edges[number].sender)
    return chosen


def _first_groups(into: Sequence[int], sizes: Float[Tensor, "edge"]) -> list[list[int]]:
    """The edges that are thought to matter one by one, and the others, least important first, as one group."""
    order = sorted(into, key=lambda edge: (float(sizes[edge]), edge))
    largest = float(sizes.max()) if len(sizes) else 0.0
    rest = [edge for edge in order if not float(sizes[edge]) > 1e-6 * largest]
    return ([rest] if rest else []) + [[edge] for edge in order[len(rest) :]]


def _without(kept: Bool[Tensor, "edge"], edges: Sequence[int]) -> Bool[Tensor, "edge"]:
    mask = kept.clone()
    mask[list(edges)] = False
    return mask
