"""The search for a circuit: the fewest heads, MLPs and edges that carry a metric when everything else is cut."""

from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.analysis.circuits.cuts import cut_exactly, cut_one_by_one, keep_strongest
from mechicl.analysis.circuits.graph import NoGradient
from mechicl.analysis.circuits.measures import measure_edges, measure_nodes
from mechicl.analysis.circuits.node_search import PartialModel, search_by_attribution, search_greedily
from mechicl.analysis.circuits.objectives import OneMetric
from mechicl.analysis.circuits.problem import Problem, make_problem
from mechicl.analysis.circuits.references import Method
from mechicl.analysis.circuits.results import Circuit
from mechicl.analysis.circuits.scores import Scoring, estimate_effects
from mechicl.analysis.interventions.metrics import Inputs
from mechicl.base.arguments import checked
from mechicl.base.memory import MEMORY
from mechicl.base.progress import progress_bar
from mechicl.models.holding import holds_models
from mechicl.models.opening.edges import EMBEDDING
from mechicl.prompts import At

Search = Literal["exact", "eap", "eap-ig", "eap-ig-activations", "mask-ig", "acdc", "greedy", "attribution"]
TOLERANCE = 1e-3


@checked
@holds_models
def find_circuit(
    model: Any,
    prompts: Inputs,
    metrics: OneMetric = None,
    *,
    search: Search | None = None,
    method: Method | None = None,
    reference: Inputs | None = None,
    tolerance: float = TOLERANCE,
    edges: bool = True,
    effects: bool = True,
    steps: int | None = None,
    at: At | None = None,
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> Circuit:
    """The heads, MLPs and edges that a metric needs: everything else may be cut, and it stays within a tolerance.

    An edge is what one node (the embedding, a head, an MLP) writes into the residual stream as another reads it, in a
    head by its query, key or value apart, or as the output reads it. A circuit's edges were verified together: with all
    others cut, the metric is what it was.

    Args:
        model: ours, without a clipped stream, or a `TransformerBridge` whose parts add up.
        prompts: what it runs on. What is found depends on them; `measure_circuit` says how good it is on others.
        metrics: one metric, as for `patch`. By default the loss, where prompts have targets; for token ids "outputs",
            the outputs themselves, at all positions: a run is as far from the whole model as the largest change of any
            output of any prompt, where a metric counts by its mean over prompts.
        search: how edges are looked for, by default "exact"; for nodes alone "greedy".

            - "exact": gradients of all edges at once ("mask-ig" of `score_edges`) say in which order to look; then
              edges are cut in groups, and every group whose joint removal moves the metric too far is taken apart until
              one edge is left, which stays. Zero, small and tied gradients cost runs and no edges;
            - "eap", "eap-ig", "eap-ig-activations", "mask-ig": as few of the edges with the largest scores as will do
              (see `score_edges`), without cutting any by itself: quick, and blind to what gradients do not see;
            - "acdc": one edge after the other, from the output back, is cut if the metric moves by less than the
              tolerance beyond where it is (Conmy et al. 2023): each edge may cost that much;
            - "greedy": nodes first: always the one whose loss moves the metric least is ablated, until the next would
              move it too far; then the edges between those kept, exactly;
            - "attribution": nodes in the order of one gradient, as few of the first as will do; then edges, exactly.
        method: what a cut edge carries in place of what its sender writes: "zero", the "mean" over prompts at the same
            position, what it writes on another prompt ("resample") or on the prompt at the same place in `reference`
            ("counterfactual"), "scrambled" (a random mixture of what it writes anywhere, which a reader that listens
            at all will notice), or "any": zero and something scrambled, both also in runs that start from
            scrambled streams, in which nothing is saturated or the same in all prompts; an edge goes only if it may in
            all of these. By default "any" for the outputs themselves, and "zero" for a metric; what the others miss
            in compiled programs is in docs/how-to/circuits.md.
        reference: the prompts that means are taken over, by default those given; or those of "counterfactual".
        tolerance: how far the cuts may move the metric, as a share of what cutting everything does.
        edges: False for the nodes alone ("greedy" and "attribution" only; for any model of TransformerLens' protocol).
        effects: measure what the circuit loses without each of its nodes and edges, with a run for each; NaN otherwise.
        steps: of the scores: see `score_edges`.
        at: which predictions are read: see `patch`. By default the query's of points, and the last token's if a metric
            is given; else those at all positions.
        seed: of what is drawn at random.
        memory: bound in bytes on what runs and gradients take.

    Raises:
        ValueError: as for `ablate`; several metrics, a tolerance that is not positive, an unknown search or method, a
            metric that is not finite or does not change when everything is cut, one without a gradient for a search by
            scores, or edges of a model whose stream is no sum of what its parts write.

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0)
        >>> ids = torch.randint(16, (32, 16)).repeat(1, 2)
        >>> find_circuit(induction, ids, next_token_loss(ids[:, 0])).heads
        [(0, 0), (1, 0)]

    Source: Conmy et al. 2023 (edges); Syed et al. 2023 and Hanna et al. 2024 (attribution of edges); Wang et al. 2023,
    section 4, and Marks et al. 2024, section 4 (faithfulness and completeness as shares).
    """
    search = search or ("exact" if edges else "greedy")
    if search not in get_args(Search):
        raise ValueError(f"search={search!r} is not one of {get_args(Search)}")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    by_nodes = search in ("greedy", "attribution")
    if not edges and not by_nodes:
        raise ValueError(f"search={search!r} looks for edges: for nodes alone take search='greedy' or 'attribution'")
    with progress_bar(unit="run", desc="circuit", progress=progress) as bar:
        problem = None
        if edges:
            problem = make_problem(
                model, prompts, metrics, method=method, reference=reference, at=at, seed=seed, memory=memory,
                advance=bar.update,
            )  # fmt: skip
        candidates: Tensor | None = None
        if by_nodes:
            if method == "scrambled":
                raise ValueError(
                    "method='scrambled' is for edges: nodes are ablated by search='greedy' and 'attribution'"
                )
            plain = "zero" if method is None or method == "any" else method
            partial = PartialModel(
                model, prompts, metrics, at=at, method=plain, reference=reference, seed=seed, memory=memory,
                advance=bar.update,
            )  # fmt: skip
            nodes = (search_greedily if search == "greedy" else search_by_attribution)(partial, tolerance)
            if problem is None:
                return measure_nodes(partial, nodes)
            inside = {EMBEDDING, None, *nodes}
            candidates = problem.graph.mask(
                [edge for edge in problem.graph.edges if {edge.sender, edge.receiver} <= inside]
            )
        assert problem is not None
        kept = _search(problem, search, tolerance, candidates, steps, seed)
        return measure_edges(problem, kept, problem.method, effects=effects)


def _search(
    problem: Problem, search: Search, tolerance: float, candidates: Tensor | None, steps: int | None, seed: int
) -> Bool[Tensor, "edge"]:
    if search == "acdc":
        return cut_one_by_one(problem, tolerance)
    if search in get_args(Scoring):
        return keep_strongest(problem, _sizes(problem, search, steps, seed), tolerance)
    sizes = _sizes(problem, "mask-ig", steps, seed, optional=True)
    if candidates is not None and problem.shifts(candidates[None])[0] > tolerance:
        candidates = None  # what ablating nodes leaves is not what cutting their edges does: begin with all
    if candidates is None and problem.objective.metric is not None:
        candidates = keep_strongest(problem, sizes, tolerance)
    return cut_exactly(problem, sizes, tolerance, candidates=candidates)


def _sizes(
    problem: Problem, scoring: Any, steps: int | None, seed: int, *, optional: bool = False
) -> Float[Tensor, "edge"]:
    """How much each edge matters by its score; all the same where that is optional and the metric has no gradient."""
    try:
        return estimate_effects(problem, scoring, steps, seed, progress=False).mean(1).abs().nan_to_num()
    except NoGradient:
        if not optional:
            raise
        return torch.ones(len(problem.graph.edges))
