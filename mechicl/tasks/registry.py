"""All kinds of tasks, the user's own among them, and their form as data."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, Union, overload

from mechicl.base.arguments import checked
from mechicl.base.files import json_bytes
from mechicl.tasks.boolean_functions import Conjunctions, Parities
from mechicl.tasks.fixed_tasks import FixedTasks
from mechicl.tasks.function_classes import (
    DecisionTrees,
    LogisticRegression,
    QuadraticRegression,
    ReluNetworks,
    SparseLinearRegression,
)
from mechicl.tasks.gaussian_clusters import GaussianClusters
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.markov_chains import MarkovChains
from mechicl.tasks.mixed_regression import MixedRegression
from mechicl.tasks.protocol import Task
from mechicl.tasks.repeated_tokens import RepeatedTokens
from mechicl.tasks.sampling import Distribution, TokenDistribution
from mechicl.tasks.sine_regression import SineRegression
from mechicl.tasks.task_pool import TaskPool
from mechicl.tasks.topics import TopicClassification

KINDS = (
    LinearRegression,
    SineRegression,
    FixedTasks,
    TaskPool,
    MixedRegression,
    SparseLinearRegression,
    QuadraticRegression,
    ReluNetworks,
    DecisionTrees,
    LogisticRegression,
    RepeatedTokens,
    TopicClassification,
    MarkovChains,
    Conjunctions,
    Parities,
    GaussianClusters,
)
"""The library's own kinds of tasks."""

if TYPE_CHECKING:  # callers know which kind theirs is, and need not prove it to a type checker
    AnyTask = LinearRegression | Any
    """A task of any kind, the user's own among them."""
else:  # a command line offers the first ones; in Python a task may also be of the user's own kind
    AnyTask = Union[(*KINDS, Any)]
TASK_TYPES: dict[str, type] = {task.__name__: task for task in KINDS}
"""What a task's data may call it. `register` adds the user's own kinds."""
_MEMBERS = ("x_dim", "y_dim", "n_context", "sample", "replace")
T = TypeVar("T", bound=type)


@overload
def register(task_type: T, *, name: str | None = None) -> T: ...
@overload
def register(task_type: None = None, *, name: str | None = None) -> Any: ...
@checked
def register(task_type: Any = None, *, name: str | None = None) -> Any:
    """Let records name a kind of task of your own, so that its checkpoints can be saved and loaded; a decorator too.

    A kind that is not registered is recorded by its import path, "my_tasks:SparseRegression". Such a record loads where
    that module has been imported already: nothing is ever imported, or run, because a file names it.

    Args:
        task_type: a dataclass with what `Task` says, or a subclass of `TokenDistribution`.
        name: what records call it; by default the class's name. Give the import path that a record holds to load it
            with a class that has moved.

    Returns:
        The class, as it was.

    Raises:
        TypeError: no dataclass, or one that lacks something that a task has.
        ValueError: another kind of task has that name.

    Example:
        >>> from dataclasses import dataclass
        >>> @register
        ... @dataclass(frozen=True)
        ... class SignRegression(LinearRegression):
        ...     def _sample(self, n_prompts, random):
        ...         prompts = super()._sample(n_prompts, random)
        ...         return Prompts(prompts.xs, prompts.ys.sign())
        >>> task_from_dict(task_to_dict(SignRegression(x_dim=3)))
        SignRegression(x_dim=3, ...)
    """
    if task_type is None:
        return lambda decorated: register(decorated, name=name)
    _check_kind(task_type)
    name = name or str(task_type.__name__)
    known = TASK_TYPES.get(name)
    if known is not None and _path(known) != _path(
        task_type
    ):  # a class that was defined anew takes the old one's place
        raise ValueError(
            f"the name {name!r} is taken by {_path(known)}: register {_path(task_type)} with another name="
        )
    TASK_TYPES[name] = task_type
    return task_type


@checked
def task_to_dict(task: AnyTask) -> dict[str, Any]:
    """A task as plain JSON data; `task_from_dict` is the inverse.

    Raises:
        TypeError: a field that JSON has no form for, or no dataclass at all.
        ValueError: a kind of task that its data could not name: defined in a function, and not registered.
    """
    name = _name(type(task))
    fields = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}
    if name not in TASK_TYPES or TASK_TYPES[name] is FixedTasks:
        fields = {n: task_to_dict(v) if isinstance(v, Task | Distribution) else v for n, v in fields.items()}
    try:
        json_bytes(fields)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{type(task).__name__} cannot be saved, its fields must be plain data: {error}") from error
    return {"type": name, **fields}


@checked
def task_from_dict(data: dict[str, Any]) -> AnyTask:
    """The task that `task_to_dict` wrote.

    Raises:
        ValueError: no mapping; unknown type (the message says how to make it known) or field, a field missing, or a
            value that the task refuses.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"a task must be a mapping of its type and fields, got {type(data).__name__}")
    fields = dict(data)
    kind = fields.pop("type", None)
    task_type = _resolve(kind)
    unknown = set(fields) - {f.name for f in dataclasses.fields(task_type)}
    if unknown:
        raise ValueError(f"{kind} has no field {sorted(map(str, unknown))}")
    if task_type is FixedTasks and not isinstance(fields.get("task", {}), dict):
        raise ValueError(f"the task of {kind} must be a dict of its own, got {fields['task']!r}")
    try:
        return task_type(**{name: _value(value) for name, value in fields.items()})
    # a field is missing, of a type that the checks do not expect, or a task in a task in a task
    except (TypeError, AttributeError, ArithmeticError, LookupError, RuntimeError) as error:
        raise ValueError(f"{kind}: {error or type(error).__name__}") from error


def _value(value: Any) -> Any:
    """A field's value from its data: tuples for lists, tasks for the data of tasks."""
    if isinstance(value, dict) and "type" in value:
        return task_from_dict(value)
    return tuple(map(_value, value)) if isinstance(value, list) else value


def _resolve(kind: Any) -> type:
    """The class that a task's data names: registered, or in a module that the user has imported already.

    A record may come from anywhere. Importing what it names would run the code of any installed module, so that is
    left to the user; and of what is imported only a class that was made to be a task is taken.
    """
    if isinstance(kind, str) and kind in TASK_TYPES:
        return TASK_TYPES[kind]
    module, colon, name = kind.partition(":") if isinstance(kind, str) else ("", "", "")
    if not colon:
        raise ValueError(
            f"task type {kind!r} is not one of {sorted(TASK_TYPES)}; one of your own is made known by "
            f"mechicl.tasks.register(its class), before loading"
        )
    task_type = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if task_type is None or _path(task_type) != kind:
        raise ValueError(
            f"task type {kind!r} is not known here, and loading imports nothing that a file names: import {module} "
            f"first, or mechicl.tasks.register(the class, name={kind!r})"
        )
    try:
        _check_kind(task_type)
    except TypeError as error:
        raise ValueError(f"task type {kind!r}: {error}") from error
    return task_type


def _name(task_type: type) -> str:
    """What data call a kind of task: its registered name, or its import path."""
    names = [name for name, known in TASK_TYPES.items() if known is task_type]
    if names:
        return names[0]
    _check_kind(task_type)
    if "." in task_type.__qualname__:
        raise ValueError(
            f"{_path(task_type)} cannot be found by its name, being defined inside another: register it, "
            f"@mechicl.tasks.register"
        )
    return _path(task_type)


def _path(task_type: Any) -> str:
    return f"{getattr(task_type, '__module__', '')}:{getattr(task_type, '__qualname__', '')}"


def _check_kind(task_type: Any) -> None:
    """Refuse (TypeError) what is no dataclass with the members of a task."""
    if not isinstance(task_type, type) or not dataclasses.is_dataclass(task_type):
        raise TypeError(f"task_type {task_type!r} is no dataclass: a task's fields are what is saved of it")
    fields = {f.name for f in dataclasses.fields(task_type)}
    lacking = [member for member in _MEMBERS if member not in fields and not hasattr(task_type, member)]
    if lacking and not issubclass(task_type, TokenDistribution):
        raise TypeError(
            f"{task_type.__name__} lacks {lacking}, which a task has (see mechicl.tasks.Task; its base "
            f"PromptDistribution gives sample and replace)"
        )
