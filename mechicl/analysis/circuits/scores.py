"""Scores of edges: the effect of cutting each, estimated for all edges at once from a few gradients."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import scipy
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.circuits.circuit import NodesAndEdges
from mechicl.analysis.circuits.problem import CutMethod, Objective, OneMetric, Problem, make_problem
from mechicl.analysis.interventions.metrics import Inputs
from mechicl.base.arguments import Count, checked
from mechicl.base.progress import progress_bar
from mechicl.models.opening.edge_graph import EdgeGraph
from mechicl.models.opening.sites import EMBEDDING, Edge
from mechicl.prompts import At
from mechicl.statistics import UNBOUNDED, Result, interval
from mechicl.statistics.results import largest

Scoring = Literal["eap-ig", "mask-ig"]
"""Attribution of edges with integrated gradients: over the embedding, or over all edges together."""


@dataclass(frozen=True, eq=False)
class EdgeScores(Result):
    """Estimates, to first order, of the change of the metric when each edge is cut; see `score_edges`.

    Attributes:
        edges: all edges of the model, by receiver in order of computation.
        scores: the metric with the edge cut minus that of the full model, `[edge prompt]`. Without a metric, for the
            outputs themselves, they have no sign.
        scoring: "eap-ig" or "mask-ig".
        method: replacement of a cut edge's value, such as "zero".
    """

    edges: tuple[Edge, ...]
    scores: Float[Tensor, "edge prompt"]
    metric: str
    scoring: str
    method: str

    def sizes(self) -> Float[Tensor, "edge"]:
        """Return the importance of each edge: the absolute value of its mean score over prompts."""
        return self.scores.mean(1).abs()

    def strongest(self, n: Count) -> list[Edge]:
        """Return the `n` edges with the largest mean scores in absolute value; warn if others tie with the last."""
        return [self.edges[i] for i in largest(self.sizes(), n, "edges")[0]]

    def auroc(self, truth: NodesAndEdges | Collection[Edge]) -> float:
        """Return the probability that an edge of `truth` has a larger absolute score than another; ties count half."""
        values = read_scores(self, self.edges).abs().numpy()
        true = set(truth.edges if isinstance(truth, NodesAndEdges) else truth)
        if absent := true - set(self.edges):
            raise ValueError(f"{len(absent)} true edges have no score, such as {next(iter(absent))}")
        n_true, n_false = len(true), len(self.edges) - len(true)
        if not n_true or not n_false:
            raise ValueError(f"truth must have some of the edges, but not all: got {n_true} of {len(self.edges)}")
        ranks = scipy.stats.rankdata(values)[[edge in true for edge in self.edges]]  # ties share their mean rank
        return float((ranks.sum() - n_true * (n_true + 1) / 2) / (n_true * n_false))

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """Make a table of the edges, strongest first: the mean score with its interval over prompts."""
        means = [interval(score, level, within=UNBOUNDED).columns("score") for score in self.scores]
        rows = [{"edge": str(edge), **mean} for edge, mean in zip(self.edges, means, strict=True)]
        return pd.DataFrame(rows).sort_values("score", key=abs, ascending=False, kind="stable")

    def __str__(self) -> str:
        order, tie = largest(self.sizes(), 5)
        shown = f"{', '.join(str(self.edges[i]) for i in order)}, ...{tie and f' ({tie})'}"
        return f"{len(self.edges)} edges scored by {self.scoring} ({self.metric}, {self.method}): {shown}"


Scores = EdgeScores | Mapping[Edge, float]
"""The change of the metric when each edge is cut."""


def read_scores(scores: Scores, edges: Sequence[Edge], name: str = "scores") -> Float[Tensor, "edge"]:
    """Return the mean score of each edge; a ValueError if there are others, or scores that are not finite."""
    if isinstance(scores, EdgeScores):
        scores = dict(zip(scores.edges, scores.scores.detach().double().mean(1).tolist(), strict=True))
    if other := scores.keys() - set(edges):
        raise ValueError(f"{name} are of another model: this one has no edge {min(other, key=str)}")
    missing = [edge for edge in edges if edge not in scores]
    if missing:
        raise ValueError(f"{name} miss {len(missing)} of the model's {len(edges)} edges, such as {missing[0]}")
    values = torch.tensor([float(scores[edge]) for edge in edges], dtype=torch.float64)
    bad = (~values.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"{name} are not finite for {len(bad)} edges, such as {edges[bad[0]]}: {values[bad[0]]}")
    return values


@checked(locks=True)
def score_edges(
    model: Any,
    prompts: Inputs,
    metrics: OneMetric = None,
    *,
    scoring: Scoring = "mask-ig",
    steps: Count | None = None,
    method: CutMethod | None = None,
    at: At | None = None,
    progress: bool | None = None,
) -> EdgeScores:
    """Estimate, to first order, the change of a metric when each edge is cut, for all edges at once.

    Much faster than a search, but without its guarantee (`find_circuit`). An edge is the output of the embedding, a
    head or an MLP as an input of a later one, or of the output.

    The arguments that are not listed are those of `find_circuit`; "outputs" are sums of all outputs with random signs.

    Args:
        scoring: where gradients are taken; each is multiplied by the change of the edge's value when it is cut:

            - "eap-ig": on the path of the embedding from its value when cut (see `method`) to the prompts', averaged
              over steps (Hanna et al. 2024). With `steps=1` this is edge attribution patching (Syed et al. 2023);
            - "mask-ig": on the path of all edges together from cut to whole, averaged over steps. In the limit of many
              steps the scores add up to the whole effect (Sundararajan et al. 2017).
        steps: number of points on the path; by default 4, or 5 for "eap-ig".

    Returns:
        An `EdgeScores`; scores of "outputs" are root mean squares over the random signs.

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0)
        >>> ids = torch.randint(16, (32, 16)).repeat(1, 2)
        >>> sorted(map(str, score_edges(induction, ids, next_token_loss(ids[:, 0])).strongest(2)))
        ['embedding → head 1.0 (v)', 'head 1.0 → output']
    """
    problem = make_problem(model, prompts, metrics, method=method, at=at)
    scores = estimate_effects(problem, scoring, steps, progress=progress)
    return EdgeScores(tuple(problem.graph.edges), scores, problem.objective.name, scoring, problem.replacement.method)


def estimate_effects(
    problem: Problem, scoring: Scoring, steps: int | None = None, *, progress: bool | None
) -> Float[Tensor, "edge prompt"]:
    """Estimate the scores of all edges, averaged over the problem's graphs; see `score_edges`."""
    signed = problem.objective.metric is not None
    # graphs on the prompts themselves: others have more runs
    numbers = [i for i, graph in enumerate(problem.graphs) if len(graph.tokens) == len(problem.graph.tokens)]
    whole = problem.graph.references
    total = torch.zeros(len(problem.graph.edges), whole.shape[1], dtype=whole.dtype, device=whole.device)
    points = [(g, *point) for g in numbers for point in _points(problem.graphs[g], scoring, steps)]
    for number, (g, kept, share) in enumerate(progress_bar(points, unit="gradient", progress=progress)):
        graph, objective = problem.graphs[g], problem.objectives[g]

        def linear(
            predictions: Tensor, prompts: slice, objective: Objective = objective, number: int = number
        ) -> Tensor:
            return objective.linear(predictions, prompts, problem.replacement.seed + number)

        gradient = graph.gradients(kept, linear, changes=graph.whole if scoring == "eap-ig" else None)
        total += share * (gradient if signed else gradient.square())
    return -total / len(numbers) if signed else (total / len(numbers)).sqrt()


def _points(graph: EdgeGraph, scoring: Scoring, steps: int | None) -> Iterator[tuple[Float[Tensor, "edge"], float]]:
    """The share of each edge that is kept where gradients are taken, and the weight of these gradients."""
    whole = torch.ones(len(graph.edges), dtype=graph.references.dtype, device=graph.tokens.device)
    if scoring == "eap-ig":
        embedding = graph.mask([edge for edge in graph.edges if edge.sender == EMBEDDING])
        n = steps or 5
        for step in range(1, n + 1):
            yield torch.where(embedding, step / n, whole), 1 / n
    else:
        n = steps or 4
        for step in range(n):  # the midpoints of equal parts
            yield (step + 0.5) / n * whole, 1 / n
