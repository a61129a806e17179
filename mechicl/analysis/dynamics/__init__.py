"""When does a model learn it, and which strategies does it pass through? Analyses at the snapshots of a training, the
step at which its loss falls, and the local learning coefficient of its weights.

>>> align_over_training(load_checkpoint("lsa-1l"), gradient_descent, prompts).sensitivity_cosine
>>> find_transitions(curve["eval_step"], curve["eval_loss"]).mean_step()
"""

from mechicl.analysis.dynamics.langevin import LearningCoefficient, Sampler, SamplingWarning, learning_coefficient
from mechicl.analysis.dynamics.odds import StrategyOdds, fit_strategy_odds
from mechicl.analysis.dynamics.strategies import StrategyTracking, track_strategies
from mechicl.analysis.dynamics.training import (
    AlignmentOverTraining,
    HeadsOverTraining,
    OverTraining,
    Transitions,
    align_over_training,
    find_transitions,
    measure_over_training,
    score_heads_over_training,
)

__all__ = [
    "AlignmentOverTraining", "HeadsOverTraining", "LearningCoefficient", "OverTraining", "Sampler", "SamplingWarning",
    "StrategyOdds", "StrategyTracking", "Transitions", "align_over_training", "find_transitions", "fit_strategy_odds",
    "learning_coefficient", "measure_over_training", "score_heads_over_training", "track_strategies",
]  # fmt: skip
