"""The axes of a grid: which fields of a training config take which values."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mechicl.training import TrainingConfig

SEED = "seed"
SIZES = ("x_dim", "n_context")
"""Axes of this name change task, model and curriculum together."""
Axis = Mapping[str | int | float | bool | None, Mapping[str, Any]]
"""What each value of an axis, by its label, changes: fields of the config, by their path."""


def read_axes(over: Mapping[str, Any]) -> dict[str, Axis]:
    """The axes of a grid, each as its labels and what they change.

    Args:
        over: name to values. The name is a field of the config, by its path ("model.n_layers", "learning_rate"), or
            "x_dim" or "n_context" for the size of task and model together. Values are a sequence, or a mapping of
            labels to values; None has the label "none". A value that is a mapping changes several fields at once, and
            its axis may have any name: `{"width": {"narrow": {"model.d_model": 16, "model.n_heads": 2}, "wide": ...}}`.

    Raises:
        ValueError: an axis without values or with one twice, or that has the name of a column of the results.
    """
    axes: dict[str, Axis] = {}
    for name, values in over.items():
        if name in ("loss", "diverged_at"):
            raise ValueError(f"an axis cannot be called {name!r}: the table has a column of that name")
        if name in ("seeds", "more_tasks"):
            raise ValueError(f"{name!r} is no axis: write {'seed' if name == 'seeds' else 'an axis of tasks'}")
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ValueError(f"{name} needs a sequence of values, got {values!r}: write ({values!r},) for one")
        pairs = list(values.items()) if isinstance(values, Mapping) else [(value, value) for value in values]
        pairs = [(_plain(label), _plain(value)) for label, value in pairs]
        labels = ["none" if label is None else label if _is_plain(label) else str(label) for label, _ in pairs]
        if not labels:
            raise ValueError(f"{name} has no values")
        if len(set(labels)) != len(labels):  # 1, 1.0 and True are equal
            raise ValueError(f"{name} has a value twice: {labels}")
        changes = [dict(value) if isinstance(value, Mapping) else {name: value} for _, value in pairs]
        axes[name] = dict(zip(labels, changes, strict=True))
    return axes


def combinations(axes: Mapping[str, Axis]) -> list[dict[str, Any]]:
    """All combinations of the axes' labels, the last axis running fastest."""
    return [dict(zip(axes, labels, strict=True)) for labels in itertools.product(*axes.values())]


def change(config: TrainingConfig, changes: Mapping[str, Any]) -> TrainingConfig:
    """A config with fields changed, by their paths, all at once: those that must agree may change together.

    Raises:
        ValueError: no such field, or values that do not fit.

    Example:
        >>> change(TrainingConfig(), {"model.n_layers": 3, "steps": 10}).model.n_layers
        3
    """
    sizes = {name: changes[name] for name in SIZES if name in changes}
    if sizes:
        config = config.resized(**sizes)
    by_part: dict[str, Any] = {}
    for path, value in changes.items():
        first, _, rest = path.partition(".")
        if path in sizes:
            continue
        if first not in {field.name for field in dataclasses.fields(config)}:
            raise ValueError(f"a training config has no field {first!r}; it has {_fields(config)}")
        if rest:
            by_part.setdefault(first, {})[rest] = value
        else:
            by_part[first] = value
    whole = {name: _changed(getattr(config, name), value, name) for name, value in by_part.items()}
    return config.replace(**whole)


def _changed(part: Any, changes: Any, path: str) -> Any:
    """A part of the config with what `changes` holds for it: fields by their paths, or another part in its place."""
    if not isinstance(changes, dict) or not dataclasses.is_dataclass(part) or isinstance(part, type):
        return changes
    direct: dict[str, Any] = {}
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        if not hasattr(part, first):
            raise ValueError(f"{path} ({type(part).__name__}) has no field {first!r}; it has {_fields(part)}")
        if rest:
            direct.setdefault(first, {})[rest] = value
        else:
            direct[first] = value
    values = {name: _changed(getattr(part, name), value, f"{path}.{name}") for name, value in direct.items()}
    try:
        replace = getattr(part, "replace", None)
        return replace(**values) if replace else dataclasses.replace(part, **values)
    except TypeError as error:  # a property is no field
        raise ValueError(f"{path} ({type(part).__name__}): {error}; it has {_fields(part)}") from error


def _fields(part: Any) -> str:
    return ", ".join(field.name for field in dataclasses.fields(part))


def _plain(value: Any) -> Any:
    """A NumPy number as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def parse_axes(words: Iterable[str]) -> dict[str, list[Any]]:
    """Axes as a command line has them: `model.n_layers=1:8`, `task.n_tasks=8,64`, `model.attention=linear,softmax`.

    `a:b` are the whole numbers from a to b - 1, as in Python's `range`, `a:b:c` every c-th of them.

    Raises:
        ValueError: a word without "=", or one name twice.

    Example:
        >>> parse_axes(["model.n_layers=1:4", "learning_rate=1e-3,1e-2"])
        {'model.n_layers': [1, 2, 3], 'learning_rate': [0.001, 0.01]}
    """
    axes: dict[str, list[Any]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name or not text:
            raise ValueError(f"{word!r} is no axis: write field=value,value, or field=1:8 for 1 to 7")
        if name in axes:
            raise ValueError(f"{name} is given twice: write all its values with commas between them")
        axes[name] = [value for part in text.split(",") for value in _parse(part)]
    return axes


def _parse(text: str) -> list[Any]:
    """The values that a word stands for: a number, a range of whole numbers, true, false, none, or itself."""
    named = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return [named[text.lower()]]
    if ":" in text:
        try:
            return list(range(*map(int, text.split(":"))))
        except (TypeError, ValueError):
            return [text]
    for kind in (int, float):
        try:
            return [kind(text)]
        except ValueError:
            continue
    return [text]
