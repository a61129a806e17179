"""How good a circuit is: alone, without it, and without each of its parts."""

from collections.abc import Sequence
from typing import Any

import torch

from mechicl.analysis.circuits.node_search import PartialModel
from mechicl.analysis.circuits.results import Circuit
from mechicl.analysis.interventions.metrics import Inputs, Metrics
from mechicl.memory import MEMORY
from mechicl.models.opening.edges import Edge, Node, list_edges
from mechicl.progress import progress_bar
from mechicl.prompts import At


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
            absent += [edge for edge in circuit.edges if edge not in list_edges(partial.adapter.model)]
        if absent:
            raise ValueError(f"the circuit is of another model: this one has no {absent[0]}")
        return measure_parts(partial, circuit.nodes, circuit.edges)


def measure_parts(partial: PartialModel, kept: Sequence[Node], edges: Sequence[Edge]) -> Circuit:
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
