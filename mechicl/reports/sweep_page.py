"""A page on a sweep: the measurements over its grid as pictures and tables."""

import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mechicl.reports.comparison import Comparison
from mechicl.statistics.grids import SEED, GridTable
from mechicl.viz import grids as draw
from mechicl.viz.page import Section, table

_DIVERGED = "diverged_at"
PICTURES = 12
"""Most pictures of one value, where the grid has more than two axes."""


def write_sweep_page(grid: GridTable, out: str | Path, *, title: str = "Sweep") -> Path:
    """Write sweep.html (offline) and sweep.json of a sweep's table in a folder; return the path of the page.

    Every measured value has a section: a phase diagram if the grid has two axes or more, lines with intervals over
    seeds if it has one, and a table. The table may be unfinished.
    """
    if grid.frame.empty:
        raise ValueError("no cell of the sweep is done yet")
    axes = [name for name in grid.axes if name != SEED]
    wide = [name for name in axes if grid.frame[name].nunique(dropna=False) > 1]
    words = "Means over seeds with 95% intervals."
    if len(wide) > 1:
        words = "Colours are medians over seeds; the table has means over seeds with 95% intervals."
    sections = []
    for value in grid.values:
        if value != _DIVERGED and pd.api.types.is_numeric_dtype(grid.frame[value]) and grid.frame[value].notna().any():
            figures = [_figure(part, wide, value, label) for part, label in _parts(grid, wide[2:])]
            sections.append(Section(value, words, [*figures, _numbers(grid, value)]))
    diverged = int(grid.frame[_DIVERGED].notna().sum()) if _DIVERGED in grid.frame else 0
    lead = f"{len(grid.frame)} models over {', '.join(grid.axes)}; {diverged} of them diverged."
    rows = grid.frame.astype(object).where(grid.frame.notna(), None).to_dict("records")
    data = {"axes": list(grid.axes), "rows": rows}
    return Comparison(title, lead, (), sections, data).write(out, "sweep")


def _parts(grid: GridTable, further: list[str]) -> list[tuple[GridTable, str]]:
    values = [grid.frame[name].unique().tolist() for name in further]
    places = [dict(zip(further, each, strict=True)) for each in itertools.product(*values)]
    return [
        (grid.where(**place), ", ".join(f"{name} {label}" for name, label in place.items()))
        for place in places[:PICTURES]
    ]


def _figure(grid: GridTable, wide: list[str], value: str, label: str) -> go.Figure:
    title = f"{value}, {label}" if label else value
    if len(wide) > 1:
        return draw.phase_diagram(grid, x=wide[0], y=wide[1], value=value, title=title)
    return draw.lines(grid, x=wide[0] if wide else SEED, value=value, title=title)


def _numbers(grid: GridTable, value: str) -> str:
    frame = grid.intervals(value)
    columns = [
        draw.labels(cells.tolist(), _text) if name in grid.axes else map(_text, cells.tolist())
        for name, cells in frame.items()
    ]
    return table([str(name) for name in frame], [list(row) for row in zip(*columns, strict=True)])


def _text(cell: Any) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
