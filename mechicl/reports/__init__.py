"""The report on a model: a verdict, every number in report.json, every picture in one offline HTML file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mechicl.base.annotations import described
from mechicl.base.files import check_writable
from mechicl.base.settings import settings
from mechicl.checkpoints import Checkpoint, Study, load_checkpoint
from mechicl.interop import LanguageModel, load_language_model
from mechicl.interop.language_models import is_language_model
from mechicl.learners import Learners
from mechicl.models import PromptedModel, TableTransformer
from mechicl.reports.comparison import Comparison, Section
from mechicl.reports.copying import Copying
from mechicl.reports.descent import Descent
from mechicl.reports.kind import Kind
from mechicl.reports.language import report_language
from mechicl.reports.layers import Layers
from mechicl.reports.own import Own
from mechicl.reports.published import published
from mechicl.reports.rows import Row
from mechicl.reports.tables import OfTables
from mechicl.reports.texts import Texts
from mechicl.reports.tokens import Tokens
from mechicl.tasks import LinearRegression, MarkovChains, RepeatedTokens
from mechicl.tasks.tables import TableTask
from mechicl.tasks.topics import TopicClassification

__all__ = ["Comparison", "Row", "Section", "published", "report"]


def report(
    model: Any,
    task: Any = None,
    path: str | Path = "report",
    *,
    compare: Learners = (),
    sections: Sequence[str] | None = None,
    n_prompts: int | None = None,
    seed: int | None = None,
    task_index: int | None = None,
    progress: bool | None = None,
) -> Path:
    """Study a model and write an HTML page, which opens with a verdict on its algorithm, and all numbers as JSON.

    The page's path is returned. The sections of the report depend on the model. Any learner has losses, the nearest
    algorithms and losses on other inputs; a model with layers (of this package or from `mechicl.wrap`) also has layers,
    patching, and ablation of heads. Sections that are left out are listed at the end of the page with the reason.

    Args:
        model: a `Study`; a learner (an object with `predict` and `predict_prefixes`), a list of them (seeds of one
            training), a `Checkpoint`, or its name or path; or a language model: its name or folder, a `LanguageModel`,
            or a model of token ids that has its `tokenizer` (a `TransformerBridge`).
        task: the task that prompts are drawn from, an object of `mechicl.tasks` or with the same methods. By default
            the task that the checkpoint was trained on. For a language model, names of word tasks (default: all).
        path: a folder for report.html and report.json, or the path of an .html file next to which the .json is saved.
        compare: further learners to rank among the algorithms, as a dictionary by name or a list; they are used
            unchanged, while the algorithms are fitted to the model.
        sections: names of the sections to measure; by default all but those that take minutes.
        n_prompts: number of held-out prompts for losses; by default 60 to 10,000, depending on the kind of model.
        seed: for several seeds, the training seed that is studied in detail; by default the one with the lowest
            held-out loss.
        task_index: for a checkpoint that was trained on several tasks, the index of the task; the first by default.
        progress: show progress bars; by default the setting of that name.

    Raises:
        CheckpointError: an unknown or damaged checkpoint, no task, or no model of that seed.
        OSError: nothing can be written to `path`. If the disk is full later, the message names what was kept and where.
        TypeError: a model that does not predict.
        ValueError: an unknown section (the message lists the sections), an argument that has no meaning for the
            report on a language model, or a model of tables on a task of another kind.

    Example:
        >>> five_steps = AlgorithmLearner(algorithms.gradient_descent, dict(steps=[5], step_size=0.05))
        >>> report(five_steps, LinearRegression(x_dim=3, n_context=6), "report", sections=["loss"], n_prompts=64)
        PosixPath('report/report.html')
    """
    path = Path(path)
    folder, name = (path.parent, path.stem) if path.suffix == ".html" else (path, "report")
    check_writable(folder)
    bars = settings(progress=settings.progress if progress is None else progress)
    if n_prompts is not None and n_prompts < 1:
        raise ValueError(f"n_prompts must be 1 or more, got {n_prompts}")
    if isinstance(model, str | Path):
        model = load_language_model(model) if is_language_model(model) else load_checkpoint(model)
    of_words = task is None or isinstance(task, str | Sequence)
    if of_words and not isinstance(model, LanguageModel) and getattr(model, "tokenizer", None) is not None:
        model = LanguageModel(str(getattr(model.cfg, "model_name", "language model")), model, model.tokenizer)
    if isinstance(model, LanguageModel):
        options = {"compare": compare or None, "sections": sections, "n_prompts": n_prompts, "seed": seed,
                   "task_index": task_index}  # fmt: skip
        if given := [option for option, value in options.items() if value is not None]:
            raise ValueError(f"the report on a language model takes task, path and progress, got {', '.join(given)}")
        tasks = (task,) if isinstance(task, str) else task
        with bars:
            return report_language(model, folder, tasks=tasks, name=name)
    if not isinstance(model, Study | Checkpoint | Sequence) and not hasattr(model, "predict"):
        raise TypeError(f"model must be a Study, a learner with predict(prompts), a list of them, a Checkpoint, a "
                        f"LanguageModel (load_language_model), or a name or path; got {described(model)}")  # fmt: skip
    options = {"task": task, "compare": compare or (), "seed": seed, "task_index": task_index}
    if isinstance(model, Study):
        if given := [name for name, value in options.items() if value not in (None, ())]:
            raise ValueError(f"a Study has its own {', '.join(given)}: give them to Study(...)")
        opened = model
    else:
        opened = Study(model, **options)
    with bars:
        return _kind(opened)(opened, n_prompts=n_prompts).write(folder, name, sections)


def _kind(opened: Study) -> type[Kind]:
    cfg: Any = getattr(opened.model, "cfg", None)
    ours, task = isinstance(opened.model, PromptedModel), opened.task
    if isinstance(task, TableTask):
        return OfTables
    if isinstance(opened.model, TableTransformer):
        raise ValueError(f"{opened.name!r} is a model of tables: task must be TableRegression, TableClassification or "
                         f"OwnTable, got {type(task).__name__}")  # fmt: skip
    if ours and isinstance(task, TopicClassification):
        return Texts
    if ours and isinstance(task, RepeatedTokens | MarkovChains):
        return Tokens
    if not ours or not isinstance(task, LinearRegression):
        return Own
    if cfg.one_pass:
        return Layers
    return Copying if cfg.prompt_format == "interleaved" else Descent
