"""Code in markdown pages: run block after block in one namespace, and compared with the printed output."""

import contextlib
import io
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
SMOLLM2 = Path.home() / ".cache" / "mechicl" / "smollm2"
NEEDS_SMOLLM2 = pytest.mark.skipif(not SMOLLM2.exists(), reason="SmolLM2 is not there: make lm fetches it (93 MB)")
FENCE = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^ *```$", flags=re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


class Fence(NamedTuple):
    """A fenced block: its language, the title after it, its lines, and the number of the first."""

    language: str
    title: str
    content: str
    line: int


@dataclass(frozen=True)
class Block:
    """A block of code, and the output that the page shows after it, if any.

    An output with a title depends on training, so that its digits differ between machines.
    """

    code: str
    output: str | None
    exact: bool
    line: int


def fences(path: Path) -> list[Fence]:
    """Return every fenced block of a page, without its indentation."""
    text, found = path.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        content = re.sub(rf"^{match[1]}", "", match[4], flags=re.MULTILINE)
        found.append(Fence(match[2], match[3].strip(), content, text.count("\n", 0, match.start()) + 2))
    return found


def blocks(path: Path) -> list[Block]:
    """Return the Python of a page; a block of text right after it is its output."""
    every = [*fences(path), Fence("", "", "", 0)]
    return [
        Block(code.content, after.content if after.language == "text" else None, not after.title, code.line)
        for code, after in itertools.pairwise(every)
        if code.language == "python"
    ]


def run(page: list[Block], name: str) -> dict:
    """Run a page's blocks in the current folder, compare their output, and return their namespace."""
    namespace: dict = {"__name__": "page"}
    for block in page:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)
        if block.output is not None:
            (compare if block.exact else compare_roughly)(printed.getvalue(), block.output)
    return namespace


def makefile_targets() -> set[str]:
    """The targets that `make help` lists."""
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def compare(printed: str, page: str) -> None:
    """Assert that printed text equals a page's, up to a thousandth of each number with a decimal point."""
    assert words(printed) == words(page), f"printed\n{printed}\nthe page has\n{page}"
    for got, expected in zip(numbers(printed), numbers(page), strict=True):
        assert abs(got - expected) <= 1e-3 * abs(expected) + 2e-6, f"{got} for {expected} in\n{printed}"


def compare_roughly(printed: str, page: str) -> None:
    """Assert that printed text has the page's lines and numbers per line, and numbers of similar size."""
    counts = [[line.count("#") for line in words(text)] for text in (printed, page)]
    assert counts[0] == counts[1], f"printed\n{printed}\nthe page has\n{page}"
    got, expected = (sum(map(abs, numbers(text))) for text in (printed, page))
    assert 0.5 * expected <= got <= 2 * expected, f"printed\n{printed}\nthe page has\n{page}"


def words(text: str) -> list[str]:
    """Return lines, with a mark for each number that has a decimal point, and single spaces."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.strip().splitlines()]


def numbers(text: str) -> list[float]:
    """Return the numbers with a decimal point."""
    return [float(number) for number in NUMBER.findall(text)]
