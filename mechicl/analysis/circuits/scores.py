"""Scores of edges: what cutting each would do, estimated for all of them at once from a few gradients."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.circuits.comparison import NodesAndEdges
from mechicl.analysis.circuits.graph import EdgeGraph
from mechicl.analysis.circuits.objectives import Objective, OneMetric
from mechicl.analysis.circuits.problem import Problem, make_problem
from mechicl.analysis.circuits.ranking import auroc
from mechicl.analysis.circuits.references import Method
from mechicl.analysis.interventions.metrics import Inputs
from mechicl.base.arguments import checked
from mechicl.base.checks import check_whole
from mechicl.base.memory import MEMORY
from mechicl.base.progress import progress_bar
from mechicl.models.holding import holds_models
from mechicl.models.opening.edges import EMBEDDING, Edge
from mechicl.prompts import At
from mechicl.statistics import Result, interval

Scoring = Literal["eap", "eap-ig", "eap-ig-activations", "mask-ig"]
"""Attribution of edges: at the whole model; over the embedding, the activations of one stage after the other, or all
edges together, on their way from the reference."""


@dataclass(frozen=True, eq=False)
class EdgeScores(Result):
    """To first order, how the metric changes when each edge is cut.

    Attributes:
        edges: in the order of `list_edges`.
        scores: `[edge prompt]`. Of the outputs themselves (no metric was given) a size without a sign.
        metric: its name.
        scoring: how they were estimated.
        method: what a cut edge carries.
    """

    edges: tuple[Edge, ...]
    scores: Float[Tensor, "edge prompt"]
    metric: str
    scoring: Scoring
    method: Method

    def sizes(self) -> Float[Tensor, "edge"]:
        """How much each edge matters: the absolute value of its mean score over prompts."""
        return self.scores.mean(1).abs()

    def strongest(self, n: int) -> list[Edge]:
        """The edges with the largest scores, the largest first."""
        return [self.edges[int(i)] for i in self.sizes().argsort(descending=True, stable=True)[:n]]

    def auroc(self, truth: NodesAndEdges | Collection[Edge]) -> float:
        """The chance that a true edge scores higher, in absolute value, than another; see `auroc`."""
        return auroc(self, truth)

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """One row an edge, strongest first: its mean score with the interval over prompts."""
        means = [interval(score, level) for score in self.scores]
        rows = [(str(edge), mean.mean, mean.low, mean.high) for edge, mean in zip(self.edges, means, strict=True)]
        frame = pd.DataFrame(rows, columns=["edge", "score", "low", "high"])
        return frame.reindex(frame["score"].abs().sort_values(ascending=False, kind="stable").index)

    def __str__(self) -> str:
        strongest = ", ".join(map(str, self.strongest(5)))
        return f"{len(self.edges)} edges scored by {self.scoring} ({self.metric}, {self.method}): {strongest}, ..."


@checked
@holds_models
def score_edges(
    model: Any,
    prompts: Inputs,
    metrics: OneMetric = None,
    *,
    scoring: Scoring = "mask-ig",
    steps: int | None = None,
    method: Method | None = None,
    reference: Inputs | None = None,
    at: At | None = None,
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> EdgeScores:
    """What cutting each edge would do to a metric, to first order: all edges at once.

    `prompts`, `metrics`, `method`, `reference`, `at`, `seed` and `progress` are as for `find_circuit`. Where the metric
    is the outputs themselves, gradients are of sums of outputs with random signs.

    Args:
        scoring: what the gradient is multiplied by is what the edge carries less what a cut one does; it is taken

            - "eap": at the whole model (edge attribution patching, Syed et al. 2023), one gradient;
            - "eap-ig": on the way of the embedding from the reference's to the prompts', in the mean over steps (Hanna
              et al. 2024);
            - "eap-ig-activations": on the way of what one layer's heads, or its MLP, or the embedding write, from the
              reference's to the whole model's, in the mean over steps; for the edges from these nodes (after Marks et
              al. 2024). As many gradients as there are groups, times the steps;
            - "mask-ig": on the way of all edges together from cut to whole, in the mean over steps, by what each
              carries there. In the limit of many steps they add up to the whole effect (Sundararajan et al. 2017).
        steps: of the ways with steps; by default 4, or 5 for "eap-ig".
        memory: bound in bytes on what runs and gradients take; prompts are taken in parts.

    Raises:
        ValueError: as for `find_circuit`; an unknown scoring, steps below 1, a metric without a gradient.

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0)
        >>> ids = torch.randint(16, (32, 16)).repeat(1, 2)
        >>> str(score_edges(induction, ids, next_token_loss(ids[:, 0])).strongest(1)[0])
        'head 1.0 → output'
    """
    if scoring not in get_args(Scoring):
        raise ValueError(f"scoring={scoring!r} is not one of {get_args(Scoring)}")
    check_whole(1, steps=steps if steps is not None else 1)
    problem = make_problem(
        model, prompts, metrics, method=method, reference=reference, at=at, seed=seed, memory=memory
    )  # fmt: skip
    scores = estimate_effects(problem, scoring, steps, seed, progress=progress)
    return EdgeScores(tuple(problem.graph.edges), scores, problem.objective.name, scoring, problem.method)


def estimate_effects(
    problem: Problem, scoring: Scoring, steps: int | None, seed: int, *, progress: bool
) -> Float[Tensor, "edge prompt"]:
    """The scores of all edges, in the mean over what cut edges carry; see `score_edges`."""
    signed, graphs = problem.objective.metric is not None, problem.scored
    whole = graphs[0].references
    total = torch.zeros(len(problem.graph.edges), whole.shape[1], dtype=whole.dtype, device=whole.device)
    points = [(g, *point) for g in range(len(graphs)) for point in _points(graphs[g], scoring, steps)]
    for number, (g, kept, share, senders) in enumerate(progress_bar(points, unit="gradient", progress=progress)):
        graph, objective = graphs[g], problem.objectives[g]

        def linear(
            predictions: Tensor, prompts: slice, objective: Objective = objective, number: int = number
        ) -> Tensor:
            return objective.linear(predictions, prompts, seed + number)

        gradient = graph.gradients(kept, linear, changes=None if scoring == "mask-ig" else graph.whole)
        gradient = gradient if senders is None else gradient * senders[:, None]
        total += share * (gradient if signed else gradient.square())
    return -total / len(graphs) if signed else (total / len(graphs)).sqrt()


Point = tuple[Float[Tensor, "edge"], float, Float[Tensor, "edge"] | None]


def _points(graph: EdgeGraph, scoring: Scoring, steps: int | None) -> Iterator[Point]:
    """How much of each edge is kept where gradients are taken, their share in the sum, and whose edges count there."""
    whole = torch.ones(len(graph.edges), dtype=graph.references.dtype, device=graph.tokens.device)
    if scoring == "eap":
        yield whole, 1.0, None
    elif scoring == "eap-ig":
        embedding = graph.mask([edge for edge in graph.edges if edge.sender == EMBEDDING])
        n = steps or 5
        for step in range(1, n + 1):
            yield torch.where(embedding, step / n, whole), 1 / n, None
    elif scoring == "mask-ig":
        n = steps or 4
        for step in range(n):  # the midpoints of equal parts
            yield (step + 0.5) / n * whole, 1 / n, None
    else:
        n = steps or 4
        groups = dict.fromkeys((node.layer, node.head is None) for node in graph.nodes)
        for group in groups:
            out = graph.mask([edge for edge in graph.edges if (edge.sender.layer, edge.sender.head is None) == group])
            for step in range(n):
                yield torch.where(out, (step + 0.5) / n, whole), 1 / n, out.to(whole)
