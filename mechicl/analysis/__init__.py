"""Analyses: they take learners and return result objects of per-prompt tensors; nothing is averaged before you ask."""

from mechicl.analysis.alignment import Alignment, align, sensitivities
from mechicl.analysis.closed_forms import OneStepOptimum, linear_attention_optimum, one_step_optimum
from mechicl.analysis.context_use import (
    Forgetting,
    OrderSensitivity,
    OutsideSpan,
    forgetting,
    order_sensitivity,
    outside_span,
)
from mechicl.analysis.dual_form import DualForm, dual_form
from mechicl.analysis.growth import Growth, fit_growth
from mechicl.analysis.induced_weights import induced_weights, regressed_weights
from mechicl.analysis.interpolation import InterpolationPath, interpolate
from mechicl.analysis.layer_learners import LayerErrors, Lens, layer_errors
from mechicl.analysis.matching import BestMatch, Match, match
from mechicl.analysis.one_layer import OneLayerStudy, study_one_layer
from mechicl.analysis.probes import (
    ProbeResult,
    cross_moments,
    gradient_descent_weights,
    newton_weights,
    ols_weights,
    probe,
    second_moments,
)
from mechicl.analysis.readouts import Readouts, fit_readouts, train_readouts
from mechicl.analysis.rollout import repeated
from mechicl.analysis.shifts import FOREIGN_INPUTS, ShiftedLosses, losses_over_scales
from mechicl.analysis.similarity import similarity_of_errors, similarity_of_weights
from mechicl.analysis.weights import (
    GradientDescentFit,
    WeightProducts,
    read_gradient_descent,
    trained_part,
    weight_products,
    with_products,
)

__all__ = [
    "FOREIGN_INPUTS",
    "Alignment",
    "BestMatch",
    "DualForm",
    "Forgetting",
    "GradientDescentFit",
    "Growth",
    "InterpolationPath",
    "LayerErrors",
    "Lens",
    "Match",
    "OneLayerStudy",
    "OneStepOptimum",
    "OrderSensitivity",
    "OutsideSpan",
    "ProbeResult",
    "Readouts",
    "ShiftedLosses",
    "WeightProducts",
    "align",
    "cross_moments",
    "dual_form",
    "fit_growth",
    "fit_readouts",
    "forgetting",
    "gradient_descent_weights",
    "induced_weights",
    "interpolate",
    "layer_errors",
    "linear_attention_optimum",
    "losses_over_scales",
    "match",
    "newton_weights",
    "ols_weights",
    "one_step_optimum",
    "order_sensitivity",
    "outside_span",
    "probe",
    "read_gradient_descent",
    "regressed_weights",
    "repeated",
    "second_moments",
    "sensitivities",
    "similarity_of_errors",
    "similarity_of_weights",
    "study_one_layer",
    "train_readouts",
    "trained_part",
    "weight_products",
    "with_products",
]
