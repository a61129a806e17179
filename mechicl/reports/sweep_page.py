"""A page on a sweep: what was measured over its grid."""

from pathlib import Path

from mechicl.reports.comparison import Comparison
from mechicl.statistics.grids import GridTable
from mechicl.viz.page import Section, table


def write_sweep_page(grid: GridTable, out: str | Path, *, title: str = "Sweep") -> Path:
    """Write sweep.html (offline) and sweep.json in a folder.

    Args:
        grid: what a sweep measured (`sweeps.load_table`).
        out: the folder; made if need be.
        title: of the page.

    Returns:
        The path of the page.

    Example:
        >>> write_sweep_page(load_table("runs/rates"), "runs/rates/report")
    """
    sections = []
    for value in grid.values:
        if value != "diverged_at" and grid.frame[value].dtype.kind in "fiu":
            frame = grid.intervals(value)
            rows = frame.itertuples(index=False)
            lines = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
            header = [str(name) for name in frame]
            sections.append(Section(value, "Mean over seeds, with its 95% interval.", table(header, lines)))
    lead = f"{len(grid.frame)} models over {', '.join(grid.axes)}."
    return Comparison(title, lead, (), sections, {}).write(out, "sweep")
