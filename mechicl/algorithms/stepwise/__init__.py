"""Algorithms as causal models: state in, state out, with named variables, and hypotheses that a model runs them.

`Runs` gives counterfactual predictions; `analysis.interchange` compares a model's with them.
"""

from mechicl.algorithms.stepwise.base import State, StepwiseAlgorithm, query_of
from mechicl.algorithms.stepwise.copying import AfterCopying, Induction, best_match
from mechicl.algorithms.stepwise.counterfactuals import Place, Runs
from mechicl.algorithms.stepwise.descent import KernelReading, OnlineDescent, QueryDescent, ResidualDescent, nearest
from mechicl.algorithms.stepwise.hypothesis import Hypothesis, variables_of
from mechicl.algorithms.stepwise.inverses import MomentsThenRidge, NewtonSteps, RidgeByDirections, RidgePath
from mechicl.base.arguments import check_arguments

__all__ = [
    "AfterCopying",
    "Hypothesis",
    "Induction",
    "KernelReading",
    "MomentsThenRidge",
    "NewtonSteps",
    "OnlineDescent",
    "Place",
    "QueryDescent",
    "ResidualDescent",
    "RidgeByDirections",
    "RidgePath",
    "Runs",
    "State",
    "StepwiseAlgorithm",
    "best_match",
    "nearest",
    "query_of",
    "variables_of",
]

check_arguments(__name__)
