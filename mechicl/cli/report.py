"""`mechicl report`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import tyro

LANGUAGE_ONLY = ("tasks", "quick", "memory", "revision", "gguf_file")
OTHERS_ONLY = ("sections", "seed", "task", "task_index", "compare", "n_prompts")


def _short_names(checkpoints: Sequence[str]) -> list[str]:
    """The last parts of their paths, or the whole paths where those are not different."""
    short = [Path(name).name for name in checkpoints]
    return [last if short.count(last) == 1 else name for last, name in zip(short, checkpoints, strict=True)]


def _listed(names: str | None) -> list[str] | None:
    return None if names is None else [name.strip() for name in names.split(",") if name.strip()]


@dataclass(frozen=True)
class Report:
    """Study a trained model and write report.html (offline) and report.json."""

    checkpoint: tyro.conf.Positional[str]
    """Name or path of a checkpoint (see `mechicl list`); or a language model: its name on the Hugging Face hub, or a
    folder."""
    out: Path
    """Folder to write to."""
    sections: str | None = None
    """Names of the sections to measure, with commas between them; by default all but those that take minutes. The error
    for an unknown name lists the names."""
    seed: int | None = None
    """The training seed to open; by default the one with the least held-out loss."""
    task: Path | None = None
    """A JSON file with a task that replaces the one of training: fields as in a checkpoint's record.json, such as
    {"type": "LinearRegression", "x_dim": 10, "n_context": 20}."""
    task_index: int | None = None
    """For a checkpoint that was trained on several tasks, the index of the task; the first by default."""
    compare: tuple[str, ...] = ()
    """Names or paths of further checkpoints to compare the model with."""
    n_prompts: int | None = None
    """Held-out prompts for losses; by default enough for narrow intervals."""
    tasks: str | None = None
    """For a language model, names of word tasks with commas between them; by default all of them."""
    quick: bool = False
    """For a language model, measure less: six minutes for 135 million parameters on two idle cores."""
    memory: float = 2**31
    """For a language model, a bound on memory in bytes, in addition to the model."""
    revision: str | None = None
    """For a language model on the hub, a branch, tag or commit, such as "step1000" of Pythia."""
    gguf_file: str | None = None
    """For a language model, the file name of quantized weights."""
    quiet: bool = False
    """No progress bar."""

    def execute(self, command: str) -> None:
        """Write the report."""
        from mechicl.base.files import check_writable, read_json
        from mechicl.checkpoints import load  # here, so that help does not wait for torch
        from mechicl.interop.language_models import is_language_model
        from mechicl.reports import report
        from mechicl.tasks import task_from_dict

        check_writable(self.out)
        language = is_language_model(self.checkpoint)
        for field in fields(self):
            is_others = field.name in (OTHERS_ONLY if language else LANGUAGE_ONLY)
            if is_others and getattr(self, field.name) != field.default:
                kind = "a language model" if language else "a checkpoint"
                raise ValueError(f"--{field.name.replace('_', '-')} has no meaning in the report on {kind}")
        if language:
            self._report_language()
            return
        started = time.perf_counter()
        path = report(
            self.checkpoint,
            None if self.task is None else task_from_dict(read_json(self.task)),
            self.out,
            compare=dict(zip(_short_names(self.compare), map(load, self.compare), strict=True)),
            sections=_listed(self.sections),
            n_prompts=self.n_prompts,
            seed=self.seed,
            task_index=self.task_index,
            progress=not self.quiet,
        )
        print(f"{path} ({time.perf_counter() - started:.0f} s)")

    def _report_language(self) -> None:
        from mechicl.base.settings import settings
        from mechicl.interop import load_language_model
        from mechicl.reports.language import report_language

        started = time.perf_counter()
        language = load_language_model(self.checkpoint, revision=self.revision, gguf_file=self.gguf_file)
        with settings(memory=self.memory, progress=not self.quiet):
            path = report_language(language, self.out, tasks=_listed(self.tasks), quick=self.quick)
        print(f"{path} ({time.perf_counter() - started:.0f} s)")
