"""The base of every result, with intervals, tables and files of per-prompt tensors; and lists of the largest values."""

import dataclasses
import html
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from mechicl.base.arguments import check_fields, checked
from mechicl.base.files import read_json, write_json
from mechicl.base.tensor_files import read_tensors, write_tensors
from mechicl.base.warning import warn
from mechicl.statistics.intervals import UNBOUNDED, Interval, interval, is_share
from mechicl.statistics.storage import decode, encode, storable

R = TypeVar("R")  # a kind of result: checks at run time find no bound that is written before its class
LINES = 12  # largest number of entries that are printed one by one
NOT_SAMPLES = {"samples": False}
"""Metadata of fields with tensors that are not samples, such as a vector."""
COSINE, SHARE = {"range": (-1.0, 1.0)}, {"range": (0.0, 1.0)}
"""Metadata of fields whose values lie in a range; intervals of their means are cut to it, and binomial for 0 or 1."""


class Result:
    """The base of all results: intervals, tables and files.

    A subclass is a frozen dataclass. Its tensors, alone or in dictionaries by name, have samples (prompts or seeds) on
    the last axis; leading axes (layers, scales, ...) index separate quantities, named by the annotation: `Float[Tensor,
    "layer head prompt"]`. A field called `layers` (or `steps`, `rows`, ...) contains an axis' values. Fields with
    `metadata={"stored": False}` (models, learners) are not written to files, and have their defaults after loading.

    Example:
        >>> alignment = align(model, learner, prompts)
        >>> print(alignment)                                    # each quantity with its 95% interval
        >>> alignment.save("alignment")
        >>> load_result("alignment").intervals()["sensitivity_cosine"]
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Check the arguments of the subclass's public methods, and let files contain its objects."""
        super().__init_subclass__(**options)
        for name, member in list(vars(cls).items()):
            public = name[0] != "_" and inspect.isfunction(member) and len(inspect.signature(member).parameters) > 1
            if public and not getattr(member, "is_checked", False):
                setattr(cls, name, checked(member))
        storable(cls)

    def __post_init__(self) -> None:
        check_fields(self, undefined=True)

    def samples(self) -> dict[str, Tensor]:
        """Return the tensors with samples (prompts or seeds) on their last axis, by name.

        An entry of a dictionary has its key as its name, or "FIELD.KEY" if another quantity has that name too.
        """
        return {name: tensor for name, (_, tensor) in self._quantities().items() if tensor is not None}

    def _quantities(self) -> dict[str, tuple[dataclasses.Field[Any], Tensor | None]]:
        """Return fields and entries of dictionaries by name: the field and its samples, or None if it has none."""
        found: list[tuple[str, dataclasses.Field[Any], Tensor | None]] = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            for name, tensor in [*(value.items() if isinstance(value, dict) else ()), (field.name, value)]:
                if not field.metadata.get("samples", True) or not isinstance(tensor, Tensor) or tensor.is_complex():
                    tensor = None
                elif not tensor.ndim:
                    tensor = tensor[None]  # a single number is one sample
                found.append((str(name), field, tensor))
        times = Counter([*self._ready(), *(name for name, _, tensor in found if tensor is not None)])
        out: dict[str, tuple[dataclasses.Field[Any], Tensor | None]] = {}
        for name, field, tensor in sorted(found, key=lambda each: each[2] is None):
            shared = tensor is not None and times[name] > 1 and name != field.name
            out.setdefault(f"{field.name}.{name}" if shared else name, (field, tensor))
        return out

    def axis_names(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each tensor's leading axes, such as ("layer", "head"), or `axis_0`, ..."""
        out, known = {}, self._quantities()
        for name, tensor in self.samples().items():
            names = _dimensions(known[name][0].type) if name in known else ()
            out[name] = names[:-1] if len(names) == tensor.ndim else tuple(f"axis_{i}" for i in range(tensor.ndim - 1))
        return out

    @checked
    def intervals(self, level: float = 0.95) -> dict[str, Interval]:
        """Return the mean and confidence interval of each quantity over its samples (prompts or seeds), by name.

        Leading axes are averaged first: the entries of one sample are not independent, so they do not count as more
        samples. `to_dataframe()`, or `interval(result.field[0])`, has the intervals of single entries. A field that is
        already an interval is returned unchanged, whatever the level.
        """
        means = {name: self._interval(name, _sample_means(value), level) for name, value in self.samples().items()}
        return self._ready() | means

    @checked
    def to_dataframe(self, level: float = 0.95) -> Any:
        """Return a table of the measurements, a pandas DataFrame.

        Returns:
            If all quantities have the same leading axes, one row for each of their entries: the columns of the axes,
            and for each quantity its mean over samples, "NAME_low" and "NAME_high". Otherwise one row a sample and one
            column a quantity, or a column an entry, `name[0,1]`; NaN where a quantity has fewer samples than another.
        """
        import pandas as pd  # takes half a second

        samples, axes = self.samples(), set(self.axis_names().values())
        shapes = {tensor.shape[:-1] for tensor in samples.values()}
        if len(axes) != 1 or len(shapes) != 1 or not (names := axes.pop()):
            return pd.DataFrame({name: pd.Series(entries) for name, entries in self._columns()})
        shape = shapes.pop()
        labels = [self.axis_values(name, size) for name, size in zip(names, shape, strict=True)]
        rows = []
        for place in np.ndindex(*shape):
            row: dict[str, Any] = {name: label[i] for name, label, i in zip(names, labels, place, strict=True)}
            for name, tensor in samples.items():
                row |= self._interval(name, tensor[place], level).columns(name, f"{name}_")
            rows.append(row)
        return pd.DataFrame(rows, columns=None if rows else [*names, *samples])

    @checked
    def save(self, path: str | Path) -> Path:
        """Write the result as a folder with `result.json` and `tensors.safetensors`; return its path.

        Raises:
            TypeError: a field whose value cannot be stored.
        """
        folder = Path(path)
        tensors: dict[str, Tensor] = {}
        data = encode(self, "", tensors)
        folder.mkdir(parents=True, exist_ok=True)
        if tensors:  # a file without any could not be read again
            write_tensors(folder / "tensors.safetensors", tensors)
        write_json(folder / "result.json", data)
        return folder

    @classmethod
    @checked
    def load(cls: type[R], path: str | Path) -> R:
        """Read a saved result of this class from its folder; `load_result` reads one of any class.

        Raises:
            FileNotFoundError: no result there.
            ValueError: a damaged file, or a result of another kind.
        """
        result = load_result(path)
        if not isinstance(result, cls):
            raise ValueError(f"{path} is a {type(result).__name__}, not a {cls.__name__}: see load_result()")
        return result

    def __str__(self) -> str:
        lines = self._lines()
        width = max((len(name) for name, _ in lines), default=0)
        return "\n".join([type(self).__name__, *(f"  {name:<{width}}  {value}" for name, value in lines)])

    def _repr_html_(self) -> str:
        cells = "".join(f"<tr><th>{html.escape(n)}</th><td>{html.escape(v)}</td></tr>" for n, v in self._lines())
        return f"<table><caption>{type(self).__name__}</caption>{cells}</table>"

    def _lines(self) -> list[tuple[str, str]]:
        """Return the printed lines: each entry with its interval if there are few, else the mean of all entries."""
        lines = [(name, str(value)) for name, value in self._ready().items()]
        for name, tensor in self.samples().items():
            axes = list(zip(self.axis_names()[name], tensor.shape, strict=False))
            if tensor.ndim == 1 or math.prod(tensor.shape[:-1]) > LINES:
                over = " x ".join(f"{axis} ({n})" for axis, n in axes)
                mean = str(self._interval(name, _sample_means(tensor)))
                lines.append((name, f"{mean}  (mean over {over})" if over else mean))
                continue
            labels = [self.axis_values(axis, n) for axis, n in axes]
            for place in np.ndindex(*tensor.shape[:-1]):
                label = ", ".join(str(values[i]) for values, i in zip(labels, place, strict=True))
                lines.append((f"{name}[{label}]", str(self._interval(name, tensor[place]))))
        return lines

    def _interval(self, name: str, samples: Tensor, level: float = 0.95) -> Interval:
        """Return the interval of a field's mean, cut to the field's range if it declares one.

        Fields that do not declare that they are shares are shares if they have both of the values 0 and 1 and no other.
        """
        known = self._quantities()
        limits = known[name][0].metadata.get("range", UNBOUNDED) if name in known else UNBOUNDED
        values = self.samples().get(name)
        if limits == SHARE["range"] or values is None:
            return interval(samples, level, within=limits)
        counted = not values.is_floating_point() or (values.numel() and values.min() < values.max())
        return interval(samples, level, within=None if counted and is_share(values) else UNBOUNDED).within(*limits)

    def _ready(self) -> dict[str, Interval]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if isinstance(value, Interval)}

    @checked
    def axis_values(self, axis: str, size: int) -> list[Any]:
        """Return the values along an axis, such as "layer": those of the field `layers`, or `size` numbers from 0."""
        values = getattr(self, f"{axis}s", None)
        if isinstance(values, Tensor):
            values = values.tolist()
        return list(values) if isinstance(values, list | tuple) and len(values) == size else list(range(size))

    def _columns(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, value in self.samples().items():
            entries = value.detach().cpu()
            if entries.dtype == torch.bfloat16:  # numpy has no such type
                entries = entries.float()
            for place in np.ndindex(*entries.shape[:-1]):
                yield f"{name}[{','.join(map(str, place))}]" if place else name, entries[place].numpy()


@checked
def load_result(path: str | Path) -> Any:
    """Read any result that was saved with `Result.save`, whatever its class.

    Returns:
        The result, an object of the class that was saved; fields that are not stored (models, learners) have their
        defaults, or None.

    Raises:
        FileNotFoundError: no result there.
        ValueError: a damaged file, or a kind of result that this version does not know.

    Example:
        >>> load_result(align(model, learner, prompts).save("alignment"))
    """
    folder = Path(path)
    data = read_json(folder / "result.json")
    file = folder / "tensors.safetensors"
    tensors = read_tensors(file)[0] if file.exists() else {}
    try:
        return decode(data, tensors)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder} is not a result that can be read: {error!r}") from error


def index_of(name: str, value: Any, values: Iterable[Any]) -> int:
    """Return the position of a value among those of an axis."""
    known = list(values)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; got {value!r}")
    return known.index(value)


def _sample_means(value: Tensor) -> Tensor:
    value = value.detach().cpu().double()
    while value.ndim > 1:
        value = value.mean(0)
    return value


def _dimensions(annotation: Any) -> tuple[str, ...]:
    """Return the axis names of a jaxtyping annotation, or of a dictionary's values, or of one `| None`; else none."""
    if get_origin(annotation) is dict:
        annotation = get_args(annotation)[1]
    if isinstance(annotation, UnionType):
        annotation = next((kind for kind in get_args(annotation) if hasattr(kind, "dim_str")), None)
    names = str(getattr(annotation, "dim_str", "")).split()
    return () if any(name.startswith(("*", ".")) for name in names) else tuple(names)


def largest(values: Any, n: int, warn_of: str = "") -> tuple[list[int], str]:
    """Return the indices of the `n` largest entries, largest first and NaN last, and a note on ties with the last one.

    The note is empty unless entries that are left out equal the last one of the list. Equal entries keep their order.
    With the name of the entries in `warn_of`, the note is also a warning.
    """
    values = values if isinstance(values, torch.Tensor) else torch.tensor(values)
    flat = values.detach().cpu().double().flatten().nan_to_num(-math.inf, math.inf, -math.inf)
    order = flat.argsort(descending=True, stable=True)
    tied = int((flat[order[n:]] == flat[order[n - 1]]).sum()) if 0 < n < len(flat) else 0
    note = f"{tied} more tie with the last of these {n}" if tied else ""
    if note and warn_of:
        warn(f"the strongest {warn_of} are cut inside a tie, and the first in order are taken: {note}")
    return order[:n].tolist(), note
