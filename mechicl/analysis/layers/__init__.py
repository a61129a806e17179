"""Predictions after every layer of a model, by lens or fitted readouts, and probes for quantities in its layers.

>>> print(fit_readouts(model, task.sample(1024, seed=0)).errors(prompts))
>>> probe(model, {"OLS weights": ols_weights}, task.sample(256, seed=0), prompts).best("OLS weights")
"""

from mechicl.analysis.layers.layer_learners import LayerErrors, Lens
from mechicl.analysis.layers.logits import direct_logit_attribution, logit_lens
from mechicl.analysis.layers.probes import algorithm_weights, cross_moments, ols_weights, probe, second_moments
from mechicl.analysis.layers.readouts import Readouts, fit_readouts

__all__ = [
    "LayerErrors", "Lens", "Readouts", "algorithm_weights", "cross_moments", "direct_logit_attribution", "fit_readouts",
    "logit_lens", "ols_weights", "probe", "second_moments",
]  # fmt: skip
