"""`mechicl report`."""

import time
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Report:
    """Open a trained model and write what was measured: report.html (offline) and report.json."""

    checkpoint: tyro.conf.Positional[str]
    """Name of a shipped checkpoint (see `mechicl list`), or the path of one."""
    out: Path
    """Folder to write to."""
    n_prompts: int = 10_000
    """Held-out prompts for each measurement."""
    quiet: bool = False
    """No progress bar."""

    def execute(self, command: str) -> None:
        """Write the report."""
        from mechicl.reports import write_report  # here, because it takes seconds: help must not wait for it

        started = time.perf_counter()
        path = write_report(self.checkpoint, self.out, n_prompts=self.n_prompts, progress=not self.quiet)
        print(f"{path} ({time.perf_counter() - started:.0f} s)")
