"""Is it in the weights? Constructions fitted to trained weights, symmetries, paths between models, exact optima.

>>> fit_construction(model, "gd++", task).projected.parameters["gamma"]  # read off the weights
>>> interpolate(model, construction, prompts).midpoint_excess()          # does the loss rise on the way?
"""

from mechicl.analysis.weights.closed_forms import (
    OneStepOptimum,
    linear_attention_optimum,
    one_step_optimum,
    preconditioned_gd_optimum,
)
from mechicl.analysis.weights.conditioning import Conditioning, EigenvalueRange, conditioning, transformed_eigenvalues
from mechicl.analysis.weights.connectivity import Curve, ModeConnectivity, Path, interpolate, mode_connectivity
from mechicl.analysis.weights.construction_families import FamilyName
from mechicl.analysis.weights.fits import ConstructionFit, Members, fit_construction
from mechicl.analysis.weights.kernels import (
    KernelView,
    PredictionParts,
    adapted_functions,
    initial_function,
    view_kernel,
)
from mechicl.analysis.weights.products import WeightProducts, weight_products, with_products
from mechicl.analysis.weights.rollout import repeated
from mechicl.analysis.weights.symmetries import aligned, lifted, rescaled

__all__ = [
    "Conditioning",
    "ConstructionFit",
    "Curve",
    "EigenvalueRange",
    "FamilyName",
    "KernelView",
    "Members",
    "ModeConnectivity",
    "OneStepOptimum",
    "Path",
    "PredictionParts",
    "WeightProducts",
    "adapted_functions",
    "aligned",
    "conditioning",
    "fit_construction",
    "initial_function",
    "interpolate",
    "lifted",
    "linear_attention_optimum",
    "mode_connectivity",
    "one_step_optimum",
    "preconditioned_gd_optimum",
    "repeated",
    "rescaled",
    "transformed_eigenvalues",
    "view_kernel",
    "weight_products",
    "with_products",
]
