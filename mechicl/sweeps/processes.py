"""Cells on this machine's cores: processes that each run one cell after another."""

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from mechicl.sweeps.grid import Cell
from mechicl.sweeps.work import Orders, Outcome

PACKAGES = Path(__file__).resolve().parents[2]


class Processes:
    """Worker processes, each started once and fed with cells; one that dies is replaced.

    They are plain processes that import mechicl, not forks, which torch's threads do not survive, and not
    multiprocessing's, which run the user's script anew. When this process dies, they do.
    """

    def __init__(self, orders: Orders, n_workers: int):
        try:
            self.orders = cloudpickle.dumps((sys.path, cloudpickle.dumps(orders)))  # which may name modules of the path
        except Exception as error:
            raise TypeError(
                f"a measure cannot be handed to other processes ({error}): take workers=1, or a function of a module"
            ) from error
        self.n_workers = n_workers
        self.idle: list[Worker] = []

    def run(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
        """Run cells, and give each with its outcome as it ends."""
        waiting = deque(cells)
        busy: dict[Any, tuple[Worker, Cell]] = {}
        try:
            self._feed(waiting, busy)
            while busy:
                for connection in wait(list(busy)):
                    worker, cell = busy.pop(connection)
                    outcome = worker.receive()
                    if worker.process.poll() is None:
                        self.idle.append(worker)
                    self._feed(waiting, busy)  # before the outcome is used: nobody waits while a table is written
                    yield cell, outcome
        finally:
            for worker, _ in busy.values():
                worker.stop()

    def _feed(self, waiting: deque[Cell], busy: dict[Any, tuple["Worker", Cell]]) -> None:
        """Give each worker that has nothing to do a cell."""
        while waiting and len(busy) < self.n_workers:
            worker = self.idle.pop() if self.idle else Worker(self.orders)
            cell = waiting.popleft()
            worker.send(cell)
            busy[worker.connection] = (worker, cell)

    def close(self) -> None:
        """End all workers."""
        for worker in self.idle:
            worker.stop()
        self.idle.clear()


class Worker:
    """A process that runs cells."""

    def __init__(self, orders: bytes):
        ours, theirs = socket.socketpair()
        life, watched = os.pipe()[::-1]  # the worker sees its end close when this process is gone
        paths = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mechicl.sweeps.worker", str(theirs.fileno()), str(watched)],
            pass_fds=(theirs.fileno(), watched),
            env=environment,
        )
        theirs.close()
        os.close(watched)
        self.life = life
        self.connection = Connection(ours.detach())
        self._try_to_send(orders)

    def send(self, cell: Cell) -> None:
        """Give it a cell."""
        self._try_to_send(cloudpickle.dumps(cell))

    def _try_to_send(self, message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
        except OSError:  # it has died, which receive() will say
            return

    def receive(self) -> Outcome:
        """How the cell went."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)  # it is ending: its own code says why
            self.stop()
            code = self.process.returncode
            words = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Outcome("died", f"the worker process died ({words})")

    def stop(self) -> None:
        """End it, wherever it is: what it has not saved is done again."""
        self.connection.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        os.close(self.life)
