"""Cells on Ray: this machine's cores, or a cluster whose machines share the sweep's folder."""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from mechicl.sweeps.grid import Cell
from mechicl.sweeps.processes import PACKAGES
from mechicl.sweeps.work import Orders, Outcome, work

RETRIES = 5  # of a cell whose machine or process was lost, before this run lets go of it


class OnRay:
    """A connection to Ray that runs cells as its tasks."""

    def __init__(self, orders: Orders, address: str, gpus: float | None):
        # telemetry and the dashboard are off; both are read when Ray is imported or started
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # a cell without a GPU sees none
        try:
            import ray  # an extra, which takes seconds to import
        except ImportError as error:
            raise ValueError("ray= needs Ray: pip install 'mechicl[ray]'") from error
        self.ray: Any = ray
        self.started = not ray.is_initialized()
        if self.started:
            paths = os.pathsep.join(dict.fromkeys([str(PACKAGES), *filter(None, sys.path)]))
            quiet = {"log_to_driver": False, "logging_level": "WARNING"}
            environment = {"env_vars": {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": paths}}
            try:
                ray.init(address=address, runtime_env=environment, **quiet)
            except ConnectionError as error:
                if address != "auto":
                    raise ValueError(f"no Ray cluster answers at {address}: {error}") from error
                ray.init(address="local", runtime_env=environment, include_dashboard=False, **quiet)
        if gpus is None:  # what would be trained on a GPU takes one for itself
            gpus = 1.0 if ray.cluster_resources().get("GPU") else 0.0
        self.orders = ray.put(orders)
        options = {"num_cpus": orders.threads, "num_gpus": gpus, "max_retries": RETRIES}
        self.task = ray.remote(work).options(**options)

    def run(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
        """Run cells, and give each with its outcome as it ends."""
        running = {self.task.remote(self.orders, cell): cell for cell in cells}
        try:
            while running:
                done, _ = self.ray.wait(list(running), num_returns=1)
                for reference in done:
                    cell = running.pop(reference)
                    try:
                        yield cell, self.ray.get(reference)
                    except self.ray.exceptions.RayTaskError:
                        raise
                    except self.ray.exceptions.RayError as error:  # a process or a machine, again and again
                        yield cell, Outcome("died", " ".join(str(error).split())[:300], tries=1)
        finally:
            for reference in running:
                self.ray.cancel(reference, force=True)

    def close(self) -> None:
        """Let go of Ray, which ends if it was started here."""
        if self.started:
            self.ray.shutdown()
