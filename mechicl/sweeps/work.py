"""One cell's work: train its models, save them, measure each, write its rows."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from accelerate.state import PartialState

from mechicl.base.files import is_running, machine_name, remove_leftovers, write_json
from mechicl.base.locks import FolderInUseError, locked
from mechicl.base.settings import Settings, settings
from mechicl.base.threads import using_threads
from mechicl.checkpoints import Checkpoint, CheckpointError, Snapshots, load_checkpoint, save
from mechicl.statistics.grids import SEED
from mechicl.sweeps.folder import DIVERGED, ERROR, LOSS, ROWS, SweepFolder, device_kind, note_device
from mechicl.sweeps.grid import SweepCell
from mechicl.sweeps.measuring import Measure, measured_columns, seeded
from mechicl.tasks import register
from mechicl.training import TrainingConfig, train

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


class LaunchedProcessDiedError(RuntimeError):
    """A signal ended the processes that train a cell; the cell itself may be fine."""


@dataclass(frozen=True)
class Orders:
    """Everything that a process needs to work on any cell of a sweep."""

    folder: Path  # the sweep's, absolute
    measures: Sequence[Measure]
    identities: tuple[str, ...]  # of the measures, from the main process
    threads: int = 1  # number of torch's threads
    launch: tuple[str, ...] = ()  # command that starts a training of several processes; empty to train in this process
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
    except LaunchedProcessDiedError as error:
        return Outcome("died", str(error))
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
            if orders.launch:
                launch_training(orders, cell, folder)
            else:
                train_and_save(cell.config, folder, cell.name)
            checkpoint = load_checkpoint(folder / "checkpoint")
        rows = [_row(orders.measures, checkpoint, cell, i) for i in range(len(cell.places))]
        write_json(folder / ROWS, {"measures": list(orders.identities), "rows": rows})
        shutil.rmtree(folder / "run", ignore_errors=True)  # the checkpoint has everything needed
    except Exception as error:
        cause = error.__cause__ or error  # of an error in a measure, which is named in another
        full = isinstance(cause, OSError) and cause.errno in FULL_DISK
        if full or isinstance(error, FolderInUseError | LaunchedProcessDiedError):
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
    if os.environ.get("RANK", "0") == "0":  # before accelerate starts the process group
        note_device(folder, device_kind(config.cpu))
    config = config if config.routes else config.replace(routes="rule")
    result = train(config, folder / "run", stop_diverged=True, progress=False)
    if PartialState().is_main_process:
        snapshots = Snapshots(result.snapshot_steps, result.snapshots) if result.snapshots else None
        save(folder / "checkpoint", result.models, {"name": name, **result.record}, snapshots)


def launch_training(orders: Orders, cell: SweepCell, folder: Path) -> None:
    """Train a cell by processes of `mechicl.sweeps.launched` that end with this one, and raise their errors."""
    write_json(folder / "config.json", cell.config.to_dict())
    arguments = [str(folder), cell.name, str(orders.threads), machine_name(), str(os.getpid())]
    command = [*orders.launch, "-m", "mechicl.sweeps.launched", *arguments]
    script = Path(sys.executable).parent / command[0]  # of this Python's environment
    if shutil.which(command[0]) is None and script.is_file():
        command[0] = str(script)
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, printed = process.communicate()
        except BaseException:  # such as Ctrl-C: end all of the launcher's processes
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        lines = printed.strip().splitlines()
        named = [line for line in lines if "Error:" in line]  # launchers print more after it
        reason = named[-1] if named else " ".join(lines[-5:])
        if FolderInUseError.__name__ in reason:
            raise FolderInUseError(reason)
        if os.strerror(errno.ENOSPC) in reason:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        if process.returncode < 0 or "(SIGKILL)" in printed:  # the latter is printed by torch's launcher
            raise LaunchedProcessDiedError(f"{' '.join(command)} was ended by a signal ({process.returncode})")
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {reason}\n{printed[-4000:]}")


def end_with(process: int, parent: int | None = None) -> None:
    """End this process soon after another process of this machine, or its parent, has ended."""
    parent = parent or os.getppid()  # its end shows at once; a killed process keeps its number until it is waited for

    def watch() -> None:
        while is_running(process) and os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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
