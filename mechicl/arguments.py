"""What public functions are given is checked once, at the door: where users import them, not where we call them.

The last line of every package's `__init__` is `check_arguments(__name__)`. The functions and the methods of classes in
its `__all__` then compare what they are given with their annotations before anything is computed. Modules of our own
import functions from where they are written and get the plain ones: nothing is checked twice, or in a loop.
"""

import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import torch
from jaxtyping import AbstractArray, jaxtyped
from torch import Tensor
from typeguard import CollectionCheckStrategy, ForwardRefPolicy, TypeCheckError, check_type

Function = TypeVar("Function", bound=Callable[..., Any])

LONGEST = 100
"""Characters of a value that a message shows."""
LARGEST = 2**64
"""Whole numbers are smaller than this one, as torch's are."""
KINDS = {int: "an int", float: "a number", str: "a string", bool: "True or False"}
PLURALS = {int: "ints", float: "numbers", str: "strings", bool: "True or False"}


class ArgumentError(ValueError, TypeError):
    """An argument that a function does not take: by its type, or by its value."""


def check_arguments(package: str) -> None:
    """Let the public functions and classes of a package check what they are given.

    A wrong type, a word that is none of those allowed, NaN, a tensor with a value that is not finite, or an int beyond
    64 bits is refused with an `ArgumentError`, a ValueError and a TypeError, which names the argument, what it may be
    and what it is. NumPy's numbers count as Python's, and arrays and tensors of one axis as sequences of numbers.

    Args:
        package: its name. What its `__all__` takes from other packages is checked there.

    Example:
        >>> check_arguments(__name__)  # the last line of an __init__.py
    """
    module = sys.modules[package]
    for name in module.__all__:
        member = getattr(module, name)
        if not getattr(member, "__module__", "").startswith("mechicl."):
            continue
        if inspect.isfunction(member):
            if not hasattr(member, "_checks_arguments"):
                member = checked(member)
                member.__module__ = package  # a pickle names the function that users have
            setattr(module, name, member)
        elif inspect.isclass(member) and not issubclass(member, torch.nn.Module):  # whose methods call each other
            _check_methods(member)


def checked(function: Function) -> Function:
    """The function, which compares what it is given with its annotations at every call (see `check_arguments`)."""
    if hasattr(function, "_checks_arguments"):
        return function

    @functools.wraps(function)
    def door(*args: Any, **kwargs: Any) -> Any:
        signature, hints = _reading(function)
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError:  # Python's own words say more
            return function(*args, **kwargs)
        with jaxtyped("context"):  # the axes of all arguments have one meaning
            for name, value in call.arguments.items():
                if name in hints:
                    parameter = signature.parameters[name]
                    call.arguments[name] = _checked_parameter(function, parameter, hints[name], value, call.arguments)
        return function(*call.args, **call.kwargs)

    door._checks_arguments = True  # type: ignore[attr-defined]
    return cast(Function, door)


def takes_undefined(function: Function) -> Function:
    """Let a function have NaN and infinite values: it says what they mean to it."""
    function._takes_undefined = True  # type: ignore[attr-defined]
    return function


def _check_methods(cls: type) -> None:
    """Let the public methods of a class, its making included, check what they are given."""
    for owner in cls.__mro__:
        if not owner.__module__.startswith("mechicl."):
            continue
        for name, member in list(vars(owner).items()):
            if name.startswith("_") and name not in ("__init__", "__call__"):
                continue
            if inspect.isfunction(member):
                setattr(owner, name, checked(member))
            elif isinstance(member, staticmethod | classmethod):
                setattr(owner, name, type(member)(checked(member.__func__)))


@functools.cache
def _reading(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """A function's signature and its annotations, without those that allow everything."""
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    return inspect.signature(function), {name: hint for name, hint in hints.items() if hint is not Any}


# -- one argument --


def _checked_parameter(
    function: Callable[..., Any], parameter: inspect.Parameter, hint: Any, value: Any, others: Mapping[str, Any]
) -> Any:
    """What the function gets for a parameter; all of them where it takes any number."""
    name = parameter.name

    title = function.__qualname__
    # what a class holds is its own matter: a result may have undefined values
    finite = not (title.endswith("__init__") or hasattr(function, "_takes_undefined"))

    def check(label: str, each: Any) -> Any:
        fitting = _checked_value(title, label, hint, each, others)
        if finite:
            _check_numbers(title, label, fitting)
        return fitting

    if parameter.kind is parameter.VAR_POSITIONAL:
        return tuple(check(f"{name}[{i}]", each) for i, each in enumerate(value))
    if parameter.kind is parameter.VAR_KEYWORD:
        return {key: check(key, each) for key, each in value.items()}
    if value is parameter.default:
        return value
    return check(name, value)


def _checked_value(function: str, name: str, hint: Any, value: Any, others: Mapping[str, Any]) -> Any:
    if not _fits(value, hint):
        plain = _as_python(value)
        if not _fits(plain, hint):
            raise ArgumentError(f"{function}(): {_refusal(name, hint, value, others)}")
        return plain
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation says; True and False are no numbers, and an int is a number."""
    return any(_fits_part(value, part) for part in _parts(hint))


def _fits_part(value: Any, part: Any) -> bool:
    if part in (Any, object):
        return True
    if isinstance(value, bool) and part in (int, float):
        return False
    if part is float:
        return isinstance(value, int | float)
    if inspect.isclass(part) and get_origin(part) is None:  # axes and protocols among them
        return isinstance(value, part)
    try:
        check_type(
            value, part, forward_ref_policy=ForwardRefPolicy.IGNORE,
            collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS,
        )  # fmt: skip
    except TypeCheckError:
        return False
    return True


def _fits_alone(value: Any, hint: Any) -> bool:
    with jaxtyped("context"):
        return _fits(value, hint)


def _as_python(value: Any) -> Any:
    """NumPy's numbers as Python's, arrays and tensors of at most one axis as lists of them."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray | Tensor) and value.ndim == 1):
        return value.tolist()
    if isinstance(value, list | tuple):
        return type(value)([_as_python(each) for each in value]) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {_as_python(key): _as_python(each) for key, each in value.items()}
    return value


def _check_numbers(function: str, name: str, value: Any) -> None:
    """Refuse what no computation can mean: NaN, tensors with values that are not finite, numbers beyond 64 bits."""
    for label, each in _numbers(name, value):
        if isinstance(each, Tensor):
            _check_tensor(function, label, each)
        elif isinstance(each, float) and math.isnan(each):
            raise ArgumentError(f"{function}(): {label} must be a finite number, got nan")
        elif isinstance(each, int) and not -LARGEST < each < LARGEST:
            raise ArgumentError(f"{function}(): {label} must be smaller than 2**64, got {_short(repr(each))}")


def _numbers(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The numbers and tensors in a value, or in a list or dictionary of them, each with its name."""
    if isinstance(value, Tensor | float | int):
        yield name, value
    elif type(value) in (list, tuple):
        yield from ((f"{name}[{i}]", each) for i, each in enumerate(value))
    elif type(value) is dict:
        yield from ((f"{name}[{key!r}]", each) for key, each in value.items())


def _check_tensor(function: str, name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise ArgumentError(f"{function}(): {name} is on the device 'meta', where tensors have no values")
    if tensor.is_complex():
        raise ArgumentError(f"{function}(): {name} must be real, got {_in_words(tensor)}")
    if not tensor.is_floating_point() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # type: ignore[attr-defined]
        return
    with torch.no_grad():
        if not tensor.sum().isfinite() and not tensor.isfinite().all():  # a sum is much quicker, and mostly enough
            n_bad = int((~tensor.isfinite()).sum())
            raise ArgumentError(
                f"{function}(): {name} has {n_bad} of {tensor.numel()} values that are not finite: NaN or infinite"
            )


# -- messages --


def _refusal(name: str, hint: Any, value: Any, others: Mapping[str, Any]) -> str:
    """Why an argument is not taken."""
    if isinstance(value, Tensor) and _fits_alone(value, hint):
        rest = [
            f"{key} {_in_words(other)}" for key, other in others.items() if isinstance(other, Tensor) and key != name
        ]
        return f"{name} must be {_allowed(hint)} that fits {', '.join(rest)}, got {_in_words(value)}"
    return f"{name} must be {_allowed(hint)}, got {_in_words(value)}{_advice(value, hint)}"


def _parts(hint: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(part for each in get_args(hint) for part in _parts(each))
    return (hint,)


def _allowed(hint: Any) -> str:
    """An annotation in words."""
    words = [
        word for part in _parts(hint)
        for word in (map(repr, get_args(part)) if get_origin(part) is Literal else (_type_in_words(part),))
    ]  # fmt: skip
    *others, last = dict.fromkeys(words)
    return f"{', '.join(others)} or {last}" if others else last


def _type_in_words(hint: Any) -> str:
    if hint is type(None):
        return "None"
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        kind = hint.__name__.partition("[")[0].lower()
        return f"a tensor of {kind}s [{hint.dim_str}]"  # type: ignore[attr-defined]
    origin, parts = get_origin(hint), [part for part in get_args(hint) if part is not Ellipsis]
    if origin is Callable or hint is Callable:
        return "a function"
    if origin is not None and issubclass(origin, Mapping):
        return f"a dictionary of {' to '.join(map(_several, parts))}"
    if origin is not None and parts:
        return f"a {origin.__name__.lower()} of {', '.join(map(_several, parts))}"
    return KINDS.get(hint, getattr(hint, "__name__", str(hint)))


def _several(hint: Any) -> str:
    """What a collection holds, in words."""
    return PLURALS.get(hint, _allowed(hint))


def _in_words(value: Any) -> str:
    """A value as messages show it."""
    if isinstance(value, Tensor | np.ndarray):
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{kind} of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value is None or isinstance(value, str | int | float | complex | bytes | np.generic):
        return _short(repr(value))
    if isinstance(value, Sequence | Mapping | set):
        return f"the {type(value).__name__} {_short(repr(value))}"
    return _short(f"the class {value.__name__}" if inspect.isclass(value) else f"a {type(value).__name__}")


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _advice(value: Any, hint: Any) -> str:
    """What to do about a value that is nearly right."""
    tensors = any(
        part is Tensor or (inspect.isclass(part) and issubclass(part, AbstractArray)) for part in _parts(hint)
    )
    if tensors and isinstance(value, np.ndarray):
        return "; torch.from_numpy makes a tensor of it"
    if type(value).__module__.startswith(("transformer_lens.", "transformers.")) and "Hooked" in _allowed(hint):
        return "; mechicl.wrap() makes a model of it"
    return ""
