"""A sweep: a grid of trainings, run in one process, several, or on Ray."""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mechicl.base.arguments import Count, NonNegative, checked
from mechicl.base.files import remove_leftovers
from mechicl.base.locks import locked
from mechicl.base.progress import progress_bar
from mechicl.base.settings import settings
from mechicl.base.threads import n_cores
from mechicl.statistics.grids import GridTable
from mechicl.sweeps.executors import RunCells, on_ray, on_this_machine
from mechicl.sweeps.folder import RESULTS, SweepError, SweepFolder
from mechicl.sweeps.grid import Grid, SweepCell, place_text
from mechicl.sweeps.measuring import identity, read_measures
from mechicl.sweeps.work import FULL_DISK, Orders, write_error
from mechicl.tasks.registry import TASK_KINDS, TASK_TYPES

PAUSE = 0.5  # seconds between looks at cells that another process works on
TABLE_EVERY = 10.0  # seconds between two writes of the table while cells end
MOST_DEATHS = 5  # of the process of a cell, until the cell counts as failed


@dataclass(frozen=True, eq=False)
class Sweep(Grid):
    """A grid of trainings and of measurements on every model.

    Combinations that differ only in seed, or in the task's data, train together as one ensemble: a cell. Cells are
    independent of each other, and of how, where and in which order they run.

    Attributes:
        config: the training config that all combinations start from, or the name of one in `training.PRESETS`.
        over: the axes of the grid, name to values. A name is a field of the config by its path ("model.n_layers"),
            "seed", or "x_dim" and "n_context" for the size of task and model together. Values are a sequence, or (but
            for "seed") a mapping of labels to values; a value that is itself a mapping changes several fields at once,
            and its axis may have any name. None has the label "none". By default the config's own seeds are the axis
            "seed".
        together: largest number of models in an ensemble. Large ensembles are faster for small models, small ones
            divide better over workers. It determines the results: other ensembles round differently.
        threads: torch's threads for each cell; determines the results for the same reason.

    Raises:
        ValueError: a name or value that does not fit, with the combination that it belongs to; or two combinations
            that are the same training.

    Example:
        >>> sweep = Sweep("lsa-1l", {"learning_rate": (1e-3, 1e-2), "seed": range(3)})
        >>> len(sweep.cells), len(sweep.cells[0].places)
        (2, 3)
        >>> table = sweep.run("runs/rates", workers=2)
        >>> table.intervals("loss")
    """

    @checked
    def run(
        self,
        folder: str | Path,
        measure: Any = None,
        *,
        workers: Count | None = None,
        ray: str | None = None,
        gpus: NonNegative | None = None,
        retry: bool = False,
        extend: bool = False,
        progress: bool | None = None,
    ) -> GridTable:
        """Train and measure what is missing in the folder, and return the table of all models.

        The same call continues a run that was stopped, killed at any moment or short of disk space. Several processes
        may work on one folder at once, also on several machines that share it: each works on other cells.

        Args:
            folder: folder of the sweep: `sweep.json` describes it, `results.csv` is the table so far, `cells/` has a
                folder for each cell, with its checkpoint.
            measure: a function of a `Checkpoint` with one model that returns a number, a mapping of names to numbers,
                or a `Result`; a name of `sweeps.MEASURES` or "module:function"; or a sequence of these. None for the
                held-out loss alone, which the table always has.
            workers: processes that run cells. By default one for each core (over `threads`), or 1 where a GPU is used;
                1 runs the cells in this process.
            ray: run the cells on Ray instead: "auto" for the running cluster, else this machine's cores, or the address
                of a cluster whose machines share the folder. Needs `pip install mechicl[ray]`.
            gpus: GPUs of a Ray machine for each cell; 0.25 lets four share one, 0 trains on CPUs. By default 1 where
                the cluster has some and the config's `cpu` is False.
            retry: try failed cells again.
            extend: accept a folder with a sweep that has other values on its axes, or other measures: its cells are
                kept, and models are measured again if the measures changed.
            progress: show a progress bar of the cells, with the remaining time.

        Returns:
            A `GridTable`, whose `frame` has one row per model: the axes, then "diverged_at" (the training step, or
            NaN), "loss" (held-out loss at the end) and the measured values, NaN for a model that diverged.
            `intervals("loss")` has means over seeds with their 95% intervals.

        Raises:
            SweepError: cells failed; the message lists them. The table has all others (`sweeps.load_table`).
            OSError: the disk is full.
            ValueError: the folder contains another sweep; the message lists the differences.
        """
        if workers is not None and ray is not None:
            raise ValueError(f"workers={workers} and ray={ray!r}: Ray chooses the number of workers; give one of them")
        if ray is None and gpus:
            raise ValueError(f"gpus={gpus} is for ray=: without it every cell sees all GPUs")
        measures = read_measures(measure)
        registered = {name: kind for name, kind in TASK_TYPES.items() if kind not in TASK_KINDS}
        orders = Orders(
            folder=Path(folder).absolute(),
            measures=measures,
            # computed here for all: other processes cannot read the source of functions typed into a notebook
            identities=tuple(map(identity, measures)),
            threads=self.threads,
            tasks=registered,
            settings=settings.current,
        )
        on_gpu = not self.base.cpu and torch.accelerator.is_available()
        try:
            driver = _Driver(self, orders, extend)
            if pending := driver.pending(retry):
                if ray is not None:
                    executor = on_ray(orders, ray, 0.0 if self.base.cpu else gpus)
                else:
                    executor = on_this_machine(orders, workers or (1 if on_gpu else max(1, n_cores() // self.threads)))
                n = len(self.cells)
                bar = progress_bar(total=n, initial=n - len(pending), unit="cell", desc="sweep", progress=progress)
                try:
                    with executor as run_cells, bar:
                        driver.finish(pending, run_cells, bar)
                finally:
                    driver.write_table()
            return driver.table()
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            text = f"the disk is full ({error.filename or orders.folder}): free some space; the same command continues"
            raise OSError(error.errno, text) from error


class _Driver:
    def __init__(self, grid: Grid, orders: Orders, extend: bool):
        self.grid, self.orders = grid, orders
        self.state = SweepFolder(orders.folder)
        self.failed: dict[str, str] = {}
        self.last_written = 0.0
        with locked(orders.folder, wait=True):
            remove_leftovers(orders.folder)
            self.state.write_manifest(grid, list(orders.identities), extend)

    def pending(self, retry: bool) -> list[SweepCell]:
        pending = []
        for cell in self.grid.cells:
            if self.state.rows(cell.name, self.orders.identities) is not None:
                continue
            if not retry and (error := self.state.error(cell.name, self.orders.identities)):
                self.failed[cell.name] = error
            else:
                pending.append(cell)
        self.write_table()
        return sorted(pending, key=lambda cell: -cell.cost)

    def finish(self, pending: list[SweepCell], run_cells: RunCells, bar: Any) -> None:
        deaths: Counter[str] = Counter()
        while pending:
            again: list[SweepCell] = []
            bar.set_postfix_str("")
            for cell, outcome in run_cells(pending):
                if outcome.state == "disk full":
                    raise OSError(FULL_DISK[0], "disk full", outcome.error)
                deaths[cell.name] += outcome.state == "died"
                if outcome.state == "busy" or (outcome.state == "died" and deaths[cell.name] < MOST_DEATHS):
                    again.append(cell)
                    bar.set_postfix_str(outcome.error)
                    continue
                bar.update()
                if outcome.state == "failed":
                    self.failed[cell.name] = outcome.error
                elif outcome.state == "died":
                    self.failed[cell.name] = f"{outcome.error}, {MOST_DEATHS} times: is there enough memory?"
                    write_error(self.orders, cell.name, self.failed[cell.name])
                elif time.monotonic() - self.last_written > TABLE_EVERY:
                    self.write_table()
            if len(again) == len(pending):
                time.sleep(PAUSE)
            pending = again

    def write_table(self) -> None:
        with locked(self.orders.folder, wait=True):
            self.state.table().save(self.state.path / RESULTS)
        self.last_written = time.monotonic()

    def table(self) -> GridTable:
        if self.failed:
            places = {cell.name: place_text(cell.places[0]) for cell in self.grid.cells}
            failures = "\n".join(f"  {places[name]}: {error}" for name, error in list(self.failed.items())[:20])
            raise SweepError(
                f"{len(self.failed)} of {len(self.grid.cells)} cells failed; the others are done. Try them again with "
                f"retry=True (--retry); whole errors are in {self.state.path}/cells/*/error.json:\n{failures}"
            )
        table = self.state.table(self.grid, self.orders.identities)
        if len(table.frame) != len(self.grid):
            raise SweepError(
                f"{len(self.grid) - len(table.frame)} of {len(self.grid)} models are missing in {self.state.path}, "
                f"although they were done: was the folder changed? The same command continues"
            )
        return table
