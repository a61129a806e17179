"""Measure the published numbers again, from the shipped checkpoints, and list those that are not as written.

python analyses/verify.py --list           # what would be run, and how long it took on a core
python analyses/verify.py oswald_gamma     # a script; also a results file, a paper's key, or an item such as "Fig. 2"
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from analyses.support.replay import find_jobs, replay, report


@dataclass(frozen=True)
class Args:
    """Measure the published numbers again; exit code 1 if something moved."""

    entries: tyro.conf.Positional[tuple[str, ...]] = ()
    """Scripts (oswald_copying), results files (oswald_descent_lsa-5l), papers (fu2024) or items ("Fig. 2, left"); all
    by default."""
    workers: int | None = None
    """Scripts at once, one thread each; by default as many as there are cores."""
    out: Path = Path("runs/verify")
    """Folder for what is measured; a command that was stopped resumes from it."""
    root: Path = Path(__file__).parents[1]
    """The source checkout that contains the scripts and results."""
    list: bool = False
    """Print what would be run, with the time on a core it took when its results were written, and run nothing."""
    quiet: bool = False
    """No progress bar."""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code."""
    try:
        return 0 if verify(tyro.cli(Args, args=words, config=(tyro.conf.FlagCreatePairsOff,))) else 1
    except (ValueError, OSError) as error:
        print(f"verify.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("verify.py: interrupted; the same command resumes from what it has saved", file=sys.stderr)
        return 130


def verify(args: Args) -> bool:
    """Run the scripts and print what moved; whether everything is as it should be."""
    jobs = find_jobs(args.root, args.entries)
    if args.list:
        for job in jobs:
            print(f"{job.seconds:7.0f} s  {len(job.written.claims):3} entries  {job.name}: {' '.join(job.words)}")
        return True
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = cores if args.workers is None else args.workers
    if workers < 1:
        raise ValueError(f"--workers must be 1 or more, got {workers}")
    outcomes = []
    for outcome in replay(jobs, args.root, args.out, workers=workers, progress=not args.quiet):
        outcomes.append(outcome)
        count = f"{len(outcome.moved)} moved" if outcome.state != "failed" else "ended with an error"
        print(f"{outcome.job.name}: {count} ({outcome.state}, {outcome.seconds:.0f} s)", flush=True)
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main())
