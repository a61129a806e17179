"""How good a circuit is: alone, without it, and without each of its parts."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from mechicl.analysis.circuits.node_search import PartialModel
from mechicl.analysis.circuits.objectives import OneMetric
from mechicl.analysis.circuits.problem import Problem, make_problem
from mechicl.analysis.circuits.results import Circuit
from mechicl.analysis.interventions.metrics import Inputs
from mechicl.base.arguments import checked
from mechicl.base.checks import check_whole
from mechicl.base.memory import MEMORY
from mechicl.base.progress import progress_bar
from mechicl.models.holding import holds_models
from mechicl.models.opening.edges import EMBEDDING, Edge, Node
from mechicl.prompts import At

Subsets = tuple[tuple[Node, ...], ...]


@checked
@holds_models
def measure_circuit(
    model: Any,
    circuit: Circuit,
    prompts: Inputs,
    metrics: OneMetric = None,
    *,
    reference: Inputs | None = None,
    at: At | None = None,
    effects: bool = True,
    n_subsets: int = 0,
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> Circuit:
    """The same nodes and edges on other prompts: how good a circuit is where it was not looked for.

    What cut parts carry is kept ("any" is measured with zero); means are by default those over the other prompts. The
    arguments are those of `find_circuit`.

    Args:
        model: that the circuit is of.
        circuit: whose nodes and edges are measured.
        prompts: what it runs on.
        n_subsets: how many sets of the circuit's nodes are taken out of it, and out of the model, for
            `Circuit.incompleteness`: all sets where there are no more, else random ones, with every node in half of
            them.
        seed: of the sets, and of "resample" and "scrambled".

    Raises:
        ValueError: as for `find_circuit`; a circuit with parts that the model does not have; a reference for a circuit
            whose cut parts carry none.

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0)
        >>> ids = torch.randint(16, (64, 16)).repeat(1, 2)
        >>> circuit = find_circuit(induction, ids[:32], next_token_loss(ids[:32, 0]))
        >>> print(measure_circuit(induction, circuit, ids[32:], next_token_loss(ids[32:, 0])).faithfulness())
    """
    method = "zero" if circuit.method == "any" else circuit.method
    with progress_bar(unit="run", desc="circuit", progress=progress) as bar:
        if not circuit.edges and method != "scrambled":  # which is of edges only
            partial = PartialModel(
                model, prompts, metrics, at=at, method=method, reference=reference, seed=seed, memory=memory,
                advance=bar.update,
            )  # fmt: skip
            _refuse_other_model(circuit, partial.nodes, None)
            return measure_nodes(partial, circuit.nodes, draw_subsets(circuit.nodes, n_subsets, seed))
        problem = make_problem(
            model, prompts, metrics, method=method, reference=reference, at=at, seed=seed, memory=memory,
            advance=bar.update,
        )  # fmt: skip
        _refuse_other_model(circuit, problem.graph.nodes, problem.graph.edges)
        kept, subsets = problem.graph.mask(circuit.edges), draw_subsets(circuit.nodes, n_subsets, seed)
        return measure_edges(problem, kept, circuit.method, subsets, effects=effects)


def measure_nodes(partial: PartialModel, kept: Sequence[Node], subsets: Subsets = ()) -> Circuit:
    """The circuit of these nodes with all edges between them."""
    rest = [node for node in partial.nodes if node not in kept]
    less = [*([*rest, *subset] for subset in subsets), *subsets]
    full, ablated, alone, without, *values = partial.metric_without(
        [[], partial.nodes, rest, kept, *([*rest, node] for node in kept), *less]
    )
    fewer, none = values[: len(kept)], full.new_zeros(0, len(full))
    return Circuit(
        nodes=tuple(kept),
        edges=(),
        metric=partial.objective.name,
        method=partial.method,
        full=full,
        ablated=ablated,
        alone=alone,
        without=without,
        edges_alone=alone,
        node_effects=torch.stack(fewer) - alone if fewer else none,
        edge_effects=none,
        n_nodes=len(partial.nodes),
        **_by_subset(subsets, values[len(kept) :]),
    )


def measure_edges(
    problem: Problem, kept: Bool[Tensor, "edge"], method: Any, subsets: Subsets = (), *, effects: bool = True
) -> Circuit:
    """The circuit of these edges and the nodes that they connect.

    A node is ablated by cutting all edges from it. Effects that are not asked for are NaN.
    """
    graph = problem.graph
    edges = [edge for edge, keep in zip(graph.edges, kept.tolist(), strict=True) if keep]
    ends = {node for edge in edges for node in (edge.sender, edge.receiver)}
    nodes = [node for node in graph.nodes if node in ends and node != EMBEDDING]
    numbers = kept.nonzero().flatten().tolist()

    def without(mask: Tensor, ablated: Sequence[Node]) -> Tensor:
        return mask & ~graph.mask([edge for edge in graph.edges if edge.sender in set(ablated)])

    everything = torch.ones_like(kept)
    between = without(everything, [node for node in graph.nodes if node not in nodes and node != EMBEDDING])
    masks = [between, without(everything, nodes), kept]
    masks += [without(mask, subset) for mask in (kept, everything) for subset in subsets]
    if effects:
        masks += [without(between, [node]) for node in nodes]
        masks += [kept & (torch.arange(len(kept), device=kept.device) != number) for number in numbers]
    alone, lost, edges_alone, *fewer = problem.measure(torch.stack(masks))
    by_subset, fewer = fewer[: 2 * len(subsets)], fewer[2 * len(subsets) :]
    unknown = alone.new_full((1, len(alone)), torch.nan)
    by_node, by_edge = fewer[: len(nodes)], fewer[len(nodes) :]
    return Circuit(
        nodes=tuple(nodes),
        edges=tuple(edges),
        metric=problem.objective.name,
        method=method,
        full=problem.objective.full,
        ablated=problem.objective.ablated,
        alone=alone,
        without=lost,
        edges_alone=edges_alone,
        node_effects=torch.stack([effect - alone for effect in by_node]) if by_node else unknown.repeat(len(nodes), 1),
        edge_effects=(
            torch.stack([effect - edges_alone for effect in by_edge]) if by_edge else unknown.repeat(len(edges), 1)
        ),
        n_nodes=len(graph.nodes) - 1,
        **_by_subset(subsets, by_subset),
    )


def draw_subsets(nodes: Sequence[Node], n_subsets: int, seed: int) -> Subsets:
    """Different sets of nodes, none of them empty: all there are, or random ones, with every node in half of them.

    Raises:
        ValueError: a number of subsets below 0.
    """
    check_whole(0, n_subsets=n_subsets)
    n = len(nodes)
    if n < 32 and 2**n - 1 <= n_subsets:
        numbers = list(range(1, 2**n))
    else:
        rng, drawn = random.Random(seed), dict[int, None]()
        while len(drawn) < n_subsets:
            if number := rng.getrandbits(n):
                drawn[number] = None
        numbers = list(drawn)
    return tuple(tuple(node for i, node in enumerate(nodes) if number >> i & 1) for number in numbers)


def _by_subset(subsets: Subsets, values: Sequence[Tensor]) -> dict[str, Any]:
    """The fields of what was measured first in the circuit, then in the model."""
    if not subsets:
        return {}
    n = len(subsets)
    return {
        "subsets": subsets,
        "alone_without": torch.stack([*values[:n]]),
        "whole_without": torch.stack([*values[n:]]),
    }


def _refuse_other_model(circuit: Circuit, nodes: Sequence[Node], edges: Sequence[Edge] | None) -> None:
    for parts, there in ((circuit.nodes, set(nodes)), (circuit.edges, set(edges or ()))):
        absent = [part for part in parts if part not in there]
        if absent:
            raise ValueError(
                f"the circuit is of another model: this one has no {absent[0]}. Measure it on the model that it was "
                f"found in, or look for one here with find_circuit"
            )
    n_nodes = len(set(nodes) - {EMBEDDING})
    if circuit.n_nodes != n_nodes:
        raise ValueError(
            f"the circuit is of another model, with {circuit.n_nodes} heads and MLPs; this one has {n_nodes}"
        )
