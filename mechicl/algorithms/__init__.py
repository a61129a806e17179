"""Reference learners: each takes prompts and returns a `Trajectory`, predictions `[step prompt point y]`.

Every point is predicted from the points before it, so that each prefix of a prompt is a separate context; the empty
one predicts 0. `at="query"` predicts the query alone, and `with_weights=True` also returns the weights
`[step prompt point x y]` that predictions come from. `steps` is a number of steps, or several in any order; 0 predicts
0 unless stated otherwise. Algorithms without steps have one. Arithmetic is float64; predictions have the prompts'
dtype. Learners of Boolean functions predict means of the targets from -1 to 1 (the sign is the likelier target),
classifiers the probabilities of the labels. Those of tokens (`bigram_bayes`, ...) return log-probabilities
`[prompt read token]` in nats, float64: index i of `read` predicts token i + 1 from tokens 0..i.

`AlgorithmLearner` makes a learner of an algorithm and its hyperparameters; `references(task)` returns the best known
learners of a task. `algorithms.stepwise` has them as causal models. A card (`Algorithm`, `cards()`, `register`)
contains everything that the analyses know about an algorithm.
"""

from mechicl.algorithms import stepwise
from mechicl.algorithms.baselines import averaging, greedy_tree, lasso, nearest_neighbours
from mechicl.algorithms.card import Algorithm, FitProblem, FittedAlgorithm, cards, register
from mechicl.algorithms.clusters import in_context_classifier, in_weights_classifier
from mechicl.algorithms.discrete import conjunction_bayes, elimination, gf2_elimination, parity_bayes
from mechicl.algorithms.first_order import chebyshev, conjugate_gradient, steepest_descent
from mechicl.algorithms.gradient_descent import gd_plus_plus, gradient_descent
from mechicl.algorithms.kernel_smoothing import kernel_smoothing
from mechicl.algorithms.least_squares import bayes, ols, ridge, ridge_path
from mechicl.algorithms.mixtures import dmmse, mixture_bayes, sparse_bayes
from mechicl.algorithms.newton import newton
from mechicl.algorithms.nonlinear import logistic, network_descent, on_features
from mechicl.algorithms.other_regressions import gradient_flow, huber, kernel_ridge, on_unit_inputs
from mechicl.algorithms.preconditioned import preconditioned_gd
from mechicl.algorithms.recursive import (
    discounted_averaging,
    discounted_gradient_descent,
    online_gradient_descent,
    recursive_least_squares,
)
from mechicl.algorithms.references import references
from mechicl.algorithms.spectra import ConditioningWarning, DivergenceWarning
from mechicl.algorithms.token_counts import bigram_bayes, ngram_bayes, pool_bayes, uniform_tokens, unigram_bayes
from mechicl.algorithms.tuning import stable_step_size, tuned_step_size

__all__ = [
    "Algorithm", "ConditioningWarning", "DivergenceWarning", "FitProblem", "FittedAlgorithm", "averaging", "bayes",
    "bigram_bayes", "cards", "chebyshev", "conjugate_gradient", "conjunction_bayes", "discounted_averaging",
    "discounted_gradient_descent", "dmmse", "elimination", "gd_plus_plus", "gf2_elimination", "gradient_descent",
    "gradient_flow", "greedy_tree", "huber", "in_context_classifier", "in_weights_classifier", "kernel_ridge",
    "kernel_smoothing", "lasso", "logistic", "mixture_bayes", "nearest_neighbours", "network_descent", "newton",
    "ngram_bayes", "ols", "on_features", "on_unit_inputs", "online_gradient_descent", "parity_bayes",
    "pool_bayes", "preconditioned_gd", "recursive_least_squares", "references", "register",
    "ridge", "ridge_path", "sparse_bayes", "stable_step_size", "steepest_descent", "stepwise",
    "tuned_step_size", "uniform_tokens", "unigram_bayes",
]  # fmt: skip
