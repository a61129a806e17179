"""The measures of sweeps by name: functions of a checkpoint with one model that return numbers by name.

All use `n_prompts` held-out prompts of a fixed seed; another kind of task is a ValueError.
"""

from collections.abc import Callable, Mapping

from mechicl.checkpoints import Checkpoint
from mechicl.sweeps.measures import general, pools, regression

MEASURES: Mapping[str, Callable[[Checkpoint], general.ColumnValues]] = {
    "regret": general.mean_regret,
    "alignment": general.alignment,
    "identify": general.identified,
    "transition": general.transition,
    "fitting": general.fitting,
    "pool": pools.pool_distances,
    "depth": regression.descent_limits,
    "descent": regression.gap_to_descent,
    "markov": general.markov_phases,
    "copying": regression.target_copying,
}
"""Measures by name, for `mechicl sweep --measure`."""
