"""Models whose weights are written by hand, equal to an algorithm by theorem.

Each function builds a float64 `HookedTransformer` for prompts of `n_context` points, inputs of `x_dim` and targets of
`y_dim` dimensions. Where a docstring does not limit it, `n_context` is recorded only, and prompts of any number work.
`steps` are layers. `known_models()` returns these and a few more, plain or obfuscated (`hide`), with the algorithm
that each runs.
"""

from mechicl.constructions.copying import copy_targets, copy_then_gradient_descent, induction
from mechicl.constructions.gradient_descent import (
    gd_plus_plus,
    gradient_descent,
    kernel_gradient_descent,
    linear_optimum,
    preconditioned_gd,
    relu_optimum,
    softmax_gradient_descent,
)
from mechicl.constructions.hiding import compress, hide
from mechicl.constructions.known import known_models
from mechicl.constructions.newton import newton
from mechicl.constructions.recurrent import (
    discounted_averaging,
    discounted_gradient_descent,
    online_gradient_descent,
    recursive_least_squares,
)
from mechicl.constructions.supports import weights_circuit
from mechicl.constructions.vocabulary import Head, Layer, Stream, assemble

__all__ = [
    "Head", "Layer", "Stream", "assemble", "compress", "copy_targets",
    "copy_then_gradient_descent", "discounted_averaging", "discounted_gradient_descent", "gd_plus_plus",
    "gradient_descent", "hide", "induction", "kernel_gradient_descent", "known_models", "linear_optimum", "newton",
    "online_gradient_descent", "preconditioned_gd", "recursive_least_squares", "relu_optimum",
    "softmax_gradient_descent", "weights_circuit",
]  # fmt: skip
