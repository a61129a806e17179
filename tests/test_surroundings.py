"""Only the arguments decide: results depend on no global state of torch, NumPy or Python, and change none of it."""

import contextlib
import functools
import hashlib
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import plotly.io
import pytest
import torch
from torch import Tensor

from mechicl.base.memory import Budget
from tests.comparing import differing, nearly_differing, parts
from tests.every_call import CALLS, FITTED, NOT_CALLED, ORDERED, call_names, world
from tests.pages import ROOT
from tests.public import exported

OF_PROMPTS = [name for name, call in CALLS.items() if "prompts" in call_names(call) and name not in ORDERED]

ROUNDED = {
    "models.lstm.run_with_cache": "torch's LSTM has another route without gradients",
    "analysis.score_edges": "several threads split its sums",
    "analysis.connect_modes": "several threads split the sums of bending",
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
    # not the precision of products, which calls respect: "medium" changes sums on processors with bfloat16
    before = torch.get_num_threads()
    torch.set_num_threads(3 - min(before, 2))
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)


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
    # a name that two packages export is called once
    called = {name.rsplit(".", 1)[-1] for name in CALLS}
    missing = {name for name, _ in exported() if name.rsplit(".", 1)[-1] not in called | NOT_CALLED}
    assert not missing, missing


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(*(digest(name) for name in CALLS if name not in ROUNDED), sep="\n")
