"""Reference learners. Each takes prompts and returns a `Trajectory` over all prefixes and all requested steps."""

from mechicl.algorithms.gradient_descent import gd_plus_plus, gradient_descent
from mechicl.algorithms.least_squares import bayes, ols, ridge
from mechicl.algorithms.tuning import tuned_step_size

__all__ = ["bayes", "gd_plus_plus", "gradient_descent", "ols", "ridge", "tuned_step_size"]
