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
"""The config fields that each value changes, by their path; keys are the values' labels."""


def read_axes(over: Mapping[str, Any]) -> dict[str, Axis]:
    """The axes of a grid, each as labels and the fields that they change (see `Sweep` for `over`)."""
    axes: dict[str, Axis] = {}
    for name, values in over.items():
        if name in ("loss", "diverged_at"):
            raise ValueError(f"an axis cannot be called {name!r}: the table has a column of that name")
        if name in ("seeds", "more_tasks"):
            raise ValueError(f"{name!r} cannot be an axis: write {'seed' if name == 'seeds' else 'an axis of tasks'}")
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ValueError(f"{name} needs a sequence of values, got {values!r}: write ({values!r},) for one")
        pairs = list(values.items()) if isinstance(values, Mapping) else [(value, value) for value in values]
        pairs = [[x.item() if isinstance(x, np.generic) else x for x in pair] for pair in pairs]
        labels = ["none" if x is None else x if isinstance(x, str | int | float) else str(x) for x, _ in pairs]
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
    """A config with fields changed, by their paths, all at once, so that fields that must agree can change together."""
    sizes = {name: changes[name] for name in SIZES if name in changes}
    if sizes:
        config = config.resized(**sizes)
    return _changed(config, {path: value for path, value in changes.items() if path not in sizes}, "config")


def _changed(part: Any, changes: Mapping[str, Any], path: str) -> Any:
    fields = [field.name for field in dataclasses.fields(part) if field.init]
    values: dict[str, Any] = {}
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        if first not in fields:
            raise ValueError(f"{path} ({type(part).__name__}) has no field {first!r}; it has {', '.join(fields)}")
        if rest:
            values.setdefault(first, {})[rest] = value
        else:
            values[first] = value
    for name, value in values.items():
        inner = getattr(part, name)
        if isinstance(value, dict) and dataclasses.is_dataclass(inner):
            values[name] = _changed(inner, value, name if path == "config" else f"{path}.{name}")
    return getattr(part, "replace", lambda **new: dataclasses.replace(part, **new))(**values)


def parse_axes(words: Iterable[str]) -> dict[str, list[Any]]:
    """Parse axes of a command line: `model.n_layers=1:8`, `task.n_tasks=8,64`, `model.attention=linear,softmax`.

    `a:b` are the integers from a to b - 1, as in Python's `range`, `a:b:c` every c-th of them.

    Example:
        >>> parse_axes(["model.n_layers=1:4", "learning_rate=1e-3,1e-2"])
        {'model.n_layers': [1, 2, 3], 'learning_rate': [0.001, 0.01]}
    """
    axes: dict[str, list[Any]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name or not text:
            raise ValueError(f"{word!r} must be an axis: field=value,value, or field=1:8 for 1 to 7")
        if name in axes:
            raise ValueError(f"{name} is given twice: write all its values with commas between them")
        axes[name] = [value for part in text.split(",") for value in _parse(part)]
    return axes


def _parse(text: str) -> list[Any]:
    named = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return [named[text.lower()]]
    for read in (lambda: [int(text)], lambda: [float(text)], lambda: list(range(*map(int, text.split(":"))))):
        try:
            return read()
        except (TypeError, ValueError):
            continue
    return [text]
