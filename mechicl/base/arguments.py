"""Argument checks: types by beartype and jaxtyping, ranges by `Annotated` constraints.

Public functions are decorated with `@checked`; dataclasses of settings call `check_fields(self)` in `__post_init__`.
"""

import functools
import inspect
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import repeat
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints, overload

import numpy as np
import torch
from beartype import BeartypeConf, FrozenDict
from beartype.door import is_bearable
from jaxtyping import jaxtyped
from torch import Tensor

from mechicl.base.annotations import allowed, constraint, described, elements, is_array, parts_of, short
from mechicl.base.surroundings import are_standard, standard_surroundings
from mechicl.base.threads import Function, holds_models

_BYTES = bytes | bytearray  # made once: it takes longer than the test

RAW = "is a model of transformers, without hooks: open it with load_language_model(model=..., tokenizer=...)"
LARGEST_EXPANDED = 2**31
"""Elements of an expanded tensor; computing with a larger one would allocate all of them."""


class ArgumentError(ValueError, TypeError):
    """An argument of the wrong type, or outside the values that are allowed."""


# ---- constraints ----


@functools.cache
def at_least(least: float) -> Any:
    """Constraint for `Annotated`: a finite number of at least `least`.

    Example:
        >>> width: Annotated[int, at_least(2)]
    """
    return constraint(f"of at least {least}", lambda value: least <= value < math.inf)


@functools.cache
def between(least: float, most: float) -> Any:
    """Constraint for `Annotated`: a number from `least` to `most`, both included."""
    return constraint(f"from {least} to {most}", lambda value: least <= value <= most)


@functools.cache
def strictly_between(least: float, most: float) -> Any:
    """Constraint for `Annotated`: a number between `least` and `most`, neither of them included."""
    return constraint(f"strictly between {least} and {most}", lambda value: least < value < most)


_ABOVE_ZERO = constraint("that is positive and finite", lambda value: 0 < value < math.inf)

Count = Annotated[int, at_least(1)]
"""An int of at least 1."""
Natural = Annotated[int, at_least(0)]
"""An int of at least 0."""
Positive = Annotated[float, _ABOVE_ZERO]
"""A finite number above 0."""
NonNegative = Annotated[float, at_least(0)]
"""A finite number of at least 0."""
Seed = Annotated[int, between(0, 2**63 - 1)]
"""A seed of random numbers. Every argument called `seed`, `..._seed` or `seeds` is checked for it."""
Fraction = Annotated[float, between(0, 1)]
"""A number from 0 to 1."""

# Plain annotations: a float is any real number except NaN, a bool is not a number, and ints fit into 64 bits.
_Number = Annotated[float | int, constraint("not NaN", lambda value: not isinstance(value, bool) and value == value)]
_Undefined = Annotated[float | int, constraint("or NaN", lambda value: not isinstance(value, bool))]
_Int64 = Annotated[
    int, constraint("of 64 bits", lambda value: not isinstance(value, bool) and -(2**63) <= value < 2**64)
]
_CONFS = {
    undefined: BeartypeConf(hint_overrides=FrozenDict({float: _Undefined if undefined else _Number, int: _Int64}))
    for undefined in (False, True)
}

_QUICK: dict[Any, Callable[[Any], bool]] = {  # values that certainly fit; beartype takes ten times as long
    float: lambda value: type(value) is float and value == value,
    int: lambda value: type(value) is int and -(2**63) <= value < 2**64,
}


# ---- checks ----


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Turn errors of the user's code, which `what` names, into `ArgumentError`s that are chained to them."""
    try:
        yield
    except (ArgumentError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ArgumentError(f"{what} failed: {type(error).__name__}: {error}") from error


@overload
def checked(function: Function) -> Function: ...
@overload
def checked(*, undefined: bool = False, locks: bool = False) -> Callable[[Function], Function]: ...
def checked(function: Callable[..., Any] | None = None, *, undefined: bool = False, locks: bool = False) -> Any:
    """Compare the arguments of every call with the function's annotations; raise `ArgumentError` where they do not fit.

    Tensors must have finite values; numbers must not be NaN. NumPy numbers are converted to Python's, arrays and
    tensors of one axis to lists of numbers, lists to tuples. An axis name in a shape means the same size in all
    arguments. Calls run in `standard_surroundings`. Code under `torch.compile` is not checked.

    Args:
        undefined: allow NaN and infinite values, which the function must document.
        locks: keep other threads from running the models among the arguments during the call; for analyses.

    Example:
        >>> @checked
        ... def blend(values: Float[Tensor, "prompt"], share: Fraction) -> Tensor: ...
    """
    if function is None:
        return functools.partial(checked, undefined=undefined, locks=locks)
    plain = holds_models(function) if locks else function

    @functools.wraps(plain)
    def check(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        with nullcontext() if are_standard() else standard_surroundings():
            args, kwargs = _checked_call(plain, args, kwargs, undefined)
            return plain(*args, **kwargs)

    check.is_checked = True  # type: ignore[attr-defined]
    return check


def check_fields(settings: Any, *, undefined: bool = False) -> None:
    """Compare the fields of a dataclass with their annotations; call it first in `__post_init__` (ArgumentError)."""
    title = type(settings).__name__
    for name, hint in _field_hints(type(settings)).items():
        value = getattr(settings, name)
        converted = _checked_value(title, name, hint, value, undefined)
        if converted is not value:
            object.__setattr__(settings, name, converted)


class _Parameters(NamedTuple):
    title: str
    positional: tuple[str, ...]
    hints: dict[str, Any]
    defaults: dict[str, Any]
    var_positional: str | None
    var_keyword: str | None
    share_axes: bool


@functools.cache
def _parameters_of(function: Callable[..., Any]) -> _Parameters:
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    by_kind = {parameter.kind: parameter.name for parameter in parameters}
    n_arrays = sum(_n_arrays(hint) for name, hint in hints.items() if name != "return")
    return _Parameters(
        function.__qualname__.removesuffix(".__init__"),
        tuple(each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)),
        hints,
        {each.name: each.default for each in parameters},
        by_kind.get(inspect.Parameter.VAR_POSITIONAL),
        by_kind.get(inspect.Parameter.VAR_KEYWORD),
        n_arrays > 1,
    )


@functools.cache
def _field_hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in cls.__dataclass_fields__}  # type: ignore[attr-defined]


def _n_arrays(hint: Any) -> int:
    return sum(1 if is_array(part) else 2 * sum(map(_n_arrays, get_args(part))) for part in parts_of(hint))


def _checked_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], undefined: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check and convert the arguments of a call; Python reports missing and unknown arguments itself."""
    parameters = _parameters_of(function)
    if kwargs and parameters.var_keyword is None and not kwargs.keys() <= parameters.defaults.keys():
        return args, kwargs
    title, positional, hints, defaults, var_positional, var_keyword, share_axes = parameters
    tensors: dict[str, Tensor] = {}  # checked so far
    converted, n = list(args), len(positional)
    with jaxtyped("context") if share_axes else nullcontext():
        for i, value in enumerate(args):
            name = positional[i] if i < n else var_positional
            if name in hints and value is not defaults[name]:
                label = name if i < n else f"{name}[{i - n}]"
                converted[i] = _checked_value(title, label, hints[name], value, undefined, tensors)
        for name, value in kwargs.items():
            hint = hints.get(name if name in defaults else var_keyword or "")
            if hint is not None and value is not defaults.get(name, parameters):
                kwargs[name] = _checked_value(title, name, hint, value, undefined, tensors)
    return tuple(converted), kwargs


@functools.cache
def _has_no_parts(kind: type) -> bool:
    """True for classes that check their own values, such as `Prompts`, and for bool."""
    return kind is bool or not issubclass(kind, int | float | Collection | PurePath | Tensor | torch.nn.Module)


def _checked_value(
    title: str, name: str, hint: Any, value: Any, undefined: bool, tensors: dict[str, Tensor] | None = None
) -> Any:
    if type(value) is hint and _has_no_parts(hint):
        return value
    if _is_raw(value) and torch.nn.Module not in parts_of(hint):
        raise ArgumentError(f"{title}(): {name} {RAW}")
    if not (hint is Tensor and isinstance(value, Tensor)) and not fits(value, hint, undefined):
        plain = _as_python(value, hint)
        if plain is value or not fits(plain, hint, undefined):
            raise ArgumentError(f"{title}(): {_refusal(name, hint, value, tensors or {}, undefined)}")
        value = plain
    if type(value) is float:
        return value
    if name.endswith(("seed", "seeds")) and isinstance(value, int | list | tuple | range):
        for each in [value] if isinstance(value, int) else value:
            if isinstance(each, int) and not fits(each, Seed):
                raise ArgumentError(f"{title}(): {name} must be {allowed(Seed)}, got {each}")
    if isinstance(value, Tensor | torch.nn.Module):
        if fault := _fault(value, undefined):
            raise ArgumentError(f"{title}(): {name} {fault}")
        if tensors is not None and isinstance(value, Tensor):
            tensors[name] = value
    elif isinstance(value, list | tuple | dict):
        for label, each in _tensors_in(name, value):
            if fault := _fault(each, undefined):
                raise ArgumentError(f"{title}(): {label} {fault}")
    elif (isinstance(value, PurePath) or (isinstance(value, str) and Path in parts_of(hint))) and not _is_path(value):
        raise ArgumentError(f"{title}(): {name} must be a valid path, got {short(repr(str(value)))}")
    return value


def _is_raw(value: Any) -> bool:
    """True for a model of transformers, which is not imported here because that takes seconds."""
    return isinstance(value, torch.nn.Module) and _is_of_transformers(type(value))


@functools.cache
def _is_of_transformers(kind: type) -> bool:
    return any(each.__module__ == "transformers.modeling_utils" for each in kind.__mro__)


def _is_path(value: PurePath | str) -> bool:
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def fits(value: Any, hint: Any, undefined: bool = False) -> bool:
    """Tell whether a value has the annotated type.

    Beartype alone would look at one element of a collection, and advance Python's random generator to choose it.
    """
    if isinstance(value, _BYTES) and hint is not Any and bytes not in parts_of(hint):
        return False
    first, *others = _tests(hint, undefined)
    return first(value) or any(test(value) for test in others)


@functools.cache
def _tests(hint: Any, undefined: bool) -> tuple[Callable[[Any], bool], ...]:
    return tuple(_test(part, undefined) for part in parts_of(hint))


def _test(part: Any, undefined: bool) -> Callable[[Any], bool]:
    """The test of one alternative of an annotation."""
    origin = get_origin(part)
    if inspect.isclass(origin) and issubclass(origin, Iterable) and get_args(part):
        return lambda value: (
            isinstance(value, origin)
            and (  # an iterator would be used up
                not isinstance(value, Collection) or _elements_fit(value, part, undefined)
            )
        )
    if is_array(part) or (type(part) is type and part not in (int, float)):  # beartype takes ten times as long
        return lambda value: isinstance(value, part)
    choices = get_args(part) if origin is Literal else ()
    quick = _QUICK.get(part, lambda value: type(value) is str and value in choices)
    return lambda value: quick(value) or is_bearable(value, part, conf=_CONFS[undefined])


def _elements_fit(value: Any, part: Any, undefined: bool) -> bool:
    kinds = [kind for kind in get_args(part) if kind is not Ellipsis]
    if isinstance(value, Mapping) and len(kinds) == 2:
        return all(fits(key, kinds[0], undefined) and fits(each, kinds[1], undefined) for key, each in value.items())
    if len(kinds) == 1:
        if isinstance(value, list | tuple) and kinds[0] in (int, float) and _are_numbers(value, kinds[0]):
            return True
        if isinstance(value, range):  # between its ends
            value = [*value[:1], *value[-1:]]
        return all(fits(each, kinds[0], undefined) for each in value)
    if get_origin(part) is tuple:
        return len(value) == len(kinds) and all(map(fits, value, kinds, repeat(undefined)))
    return True


def _are_numbers(values: Sequence[Any], kind: type) -> bool:
    """True if all values are surely finite numbers; False needs a closer look.

    A sum is the quickest way to look at every element of a long list. It fails for text, and it is finite only if all
    elements are. It does not notice a bool after the first hundred elements.
    """
    if not set(map(type, values[:100])) <= {int, kind}:
        return False
    try:
        total = sum(values)
        if kind is int:
            return type(total) is int and min(values, default=0) >= -(2**63) and max(values, default=0) < 2**64
        return type(total) in (int, float) and math.isfinite(total)
    except (TypeError, OverflowError):
        return False


def _as_python(value: Any, hint: Any = None) -> Any:
    """Convert NumPy numbers, and arrays and tensors of at most one axis, to Python's; lists to tuples."""
    if isinstance(value, str) and type(value) is not str:  # a member of a StrEnum for a Literal
        return str.__str__(value)
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim <= 1):
        return value.tolist()
    if isinstance(value, Tensor):  # unless a gradient would be lost
        kept = value.requires_grad or value.ndim > 1 or value.is_meta or value.is_sparse or _is_wrapped(value)
        return value if kept or _is_too_large(value) else value.tolist()
    if type(value) in (list, tuple):
        to_tuple = any(get_origin(part) is tuple for part in parts_of(hint))
        element = next((args[0] for part in parts_of(hint) if (args := get_args(part))), None)
        plain = set(map(type, value)) <= {int, float}  # a long list is converted at once
        elements = list(value) if plain else [_as_python(each, element) for each in value]
        kind: Any = tuple if to_tuple else type(value)
        return kind(elements)
    if isinstance(value, dict):
        return {_as_python(key): _as_python(each) for key, each in value.items()}
    return value


def _tensors_in(name: str, value: Any, depth: int = 2) -> Iterator[tuple[str, Tensor | torch.nn.Module]]:
    if isinstance(value, Tensor | torch.nn.Module):
        yield name, value
    elif depth and isinstance(value, list | tuple) and not (value and isinstance(value[0], int | float | str)):
        for i, each in enumerate(value):
            yield from _tensors_in(f"{name}[{i}]", each, depth - 1)
    elif depth and isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors_in(f"{name}[{short(repr(key))}]", each, depth - 1)


def _fault(value: Tensor | torch.nn.Module, undefined: bool) -> str | None:
    """The reason why nothing can be computed with a tensor or a model, or None."""
    if isinstance(value, torch.nn.Module):
        first = next(value.parameters(), None)
        is_meta = first is not None and first.is_meta
        return "has its weights on the device 'meta', where they have no values" if is_meta else None
    if value.is_meta:
        return "is on the device 'meta', where tensors have no values"
    if value.layout != torch.strided:
        return f"is sparse, got {described(value)}: to_dense() converts it"
    if _is_too_large(value):
        return f"has {value.numel():.3g} elements, which repeat a few values: got {described(value)}"
    if value.is_complex():
        return f"must be real, got {described(value)}"
    if not undefined and (n_bad := count_undefined(value)):
        return f"has {n_bad} of {value.numel()} values that are not finite: NaN or infinite"
    return None


def count_undefined(values: Tensor) -> int:
    """Count values that are not finite; 0 for ints, and where torch transforms or traces code, which hides values."""
    if not values.is_floating_point() or _is_wrapped(values) or torch.compiler.is_compiling():
        return 0
    values = values.detach() if values.requires_grad else values
    if math.isfinite(values.sum().item()):  # much quicker, and finite only if every value is
        return 0
    return int((~values.isfinite()).sum())


def _is_wrapped(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # type: ignore[attr-defined]


def _is_too_large(tensor: Tensor) -> bool:
    n = tensor.numel()
    return n > LARGEST_EXPANDED and n * tensor.element_size() > tensor.untyped_storage().nbytes()


# ---- messages ----


def _refusal(name: str, hint: Any, value: Any, tensors: Mapping[str, Tensor], undefined: bool) -> str:
    """The message for an argument that does not fit its annotation; `tensors` are the arguments before it."""
    if isinstance(value, dict):
        for part in parts_of(hint):
            kinds, origin = get_args(part), get_origin(part)
            for key, each in value.items() if inspect.isclass(origin) and issubclass(origin, Mapping) else ():
                if not fits(key, kinds[0], undefined):
                    return f"the keys of {name} must be {elements(kinds[0])}, got {described(key)}"
                if not fits(each, kinds[1], undefined):
                    return _refusal(f"{name}[{short(repr(key))}]", kinds[1], each, {}, undefined)
    if isinstance(value, Tensor) and tensors:
        with jaxtyped("context"):
            fits_alone = is_bearable(value, hint, conf=_CONFS[undefined])
        if fits_alone:
            others = ", ".join(f"{key} {described(other)}" for key, other in tensors.items())
            return f"{name} must be {allowed(hint)} that fits {others}, got {described(value)}"
    advice = ""
    if isinstance(value, np.ndarray) and any(part is Tensor or is_array(part) for part in parts_of(hint)):
        advice = "; torch.from_numpy makes a tensor of it"
    elif type(value).__module__.startswith("transformer_lens.") and "Hooked" in allowed(hint):
        advice = "; mechicl.wrap() makes a model of it"
    if label := _find_nan(name, value):
        return f"{label} must be a finite number, got nan"
    return f"{name} must be {allowed(hint)}, got {described(value)}{advice}"


def _find_nan(name: str, value: Any) -> str | None:
    if isinstance(value, list | tuple):
        return next(filter(None, (_find_nan(f"{name}[{i}]", each) for i, each in enumerate(value))), None)
    return name if isinstance(value, float) and math.isnan(value) else None
