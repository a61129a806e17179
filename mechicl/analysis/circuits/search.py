"""The search for a circuit: the fewest heads, MLPs and edges that carry a metric when everything else is cut."""

from typing import Any, Literal

import torch

from mechicl.analysis.circuits.circuit import Circuit
from mechicl.analysis.circuits.cuts import cut_exactly, cut_one_by_one, keep_strongest
from mechicl.analysis.circuits.measures import measure_edges
from mechicl.analysis.circuits.problem import Method, OneMetric, make_problem
from mechicl.analysis.circuits.scores import estimate_effects
from mechicl.analysis.interventions.metrics import Inputs
from mechicl.base.arguments import Count, Positive, checked
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
    tolerance: Positive = 1e-3,
    effects: bool = True,
    steps: Count | None = None,
    at: At | None = None,
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> Circuit:
    """Find the heads, MLPs and edges that a metric needs: with everything else cut, it stays within a tolerance.

    An edge connects two nodes (the embedding, a head, an MLP, the output): the receiver reads the sender's write from
    the residual stream, a head by its query, key and value separately. A circuit's edges were verified together, with
    all others cut.

    Args:
        model: ours, without a clipped stream, or a `TransformerBridge` whose parts add up.
        prompts: the circuit depends on them; `measure_circuit` measures it on others.
        metrics: one metric, as for `patch`. By default the loss, where prompts have targets; for token ids "outputs",
            the outputs themselves at all positions. The distance of a run from the whole model is the change of the
            metric's mean over prompts, or for "outputs" the largest change of any output on any prompt.
        search: rule by which edges are selected.

            - "exact": gradients of all edges at once ("mask-ig" of `score_edges`) give the order; then edges are cut in
              groups, and every group whose joint removal moves the metric too far is halved until one edge remains,
              which stays. Zero, small and tied gradients cost runs, but no edges;
            - "eap-ig": the fewest of the edges with the largest scores (see `score_edges`) that suffice, without
              cutting any separately: quick, but misses effects that gradients do not show;
            - "acdc": one edge after the other, from the output back, is cut if the metric moves by less than the
              tolerance beyond where it is (Conmy et al. 2023): each edge may cost that much.
        method: what a cut edge carries in place of the sender's write: "zero", the write's "mean" over prompts at the
            same position, the write on another prompt ("resample"), or "any": zero and random mixtures of writes, both
            also in runs from streams that are such mixtures, in which nothing is saturated or the same in all prompts;
            an edge is cut only if it may be in all of these. By default "any" for the outputs themselves, and "zero"
            for a metric; docs/how-to/circuits.md compares them.
        reference: for "mean" the prompts to average over, by default those given; for "resample" the prompt that
            replaces each prompt, by default another of those given.
        tolerance: largest change of the metric by the cuts, as a share of the effect of cutting everything.
        effects: measure the effect of removing each node and edge from the circuit, with a run for each; NaN otherwise.
        steps: for the scores: see `score_edges`.
        at: which predictions: see `patch`. By default the query's of points, and the last token's if a metric is given;
            else those at all positions.

    Raises:
        ValueError: as for `ablate`; several metrics, a metric that is not finite or does not change when everything is
            cut, one without a gradient for a search by scores, or a model whose stream is not the sum of its parts'
            writes.

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0)
        >>> ids = torch.randint(16, (32, 16)).repeat(1, 2)
        >>> find_circuit(induction, ids, next_token_loss(ids[:, 0])).heads
        [(0, 0), (1, 0)]

    Source: Conmy et al. 2023 (edges, ACDC); Hanna et al. 2024 (attribution of edges); Wang et al. 2023, section 4, and
    Marks et al. 2024, section 4 (faithfulness and completeness as shares).
    """
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
