"""How OpenMP's threads wait for one another, which is settled in the environment before torch is loaded."""

import time
from collections.abc import MutableMapping
from pathlib import Path

STATISTICS = Path("/proc/stat")
SPINS = "2000"
"""Turns that a thread takes before it sleeps, a few microseconds: about what the others of a small product take."""


def settle_waiting(environment: MutableMapping[str, str]) -> None:
    """Let threads sleep while they wait; on a machine with nothing else to do, after a few microseconds of turning.

    Threads that turn for long take the cores from every other process, ours included; those that sleep at once lose a
    third of the speed of small trainings on an idle machine. Where somebody has set either variable, nothing changes.

    Args:
        environment: the environment that OpenMP will read.
    """
    if "OMP_WAIT_POLICY" in environment or "GOMP_SPINCOUNT" in environment:
        return
    environment["OMP_WAIT_POLICY"] = "passive"
    if machine_is_idle():
        environment["GOMP_SPINCOUNT"] = SPINS


def sleep_at_once(environment: MutableMapping[str, str]) -> None:
    """Let threads sleep whenever they wait: for processes that are started beside one another."""
    environment["OMP_WAIT_POLICY"] = "passive"
    environment.pop("GOMP_SPINCOUNT", None)


def machine_is_idle(statistics: Path = STATISTICS) -> bool:
    """Whether most of five looks, within 5 ms, see no other process that runs or waits for a core.

    False where the system does not say (anything but Linux), and in a container whose host is busy.
    """
    looks = []
    for _ in range(5):
        time.sleep(0.001)
        try:
            lines = statistics.read_text("ascii").splitlines()
        except (OSError, UnicodeDecodeError):
            return False
        looks.append(sum(int(line.split()[1]) for line in lines if line.startswith("procs_running ")))
    return 0 < sorted(looks)[2] <= 1
