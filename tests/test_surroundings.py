"""Only the arguments decide: results depend on no global state of torch, NumPy or Python, and change none of it."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import os
import pkgutil
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io
import pytest
import torch
from torch import Tensor

import mechicl
from mechicl.base.memory import Budget
from tests.every_call import CALLS, FITTED, NOT_CALLED, ORDERED, call_names, world
from tests.pages import ROOT

OF_PROMPTS = [name for name, call in CALLS.items() if "prompts" in call_names(call) and name not in ORDERED]

ROUNDED = {
    "models.lstm.run_with_cache": "torch's LSTM has another route without gradients",
    "analysis.score_edges": "several threads split its sums",
}
"""Calls whose results are equal up to rounding."""


# ---- surroundings ----
@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def _other_seeds() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002
        torch.manual_seed(7)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002


@contextlib.contextmanager
def _settings_of_torch() -> Iterator[None]:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(3 - min(before[0], 2))
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before[1])
        torch.set_num_threads(before[0])


@contextlib.contextmanager
def _settings_of_others() -> Iterator[None]:
    with warnings.catch_warnings(), np.errstate(all="raise"), pd.option_context("display.precision", 1):
        warnings.simplefilter("error")
        template, plotly.io.templates.default = plotly.io.templates.default, "ggplot2"
        try:
            yield
        finally:
            plotly.io.templates.default = template


SURROUNDINGS: dict[str, list[Callable[[], Any]]] = {
    "float16": [lambda: _default_dtype(torch.float16)],
    "float64": [lambda: _default_dtype(torch.float64)],
    "meta": [lambda: _default_device("meta")],
    "a block on meta": [lambda: torch.device("meta")],
    "no gradients": [torch.no_grad],
    "inference mode": [torch.inference_mode],
    "other seeds": [_other_seeds],
    "settings": [_settings_of_torch, _settings_of_others],
}
SURROUNDINGS["all"] = [
    lambda: _default_dtype(torch.float64), lambda: _default_device("meta"), torch.inference_mode, _other_seeds,
    _settings_of_torch, _settings_of_others,
]  # fmt: skip


@contextlib.contextmanager
def surrounded(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for make in SURROUNDINGS[name]:
            stack.enter_context(make())
        yield


def state() -> dict[str, Any]:
    """Everything global that a call must leave as it finds it."""
    return {
        "default dtype": torch.get_default_dtype(), "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(), "inference mode": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(), "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "numpy's generator": np.random.get_state()[1].tobytes(),  # noqa: NPY002 # pyright: ignore
        "random": random.getstate(), "numpy's errors": np.geterr(), "warnings": list(warnings.filters),
        "template": plotly.io.templates.default, "pandas": pd.get_option("display.precision"), "folder": os.getcwd(),
        "environment": dict(os.environ),
    }  # fmt: skip


# ---- results ----
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
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            yield from parts(each, f"{path}[{i}]")
    elif isinstance(value, pd.DataFrame):
        yield path, value.to_csv()
    elif hasattr(value, "cache_dict"):
        yield from parts(value.cache_dict, path)
    elif isinstance(value, Tensor | np.ndarray | int | float | str | torch.dtype | torch.device | None):
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
        if not _same(first.get(path, "missing"), second.get(path, "missing"))
    ]


def _same(a: Any, b: Any) -> bool:
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


@functools.cache
def w() -> SimpleNamespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return world()


@functools.cache
def expected(name: str) -> tuple[Any, bool]:
    """The result of a call, and whether it splits its work into batches by `settings.memory`."""
    with pytest.MonkeyPatch.context() as patch:
        used, rows = [], Budget.rows
        patch.setattr(Budget, "rows", lambda *args, **options: used.append(1) or rows(*args, **options))
        made, before = w(), state()
        result = CALLS[name](made)
        assert set(changed := changes(before)) <= {"warnings"}, changed  # modules that it imports may add filters
    return result, bool(used)


def changes(before: dict[str, Any]) -> list[str]:
    return [key for key, value in state().items() if value != before[key]]


def compare(name: str, surroundings: str) -> None:
    plain, _ = expected(name)
    with surrounded(surroundings):
        before = state()
        found = CALLS[name](w())
        changed = changes(before)
    assert not changed, changed
    compared = nearly_differing if name in ROUNDED else differing
    assert not (wrong := compared(plain, found)), wrong


@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_global_state(name):
    compare(name, "all")


@pytest.mark.slow
@pytest.mark.parametrize("surroundings", [each for each in SURROUNDINGS if each != "all"])
@pytest.mark.parametrize("name", CALLS)
def test_results_depend_on_no_part_of_the_global_state(name, surroundings):
    compare(name, surroundings)


@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_batches(name, monkeypatch):
    plain, has_batches = expected(name)
    if has_batches and name != "learners.prompt_batches":
        rows = Budget.rows
        monkeypatch.setattr(Budget, "rows", lambda *args, **options: min(rows(*args, **options), 3))
        assert not nearly_differing(plain, CALLS[name](w()))


@pytest.mark.parametrize("name", OF_PROMPTS)
def test_results_do_not_depend_on_the_order_of_prompts_or_on_other_prompts(name):
    """A part of the prompts in another order, or all of them where the result of a prompt depends on the others."""
    whole = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    rows = whole if name in FITTED else torch.tensor([7, 2, 4, 11, 0])
    assert not nearly_differing(expected(name)[0], CALLS[name](with_prompts(rows)), rows, 12)


def with_prompts(rows: Tensor) -> SimpleNamespace:
    """The world of the calls with some of its prompts, or in another order."""
    return SimpleNamespace(
        **{**vars(w()), **{name: getattr(w(), name)[rows] for name in ("prompts", "others", "sources")}}
    )


@pytest.mark.slow
def test_results_do_not_depend_on_the_process():
    """In other processes: sets in another order, ASCII as the encoding of files, two threads from the start."""
    others = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "2"}
    outputs = []
    for some in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2", **others}):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | some
        command = [sys.executable, "-m", "tests.test_surroundings"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines())
    assert len(outputs[0]) == len(CALLS) - len(ROUNDED)
    assert not set(outputs[0]) ^ set(outputs[1])


def digest(name: str) -> str:
    """The name of a call and a digest of everything in its result."""
    found = hashlib.sha256()
    for path, value in parts(CALLS[name](w())):
        is_array = isinstance(value, Tensor | np.ndarray)
        found.update(path.encode())
        found.update(torch.as_tensor(value).detach().numpy().tobytes() if is_array else repr(value).encode())
    return f"{name} {found.hexdigest()}"


def test_every_public_function_is_called_or_exempt():
    names = set()
    for package in (each.name for each in pkgutil.walk_packages(mechicl.__path__, "mechicl.") if each.ispkg):
        if not package.startswith("mechicl.cli"):
            module = importlib.import_module(package)
            names |= {f"{package}.{name}".removeprefix("mechicl.") for name in getattr(module, "__all__", ())}
    # a name that two packages export is called once
    called = {name.rsplit(".", 1)[-1] for name in CALLS}
    missing = {name for name in names if name.rsplit(".", 1)[-1] not in called | NOT_CALLED}
    assert not missing, missing


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(*(digest(name) for name in CALLS if name not in ROUNDED), sep="\n")
