"""Kills sweeps and their workers at random moments, and looks whether they end with the table of one that was not.

python -m tests.sweeps.kills --n 50 --seed 0
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mechicl.sweeps.folder import RESULTS
from tests.sweeps.runs import doubled, sweep

DRIVER = """
import sys
from tests.sweeps.runs import doubled, sweep
sweep(steps=600, save_every=40).run(sys.argv[1], doubled, workers=2, progress=False)
"""


def start(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", DRIVER, str(folder)], start_new_session=True)


def children(process: int) -> list[int]:
    words = Path(f"/proc/{process}/task/{process}/children")
    return [int(word) for word in words.read_text().split()] if words.is_file() else []


def kill_somebody(driver: subprocess.Popen[bytes], rng: random.Random) -> str:
    """Kill the driver or one of its workers."""
    workers = children(driver.pid)
    if workers and rng.random() < 0.5:
        try:
            os.kill(rng.choice(workers), signal.SIGKILL)
        except ProcessLookupError:
            return "a worker that had just ended"
        return "a worker"
    driver.kill()
    driver.wait()
    return "the driver"


def trial(folder: Path, expected: bytes, rng: random.Random, twice: bool) -> tuple[bool, str]:
    """One sweep that is killed once, of one driver or of two at once, and then run to its end."""
    drivers = [start(folder) for _ in range(1 + twice)]
    early, begun = rng.random() < 0.2, time.monotonic()  # before anything is trained, or in the middle of it
    while not any(folder.glob("sweep.json" if early else "cells/*/run")) and time.monotonic() - begun < 120:
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 4))
    states = len(list(folder.glob("cells/*/rows.json"))), len(list(folder.glob("cells/*/run/state.safetensors")))
    whom = kill_somebody(drivers[0], rng)
    for driver in drivers:
        driver.wait()
    last = start(folder).wait()
    same = last == 0 and (folder / RESULTS).read_bytes() == expected
    leftovers = [str(path) for path in folder.rglob("*.tmp")]
    words = (
        f"killed {whom} with {states[0]} cells done and {states[1]} begun; {'two drivers' if twice else 'one driver'}"
    )
    return same and not leftovers, words + (f"; left {leftovers}" if leftovers else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, right = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as root:
        whole = Path(root) / "whole"
        sweep(steps=600, save_every=40).run(whole, doubled, workers=1, progress=False)
        for i in range(args.n):
            good, words = trial(Path(root) / str(i), (whole / RESULTS).read_bytes(), rng, twice=i % 5 == 4)
            right += good
            print(f"{i}: {'same bytes' if good else 'WRONG'}; {words}", flush=True)
    print(f"{right} of {args.n} end with the complete, equal table (seed {args.seed})")
    sys.exit(right != args.n)


if __name__ == "__main__":
    main()
