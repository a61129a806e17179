"""All kinds of tasks, including registered ones of users, and their form as JSON data."""

import dataclasses
import sys
from typing import TYPE_CHECKING, Any, TypeVar, Union, overload

from mechicl.base.arguments import checked
from mechicl.base.files import json_bytes
from mechicl.tasks.boolean_functions import Conjunctions, Parities
from mechicl.tasks.function_classes import (
    AssociativeRecall,
    DecisionTrees,
    DriftingRegression,
    LogisticRegression,
    MixedRegression,
    QuadraticRegression,
    ReluNetworks,
    SineRegression,
    SparseLinearRegression,
)
from mechicl.tasks.gaussian_clusters import GaussianClusters
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.pools import FixedTasks, TaskPool
from mechicl.tasks.sampling import Distribution, Task, TokenDistribution
from mechicl.tasks.tables import TableClassification, TableRegression
from mechicl.tasks.token_sequences import BallsAndUrns, GraphTracing, MarkovChains, RepeatedTokens
from mechicl.tasks.topics import TopicClassification

TASK_KINDS = (
    LinearRegression, SineRegression, FixedTasks, TaskPool, MixedRegression, SparseLinearRegression,
    QuadraticRegression, ReluNetworks, DecisionTrees, LogisticRegression, RepeatedTokens, TopicClassification,
    MarkovChains, BallsAndUrns, GraphTracing, Conjunctions, Parities, GaussianClusters, DriftingRegression,
    AssociativeRecall, TableRegression, TableClassification,
)  # fmt: skip
"""The library's own kinds of tasks."""

if TYPE_CHECKING:  # callers know the kind of their task, and need not prove it to a type checker
    AnyTask = LinearRegression | Any
    """A task of any kind, including the user's own."""
else:  # a command line offers the library's own kinds; in Python any task will do
    AnyTask = Union[(*TASK_KINDS, Any)]
TASK_TYPES: dict[str, type] = {task.__name__: task for task in TASK_KINDS}
"""Names of tasks in saved data. `register` adds the user's own kinds."""
_MEMBERS = ("x_dim", "y_dim", "n_context", "sample", "replace")
_T = TypeVar("_T", bound=type)


@overload
def register(task_type: _T, *, name: str | None = None) -> _T: ...
@overload
def register(task_type: None = None, *, name: str | None = None) -> Any: ...
@checked
def register(task_type: Any = None, *, name: str | None = None) -> Any:
    """Register your own class of tasks under a name, so that its checkpoints can be saved and loaded; also a decorator.

    The class is returned unchanged. A class that is not registered is recorded by its import path,
    "my_tasks:SparseRegression". Such a record loads only if that module has been imported already: a file can never
    cause code to be imported or run.

    Args:
        task_type: a dataclass that implements `Task`, or a subclass of `TokenDistribution`; None to use
            `@register(name=...)` as a decorator.
        name: its name in records; by default the class's name. To load records of a class that has since moved,
            register the new class under the old import path.

    Raises:
        TypeError: not a dataclass, or one that lacks a member of `Task`.
        ValueError: another class has this name.

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
    known, path = TASK_TYPES.get(name), _path(task_type)
    if known is not None and _path(known) != path:  # a redefined class replaces the old one
        raise ValueError(f"the name {name!r} is taken by {_path(known)}: register {path} with another name=")
    TASK_TYPES[name] = task_type
    return task_type


@checked
def task_to_dict(task: AnyTask) -> dict[str, Any]:
    """Convert a task to plain JSON data: its fields, and its class under "type". `task_from_dict` is the inverse.

    Raises:
        TypeError: not a dataclass, or a field is not plain data.
        ValueError: an unregistered class defined inside a function, which has no import path.
    """
    name = _name(type(task))
    fields = {f.name: getattr(task, f.name) for f in dataclasses.fields(task) if f.init}
    fields = {n: task_to_dict(v) if isinstance(v, Task | Distribution) else v for n, v in fields.items()}
    try:
        json_bytes(fields)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{type(task).__name__} cannot be saved, its fields must be plain data: {error}") from error
    return {"type": name, **fields}


@checked
def task_from_dict(data: dict[str, Any]) -> AnyTask:
    """Create the task that `task_to_dict` converted to data. Nothing is imported: `register` your own classes first.

    Raises:
        ValueError: an unknown type or field, a missing field, or a value that the task refuses.
    """
    fields = dict(data)
    kind = fields.pop("type", None)
    task_type = _resolve(kind)
    unknown = set(fields) - {f.name for f in dataclasses.fields(task_type) if f.init}
    if unknown:
        raise ValueError(f"{kind} has no field {sorted(map(str, unknown))}")
    if task_type is FixedTasks and not isinstance(fields.get("task", {}), dict):
        raise ValueError(f"the task of {kind} must be a dict, got {fields['task']!r}")
    try:
        return task_type(**{name: _value(value) for name, value in fields.items()})
    # a missing field, a type that the checks do not expect, or deeply nested tasks
    except (TypeError, AttributeError, ArithmeticError, LookupError, RuntimeError) as error:
        raise ValueError(f"{kind}: {error or type(error).__name__}") from error


def _value(value: Any) -> Any:
    if isinstance(value, dict) and "type" in value:
        return task_from_dict(value)
    if not isinstance(value, list):
        return value
    plain = set(map(type, value)) <= {int, float, str}  # without a Python call for each of a matrix's million numbers
    return tuple(value if plain else map(_value, value))


def _resolve(kind: Any) -> type:
    """The class that a task's data names: registered, or in a module that the user has imported already.

    A record may come from anywhere, and importing a module that it names would run that module's code.
    """
    if isinstance(kind, str) and kind in TASK_TYPES:
        return TASK_TYPES[kind]
    module, colon, name = kind.partition(":") if isinstance(kind, str) else ("", "", "")
    if not colon:
        raise ValueError(
            f"task type {kind!r} is not one of {sorted(TASK_TYPES)}; for your own kind call "
            f"mechicl.tasks.register(its class) before loading"
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
    names = [name for name, known in TASK_TYPES.items() if known is task_type]
    if names:
        return names[0]
    _check_kind(task_type)
    if "." in task_type.__qualname__:
        raise ValueError(
            f"{_path(task_type)} is defined inside a function or class and cannot be found by name: register it with "
            f"@mechicl.tasks.register"
        )
    return _path(task_type)


def _path(task_type: Any) -> str:
    return f"{getattr(task_type, '__module__', '')}:{getattr(task_type, '__qualname__', '')}"


def _check_kind(task_type: Any) -> None:
    if not isinstance(task_type, type) or not dataclasses.is_dataclass(task_type):
        raise TypeError(f"task_type must be a dataclass, whose fields are saved, got {task_type!r}")
    fields = {f.name for f in dataclasses.fields(task_type)}
    lacking = [member for member in _MEMBERS if member not in fields and not hasattr(task_type, member)]
    if lacking and not issubclass(task_type, TokenDistribution):
        raise TypeError(
            f"{task_type.__name__} lacks {lacking}, which a task needs (see mechicl.tasks.Task; the base class "
            f"PromptDistribution provides sample and replace)"
        )
