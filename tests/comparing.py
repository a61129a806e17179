"""Results of any kind compared, entry by entry: in every bit, or up to rounding."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from torch import Tensor
from transformer_lens import ActivationCache


def parts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of everything in a result that can be compared."""
    if isinstance(value, torch.nn.Module):
        yield from parts(value.state_dict(), path)
    elif isinstance(value, go.Figure):
        yield path, json.loads(value.to_json() or "")
    elif isinstance(value, Mapping):
        for key in value:
            if "seconds" not in str(key) and "time" not in str(key):
                yield from parts(value[key], f"{path}[{key}]")
    elif isinstance(value, np.ndarray) and value.dtype.kind in "OUS":
        yield from parts(value.tolist(), path)
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            yield from parts(each, f"{path}[{i}]")
    elif isinstance(value, pd.DataFrame):
        yield path, value.to_csv()
    elif isinstance(value, ActivationCache):
        yield from parts(value.cache_dict, path)
    elif isinstance(value, Tensor | np.ndarray | np.generic | int | float | str | torch.dtype | torch.device | None):
        yield path, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name), f"{path}.{field.name}")
    elif type(value).__module__.startswith("mechicl."):
        yield from parts(dict(vars(value)), path)


def differing(a: Any, b: Any) -> list[str]:
    """List where two results differ in any bit, dtype or device."""
    first, second = dict(parts(a)), dict(parts(b))
    assert first, f"nothing can be compared in {type(a).__name__}"
    return [
        f"{path or 'the result'}: {first.get(path, 'missing')} became {second.get(path, 'missing')}"[:300]
        for path in {**first, **second}
        if not same(first.get(path, "missing"), second.get(path, "missing"))
    ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.dtype == b.dtype and a.device == b.device and a.shape == b.shape
        return alike and torch.equal(a.detach().nan_to_num(7), b.detach().nan_to_num(7))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return type(a) is type(b) and bool(a == b or a != a)


def nearly_differing(expected: Any, found: Any, rows: Tensor | None = None, n_all: int = 0) -> list[str]:
    """List where floats of results differ by more than rounding; `rows` are the prompts of the second result."""
    first, second, wrong = dict(parts(expected)), dict(parts(found)), []
    for path in {**first, **second}:
        a, b = first.get(path), second.get(path)
        if rows is not None and isinstance(a, Tensor | np.ndarray) and list(a.shape).count(n_all) == 1:
            a = torch.as_tensor(a).detach().index_select(list(a.shape).index(n_all), rows)
        elif len(rows if rows is not None else ()) != n_all:
            continue  # a number of the whole, such as a mean, for a part of the prompts
        if isinstance(a, Tensor | np.ndarray | float) and isinstance(b, Tensor | np.ndarray | float):
            a, b = (torch.as_tensor(each).detach().double() for each in (a, b))
            close = a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        else:
            close = isinstance(a, str | Mapping) or a == b
        if not close:
            wrong.append(f"{path or 'the result'}: {a} became {b}"[:600])
    return wrong


def has_nan(value: Any) -> bool:
    """Tell whether a nested value contains NaN."""
    for _, part in parts(value):
        is_float = isinstance(part, float) or (isinstance(part, np.ndarray | np.generic) and part.dtype.kind in "fc")
        if is_float and np.isnan(part).any():
            return True
        if isinstance(part, Tensor) and not (part.is_meta or part.is_sparse) and part.isnan().any():
            return True
    return False
