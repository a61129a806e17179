"""Interventions, which show what a model needs: activations replaced, ablated, and followed along paths.

>>> patch(model, prompts, corrupt(prompts, "labels"), "z").recovered()    # which heads carry the labels
>>> ablate(model, prompts, "z", ("layer", "head")).strongest(3)           # which heads it cannot do without
"""

from mechicl.analysis.interventions.ablation import Replacement, ablate
from mechicl.analysis.interventions.attribution import attribute, correlate_effects
from mechicl.analysis.interventions.corruptions import corrupt, corrupt_tokens
from mechicl.analysis.interventions.metrics import (
    Metric,
    logit_difference,
    next_token_loss,
    squared_error,
    target_probability,
)
from mechicl.analysis.interventions.patching import patch
from mechicl.analysis.interventions.paths import patch_paths
from mechicl.analysis.interventions.session import PatchingSession
from mechicl.analysis.interventions.sweeps import InterventionSweep
from mechicl.models.opening.sites import Site

__all__ = [
    "InterventionSweep", "Metric", "PatchingSession", "Replacement", "Site", "ablate", "attribute",
    "correlate_effects", "corrupt", "corrupt_tokens", "logit_difference", "next_token_loss", "patch", "patch_paths",
    "squared_error", "target_probability",
]  # fmt: skip
