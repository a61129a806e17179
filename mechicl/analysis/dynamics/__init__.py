"""When does a model learn it? Analyses at the snapshots of a training, the step at which its loss falls, and the
local learning coefficient of its weights.

>>> align_over_training(load_checkpoint("lsa-1l"), gradient_descent, prompts).sensitivity_cosine
>>> find_transitions(curve["eval_step"], curve["eval_loss"]).mean_step()
"""

from mechicl.analysis.dynamics.langevin import (
    LearningCoefficient,
    SamplingWarning,
    learning_coefficient,
)
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
    "AlignmentOverTraining", "HeadsOverTraining", "LearningCoefficient", "OverTraining", "SamplingWarning",
    "Transitions", "align_over_training", "find_transitions", "learning_coefficient", "measure_over_training",
    "score_heads_over_training",
]  # fmt: skip
