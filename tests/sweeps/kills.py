"""Kill sweeps and their workers at random moments, and check that they end with the table of one that was not killed.

python -m tests.sweeps.kills --n 50 --seed 0
python -m tests.sweeps.kills --n 4 --how ray       # of processes, ray, disk; all of them in turn by default

"ray" runs the cells on a cluster of this machine. "disk" kills no process: the folder is on a small disk, which another
process fills at a random moment (Linux, where a user may mount one in a namespace).
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from mechicl.sweeps.folder import RESULTS
from tests.sweeps.runs import doubled, sweep

HOW: dict[str, dict[str, Any]] = {
    "processes": {"workers": 2},
    "ray": {},
    "disk": {"workers": 2},
}
WORK = ("loky.backend.popen_loky_posix", "ray::work")
DRIVER = """
import json, sys
from tests.sweeps.runs import doubled, sweep
sweep(steps=600, save_every=40).run(sys.argv[1], doubled, progress=False, **json.loads(sys.argv[2]))
"""
DISK_SIZE = 64 * 2**20
FULL = "the disk is full"


def start(folder: Path, how: dict[str, Any]) -> subprocess.Popen[str]:
    """A driver; its errors are read by `ends_well`."""
    command = [sys.executable, "-c", DRIVER, str(folder), json.dumps(how)]
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)


def kill_one(drivers: Sequence[subprocess.Popen[str]], rng: random.Random) -> str:
    """Kill a driver, both, or a worker: a process that trains cells for a driver or, on Ray, for any."""
    parent = psutil.Process() if HOW["ray"] else psutil.Process(drivers[0].pid)
    workers = []
    for child in parent.children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            workers += [child] if any(word in " ".join(child.cmdline()) for word in WORK) else []
    if workers and rng.random() < 0.5:
        with suppress(psutil.Error):
            rng.choice(workers).kill()
        return "a worker"
    dead = drivers if rng.random() < 0.5 else drivers[:1]
    for driver in dead:
        driver.kill()
    return "both drivers" if len(dead) > 1 else "the driver"


def wait_for_a_moment(folder: Path, rng: random.Random) -> str:
    """Wait until before, in the middle of, or after the trainings."""
    early, begun = rng.random() < 0.2, time.monotonic()
    while not any(folder.glob("sweep.json" if early else "cells/*/run")) and time.monotonic() - begun < 120:
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 4))
    done, saved = (len(list(folder.glob(f"cells/*/{name}"))) for name in ("rows.json", "run/state.safetensors"))
    return f"with {done} cells done and {saved} begun"


def trial(folder: Path, how: str, expected: bytes, rng: random.Random, twice: bool) -> tuple[bool, str]:
    """One sweep that is killed once, of one driver or of two at once, and then run to its end."""
    drivers = [start(folder, HOW[how]) for _ in range(1 + twice)]
    states = wait_for_a_moment(folder, rng)
    words = f"{how}, {'two drivers' if twice else 'one driver'}: killed {kill_one(drivers, rng)} {states}"
    for driver in drivers:
        driver.communicate()
    return ends_well(folder, HOW[how], expected, words)


def ends_well(folder: Path, how: dict[str, Any], expected: bytes, words: str) -> tuple[bool, str]:
    """Run the same command to the end; check the table, and that no temporary file remains."""
    driver = start(folder, how)
    wrong = driver.communicate()[1].strip().splitlines()[-1:] if driver.wait() else []
    if not driver.returncode and (folder / RESULTS).read_bytes() != expected:
        wrong.append("another table")
    wrong += [f"left {path.name}" for path in folder.rglob("*.tmp")]
    return not wrong and not driver.returncode, "; ".join([words, *wrong])


# ---- full disks ----
def on_a_small_disk(folder: Path, expected: Path, seed: int) -> tuple[bool, str]:
    """A trial in a separate namespace, in which the folder is a disk."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.sweeps.kills", "--fill", str(folder), str(expected), "--seed", str(seed)]
    mount = f'mount -t tmpfs -o size={DISK_SIZE} none "$1" && shift && exec "$@"'
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh", str(folder), *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode == 0, (done.stdout.strip().splitlines() or ["nothing was printed"])[-1]


def fill(folder: Path, expected: bytes, rng: random.Random) -> tuple[bool, str]:
    """A sweep whose disk fills up at a random moment, and is emptied again."""
    driver, rest = start(folder / "sweep", HOW["disk"]), folder / "others"
    states = wait_for_a_moment(folder / "sweep", rng)
    left = rng.choice([0, 0, 4096, 16384])  # some files may still fit
    with open(rest, "wb", buffering=0) as file:
        try:
            while driver.poll() is None:
                file.write(bytes(2**16))
        except OSError:
            file.truncate(max(0, file.tell() - left))
    error = (driver.communicate()[1].strip().splitlines() or ["unknown"])[-1] if driver.wait() else ""
    rest.unlink()
    words = f"disk, full {states}, {error or 'it had done all'}"
    good, words = ends_well(folder / "sweep", HOW["disk"], expected, words)
    return good and (not error or FULL in error), words


def can_mount() -> bool:
    """True if a user may mount a disk."""
    try:
        command = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--how", nargs="+", choices=HOW, default=["processes", "ray", "disk"])
    parser.add_argument("--fill", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fill:
        good, words = fill(args.fill[0], args.fill[1].read_bytes(), random.Random(args.seed))
        print(words)
        sys.exit(not good)
    how, cluster = list(args.how), None
    if "ray" in how:
        try:
            from ray.cluster_utils import Cluster

            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
            HOW["ray"]["ray"] = cluster.address
        except ImportError:
            print("left out: ray is not installed")
            how.remove("ray")
    if "disk" in how and not can_mount():
        print("left out: no disk can be mounted here")
        how.remove("disk")
    rng, right = random.Random(args.seed), 0
    try:
        with tempfile.TemporaryDirectory() as root:
            whole = Path(root) / "whole"
            sweep(steps=600, save_every=40).run(whole, doubled, workers=1, progress=False)
            for i in range(args.n):
                kind, folder = how[i % len(how)], Path(root) / str(i)
                if kind == "disk":
                    good, words = on_a_small_disk(folder, whole / RESULTS, rng.randrange(2**31))
                else:
                    twice = i // len(how) % 3 == 1
                    good, words = trial(folder, kind, (whole / RESULTS).read_bytes(), rng, twice)
                right += good
                print(f"{i}: {'same bytes' if good else 'WRONG'}; {words}", flush=True)
    finally:
        if cluster is not None:
            cluster.shutdown()
    print(f"{right} of {args.n} end with the complete, equal table (seed {args.seed})")
    sys.exit(right != args.n)


if __name__ == "__main__":
    main()
