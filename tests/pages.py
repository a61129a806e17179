"""Pages of markdown whose code is run: blocks of a page in order, in one namespace, and what they print compared."""

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^ *```$", flags=re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A block of code, and the output that the page shows after it, if any."""

    code: str
    output: str | None
    line: int


def fences(path: Path) -> list[tuple[str, str, int]]:
    """Language, content and first line of every fenced block, without its indentation."""
    text = path.read_text(encoding="utf-8")
    return [
        (match[2], re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE), text.count("\n", 0, match.start()) + 2)
        for match in FENCE.finditer(text)
    ]


def blocks(path: Path) -> list[Block]:
    """The Python of a page; a block of text right after it is what it prints."""
    every = fences(path)
    after = [*every, ("", "", 0)][1:]
    return [
        Block(content, following[1] if following[0] == "text" else None, line)
        for (language, content, line), following in zip(every, after, strict=True)
        if language == "python"
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
            compare(printed.getvalue(), block.output)
    return namespace


def compare(shown: str, said: str) -> None:
    """Assert that a text is what a page says, up to a thousandth of each number with a decimal point."""
    assert words(shown) == words(said), f"prints\n{shown}\nsaid\n{said}"
    for got, expected in zip(numbers(shown), numbers(said), strict=True):
        assert abs(got - expected) <= 1e-3 * abs(expected) + 2e-6, (
            f"{got} for {expected}; prints\n{shown}\nsaid\n{said}"
        )


def words(text: str) -> list[str]:
    """Lines, with a mark for each number that has a decimal point; columns may be wider or narrower."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.strip().splitlines()]


def numbers(text: str) -> list[float]:
    """The numbers with a decimal point."""
    return [float(number) for number in NUMBER.findall(text)]
