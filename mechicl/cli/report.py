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
    sections: str | None = None
    """Names of the sections to measure, with commas between them; all by default, but for those that take minutes. An
    unknown name is answered with the list of names."""
    seed: int | None = None
    """The training seed to open; by default the one with the least held-out loss."""
    task: Path | None = None
    """A JSON file with another task than the one the model was trained on: fields as in a checkpoint's record.json,
    such as {"type": "LinearRegression", "x_dim": 10, "n_context": 20}."""
    task_index: int | None = None
    """Of a checkpoint that was trained on several tasks, the one to report on; the first by default."""
    compare: tuple[str, ...] = ()
    """Names or paths of further checkpoints to stand beside the model."""
    n_prompts: int | None = None
    """Held-out prompts for losses; by default what the intervals need."""
    quiet: bool = False
    """No progress bar."""

    def execute(self, command: str) -> None:
        """Write the report."""
        from mechicl.base.files import check_writable, read_json
        from mechicl.checkpoints import load  # here, because they take seconds: help must not wait for them
        from mechicl.reports import write_report
        from mechicl.tasks import task_from_dict

        check_writable(self.out)
        started = time.perf_counter()
        path = write_report(
            self.checkpoint,
            self.out,
            task=None if self.task is None else task_from_dict(read_json(self.task)),
            compare={Path(name).name: load(name) for name in self.compare},
            sections=self._section_names(),
            n_prompts=self.n_prompts,
            seed=self.seed,
            task_index=self.task_index,
            progress=not self.quiet,
        )
        print(f"{path} ({time.perf_counter() - started:.0f} s)")

    def _section_names(self) -> list[str] | None:
        if self.sections is None:
            return None
        return [name.strip() for name in self.sections.split(",") if name.strip()]
