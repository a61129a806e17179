"""What a run of the benchmark is asked for."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Of all parts.

    Attributes:
        rounds: how often each ratio is taken; parts whose rounds take minutes take fewer.
        every: of the compiled programs, each so many-th.
        full: at full length: 500 cells of a sweep and cells of a minute, all steps of trained readouts, more programs.
        out: folder of pictures.
    """

    rounds: int = 5
    every: int = 1
    full: bool = False
    out: Path = Path("runs/bench")
