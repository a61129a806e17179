"""Annotations and values as error messages show them."""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
from beartype.vale import Is
from jaxtyping import AbstractArray
from torch import Tensor

LONGEST = 100
"""Characters of a value that a message shows."""

_PHRASES: dict[Any, str] = {}  # of validators
_SINGULARS = {int: "an int", float: "a number", str: "a string", bool: "True or False", type(None): "None"}
_PLURALS = {int: "ints", float: "numbers", str: "strings", bool: "True or False", Any: "anything"}


def constraint(phrase: str, test: Callable[[Any], bool]) -> Any:
    """Make a beartype validator for `Annotated`, which `allowed` describes by a phrase that no other one has."""
    validator = Is[test]
    validator.get_repr = phrase  # beartype takes annotations of equal text for the same one
    _PHRASES[validator] = phrase
    return validator


def is_array(part: Any) -> bool:
    """Tell whether an annotation is a jaxtyping array."""
    return inspect.isclass(part) and issubclass(part, AbstractArray)


def parts_of(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, or the annotation itself."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(part for each in get_args(hint) for part in parts_of(each))
    return (hint,)


def allowed(hint: Any) -> str:
    """Return an annotation as text."""
    phrases = [
        phrase for part in parts_of(hint)
        for phrase in (map(repr, get_args(part)) if get_origin(part) is Literal else (_type_as_text(part),))
    ]  # fmt: skip
    *others, last = dict.fromkeys(phrases)
    return f"{', '.join(others)} or {last}" if others else last


def _type_as_text(hint: Any) -> str:
    origin, parts = get_origin(hint), [part for part in get_args(hint) if part is not Ellipsis]
    if origin is Annotated:
        phrases = " ".join(_PHRASES.get(each, "") for each in hint.__metadata__)
        return f"{allowed(parts[0])} {phrases}".strip()
    if is_array(hint):
        return f"a tensor of {hint.__name__.partition('[')[0].lower()}s [{hint.dim_str}]"
    if "Callable" in str(origin or hint):
        return "a function"
    if origin is not None and issubclass(origin, Mapping):
        return f"a dictionary of {' to '.join(map(elements, parts))}"
    if origin is tuple and Ellipsis not in get_args(hint):  # of a fixed length
        return f"a tuple of {', '.join(map(allowed, parts))}"
    if origin is not None and parts:
        return f"a {origin.__name__.lower()} of {', '.join(map(elements, parts))}"
    return _SINGULARS.get(hint, getattr(hint, "__name__", str(hint)))


def elements(hint: Any) -> str:
    """Return the annotation of a collection's elements as text."""
    return _PLURALS.get(hint, "") or allowed(hint)


def described(value: Any) -> str:
    """Return a value as text; for tensors, their type and shape."""
    if isinstance(value, Tensor | np.ndarray):
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{kind} of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value is None or isinstance(value, str | int | float | complex | bytes | np.generic):
        return short(repr(value))
    if isinstance(value, Sequence | Mapping | set):
        return f"the {type(value).__name__} {short(repr(value))}"
    return short(f"the class {value.__name__}" if inspect.isclass(value) else f"a {type(value).__name__}")


def short(text: str) -> str:
    """Cut a text to `LONGEST` characters."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
