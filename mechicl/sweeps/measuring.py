"""The measures of a sweep: functions by name, their identities, and what they return as columns of a table."""

import functools
import hashlib
import inspect
import math
import numbers
import pkgutil
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle
import numpy as np
import torch
from accelerate.utils import set_seed
from torch import Tensor

from mechicl.base.arguments import calling
from mechicl.base.version import __version__
from mechicl.checkpoints import Checkpoint
from mechicl.statistics import Interval, Result
from mechicl.sweeps.measures import MEASURES

Measure = Callable[[Checkpoint], Any]
CellValue = float | str | None
KNOWN = ("mechicl", "jaxtyping", "beartype")  # their functions change with the version, and wrap users' to check them


def read_measures(measure: Any) -> list[Measure]:
    """The measures of a sweep (see `Sweep.run`) as functions."""
    several = [] if measure is None else measure if isinstance(measure, list | tuple) else [measure]
    return [each if callable(each) else _named(each) for each in several]


def _named(name: Any) -> Measure:
    if not isinstance(name, str):
        raise TypeError(f"measure= takes a function, a name, or a sequence of them, got {name!r}")
    if name in MEASURES:
        return MEASURES[name]
    try:
        function = pkgutil.resolve_name(name)
        if not callable(function):
            raise ValueError(f"{name} is not a function")
    except (ImportError, AttributeError, ValueError) as error:
        own = f"module:function for your own ({error})"
        raise ValueError(f"no measure {name!r}: there are {sorted(MEASURES)}, or {own}") from error
    return function


def identity(measure: Any) -> str:
    """A text that identifies a measure: its name and a digest of a user's source and of the values it uses.

    Values are those of a partial, a method's object, closures (also of wrappers) and defaults, pickled unless plain.
    Functions that it calls by name and global variables are not noticed.
    """
    if isinstance(measure, functools.partial):
        return f"{identity(measure.func)}{_value_text((measure.args, sorted(measure.keywords.items())))}"
    layers, owner = [measure], getattr(measure, "__self__", None)
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    named = layers[-1] if hasattr(layers[-1], "__qualname__") else type(layers[-1])
    name = f"{named.__module__}:{named.__qualname__}"
    own = [_own_text(each, layers) for each in layers if _package(each) not in KNOWN]
    if owner is not None and not inspect.ismodule(owner):  # a bound method
        own.append(_value_text(owner if isinstance(owner, type) else (type(owner), getattr(owner, "__dict__", owner))))
    if not own:
        return f"{name} {__version__}"
    return f"{name} {hashlib.sha256(''.join(own).encode()).hexdigest()[:12]}"


def _package(function: Any) -> str:
    module = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
    return module.partition(".")[0]


def _own_text(function: Any, layers: Sequence[Any]) -> str:
    """Source and values of one of a function's layers, which are wrappers and what they wrap."""
    code: CodeType | None = getattr(function, "__code__", None)
    try:
        source = inspect.getsource(code or (function if hasattr(function, "__qualname__") else type(function)))
        source = _code_text(code) if code and code.co_name == "<lambda>" else source  # a line may have two of these
    except (OSError, TypeError):  # typed into a shell
        source = _code_text(code) if code else ""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    cells = [each for each in cells if all(each is not layer for layer in layers)]
    defaults = getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)
    state = None if code else getattr(function, "__dict__", None)
    return f"{source}{_value_text((cells, defaults, state))}"


def _code_text(code: CodeType) -> str:
    constants = [_code_text(each) if isinstance(each, CodeType) else _value_text(each) for each in code.co_consts]
    return f"{code.co_code}{code.co_names}{constants}"


def _value_text(value: Any) -> str:
    if value is None or isinstance(value, str | int | float | bool | complex | Path):
        return repr(value)
    if isinstance(value, Tensor):  # a pickled one has an address
        return _value_text((str(value.dtype), value.tolist()))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_value_text(k)}: {_value_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value_text, value))}]"
    if isinstance(value, set | frozenset):  # in no order
        return f"{{{', '.join(sorted(map(_value_text, value)))}}}"
    if callable(value) and hasattr(value, "__qualname__"):
        return identity(value)
    try:
        return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()[:12]
    except Exception:  # cannot be pickled: use its type
        return f"{type(value).__module__}:{type(value).__qualname__}"


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global random number generators of Python, NumPy and torch, and restore their states afterwards."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - users' measures may draw from it
    with torch.random.fork_rng():
        set_seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def measured_columns(measures: Iterable[Measure], checkpoint: Checkpoint) -> dict[str, CellValue]:
    """The columns of one model's row."""
    columns: dict[str, CellValue] = {}
    for measure in measures:
        function = getattr(measure, "__name__", "value")
        with calling(f"measure {function!r}"):
            values = measure(checkpoint)
        if isinstance(values, Result):
            values = values.intervals()
        if not isinstance(values, Mapping):
            values = {function: values}
        for key, value in values.items():
            if str(key) in columns:
                raise ValueError(f"two measures return {str(key)!r}: let one of them return a mapping with other names")
            columns[str(key)] = _plain(value, function)
    return columns


def _plain(value: Any, function: str) -> CellValue:
    """A number or a text as a JSON value: None for NaN, text for infinities."""
    if isinstance(value, Interval):
        value = value.mean
    if isinstance(value, Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1:
        value = value.item()
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, numbers.Real):
        number = float(value)
        return None if math.isnan(number) else number if math.isfinite(number) else str(number)
    raise TypeError(
        f"{function} returned {type(value).__name__}: a measure returns a number, a mapping of names to numbers, or a "
        f"Result"
    )
