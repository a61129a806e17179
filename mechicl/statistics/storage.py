"""Results in files: JSON for the structure, safetensors for the numbers; only registered classes are made from them."""

import dataclasses
import inspect
import math
from typing import Any, TypeVar

from torch import Tensor

from mechicl.base.arguments import checked

_T = TypeVar("_T")
_STORABLE: dict[str, type] = {}


@checked
def storable(cls: type[_T]) -> type[_T]:
    """Mark a dataclass as allowed in saved results (a decorator).

    Loading creates only objects of classes marked like this. Subclasses of `Result` are marked already; use it for
    your own dataclasses that are values of a `Result`'s fields.
    """
    known = _STORABLE.setdefault(cls.__name__, cls)  # a module that is loaded again replaces its own class
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"two storable classes are called {cls.__name__}")
    _STORABLE[cls.__name__] = cls
    return cls


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a value to JSON; its tensors go into `tensors`, each under its place."""
    if isinstance(value, Tensor):
        while name in tensors:  # keys such as 1 and "1" have the same text
            name += "'"
        tensors[name] = value.detach().clone()  # fields may share memory, which safetensors refuses
        return {"tensor": name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | range):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        items = [[encode(key, "", {}), encode(item, f"{name}.{key}", tensors)] for key, item in value.items()]
        return {"dict": items}
    kind = type(value).__name__
    if _STORABLE.get(kind) is not type(value):
        raise TypeError(f"{name.lstrip('.') or 'a result'} is of type {kind}, which cannot be stored in a file")
    fields = {
        field.name: encode(getattr(value, field.name), f"{name}.{field.name}".lstrip("."), tensors)
        for field in dataclasses.fields(value)
        if field.metadata.get("stored", True)
    }
    return {"kind": kind, "fields": fields}


def decode(data: Any, tensors: dict[str, Tensor]) -> Any:
    """Restore a value that `encode` converted; fails with KeyError, TypeError or AttributeError on other data."""
    if not isinstance(data, dict):
        return data
    if "tensor" in data:
        return tensors[data["tensor"]]
    if "number" in data:
        return float(data["number"])
    if "dict" in data:
        return {decode(key, tensors): decode(item, tensors) for key, item in data["dict"]}
    for sequence in (list, tuple):
        if sequence.__name__ in data:
            return sequence(decode(item, tensors) for item in data[sequence.__name__])
    cls = _STORABLE[data["kind"]]
    needed = {
        field.name: None  # not stored, and without a default
        for field in dataclasses.fields(cls)
        if not field.metadata.get("stored", True) and field.default is field.default_factory is dataclasses.MISSING
    }
    result = object.__new__(cls)
    # without the checks of values that users give: fields that were not stored are None
    inspect.unwrap(cls.__init__)(result, **needed, **{k: decode(value, tensors) for k, value in data["fields"].items()})
    return result
