"""The load by other processes; numbers that were measured on a busy machine are not quoted."""

import os
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

CORES_TAKEN = 0.15
"""So much of one core, on average, may be taken by others."""


@dataclass(frozen=True)
class Load:
    """The load by other processes."""

    seconds: float  # duration of the measurement
    others: float  # cores that other processes took, on average
    average: float  # the system's load average over a minute, at the end
    cores: int  # of the machine

    @property
    def is_quiet(self) -> bool:
        return self.others <= CORES_TAKEN

    def __str__(self) -> str:
        words = f"other processes took {self.others:.2f} of {self.cores} cores over {self.seconds:.0f} s"
        return f"{words}, load {self.average:.2f}"

    def to_dict(self) -> dict:
        return {key: round(v, 3) if isinstance(v, float) else v for key, v in asdict(self).items()}


def measure_load(seconds: float = 2.0) -> Load:
    """Measure the load by other processes while this one is idle."""
    cores = os.cpu_count() or 1
    return Load(seconds, cores * psutil.cpu_percent(seconds) / 100, os.getloadavg()[0], cores)


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
