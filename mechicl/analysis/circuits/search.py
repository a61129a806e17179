"""The search for a circuit: the fewest heads, MLPs and edges that carry a metric when everything else is cut."""

from typing import Any, Literal

import torch

from mechicl.analysis.circuits.circuit import Circuit
from mechicl.analysis.circuits.cuts import cut_exactly, cut_one_by_one, keep_strongest
from mechicl.analysis.circuits.measures import measure_edges
from mechicl.analysis.circuits.objectives import OneMetric
from mechicl.analysis.circuits.problem import Method, make_problem
from mechicl.analysis.circuits.scores import estimate_effects
from mechicl.analysis.interventions.metrics import Inputs
from mechicl.base.arguments import checked
from mechicl.base.memory import MEMORY
from mechicl.base.progress import progress_bar
from mechicl.models.holding import holds_models
from mechicl.models.opening.edge_graph import NoGradient
from mechicl.prompts import At

Search = Literal["exact", "eap-ig", "acdc"]


@checked
@holds_models
def find_circuit(
    model: Any,
    prompts: Inputs,
    metrics: OneMetric = None,
    *,
    search: Search = "exact",
    method: Method | None = None,
    reference: Inputs | None = None,
    tolerance: float = 1e-3,
    effects: bool = True,
    steps: int | None = None,
    at: At | None = None,
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> Circuit:
    """Find the heads, MLPs and edges that a metric needs: with everything else cut, it stays within a tolerance.

    An edge is what one node (the embedding, a head, an MLP) writes into the residual stream as another reads it: a head
    by its query, key or value separately, or the output. A circuit's edges were verified together, with all others cut.

    Args:
        model: ours, without a clipped stream, or a `TransformerBridge` whose parts add up.
        prompts: what it runs on. The result depends on them; `measure_circuit` says how good it is on others.
        metrics: one metric, as for `patch`. By default the loss, where prompts have targets; for token ids "outputs",
            the outputs themselves, at all positions: the distance of a run from the whole model is then the largest
            change of any output of any prompt; that of a metric is the change of its mean over prompts.
        search: how edges are searched for.

            - "exact": gradients of all edges at once ("mask-ig" of `score_edges`) give the order; then edges are cut in
              groups, and every group whose joint removal moves the metric too far is halved until one edge is left,
              which stays. Zero, small and tied gradients cost runs and no edges;
            - "eap-ig": the fewest of the edges with the largest scores (see `score_edges`) that suffice, without
              cutting any separately: quick, but misses what gradients do not see;
            - "acdc": one edge after the other, from the output back, is cut if the metric moves by less than the
              tolerance beyond where it is (Conmy et al. 2023): each edge may cost that much.
        method: what a cut edge carries instead of what its sender writes: "zero", the "mean" over prompts at the same
            position, what it writes on another prompt ("resample"), or "any": zero and random mixtures of what it
            writes anywhere, both also in runs from streams that are such mixtures, in which nothing is saturated or the
            same in all prompts; an edge is cut only if it may be in all of these. By default "any" for the outputs
            themselves, and "zero" for a metric; docs/how-to/circuits.md says what the others miss.
        reference: the prompts that means are taken over, by default those given; or for "resample" the prompt that
            takes each prompt's place, by default another of those given.
        tolerance: how far the cuts may move the metric, as a share of the effect of cutting everything.
        effects: measure the effect of removing each node and edge from the circuit, with a run for each; NaN otherwise.
        steps: of the scores: see `score_edges`.
        at: which predictions are read: see `patch`. By default the query's of points, and the last token's if a metric
            is given; else those at all positions.
        seed: of what is drawn at random.
        memory: bound in bytes on what runs and gradients take.

    Raises:
        ValueError: as for `ablate`; several metrics, a metric that is not finite or does not change when everything is
            cut, one without a gradient for a search by scores, or a model whose stream is not the sum of what its parts
            write.

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0)
        >>> ids = torch.randint(16, (32, 16)).repeat(1, 2)
        >>> find_circuit(induction, ids, next_token_loss(ids[:, 0])).heads
        [(0, 0), (1, 0)]

    Source: Conmy et al. 2023 (edges, ACDC); Hanna et al. 2024 (attribution of edges); Wang et al. 2023, section 4, and
    Marks et al. 2024, section 4 (faithfulness and completeness as shares).
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    with progress_bar(unit="run", desc="circuit", progress=progress) as bar:
        problem = make_problem(
            model, prompts, metrics, method=method, reference=reference, at=at, seed=seed, memory=memory,
            advance=bar.update,
        )  # fmt: skip
        if search == "acdc":
            kept = cut_one_by_one(problem, tolerance)
        else:
            try:
                scoring = "mask-ig" if search == "exact" else "eap-ig"
                scores = estimate_effects(problem, scoring, steps, seed, progress=False)
                sizes = scores.mean(1).abs().nan_to_num()
            except NoGradient:
                if search != "exact":
                    raise
                sizes = torch.ones(len(problem.graph.edges))
            kept = None
            if search != "exact" or problem.objective.metric is not None:
                kept = keep_strongest(problem, sizes, tolerance)
            if search == "exact":
                kept = cut_exactly(problem, sizes, tolerance, candidates=kept)
        assert kept is not None
        return measure_edges(problem, kept, effects=effects)
