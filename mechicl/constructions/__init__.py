"""Models whose weights are written by hand, equal to an algorithm by theorem.

Each function builds a float64 `HookedTransformer` for prompts of `n_context` points, inputs of `x_dim` and targets of
`y_dim` dimensions. `steps` are layers. `largest_eigenvalue` is λ_max of S on the prompts that the model is meant for:
where it is given, parameters that diverge there give a `DivergenceWarning`. `certificates_table()` says how exact all
of them are. `known_models()` are these and a few more, plain or in a disguise (`hide`), with what they run.
"""

from mechicl.base.arguments import check_arguments
from mechicl.constructions.certificates import Certificate, certificates, certificates_table
from mechicl.constructions.compression import CompressedModel, compress
from mechicl.constructions.copying import copy_targets, copy_then_gradient_descent
from mechicl.constructions.gradient_descent import gd_plus_plus, gradient_descent
from mechicl.constructions.hiding import HiddenModel, hide
from mechicl.constructions.induction import induction
from mechicl.constructions.kernel import kernel_gradient_descent
from mechicl.constructions.known import KnownModel, known_models
from mechicl.constructions.newton import newton, ridge, with_pseudo_examples
from mechicl.constructions.one_step import linear_optimum, preconditioned_gd, relu_optimum
from mechicl.constructions.operations import aff, div, mov, mul, total
from mechicl.constructions.softmax import softmax_gradient_descent
from mechicl.constructions.supports import WeightsCircuit, weights_circuit
from mechicl.constructions.vocabulary import Head, Hidden, Layer, Stream, assemble, signed_pair

__all__ = [
    "Certificate",
    "CompressedModel",
    "Head",
    "Hidden",
    "HiddenModel",
    "KnownModel",
    "Layer",
    "Stream",
    "WeightsCircuit",
    "aff",
    "assemble",
    "certificates",
    "certificates_table",
    "compress",
    "copy_targets",
    "copy_then_gradient_descent",
    "div",
    "gd_plus_plus",
    "gradient_descent",
    "hide",
    "induction",
    "kernel_gradient_descent",
    "known_models",
    "linear_optimum",
    "mov",
    "mul",
    "newton",
    "preconditioned_gd",
    "relu_optimum",
    "ridge",
    "signed_pair",
    "softmax_gradient_descent",
    "total",
    "weights_circuit",
    "with_pseudo_examples",
]

check_arguments(__name__)
