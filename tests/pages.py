"""Pages of markdown whose code is run: blocks of a page in order, in one namespace, and what they print compared."""

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^ *```$", flags=re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


class Fence(NamedTuple):
    """A fenced block: its language, what stands after that, its lines, and the number of the first."""

    language: str
    title: str
    content: str
    line: int


@dataclass(frozen=True)
class Block:
    """A block of code, and the output that the page shows after it, if any.

    An output with a title is of a model that the page trains: its last digits, and what is nearly as near, are another
    machine's own.
    """

    code: str
    output: str | None
    exact: bool
    line: int


def fences(path: Path) -> list[Fence]:
    """Every fenced block of a page, without its indentation."""
    text = path.read_text(encoding="utf-8")
    return [
        Fence(
            match[2],
            match[3].strip(),
            re.sub(rf"^{match[1]}", "", match[4], flags=re.MULTILINE),
            text.count("\n", 0, match.start()) + 2,
        )
        for match in FENCE.finditer(text)
    ]


def blocks(path: Path) -> list[Block]:
    """The Python of a page; a block of text right after it is what it prints."""
    every = fences(path)
    after = [*every, Fence("", "", "", 0)][1:]
    return [
        Block(
            fence.content, following.content if following.language == "text" else None, not following.title, fence.line
        )
        for fence, following in zip(every, after, strict=True)
        if fence.language == "python"
    ]


def run(page: list[Block], name: str) -> dict:
    """Run a page's blocks in the current folder; returns their namespace.

    Raises:
        AssertionError: a block prints something else than the page says: other words, or numbers that differ by more
            than a thousandth.
    """
    namespace: dict = {"__name__": "page"}
    for block in page:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)
        if block.output is not None:
            (compare if block.exact else compare_roughly)(printed.getvalue(), block.output)
    return namespace


def compare(shown: str, said: str) -> None:
    """Assert that a text is what a page says, up to a thousandth of each number with a decimal point."""
    assert words(shown) == words(said), f"prints\n{shown}\nsaid\n{said}"
    for got, expected in zip(numbers(shown), numbers(said), strict=True):
        assert abs(got - expected) <= 1e-3 * abs(expected) + 2e-6, (
            f"{got} for {expected}; prints\n{shown}\nsaid\n{said}"
        )


def compare_roughly(shown: str, said: str) -> None:
    """Assert that as many lines are printed, each with as many numbers, and that these are alike in the mean."""
    assert len(words(shown)) == len(words(said)), f"prints\n{shown}\nsaid\n{said}"
    for line, expected in zip(words(shown), words(said), strict=True):
        assert line.count("#") == expected.count("#"), f"prints\n{line}\nsaid\n{expected}"
    got, expected = (sum(map(abs, numbers(text))) for text in (shown, said))
    assert 0.5 * expected <= got <= 2 * expected, f"prints\n{shown}\nsaid\n{said}"


def words(text: str) -> list[str]:
    """Lines, with a mark for each number that has a decimal point; columns may be wider or narrower."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.strip().splitlines()]


def numbers(text: str) -> list[float]:
    """The numbers with a decimal point."""
    return [float(number) for number in NUMBER.findall(text)]
