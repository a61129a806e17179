"""The search for a circuit: the fewest heads, MLPs and edges that carry a metric when everything else is cut.

Rules that select edges: exact cuts in groups, ACDC's cuts one by one, or the strongest by their scores.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.analysis.circuits.circuit import Circuit
from mechicl.analysis.circuits.measures import measure_edges
from mechicl.analysis.circuits.problem import CutMethod, OneMetric, Problem, make_problem
from mechicl.analysis.circuits.scores import estimate_effects
from mechicl.analysis.interventions.metrics import Inputs
from mechicl.base.arguments import Positive, checked
from mechicl.base.progress import progress_bar
from mechicl.models.opening.edge_graph import EdgeGraph, NoGradient
from mechicl.models.opening.sites import EMBEDDING, Node
from mechicl.prompts import At

Search = Literal["exact", "eap-ig", "acdc"]


@checked(locks=True)
def find_circuit(
    model: Any,
    prompts: Inputs,
    metrics: OneMetric = None,
    *,
    search: Search = "exact",
    method: CutMethod | None = None,
    tolerance: Positive = 1e-3,
    effects: bool = True,
    at: At | None = None,
    progress: bool | None = None,
) -> Circuit:
    """Find a few heads, MLPs and edges that suffice to keep a metric while all other edges are cut.

    An edge connects two nodes (the embedding, a head, an MLP, the output): the receiver reads the sender's write from
    the residual stream. Each head has three inputs: query, key and value. The edges of the result were verified
    together, with all others cut. Source: Conmy et al. 2023 (edges, ACDC); Hanna et al. 2024 (attribution of edges);
    Wang et al. 2023, section 4, and Marks et al. 2024, section 4 (faithfulness and completeness as shares).

    Args:
        model: in eval mode: a mechicl model without a clipped residual stream, or a `TransformerBridge` whose residual
            stream is the sum of its components' outputs.
        prompts: the circuit depends on them; `measure_circuit` measures it on others.
        metrics: a function of predictions `[prompt ...]` that returns `[prompt]`. By default the loss, where prompts
            have targets; for token ids "outputs", all outputs. The distance from the full model is the absolute change
            of the metric's mean, or for "outputs" the largest change of any output on any prompt.
        search: rule by which edges are selected.

            - "exact": edges are cut in groups, in the order of their scores ("mask-ig" of `score_edges`). A group whose
              joint removal changes the metric too much is halved until single edges remain, which are kept.
              Uninformative gradients make the search slower but not wrong;
            - "eap-ig": edges with the largest scores (see `score_edges`), their number by bisection, without cutting
              any separately: quick, but misses effects that gradients do not show, and fewer edges may suffice;
            - "acdc": edges are tried one after the other, from the output back, and an edge is cut if this increases
              the distance by less than `tolerance` (Conmy et al. 2023): errors add up over edges.
        method: value of a cut edge in place of the sender's write:
            "zero", the write's "mean" over prompts at the same position, the write on another prompt ("resample"), or
            "any": an edge is cut only if that is harmless under every replacement tested, which are zeros and random
            mixtures of the sender's writes on several prompts, also in runs whose embeddings are mixtures. By default
            "any" for "outputs", and "zero" for a metric; docs/how-to/circuits.md compares them.
            `Replacement(method, reference, seed)` takes means and writes from other prompts, or draws other mixtures.
        tolerance: largest distance of the circuit from the full model, as a share of that when everything is cut.
        effects: measure the effect of removing each node and edge from the circuit, with a run for each; NaN otherwise.
        at: "query" for the last point or token only, "points" for every prefix, "positions" for all positions. By
            default "query" for points, and for tokens if a metric is given, else "positions".

    Returns:
        A `Circuit`: `nodes`, `edges` and `heads`; `faithfulness()`, for "outputs" one minus the relative mean largest
        change; `effects()`, the change of the metric without each node or edge.

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0)
        >>> ids = torch.randint(16, (32, 16)).repeat(1, 2)
        >>> find_circuit(induction, ids, next_token_loss(ids[:, 0])).heads
        [(0, 0), (1, 0)]
    """
    with progress_bar(unit="run", desc="circuit", progress=progress) as bar:
        problem = make_problem(model, prompts, metrics, method=method, at=at, advance=bar.update)
        if search == "acdc":
            kept = cut_one_by_one(problem, tolerance)
        else:
            try:
                scoring = "mask-ig" if search == "exact" else "eap-ig"
                scores = estimate_effects(problem, scoring, progress=progress)
                sizes = scores.mean(1).abs().nan_to_num()
            except NoGradient:
                if search != "exact":
                    raise
                sizes = torch.ones(len(problem.graph.edges))
            if search == "exact":
                has_metric = problem.objective.metric is not None
                candidates = keep_strongest(problem, sizes, tolerance) if has_metric else None
                kept = cut_exactly(problem, sizes, tolerance, candidates=candidates)
            else:
                kept = keep_strongest(problem, sizes, tolerance)
        return measure_edges(problem, kept, effects=effects)


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
    """Keep the largest edges that keep the metric within tolerance and reach the output.

    Their number is found by bisection: it is the smallest if more edges never harm; else fewer may suffice.
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
