"""Ready-made sweeps: `mechicl sweep NAME`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mechicl.sweeps.sweep import Sweep
from mechicl.training import TrainingConfig


@dataclass(frozen=True, eq=False)
class SweepPreset:
    """A sweep by name.

    Attributes:
        summary: in a line.
        config: what all cells share, or the name of a training preset.
        over: the axes.
        measure: as `Sweep.run` takes it.
        together: see `Sweep`.
    """

    summary: str
    config: TrainingConfig | str
    over: Mapping[str, Any]
    measure: Any = None
    together: int = 8

    def sweep(self) -> Sweep:
        """The sweep itself."""
        return Sweep(self.config, self.over, together=self.together)


SWEEPS: dict[str, SweepPreset] = {}
"""Sweeps by the name that the command line knows them by."""
