"""A worker process: takes cells from the process that started it until that one is gone."""

import os
import signal
import sys
import threading
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from mechicl.sweeps.work import Orders, Outcome, work


def main() -> None:
    """Run the cells that come over the connection."""
    connection, watched = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started us, and stops us
    threading.Thread(target=_end_with_parent, args=(watched,), daemon=True).start()
    try:
        paths, message = cloudpickle.loads(connection.recv_bytes())
        sys.path[:] = paths
        while True:
            cell = cloudpickle.loads(connection.recv_bytes())
            connection.send(_outcome(message, cell))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _outcome(orders: bytes, cell: Any) -> Outcome:
    try:
        return work(_loaded(orders), cell)
    except Exception as error:  # what every cell would fail of, such as a module that cannot be imported here
        return Outcome("failed", f"{type(error).__name__}: {error}")


@lru_cache(maxsize=1)
def _loaded(orders: bytes) -> Orders:
    return cloudpickle.loads(orders)


def _end_with_parent(watched: int) -> None:
    os.read(watched, 1)  # comes back when nobody can write any more
    os._exit(1)


if __name__ == "__main__":
    main()
