"""Tables of ready-made sweeps: kept in a small file, or trained anew."""

from pathlib import Path

from mechicl.statistics.grids import GridTable
from mechicl.sweeps.presets import SWEEPS

DIGITS = 6


def ready_table(name: str, kept: str | Path, folder: str | Path | None = None, *, workers: int = 1) -> GridTable:
    """The table of a ready-made sweep, from the file that it is kept in, or from its training.

    Args:
        name: of the sweep, in `SWEEPS`.
        kept: a CSV file with the table, numbers with six digits. It is written where the sweep is trained.
        folder: train in this folder, or read what was trained there; None to read the file.
        workers: processes that train.

    Raises:
        KeyError: no such sweep.
        FileNotFoundError: no table is kept there; the message says how to make it.
        SweepError: trainings failed.

    Example:
        >>> ready_table("depth", "depth.csv", "runs/sweeps/depth").frame
    """
    if name not in SWEEPS:
        raise KeyError(f"no ready-made sweep {name!r}: there are {sorted(SWEEPS)}")
    preset, kept = SWEEPS[name], Path(kept)
    if folder is not None:
        table = preset.sweep().run(folder, preset.measure, workers=workers, extend=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        table.frame.to_csv(kept, index=False, float_format=f"%.{DIGITS}g")
    if not kept.is_file():
        raise FileNotFoundError(f"{kept} is not there: train the sweep {name!r}, with a folder")
    return GridTable.load(kept, tuple(preset.sweep().axes))
