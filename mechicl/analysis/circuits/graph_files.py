"""Circuits in the JSON files of EAP-IG, which the Mechanistic Interpretability Benchmark calls importances.json."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechicl.analysis.circuits.circuit import NodesAndEdges
from mechicl.analysis.circuits.scores import Scores, read_scores
from mechicl.base.arguments import checked
from mechicl.base.files import read_json, write_json
from mechicl.models.opening.sites import EMBEDDING, Edge, Node, is_parallel, list_edges, list_nodes, list_reached


@dataclass(frozen=True)
class GraphFile:
    """Scores, nodes and edges in a graph file of EAP-IG or MIB; see `read_graph`."""

    scores: dict[Edge, float]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


@checked
def write_graph(path: str | Path, model: Any, scores: Scores, circuit: NodesAndEdges | Collection[Edge] = ()) -> Path:
    """Write scores of edges, and a circuit, for EAP-IG (`Graph.from_json`) and the benchmark MIB.

    Returns the file's path. Those formats have an edge by k and v to every head. An edge to heads that share keys and
    values is written as one edge to each, with equal parts of its score. Source: Hanna et al. 2024, "Have faith in
    faithfulness"; Mueller et al. 2025, "MIB".

    Args:
        path: file to write, such as "importances.json".
        model: the model whose edges were scored.
        scores: scores of all edges, from `score_edges`.
        circuit: a circuit, or its edges; with none, the file has scores only.

    Example:
        >>> write_graph("importances.json", model, score_edges(model, prompts))
    """
    edges = list_edges(model)
    kept = set(circuit.edges if isinstance(circuit, NodesAndEdges) else circuit)
    if other := kept - set(edges):
        raise ValueError(f"circuit has {len(other)} edges that the model does not have, such as {next(iter(other))}")
    values = dict(zip(edges, read_scores(scores, edges).tolist(), strict=True))
    written = {
        name: {"score": values[edge] / len(names), "in_graph": edge in kept}
        for edge in edges for names in [list(_names(model, edge))] for name in names
    }  # fmt: skip
    used = _nodes_of(model, kept)
    nodes = {_node_name(node): {"in_graph": node in used} for node in list_nodes(model)}
    cfg = {name: int(getattr(model.cfg, name)) for name in ("n_layers", "n_heads", "d_model")}
    cfg["parallel_attn_mlp"] = is_parallel(model)
    nodes["logits"] = {"in_graph": True}
    write_json(Path(path), {"cfg": cfg, "nodes": nodes, "edges": written})
    return Path(path)


@checked
def read_graph(path: str | Path, model: Any) -> GraphFile:
    """Read the scores of edges, and the circuit, from a graph file of EAP-IG or MIB.

    Args:
        path: a JSON file with `cfg`, `nodes` and `edges`.
        model: the model that the file is about.

    Returns:
        `scores` by edge (0 for edges that the file lacks), and the circuit's `nodes` (heads, MLPs, and the embedding if
        it has an edge) and `edges` (none if the file has only scores). Where heads share keys and values, the scores of
        their edges by k or v are added up.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a damaged file, a model of another shape, or a score that is not finite.

    Example:
        >>> found = read_graph("importances.json", model)
        >>> circuit_curve(model, {"EAP-IG": found.scores}, prompts)
    """
    data = read_json(Path(path))
    if not all(isinstance(data.get(key), dict) for key in ("cfg", "nodes", "edges")):
        raise ValueError(f"{path} must contain cfg, nodes and edges, got {sorted(data)}")
    for name in ("n_layers", "n_heads"):
        if data["cfg"].get(name) != getattr(model.cfg, name):
            raise ValueError(f"{path} has {name}={data['cfg'].get(name)}, the model {getattr(model.cfg, name)}")
    edge_of = {name: edge for edge in list_edges(model) for name in _names(model, edge)}
    scores = dict.fromkeys(edge_of.values(), 0.0)
    kept: dict[Edge, None] = {}
    for name, values in data["edges"].items():
        if name not in edge_of:
            raise ValueError(f"{path} has an edge that the model does not have: {name!r}")
        values = values if isinstance(values, dict) else {"in_graph": values}
        score = values.get("score", 0.0)
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise ValueError(f"{path}: the score of {name} must be a finite number, got {score!r}")
        scores[edge_of[name]] += score
        if values.get("in_graph"):
            kept[edge_of[name]] = None
    return GraphFile(scores, _nodes_of(model, kept), tuple(kept))


def _nodes_of(model: Any, edges: Collection[Edge]) -> tuple[Node, ...]:
    ends = {node for edge in edges for node in (edge.sender, *list_reached(model, edge))}
    return tuple(node for node in list_nodes(model) if node in ends)


def _names(model: Any, edge: Edge) -> Iterator[str]:
    by = f"<{edge.by}>" if edge.by else ""
    for receiver in list_reached(model, edge) or [None]:
        yield f"{_node_name(edge.sender)}->{_node_name(receiver)}{by}"


def _node_name(node: Node | None) -> str:
    if node is None:
        return "logits"
    if node == EMBEDDING:
        return "input"
    return f"m{node.layer}" if node.head is None else f"a{node.layer}.h{node.head}"
