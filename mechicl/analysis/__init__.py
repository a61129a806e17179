"""Analyses: they take learners and return result objects of per-prompt tensors; nothing is averaged before you ask."""

from mechicl.analysis.alignment import Alignment, align, sensitivities
from mechicl.analysis.closed_forms import OneStepOptimum, linear_attention_optimum, one_step_optimum
from mechicl.analysis.interpolation import InterpolationPath, interpolate
from mechicl.analysis.one_layer import OneLayerStudy, study_one_layer
from mechicl.analysis.rollout import layer_trajectory, repeated
from mechicl.analysis.shifts import FOREIGN_INPUTS, ShiftedLosses, losses_over_scales
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
    "GradientDescentFit",
    "InterpolationPath",
    "OneLayerStudy",
    "OneStepOptimum",
    "ShiftedLosses",
    "WeightProducts",
    "align",
    "interpolate",
    "layer_trajectory",
    "linear_attention_optimum",
    "losses_over_scales",
    "one_step_optimum",
    "read_gradient_descent",
    "repeated",
    "sensitivities",
    "study_one_layer",
    "trained_part",
    "weight_products",
    "with_products",
]
