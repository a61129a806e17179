"""Runs a sweep: hands out cells until all are done, and keeps the table up to date."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from mechicl.base.checks import check_whole
from mechicl.base.files import remove_leftovers
from mechicl.base.locks import locked
from mechicl.base.progress import progress_bar
from mechicl.base.threads import n_cores
from mechicl.statistics.grids import GridTable
from mechicl.sweeps.devices import device_kind, warn_of_several
from mechicl.sweeps.folder import RESULTS, SweepError, SweepFolder
from mechicl.sweeps.grid import Cell, Grid, in_words
from mechicl.sweeps.measuring import identity, read_measures
from mechicl.sweeps.on_ray import OnRay
from mechicl.sweeps.processes import Processes
from mechicl.sweeps.work import FULL_DISK, Orders, Outcome, work, write_error
from mechicl.tasks.registry import KINDS, TASK_TYPES

PAUSE = 0.5  # seconds between looks at cells that another process holds, and at running cells for the bar


@runtime_checkable
class Executor(Protocol):
    """What runs cells."""

    def run(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
        """Run cells, and give each with its outcome as it ends."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


class InThisProcess:
    """Runs cells one after another, here."""

    def __init__(self, orders: Orders):
        self.orders = orders

    def run(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
        """Run cells, and give each with its outcome as it ends."""
        for cell in cells:
            yield cell, work(self.orders, cell)

    def close(self) -> None:
        """There is nothing to let go of."""


def run_sweep(
    grid: Grid,
    folder: str | Path,
    measure: Any,
    *,
    workers: int | None,
    ray: str | None,
    gpus: float | None,
    launch: Sequence[str],
    retry: bool,
    extend: bool,
    progress: bool,
    on_result: Callable[[GridTable], None] | None,
) -> GridTable:
    """Do what is missing of a sweep (see `Sweep.run`)."""
    if workers is not None:
        check_whole(1, workers=workers)
        if ray is not None:
            raise ValueError(f"workers={workers} and ray={ray!r}: Ray has its own number of workers; give one of them")
    if ray is None and gpus:
        raise ValueError(f"gpus={gpus} is for ray=: without it every cell sees all GPUs")
    measures = read_measures(measure)
    registered = {name: kind for name, kind in TASK_TYPES.items() if kind not in KINDS}
    kinds = {type(task) for cell in grid.cells for task in cell.config.tasks}
    if launch and kinds & {*registered.values()}:
        raise ValueError(
            "launch= starts processes that do not know a kind of task that was registered here: leave it out"
        )
    orders = Orders(
        folder=Path(folder).absolute(),
        measures=measures,
        # by this process, for all: others may not see the source of what was typed into a notebook
        identities=tuple(f"{prefix} {identity(function)}".strip() for prefix, function in measures),
        threads=grid.threads,
        launch=tuple(launch),
        tasks=registered,
    )
    state = SweepFolder(orders.folder)
    try:
        with locked(orders.folder, wait=True):
            remove_leftovers(orders.folder)
            state.write_manifest(grid, list(orders.identities), orders.launch, extend)
        cells = [state.cell(cell.name) for cell in grid.cells]
        # what trains on Ray, or on a GPU that is the workers', is known afterwards
        here = (
            device_kind(cpu=True) if ray is None and (grid.base.cpu or not torch.accelerator.is_available()) else None
        )
        warned = warn_of_several(cells, here)
        run = _Run(state, grid, orders, retry, on_result)
        if run.pending:
            executor = _executor(orders, workers or _cores(grid), ray, 0.0 if grid.base.cpu else gpus)
            try:
                with _Bar(state, grid, run, progress):
                    run.finish(executor)
            finally:
                executor.close()
                run.write_table()
        if not warned:
            warn_of_several(cells)
        return run.end()
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        words = f"the disk is full ({error.filename or orders.folder}): make room; the same command goes on from here"
        raise OSError(error.errno, words) from error


def _executor(orders: Orders, n_workers: int, ray: str | None, gpus: float | None) -> Executor:
    if ray is not None:
        return OnRay(orders, ray, gpus)
    return Processes(orders, n_workers) if n_workers > 1 else InThisProcess(orders)


class _Run:
    """One process' share in a sweep."""

    def __init__(
        self,
        state: SweepFolder,
        grid: Grid,
        orders: Orders,
        retry: bool,
        on_result: Callable[[GridTable], None] | None,
    ):
        self.state, self.grid, self.orders, self.on_result = state, grid, orders, on_result
        self.done: set[str] = set()
        self.failed: dict[str, str] = {}
        self.deaths: Counter[str] = Counter()
        self.holder = ""  # who has the cells that are waited for
        self.last_written, self.seconds = 0.0, 0.05  # when the table was written last, and how long that took
        self.pending: list[Cell] = []
        for cell in grid.cells:
            if self._is_done(cell):
                continue
            if not retry and (error := state.error(cell.name, self.orders.identities)):
                self.failed[cell.name] = error
            else:
                self.pending.append(cell)
        self.pending.sort(key=lambda cell: -cell.cost)  # stable; what takes longest first
        self.write_table()

    def _is_done(self, cell: Cell) -> bool:
        done = self.state.rows(cell.name, self.orders.identities) is not None
        if done:
            self.done.add(cell.name)
        return done

    def finish(self, executor: Executor) -> None:
        """Run cells until each is done, failed, or given up."""
        while self.pending:
            busy, before = [], len(self.pending)
            self.holder = ""
            for cell, outcome in executor.run(self.pending):
                if outcome.state == "done":
                    self.done.add(cell.name)
                    self._keep_table_fresh()
                elif outcome.state == "disk full":
                    raise OSError(FULL_DISK[0], "disk full", outcome.error)
                elif outcome.state == "failed":
                    self.failed[cell.name] = outcome.error
                elif outcome.state == "died":
                    self._count_death(cell, outcome, busy)
                else:  # another process has it
                    busy.append(cell)
                    self.holder = outcome.error
            self.pending = busy
            if len(busy) == before:
                time.sleep(PAUSE)

    def _count_death(self, cell: Cell, outcome: Outcome, again: list[Cell]) -> None:
        """Try a cell again whose process died, but not for ever."""
        self.deaths[cell.name] += 1
        if self.deaths[cell.name] < outcome.tries:
            again.append(cell)
            return
        times = f", {outcome.tries} times" if outcome.tries > 1 else ""
        self.failed[cell.name] = f"{outcome.error}{times}: is there enough memory?"
        write_error(self.orders, self.state.cell(cell.name), self.failed[cell.name])

    def _keep_table_fresh(self) -> None:
        """Write the table, but spend no more than a twentieth of the time on that."""
        started = time.monotonic()
        if started - self.last_written > 20 * self.seconds:
            self.write_table()

    def write_table(self) -> None:
        """Write what is done, here or by other processes."""
        started = time.monotonic()
        with locked(self.orders.folder, wait=True):
            table = self.state.table()
            table.save(self.state.path / RESULTS)
        if self.on_result is not None:
            self.on_result(table)
        self.last_written = time.monotonic()
        self.seconds = self.last_written - started

    def end(self) -> GridTable:
        """The table, if all is done."""
        if self.failed:
            places = {cell.name: in_words(cell.places[0]) for cell in self.grid.cells}
            words = "\n".join(f"  {places[name]}: {error}" for name, error in list(self.failed.items())[:20])
            raise SweepError(
                f"{len(self.failed)} of {len(self.grid.cells)} cells failed; the others are done. Try them again with "
                f"retry=True (--retry); whole errors are in {self.state.path}/cells/*/error.json:\n{words}"
            )
        table = self.state.table(self.grid, self.orders.identities)
        if len(table.frame) != len(self.grid):
            raise SweepError(
                f"{len(self.grid) - len(table.frame)} of {len(self.grid)} models are missing in {self.state.path}, "
                f"though they were done: was the folder changed meanwhile? The same command goes on"
            )
        return table


class _Bar:
    """A progress bar over the cost of all cells, that looks into the folders of those that run."""

    def __init__(self, state: SweepFolder, grid: Grid, run: _Run, progress: bool):
        self.state, self.cells, self.run, self.progress = state, grid.cells, run, progress
        self.total = sum(cell.cost for cell in grid.cells)
        self.stop = threading.Event()

    def __enter__(self) -> None:
        if self.progress:
            self.bar = progress_bar(total=100, initial=round(100 * self._share()), unit="%", desc="sweep")
            self.bar.bar_format = "{desc}: {percentage:5.1f}%|{bar}| [{elapsed}<{remaining}{postfix}]"
            self.thread = threading.Thread(target=self._watch, daemon=True)
            self.thread.start()

    def _share(self) -> float:
        """Done of the whole cost."""
        cost = 0.0
        for cell in self.cells:
            if cell.name in self.run.done:
                cost += cell.cost
            elif cell.config.steps:
                cost += cell.cost * min(self.state.step(cell.name) / cell.config.steps, 1.0)
        return cost / self.total

    def _watch(self) -> None:
        while not self.stop.wait(PAUSE * 2):
            self.bar.n = round(100 * self._share(), 1)
            words = f"{len(self.run.done)} of {len(self.cells)} cells"
            self.bar.set_postfix_str(f"{words}; {self.run.holder}" if self.run.holder else words, refresh=True)

    def __exit__(self, *error: object) -> None:
        if self.progress:
            self.stop.set()
            self.thread.join()
            self.bar.close()


def _cores(grid: Grid) -> int:
    """Workers that this machine has cores for; one where they would share a GPU."""
    if not grid.base.cpu and torch.accelerator.is_available():
        return 1
    return max(1, n_cores() // grid.threads)
