"""The load by other processes; numbers that were measured on a busy machine are not quoted."""

import ctypes
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

CORES_TAKEN = 0.15
"""So much of one core, on average, may be taken by others."""


def busy_seconds(stat: str, ticks_per_second: int) -> float:
    """CPU seconds that all processes and the machine's other guests have used, by the first line of /proc/stat."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / ticks_per_second


_forgotten = 0.0
"""CPU seconds of processes that ended uncounted."""


def own_seconds() -> float:
    """CPU seconds of this process and all that it started, those that have ended too."""
    total = _forgotten + sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def adopt_orphans() -> None:
    """Let processes whose parent is killed count as this one's, so that what they take is not taken for others'."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


@contextmanager
def counting_what_ends() -> Iterator[None]:
    """Keep the seconds of processes that end meanwhile and are not waited for, as Ray's are not."""
    global _forgotten
    before = own_seconds()
    try:
        yield
    finally:
        _forgotten += max(0.0, before - own_seconds())


@dataclass(frozen=True)
class Load:
    """The load by other processes during a measurement.

    Attributes:
        seconds: how long that was.
        others: cores that other processes took, on average; None where the system does not say.
        average: the system's load average over a minute, at the end.
        cores: of the machine.
    """

    seconds: float
    others: float | None
    average: float
    cores: int

    @property
    def is_quiet(self) -> bool:
        """Whether numbers may be quoted."""
        return self.others is not None and self.others <= CORES_TAKEN

    def __str__(self) -> str:
        taken = "an unknown share" if self.others is None else f"{self.others:.2f}"
        return f"other processes took {taken} of {self.cores} cores over {self.seconds:.0f} s, load {self.average:.2f}"

    def to_dict(self) -> dict:
        return {key: round(v, 3) if isinstance(v, float) else v for key, v in asdict(self).items()}


class Watch:
    """Counts what others take from now on."""

    def __init__(self) -> None:
        self._started, self._others = time.perf_counter(), self._others_seconds()

    def load(self) -> Load:
        """Since the start."""
        seconds, now = time.perf_counter() - self._started, self._others_seconds()
        others = None if now is None or self._others is None else max(now - self._others, 0.0) / seconds
        return Load(seconds, others, os.getloadavg()[0], os.cpu_count() or 1)

    @staticmethod
    def _others_seconds() -> float | None:
        stat = Path("/proc/stat")
        if not stat.is_file():
            return None
        return busy_seconds(stat.read_text(), os.sysconf("SC_CLK_TCK")) - own_seconds()


def idle_load(seconds: float = 2.0) -> Load:
    """Measure the load by other processes while this one is idle."""
    watch = Watch()
    time.sleep(seconds)
    return watch.load()


def machine() -> str:
    """Describe the machine: cores, processor and versions."""
    model = ""
    if (info := Path("/proc/cpuinfo")).is_file():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = f", {names[0]}" if names else ""
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "jax", "transformers", "scikit-learn", "ray"):
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    return f"{os.cpu_count()} cores ({platform.machine()}{model}); {', '.join(versions)}"
