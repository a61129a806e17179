"""When does it learn it? Analyses at the snapshots of a training, and the step at which its loss falls.

>>> align_over_training(load_checkpoint("lsa-1l"), gradient_descent, prompts).sensitivity_cosine
>>> transitions(curve["eval_step"], curve["eval_loss"]).interval()
"""

from mechicl.analysis.dynamics.snapshots import (
    AlignmentOverTraining,
    HeadsOverTraining,
    Transitions,
    align_over_training,
    heads_over_training,
    transitions,
)

__all__ = [
    "AlignmentOverTraining",
    "HeadsOverTraining",
    "Transitions",
    "align_over_training",
    "heads_over_training",
    "transitions",
]
