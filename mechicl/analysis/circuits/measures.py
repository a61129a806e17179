"""Measure a circuit: the metric of the circuit alone, of the model without it, and without each of its parts."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from mechicl.analysis.circuits.circuit import Circuit
from mechicl.analysis.circuits.problem import OneMetric, Problem, make_problem
from mechicl.analysis.interventions.ablation import Replacement
from mechicl.analysis.interventions.metrics import Inputs
from mechicl.base.arguments import Natural, checked
from mechicl.base.progress import progress_bar
from mechicl.models.opening.sites import EMBEDDING, Node, sole_reader
from mechicl.prompts import At

Subsets = tuple[tuple[Node, ...], ...]


@checked(locks=True)
def measure_circuit(
    model: Any,
    circuit: Circuit,
    prompts: Inputs,
    metrics: OneMetric = None,
    *,
    reference: Inputs | None = None,
    at: At | None = None,
    n_subsets: Natural = 0,
    seed: int = 0,
    progress: bool | None = None,
) -> Circuit:
    """Measure a circuit on other prompts than those it was found on, to see whether it generalizes.

    Args:
        model: the model that the circuit was found in.
        circuit: the circuit to measure, from `find_circuit`.
        metrics: as for `find_circuit`, like `at`.
        reference: prompts that replacements of cut edges come from, by default the new prompts. Edges are replaced by
            the method of the circuit's search, or by zeros if that was "any".
        n_subsets: number of subsets of the circuit's nodes to remove from circuit and model, for
            `Circuit.incompleteness`: all if there are at most that many, else random ones.

    Returns:
        The same nodes and edges with new measurements: see `Circuit.faithfulness`, `completeness` and `incompleteness`.
        The effect of each node and edge is measured too, if it was for `circuit`.

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0)
        >>> ids = torch.randint(16, (64, 16)).repeat(1, 2)
        >>> circuit = find_circuit(induction, ids[:32], next_token_loss(ids[:32, 0]))
        >>> print(measure_circuit(induction, circuit, ids[32:], next_token_loss(ids[32:, 0])).faithfulness())
    """
    method: Any = {"any": "zero", "counterfactual": "resample"}.get(circuit.method, circuit.method)
    with progress_bar(unit="run", desc="circuit", progress=progress) as bar:
        replacement = Replacement(method, reference, seed)
        problem = make_problem(model, prompts, metrics, method=replacement, at=at, advance=bar.update)
        graph = problem.graph
        absent = [*(set(circuit.nodes) - set(graph.nodes)), *(set(circuit.edges) - set(graph.edges))]
        if absent or circuit.n_nodes != len(graph.nodes) - 1:
            other = f"no {absent[0]}" if absent else f"{len(graph.nodes) - 1} heads and MLPs, not {circuit.n_nodes}"
            raise ValueError(f"circuit is of another model: this one has {other}")
        subsets = draw_subsets(circuit.nodes, n_subsets, seed)
        effects = not circuit.node_effects.isnan().all()
        return measure_edges(problem, graph.mask(circuit.edges), subsets, method=circuit.method, effects=bool(effects))


def measure_edges(
    problem: Problem, kept: Bool[Tensor, "edge"], subsets: Subsets = (), *, method: str = "", effects: bool = True
) -> Circuit:
    """Measure the circuit of these edges; a node is ablated by cutting its edges. Effects are optional (else NaN)."""
    graph = problem.graph
    edges = [edge for edge, keep in zip(graph.edges, kept.tolist(), strict=True) if keep]
    model = graph.parts.adapter.model
    ends = {node for edge in edges for node in (edge.sender, *sole_reader(model, edge))} - {EMBEDDING}
    nodes = [node for node in graph.nodes if node in ends]
    everything = torch.ones_like(kept)

    def without(mask: Tensor, ablated: Sequence[Node]) -> Tensor:
        return mask & ~graph.mask([edge for edge in graph.edges if edge.sender in set(ablated)])

    between = without(everything, [node for node in graph.nodes[1:] if node not in ends])
    masks = [between, without(everything, nodes), kept]
    masks += [without(mask, subset) for mask in (kept, everything) for subset in subsets]
    if effects:
        numbers = torch.arange(len(kept), device=kept.device)
        masks += [without(between, [node]) for node in nodes]
        masks += [kept & (numbers != number) for number in kept.nonzero()]
    values = problem.measure(torch.stack(masks))
    alone, lost, edges_alone = values[:3]
    n = len(subsets)
    by_subset, by_part = values[3 : 3 + 2 * n], values[3 + 2 * n :]
    if not effects:
        by_part = values.new_full((len(nodes) + len(edges), values.shape[1]), torch.nan)
    return Circuit(
        nodes=tuple(nodes),
        edges=tuple(edges),
        metric=problem.objective.name,
        method=method or problem.replacement.method,
        full=problem.objective.full,
        ablated=problem.objective.ablated,
        alone=alone,
        without=lost,
        edges_alone=edges_alone,
        node_effects=by_part[: len(nodes)] - alone,
        edge_effects=by_part[len(nodes) :] - edges_alone,
        n_nodes=len(graph.nodes) - 1,
        subsets=subsets,
        alone_without=by_subset[:n] if n else None,
        whole_without=by_subset[n:] if n else None,
    )


def draw_subsets(nodes: Sequence[Node], n_subsets: int, seed: int) -> Subsets:
    """Draw different nonempty sets of nodes: all if they are few, or random ones, with every node in half of them."""
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
