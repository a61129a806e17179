"""The search for a circuit: the fewest heads, MLPs and edges that carry a metric when everything else is cut."""

from typing import Any, Literal

import torch

from mechicl.analysis.circuits.circuit import Circuit
from mechicl.analysis.circuits.cuts import cut_exactly, cut_one_by_one, keep_strongest
from mechicl.analysis.circuits.measures import measure_edges
from mechicl.analysis.circuits.problem import CutMethod, OneMetric, make_problem
from mechicl.analysis.circuits.scores import estimate_effects
from mechicl.analysis.interventions.metrics import Inputs
from mechicl.base.arguments import Positive, checked
from mechicl.base.progress import progress_bar
from mechicl.models.opening.edge_graph import NoGradient
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
            - "eap-ig": the fewest edges with the largest scores (see `score_edges`) that suffice, without cutting any
              separately: quick, but misses effects that gradients do not show;
            - "acdc": edges are tried one after the other, from the output back, and an edge is cut if this increases
              the distance by less than `tolerance` (Conmy et al. 2023): errors add up over edges.
        method: value of a cut edge in place of the sender's write.

            - "zero", the write's "mean" over prompts at the same position, or the write on another prompt ("resample");
            - "any": an edge is cut only if that is harmless under every replacement tested: zeros, and random mixtures
              of the sender's writes on several prompts, also in runs whose embeddings are mixtures.

            By default "any" for "outputs", and "zero" for a metric; docs/how-to/circuits.md compares them.
            `Replacement(method, reference, seed)` takes means and writes from other prompts, or draws other mixtures.
        tolerance: largest distance of the circuit from the full model, as a share of that when everything is cut.
        effects: measure the effect of removing each node and edge from the circuit, with a run for each; NaN otherwise.
        at: "query" for the last point or token only, "points" for every prefix, "positions" for all positions. By
            default "query" for points, and for tokens if a metric is given, else "positions".

    Returns:
        The circuit: its `nodes` and `edges`, and `heads` as pairs (layer, head); `faithfulness()`, the share of the
        metric that the edges keep when all others are cut (1: all; for "outputs" one minus the relative mean largest
        change), with a 95% interval over prompts; `effects()`, the change of the metric without each node or edge.

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
            kept = None
            if search != "exact" or problem.objective.metric is not None:
                kept = keep_strongest(problem, sizes, tolerance)
            if search == "exact":
                kept = cut_exactly(problem, sizes, tolerance, candidates=kept)
        assert kept is not None
        return measure_edges(problem, kept, effects=effects)
