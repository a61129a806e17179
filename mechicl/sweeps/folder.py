"""A sweep's state: a folder with a manifest, a folder for each cell, and the table."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from mechicl.base.checks import is_whole
from mechicl.base.files import read_json, write_json
from mechicl.base.locks import is_locked
from mechicl.statistics.grids import GridTable
from mechicl.sweeps.grid import Grid, Place, in_words
from mechicl.training.metrics import Metrics

MANIFEST, RESULTS, ROWS, ERROR = "sweep.json", "results.csv", "rows.json", "error.json"
LOSS, DIVERGED = "loss", "diverged_at"


class SweepError(ValueError):
    """Cells of a sweep failed, or a folder holds no sweep."""


@dataclass(frozen=True)
class CellState:
    """How far a cell is.

    Attributes:
        name: of its folder.
        places: its models, as words.
        state: "done", "failed", "running" or "waiting".
        step: of its training, that was logged last.
        steps: of the whole training.
        error: of a failed cell: the last line.
    """

    name: str
    places: str
    state: str
    step: int
    steps: int
    error: str = ""


class SweepFolder:
    """What is in the folder of a sweep."""

    def __init__(self, folder: str | Path):
        self.path = Path(folder)

    def cell(self, name: str) -> Path:
        """The folder of a cell."""
        return self.path / "cells" / name

    def manifest(self) -> dict[str, Any]:
        """What the sweep is.

        Raises:
            SweepError: none is there, or a damaged one.
        """
        path = self.path / MANIFEST
        if not path.is_file():
            raise SweepError(f"the folder {self.path} holds no sweep: it has no {MANIFEST}")
        try:
            manifest = read_json(path)
            for name, kind in (("axes", dict), ("cells", dict), ("measures", list), ("threads", int)):
                if not isinstance(manifest[name], kind):
                    raise ValueError(f"{name} is no {kind.__name__}")
            for name, cell in manifest["cells"].items():
                whole = all(isinstance(place, dict) for place in cell["places"]) and all(map(is_whole, cell["rows"]))
                if Path(name).name != name or not cell["places"] or not whole or not is_whole(cell["steps"]):
                    raise ValueError(f"the cell {name!r} is damaged")
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise SweepError(f"{path} is damaged ({error}): put it away, and run the sweep again") from error
        return manifest

    def write_manifest(self, grid: Grid, measures: list[str], launch: Sequence[str], extend: bool) -> None:
        """Say what the sweep is, or see that the folder holds this one.

        Raises:
            ValueError: it holds another one, and is not to be extended.
        """
        # several processes round otherwise than one
        manifest = _described(grid) | {"launch": list(launch), "measures": measures}
        manifest = json.loads(json.dumps(manifest))  # as it will be read
        if (self.path / MANIFEST).is_file():
            before = self.manifest()
            if before == manifest:
                return
            if not extend:
                raise ValueError(
                    f"{self.path} holds another sweep ({_differences(before, manifest)}): take another folder, or "
                    f"extend=True (--extend) to go on with this one and keep the cells that they share"
                )
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / MANIFEST, manifest)

    def rows(self, name: str, measures: Sequence[str]) -> list[dict[str, Any]] | None:
        """What was measured of a cell's models, in their order; None if it is not done, or was measured otherwise.

        Raises:
            SweepError: a damaged file.
        """
        path = self.cell(name) / ROWS
        try:
            data = read_json(path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise SweepError(f"{error}: remove it, and run the sweep again") from error
        rows = data.get("rows")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise SweepError(f"{path} is damaged (its rows are no list of objects): remove it, and run the sweep again")
        return rows if data.get("measures") == list(measures) else None

    def error(self, name: str, measures: Sequence[str]) -> str | None:
        """Why a cell failed with these measures, if it did."""
        try:
            data = read_json(self.cell(name) / ERROR)
        except FileNotFoundError:
            return None
        return str(data.get("error")) if data.get("measures") == list(measures) else None

    def step(self, name: str) -> int:
        """The step that a cell's training has logged last."""
        return Metrics.last_step(self.cell(name) / "run")

    def status(self) -> list[CellState]:
        """How far each cell is, in the grid's order.

        Raises:
            SweepError: the folder holds no sweep.
        """
        manifest = self.manifest()
        states = []
        for name, cell in manifest["cells"].items():
            words = f"{in_words(cell['places'][0])}{' ...' if len(cell['places']) > 1 else ''}"
            steps = int(cell["steps"])
            if self.rows(name, manifest["measures"]) is not None:
                states.append(CellState(name, words, "done", steps, steps))
                continue
            error = self.error(name, manifest["measures"])
            running = is_locked(self.cell(name))
            state = "running" if running else "failed" if error else "waiting"
            states.append(CellState(name, words, state, self.step(name), steps, error or ""))
        return states

    def table(self, grid: Grid | None = None, measures: Sequence[str] = ()) -> GridTable:
        """All rows that there are, in the grid's order: of what the manifest says, or of a grid and its measures.

        Raises:
            SweepError: the folder holds no sweep.
        """
        manifest = self.manifest() if grid is None else {**_described(grid), "measures": list(measures)}
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
            raise SweepError(f"the cells of {self.path} hold something else than numbers: {error}") from error


def _described(grid: Grid) -> dict[str, Any]:
    """A grid as a manifest has it."""
    row = {_key(place): i for i, place in enumerate(grid.places)}
    return {
        "config": grid.base.replace(seeds=grid.seeds).to_dict(),
        "axes": {name: list(axis) for name, axis in grid.axes.items()},
        "together": grid.together,
        "threads": grid.threads,
        "cells": {
            cell.name: {
                "places": list(cell.places),
                "rows": [row[_key(place)] for place in cell.places],
                "steps": cell.config.steps,
            }
            for cell in grid.cells
        },
    }


def load_table(folder: str | Path) -> GridTable:
    """What a sweep has measured so far; it may be running.

    Args:
        folder: of the sweep.

    Raises:
        SweepError: the folder holds no sweep.

    Example:
        >>> load_table("runs/rates").intervals("loss")
    """
    return SweepFolder(folder).table()


def status(folder: str | Path) -> list[CellState]:
    """How far each cell of a sweep is; it may be running.

    Args:
        folder: of the sweep.

    Raises:
        SweepError: the folder holds no sweep.

    Example:
        >>> [cell.state for cell in status("runs/rates")]
        ['done', 'running']
    """
    return SweepFolder(folder).status()


def _number(value: Any) -> Any:
    """A value of a row's file: infinities are words there, and NaN is null."""
    if isinstance(value, str) and value in ("inf", "-inf"):
        return float(value)
    return math.nan if value is None else value


def _key(place: Place) -> str:
    return repr(sorted((name, repr(label)) for name, label in place.items()))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """In a few words."""
    words = []
    for name in ("axes", "config"):
        ours, theirs = now[name], before.get(name) or {}
        for key in dict.fromkeys([*theirs, *ours]):
            if ours.get(key) != theirs.get(key):
                words.append(f"{key}: {_short(theirs.get(key))} there, {_short(ours.get(key))} now")
    for name in ("together", "threads", "launch", "measures"):
        if before.get(name) != now[name]:
            words.append(f"{name}: {_short(before.get(name))} there, {_short(now[name])} now")
    return "; ".join(words) or "its cells differ"


def _short(value: Any) -> str:
    many = isinstance(value, Iterable) and not isinstance(value, str | dict)
    text = ", ".join(map(str, value)) if many else str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
