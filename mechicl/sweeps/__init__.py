"""Grids of trainings: every combination of tasks, sizes, seeds, conditions, in one process, several, or on a cluster.

>>> sweep = Sweep("lsa-1l", {"learning_rate": (1e-3, 1e-2), "seed": range(3)})
>>> table = sweep.run("runs/rates", measure="regret", workers=2)     # goes on where it was killed
>>> print(table.intervals("loss"))                                   # over seeds, at each point of the grid
"""

from mechicl.base.arguments import check_arguments
from mechicl.statistics.grids import GridTable
from mechicl.sweeps.folder import CellState, SweepError, load_table, status
from mechicl.sweeps.grid import Cell
from mechicl.sweeps.measures import MEASURES
from mechicl.sweeps.presets import SWEEPS, SweepPreset
from mechicl.sweeps.sweep import Sweep
from mechicl.sweeps.tables import ready_table
from mechicl.sweeps.thresholds import find_threshold

__all__ = [
    "MEASURES", "SWEEPS", "Cell", "CellState", "GridTable", "Sweep", "SweepError", "SweepPreset", "find_threshold",
    "load_table", "ready_table", "status",
]  # fmt: skip

check_arguments(__name__)
