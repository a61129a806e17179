"""Algorithms as causal models: state in, state out, with named variables, and hypotheses that a model runs them.

`Runs` gives counterfactual predictions; `analysis.interchange` compares a model's with them.
"""

from mechicl.algorithms.stepwise.base import StepwiseAlgorithm, query_of
from mechicl.algorithms.stepwise.copying import AfterCopying, Induction
from mechicl.algorithms.stepwise.counterfactuals import Runs
from mechicl.algorithms.stepwise.descent import (
    DiscountedDescent,
    KernelReading,
    OnlineDescent,
    QueryDescent,
    RecursiveSteps,
    ResidualDescent,
)
from mechicl.algorithms.stepwise.hypothesis import Hypothesis
from mechicl.algorithms.stepwise.inverses import NewtonSteps, ResidualRidge, RidgePath

__all__ = [
    "AfterCopying", "DiscountedDescent", "Hypothesis", "Induction", "KernelReading", "NewtonSteps", "OnlineDescent",
    "QueryDescent", "RecursiveSteps", "ResidualDescent", "ResidualRidge", "RidgePath", "Runs", "StepwiseAlgorithm",
    "query_of",
]  # fmt: skip
