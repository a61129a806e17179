"""Where the cells of a sweep run: in this process, in several, or on Ray."""

import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle

from mechicl.sweeps.grid import SweepCell
from mechicl.sweeps.work import Orders, Outcome, work

RunCells = Callable[[Sequence[SweepCell]], Iterator[tuple[SweepCell, Outcome]]]
"""Runs cells, and yields each with its outcome when it ends."""
RETRIES = 2  # of Ray, for a cell whose machine or process was lost


@contextmanager
def on_this_machine(orders: Orders, n_workers: int) -> Iterator[RunCells]:
    """Run cells in worker processes, which end with this process; one worker means this process itself."""
    if n_workers == 1:
        yield lambda cells: ((cell, work(orders, cell)) for cell in cells)
        return
    from loky import ProcessPoolExecutor
    from loky.process_executor import BrokenProcessPool

    try:
        pickled = cloudpickle.dumps(orders)
    except Exception as error:
        raise TypeError(f"a measure cannot be pickled ({error}): use workers=1, or a function of a module") from error
    options: Any = {"env": {"OMP_WAIT_POLICY": "passive"}, "initializer": _begin, "initargs": (os.getpid(),)}
    idle: list[ProcessPoolExecutor] = []  # pools of one process each, so that a death identifies its cell
    running: dict[Future[Outcome], tuple[ProcessPoolExecutor, SweepCell]] = {}

    def run(cells: Sequence[SweepCell]) -> Iterator[tuple[SweepCell, Outcome]]:
        waiting, ended = deque(cells), []
        while waiting or running:
            while waiting and len(running) < n_workers:
                worker = idle.pop() if idle else ProcessPoolExecutor(1, **options)
                cell = waiting.popleft()
                running[worker.submit(_work, pickled, cell)] = worker, cell
            yield from ended  # workers are busy while the caller writes a table
            ended = []
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                worker, cell = running.pop(future)
                try:
                    outcome = future.result()
                    idle.append(worker)
                except BrokenProcessPool as error:
                    worker.shutdown(kill_workers=True)
                    code = re.search(r"\{(.*)\}", str(error))
                    outcome = Outcome("died", f"the worker process died ({code[1] if code else error})")
                ended.append((cell, outcome))
        yield from ended

    try:
        yield run
    finally:
        for worker in [*idle, *(worker for worker, _ in running.values())]:
            worker.shutdown(kill_workers=True)


def _begin(parent: int) -> None:
    """Leave Ctrl-C to the parent, which then stops its workers, and end soon after the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(orders: bytes, cell: SweepCell) -> Outcome:
    try:
        return work(cloudpickle.loads(orders), cell)
    except Exception as error:  # such as a module that cannot be imported here
        return Outcome("failed", f"{type(error).__name__}: {error}")


@contextmanager
def on_ray(orders: Orders, address: str, gpus: float | None) -> Iterator[RunCells]:
    """Run cells as tasks of Ray: on this machine's cores, or on a cluster whose machines share the sweep's folder."""
    # read when Ray is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # hides GPUs from cells without one
    try:
        import ray as ray_module  # an extra, which takes seconds to import
    except ImportError as error:
        raise ValueError("ray= needs Ray: pip install 'mechicl[ray]'") from error
    ray: Any = ray_module
    started_here = not ray.is_initialized()
    if started_here:
        paths = os.pathsep.join(dict.fromkeys([str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]))
        environment = {"env_vars": {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": paths}}
        options = {"runtime_env": environment, "log_to_driver": False, "logging_level": "WARNING"}
        try:
            ray.init(address=address, **options)
        except ConnectionError as error:
            if address != "auto":
                raise ValueError(f"no Ray cluster answers at {address}: {error}") from error
            ray.init(address="local", include_dashboard=False, **options)
    if gpus is None:
        gpus = 1.0 if ray.cluster_resources().get("GPU") else 0.0
    task = ray.remote(work).options(num_cpus=orders.threads, num_gpus=gpus, max_retries=RETRIES)
    shared = ray.put(orders)
    running: dict[Any, SweepCell] = {}

    def run(cells: Sequence[SweepCell]) -> Iterator[tuple[SweepCell, Outcome]]:
        running.update({task.remote(shared, cell): cell for cell in cells})
        while running:
            (reference,), _ = ray.wait(list(running), num_returns=1)
            cell = running.pop(reference)
            try:
                yield cell, ray.get(reference)
            except ray.exceptions.RayTaskError:
                raise
            except ray.exceptions.RayError as error:  # its process or machine was lost repeatedly
                yield cell, Outcome("died", " ".join(str(error).split())[:300])

    try:
        yield run
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        if started_here:
            ray.shutdown()
