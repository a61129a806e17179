"""`mechicl sweep`."""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class SweepCommand:
    """Train a preset over a grid of values and measure every model, or report the progress of a sweep.

    `mechicl sweep PRESET --over model.n_layers=1:8 task.noise_std=0,0.5 seed=0:5 --measure regret`; the same command
    resumes after a kill. `mechicl sweep status DIR` lists the cells of a running or ended sweep, `mechicl sweep report
    DIR` draws a page of it, `mechicl sweep list` lists the ready-made sweeps and measures."""

    what: tyro.conf.Positional[str]
    """A training preset, a ready-made sweep (`mechicl sweep list`), or `status`, `report` or `list`."""
    folder: tyro.conf.Positional[Path | None] = None
    """Folder of the sweep, for `status` and `report`."""
    over: tuple[str, ...] = ()
    """The axes: fields by their path, such as model.n_layers=1:8 (1 to 7), task.n_tasks=8,64,512, seed=0:5, or
    x_dim=5,10 for the size of task and model together. They are added to those of a ready-made sweep, or replace
    them."""
    fixed: Annotated[tuple[str, ...], tyro.conf.arg(name="set")] = ()
    """Fields that replace the preset's in all cells, such as steps=1000 model.d_model=32."""
    measure: str | None = None
    """Measures of each model: names with commas between them (`mechicl sweep list`), or module:function."""
    out: Path | None = None
    """Folder of the sweep; by default runs/sweeps/NAME. For `report`, folder of the page; by default DIR/report."""
    workers: int | None = None
    """Processes that run cells; by default one for each core."""
    ray: str | None = None
    """Run the cells on Ray: the address of a cluster, or auto for a running cluster, else this machine."""
    gpus: float | None = None
    """GPUs of a Ray machine that each cell takes; 0.25 lets four share one. By default 1 if there are any."""
    together: int | None = None
    """Most models that train as one ensemble; 8 by default. More are quicker if models are small."""
    threads: int = 1
    """Threads of torch for each cell."""
    retry: bool = False
    """Try failed cells again."""
    extend: bool = False
    """Extend a sweep in a folder by other axes or measures."""
    quiet: bool = False
    """No progress bar."""

    def execute(self, command: str) -> None:
        """Run the sweep, or report its progress."""
        if self.what == "list":
            self._list()
        elif self.what == "status":
            self._status(self._folder())
        elif self.what == "report":
            self._report(self._folder())
        elif self.folder is not None:
            raise ValueError(f"{self.folder}: the folder of a sweep is given as --out {self.folder}")
        else:
            self._run()

    def _folder(self) -> Path:
        if self.folder is None:
            raise ValueError(f"mechicl sweep {self.what} needs the folder of a sweep: mechicl sweep {self.what} DIR")
        return self.folder

    def _run(self) -> None:
        from mechicl.sweeps import SWEEPS, Sweep  # here, so that help does not wait for torch
        from mechicl.sweeps.grid import parse_axes
        from mechicl.sweeps.presets import SweepPreset
        from mechicl.training import PRESETS
        from mechicl.training.config import change

        if self.what not in {*SWEEPS, *PRESETS}:
            raise ValueError(
                f"no preset or sweep {self.what!r}: there are the sweeps {sorted(SWEEPS)} and the presets "
                f"{sorted(PRESETS)}; or status, report or list"
            )
        ready = SWEEPS.get(self.what) or SweepPreset("", self.what, {})
        base = PRESETS[ready.config] if isinstance(ready.config, str) else ready.config
        sys.path.insert(0, str(Path.cwd()))  # for a user's own module:function, as with python -m
        fixed = parse_axes(self.fixed)
        several = [name for name, values in fixed.items() if len(values) != 1]
        if several:
            raise ValueError(f"--set gives {several} several values: make them axes, --over")
        config = change(base, {name: values[0] for name, values in fixed.items()})
        measure = self.measure.split(",") if self.measure else ready.measure
        sweep = Sweep(
            config, {**ready.over, **parse_axes(self.over)}, together=self.together or ready.together,
            threads=self.threads,
        )  # fmt: skip
        out = self.out or Path("runs/sweeps") / self.what
        table = sweep.run(
            out, measure, workers=self.workers, ray=self.ray, gpus=self.gpus, retry=self.retry, extend=self.extend,
            progress=not self.quiet,
        )  # fmt: skip
        diverged = int(table.frame["diverged_at"].notna().sum())
        words = f", {diverged} of them diverged" if diverged else ""
        print(f"{out}/results.csv: {len(table.frame)} models in {len(sweep.cells)} cells{words}")

    def _list(self) -> None:
        from mechicl.sweeps import MEASURES, SWEEPS

        print("sweeps:")
        for name, ready in SWEEPS.items():
            print(f"  {name:24} {ready.summary}")
        print("measures:")
        for name, measure in MEASURES.items():
            print(f"  {name:24} {(measure.__doc__ or '').strip().splitlines()[0] if measure.__doc__ else ''}")

    def _status(self, folder: Path) -> None:
        from mechicl.sweeps import status

        cells = status(folder)
        counts = Counter(cell.state for cell in cells)
        print(f"{folder}: " + ", ".join(f"{counts[s]} {s}" for s in ("done", "running", "waiting", "failed")))
        for cell in cells:
            if cell.state in ("running", "failed"):
                detail = cell.error if cell.state == "failed" else f"step {cell.step:,} of {cell.steps:,}"
                print(f"  {cell.state:8} {cell.places}: {detail}")

    def _report(self, folder: Path) -> None:
        from mechicl.reports.sweep_page import write_sweep_page
        from mechicl.sweeps import load_table

        out = self.out or folder / "report"
        print(write_sweep_page(load_table(folder), out, title=folder.name))
