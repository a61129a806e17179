"""Code shared by the scripts on ready-made sweeps: the table of a sweep, and rows over its seeds."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from analyses.support.script import ScriptArgs
from mechicl.reports import Row
from mechicl.statistics import difference_interval, median_interval
from mechicl.statistics.grids import GridTable
from mechicl.sweeps import SWEEPS

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class SweepArgs(ScriptArgs):
    """The arguments of a script on ready-made sweeps."""

    folder: Path | None = None
    """Folder to train the sweeps in, a folder for each by its name; by default the tables are read that come with the
    script."""
    workers: int = 1
    """Processes that train."""

    def table(self, name: str) -> GridTable:
        """Return the table of a ready-made sweep, from the folder `results` of the scripts, or trained.

        A trained one is written to a CSV file, numbers with six digits.

        Raises:
            FileNotFoundError: no table of it is kept, and no folder to train in was named.
            SweepError: trainings failed.
        """
        if name not in SWEEPS:
            raise KeyError(f"no ready-made sweep {name!r}: there are {sorted(SWEEPS)}")
        preset, kept = SWEEPS[name], (self.out if self.folder else RESULTS) / f"sweep_{name}.csv"
        if self.folder is not None:
            table = preset.sweep().run(self.folder / name, preset.measure, workers=self.workers, extend=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            table.frame.to_csv(kept, index=False, float_format="%.6g")
        if not kept.is_file():
            raise FileNotFoundError(f"{kept} does not exist: train the sweep {name!r}, with a folder")
        return GridTable.load(kept, tuple(preset.sweep().axes))


def known(values: pd.Series) -> torch.Tensor:
    """The numbers of a column that were measured, one a seed."""
    return torch.tensor(values.dropna().to_numpy(dtype=float))


def over_seeds(quantity: str, values: pd.Series, note: str = "") -> Row:
    """A row with the median of a column and its interval over seeds, at the level that the range of few has."""
    median = median_interval(known(values))
    return Row(quantity, None, replace(median, level=min(median.level, coverage(median.n))), "seeds", note)


def rows_of(name: str, columns: Mapping[str, pd.Series]) -> list[Row]:
    """`over_seeds` of several columns, by their words."""
    return [over_seeds(f"{name}: {words}", values) for words, values in columns.items()]


def coverage(n_seeds: int) -> float:
    """Return the probability that the range of n seeds covers the median, 1 - 2^(1 - n)."""
    return 1 - 0.5 ** (n_seeds - 1)


def change(quantity: str, first: pd.Series, second: pd.Series, resolution: float = 0.0) -> Row:
    """A row with the difference of two columns' means, second minus first, and whether it is more than chance.

    It is where the 95% interval (Welch 1947), made longer at both ends by the resolution of what was measured (the
    spacing of the grid on which values are known), leaves out 0.
    """
    difference = difference_interval(known(first), known(second))
    low, high = difference.low - resolution, difference.high + resolution
    verdict = "established" if low > 0 or high < 0 else "not established"
    return Row(quantity, None, difference, "seeds", verdict)


def count(number: Any, noun: str) -> str:
    """ "1 layer", "2 layers"."""
    return f"{number} {noun}{'s' if number > 1 else ''}"


def coverage_words(n_seeds: int) -> str:
    """How much the interval of a median covers, of so few seeds that it is their range (`median_interval`)."""
    chance, words = coverage(n_seeds), {3: "three", 5: "five"}.get(n_seeds, str(n_seeds))
    return f"Their intervals are the range of {words} seeds, which covers the median with a chance of {chance:.0%}"
