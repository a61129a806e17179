"""Interventions in a model's forward pass: patching, ablation, paths and circuits."""

from mechicl.analysis.interventions.ablation import ablate
from mechicl.analysis.interventions.attribution import attribute, correlate_effects
from mechicl.analysis.interventions.circuits import Circuit, find_circuit, measure_circuit
from mechicl.analysis.interventions.corruptions import corrupt, corrupt_tokens
from mechicl.analysis.interventions.edges import Edge, Node
from mechicl.analysis.interventions.metrics import distance_to, logit_difference, next_token_loss, squared_error
from mechicl.analysis.interventions.patching import patch
from mechicl.analysis.interventions.paths import patch_paths
from mechicl.analysis.interventions.sweeps import Sweep

__all__ = [
    "Circuit",
    "Edge",
    "Node",
    "Sweep",
    "ablate",
    "attribute",
    "correlate_effects",
    "corrupt",
    "corrupt_tokens",
    "distance_to",
    "find_circuit",
    "logit_difference",
    "measure_circuit",
    "next_token_loss",
    "patch",
    "patch_paths",
    "squared_error",
]
