"""Is it in the weights? Constructions fitted to trained weights, symmetries, paths between models, exact optima.

>>> fit_construction(model, "gd++", task).projected.parameters["gamma"]  # read off the weights
>>> interpolate(model, construction, prompts).midpoint_excess()          # does the loss rise on the way?
"""

from mechicl.analysis.weights.adaptation import adapted_functions
from mechicl.analysis.weights.closed_forms import (
    OneStepOptimum,
    linear_attention_optimum,
    one_step_optimum,
    preconditioned_gd_optimum,
)
from mechicl.analysis.weights.conditioning import (
    Conditioning,
    EigenvalueRange,
    measure_conditioning,
    transformed_eigenvalues,
)
from mechicl.analysis.weights.connectivity import ModeConnectivity, connect_modes
from mechicl.analysis.weights.construction_families import FamilyName
from mechicl.analysis.weights.fits import ConstructionFit, Members, fit_construction
from mechicl.analysis.weights.kernels import (
    KernelView,
    PredictionParts,
    initial_function,
    view_kernel,
)
from mechicl.analysis.weights.paths import LossPath, WeightCurve, interpolate
from mechicl.analysis.weights.products import WeightProducts, read_weight_products, replace_products
from mechicl.analysis.weights.rollout import repeat_layers
from mechicl.analysis.weights.symmetries import align_heads, lift_heads, rescale_heads
from mechicl.base.arguments import check_arguments

__all__ = [
    "Conditioning",
    "ConstructionFit",
    "EigenvalueRange",
    "FamilyName",
    "KernelView",
    "LossPath",
    "Members",
    "ModeConnectivity",
    "OneStepOptimum",
    "PredictionParts",
    "WeightCurve",
    "WeightProducts",
    "adapted_functions",
    "align_heads",
    "connect_modes",
    "fit_construction",
    "initial_function",
    "interpolate",
    "lift_heads",
    "linear_attention_optimum",
    "measure_conditioning",
    "one_step_optimum",
    "preconditioned_gd_optimum",
    "read_weight_products",
    "repeat_layers",
    "replace_products",
    "rescale_heads",
    "transformed_eigenvalues",
    "view_kernel",
]

check_arguments(__name__)
