"""What a report opens: a checkpoint, or models of the user's own, with the seed that stands for the others first."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mechicl.checkpoints import Checkpoint, CheckpointError, UnknownSeedError
from mechicl.learners import Learner, Learners, named_learners, squared_errors
from mechicl.models import PromptedModel
from mechicl.prompts import Prompts

N_CHOOSING, CHOOSING_SEED = 512, 4_000_003  # prompts that seeds without a learning curve are compared on


@dataclass(frozen=True, eq=False)
class Study(Checkpoint):
    """A checkpoint as a report reads it.

    Attributes:
        drawn_from: the task; None for the one in the record.
        compare: the user's learners to compare with, by name.
        chosen: how the seed that is opened was chosen, in words; empty where there is one model.
        built: models of snapshots that were built already.
    """

    models: list[Any]
    drawn_from: Any = None
    compare: Mapping[str, Learner] = field(default_factory=dict)
    chosen: str = ""
    built: dict[int, list[Any]] = field(default_factory=dict, repr=False)

    def models_at(self, snapshot: int) -> list[Any]:
        """The models as they were at a snapshot, built once however many parts of the report look at them."""
        if snapshot not in self.built:
            self.built[snapshot] = super().models_at(snapshot)
        return self.built[snapshot]

    def select(self, indices: Iterable[int]) -> "Study":
        """Some of the models, in this order, with what the record and the snapshots say of them."""
        chosen = list(indices)
        if all(isinstance(model, PromptedModel) for model in self.models):
            return dataclasses.replace(self, **_fields(super().select(chosen)), built={})
        record = {**self.record, "seeds": [self.seeds[i] for i in chosen]}
        return dataclasses.replace(self, models=[self.models[i] for i in chosen], record=record, built={})

    @property
    def task(self) -> Any:
        """What prompts are drawn from.

        Raises:
            CheckpointError: there is no task, neither in the record nor from the user.
        """
        return super().task if self.drawn_from is None else self.drawn_from

    @property
    def model(self) -> Any:  # type: ignore[override]
        """The model that the report opens."""
        return self.models[0]

    @property
    def seeds(self) -> list[int]:
        """The training seeds, that of the opened model first."""
        return list(self.record.get("seeds", range(len(self.models))))

    @property
    def is_own(self) -> bool:
        """Whether the task is another than the record's, so that what the record measured is of other prompts."""
        return self.drawn_from is not None and self.drawn_from != self._recorded_task()

    def _recorded_task(self) -> Any:
        try:
            return super().task
        except CheckpointError:
            return None


def study(
    model: Any,
    task: Any = None,
    *,
    compare: Learners = (),
    seed: int | None = None,
    task_index: int | None = None,
) -> Study:
    """A checkpoint, a model or the seeds of one as a report reads them.

    The seed that is opened is the one that `load` gives, with the least held-out loss at the end of training; what the
    others do stands in the rows that are over seeds.

    Args:
        model: a learner, several (seeds of one training), or a checkpoint.
        task: what to draw prompts from; by default the checkpoint's.
        compare: learners to compare with, with names or named after themselves.
        seed: the training seed to open; by default the one with the least held-out loss.
        task_index: of a checkpoint that was trained on several tasks, the one whose models are opened.

    Raises:
        CheckpointError: no task, no model, or a task index that the checkpoint does not have.
        UnknownSeedError: no model of that seed.
        TypeError: something that does not predict.
    """
    words = ""
    if isinstance(model, Checkpoint):
        model, words = _of_one_task(model, task_index)
        whole = as_study(model)
    else:
        whole = _own(model)
    whole = dataclasses.replace(whole, drawn_from=task, compare=named_learners(compare))
    index, rule = choose(whole, seed)
    others = [i for i in range(len(whole.models)) if i != index]
    chosen = " ".join(filter(None, (words, rule)))
    return dataclasses.replace(whole.select([index, *others]), chosen=chosen)


def as_study(checkpoint: Checkpoint) -> Study:
    """A checkpoint whose first model is the one that is opened."""
    return checkpoint if isinstance(checkpoint, Study) else Study(**_fields(checkpoint))


def choose(checkpoint: Study, seed: int | None = None) -> tuple[int, str]:
    """The index of the model to open, and how it was chosen, in words."""
    seeds = checkpoint.seeds
    if seed is not None:
        if seed not in seeds:
            raise UnknownSeedError(f"{checkpoint.name} has no seed {seed}; it has {', '.join(map(str, seeds))}")
        return seeds.index(seed), f"Opened is seed {seed}, as asked for."
    if len(seeds) == 1:
        return 0, ""
    losses = _losses(checkpoint)
    index = losses.index(min(losses))
    return index, f"Opened is seed {seeds[index]}, the one of the {len(seeds)} with the least held-out loss."


def _own(model: Any) -> Study:
    """Models of the user's own: one, or the seeds of one."""
    models = list(model) if isinstance(model, Sequence) else [model]
    if not models:
        raise CheckpointError("there is no model to report on: the list of models is empty")
    (name, *_) = named_learners(models[:1] if len(models) == 1 else models)
    return Study(str(getattr(models[0], "name", name)), models)


def _of_one_task(checkpoint: Checkpoint, index: int | None) -> tuple[Checkpoint, str]:
    """The models of one of the tasks that were trained on at once, and words on it."""
    n = 1 + len(checkpoint.record.get("training", {}).get("more_tasks", ()))
    if not 0 <= (index or 0) < n:
        raise CheckpointError(f"{checkpoint.name} was trained on {n} task(s), so its task index is 0 to {n - 1}: "
                              f"got {index}")  # fmt: skip
    if n == 1:
        return checkpoint, ""
    words = f"Trained on {n} tasks, with models of its own on each: these are of task {index or 0}"
    return checkpoint.by_task()[index or 0], f"{words} (--task-index opens another)."


def _losses(checkpoint: Study) -> list[float]:
    if checkpoint.final_losses and not checkpoint.is_own:
        return checkpoint.final_losses
    prompts = checkpoint.task.sample(N_CHOOSING, seed=CHOOSING_SEED)
    if not isinstance(prompts, Prompts):
        return [0.0] * len(checkpoint.models)
    return [squared_errors(model, prompts).mean().nan_to_num(nan=torch.inf).item() for model in checkpoint.models]


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    return {f.name: getattr(checkpoint, f.name) for f in dataclasses.fields(Checkpoint)}
