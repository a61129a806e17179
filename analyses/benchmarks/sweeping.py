"""What a sweep costs beside the work of its cells: in processes, on Ray, and on two cores."""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.rows import Row, row, seconds
from benchmarks.settings import Settings
from mechicl.models import TransformerConfig
from mechicl.sweeps import Sweep
from mechicl.tasks import LinearRegression
from mechicl.training import PRESETS, TrainingConfig

WORKERS = 2
TINY = TrainingConfig(
    task=LinearRegression(x_dim=2, n_context=2), model=TransformerConfig(x_dim=2, n_context=2), steps=1, batch_size=2,
    eval_prompts=2, n_snapshots=0, cpu=True,
)  # fmt: skip


def busy_for_a_second(checkpoint: Any) -> float:
    """A cell's work: a core for one second."""
    end = time.perf_counter() + 1
    while time.perf_counter() < end:
        pass
    return 0.0


def cells_of(config: TrainingConfig, n_cells: int) -> Sweep:
    """So many trainings that differ in their learning rate, each a cell."""
    rates = tuple(round(config.learning_rate * (1 + i / 1e4), 12) for i in range(n_cells))
    return Sweep(config, {"learning_rate": rates, "seed": (0,)})


def wall_seconds(sweep: Sweep, measure: Callable[[Any], float] | None, **how: Any) -> float:
    """Of a sweep in a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        return seconds(lambda: sweep.run(folder, measure, progress=False, **how))


def overhead_rows(n_cells: int, from_start: bool) -> list[Row]:
    """Seconds of two workers over half the cells' own, less one.

    Worker processes are new for each sweep: their start counts where `from_start`, else what two cells take more than
    one alone is left out. Ray's stay, and have done two cells before.
    """
    alone = wall_seconds(cells_of(TINY, 10), busy_for_a_second, workers=1) / 10
    rows = []
    for name, bar, how in (("processes", "<= 0.05", {"workers": WORKERS}), ("Ray", "<= 0.1", {"ray": "auto"})):
        session = RaySession() if "ray" in how else None
        try:
            start = wall_seconds(cells_of(TINY, WORKERS), busy_for_a_second, **how)
            total = wall_seconds(cells_of(TINY, n_cells), busy_for_a_second, **how)
        finally:
            if session is not None:
                session.close()
        in_start = 0.0 if session or from_start else start - alone
        overhead = (total - in_start) * WORKERS / (n_cells * alone) - 1
        started = f"; Ray itself started in {session.seconds:.1f} s" if session else ""
        after = ", with their start" if from_start and not session else ", after the start"
        detail = f"{total:.1f} s on two workers, a cell alone {alone:.3f} s; two cells {start:.1f} s{started}"
        quantity = f"overhead of {name} on {n_cells} one-second cells{after}"
        rows.append(row(quantity, [overhead], bar if n_cells >= 500 else "shown", detail))
    return rows


class RaySession:
    """Ray on this machine, started before sweeps use it."""

    def __init__(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        self._ray: Any = ray
        paths = os.pathsep.join(filter(None, sys.path))
        options: dict[str, Any] = {
            "include_dashboard": False, "log_to_driver": False, "logging_level": "WARNING",
            "runtime_env": {"env_vars": {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": paths}},
        }  # fmt: skip
        self.seconds = seconds(lambda: ray.init(address="local", num_cpus=WORKERS, **options))

    def close(self) -> None:
        """End it."""
        self._ray.shutdown()


def speed_up_row(seconds_a_cell: float, n_cells: int = 4) -> Row:
    """Trainings of GPT-2 style models one after another over two at a time."""
    config = PRESETS["gpt2-8l"].replace(curriculum=None, n_snapshots=0, eval_prompts=64, cpu=True)

    def of_steps(steps: int) -> TrainingConfig:
        return config.replace(steps=steps, warmup_steps=1, eval_every=steps, save_every=steps, log_every=steps)

    a_step = wall_seconds(cells_of(of_steps(20), 1), None, workers=1) / 20
    sweep = cells_of(of_steps(max(1, round(seconds_a_cell / a_step))), n_cells)
    one, two = wall_seconds(sweep, None, workers=1), wall_seconds(sweep, None, workers=WORKERS)
    return row(f"speed-up of two workers on {n_cells} cells of {one / n_cells:.0f} s", [one / two],
               ">= 1.9" if seconds_a_cell >= 60 else "shown", f"{one:.1f} s against {two:.1f} s")  # fmt: skip


def measure(settings: Settings) -> list[Row]:
    """Everything that this part measures."""
    n_cells = 500 if settings.full else 60
    return [*overhead_rows(n_cells, from_start=settings.full), speed_up_row(60 if settings.full else 10)]
