"""Measure the index again: run the saved commands of scripts, and compare every row with the saved one.

Runs where the scripts are: in a source checkout, whose `analyses/results/` say which command measured what.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import mechicl
from analyses.support.claims import Claim
from analyses.support.moved import Moved, moved_claims, moved_rows
from analyses.support.results import Results
from mechicl.base.files import read_json, write_json
from mechicl.base.progress import progress_bar
from mechicl.base.shipped import available, shipped_folder

PACKAGE = Path(mechicl.__file__).parent
SCRIPTS = Path(__file__).parents[1]
DONE = "done.json"


@dataclass(frozen=True)
class Job:
    """A script with its options, and what it measured when its results were written."""

    name: str  # of the results file
    words: tuple[str, ...]  # the script's path and its options
    written: Results  # the results that are there
    # of a core that it took, or its wall time where only that was saved; infinite where neither is known
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of one script."""

    job: Job
    # whether it ran now, had run before with nothing changed since, or ended with an error
    state: Literal["ran", "known", "failed"]
    seconds: float  # its wall time
    moved: Sequence[Moved] = ()  # what is not as it is written, in its claims and its table
    error: str = ""  # its last words, where it ended with an error
    cpu_seconds: float = 0.0  # of a core that its measurement took, without start-up


def find_jobs(root: Path, entries: Sequence[str] = ()) -> list[Job]:
    """The scripts that measure some entries of the index, the longest first.

    Args:
        root: of a source checkout.
        entries: names of scripts or of results files, items of papers ("Fig. 2", which is also "Fig. 2, left"), or keys
            of papers ("fu2024"); all entries by default.

    Raises:
        ValueError: no checkout there; an entry that there is not; or results that say no command.
    """
    folder = root / "analyses" / "results"
    if not folder.is_dir():
        raise ValueError(f"{root} has no analyses/results: name the root of a source checkout with --root")
    files = sorted(folder.glob("*.json"))
    jobs: dict[str, Job] = {}
    unknown = list(entries)
    for path in files:
        written = Results.read(path)
        if "command" not in written.data:
            raise ValueError(f"{path} contains no command that measured it: run its script again")
        words = tuple(shlex.split(written.data["command"]))[1:]
        names = {path.stem, Path(words[0]).name, Path(words[0]).stem}
        named = {entry for entry in entries
                 if entry in names or any(_is_of(claim, entry) for claim in written.claims)}  # fmt: skip
        unknown = [entry for entry in unknown if entry not in named]
        if named or not entries:
            seconds = float(written.data.get("cpu_time_s") or written.data.get("wall_time_s") or "inf")
            jobs[path.stem] = Job(path.stem, words, written, seconds)
    if unknown:
        names = ", ".join(path.stem for path in files)
        raise ValueError(f"the index has no {unknown[0]!r}: name a results file ({names}), its script, a paper's key "
                         'or an item such as "Fig. 2"')  # fmt: skip
    return sorted(jobs.values(), key=lambda job: -job.seconds)


def _is_of(claim: Claim, entry: str) -> bool:
    """Whether an item is what is asked for, or a part of it."""
    return entry == claim.source or bool(re.match(rf"{re.escape(entry)}(?!\w)", claim.item, flags=re.IGNORECASE))


def replay(
    jobs: Sequence[Job], root: Path, state: Path, *, workers: int = 1, progress: bool = True
) -> Iterator[Outcome]:
    """Run scripts again, each in its own process, and yield the changes in the order in which scripts end.

    A script that has run with the same command, checkpoints, library and versions is not run again.

    Args:
        jobs: what to run.
        root: of the source checkout.
        state: folder for what they measure; what is there of an earlier call is gone on from.
        workers: processes at once, each with one thread.
        progress: show a bar.
    """
    running: set[subprocess.Popen] = set()
    pool = ThreadPoolExecutor(max(1, workers))
    try:
        futures = [pool.submit(_run, job, root, state, running) for job in jobs]
        with progress_bar(total=len(jobs), unit="script", desc="verify", progress=progress) as bar:
            for future in as_completed(futures):
                bar.update()
                yield future.result()
    finally:  # also where the caller stops in the middle: no script outlives the command
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            process.terminate()


def _run(job: Job, root: Path, state: Path, running: set[subprocess.Popen]) -> Outcome:
    """Run one script, or read what it measured before."""
    folder = state / f"{job.name}-{fingerprint(job, root)[:16]}"
    for old in folder.parent.glob(f"{job.name}-{'[0-9a-f]' * 16}"):
        if old != folder:
            shutil.rmtree(old)
    known = (folder / DONE).is_file()
    if not known:
        folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, *job.words, "--out", str(folder.resolve())]
        words += ["--no-control"] if job.written.claims else []  # elsewhere it would take rows off
        # one passive thread, and this library in front of any other
        paths = filter(None, (str(PACKAGE.parent), str(SCRIPTS), os.environ.get("PYTHONPATH")))
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": os.pathsep.join(paths)}
        start = time.perf_counter()
        with open(folder / "log.txt", "w", encoding="utf-8") as log:
            process = subprocess.Popen(words, cwd=root, env=os.environ | threads, stdout=log, stderr=subprocess.STDOUT)
            running.add(process)
            code = process.wait()
            running.discard(process)
        seconds = time.perf_counter() - start
        if code:
            text = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip()
            last = text.splitlines()[-1] if text else f"exit code {code}"
            return Outcome(job, "failed", seconds, error=last)
        write_json(folder / DONE, {"seconds": round(seconds, 1)})
    seconds = read_json(folder / DONE)["seconds"]
    measured = Results.read(folder / f"{job.name}.json")
    moved = moved_claims(job.written.claims, measured.claims)
    moved += moved_rows(job.written.rows, measured.rows, "table")
    cpu = measured.data.get("cpu_time_s") or 0.0
    return Outcome(job, "known" if known else "ran", seconds, moved, cpu_seconds=cpu)


def fingerprint(job: Job, root: Path) -> str:
    """A digest of all that decides what a script measures: if it is the same, the rows are."""
    digest = hashlib.sha256(json.dumps([job.words, version("torch"), sys.version]).encode())
    checkpoints = job.written.data.get("checkpoints") or available()  # a script that names none may open all
    records = [shipped_folder(name) / "record.json" for name in checkpoints]
    library = (path for path in PACKAGE.rglob("*") if "_checkpoints" not in path.parts)
    shared = [path for path in library if path.suffix in (".py", ".json")]
    shared += (SCRIPTS / "support").glob("*.py")
    for path in [root / job.words[0], *records, *sorted(shared)]:
        digest.update(path.name.encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def report(outcomes: Sequence[Outcome]) -> bool:
    """Print what moved; whether nothing did, and no script failed."""
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    for outcome in failed:
        print(f"{outcome.job.name}: ended with an error: {outcome.error}")
    moved = [(outcome.job.name, each) for outcome in outcomes for each in outcome.moved]
    n_entries = sum(len(each.job.written.claims) for each in outcomes)
    ran = sum(each.state == "ran" for each in outcomes)
    seconds, worked = sum(each.seconds for each in outcomes), sum(each.cpu_seconds for each in outcomes)
    entries = {(name, each.entry) for name, each in moved if each.entry != "table"}
    counts = (
        f"{n_entries} entries of {len(outcomes)} scripts, {ran} run now, {len(failed)} with errors, {seconds:.0f} s of "
        f"scripts, {worked:.0f} s of them on a core: {len(entries)} entries moved"
    )
    if moved:
        lines = [("results", "entry", "quantity", "written", "measured", "apart")]
        lines += [(name, e.entry, e.quantity, e.written, e.measured, e.apart) for name, e in moved]
        widths = [max(len(line[i]) for line in lines) for i in range(6)]
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(counts)
    return not moved and not failed
