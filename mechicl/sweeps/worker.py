"""A worker process: takes cells from the process that started it until that one is gone."""

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

import cloudpickle

from mechicl.sweeps.work import Orders, work


def main() -> None:
    """Run the cells that come over the connection."""
    connection, watched = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started us, and stops us
    threading.Thread(target=_end_with_parent, args=(watched,), daemon=True).start()
    try:
        paths, message = cloudpickle.loads(connection.recv_bytes())
        sys.path[:] = paths
        orders = cloudpickle.loads(message)
        assert isinstance(orders, Orders)
        while True:
            cell = cloudpickle.loads(connection.recv_bytes())
            connection.send(work(orders, cell))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _end_with_parent(watched: int) -> None:
    os.read(watched, 1)  # comes back when nobody can write any more
    os._exit(1)


if __name__ == "__main__":
    main()
