"""The measures of a sweep: functions by name, their identities, and what they return as columns of a table."""

import dis
import functools
import hashlib
import inspect
import math
import numbers
import pkgutil
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
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
CHECKERS = ("mechicl", "jaxtyping", "beartype")  # their wrappers check arguments, and contain addresses


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

    Values are those of a partial, a method's object, closures (also of wrappers), defaults and the module's plain data
    that the function reads (pickled unless plain); changes of functions that it calls by name are not noticed.
    """
    if isinstance(measure, functools.partial):
        return f"{identity(measure.func)}{_value_text((measure.args, sorted(measure.keywords.items())))}"
    layers = [measure]
    while hasattr(layers[-1], "__wrapped__"):  # functions with checked arguments are wrappers, too
        layers.append(layers[-1].__wrapped__)
    *wrappers, inner = layers
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    name, owner = f"{named.__module__}:{named.__qualname__}", getattr(measure, "__self__", None)
    own = [_wrapper_text(each) for each in wrappers if _package(each) not in CHECKERS]
    if owner is not None and not inspect.ismodule(owner):  # a bound method
        state = getattr(owner, "__dict__", owner)
        own.append(_value_text(owner if isinstance(owner, type) else (type(owner), state)))
    if name.startswith("mechicl."):
        return " ".join([name, __version__, *([hashlib.sha256("".join(own).encode()).hexdigest()[:12]] if own else [])])
    code = getattr(inner, "__code__", None)
    try:
        source = inspect.getsource(named) if named.__name__ != "<lambda>" else _code_text(inner)  # a line may have two
    except (OSError, TypeError):  # typed into a shell
        source = _code_text(inner)
    defaults = getattr(inner, "__defaults__", None), getattr(inner, "__kwdefaults__", None)
    state = None if code or named is inner else getattr(inner, "__dict__", None)  # a class has source
    read = _plain_globals(inner)
    own.append(f"{source}{_value_text((_cells(inner), defaults, state))}{_value_text(read) if read else ''}")
    digest = hashlib.sha256("".join(own).encode()).hexdigest()[:12]
    return f"{name} {digest}"


def _package(function: Any) -> str:
    return getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]


def _wrapper_text(wrapper: Any) -> str:
    """The code of a wrapper, and the plain data and functions that it reads."""
    cells = [each for each in _cells(wrapper) if _is_plain(each) or inspect.isroutine(each)]
    state = {name: value for name, value in vars(wrapper).items() if _is_plain(value)}
    return f"{_code_text(wrapper)}{_value_text((cells, state, _plain_globals(wrapper)))}"


def _cells(function: Any) -> list[Any]:
    contents = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return [each for each in contents if each is not function]  # one that calls itself


def _codes(function: Any) -> list[CodeType]:
    """The code of a function and of the functions inside it; empty for other objects."""
    codes = [code] if (code := getattr(function, "__code__", None)) else []
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return codes


def _code_text(function: Any) -> str:
    constants = [[each for each in code.co_consts if not isinstance(each, CodeType)] for code in _codes(function)]
    return f"{[(code.co_code, code.co_names) for code in _codes(function)]}{_value_text(constants)}"


def _plain_globals(function: Any) -> dict[str, Any]:
    """The plain data among the global variables that a function reads."""
    steps = [step for code in _codes(function) for step in dis.get_instructions(code)]
    names, known = sorted({s.argval for s in steps if s.opname == "LOAD_GLOBAL"}), getattr(function, "__globals__", {})
    return {name: known[name] for name in names if name in known and _is_plain(known[name])}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bytes | numbers.Number | Path | np.ndarray | Tensor)


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
    if isinstance(value, Tensor) and value.numel() == 1:
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
