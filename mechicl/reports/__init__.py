"""The report on a model: a verdict, every number in report.json, every picture in one offline HTML file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mechicl.checkpoints import load_checkpoint
from mechicl.learners import Learners
from mechicl.models import PromptedModel
from mechicl.reports.comparison import Comparison, Section
from mechicl.reports.copying import Copying
from mechicl.reports.descent import Descent
from mechicl.reports.kind import Kind
from mechicl.reports.layers import Layers
from mechicl.reports.one_layer import OneLayer
from mechicl.reports.own import Own
from mechicl.reports.published import published
from mechicl.reports.rows import Row
from mechicl.reports.study import Study, study
from mechicl.reports.texts import Texts
from mechicl.reports.tokens import Tokens
from mechicl.tasks import LinearRegression, MarkovChains, RepeatedTokens
from mechicl.tasks.topics import TopicClassification

__all__ = ["Comparison", "Row", "Section", "published", "report", "write_report"]

_ONE_STEP = {  # what the one-layer study takes for granted: its construction's architecture
    "n_layers": 1, "n_heads": 1, "attention": "linear", "normalization_type": None, "d_mlp": None, "damping": 1.0,
    "attn_bias": False, "keys": "context", "normalize_by_context": False, "recurrent": False,
    "positional_embedding_type": "none", "read_in": "identity", "read_out": "identity",
}  # fmt: skip


def report(
    model: Any,
    task: Any = None,
    path: str | Path = "report",
    *,
    compare: Learners = (),
    sections: Sequence[str] | None = None,
    n_prompts: int | None = None,
    seed: int | None = None,
    progress: bool = True,
) -> Path:
    """Study a model and write what was measured as a page, which opens with a verdict, and as JSON.

    What is measured depends on what the model can be opened by: any learner has its losses, the nearest algorithms and
    what happens on other inputs; a model with layers (`mechicl.wrap`, or of this package) what each layer holds,
    patching, and ablation of heads. What is left out stands at the end of the page, with the reason.

    Args:
        model: a learner (`predict` and `predict_prefixes`), a list of them (seeds of one training), or a checkpoint.
        task: what prompts are drawn from: any object with the `Task` protocol. A checkpoint has its own.
        path: a folder for report.html and report.json, or the path of an .html file.
        compare: learners to rank among the algorithms, by name or with names of their own, as they are.
        sections: names of the sections to measure; all by default, but for those that take minutes.
        n_prompts: held-out prompts for losses; by default what the intervals need.
        seed: the training seed to open; by default the one with the least held-out loss.
        progress: show progress bars.

    Returns:
        The path of the page.

    Raises:
        CheckpointError: a damaged checkpoint, or no task.
        UnknownSeedError: no model of that seed.
        TypeError: a model that does not predict.
        ValueError: a section that there is not; the message lists those that there are.

    Example:
        >>> five_steps = AlgorithmLearner(algorithms.gradient_descent, dict(steps=[5], step_size=0.05))
        >>> report(five_steps, LinearRegression(x_dim=3, n_context=6), "report", sections=["loss"], n_prompts=64)
        PosixPath('report/report.html')
    """
    path = Path(path)
    folder, name = (path.parent, path.stem) if path.suffix == ".html" else (path, "report")
    opened = study(model, task, compare=compare, seed=seed)
    return _kind(opened)(opened, n_prompts=n_prompts, progress=progress).write(folder, name, sections)


def write_report(
    name: str | Path,
    out: str | Path,
    *,
    task: Any = None,
    compare: Learners = (),
    sections: Sequence[str] | None = None,
    n_prompts: int | None = None,
    seed: int | None = None,
    task_index: int | None = None,
    progress: bool = True,
) -> Path:
    """Study a saved checkpoint and write `report.html` and `report.json` into a folder: `report` on its name.

    Args:
        name: of a shipped checkpoint, or the path of one.
        out: folder to write to; made if need be.
        task: another task than the one in the record.
        compare: as for `report`, like the three that follow.
        sections: names of sections.
        n_prompts: held-out prompts.
        seed: the training seed to open.
        task_index: of a checkpoint that was trained on several tasks, the one to report on; the first by default.
        progress: show progress bars.

    Returns:
        The path of report.html.

    Raises:
        CheckpointError: no such checkpoint, a damaged one, or one without a task; else as `report`.
    """
    opened = study(load_checkpoint(name), task, compare=compare, seed=seed, task_index=task_index)
    return _kind(opened)(opened, n_prompts=n_prompts, progress=progress).write(Path(out), "report", sections)


def _kind(opened: Study) -> type[Kind]:
    """The kind of report that fits the model and its task."""
    cfg: Any = getattr(opened.model, "cfg", None)
    ours, task = isinstance(opened.model, PromptedModel), opened.task
    if ours and isinstance(task, TopicClassification):
        return Texts
    if ours and isinstance(task, RepeatedTokens | MarkovChains):
        return Tokens
    if not ours or not isinstance(task, LinearRegression):
        return Own
    if cfg.one_pass:
        return Layers
    if cfg.prompt_format == "interleaved":
        return Copying
    return OneLayer if all(getattr(cfg, field) == value for field, value in _ONE_STEP.items()) else Descent
