"""Circuits: the heads, MLPs and connections that carry a metric.

>>> find_circuit(model, prompts).heads    # the metric stays with everything else ablated
"""

from mechicl.analysis.circuits.circuit import Circuit, compare_circuits
from mechicl.analysis.circuits.curves import Ranked, circuit_curve
from mechicl.analysis.circuits.graph_files import GraphFile, read_graph, write_graph
from mechicl.analysis.circuits.measures import measure_circuit
from mechicl.analysis.circuits.scores import EdgeScores, score_edges
from mechicl.analysis.circuits.search import find_circuit
from mechicl.models.opening.sites import EMBEDDING, Edge, Node

__all__ = [
    "EMBEDDING", "Circuit", "Edge", "EdgeScores", "GraphFile", "Node", "Ranked", "circuit_curve", "compare_circuits",
    "find_circuit", "measure_circuit", "read_graph", "score_edges", "write_graph",
]  # fmt: skip
