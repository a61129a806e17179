"""`mechicl verify`."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Verify:
    """Measure the published numbers again, from the shipped checkpoints, and say which are not as written."""

    entries: tyro.conf.Positional[tuple[str, ...]] = ()
    """Scripts (oswald_copying), results files (oswald_descent_lsa-5l), papers (fu2024) or items ("Fig. 2, left"); all
    by default."""
    random_weights: bool = False
    """Put untrained models in the place of every checkpoint's, and list the entries that do not notice."""
    workers: int | None = None
    """Scripts at once, one thread each; by default as many as there are cores."""
    out: Path = Path("runs/verify")
    """Folder for what is measured; a command that was stopped goes on from it."""
    root: Path = Path(__file__).parents[2]
    """The source checkout, whose scripts and results are taken."""
    list: bool = False
    """Print what would be run, with the time on a core it took when its results were written, and run nothing."""
    quiet: bool = False
    """No progress bar."""

    def execute(self, command: str) -> None:
        """Run the scripts and print what moved; exit code 1 if something did that should not have, or did not that
        should."""
        from mechicl.reports.replay import find_jobs, replay, report  # here: help must not wait for torch

        jobs = find_jobs(self.root, self.entries)
        if self.list:
            for job in jobs:
                print(f"{job.seconds:7.0f} s  {len(job.asked):3} entries  {job.name}: {' '.join(job.words)}")
            return
        workers = _cores() if self.workers is None else self.workers
        if workers < 1:
            raise ValueError(f"--workers must be 1 or more, got {workers}")
        options = {"workers": workers, "random": self.random_weights, "progress": not self.quiet}
        outcomes = []
        for outcome in replay(jobs, self.root, self.out, **options):
            outcomes.append(outcome)
            count = f"{len(outcome.moved)} moved" if outcome.state != "failed" else "ended with an error"
            print(f"{outcome.job.name}: {count} ({outcome.state}, {outcome.seconds:.0f} s)", flush=True)
        if not report(outcomes, random=self.random_weights):
            sys.exit(1)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
