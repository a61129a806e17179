"""Grids of trainings: every combination of tasks, sizes, seeds, conditions, in one process, several, or on a cluster.

>>> sweep = Sweep("lsa-1l", {"learning_rate": (1e-3, 1e-2), "seed": range(3)})
>>> table = sweep.run("runs/rates", measure="regret", workers=2)     # continues where it was killed
>>> print(table.intervals("loss"))                                   # over seeds, at each point of the grid
"""

from mechicl.sweeps.folder import SweepError, load_table, status
from mechicl.sweeps.measures import MEASURES
from mechicl.sweeps.presets import SWEEPS
from mechicl.sweeps.sweep import Sweep
from mechicl.sweeps.thresholds import find_threshold

__all__ = ["MEASURES", "SWEEPS", "Sweep", "SweepError", "find_threshold", "load_table", "status"]
