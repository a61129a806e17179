"""The README's tour is code that runs and prints what it says."""

import contextlib
import importlib
import io
import re
from pathlib import Path

import pytest

from mechicl.checkpoints import available

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+", text)]


@pytest.mark.parametrize("index", [0, 1, 2, 3, 4])
def test_a_tour_prints_what_the_readme_says(index):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(blocks("python")[index], "README.md", "exec"), {})
    shown, said = printed.getvalue(), blocks("text")[index]
    assert [line.split(":")[0] for line in shown.splitlines()] == [line.split(":")[0] for line in said.splitlines()]
    for got, expected in zip(numbers(shown), numbers(said), strict=True):
        assert abs(got - expected) <= 1e-3 * abs(expected) + 2e-6, (shown, said)


def test_tours_are_short():
    assert all(len(tour.splitlines()) <= 30 for tour in blocks("python"))


def test_names_are_public():
    for room, name in re.findall(r"\b(analysis|algorithms|constructions|viz)\.(\w+)", README):
        assert hasattr(importlib.import_module(f"mechicl.{room}"), name), f"{room}.{name}"


def test_every_checkpoint_has_a_row():
    for name in available():
        assert f"| `{name}` |" in README
