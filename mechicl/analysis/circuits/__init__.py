"""Which parts carry it, and along which edges? Circuits: the fewest heads, MLPs and connections that are needed.

>>> circuit = find_circuit(model, prompts)    # everything else is ablated, and the metric stays
>>> circuit.heads, circuit.faithfulness()
"""

from mechicl.analysis.circuits.comparison import CircuitComparison, compare_circuits
from mechicl.analysis.circuits.curves import CircuitCurve, circuit_curve
from mechicl.analysis.circuits.measures import measure_circuit
from mechicl.analysis.circuits.ranking import auroc
from mechicl.analysis.circuits.results import Circuit
from mechicl.analysis.circuits.scores import EdgeScores, score_edges
from mechicl.analysis.circuits.search import find_circuit
from mechicl.models.opening.edges import EMBEDDING, Edge, Node

__all__ = [
    "EMBEDDING",
    "Circuit",
    "CircuitComparison",
    "CircuitCurve",
    "Edge",
    "EdgeScores",
    "Node",
    "auroc",
    "circuit_curve",
    "compare_circuits",
    "find_circuit",
    "measure_circuit",
    "score_edges",
]
