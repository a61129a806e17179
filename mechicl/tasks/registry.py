"""All kinds of tasks, and their form as data."""

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from mechicl.prompts import Prompts
from mechicl.tasks.fixed_tasks import FixedTasks
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.repeated_tokens import RepeatedTokens
from mechicl.tasks.sine_regression import SineRegression
from mechicl.tasks.topics import TopicClassification

if TYPE_CHECKING:  # callers know which kind theirs is, and need not prove it to a type checker
    AnyTask = LinearRegression | Any
else:
    AnyTask = LinearRegression | SineRegression | FixedTasks | RepeatedTokens | TopicClassification
TASK_TYPES: dict[str, type] = {
    task.__name__: task for task in (LinearRegression, SineRegression, FixedTasks, RepeatedTokens, TopicClassification)
}
"""What a task's data may call it: a new kind of task is added here."""


@runtime_checkable
class Task(Protocol):
    """What training and the analyses need of a task."""

    @property
    def x_dim(self) -> int: ...  # noqa: D102
    @property
    def y_dim(self) -> int: ...  # noqa: D102
    @property
    def n_context(self) -> int: ...  # noqa: D102

    def sample(
        self,
        n_prompts: int,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Prompts:
        """A batch of prompts, each of a task of its own."""
        ...

    def replace(self, **changes: Any) -> "Task":
        """A copy with some fields changed."""
        ...


def task_to_dict(task: AnyTask) -> dict[str, Any]:
    """A task as plain JSON data; `task_from_dict` is the inverse."""
    fields = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}
    if isinstance(task, FixedTasks):
        fields["task"] = task_to_dict(task.task)
    return {"type": type(task).__name__, **fields}


def task_from_dict(data: dict[str, Any]) -> AnyTask:
    """The task that `task_to_dict` wrote.

    Raises:
        ValueError: unknown type or field, a field missing, or a value that the task refuses.
    """
    fields = dict(data)
    kind = fields.pop("type", None)
    if not isinstance(kind, str) or kind not in TASK_TYPES:
        raise ValueError(f"task type {kind!r} is not one of {sorted(TASK_TYPES)}")
    unknown = set(fields) - {f.name for f in dataclasses.fields(TASK_TYPES[kind])}
    if unknown:
        raise ValueError(f"{kind} has no field {sorted(unknown)}")
    if isinstance(fields.get("task"), dict):
        fields["task"] = task_from_dict(fields["task"])
    elif "task" in fields:
        raise ValueError(f"the task of {kind} must be a dict of its own, got {fields['task']!r}")
    try:
        return TASK_TYPES[kind](**{name: _lists_to_tuples(value) for name, value in fields.items()})
    except TypeError as error:  # a field is missing, or of a type that the checks do not expect
        raise ValueError(f"{kind}: {error}") from error


def _lists_to_tuples(value: Any) -> Any:
    return tuple(_lists_to_tuples(v) for v in value) if isinstance(value, list) else value
