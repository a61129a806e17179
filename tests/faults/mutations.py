"""Arguments changed into others: such as mean the same, such as are never right, and such as may be."""

import copy
import dataclasses
import inspect
import random
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from mechicl.prompts import Prompts, TokenSequences
from tests.faults.makers import is_allowed

Kind = Literal["same", "bad", "open"]
"""Means the same; is never right; may be right."""


class Mutation(NamedTuple):
    words: str
    kind: Kind
    make: Callable[[], Any]


class OurError(Exception):
    """What a user's own function raises: it shall come out as it is."""


class Hostile:
    """An object that fails at whatever is asked of it."""

    def __repr__(self) -> str:
        raise OurError("no words for it")

    __str__ = __repr__

    def __len__(self) -> int:
        return 2**62

    def __bool__(self) -> bool:
        raise OurError("neither true nor false")

    def __eq__(self, other: object) -> bool:
        raise OurError("not to be compared")

    __hash__ = None  # type: ignore[assignment]


def _raises(*values: Any, **options: Any) -> Any:
    raise OurError("a user's function fails")


OTHERS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a word": lambda: "word",
    "no word": lambda: "",
    "bytes": lambda: b"bytes",
    "True": lambda: True,
    "3": lambda: 3,
    "0.5": lambda: 0.5,
    "1j": lambda: 1j,
    "a list": lambda: [1, "two", None],
    "an empty list": lambda: [],
    "a dictionary": lambda: {"a": 1},
    "a set": lambda: {1, 2},
    "an object": object,
    "a hostile object": Hostile,
    "a class": lambda: int,
    "an array of objects": lambda: np.array([None, "x"], dtype=object),
    "a tensor": lambda: torch.ones(3),
    "a slice": lambda: slice(None),
    "a function": lambda: _raises,
    "a generator": lambda: (i for i in range(3)),
    "dots": lambda: ...,
}
"""Of another type than most arguments."""


def mutations(value: Any, hint: Any) -> list[Mutation]:
    """Ways to change an argument with an annotation."""
    own = list(_of_its_kind(value, hint))
    others = []
    for words, make in OTHERS.items():
        other = make()
        if type(other) is type(value):
            continue
        # a tensor of one axis counts as a sequence of numbers: see mechicl.base.arguments
        fits = is_allowed(other, hint) or (isinstance(other, Tensor) and is_allowed(other.tolist(), hint))
        others.append(Mutation(words, "open" if fits else "bad", make))
    every = own * (1 + len(others) // max(len(own), 1)) + others  # as often its kind as another
    if hint is Any or hint is inspect.Parameter.empty:  # nothing is said of what is right
        every = [mutation._replace(kind="open") if mutation.kind == "bad" else mutation for mutation in every]
    return every


def _of_its_kind(value: Any, hint: Any) -> Iterable[Mutation]:
    if isinstance(value, bool):
        yield Mutation("as numpy's", "same", lambda: np.bool_(value))
        yield Mutation("the other", "open", lambda: not value)
    elif isinstance(value, int | float):
        yield from _numbers(value, hint)
    elif isinstance(value, str):
        yield from _words(value, hint)
    elif isinstance(value, Tensor):
        yield from _tensors(value)
    elif isinstance(value, Prompts):
        yield from _prompts(value)
    elif isinstance(value, TokenSequences):
        for name, change in (("beyond the vocabulary", lambda ids: ids + 10**6), ("none", lambda ids: ids[:0])):
            yield Mutation(
                f"tokens {name}", "open",
                lambda change=change: TokenSequences(change(value.ids), value.predictable[: len(change(value.ids))]),
            )  # fmt: skip
        yield Mutation("their ids alone", "open", lambda: value.ids)
    elif isinstance(value, torch.nn.Module):
        yield from _models(value)
    elif isinstance(value, Path):
        for path in ("/nonexistent/folder/x", "/dev/null", "a\nb", "\0", "", "/proc/self/mem"):
            yield Mutation(f"the path {path!r}", "open", lambda path=path: Path(path))
    elif isinstance(value, Mapping):
        yield from _mappings(value, hint)
    elif isinstance(value, list | tuple):
        yield from _sequences(value, hint)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _fields(value)
    elif callable(value):
        yield Mutation("a function that fails", "open", lambda: _raises)
        yield Mutation("a function that returns NaN", "open", lambda: lambda *v, **o: v[0] * torch.nan)
        yield Mutation("a function of nothing", "open", lambda: lambda: None)


def _numbers(value: int | float, hint: Any) -> Iterable[Mutation]:
    whole = isinstance(value, int)
    yield Mutation("as numpy's", "same", lambda: np.int64(value) if whole else np.float64(value))
    yield Mutation("as an array", "same", lambda: np.array(value))
    yield Mutation("as a tensor", "same", lambda: torch.tensor(value, dtype=torch.int64 if whole else torch.float64))
    if whole:
        yield Mutation("as a float", "same", lambda: float(value))
        yield Mutation("and a half", "open" if is_allowed(0.5, hint) else "bad", lambda: value + 0.5)
    yield Mutation("as a fraction", "same", lambda: Fraction(value))
    yield Mutation("as a word", "bad" if not is_allowed("3", hint) else "open", lambda: str(value))
    for number in ("nan", "np.nan"):
        make = (lambda: float("nan")) if number == "nan" else (lambda: np.float32("nan"))
        yield Mutation(number, "bad", make)
    for number in (0, -1, -value, 2**31, 2**63, 2**64, 10**30, 10**400, float("inf"), -float("inf"), 1e300, 5e-324):
        if number != value:
            kind = "open" if not whole or (is_allowed(number, hint) and isinstance(number, int)) else "bad"
            words = f"{number:.3g}" if abs(number) < 10**300 else "huge"
            yield Mutation(words, kind, lambda number=number: number)


def _words(value: str, hint: Any) -> Iterable[Mutation]:
    listed = [each for each in _literals(hint) if isinstance(each, str)]
    for words, other in (
        ("in capitals", value.upper()), ("with a capital", value.capitalize()), ("with a space", f"{value} "),
        ("cut", value[:-1]), ("of another alphabet", "ж" * 5), ("very long", "x" * 100_000),
        ("with a zero", f"{value}\0"),
        ("a script", "<script>heard()</script>"), ("half of a pair", "\ud800"), ("a format", "{0.__class__} %s %(x)d"),
    ):  # fmt: skip
        if other != value:
            yield Mutation(
                f"a word {words}", "bad" if listed and other not in listed else "open", lambda other=other: other
            )
    yield Mutation("as numpy's", "same", lambda: np.str_(value))


def _literals(hint: Any) -> list[Any]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [each for part in get_args(hint) for each in _literals(part)]


def _tensors(value: Tensor) -> Iterable[Mutation]:
    wide = torch.stack([value, value], -1) if value.ndim else value
    yield Mutation("not contiguous", "same", lambda: wide[..., 0] if value.ndim else value)
    yield Mutation("as an array", "same", lambda: value.detach().numpy())
    yield Mutation("as lists", "same", lambda: value.tolist())
    yield Mutation("on meta", "bad", lambda: value.to("meta"))
    yield Mutation("sparse", "open", lambda: value.to_sparse())
    yield Mutation("complex", "bad", lambda: value.to(torch.complex64) + 1j)
    yield Mutation("empty", "open", lambda: value[:0] if value.ndim else value)
    yield Mutation("one axis more", "open", lambda: value[None])
    yield Mutation("one axis less", "open", lambda: value[0] if value.ndim else value)
    yield Mutation("one more in the last axis", "open", lambda: torch.cat([value, value[..., :1]], -1))
    yield Mutation("huge, by expanding", "open", lambda: torch.zeros(1).to(value.dtype).expand(2**40))
    yield Mutation("negative", "open", lambda: -value if value.dtype != torch.bool else ~value)
    if value.is_floating_point():
        yield Mutation("with a NaN", "bad", lambda: _with(value, float("nan")))
        yield Mutation("with an infinity", "open", lambda: _with(value, float("inf")))
        yield Mutation("very large", "open", lambda: value * 1e30)
        yield Mutation("very small", "open", lambda: value * 1e-30)
        yield Mutation("zeros", "open", lambda: value * 0)
        yield Mutation("half precision", "open", lambda: value.half())
        yield Mutation("single precision", "open", lambda: value.float())
        yield Mutation("whole numbers", "open", lambda: value.long())
        yield Mutation("with a gradient", "same", lambda: value.clone().requires_grad_())
    else:
        yield Mutation("as numbers", "open", lambda: value.float())
        yield Mutation("of one byte", "open", lambda: value.to(torch.uint8))
        if value.dtype == torch.int64:
            yield Mutation("beyond all", "open", lambda: value + 10**9)


def _with(value: Tensor, number: float) -> Tensor:
    changed = value.clone()
    changed.view(-1)[-1] = number
    return changed


def _prompts(value: Prompts) -> Iterable[Mutation]:
    def changed(xs: Callable[[Tensor], Tensor], ys: Callable[[Tensor], Tensor] | None = None) -> Callable[[], Prompts]:
        return lambda: Prompts(xs(value.xs), (ys or xs)(value.ys))

    yield Mutation("not contiguous", "same", changed(lambda t: torch.stack([t, t], -1)[..., 0]))
    yield Mutation("with a gradient", "same", changed(lambda t: t.clone().requires_grad_()))
    yield Mutation("none of them", "open", lambda: value[:0])
    yield Mutation("one of them", "open", lambda: value[:1])
    yield Mutation("no context", "open", lambda: value.prefix(0))
    yield Mutation("half precision", "open", changed(lambda t: t.half()))
    yield Mutation("single precision", "open", changed(lambda t: t.float()))
    yield Mutation("zeros", "open", changed(lambda t: 0 * t))
    yield Mutation("very large", "open", changed(lambda t: 1e30 * t))
    yield Mutation("with a NaN", "bad", changed(lambda t: _with(t, float("nan"))))
    yield Mutation("on meta", "bad", changed(lambda t: t.to("meta")))
    yield Mutation("another width", "open", changed(lambda t: torch.cat([t, t], -1), lambda t: t))
    yield Mutation("two targets", "open", changed(lambda t: t, lambda t: torch.cat([t, t], -1)))
    yield Mutation("longer", "open", changed(lambda t: torch.cat([t, t], 1)))
    yield Mutation("their inputs alone", "bad", lambda: value.xs)


def _models(value: torch.nn.Module) -> Iterable[Mutation]:
    def changed(change: Callable[[torch.nn.Module], Any]) -> Callable[[], Any]:
        def make() -> Any:
            model = copy.deepcopy(value)
            return change(model) or model

        return make

    def spoil(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(float("nan"))

    yield Mutation("with weights of NaN", "open", changed(spoil))
    yield Mutation("half precision", "open", changed(lambda model: model.half()))
    yield Mutation("single precision", "open", changed(lambda model: model.float()))
    yield Mutation("on meta", "open", changed(lambda model: model.to("meta")))
    yield Mutation("while training", "open", changed(lambda model: model.train()))
    yield Mutation("plain torch", "open", lambda: torch.nn.Linear(2, 1))


def _mappings(value: Mapping[Any, Any], hint: Any) -> Iterable[Mutation]:
    element = _element(hint, Mapping)
    yield Mutation("empty", "open", dict)
    yield Mutation("with a key more", "open", lambda: {**value, 3: None})
    yield Mutation("with a script for a key", "open", lambda: {"<script>": next(iter(value.values()), None)})
    for key, each in list(value.items())[:2]:
        for mutation in mutations(each, element):
            yield Mutation(f"[{key!r}] {mutation.words}", mutation.kind,
                           lambda key=key, mutation=mutation: {**value, key: mutation.make()})  # fmt: skip


def _sequences(value: Sequence[Any], hint: Any) -> Iterable[Mutation]:
    kind: Callable[[Iterable[Any]], Any] = tuple if isinstance(value, tuple) else list
    element = _element(hint, Iterable)
    yield Mutation("as the other kind of sequence", "same", lambda: tuple(value) if kind is list else list(value))
    yield Mutation("empty", "open", lambda: kind(()))
    yield Mutation("nested", "open", lambda: kind([value]))
    yield Mutation("very long", "open", lambda: kind(list(value) * 10_000))
    if value:
        for mutation in mutations(value[0], element):
            yield Mutation(f"[0] {mutation.words}", mutation.kind,
                           lambda mutation=mutation: kind([mutation.make(), *value[1:]]))  # fmt: skip


def _element(hint: Any, kind: type) -> Any:
    """The annotation of what a collection holds; a mapping's of its values."""
    for part in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        origin, parts = get_origin(part), get_args(part)
        if parts and inspect.isclass(origin) and issubclass(origin, kind):
            return parts[-1] if issubclass(origin, Mapping) else parts[0]
    return Any


def _fields(value: Any) -> Iterable[Mutation]:
    """A field of a dataclass changed: its own checks have the first word."""
    for field in dataclasses.fields(value):
        there = getattr(value, field.name, None)
        if field.init and isinstance(there, int | float | Tensor | str) and not isinstance(there, bool):
            for mutation in _of_its_kind(there, Any):
                if mutation.kind != "same":
                    make = partial(_replaced, value, field.name, mutation.make)
                    yield Mutation(f".{field.name} {mutation.words}", "open", make)


def _replaced(value: Any, name: str, make: Callable[[], Any]) -> Any:
    return dataclasses.replace(value, **{name: make()})


def choose(rng: random.Random, value: Any, hint: Any, *, only_its_kind: bool = False) -> Mutation | None:
    """One way to change an argument; None where there is none of its own kind."""
    ways = list(_of_its_kind(value, Any)) if only_its_kind else mutations(value, hint)
    return rng.choice(ways) if ways else None
