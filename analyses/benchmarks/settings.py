"""Settings of a run of the benchmark."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Settings of all parts.

    Attributes:
        rounds: number of measurements of each ratio; fewer where one takes minutes.
        every: only every n-th of the compiled programs.
        full: measure 500 cells of a sweep, cells of a minute, all steps of trained readouts, and more programs.
        out: folder for pictures.
    """

    rounds: int = 5
    every: int = 1
    full: bool = False
    out: Path = Path("runs/bench")
