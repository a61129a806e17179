"""Circuits: the fewest heads, MLPs and edges that carry a metric when everything else is ablated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.interventions.ablation import Method
from mechicl.analysis.interventions.circuit_search import (
    PartialModel,
    search_by_attribution,
    search_edges,
    search_greedily,
)
from mechicl.analysis.interventions.edges import Edge, Node, list_edges
from mechicl.analysis.interventions.metrics import Inputs, Metrics
from mechicl.memory import MEMORY
from mechicl.progress import progress_bar
from mechicl.prompts import At
from mechicl.statistics import Interval, Result, interval, ratio_interval

Search = Literal["greedy", "attribution"]


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


def find_circuit(
    model: Any,
    prompts: Inputs,
    metrics: Metrics = None,
    *,
    search: Search = "greedy",
    method: Method = "mean",
    reference: Inputs | None = None,
    tolerance: float = 0.05,
    edges: bool = True,
    at: At = "query",
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> Circuit:
    """The heads and MLPs that a metric needs, and the edges between them, verified by ablating everything else.

    Nodes: "greedy" ablates one after the other, always the one whose loss changes the mean metric least, until the
    next would move it by more than `tolerance` of what ablating everything does. "attribution" orders nodes by one
    gradient and keeps as few of the first as the tolerance allows: quicker, and blind to what only shows together.
    Edges (our transformers only): among the nodes kept, the least important are cut, in the order of what cutting each
    alone does, up to a place where the metric has moved by `tolerance` once more (found by bisection: there may be
    fewer edges that would do). What is found depends on the prompts; `measure_circuit` says how good it is on others.
    `prompts`, `method`, `reference`, `at`, `seed` and `progress` are as for `ablate`.

    Args:
        model: ours; without edges any of TransformerLens' protocol.
        metrics: one metric, as for `patch`; by default the squared "loss".
        search: see above.
        tolerance: of the mean metric, relative to the change when everything is ablated.
        edges: whether to look for edges too: a run for each edge between the nodes that are kept.
        memory: bound in bytes on the sweeps over nodes; edges need what one run of all prompts takes a few times.

    Raises:
        ValueError: as for `ablate`; several metrics, a tolerance that is not positive, an unknown search, a metric
            that does not change when everything is ablated, or edges of a model of another kind.

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0)
        >>> ids = torch.randint(16, (32, 16)).repeat(1, 2)
        >>> find_circuit(induction, ids, next_token_loss(ids[:, 0])).heads
        [(0, 0), (1, 0)]

    Source: Wang et al. 2023, section 4, and Marks et al. 2024, section 4 (faithfulness and completeness as shares);
    Conmy et al. 2023 (edges); Syed et al. 2023 (attribution).
    """
    if search not in get_args(Search):
        raise ValueError(f"search={search!r} is not one of {get_args(Search)}")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    with progress_bar(unit="run", desc="circuit", progress=progress) as bar:
        partial = PartialModel(
            model, prompts, metrics, at=at, method=method, reference=reference, seed=seed, memory=memory,
            with_edges=edges, advance=bar.update,
        )  # fmt: skip
        full, ablated = partial.metric_without([[], partial.nodes])
        scale = (full - ablated).mean().abs().item()
        if not scale > 1e-6 * (full.abs().mean().item() + 1e-30):
            raise ValueError(
                f"{partial.metric_name!r} does not change when every head and MLP is ablated: there is nothing to find"
            )

        def shift(metric: Tensor, origin: Tensor = full) -> float:
            return abs((metric - origin).mean().item()) / scale

        kept = (search_greedily if search == "greedy" else search_by_attribution)(partial, shift, tolerance)
        return _measure(partial, kept, search_edges(partial, kept, shift, tolerance) if edges else [])


def measure_circuit(
    model: Any,
    circuit: Circuit,
    prompts: Inputs,
    metrics: Metrics = None,
    *,
    reference: Inputs | None = None,
    at: At = "query",
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> Circuit:
    """The same nodes and edges on other prompts: how good a circuit is where it was not looked for.

    The circuit's method of ablation is kept; means are by default those over the other prompts. The arguments are
    those of `find_circuit`.

    Raises:
        ValueError: as for `find_circuit`, but for a metric that does not change, whose shares are NaN; a circuit with
            parts that the model does not have.

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0)
        >>> ids = torch.randint(16, (64, 16)).repeat(1, 2)
        >>> circuit = find_circuit(induction, ids[:32], next_token_loss(ids[:32, 0]), edges=False)
        >>> print(measure_circuit(induction, circuit, ids[32:], next_token_loss(ids[32:, 0])).faithfulness())
    """
    with progress_bar(unit="run", desc="circuit", progress=progress) as bar:
        partial = PartialModel(
            model, prompts, metrics, at=at, method=circuit.method, reference=reference, seed=seed, memory=memory,
            with_edges=bool(circuit.edges), advance=bar.update,
        )  # fmt: skip
        absent: list[Node | Edge] = [node for node in circuit.nodes if node not in partial.nodes]
        if circuit.edges:
            absent += [edge for edge in circuit.edges if edge not in list_edges(partial.adapter)]
        if absent:
            raise ValueError(f"the circuit is of another model: this one has no {absent[0]}")
        return _measure(partial, circuit.nodes, circuit.edges)


def _measure(partial: PartialModel, kept: Sequence[Node], edges: Sequence[Edge]) -> Circuit:
    """The circuit of these nodes and edges, with its metrics."""
    rest = [node for node in partial.nodes if node not in kept]
    full, ablated, alone, without, *fewer_nodes = partial.metric_without(
        [[], partial.nodes, rest, kept, *([*rest, node] for node in kept)]
    )
    edges_alone, fewer_edges = alone, []
    if edges:
        edges_alone = partial.metric_with_only(edges)
        fewer_edges = [partial.metric_with_only([e for e in edges if e != edge]) for edge in edges]
    no_effects = full.new_zeros(0, len(full))
    return Circuit(
        nodes=tuple(kept),
        edges=tuple(edges),
        metric=partial.metric_name,
        method=partial.method,
        full=full,
        ablated=ablated,
        alone=alone,
        without=without,
        edges_alone=edges_alone,
        node_effects=torch.stack(fewer_nodes) - alone if fewer_nodes else no_effects,
        edge_effects=torch.stack(fewer_edges) - edges_alone if fewer_edges else no_effects,
        n_nodes=len(partial.nodes),
    )
