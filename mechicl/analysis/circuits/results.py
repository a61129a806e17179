"""What a search for a circuit returns: its nodes and edges, and what the metric is with and without them."""

import math
from dataclasses import dataclass

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.circuits.references import Method
from mechicl.models.opening.edges import Edge, Node
from mechicl.statistics import Interval, Result, interval, ratio_interval


@dataclass(frozen=True, eq=False)
class Circuit(Result):
    """The part of a model that carries a metric, and how well it does alone.

    Metrics are per prompt; "ablated" parts have what `method` puts in their place.

    Attributes:
        nodes: heads and MLPs of the circuit, in order of computation.
        edges: connections of the circuit, from the embedding to the output; none if they were not looked for.
        metric: its name.
        method: of ablation.
        full: the metric of the whole model, `[prompt]`.
        ablated: with every head and MLP ablated, `[prompt]`.
        alone: with all but the circuit's nodes ablated, `[prompt]`.
        without: with the circuit's nodes ablated and all others in place, `[prompt]`.
        edges_alone: with every edge cut but the circuit's, `[prompt]`; as `alone` where no edges were looked for.
        node_effects: change of the metric when the circuit loses one of its nodes too, `[node prompt]`.
        edge_effects: change of the metric when the circuit loses one of its edges too, `[edge prompt]`.
        n_nodes: how many heads and MLPs the model has.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    metric: str
    method: Method
    full: Float[Tensor, "prompt"]
    ablated: Float[Tensor, "prompt"]
    alone: Float[Tensor, "prompt"]
    without: Float[Tensor, "prompt"]
    edges_alone: Float[Tensor, "prompt"]
    node_effects: Float[Tensor, "node prompt"]
    edge_effects: Float[Tensor, "edge prompt"]
    n_nodes: int

    @property
    def heads(self) -> list[tuple[int, int]]:
        """Layer and number of its heads."""
        return [(node.layer, node.head) for node in self.nodes if node.head is not None]

    def faithfulness(self, level: float = 0.95) -> Interval:
        """Share of the metric that the circuit keeps when all else is ablated, 1 for all of it.

        `(alone - ablated) / (full - ablated)` of means over prompts, of the edges where there are edges, else of the
        nodes. On the prompts that the circuit was looked for it is within the tolerance of 1 by construction, or within
        twice that with edges: see `measure_circuit`. Where `full` is near 0, as a good model's loss is, a share of 0.95
        may still be many times `full`.
        """
        return ratio_interval(self.edges_alone - self.ablated, self.full - self.ablated, level)

    def node_faithfulness(self, level: float = 0.95) -> Interval:
        """Share of the metric that the circuit's nodes keep, with all edges between them, when all else is ablated."""
        return ratio_interval(self.alone - self.ablated, self.full - self.ablated, level)

    def completeness(self, level: float = 0.95) -> Interval:
        """Share of the metric that is lost without the circuit's nodes, 1 if the rest of the model has none of it.

        `(full - without) / (full - ablated)` of means over prompts: of the subsets that Wang et al. 2023 knock out of
        circuit and model, only the whole circuit. NaN for a circuit of all nodes, of which it says nothing.
        """
        if len(self.nodes) == self.n_nodes:
            return Interval(math.nan, math.nan, math.nan, len(self.full), level)
        return ratio_interval(self.full - self.without, self.full - self.ablated, level)

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """One row a node, then one an edge: the change of the metric without it, with its interval over prompts."""
        rows = []
        for kind, parts, effects in (("node", self.nodes, self.node_effects), ("edge", self.edges, self.edge_effects)):
            for part, effect in zip(parts, effects, strict=True):
                mean = interval(effect, level)
                rows.append((kind, str(part), mean.mean, mean.low, mean.high))
        return pd.DataFrame(rows, columns=["kind", "part", "effect", "low", "high"])

    def __str__(self) -> str:
        metrics = {"whole": self.full, "alone": self.edges_alone, "ablated": self.ablated}
        means = (f"{metric.mean():.4g} {name}" for name, metric in metrics.items())
        whole = len(self.nodes) == self.n_nodes
        return (
            f"{', '.join(map(str, self.nodes)) or 'no node'}{' (the whole model)' if whole else ''}; "
            f"{len(self.edges)} edges; {self.metric} {', '.join(means)}; faithfulness {self.faithfulness()}"
            f"{'' if whole else f', completeness {self.completeness()}'}"
        )
