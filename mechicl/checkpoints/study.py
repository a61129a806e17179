"""The object that users hold: a model, or several seeds of one, with its task, and what is known of its training."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from mechicl.checkpoints.checkpoint import Checkpoint, CheckpointError, Snapshots, UnknownSeedError
from mechicl.checkpoints.folders import load_checkpoint
from mechicl.learners import Learners, squared_errors
from mechicl.learners.learners import named_learners
from mechicl.learners.token_learners import as_token_learner, sequence_batches
from mechicl.prompts import Prompts, TokenSequences

P = ParamSpec("P")
_R = TypeVar("_R", covariant=True)
N_CHOOSING, CHOOSING_SEED = 512, 4_000_003  # prompts that seeds without a learning curve are compared on
PROMPT_SEED = 1_000_003  # of the held-out prompts


class Study:
    """A model, or several seeds of one, with its task: analyses and reports take it in place of a model and a task.

    Of several seeds, one is opened: `model`, the first of `models`. By default it is the one with the least held-out
    loss (mean squared error, or cross entropy of tokens); if no loss is finite or the task's prompts are of another
    kind, it is the first. `chosen` has the rule.

    Attributes:
        name: the checkpoint's name, or the model's.
        models: the models of all seeds, the opened one first.
        seeds: their training seeds.
        task: the task that prompts are drawn from.
        checkpoint: where the models came from, in the order of `models`; None for models that were given themselves.
        compare: the user's learners to compare with, by name.
        chosen: a sentence on how the opened seed was chosen; empty if there is one model.

    Args:
        model: a learner (an object with `predict`), a list of them (seeds of one training), a `Checkpoint`, or the name
            or folder of one.
        task: by default the task that the checkpoint was trained on.
        seed: the training seed to open.
        task_index: for a checkpoint that was trained on several tasks, the index of the task; the first by default.
        compare: learners to compare with, as a dictionary by name or a list.
        n_prompts: number of held-out prompts in `prompts`.

    Raises:
        CheckpointError: no task, no model (of that seed), or a task index that the checkpoint does not have.
        TypeError: an object that does not predict.

    Example:
        >>> study = Study.load("lsa-1l")
        >>> identify(study, n_prompts=512).best.name
        'preconditioned gradient descent, 1 step'
        >>> report(study, path="report")
    """

    def __init__(
        self,
        model: Any,
        task: Any = None,
        *,
        seed: int | None = None,
        task_index: int | None = None,
        compare: Learners = (),
        n_prompts: int = 1000,
    ):
        self.checkpoint: Checkpoint | None = None
        words = ""
        model = load_checkpoint(model) if isinstance(model, str | Path) else model
        if isinstance(model, Checkpoint):
            self.checkpoint, words = _of_one_task(model, task_index)
            self.name, models, seeds = self.checkpoint.name, self.checkpoint.models, self.checkpoint.seeds
        else:
            models = list(model) if isinstance(model, Sequence) else [model]
            _check_models(models, task, task_index)
            (name, *_) = named_learners(models)
            self.name, seeds = str(getattr(models[0], "name", name)), list(range(len(models)))
        self.task: Any = self.checkpoint.task if self.checkpoint and task is None else task
        if not callable(getattr(self.task, "sample", None)):
            raise CheckpointError(
                f"task={self.task!r} draws no prompts: give an object of mechicl.tasks, or another with a method sample"
            )
        self.compare = named_learners(compare)
        self.n_prompts = n_prompts
        index, rule = self._choose(models, seeds, seed)
        self._order(models, seeds, [index, *(i for i in range(len(models)) if i != index)])
        self.chosen = " ".join(filter(None, (words, rule)))

    @classmethod
    def load(cls, name: str | Path, task: Any = None, **options: Any) -> "Study":
        """Open a saved checkpoint, by its name or folder; the other arguments are those of `Study`."""
        return cls(name, task, **options)

    def with_compared(self, learners: Mapping[str, Any]) -> dict[str, Any]:
        """Return learners by name and those to compare with, which get another name where theirs is taken."""
        taken = {self.name, *learners}
        compared = {f"{name}, compared" if name in taken else name: each for name, each in self.compare.items()}
        return {**learners, **compared}

    @property
    def model(self) -> Any:
        """The model that is opened."""
        return self.models[0]

    @property
    def record(self) -> dict[str, Any]:
        """How the models were trained, as in the checkpoint; empty without one."""
        return self.checkpoint.record if self.checkpoint else {}

    @property
    def snapshots(self) -> Snapshots | None:
        """The models' weights at some steps of training, if they were saved."""
        return self.checkpoint.snapshots if self.checkpoint else None

    @property
    def stuck(self) -> list[int]:
        """Indices of the models that are stuck by their record; see `Checkpoint.stuck`."""
        return self.checkpoint.stuck if self.checkpoint else []

    @cached_property
    def prompts(self) -> Any:
        """Held-out prompts (or sequences) of the task, drawn once."""
        return self.task.sample(self.n_prompts, seed=PROMPT_SEED)

    @property
    def is_own(self) -> bool:
        """True if the task differs from the record's, so that losses in the record do not apply."""
        try:
            return self.checkpoint is not None and self.task != self.checkpoint.task
        except CheckpointError:
            return True

    def opened(self) -> "Study":
        """Return a study of the opened model alone."""
        one = Study.__new__(Study)
        one.__dict__ |= self.__dict__
        one._order(self.models, self.seeds, [0])
        return one

    def stand_in(self, name: str) -> Any:
        """Return what a function gets in the study's place as its argument `name`: "model", "models", "checkpoint"."""
        if name == "checkpoint" and self.checkpoint is None:
            raise CheckpointError(f"{self.name} has no checkpoint, so no snapshots of its training")
        return getattr(self, name if name in ("models", "checkpoint") else "model")

    def __repr__(self) -> str:
        return f"Study({self.name!r}, seeds {', '.join(map(str, self.seeds))}, {self.task!r})"

    def _order(self, models: Sequence[Any], seeds: Sequence[int], indices: list[int]) -> None:
        self.models, self.seeds = [models[i] for i in indices], [seeds[i] for i in indices]
        self.checkpoint = self.checkpoint and self.checkpoint.select(indices)

    def _choose(self, models: Sequence[Any], seeds: list[int], seed: int | None) -> tuple[int, str]:
        if seed is not None:
            if seed not in seeds:
                raise UnknownSeedError(f"{self.name} has no seed {seed}; it has {', '.join(map(str, seeds))}")
            return seeds.index(seed), f"The opened model is seed {seed}, as requested."
        if len(seeds) == 1:
            return 0, ""
        losses = self._losses(models)
        if min(losses, default=torch.inf) == torch.inf:
            first = f"seed {seeds[0]}, the first of {len(seeds)}"
            return 0, f"The opened model is {first}: their losses could not be compared."
        best = losses.index(min(losses))
        return best, f"The opened model is seed {seeds[best]}, which has the least held-out loss of {len(seeds)} seeds."

    def _losses(self, models: Sequence[Any]) -> list[float]:
        if self.checkpoint and self.checkpoint.final_losses and not self.is_own:
            return self.checkpoint.final_losses
        prompts = self.task.sample(N_CHOOSING, seed=CHOOSING_SEED)
        if isinstance(prompts, TokenSequences):
            found = [_cross_entropy(model, prompts, getattr(self.task, "d_vocab", 2)) for model in models]
        else:
            found = [squared_errors(model, prompts).mean() for model in models] if isinstance(prompts, Prompts) else []
        return [loss.nan_to_num(nan=torch.inf).item() for loss in found]


def _cross_entropy(model: Any, sequences: TokenSequences, d_vocab: int) -> Tensor:
    learner, nats = as_token_learner(model), []
    for part in sequence_batches(sequences, d_vocab):
        logs = learner.log_probabilities(part).detach().cpu()  # a diverged model's may be NaN
        nats.append(nll_loss(logs.flatten(0, 1), part.targets().flatten(), reduction="sum"))
    return torch.stack(nats).sum() / sequences.predictable.sum()


def _check_models(models: Sequence[Any], task: Any, task_index: int | None) -> None:
    if not models:
        raise CheckpointError("there is no model to study: the list of models is empty")
    if task is None:
        raise CheckpointError("a model without a checkpoint has no record of its task: give the task, "
                              "an object of mechicl.tasks")  # fmt: skip
    if task_index is not None:
        raise CheckpointError(f"task_index={task_index} selects one of a checkpoint's tasks: give a Checkpoint")


def _of_one_task(checkpoint: Checkpoint, index: int | None) -> tuple[Checkpoint, str]:
    """The models of one of several tasks that were trained on at once, and a sentence on it."""
    n = 1 + len(checkpoint.record.get("training", {}).get("more_tasks", ()))
    if not 0 <= (index or 0) < n:
        raise CheckpointError(f"{checkpoint.name} was trained on {n} task(s), so its task index is 0 to {n - 1}: "
                              f"got {index}")  # fmt: skip
    if n == 1:
        return checkpoint, ""
    words = f"Trained on {n} tasks with separate models: these are of task {index or 0} (--task-index selects another)."
    return checkpoint.by_task()[index or 0], words


class TakesStudy(Protocol[P, _R]):
    """A function of a model and a task, or of a `Study` in their place."""

    @overload
    def __call__(self, study: Study, /, *args: Any, **kwargs: Any) -> _R: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> _R: ...


def takes_study(function: Callable[P, _R]) -> TakesStudy[P, _R]:
    """Let a function take a `Study` in place of its first argument, its `task` and its `prompts`.

    The first argument becomes the opened model; if it is called `models`, the models of all seeds; if `checkpoint`,
    their checkpoint. Learners to compare with become `also`. What the call itself gives is used instead of the study's.
    """
    parameters = inspect.signature(function).parameters
    first = next(iter(parameters))
    by_place = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
    filled = [name for name in ("task", "prompts") if name in by_place]
    without = [name for name in by_place if name not in filled]

    @functools.wraps(function)
    def taking(*args: Any, **kwargs: Any) -> Any:
        study = args[0] if args else kwargs.get(first)
        if not isinstance(study, Study):
            return function(*args, **kwargs)
        names = without if len(args) <= 1 + len(without) else by_place
        if len(args) > 1 + len(names):
            raise TypeError(f"{function.__name__} takes a study and {', '.join(names)}: got {len(args)} arguments")
        given = {**dict(zip(names, args[1:], strict=False)), **kwargs, first: study.stand_in(first)}
        of_study: dict[str, Any] = {name: getattr(study, name) for name in filled if name not in given}
        if study.compare and "also" in parameters:
            of_study["also"] = study.compare
        return function(**of_study | given)  # type: ignore[call-arg]

    return taking  # type: ignore[return-value]


Models = Checkpoint | Study
"""One or several models with a name, their task and their record."""
