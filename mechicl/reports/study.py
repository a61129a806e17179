"""The model that a report opens: one seed of a checkpoint or of the user's own models, with the other seeds."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mechicl.checkpoints import Checkpoint, CheckpointError, UnknownSeedError
from mechicl.learners import Learner, Learners, squared_errors
from mechicl.learners.learners import named_learners
from mechicl.models import PromptedModel
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression

N_CHOOSING, CHOOSING_SEED = 512, 4_000_003  # prompts that seeds without a learning curve are compared on


@dataclass(frozen=True, eq=False)
class Study(Checkpoint):
    """A checkpoint as a report reads it; its first model is the one that is opened."""

    models: list[Any]
    drawn_from: Any = None  # the task; None for the one in the record
    compare: Mapping[str, Learner] = field(default_factory=dict)  # the user's learners to compare with, by name
    chosen: str = ""  # a sentence on how the opened seed was chosen; empty if there is one model

    def select(self, indices: Iterable[int]) -> "Study":
        """Select models by their indices, with their entries of the record and the snapshots."""
        chosen = list(indices)
        if all(isinstance(model, PromptedModel) for model in self.models):
            return dataclasses.replace(self, **_fields(super().select(chosen)))
        record = {**self.record, "seeds": [self.seeds[i] for i in chosen]}
        return dataclasses.replace(self, models=[self.models[i] for i in chosen], record=record)

    @property
    def task(self) -> Any:
        """The task that prompts are drawn from."""
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
        """True if the task differs from the record's, so that losses in the record do not apply."""
        if self.drawn_from is None:
            return False
        try:
            return self.drawn_from != super().task
        except CheckpointError:
            return True


def study(
    model: Any, task: Any = None, *, compare: Learners = (), seed: int | None = None, task_index: int | None = None
) -> Study:
    """Prepare a checkpoint, a model or several seeds of one for a report; arguments are those of `reports.report`.

    Raises:
        CheckpointError: no task, no model (of that seed), or a task index that the checkpoint does not have.
        TypeError: an object that does not predict.
    """
    words = ""
    if isinstance(model, Checkpoint):
        model, words = _of_one_task(model, task_index)
        whole = as_study(model)
    else:
        models = list(model) if isinstance(model, Sequence) else [model]
        if not models:
            raise CheckpointError("there is no model to report on: the list of models is empty")
        (name, *_) = named_learners(models[:1] if len(models) == 1 else models)
        whole = Study(str(getattr(models[0], "name", name)), models)
    whole = dataclasses.replace(whole, drawn_from=task, compare=named_learners(compare))
    index, rule = _choose(whole, seed)
    others = [i for i in range(len(whole.models)) if i != index]
    return dataclasses.replace(whole.select([index, *others]), chosen=" ".join(filter(None, (words, rule))))


def as_study(checkpoint: Checkpoint) -> Study:
    """Convert a checkpoint to a study that opens its first model."""
    return checkpoint if isinstance(checkpoint, Study) else Study(**_fields(checkpoint))


def task_as_text(task: Any) -> str:
    """Describe a task: its size, the distributions of inputs and weights, the noise, and all other settings."""
    if not isinstance(task, LinearRegression):
        return repr(task) if dataclasses.is_dataclass(task) else type(task).__name__
    changed = {f.name: getattr(task, f.name) for f in dataclasses.fields(task) if getattr(task, f.name) != f.default}
    inputs = {"uniform": "uniform on [-1/2, 1/2]", "gaussian": "standard normal"}.get(str(task.inputs), task.inputs)
    described = [f"inputs {inputs}", "standard normal weights",
                 f"noise of standard deviation {task.noise_std:g}" if task.noise_std else "no noise"]  # fmt: skip
    known = ("x_dim", "n_context", "inputs", "noise_std")
    described += [f"{name.replace('_', ' ')} {value}" for name, value in changed.items() if name not in known]
    size = f"{task.n_context} context points, {task.x_dim} dimensions"
    return f"linear regression ({size}; {', '.join(described)})"


def _choose(checkpoint: Study, seed: int | None) -> tuple[int, str]:
    seeds = checkpoint.seeds
    if seed is not None:
        if seed not in seeds:
            raise UnknownSeedError(f"{checkpoint.name} has no seed {seed}; it has {', '.join(map(str, seeds))}")
        return seeds.index(seed), f"The opened model is seed {seed}, as requested."
    if len(seeds) == 1:
        return 0, ""
    losses = _losses(checkpoint)
    index = losses.index(min(losses))
    return index, f"The opened model is seed {seeds[index]}, which has the least held-out loss of {len(seeds)} seeds."


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


def _losses(checkpoint: Study) -> list[float]:
    if checkpoint.final_losses and not checkpoint.is_own:
        return checkpoint.final_losses
    prompts = checkpoint.task.sample(N_CHOOSING, seed=CHOOSING_SEED)
    if not isinstance(prompts, Prompts):
        return [0.0] * len(checkpoint.models)
    return [squared_errors(model, prompts).mean().nan_to_num(nan=torch.inf).item() for model in checkpoint.models]


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    return {f.name: getattr(checkpoint, f.name) for f in dataclasses.fields(Checkpoint)}
