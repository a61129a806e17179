"""A sweep's state: a folder with a manifest, a folder for each cell, and the table."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from mechicl.base.arguments import checked
from mechicl.base.files import read_json, write_json
from mechicl.base.locks import is_locked
from mechicl.statistics.grids import GridTable
from mechicl.sweeps.grid import Grid, place_text
from mechicl.training.metrics import Metrics

MANIFEST, RESULTS, ROWS, ERROR = "sweep.json", "results.csv", "rows.json", "error.json"
LOSS, DIVERGED = "loss", "diverged_at"


class SweepError(ValueError):
    """Cells of a sweep failed, or a folder contains no sweep."""


@dataclass(frozen=True)
class CellStatus:
    """Progress of a cell of a sweep: its name, its values on the axes, its steps, and the error if it failed."""

    name: str
    places: str
    state: str  # "done", "failed", "running" or "waiting"
    step: int  # last logged training step
    steps: int
    error: str = ""


class SweepFolder:
    """Reads and writes the files of a sweep's folder."""

    def __init__(self, folder: str | Path):
        self.path = Path(folder)

    def cell(self, name: str) -> Path:
        """The folder of a cell."""
        return self.path / "cells" / name

    def manifest(self) -> dict[str, Any]:
        """The description of the sweep; SweepError if there is none, or a damaged one."""
        path = self.path / MANIFEST
        if not path.is_file():
            raise SweepError(f"the folder {self.path} contains no sweep: there is no {MANIFEST}")
        try:
            manifest = read_json(path)
            for name, cell in manifest["cells"].items():
                if Path(name).name != name or not {*cell["places"][0]} <= {*manifest["axes"]}:
                    raise ValueError(f"the cell {name!r} is damaged")
        except (ValueError, LookupError, TypeError, AttributeError, FileNotFoundError) as error:
            raise SweepError(f"{path} is damaged ({error}): move it away, and run the sweep again") from error
        return manifest

    def write_manifest(self, grid: Grid, measures: list[str], extend: bool) -> None:
        """Write the description of a sweep; ValueError if the folder contains another one, unless `extend`."""
        manifest = json.loads(json.dumps(_description(grid) | {"measures": measures}))  # as it will be read
        if (self.path / MANIFEST).is_file():
            before = self.manifest()
            if all(before.get(name) == value for name, value in manifest.items()):
                return
            if not extend:
                raise ValueError(
                    f"{self.path} contains another sweep ({_differences(before, manifest)}): use another folder, or "
                    f"extend=True (--extend) to change this one and keep the cells that they share"
                )
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / MANIFEST, manifest)

    def rows(self, name: str, measures: Sequence[str]) -> list[dict[str, Any]] | None:
        """Measured values of a cell's models, in order; None if it is not done, or had other measures."""
        path = self.cell(name) / ROWS
        try:
            data = read_json(path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise SweepError(f"{error}: remove it, and run the sweep again") from error
        rows = data.get("rows")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise SweepError(f"{path} is damaged (rows must be a list of objects): remove it, and run the sweep again")
        return rows if data.get("measures") == list(measures) else None

    def error(self, name: str, measures: Sequence[str]) -> str:
        """The error with which a cell failed with these measures, "" if it did not."""
        try:
            data = read_json(self.cell(name) / ERROR)
        except FileNotFoundError:
            return ""
        return str(data.get("error")) if data.get("measures") == list(measures) else ""

    def status(self) -> list[CellStatus]:
        """Progress of each cell, in the grid's order."""
        manifest = self.manifest()
        states = []
        for name, cell in manifest["cells"].items():
            text = f"{place_text(cell['places'][0])}{' ...' if len(cell['places']) > 1 else ''}"
            steps = int(cell["steps"])
            if self.rows(name, manifest["measures"]) is not None:
                states.append(CellStatus(name, text, "done", steps, steps))
                continue
            error = self.error(name, manifest["measures"])
            state = "running" if is_locked(self.cell(name)) else "failed" if error else "waiting"
            step = Metrics.last_step(self.cell(name) / "run")
            states.append(CellStatus(name, text, state, step, steps, error))
        return states

    def table(self, grid: Grid | None = None, measures: Sequence[str] = ()) -> GridTable:
        """All rows measured so far, in the grid's order; by default of the manifest's grid and measures."""
        manifest = self.manifest() if grid is None else {**_description(grid), "measures": list(measures)}
        lines: dict[int, dict[str, Any]] = {}
        for name, cell in manifest["cells"].items():
            done = self.rows(name, manifest["measures"]) or ()
            for place, row, values in zip(cell["places"], cell["rows"], done, strict=False):
                lines[row] = {**place, **{column: _number(value) for column, value in values.items()}}
        ordered = [lines[row] for row in sorted(lines)]
        axes = tuple(manifest["axes"])
        columns = dict.fromkeys([*axes, DIVERGED, LOSS, *(column for line in ordered for column in line)])
        frame = pd.DataFrame(ordered, columns=list(columns))
        try:
            return GridTable(frame.astype({DIVERGED: "Int64", LOSS: float}), axes)
        except (TypeError, ValueError) as error:
            raise SweepError(f"the cells of {self.path} contain values that are not numbers: {error}") from error


def _description(grid: Grid) -> dict[str, Any]:
    row = {tuple(place.values()): i for i, place in enumerate(grid.places)}
    return {
        "config": grid.base.replace(seeds=grid.seeds).to_dict(),
        "axes": {name: list(axis) for name, axis in grid.axes.items()},
        "together": grid.together,
        "threads": grid.threads,
        "cells": {
            cell.name: {
                "places": list(cell.places),
                "rows": [row[tuple(place.values())] for place in cell.places],
                "steps": cell.config.steps,
            }
            for cell in grid.cells
        },
    }


@checked
def load_table(folder: str | Path) -> GridTable:
    """Load the table of a sweep from its folder: all models measured so far, also while the sweep runs.

    Raises:
        SweepError: the folder contains no sweep.

    Example:
        >>> load_table("runs/rates").intervals("loss")
    """
    return SweepFolder(folder).table()


@checked
def status(folder: str | Path) -> list[CellStatus]:
    """Return the progress of each cell of the sweep in a folder, which may be running.

    A cell is a group of models that are trained together, such as the seeds of one combination of values.

    Raises:
        SweepError: the folder contains no sweep.

    Example:
        >>> [cell.state for cell in status("runs/rates")]
        ['done', 'running']
    """
    return SweepFolder(folder).status()


def _number(value: Any) -> Any:
    """A value of a row's file, in which infinities are text and NaN is null."""
    if isinstance(value, str) and value in ("inf", "-inf"):
        return float(value)
    return math.nan if value is None else value


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    pairs = [(key, (before.get(name) or {}).get(key), now[name].get(key))
             for name in ("axes", "config") for key in {**(before.get(name) or {}), **now[name]}]  # fmt: skip
    pairs += [(name, before.get(name), now[name]) for name in ("together", "threads", "measures")]
    differences = [f"{name}: {_short(old)} there, {_short(new)} now" for name, old, new in pairs if old != new]
    return "; ".join(differences) or "its cells differ"


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
