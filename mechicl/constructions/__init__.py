"""Models whose weights are written by hand, equal to an algorithm by theorem."""

from mechicl.constructions.gradient_descent import gd_plus_plus, gradient_descent
from mechicl.constructions.vocabulary import Head, Stream, assemble

__all__ = ["Head", "Stream", "assemble", "gd_plus_plus", "gradient_descent"]
