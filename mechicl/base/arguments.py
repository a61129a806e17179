"""Argument checks of public functions: types by beartype and jaxtyping, ranges by `Annotated` constraints.

`@checked` stands where a public function is defined, and `check_fields(self)` in the `__post_init__` of settings.
"""

import functools
import inspect
import math
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import numpy as np
import torch
from beartype import BeartypeConf, FrozenDict
from beartype.door import is_bearable
from beartype.vale import Is
from jaxtyping import AbstractArray, jaxtyped
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

LONGEST = 100
"""Characters of a value that a message shows."""
LARGEST_EXPANDED = 2**31
"""Elements of an expanded tensor: whatever computes with a larger one would allocate all of them."""


class ArgumentError(ValueError, TypeError):
    """An argument of the wrong type, or outside the values that are allowed."""


# ---- constraints ----

_WORDS: dict[Any, str] = {}  # by validator


def _constraint(words: str, test: Callable[[Any], bool]) -> Any:
    """A beartype validator with the words that error messages use for it."""
    validator = Is[test]
    _WORDS[validator] = words
    return validator


@functools.cache
def at_least(least: float) -> Any:
    """Constraint for `Annotated`: a finite number of at least `least`.

    Example:
        >>> width: Annotated[int, at_least(2)]
    """
    return _constraint(f"of at least {least:g}", lambda value: least <= value < math.inf)


@functools.cache
def between(least: float, most: float) -> Any:
    """Constraint for `Annotated`: a number from `least` to `most`, both included."""
    return _constraint(f"from {least:g} to {most:g}", lambda value: least <= value <= most)


@functools.cache
def strictly_between(least: float, most: float) -> Any:
    """Constraint for `Annotated`: a number between `least` and `most`, neither of them included."""
    return _constraint(f"strictly between {least:g} and {most:g}", lambda value: least < value < most)


_ABOVE_ZERO = _constraint("that is positive and finite", lambda value: 0 < value < math.inf)

Count = Annotated[int, at_least(1)]
"""An int of at least 1."""
Natural = Annotated[int, at_least(0)]
"""An int of at least 0."""
Positive = Annotated[float, _ABOVE_ZERO]
"""A finite number above 0."""
NonNegative = Annotated[float, at_least(0)]
"""A finite number of at least 0."""
Fraction = Annotated[float, between(0, 1)]
"""A number from 0 to 1."""

# What plain annotations mean: a float is any real number but NaN, True is not a number, and ints fit into 64 bits.
_Number = Annotated[float | int, Is[lambda value: not isinstance(value, bool) and value == value]]
_Undefined = Annotated[float | int, Is[lambda value: not isinstance(value, bool)]]
_Whole = Annotated[int, Is[lambda value: not isinstance(value, bool) and -(2**63) <= value < 2**64]]
_CONFS = {
    undefined: BeartypeConf(hint_overrides=FrozenDict({float: _Undefined if undefined else _Number, int: _Whole}))
    for undefined in (False, True)
}


# ---- checks ----


@overload
def checked(function: Function) -> Function: ...
@overload
def checked(*, undefined: bool) -> Callable[[Function], Function]: ...
def checked(function: Callable[..., Any] | None = None, *, undefined: bool = False) -> Any:
    """Compare the arguments of every call with the function's annotations.

    Tensors must have finite values; numbers must not be NaN. NumPy's numbers count as Python's, arrays and tensors of
    one axis as sequences of numbers, lists as tuples. Axis names in shapes mean the same in all arguments. Code under
    `torch.compile` is not checked.

    Args:
        function: or the decorator is made first: `@checked(undefined=True)`.
        undefined: allow NaN and infinite values; the function's docstring says what they mean.

    Raises:
        ArgumentError: when called; names the argument, what it may be, and what it is.

    Example:
        >>> @checked
        ... def blend(values: Float[Tensor, "prompt"], share: Fraction) -> Tensor: ...
    """
    if function is None:
        return functools.partial(checked, undefined=undefined)
    plain = function

    @functools.wraps(plain)
    def check(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            args, kwargs = _checked_call(plain, args, kwargs, undefined)
        return plain(*args, **kwargs)

    check._checks_arguments = True  # type: ignore[attr-defined]
    return check


def check_fields(settings: Any, *, undefined: bool = False) -> None:
    """Compare the fields of a dataclass with their annotations; call it first in `__post_init__`.

    Raises:
        ArgumentError: names the field, what it may be, and what it is.
    """
    title = type(settings).__name__
    for name, hint in _field_hints(type(settings)).items():
        value = getattr(settings, name)
        fitting = _checked_value(title, name, hint, value, undefined)
        if fitting is not value:
            object.__setattr__(settings, name, fitting)


class _Rules(NamedTuple):
    """A function's name and parameters as calls need them."""

    title: str
    positional: tuple[str, ...]
    hints: dict[str, Any]
    defaults: dict[str, Any]
    rest: str | None  # of *args
    others: str | None  # of **kwargs
    share_axes: bool


@functools.cache
def _rules(function: Callable[..., Any]) -> _Rules:
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    kinds = {parameter.kind: parameter.name for parameter in parameters}
    n_arrays = sum(_n_arrays(hint) for name, hint in hints.items() if name != "return")
    return _Rules(
        function.__qualname__.removesuffix(".__init__"),
        tuple(each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)),
        hints,
        {each.name: each.default for each in parameters},
        kinds.get(inspect.Parameter.VAR_POSITIONAL),
        kinds.get(inspect.Parameter.VAR_KEYWORD),
        n_arrays > 1,
    )


@functools.cache
def _field_hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in cls.__dataclass_fields__}  # type: ignore[attr-defined]


def _checked_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], undefined: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, NumPy's numbers converted; calls that Python itself will refuse are left to it."""
    rules = _rules(function)
    if rules.others is None and not kwargs.keys() <= rules.defaults.keys():
        return args, kwargs
    if rules.share_axes:
        with jaxtyped("context"):  # the axes of all arguments have one meaning
            return _checked_arguments(rules, args, kwargs, undefined)
    return _checked_arguments(rules, args, kwargs, undefined)


def _checked_arguments(
    rules: _Rules, args: tuple[Any, ...], kwargs: dict[str, Any], undefined: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    seen, n = {}, len(rules.positional)

    def check(name: str, hint: Any, value: Any) -> Any:
        fitting = _checked_value(rules.title, name, hint, value, undefined, seen)
        if isinstance(fitting, Tensor):
            seen[name] = fitting
        return fitting

    fitting = []
    for i, value in enumerate(args):
        name = rules.positional[i] if i < n else rules.rest
        given = name not in rules.hints or value is rules.defaults[name]  # pyright: ignore[reportArgumentType]
        label = name if i < n else f"{name}[{i - n}]"
        fitting.append(value if given or name is None else check(str(label), rules.hints[name], value))
    for name, value in kwargs.items():
        hint = rules.hints.get(name if name in rules.defaults else rules.others or "")
        if hint is not None and value is not rules.defaults.get(name, rules):
            kwargs[name] = check(name, hint, value)
    return tuple(fitting), kwargs


def _checked_value(
    title: str, name: str, hint: Any, value: Any, undefined: bool, seen: Mapping[str, Tensor] | None = None
) -> Any:
    if not _fits(value, hint, undefined):
        plain = _as_python(value, hint)
        if plain is value or not _fits(plain, hint, undefined):
            raise ArgumentError(f"{title}(): {_refusal(name, hint, value, seen or {}, undefined)}")
        value = plain
    if isinstance(value, Tensor | torch.nn.Module | list | tuple | dict):
        for label, each in _tensors_in(name, value):
            if fault := _fault(each, undefined):
                raise ArgumentError(f"{title}(): {label} {fault}")
    elif (isinstance(value, PurePath) or (isinstance(value, str) and Path in _parts(hint))) and not _is_path(value):
        raise ArgumentError(f"{title}(): {name} must be a path that a file can have, got {_short(repr(str(value)))}")
    return value


def _is_path(value: PurePath | str) -> bool:
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _fits(value: Any, hint: Any, undefined: bool) -> bool:
    """True if a value is what an annotation says; unlike beartype alone, looks at every element of a collection."""
    if not is_bearable(value, hint, conf=_CONFS[undefined]):
        return False
    if isinstance(value, list | tuple | dict | set | frozenset):
        parts = _parts(hint)
        if len(parts) > 1:
            parts = tuple(part for part in parts if is_bearable(value, part, conf=_CONFS[undefined]))
        return any(_elements_fit(value, part, undefined) for part in parts)
    return not isinstance(value, bytes | bytearray) or hint is Any or bytes in _parts(hint)


def _elements_fit(value: Any, part: Any, undefined: bool) -> bool:
    """True if every element is what the annotation of a collection says, which the collection itself fits."""
    kinds = [kind for kind in get_args(part) if kind is not Ellipsis]
    if isinstance(value, dict) and len(kinds) == 2:
        return all(_fits(key, kinds[0], undefined) and _fits(each, kinds[1], undefined) for key, each in value.items())
    if len(kinds) == 1:
        if kinds[0] in (int, float) and set(map(type, value)) <= {int, kinds[0]}:  # a long list in one pass of C code
            return kinds[0] is int or undefined or not any(map(math.isnan, value))
        return all(_fits(each, kinds[0], undefined) for each in value)
    if get_origin(part) is tuple:
        return all(_fits(each, kind, undefined) for each, kind in zip(value, kinds, strict=True))
    return True


def _as_python(value: Any, hint: Any = None) -> Any:
    """NumPy's numbers as Python's, arrays and tensors of at most one axis as numbers and lists, lists as tuples."""
    if isinstance(value, str) and type(value) is not str:  # a StrEnum's member for a Literal
        return str.__str__(value)
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim <= 1):
        return value.tolist()
    if isinstance(value, Tensor):  # a gradient would be lost
        kept = value.requires_grad or value.ndim > 1 or value.is_meta or value.is_sparse or _is_wrapped(value)
        return value if kept or _is_too_large(value) else value.tolist()
    if type(value) in (list, tuple):
        to_tuple = any(get_origin(part) is tuple for part in _parts(hint))
        element = next((args[0] for part in _parts(hint) if (args := get_args(part))), None)
        return (tuple if to_tuple else type(value))([_as_python(each, element) for each in value])
    if isinstance(value, dict):
        return {_as_python(key): _as_python(each) for key, each in value.items()}
    return value


def _tensors_in(name: str, value: Any, depth: int = 2) -> Iterator[tuple[str, Tensor | torch.nn.Module]]:
    """The tensors and models in a value, or in lists and dictionaries of them, each with its name."""
    if isinstance(value, Tensor | torch.nn.Module):
        yield name, value
    elif depth and isinstance(value, list | tuple) and not (value and isinstance(value[0], int | float | str)):
        for i, each in enumerate(value):
            yield from _tensors_in(f"{name}[{i}]", each, depth - 1)
    elif depth and isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors_in(f"{name}[{_short(repr(key))}]", each, depth - 1)


def _fault(value: Tensor | torch.nn.Module, undefined: bool) -> str | None:
    """Why nothing can be computed with a tensor or a model, if so."""
    if isinstance(value, torch.nn.Module):
        first = next(value.parameters(), None)
        is_meta = first is not None and first.is_meta
        return "has its weights on the device 'meta', where they have no values" if is_meta else None
    if value.is_meta:
        return "is on the device 'meta', where tensors have no values"
    if value.layout != torch.strided:
        return f"is sparse, got {_in_words(value)}: to_dense() converts it"
    if _is_too_large(value):
        return f"has {value.numel():.3g} elements, which repeat a few values: got {_in_words(value)}"
    if value.is_complex():
        return f"must be real, got {_in_words(value)}"
    if not undefined and (n_bad := count_undefined(value)):
        return f"has {n_bad} of {value.numel()} values that are not finite: NaN or infinite"
    return None


def count_undefined(values: Tensor) -> int:
    """Number of values that are not finite; 0 for ints, and under torch's transforms, where values cannot be read."""
    if not values.is_floating_point() or _is_wrapped(values):
        return 0
    values = values.detach()
    if values.sum().isfinite():  # much quicker, and finite only if every value is
        return 0
    return int((~values.isfinite()).sum())


def _is_wrapped(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # type: ignore[attr-defined]


def _is_too_large(tensor: Tensor) -> bool:
    n = tensor.numel()
    return n > LARGEST_EXPANDED and n * tensor.element_size() > tensor.untyped_storage().nbytes()


# ---- messages ----


def _refusal(name: str, hint: Any, value: Any, seen: Mapping[str, Tensor], undefined: bool) -> str:
    """Why an argument is refused."""
    if isinstance(value, dict):
        for part in _parts(hint):
            kinds = get_args(part)
            for key, each in value.items() if len(kinds) == 2 else ():
                if not _fits(key, kinds[0], undefined):
                    return f"the keys of {name} must be {_several(kinds[0])}, got {_in_words(key)}"
                if not _fits(each, kinds[1], undefined):
                    return f"{name}[{_short(repr(key))}] must be {_allowed(kinds[1])}, got {_in_words(each)}"
    fits_alone = False
    if isinstance(value, Tensor):
        with jaxtyped("context"):
            fits_alone = is_bearable(value, hint, conf=_CONFS[undefined])
    if fits_alone:
        others = ", ".join(f"{key} {_in_words(other)}" for key, other in seen.items())
        return f"{name} must be {_allowed(hint)} that fits {others}, got {_in_words(value)}"
    advice = ""
    if isinstance(value, np.ndarray) and any(part is Tensor or _is_array(part) for part in _parts(hint)):
        advice = "; torch.from_numpy makes a tensor of it"
    elif type(value).__module__.startswith(("transformer_lens.", "transformers.")) and "Hooked" in _allowed(hint):
        advice = "; mechicl.wrap() makes a model of it"
    if place := _nan_in(name, value):
        return f"{place} must be a finite number, got nan"
    return f"{name} must be {_allowed(hint)}, got {_in_words(value)}{advice}"


def _nan_in(name: str, value: Any) -> str | None:
    """The place of the first NaN in a number, or in nested lists of numbers."""
    if isinstance(value, list | tuple):
        return next(filter(None, (_nan_in(f"{name}[{i}]", each) for i, each in enumerate(value))), None)
    return name if isinstance(value, float) and math.isnan(value) else None


_KINDS = {int: "an int", float: "a number", str: "a string", bool: "True or False", type(None): "None"}
_PLURALS = {int: "ints", float: "numbers", str: "strings", bool: "True or False", Any: "anything"}


def _n_arrays(hint: Any) -> int:
    """How many arrays an annotation has; those in a collection count as two."""
    return sum(1 if _is_array(part) else 2 * sum(map(_n_arrays, get_args(part))) for part in _parts(hint))


def _is_array(part: Any) -> bool:
    return inspect.isclass(part) and issubclass(part, AbstractArray)


def _parts(hint: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(part for each in get_args(hint) for part in _parts(each))
    return (hint,)


def _allowed(hint: Any) -> str:
    """An annotation as text."""
    words = [
        word for part in _parts(hint)
        for word in (map(repr, get_args(part)) if get_origin(part) is Literal else (_type_as_text(part),))
    ]  # fmt: skip
    *others, last = dict.fromkeys(words)
    return f"{', '.join(others)} or {last}" if others else last


def _type_as_text(hint: Any) -> str:
    origin, parts = get_origin(hint), [part for part in get_args(hint) if part is not Ellipsis]
    if origin is Annotated:
        words = " ".join(_WORDS.get(each, "") for each in hint.__metadata__)
        return f"{_allowed(parts[0])} {words}".strip()
    if _is_array(hint):
        kind = hint.__name__.partition("[")[0].lower()
        return f"a tensor of {kind}s [{hint.dim_str}]"
    if origin is Callable or origin is types.FunctionType or hint is Callable or "Callable" in str(origin):
        return "a function"
    if origin is not None and issubclass(origin, Mapping):
        return f"a dictionary of {' to '.join(map(_several, parts))}"
    if origin is tuple and Ellipsis not in get_args(hint):  # of a certain length
        return f"a tuple of {', '.join(map(_allowed, parts))}"
    if origin is not None and parts:
        return f"a {origin.__name__.lower()} of {', '.join(map(_several, parts))}"
    return _KINDS.get(hint, getattr(hint, "__name__", str(hint)))


def _several(hint: Any) -> str:
    """The elements of a collection as text."""
    return _PLURALS.get(hint, "") or _allowed(hint)


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
