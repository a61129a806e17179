"""What public functions are given is checked once, at the door: where users import them, not where we call them.

The last line of every package's `__init__` is `check_arguments(__name__)`. The functions and the methods of classes in
its `__all__` then compare what they are given with their annotations before anything is computed. Modules of our own
import functions from where they are written and get the plain ones: nothing is checked twice, or in a loop. Methods of
models, and what is in modules that every floor uses (prompts, learners, tokens), are at one place for users and for us:
they look at who calls, and let calls of our own through.
"""

import functools
import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import torch
from jaxtyping import AbstractArray, jaxtyped
from torch import Tensor
from typeguard import CollectionCheckStrategy, ForwardRefPolicy, TypeCheckError, check_type

from mechicl.base.warning import warn

Function = TypeVar("Function", bound=Callable[..., Any])  # classes, too

LONGEST = 100
"""Characters of a value that a message shows."""
LARGEST, LARGEST_SEED = 2**63, 2**64
"""Whole numbers are smaller than this one, as torch's are; its seeds may be twice as large."""
LARGEST_EXPANDED = 2**31
"""Elements of a tensor that repeats those it holds: a larger one would be allocated by what computes with it."""
NO_DOORS = ("setup",)
"""Methods that torch's modules call while they are made."""
PASSED_OVER = ("jaxtyping.", "beartype.", "torch.")
"""Whose frames may stand between a method and who calls it; the first two check types in our tests."""
KINDS = {int: "an int", float: "a number", str: "a string", bool: "True or False"}
PLURALS = {int: "ints", float: "numbers", str: "strings", bool: "True or False"}


class ArgumentError(ValueError, TypeError):
    """An argument that a function does not take: by its type, or by its value."""


def check_arguments(name: str) -> None:
    """Let the public functions and classes of a package, or of a module, check what they are given.

    A wrong type, a word that is none of those allowed, NaN, a tensor with a value that is not finite, or an int beyond
    64 bits is refused with an `ArgumentError`, a ValueError and a TypeError, which names the argument, what it may be
    and what it is. So are tensors without values (on meta), sparse ones, ones that repeat a few values billions of
    times, and paths that no file can have. NumPy's numbers count as Python's, and arrays and tensors of one axis as
    sequences of numbers. A model with weights that are not finite is taken, with a warning.

    Args:
        name: of the package; what its `__all__` takes from other packages is checked there. Of a module without
            `__all__`, what it defines; calls from within mechicl are then let through.

    Example:
        >>> check_arguments(__name__)  # the last line of an __init__.py
    """
    module = sys.modules[name]
    is_package = hasattr(module, "__all__")
    for key in module.__all__ if is_package else [each for each in vars(module) if not each.startswith("_")]:
        member = getattr(module, key)
        where = getattr(member, "__module__", None) or ""
        if not where.startswith("mechicl.") or (not is_package and where != name):
            continue
        if inspect.isfunction(member):
            if not hasattr(member, "_checks_arguments"):
                member = checked(member) if is_package else checked_from_outside(member)
                member.__module__ = name  # a pickle names the function that users have
            setattr(module, key, member)
        elif inspect.isclass(member) and not getattr(member, "_is_protocol", False):
            is_model = issubclass(member, torch.nn.Module)  # whose methods call each other
            _check_methods(member, checked_from_outside if is_model or not is_package else checked)


def checked(function: Function) -> Function:
    """The function, which compares what it is given with its annotations at every call (see `check_arguments`)."""
    if hasattr(function, "_checks_arguments"):
        return function

    @functools.wraps(function)
    def door(*args: Any, **kwargs: Any) -> Any:
        return _call(function, args, kwargs, by_us=_is_ours(sys._getframe(1)))

    door._checks_arguments = True  # type: ignore[attr-defined]
    return cast(Function, door)


def checked_from_outside(function: Function) -> Function:
    """The function, which compares what it is given with its annotations where the caller is not of mechicl."""
    if hasattr(function, "_checks_arguments"):
        return function
    is_pass = function.__name__ == "forward"  # which looks at the shape and dtype of tokens itself

    @functools.wraps(function)
    def door(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _is_ours(sys._getframe(1)):
            return function(*args, **kwargs)
        if is_pass and len(args) == 2 and not kwargs and type(args[1]) is Tensor:  # as in loops of somebody's training
            whole = not (args[1].is_meta and _is_outline(args[0]))
            _check_tensor(function.__qualname__, "input", args[1], _Needs(False, False, whole=whole, heard=True))
            return function(*args)
        return _call(function, args, kwargs, by_us=False)

    door._checks_arguments = True  # type: ignore[attr-defined]
    return cast(Function, door)


def _is_ours(frame: types.FrameType | None) -> bool:
    """Whether who calls is of mechicl, by itself or through torch (a module, a transform)."""
    while frame is not None:
        name = f"{frame.f_globals.get('__name__', '')}."
        if not name.startswith(PASSED_OVER):
            return name.startswith("mechicl.")
        frame = frame.f_back
    return False


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, by_us: bool) -> Any:
    """Check what a function is given, and call it."""
    signature, hints = _reading(function)
    try:
        call = signature.bind(*args, **kwargs)
    except TypeError:  # Python's own words say more
        return function(*args, **kwargs)
    needs = _needs(function, args, by_us)
    with jaxtyped("context"):  # the axes of all arguments have one meaning
        for name, value in call.arguments.items():
            if name in hints:
                parameter = signature.parameters[name]
                call.arguments[name] = _checked_parameter(
                    function, parameter, hints[name], value, call.arguments, needs
                )
    return function(*call.args, **call.kwargs)


def takes_undefined(function: Function) -> Function:
    """Let a function, or a class, have NaN and infinite values: it says what they mean to it."""
    function._takes_undefined = True  # type: ignore[attr-defined]
    return function


class _Needs(NamedTuple):
    """What a function asks of what it is given: numbers that are no NaN, tensors with finite values, or with any."""

    numbers: bool
    tensors: bool
    whole: bool
    heard: bool = False  # NaN in tensors is taken, with a warning


def _needs(function: Callable[..., Any], args: tuple[Any, ...], by_us: bool) -> _Needs:
    if hasattr(function, "_takes_undefined"):
        return _Needs(numbers=False, tensors=False, whole=True)
    if "." not in function.__qualname__:
        return _Needs(numbers=True, tensors=True, whole=True)
    # what a class holds is its own matter: a result may have undefined values, and ours may be outlines without any
    is_made = function.__name__ == "__init__" and bool(args)
    holds_undefined = by_us or (is_made and hasattr(args[0], "_takes_undefined"))
    heard = not by_us and function.__name__ != "__init__"
    whole = not by_us and not (args and function.__name__ != "__init__" and _is_outline(args[0]))
    return _Needs(numbers=not holds_undefined, tensors=False, whole=whole, heard=heard)


def _is_outline(value: object) -> bool:
    """Whether it is a model whose weights have no values, which says what shapes come of what shapes."""
    first = next(value.parameters(), None) if isinstance(value, torch.nn.Module) else None
    return first is not None and first.is_meta


def _check_methods(cls: type, door: Callable[[Any], Any]) -> None:
    """Let the public methods of a class, its making included, check what they are given."""
    skipped = NO_DOORS if issubclass(cls, torch.nn.Module) else ()
    for owner in cls.__mro__:
        if not owner.__module__.startswith("mechicl."):
            continue
        for name, member in list(vars(owner).items()):
            if name in skipped or (name.startswith("_") and name not in ("__init__", "__call__")):
                continue
            if inspect.isfunction(member):
                setattr(owner, name, door(member))
            elif isinstance(member, staticmethod | classmethod):
                setattr(owner, name, type(member)(door(member.__func__)))


@functools.cache
def _reading(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """A function's signature and its annotations."""
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    return inspect.signature(function), hints


# -- one argument --


def _checked_parameter(
    function: Callable[..., Any],
    parameter: inspect.Parameter,
    hint: Any,
    value: Any,
    others: Mapping[str, Any],
    needs: _Needs,
) -> Any:
    """What the function gets for a parameter; all of them where it takes any number."""
    name, title = parameter.name, function.__qualname__.removesuffix(".__init__")

    def check(label: str, each: Any) -> Any:
        fitting = _checked_value(title, label, hint, each, others)
        _check_meaning(title, label, fitting, needs)
        if isinstance(fitting, str) and Path in _parts(hint):
            _check_path(title, label, Path(fitting))
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
    if isinstance(value, str | bytes | bytearray) and inspect.isclass(get_origin(part)):
        element = next(iter(get_args(part)), Any)
        if isinstance(value, bytes | bytearray) or element not in (str, Any, object):
            return False  # its letters, or none of them, are no sequence of numbers
    if get_origin(part) in (Iterable, Collection) and isinstance(value, list | tuple | set | frozenset):
        return all(_fits(each, get_args(part)[0]) for each in value)  # typeguard looks into sequences alone
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
    """NumPy's numbers as Python's, arrays and tensors of at most one axis as numbers and lists of them."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim <= 1):
        return value.tolist()
    if isinstance(value, Tensor):  # a gradient would get lost, and a few values repeated may be very many
        lost = value.requires_grad or value.ndim > 1 or value.is_meta or value.is_sparse or _is_wrapped(value)
        return value if lost or _is_too_large(value) else value.tolist()
    if isinstance(value, list | tuple):
        return type(value)([_as_python(each) for each in value]) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {_as_python(key): _as_python(each) for key, each in value.items()}
    return value


def _check_meaning(function: str, name: str, value: Any, needs: _Needs) -> None:
    """Refuse what no computation can mean: numbers beyond 64 bits, paths that no file can have, undefined values."""
    for label, each in _parts_of(name, value):
        if isinstance(each, Tensor):
            _check_tensor(function, label, each, needs)
        elif isinstance(each, torch.nn.Module):
            if needs.tensors:
                _check_weights(function, label, each)
        elif isinstance(each, PurePath):
            _check_path(function, label, each)
        elif needs.numbers and isinstance(each, float) and math.isnan(each):
            raise ArgumentError(f"{function}(): {label} must be a finite number, got nan")
        elif isinstance(each, int):
            largest = LARGEST_SEED if "seed" in name else LARGEST
            if not -largest < each < largest:
                words = "2**64" if largest == LARGEST_SEED else "2**63"
                raise ArgumentError(f"{function}(): {label} must be smaller than {words}, got {_short(repr(each))}")


def _parts_of(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """The numbers, tensors, models and paths in a value, or in lists or dictionaries of them, each with its name."""
    if isinstance(value, Tensor | float | int | torch.nn.Module | PurePath):
        yield name, value
    elif depth and type(value) in (list, tuple):
        for i, each in enumerate(value):
            yield from _parts_of(f"{name}[{i}]", each, depth - 1)
    elif depth and type(value) is dict:
        for key, each in value.items():
            yield from _parts_of(f"{name}[{_short(repr(key))}]", each, depth - 1)


def _check_tensor(function: str, name: str, tensor: Tensor, needs: _Needs) -> None:
    if tensor.is_meta:
        if needs.whole:
            raise ArgumentError(f"{function}(): {name} is on the device 'meta', where tensors have no values")
        return
    if tensor.layout != torch.strided:
        raise ArgumentError(f"{function}(): {name} is sparse, got {_in_words(tensor)}: to_dense() makes it whole")
    if _is_wrapped(tensor):
        return
    if _is_too_large(tensor):
        raise ArgumentError(
            f"{function}(): {name} has {tensor.numel():.3g} elements, which repeat the few that it holds: "
            f"got {_in_words(tensor)}"
        )
    if needs.whole and tensor.is_complex():
        raise ArgumentError(f"{function}(): {name} must be real, got {_in_words(tensor)}")
    if needs.heard and count_undefined(tensor) and (n_nan := int(tensor.isnan().sum())):
        warn(f"{function}(): {name} has {n_nan} of {tensor.numel()} values that are NaN", RuntimeWarning)
    if not needs.tensors:
        return
    n_bad = count_undefined(tensor)
    if n_bad:
        raise ArgumentError(
            f"{function}(): {name} has {n_bad} of {tensor.numel()} values that are not finite: NaN or infinite"
        )


def _check_weights(function: str, name: str, model: torch.nn.Module) -> None:
    """Refuse a model without values; warn of one whose weights are not finite: what is computed of it is undefined."""
    for weight_name, weight in model.named_parameters():
        if weight.is_meta:
            raise ArgumentError(f"{function}(): {name} has its weights on the device 'meta', where they have no values")
        if n_bad := count_undefined(weight):
            warn(
                f"{function}(): {name} has weights that are not finite, first {n_bad} of {weight.numel()} in "
                f"{weight_name}: what is computed of them is undefined",
                RuntimeWarning,
            )
            return


def _check_path(function: str, name: str, path: PurePath) -> None:
    try:
        fits = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise ArgumentError(f"{function}(): {name} must be a path that a file can have, got {_short(repr(str(path)))}")


def count_undefined(values: Tensor) -> int:
    """How many values are not finite; 0 for whole numbers, and under torch's transforms, where nothing can be told."""
    if not values.is_floating_point() or _is_wrapped(values):
        return 0
    values = values.detach()
    if values.sum().isfinite():  # much quicker, and finite only if every value is
        return 0
    return int((~values.isfinite()).sum())


def _is_wrapped(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # type: ignore[attr-defined]


def _is_too_large(tensor: Tensor) -> bool:
    """Whether a tensor has billions of elements that it does not hold."""
    n = tensor.numel()
    return n > LARGEST_EXPANDED and n * tensor.element_size() > tensor.untyped_storage().nbytes()


# -- messages --


def _refusal(name: str, hint: Any, value: Any, others: Mapping[str, Any]) -> str:
    """Why an argument is not taken."""
    if isinstance(value, dict) and (entry := _odd_entry(hint, value)):
        key, each, allowed = entry
        return f"{name}[{_short(repr(key))}] must be {allowed}, got {_in_words(each)}"
    if isinstance(value, Tensor) and _fits_alone(value, hint):
        rest = [
            f"{key} {_in_words(other)}" for key, other in others.items() if isinstance(other, Tensor) and key != name
        ]
        return f"{name} must be {_allowed(hint)} that fits {', '.join(rest)}, got {_in_words(value)}"
    return f"{name} must be {_allowed(hint)}, got {_in_words(value)}{_advice(value, hint)}"


def _odd_entry(hint: Any, value: Mapping[Any, Any]) -> tuple[Any, Any, str] | None:
    """The entry of a dictionary that is not what its annotation says, alone or beside those before it."""
    for part in _parts(hint):
        origin, inner = get_origin(part), get_args(part)
        if inspect.isclass(origin) and issubclass(origin, Mapping) and len(inner) == 2:
            seen = {}
            for key, each in value.items():
                seen[key] = each
                if _fits_alone(key, inner[0]) and not _fits_alone(seen, part):
                    rest = " that fits the others" if _fits_alone(each, inner[1]) else ""
                    return key, each, f"{_allowed(inner[1])}{rest}"
    return None


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
    if origin is tuple and Ellipsis not in get_args(hint):  # of a certain length
        return f"a tuple of {', '.join(map(_allowed, parts))}"
    if origin is not None and parts:
        return f"a {origin.__name__.lower()} of {', '.join(map(_several, parts))}"
    return KINDS.get(hint, getattr(hint, "__name__", str(hint)))


def _several(hint: Any) -> str:
    """What a collection holds, in words."""
    if hint is Any:
        return "anything"
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
