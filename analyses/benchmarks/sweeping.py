"""The overhead of a sweep over the work of its cells: in processes, on Ray, on two cores, and after a kill.

The cells' own work is what they would take without a sweep: training, saving, loading and measuring in a plain loop,
in as many processes at once.
The measure, which is nearly all of it, sleeps for a second, or counts for as long as a calibrated second of a core.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.apart import ROOT
from benchmarks.rows import Row, Settings, row, seconds
from mechicl.checkpoints import load_checkpoint
from mechicl.models import TransformerConfig
from mechicl.sweeps import Sweep
from mechicl.sweeps.folder import RESULTS
from mechicl.sweeps.work import train_and_save
from mechicl.tasks import LinearRegression
from mechicl.training import PRESETS, TrainingConfig

WORKERS = 2
PROCESSES, RAY = "processes", "Ray"
HOW: dict[str, dict[str, Any]] = {PROCESSES: {"workers": WORKERS}, RAY: {"ray": "auto"}}
BARS = {PROCESSES: "<= 1.05", RAY: "<= 1.1"}
MANY, MINUTE = 500, 60
"""Cells of the sweep that the bars are for, and seconds of a cell."""
KILLED = ("processes", "disk")
TINY = TrainingConfig(
    task=LinearRegression(x_dim=2, n_context=2), model=TransformerConfig(x_dim=2, n_context=2), steps=1, batch_size=2,
    eval_prompts=2, n_snapshots=0, cpu=True,
)  # fmt: skip

COUNTING = """
import sys, time

def count_to(number):
    count = 0
    while count < number:
        count += 1

started = time.perf_counter()
count_to(int(sys.argv[1]))
print(time.perf_counter() - started)
"""


def sleep_for_a_second(checkpoint: Any) -> float:
    """A cell's work: none for the cores, so that no cell is slowed down by another."""
    time.sleep(1)
    return 0.0


def count_to(number: int, checkpoint: Any) -> float:
    """A cell's work: as much for a core each time."""
    count = 0
    while count < number:
        count += 1
    return 0.0


def calibrated(rounds: int = 3) -> int:
    """How far a process counts in a second while as many others do as there are workers."""
    number = 5_000_000

    def slowest() -> float:
        command = [sys.executable, "-c", COUNTING, str(number)]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(WORKERS)]
        return max(float(process.communicate()[0]) for process in running)

    return round(number / median(slowest() for _ in range(rounds)))


def cells_of(config: TrainingConfig, n_cells: int) -> Sweep:
    """So many trainings that differ in their learning rate, each a cell."""
    rates = tuple(round(config.learning_rate * (1 + i / 1e4), 12) for i in range(n_cells))
    return Sweep(config, {"learning_rate": rates, "seed": (0,)})


def wall_seconds(sweep: Sweep, measure: Callable[[Any], float] | None, **how: Any) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return seconds(lambda: sweep.run(folder, measure, progress=False, **how))


def loop_seconds(config: TrainingConfig, measure: Callable[[Any], float] | None, n_cells: int) -> float:
    """Return the seconds of a cell without a sweep: trained, saved, loaded and measured in a plain loop."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    for cell in cells_of(config, n_cells).cells:
        with tempfile.TemporaryDirectory() as folder:
            train_and_save(cell.config, Path(folder), cell.name)
            if measure is not None:
                measure(load_checkpoint(Path(folder) / "checkpoint"))
    return (time.perf_counter() - started) / n_cells


def own_seconds(
    config: TrainingConfig, measure: Callable[[Any], float] | None, n_cells: int = 6, n_processes: int = WORKERS
) -> float:
    """Return the seconds of a cell without a sweep, while as many processes as workers do the same.

    On many machines two busy cores are slower than one, which is not overhead of a sweep.
    """
    with ProcessPoolExecutor(n_processes, mp_context=get_context("spawn")) as pool:
        for what in ((TINY, sleep_for_a_second, 1), (config, measure, n_cells)):  # first, each loads what it needs
            loops = [pool.submit(loop_seconds, *what) for _ in range(n_processes)]
            each = [loop.result() for loop in loops]
    return mean(each)


@contextmanager
def ray_session() -> Iterator[float]:
    """Ray on this machine, started before sweeps use it: the seconds that this took."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    paths = os.pathsep.join(filter(None, sys.path))
    options: dict[str, Any] = {
        "include_dashboard": False, "log_to_driver": False, "logging_level": "WARNING",
        "runtime_env": {"env_vars": {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": paths}},
    }  # fmt: skip
    session: Any = ray
    started = seconds(lambda: session.init(address="local", num_cpus=WORKERS, **options))
    try:
        yield started
    finally:
        session.shutdown()


def overhead_rows(name: str, n_cells: int, work: str, measure: Callable[[Any], float], started: float) -> list[Row]:
    """Measure the seconds of a sweep over the same work in plain processes.

    They include the start of the workers, except Ray's, which have done two cells before. From fewer cells than `MANY`,
    a straight line extrapolates to `MANY`.
    """
    own, how = own_seconds(TINY, measure), HOW[name]
    two = [wall_seconds(cells_of(TINY, WORKERS), measure, **how) for _ in range(2 if name == RAY else 1)][-1]
    total = wall_seconds(cells_of(TINY, n_cells), measure, **how)
    a_turn = max((total - two) / (n_cells / WORKERS - 1), own)  # one cell of each worker; less would be chance

    def ratio(cells: int, wall: float) -> float:
        return wall / (cells / WORKERS * own)

    after = f"; Ray itself started in {started:.1f} s" if name == RAY else ""
    detail = (
        f"{total:.1f} s on {WORKERS} workers, a cell without a sweep {own:.3f} s, two at once; two cells {two:.1f} s, "
        f"{two - a_turn:.1f} s of it the start{after}"
    )
    words = f"{name}: time of a sweep over its work, {{}} {work} cells of a second"
    rows = [row(words.format(n_cells), [ratio(n_cells, total)], BARS[name] if n_cells >= MANY else "shown", detail)]
    if n_cells < MANY:
        line = two + a_turn * (MANY / WORKERS - 1)
        counted = f"{line:.0f} s, by a straight line through {WORKERS} and {n_cells} cells"
        rows.append(row(f"{words.format(MANY)}, extrapolated", [ratio(MANY, line)], BARS[name], counted))
    return rows


def equal_bytes_row(kinds: list[str]) -> Row:
    """Whether each way to run a sweep writes the table of a serial one."""
    sweep = cells_of(TINY.replace(steps=20, batch_size=8, eval_prompts=50), 4)
    tables = {}
    with tempfile.TemporaryDirectory() as root:
        for name, how in {"serial": {"workers": 1}, **{kind: HOW[kind] for kind in kinds}}.items():
            sweep.run(Path(root) / name, progress=False, **how)
            tables[name] = (Path(root) / name / RESULTS).read_bytes()
    equal = sum(table == tables["serial"] for table in tables.values()) / len(tables)
    return row(f"{', '.join(tables)}: share with the serial table's bytes", [equal], "1", f"{len(sweep)} models")


def speed_up_rows(seconds_a_cell: float, n_cells: int = 4) -> list[Row]:
    """Trainings of GPT-2 style models, of as many steps each, one after another over two at a time."""
    config = PRESETS["gpt2-8l"].replace(curriculum=None, n_snapshots=0, eval_prompts=64, cpu=True)

    def of_steps(steps: int) -> TrainingConfig:
        return config.replace(steps=steps, warmup_steps=1, eval_every=steps, save_every=steps, log_every=steps)

    a_step = wall_seconds(cells_of(of_steps(20), 1), None, workers=1) / 20
    long = of_steps(max(1, round(seconds_a_cell / a_step)))
    sweep = cells_of(long, n_cells)
    alone, beside = (own_seconds(long, None, 1, n) for n in (1, WORKERS))
    one, two = wall_seconds(sweep, None, workers=1), wall_seconds(sweep, None, workers=WORKERS)
    own = one / n_cells
    tiny = [wall_seconds(cells_of(TINY, n), None, workers=n) for n in (1, WORKERS)]
    start = max(0.0, tiny[1] - tiny[0])
    words, detail = f"speed-up of two workers on {n_cells} cells of", f"{one:.1f} s against {two:.1f} s, of one thread"
    is_long = seconds_a_cell >= MINUTE
    rows = [row(f"{words} {own:.0f} s", [one / two], ">= 1.9" if is_long else "shown", detail)]
    if not is_long:
        line = start + (two - start) * MINUTE / own
        counted = f"{n_cells * MINUTE} s against {line:.0f} s; the workers' start is {start:.1f} s"
        rows.append(row(f"{words} {MINUTE} s, extrapolated", [n_cells * MINUTE / line], ">= 1.9", counted))
    counted = f"{alone:.1f} s alone, {beside:.1f} s each of two: what these cores give"
    return [*rows, row("the same of plain processes without a sweep", [WORKERS * alone / beside], "shown", counted)]


def kills_rows(n: int) -> list[Row]:
    """SIGKILLs of drivers and workers at random moments, and full disks (`python -m tests.sweeps.kills`)."""
    if not (ROOT / "tests" / "sweeps" / "kills.py").is_file():
        print("left out: kills: the tests are not here", flush=True)
        return []
    command = [sys.executable, "-m", "tests.sweeps.kills", "--n", str(n), "--how", *KILLED]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    last = re.search(r"(\d+) of (\d+) end with the complete, equal table", done.stdout)
    if last is None:
        raise RuntimeError(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr[-500:]}")
    return [row(f"share of {n} killed sweeps that end with the complete, equal table", [int(last[1]) / int(last[2])],
                "1", " ".join(["python", *command[1:]]))]  # fmt: skip


def measure(settings: Settings) -> list[Row]:
    n_cells = MANY if settings.full else 40
    works = {"sleeping": sleep_for_a_second, "counting": partial(count_to, calibrated())}

    def overheads(name: str, started: float = 0.0) -> list[Row]:
        return [line for work, own in works.items() for line in overhead_rows(name, n_cells, work, own, started)]

    rows = overheads(PROCESSES)
    if find_spec("ray") is None:
        print("left out: sweeps on Ray: pip install 'mechicl[ray]'", flush=True)
        rows.append(equal_bytes_row([PROCESSES]))
    else:
        with ray_session() as started:
            rows += overheads(RAY, started)
            rows.append(equal_bytes_row([PROCESSES, RAY]))
    return [*rows, *speed_up_rows(MINUTE if settings.full else 15), *kills_rows(50 if settings.full else 3)]
