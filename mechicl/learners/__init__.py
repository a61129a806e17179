"""Learners: anything that predicts a query's target, or the next token, from the prompt before it."""

from mechicl.learners.learners import (
    AlgorithmFamily,
    AlgorithmLearner,
    IterativeLearner,
    Learner,
    Learners,
    PrefixLearner,
    Trajectory,
    bytes_per_prompt,
    named_learners,
    prompt_batches,
    squared_errors,
)
from mechicl.learners.token_learners import (
    TokenAlgorithmLearner,
    TokenLearner,
    as_token_learner,
    named_token_learners,
    token_log_probabilities,
    token_losses,
)

__all__ = [
    "AlgorithmFamily",
    "AlgorithmLearner",
    "IterativeLearner",
    "Learner",
    "Learners",
    "PrefixLearner",
    "TokenAlgorithmLearner",
    "TokenLearner",
    "Trajectory",
    "as_token_learner",
    "bytes_per_prompt",
    "named_learners",
    "named_token_learners",
    "prompt_batches",
    "squared_errors",
    "token_log_probabilities",
    "token_losses",
]
