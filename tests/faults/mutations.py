"""Changes of an argument: such as keep its meaning ("same"), are never right ("bad"), or may be right ("open")."""

import copy
import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from mechicl.base.annotations import parts_of
from mechicl.base.arguments import fits
from mechicl.prompts import Prompts, TokenSequences

Kind = Literal["same", "bad", "open"]


class Mutation(NamedTuple):
    """A change of an argument: its description, its kind, and the changed value."""

    text: str
    kind: Kind
    make: Callable[[], Any]


class UserError(Exception):
    """The error of a user's own function; it must reach the user."""


class Uncooperative:
    """An object whose every method raises."""

    def _raise(self, *others: object) -> Any:
        raise UserError("uncooperative")

    __repr__ = __str__ = __bool__ = __eq__ = _raise
    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return 2**62


def raise_user_error(*values: Any, **options: Any) -> Any:
    raise UserError("a user's function fails")


OTHERS: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "a string": lambda: "word", "an empty string": lambda: "", "bytes": lambda: b"bytes",
    "True": lambda: True, "3": lambda: 3, "0.5": lambda: 0.5, "1j": lambda: 1j, "a list": lambda: [1, "two", None],
    "an empty list": lambda: [], "a dictionary": lambda: {"a": 1}, "a set": lambda: {1, 2}, "an object": object,
    "an uncooperative object": Uncooperative, "a class": lambda: int, "a tensor": lambda: torch.ones(3),
    "an array of objects": lambda: np.array([None, "x"], dtype=object), "a slice": lambda: slice(None),
    "a function": lambda: raise_user_error, "a generator": lambda: (i for i in range(3)), "an ellipsis": lambda: ...,
}  # fmt: skip
"""Values of other types than most arguments."""


def choose(rng: random.Random, value: Any, hint: Any, *, only_its_kind: bool = False) -> Mutation | None:
    """Choose a change of an argument at random; None if there is none."""
    ways = list(_of_its_kind(value, Any)) if only_its_kind else mutations(value, hint)
    return rng.choice(ways) if ways else None


def mutations(value: Any, hint: Any) -> list[Mutation]:
    """List changes of an argument, half of them to other types."""
    own, others = list(_of_its_kind(value, hint)), []
    for text, make in OTHERS.items():
        other = make()
        if type(other) is type(value):
            continue
        # a tensor of one axis counts as a sequence of numbers
        right = _is_allowed(other, hint) or (isinstance(other, Tensor) and _is_allowed(other.tolist(), hint))
        others.append(Mutation(text, "open" if right else "bad", make))
    every = own * (1 + len(others) // max(len(own), 1)) + others
    if hint is Any or hint is inspect.Parameter.empty:
        every = [mutation._replace(kind="open") if mutation.kind == "bad" else mutation for mutation in every]
    return every


def _is_allowed(value: Any, hint: Any) -> bool:
    try:
        return hint is inspect.Parameter.empty or fits(value, hint, undefined=True)
    except Exception:  # an annotation that cannot be checked, or an object that cannot be compared
        return not isinstance(value, Uncooperative)


def _of_its_kind(value: Any, hint: Any) -> Iterator[Mutation]:
    ways = next((ways for types, ways in WAYS.items() if isinstance(value, types)), None)
    if ways is not None:
        yield from ways(value, hint)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _fields(value)
    elif callable(value):
        yield from _listed(open={
            "a function that fails": lambda: raise_user_error, "a function without parameters": lambda: lambda: None,
            "a function that returns NaN": lambda: lambda *v, **o: v[0] * torch.nan,
        })  # fmt: skip


def _listed(**ways: Mapping[str, Callable[[], Any]]) -> Iterator[Mutation]:
    return (Mutation(text, kind, make) for kind, some in ways.items() for text, make in some.items())  # type: ignore


def _booleans(value: bool, hint: Any) -> Iterator[Mutation]:
    return _listed(same={"as numpy's": lambda: np.bool_(value)}, open={"negated": lambda: not value})


def _numbers(value: float, hint: Any) -> Iterator[Mutation]:
    whole = isinstance(value, int)
    yield from _listed(same={
        "as numpy's": lambda: np.int64(value) if whole else np.float64(value), "as an array": lambda: np.array(value),
        "as a tensor": lambda: torch.tensor(value, dtype=torch.int64 if whole else torch.float64),
        "as a fraction": lambda: Fraction(value), **({"as a float": lambda: float(value)} if whole else {}),
    }, bad={"nan": lambda: float("nan"), "numpy's nan": lambda: np.float32("nan")})  # fmt: skip
    if whole:
        yield Mutation("and a half", "open" if _is_allowed(0.5, hint) else "bad", lambda: value + 0.5)
    yield Mutation("as a string", "open" if _is_allowed("3", hint) else "bad", lambda: str(value))
    for number in (0, -1, -value, 2**31, 2**63, 2**64, 10**30, 10**400, float("inf"), -float("inf"), 1e300, 5e-324):
        if number != value:
            kind: Kind = "open" if not whole or _is_allowed(number, hint) else "bad"
            text = f"{'huge: ' * (abs(number) >= 2**31)}{number if abs(number) < 10**300 else ''}"
            yield Mutation(text, kind, lambda number=number: number)


def _strings(value: str, hint: Any) -> Iterator[Mutation]:
    literals = [each for part in parts_of(hint) if get_origin(part) is Literal for each in get_args(part)]
    for text, other in {
        "in capitals": value.upper(), "with a space": f"{value} ", "cut": value[:-1], "in Cyrillic": "ж" * 5,
        "very long": "x" * 100_000, "with a zero": f"{value}\0", "a script": "<script>ran()</script>",
        "half of a surrogate pair": "\ud800", "a format": "{0.__class__} %s %(x)d",
    }.items():  # fmt: skip
        if other != value:
            kind: Kind = "bad" if literals and other not in literals else "open"
            yield Mutation(f"a string {text}", kind, lambda other=other: other)
    yield Mutation("as numpy's", "same", lambda: np.str_(value))


def _tensors(value: Tensor, hint: Any) -> Iterator[Mutation]:
    yield from _listed(same={
        "not contiguous": lambda: torch.stack([value, value], -1)[..., 0], "as lists": value.tolist,
        "as an array": lambda: value.detach().numpy(),
    }, bad={
        "on meta": lambda: value.to("meta"), "complex": lambda: value.to(torch.complex64) + 1j
    }, open={
        "sparse": value.to_sparse, "one axis more": lambda: value[None],
        "empty": lambda: value[:0] if value.ndim else value, "one axis less": lambda: value[0] if value.ndim else value,
        "one more in the last axis": lambda: torch.cat([value, value[..., :1]], -1),
        "expanded to 2^40 entries": lambda: torch.zeros(1).to(value.dtype).expand(2**40),
        "negative": lambda: ~value if value.dtype == torch.bool else -value,
    })  # fmt: skip
    if value.is_floating_point():
        yield from _listed(same={"with a gradient": lambda: value.clone().requires_grad_()}, bad={
            "with a NaN": lambda: _with(value, float("nan")),
        }, open={
            "with an infinity": lambda: _with(value, float("inf")), "very large": lambda: value * 1e30,
            "very small": lambda: value * 1e-30, "zeros": lambda: value * 0, "in half precision": value.half,
            "in single precision": value.float, "as ints": value.long,
        })  # fmt: skip
    else:
        yield from _listed(open={"as floats": value.float, "as bytes": lambda: value.to(torch.uint8)})
    if value.dtype == torch.int64:
        yield Mutation("very large", "open", lambda: value + 10**9)


def _with(value: Tensor, number: float) -> Tensor:
    changed = value.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[-1] = number
    return changed


def _prompts(value: Prompts, hint: Any) -> Iterator[Mutation]:
    def changed(xs: Callable[[Tensor], Tensor], ys: Callable[[Tensor], Tensor] | None = None) -> Callable[[], Prompts]:
        return lambda: Prompts(xs(value.xs), (ys or xs)(value.ys))

    return _listed(same={
        "not contiguous": changed(lambda t: torch.stack([t, t], -1)[..., 0]),
        "with a gradient": changed(lambda t: t.clone().requires_grad_()),
    }, bad={
        "with a NaN": changed(lambda t: _with(t, float("nan"))), "on meta": changed(lambda t: t.to("meta")),
        "only their inputs": lambda: value.xs,
    }, open={
        "none of them": lambda: value[:0], "one of them": lambda: value[:1], "no context": lambda: value.prefix(0),
        "in half precision": changed(lambda t: t.half()), "in single precision": changed(lambda t: t.float()),
        "zeros": changed(lambda t: 0 * t), "very large": changed(lambda t: 1e30 * t),
        "wider": changed(lambda t: torch.cat([t, t], -1), lambda t: t),
        "with two targets": changed(lambda t: t, lambda t: torch.cat([t, t], -1)),
        "longer": changed(lambda t: torch.cat([t, t], 1)),
    })  # fmt: skip


def _sequences_of_tokens(value: TokenSequences, hint: Any) -> Iterator[Mutation]:
    return _listed(open={
        "beyond the vocabulary": lambda: TokenSequences(value.ids + 10**6, value.predictable),
        "none of them": lambda: value[:0], "only their ids": lambda: value.ids,
    })  # fmt: skip


def _models(value: torch.nn.Module, hint: Any) -> Iterator[Mutation]:
    def spoil(model: torch.nn.Module) -> torch.nn.Module:
        for weight in model.parameters():
            weight.data.fill_(float("nan"))
        return model

    changes: dict[str, Callable[[Any], Any]] = {
        "with weights of NaN": spoil, "in half precision": lambda model: model.half(), "a plain module":
        lambda model: torch.nn.Linear(2, 1), "in single precision": lambda model: model.float(),
        "on meta": lambda model: model.to("meta"), "in training mode": lambda model: model.train(),
    }  # fmt: skip
    for text, change in changes.items():
        yield Mutation(text, "open", lambda change=change: change(copy.deepcopy(value)))


def _paths(value: Path, hint: Any) -> Iterator[Mutation]:
    for path in ("/nonexistent/folder/x", "/dev/null", "a\nb", "\0", "", "/proc/self/mem"):
        yield Mutation(f"the path {path!r}", "open", lambda path=path: Path(path))


def _collections(value: Any, hint: Any) -> Iterator[Mutation]:
    """Changes of a collection, and of its first element or of two of its values."""
    element = next((args[-1] if get_origin(part) is not tuple else args[0] for part in parts_of(hint)
                    if (args := get_args(part))), Any)  # fmt: skip
    yield Mutation("empty", "open", lambda: type(value)())
    if isinstance(value, Mapping):
        items = list(value.items())[:2]
        yield Mutation("with another key", "open", lambda: {**value, 3: None})
        yield Mutation("with a script as a key", "open", lambda: {"<script>": items[0][1] if items else None})
    else:
        items, other = list(enumerate(value))[:1], list if isinstance(value, tuple) else tuple
        yield from _listed(same={"as the other kind of sequence": lambda: other(value)}, open={
            "nested": lambda: type(value)([value]), "huge": lambda: type(value)(list(value) * 10_000),
        })  # fmt: skip
    for key, each in items:
        for mutation in mutations(each, element):
            make = lambda key=key, mutation=mutation: _replaced(value, key, mutation.make())  # noqa: E731
            yield Mutation(f"[{key!r}] {mutation.text}", mutation.kind, make)


def _replaced(value: Any, key: Any, new: Any) -> Any:
    return {**value, key: new} if isinstance(value, Mapping) else type(value)([new, *value[1:]])


def _fields(value: Any) -> Iterator[Mutation]:
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        if field.init and isinstance(old, int | float | Tensor | str) and not isinstance(old, bool):
            for mutation in _of_its_kind(old, Any):
                make = lambda name=field.name, make=mutation.make: dataclasses.replace(value, **{name: make()})  # noqa: E731
                if mutation.kind != "same":
                    yield Mutation(f".{field.name} {mutation.text}", "open", make)


WAYS: dict[Any, Callable[[Any, Any], Iterator[Mutation]]] = {
    bool: _booleans, (int, float): _numbers, str: _strings, Tensor: _tensors, Prompts: _prompts,
    TokenSequences: _sequences_of_tokens, torch.nn.Module: _models, Path: _paths, (Mapping, list, tuple): _collections,
}  # fmt: skip
"""Changes by type; the first type that fits counts."""
