"""A sweep: a grid of trainings, run in one process, several, or on Ray."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechicl.statistics.grids import GridTable
from mechicl.sweeps.grid import Grid
from mechicl.sweeps.runner import run_sweep


@dataclass(frozen=True, eq=False)
class Sweep(Grid):
    """A grid of trainings, and what is measured of every model.

    Combinations that differ only in seed, or in the task's data, train together as one ensemble: a cell. Cells do not
    depend on each other, nor on how, where and in which order they are run.

    Attributes:
        config: what all cells share, or the name of a preset.
        over: the axes, name to values: fields by their path ("model.n_layers"), "seed", or "x_dim" and "n_context" for
            the size of task and model together. Values are a sequence, or a mapping of labels to values; a value that
            is a mapping itself changes several fields at once. Without "seed" the config's own seeds are that axis.
        together: at most so many models train as one ensemble. More are quicker where models are small, fewer share
            out better over workers. It is part of what is trained: other ensembles round otherwise.
        threads: of torch, for each cell; part of what is trained for the same reason.

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

    def run(
        self,
        folder: str | Path,
        measure: Any = None,
        *,
        workers: int | None = None,
        ray: str | None = None,
        gpus: float | None = None,
        launch: Sequence[str] = (),
        retry: bool = False,
        extend: bool = False,
        progress: bool = True,
        on_result: Callable[[GridTable], None] | None = None,
    ) -> GridTable:
        """Train and measure what is missing in the folder, and return the table of all models.

        The same call goes on where another was stopped, killed at any moment or short of disk space. Several may work
        on one folder at once, also from several machines that share it: each takes cells that no other holds.

        Args:
            folder: of the sweep: `sweep.json` says what it is, `results.csv` is the table as far as it is, `cells/` has
                a folder for each cell, with its checkpoint.
            measure: what is measured of each model: a function of a `Checkpoint` that holds it alone and returns a
                number, a mapping of names to numbers, or a `Result`; a name of `sweeps.MEASURES` or
                "module:function"; or several, as a sequence of names or a mapping of names to functions. None for
                the held-out loss alone, which the table always has.
            workers: processes that run cells. By default as many as there are cores for, one where a GPU is used; with
                1 the cells run in this process.
            ray: run the cells on Ray instead: "auto" for the cluster that is running, else this machine's cores, or
                the address of a cluster whose machines share the folder. Needs `pip install mechicl[ray]`.
            gpus: that each cell takes of a Ray machine; 0.25 lets four share one, 0 trains on CPUs. By default 1 where
                the cluster has some and the config does not say `cpu`.
            launch: words that start a training of several processes, such as ("accelerate", "launch",
                "--num_processes", "2"), where one model takes more than a process.
            retry: try failed cells again.
            extend: let the folder hold a sweep with other values on its axes, or other measures: cells that it has
                already are kept, and models are measured anew where the measures changed.
            progress: show a progress bar, with the time left.
            on_result: called with the table so far: at the start, at the end, and now and then between.

        Returns:
            One row a model: the axes, then "diverged_at" (the step, or NaN), "loss" (held-out, at the end), and what
            was measured, NaN for a model that diverged.

        Raises:
            SweepError: cells failed; the message lists them. The table has all others (`sweeps.load_table`).
            OSError: the disk is full.
            ValueError: the folder holds another sweep; the message says what differs.
        """
        return run_sweep(
            self, folder, measure, workers=workers, ray=ray, gpus=gpus, launch=launch, retry=retry, extend=extend,
            progress=progress, on_result=on_result,
        )  # fmt: skip
