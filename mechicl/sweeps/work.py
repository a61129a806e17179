"""One cell's work: train its models, save them, measure each, write its rows."""

import errno
import shutil
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mechicl.base.files import remove_leftovers, write_json
from mechicl.base.locks import FolderInUseError, locked
from mechicl.base.settings import Settings, settings
from mechicl.base.threads import using_threads
from mechicl.checkpoints import Checkpoint, CheckpointError, Snapshots, load_checkpoint, save
from mechicl.statistics.grids import SEED
from mechicl.sweeps.folder import DIVERGED, ERROR, LOSS, ROWS, SweepFolder
from mechicl.sweeps.grid import SweepCell
from mechicl.sweeps.measuring import Measure, measured_columns, seeded
from mechicl.tasks import register
from mechicl.training import TrainingConfig, train

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Orders:
    """Everything that a process needs to work on any cell of a sweep."""

    folder: Path  # the sweep's, absolute
    measures: Sequence[Measure]
    identities: tuple[str, ...]  # of the measures, from the main process
    threads: int = 1  # number of torch's threads
    # kinds of tasks that the user registered, by name, for other processes.
    tasks: Mapping[str, type] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True)
class Outcome:
    """How a cell's work ended: "busy" if another process works on it, "died" with its process; the error is a line."""

    state: Literal["done", "busy", "failed", "disk full", "died"]
    error: str = ""


def work(orders: Orders, cell: SweepCell) -> Outcome:
    """Do the remaining work of a cell, on the sweep's number of threads. Errors are written to its folder."""
    for name, kind in orders.tasks.items():
        register(kind, name=name)
    folder = SweepFolder(orders.folder).cell(cell.name)
    try:
        with using_threads(orders.threads), settings(**asdict(orders.settings)), locked(folder):
            return _work(orders, cell, folder)
    except FolderInUseError as error:
        return Outcome("busy", str(error))
    except OSError as error:
        if error.errno in FULL_DISK:
            return Outcome("disk full", str(error.filename or folder))
        raise


def _work(orders: Orders, cell: SweepCell, folder: Path) -> Outcome:
    remove_leftovers(folder, folder / "checkpoint")
    if SweepFolder(orders.folder).rows(cell.name, orders.identities) is not None:
        return Outcome("done")
    (folder / ERROR).unlink(missing_ok=True)
    try:
        try:
            checkpoint = load_checkpoint(folder / "checkpoint")
        except CheckpointError:  # missing or incomplete: the run folder still has everything
            train_and_save(cell.config, folder, cell.name)
            checkpoint = load_checkpoint(folder / "checkpoint")
        rows = [_row(orders.measures, checkpoint, cell, i) for i in range(len(cell.places))]
        write_json(folder / ROWS, {"measures": list(orders.identities), "rows": rows})
        shutil.rmtree(folder / "run", ignore_errors=True)  # the checkpoint has everything needed
    except Exception as error:
        cause = error.__cause__ or error  # of an error in a measure, which is named in another
        full = isinstance(cause, OSError) and cause.errno in FULL_DISK
        if full or isinstance(error, FolderInUseError):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
        write_error(orders, cell.name, reason, traceback.format_exc())
        return Outcome("failed", reason)
    return Outcome("done")


def write_error(orders: Orders, name: str, reason: str, details: str = "") -> None:
    """Write the reason for a cell's failure into its folder."""
    data = {"measures": list(orders.identities), "error": reason, "traceback": details}
    write_json(SweepFolder(orders.folder).cell(name) / ERROR, data)


def train_and_save(config: TrainingConfig, folder: Path, name: str) -> None:
    """Train a cell's models in its folder, resuming from the last save, and write their checkpoint.

    A cell's bits must not depend on where it runs, so routes are not measured.
    """
    config = config if config.routes else config.replace(routes="rule")
    result = train(config, folder / "run", stop_diverged=True, progress=False)
    snapshots = Snapshots(result.snapshot_steps, result.snapshots) if result.snapshots else None
    save(folder / "checkpoint", result.models, {"name": name, **result.record}, snapshots)


def _row(measures: Sequence[Measure], checkpoint: Checkpoint, cell: SweepCell, model: int) -> dict[str, Any]:
    task, seed = divmod(model, len(cell.config.seeds))
    alone = checkpoint.by_task()[task].select([seed])
    diverged = alone.record.get("diverged_at", [-1])[0]
    losses = alone.record["curve"]["eval_loss"]
    if diverged >= 0:
        return {DIVERGED: diverged, LOSS: None}
    row: dict[str, Any] = {DIVERGED: None, LOSS: losses[-1][0] if losses else None}
    with seeded(cell.places[model][SEED]):
        columns = measured_columns(measures, alone)
    if taken := sorted({*row, *cell.places[model]} & columns.keys()):
        raise ValueError(f"a measure returned {taken}, which are columns of the table already: use other names")
    return row | columns
