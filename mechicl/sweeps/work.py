"""One cell's work: train its models, keep them, measure each, write its rows."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mechicl.base.files import machine_name, remove_leftovers, write_json
from mechicl.base.locks import FolderInUseError, locked
from mechicl.base.threads import using_threads
from mechicl.checkpoints import Checkpoint, CheckpointError, load_checkpoint
from mechicl.sweeps.axes import SEED
from mechicl.sweeps.cell_training import train_and_save
from mechicl.sweeps.folder import DIVERGED, ERROR, LOSS, SweepFolder
from mechicl.sweeps.folder import ROWS as ROWS_FILE
from mechicl.sweeps.grid import Cell
from mechicl.sweeps.measuring import Measure, seeded, values_of
from mechicl.tasks import register

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


class LaunchedProcessDiedError(RuntimeError):
    """A signal ended the processes that train a cell: nothing is wrong with the cell."""


@dataclass(frozen=True)
class Orders:
    """What every cell of a run is done by.

    Attributes:
        folder: of the sweep, absolute.
        measures: functions, each with what its columns begin with.
        identities: of the measures, as the process sees them that gives the orders.
        threads: of torch.
        launch: words that start a training of several processes; none to train in this one.
        tasks: kinds of tasks that the user registered, by name, for processes that have not.
    """

    folder: Path
    measures: Sequence[tuple[str, Measure]]
    identities: tuple[str, ...]
    threads: int = 1
    launch: tuple[str, ...] = ()
    tasks: Mapping[str, type] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a cell's work ended.

    Attributes:
        state: "done"; "busy" where another process holds the cell; "failed"; "disk full"; "died" with its process.
        error: in a line.
        tries: of a process that died: how often the cell is tried in all.
    """

    state: Literal["done", "busy", "failed", "disk full", "died"]
    error: str = ""
    tries: int = 5


def work(orders: Orders, cell: Cell) -> Outcome:
    """Do what is missing of a cell, on the sweep's number of threads. Errors are written down, and returned."""
    for name, kind in orders.tasks.items():
        register(kind, name=name)
    folder = SweepFolder(orders.folder).cell(cell.name)
    try:
        with using_threads(orders.threads), locked(folder):
            return _work(orders, cell, folder)
    except FolderInUseError as error:
        return Outcome("busy", str(error))
    except LaunchedProcessDiedError as error:
        return Outcome("died", str(error))
    except OSError as error:
        if error.errno in FULL_DISK:
            return Outcome("disk full", str(error.filename or folder))
        raise


def _work(orders: Orders, cell: Cell, folder: Path) -> Outcome:
    remove_leftovers(folder, folder / "checkpoint")
    if SweepFolder(orders.folder).rows(cell.name, orders.identities) is not None:
        return Outcome("done")
    (folder / ERROR).unlink(missing_ok=True)
    try:
        checkpoint = _checkpoint(orders, cell, folder)
        rows = [_row(orders.measures, checkpoint, cell, i) for i in range(len(cell.places))]
        write_json(folder / ROWS_FILE, {"measures": list(orders.identities), "rows": rows})
        shutil.rmtree(folder / "run", ignore_errors=True)  # the checkpoint has all that is worth keeping
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in FULL_DISK
        if full or isinstance(error, FolderInUseError | LaunchedProcessDiedError):
            raise
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
        write_error(orders, folder, words, traceback.format_exc())
        return Outcome("failed", words)
    return Outcome("done")


def write_error(orders: Orders, folder: Path, words: str, details: str = "") -> None:
    """Keep why a cell failed."""
    write_json(folder / ERROR, {"measures": list(orders.identities), "error": words, "traceback": details})


def _checkpoint(orders: Orders, cell: Cell, folder: Path) -> Checkpoint:
    """The cell's models: from its checkpoint, or trained, from the last save on."""
    path = folder / "checkpoint"
    try:
        return load_checkpoint(path)
    except CheckpointError:  # not there, or cut short: the run folder still has all of it
        pass
    if orders.launch:
        launch_training(orders, cell, folder)
    else:
        train_and_save(cell.config, folder, cell.name)
    return load_checkpoint(path)


def launch_training(orders: Orders, cell: Cell, folder: Path) -> None:
    """Train a cell by processes of its own, which end with this one.

    Raises:
        FolderInUseError: such processes of another run still train it.
        LaunchedProcessDiedError: a signal ended them, or one of them.
        OSError: the disk is full.
        RuntimeError: they failed; with the end of what they printed.
    """
    write_json(folder / "config.json", cell.config.to_dict())
    words = [str(folder), cell.name, str(orders.threads), machine_name(), str(os.getpid())]
    command = [*orders.launch, "-m", "mechicl.sweeps.launched", *words]
    beside = Path(sys.executable).parent / command[0]  # a script of this Python's environment
    if shutil.which(command[0]) is None and beside.is_file():
        command[0] = str(beside)
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, printed = process.communicate()
        except BaseException:  # Ctrl-C, for one: none of the launcher's processes may go on
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        lines = printed.strip().splitlines()
        named = [line for line in lines if "Error:" in line]  # launchers print much after it
        reason = named[-1] if named else " ".join(lines[-5:])
        if FolderInUseError.__name__ in reason:
            raise FolderInUseError(reason)
        if os.strerror(errno.ENOSPC) in reason:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        if process.returncode < 0 or "(SIGKILL)" in printed:  # the second are the words of torch's launcher
            raise LaunchedProcessDiedError(f"{' '.join(command)} was ended by a signal ({process.returncode})")
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {reason}\n{printed[-4000:]}")


def _row(measures: Sequence[tuple[str, Measure]], checkpoint: Checkpoint, cell: Cell, model: int) -> dict[str, Any]:
    """What is known of one model."""
    alone = checkpoint.by_task()[model // len(cell.config.seeds)].select([model % len(cell.config.seeds)])
    diverged = alone.record.get("diverged_at", [-1])[0]
    losses = alone.record["curve"]["eval_loss"]
    if diverged >= 0:
        return {DIVERGED: diverged, LOSS: None}
    row: dict[str, Any] = {DIVERGED: None, LOSS: losses[-1][0] if losses else None}
    with seeded(cell.places[model][SEED]):
        values = values_of(measures, alone)
    taken = sorted({*row, *cell.places[model]} & values.keys())
    if taken:
        raise ValueError(f"a measure returned {taken}, which the table has already: name it otherwise")
    return row | values
