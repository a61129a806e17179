"""Which parts of a model carry a metric, and along which edges? Circuits of heads, MLPs and connections.

>>> circuit = find_circuit(model, prompts)    # with everything else ablated, the metric stays
>>> circuit.heads, circuit.faithfulness()
"""

from mechicl.analysis.circuits.circuit import Circuit
from mechicl.analysis.circuits.circuit_comparison import CircuitComparison, compare_circuits
from mechicl.analysis.circuits.curves import CircuitCurve, circuit_curve
from mechicl.analysis.circuits.measures import measure_circuit
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
    "circuit_curve",
    "compare_circuits",
    "find_circuit",
    "measure_circuit",
    "score_edges",
]
