"""An object for a separate process, in a module that loads nothing else."""

import os


class Probe:
    """Reports the environment of its process."""

    def __init__(self, number: int):
        self.number = number

    def sees(self, more: int) -> dict:
        print("this is not an answer")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "XLA_FLAGS")
        return {"sum": self.number + more, "cores": cores, **{name: os.environ.get(name) for name in names}}

    def fail(self) -> None:
        raise ArithmeticError("too large")
