"""What is measured of a model: functions by name, and what they return as columns of a table."""

import functools
import hashlib
import importlib
import inspect
import math
import numbers
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from accelerate.utils import set_seed
from torch import Tensor

from mechicl.base.version import __version__
from mechicl.checkpoints import Checkpoint
from mechicl.statistics import Interval, Result
from mechicl.sweeps.measures import MEASURES

Measure = Callable[[Checkpoint], Any]
Value = float | str | None


def read_measures(measure: Any) -> list[tuple[str, Measure]]:
    """The functions that a sweep measures with, each with what the names of its columns begin with, "" for nothing.

    Args:
        measure: a function, a name of `MEASURES` or "module:function", a sequence of those names, or a mapping of names
            to functions.

    Raises:
        ValueError: no such name.
        TypeError: something else.
    """
    if measure is None:
        return []
    if isinstance(measure, str):
        measure = [measure]
    if callable(measure):
        return [("", measure)]
    if isinstance(measure, Mapping):
        wrong = [name for name, function in measure.items() if not callable(function)]
        if wrong:
            raise TypeError(f"measure= maps names to functions, but {wrong} are none")
        return [(str(name), function) for name, function in measure.items()]
    if isinstance(measure, Sequence) and all(isinstance(name, str) for name in measure):
        return [("", _named(name)) for name in measure]
    raise TypeError(f"measure= takes a function, names, or a mapping of names to functions, got {measure!r}")


def _named(name: str) -> Measure:
    if name in MEASURES:
        return MEASURES[name]
    module, colon, member = name.partition(":")
    if not colon:
        raise ValueError(f"no measure {name!r}: there are {sorted(MEASURES)}, or module:function for your own")
    try:
        function = getattr(importlib.import_module(module), member)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"no measure {name!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"{name} is no function")
    return function


def identity(measure: Any) -> str:
    """What tells a measure from another, or from what it was before it was changed.

    That is its name and, of the user's own, its source and what it takes from around it: arguments of a partial,
    variables of the function that it was made in, defaults. Functions that it calls are not looked into. What has no
    form in words counts by its pickle.
    """
    if isinstance(measure, functools.partial):
        return f"{identity(measure.func)}{_values_in_words((measure.args, sorted(measure.keywords.items())))}"
    measure = inspect.unwrap(measure)  # a public function, whose arguments are checked, is the one that it calls
    named = measure if hasattr(measure, "__qualname__") else type(measure)
    name = f"{named.__module__}:{named.__qualname__}"
    if name.startswith("mechicl."):
        return f"{name} {__version__}"
    code = getattr(measure, "__code__", None)
    try:
        source = inspect.getsource(named)
    except (OSError, TypeError):  # typed into a shell
        source = repr((code.co_code, code.co_names)) if code else ""
    cells = [cell.cell_contents for cell in getattr(measure, "__closure__", None) or ()]
    defaults = getattr(measure, "__defaults__", None), getattr(measure, "__kwdefaults__", None)
    state = None if code else getattr(measure, "__dict__", None)
    digest = hashlib.sha256(f"{source}{_values_in_words((cells, defaults, state))}".encode()).hexdigest()[:12]
    return f"{name} {digest}"


def _values_in_words(value: Any) -> str:
    """Values as words that are the same in every process."""
    if value is None or isinstance(value, str | int | float | bool | complex | Path):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_values_in_words(k)}: {_values_in_words(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_values_in_words, value))}]"
    if callable(value) and hasattr(value, "__qualname__"):
        return identity(value)
    try:
        return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()[:12]
    except Exception:  # no form at all: the kind of thing is what is left
        return f"{type(value).__module__}:{type(value).__qualname__}"


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers that do not say where they come from start from a seed, and go on as before afterwards."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - users' measures may draw from it
    with torch.random.fork_rng():
        set_seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def values_of(measures: Iterable[tuple[str, Measure]], checkpoint: Checkpoint) -> dict[str, Value]:
    """The columns of one model's row.

    Raises:
        TypeError: a measure returned something else than numbers, words, a mapping of those, or a result.
    """
    values: dict[str, Value] = {}
    for prefix, measure in measures:
        outcome = measure(checkpoint)
        if isinstance(outcome, Result):
            outcome = {field: interval.mean for field, interval in outcome.intervals().items()}
        if not isinstance(outcome, Mapping):
            outcome, prefix = {prefix or getattr(measure, "__name__", "value"): outcome}, ""
        columns = {f"{prefix}.{key}" if prefix else str(key): _plain(value, measure) for key, value in outcome.items()}
        twice = sorted(values.keys() & columns.keys())
        if twice:
            raise ValueError(f"two measures return {twice}: name them, measure={{'first': ..., 'second': ...}}")
        values |= columns
    return values


def _plain(value: Any, measure: Measure) -> Value:
    """A number or a word as JSON has it: None for NaN, words for infinities."""
    if isinstance(value, Interval):
        value = value.mean
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, numbers.Real):
        number = float(value)
        return None if math.isnan(number) else number if math.isfinite(number) else str(number)
    raise TypeError(
        f"{getattr(measure, '__name__', measure)} returned {type(value).__name__}: a measure returns a number, a "
        f"mapping of names to numbers, or a Result"
    )
