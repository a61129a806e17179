"""What does each layer hold? Readouts and probes of the residual stream, layer by layer.

>>> fit_readouts(model, fitting_prompts).errors(prompts).by_layer()      # what a linear readout predicts
>>> probe(model, {"OLS weights": ols_weights}, fitting_prompts, prompts)  # what can be read off which token
"""

from mechicl.analysis.layers.layer_learners import LayerErrors, Lens
from mechicl.analysis.layers.probes import (
    ProbeResult,
    cross_moments,
    gradient_descent_weights,
    newton_weights,
    ols_weights,
    probe,
    ridge_path_weights,
    second_moments,
)
from mechicl.analysis.layers.readouts import Readouts, fit_readouts, train_readouts
from mechicl.base.arguments import check_arguments

__all__ = [
    "LayerErrors",
    "Lens",
    "ProbeResult",
    "Readouts",
    "cross_moments",
    "fit_readouts",
    "gradient_descent_weights",
    "newton_weights",
    "ols_weights",
    "probe",
    "ridge_path_weights",
    "second_moments",
    "train_readouts",
]

check_arguments(__name__)
