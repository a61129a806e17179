"""Numbers measured over a grid: one row a model, one column an axis or a value."""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pandas.api.types import is_numeric_dtype

from mechicl.base.files import MOST_VALUES, read_bytes, read_csv, write_bytes
from mechicl.statistics.intervals import UNBOUNDED, Interval, interval

SEED = "seed"
FEW = 2
"""Lowest and highest means that a printed table shows of each value."""
MOST_COLUMNS = 1000
"""Largest number of columns of a table that is read from a file."""


@dataclass(frozen=True, eq=False)
class GridTable:
    """The table of measurements of a sweep: one row a trained model. `print(table)` shows the lowest and highest means.

    Example:
        >>> frame = pd.DataFrame({"depth": [1, 1, 2, 2], "seed": [0, 1, 0, 1], "loss": [2.0, 4.0, 1.0, 1.0]})
        >>> table = GridTable(frame, axes=("depth", "seed"))
        >>> table.intervals("loss")[["depth", "loss", "n"]].values.tolist()
        [[1.0, 3.0, 2.0], [2.0, 1.0, 2.0]]
    """

    # one row a model: the columns of the axes (settings and "seed"), then those of the measured values. A value that
    # could not be measured, for example of a model that diverged, is NaN.
    frame: pd.DataFrame
    axes: tuple[str, ...]  # names of the axes' columns; intervals are over "seed", if it is one

    def __post_init__(self):
        absent = [name for name in self.axes if name not in self.frame.columns]
        if absent:
            raise ValueError(f"axes must be columns of {list(self.frame.columns)}, got {absent}")

    @property
    def values(self) -> tuple[str, ...]:
        """Names of the measured values."""
        return tuple(str(name) for name in self.frame.columns if name not in self.axes)

    def where(self, **values: Any) -> "GridTable":
        """Return the rows with these values on some axes; write `**{"model.n_layers": 2}` for an axis with a dot."""
        frame = self.frame
        for name, value in values.items():
            self._check_axis(name)
            rows = frame[name] == value
            if not rows.any():
                raise ValueError(f"{name} must be one of {frame[name].unique().tolist()}, got {value!r}")
            frame = frame[rows]
        return GridTable(frame, self.axes)

    def intervals(self, value: str, by: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the mean of a value with its confidence interval at each point of the grid, over seeds by default.

        Rows without the value (NaN) are left out and counted. Intervals of means suppose nearly normal values: for
        three seeds Student's t gives 2.5 standard deviations to each side. A column without other values than
        0, 1, False and True is a share: its intervals are binomial (`statistics.interval`). For skewed values see
        `statistics.median_interval`.

        Args:
            by: the axes of the result; all but "seed" by default. Intervals are over the other axes.

        Returns:
            One row a point of the grid: the columns `by`, then `value` (the mean), "low", "high", "n" (rows
            with the value) and "missing" (rows without it).
        """
        by = [name for name in self.axes if name != SEED] if by is None else list(by)
        for name in by:
            self._check_axis(name)
        if value not in self.values:
            raise ValueError(f"value must be one of {list(self.values)}, got {value!r}")
        rows = [
            {**place, **middle.columns(value), "n": middle.n, "missing": missing}
            for place, middle, missing in self._cells(value, by)
        ]
        return pd.DataFrame(rows, columns=[*by, value, "low", "high", "n", "missing"])

    def _cells(self, value: str, by: list[str]) -> Iterator[tuple[dict[str, Any], Interval, int]]:
        """Yield each point of the grid, the interval there, and how many rows lack the value."""
        within = value_range(self.frame[value])
        parts = self.frame.groupby(by, sort=False, dropna=False) if by else [((), self.frame)]
        for place, part in parts:
            present = part[value].dropna()
            samples = torch.tensor(present.to_numpy(dtype=float))
            labels = dict(zip(by, place if isinstance(place, tuple) else (place,), strict=True))
            yield labels, interval(samples, within=within), len(part) - len(present)

    def to_dataframe(self) -> pd.DataFrame:
        """Return the rows: one for each model, with the columns of the axes and of the values."""
        return self.frame

    def save(self, path: str | Path) -> Path:
        """Write the rows as CSV, numbers with all their digits, in one step: readers see the old table or the new.

        CSV has no types: `load` reads labels that look like numbers as numbers ("01" as 1), and "" as missing (NaN).
        """
        path = Path(path)
        write_bytes(path, self.frame.to_csv(index=False).encode())
        return path

    @classmethod
    def load(cls, path: str | Path, axes: Sequence[str]) -> "GridTable":
        """Read a saved table; the axes are in the sweep's manifest (see `mechicl.sweeps.load_table`)."""
        return cls(_read_table(Path(path)), tuple(axes))

    def _check_axis(self, name: str) -> None:
        if name not in self.axes:
            raise ValueError(f"axes must be of {list(self.axes)}, got {name!r}")

    def __str__(self) -> str:
        lines = [f"{len(self.frame)} models over {', '.join(self.axes)}; lowest and highest means over seeds:"]
        numbers = [name for name in self.values if is_numeric_dtype(self.frame[name]) and name != "diverged_at"]
        for value in numbers:
            found = self._cells(value, [name for name in self.axes if name != SEED])
            cells = sorted((cell for cell in found if not math.isnan(cell[1].mean)), key=lambda cell: cell[1].mean)
            for place, middle, _ in cells if len(cells) <= 2 * FEW else [*cells[:FEW], *cells[-FEW:]]:
                label = ", ".join(f"{name}={each}" for name, each in place.items())
                lines.append(f"  {value} {middle}  {label}".rstrip())
        return "\n".join(lines)


def value_range(column: pd.Series) -> tuple[float, float]:
    """Return the range of a column's values: 0 to 1 if all are 0, 1, False or True."""
    return (0.0, 1.0) if set(column.dropna()) <= {0, 1} else UNBOUNDED


def _read_table(path: Path) -> pd.DataFrame:
    """Read a CSV file from any source; only empty cells are missing values, so that "none" is a label."""
    data = read_bytes(path)
    n_values = data.count(b",") + data.count(b"\n")
    if n_values > MOST_VALUES or max((line.count(b",") for line in io.BytesIO(data)), default=0) >= MOST_COLUMNS:
        raise ValueError(f"{path} has more than {MOST_COLUMNS:,} columns or {MOST_VALUES:,} values, which are not read")
    try:
        return read_csv(io.BytesIO(data), keep_default_na=False, na_values=[""])
    except (ValueError, OverflowError) as error:  # not a table, or not UTF-8
        raise ValueError(f"{path} is not a table: {error}") from error
