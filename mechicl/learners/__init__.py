"""Learners: anything that predicts a query's target, or the next token, from the prompt before it."""

from mechicl.learners.learners import (
    AlgorithmFamily,
    AlgorithmLearner,
    IterativeLearner,
    Learner,
    Learners,
    PrefixLearner,
    Trajectory,
    prompt_batches,
    squared_errors,
)
from mechicl.learners.token_learners import TokenAlgorithmLearner, TokenLearner, token_log_probabilities, token_losses

__all__ = [
    "AlgorithmFamily", "AlgorithmLearner", "IterativeLearner", "Learner", "Learners", "PrefixLearner",
    "TokenAlgorithmLearner", "TokenLearner", "Trajectory", "prompt_batches", "squared_errors",
    "token_log_probabilities", "token_losses",
]  # fmt: skip
