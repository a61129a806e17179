"""The measures of sweeps by name: functions of a checkpoint with one model that return numbers by name.

All use `n_prompts` held-out prompts of a fixed seed; another kind of task is a ValueError.
"""

from collections.abc import Callable, Mapping

from mechicl.checkpoints import Checkpoint
from mechicl.sweeps.measures.general import (
    Measured,
    alignment,
    fitting,
    identified,
    loss,
    markov_phases,
    mean_regret,
    transition,
)
from mechicl.sweeps.measures.pools import pool_distances
from mechicl.sweeps.measures.regression import descent_limits, gap_to_descent, target_copying

MEASURES: Mapping[str, Callable[[Checkpoint], Measured]] = {
    "loss": loss,
    "regret": mean_regret,
    "alignment": alignment,
    "identify": identified,
    "transition": transition,
    "fitting": fitting,
    "pool": pool_distances,
    "depth": descent_limits,
    "descent": gap_to_descent,
    "markov": markov_phases,
    "copying": target_copying,
}
"""Measures by name, for `mechicl sweep --measure`."""
