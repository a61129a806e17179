"""Trained weights: constructions fitted to them, symmetries, paths between models, exact optima.

>>> fit_construction(model, "gd++", task).projected.parameters["gamma"]  # read off the weights
>>> interpolate(model, construction, prompts).midpoint_excess()          # does the loss rise on the way?
"""

from mechicl.analysis.weights.closed_forms import linear_attention_optimum, one_step_optimum
from mechicl.analysis.weights.fits import fit_construction
from mechicl.analysis.weights.paths import LossPath, connect_modes, interpolate
from mechicl.analysis.weights.products import WeightProducts, read_weight_products, replace_products

__all__ = [
    "LossPath", "WeightProducts", "connect_modes", "fit_construction", "interpolate", "linear_attention_optimum",
    "one_step_optimum", "read_weight_products", "replace_products",
]  # fmt: skip
