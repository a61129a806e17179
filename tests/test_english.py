"""The rules of plain English that a program can check: first lines of docstrings, words, lengths of sentences, tables.

`python tests/test_english.py PATH ...` lists what breaks them in some files or folders.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("mechicl", "analyses", "tests", "docs", "Makefile")
PAGES = ("docs", "README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md")

WORDS = {  # a word or phrase in the sense to avoid: what to write instead
    r"told|hears|heard|foretells?|foretold|says|asks": "reports, returns, requires, predicts",
    r"what is left|what remains|what is left over": "the residual, the rest",
    r"beside": "next to, compared with, alongside",
    r"of (?:its|their|his) own|by (?:itself|themselves)": "its own (before the noun), independently",
    r"as (?:it is|they are|it was|they were)(?=[.,;:)]|$)|as it stands": "unchanged",
    r"holds (?!for\b|if\b|when\b|only\b|to\b|exactly\b|at\b|in\b|with\b|on\b)|held(?![-_ ]out)": "contains, stores",
    r"(?:goes|went|going) on(?! (?:the|a|to) )": "continues, resumes",
    r"whoever|somebody|anybody|nobody|who calls|who reads": "the user, the caller",
    r"(?<!there )(?<!There )(?:is|are) no (?!longer|more|less|better|worse|need|way|larger|smaller|fewer)": "is not a",
    r"so many|so much as": "n, the same number of",
    r"in words": "as text",
    r"stands(?! for\b)": "is supported",
    r"puts? back|put in(?!to)\b": "restore, patch in",
    r"doors?|rooms?|houses?|(?<!noise )floors?(?! division)": "public function, module, package, layer",
}
PATTERNS = [
    (re.compile(rf"\b(?:{words})\b" if words[-1] != ")" else rf"\b(?:{words})"), better)
    for words, better in WORDS.items()
]
FIRST = re.compile(r"(?:What|Whose|Whether what|Of)\b")
MEANT = {  # accepted exceptions by file, which a person has read
    "analyses/support/conditioning.py": 2,  # the floor of eigenvalues
}
LONGEST, AVERAGE, COLUMNS = 45, 22, 6


def strings_and_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every comment and of every string with a space in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def first_lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and first line of every docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text.splitlines()[0]


def prose(page: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of a page's paragraphs and list items, without code, tables, headings and HTML."""
    page = re.sub(r"^---\n.*?\n---\n", lambda m: "\n" * m.group().count("\n"), page, flags=re.S)
    page = re.sub(r"^( *)(```|~~~).*?^\1\2$", lambda m: "\n" * m.group().count("\n"), page, flags=re.S | re.M)
    started, lines = 0, []
    for number, line in enumerate([*page.splitlines(), ""], 1):
        text = line.strip()
        item = re.match(r"(?:[-*]|\d+\.) ", text)
        skipped = not text or text[0] in "#|<" or text.startswith(("!!!", "???", ":::", "!["))
        if lines and (skipped or item):
            yield started, " ".join(lines)
            lines = []
        if not skipped:
            started = started if lines else number
            lines.append(text[item.end() :] if item else text)


def readable(text: str) -> str:
    """Replace inline code, formulas and links' addresses by one word each."""
    text = re.sub(r"`[^`]*`|\$[^$]*\$", "CODE", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def sentences(text: str) -> list[str]:
    """Split a paragraph into sentences."""
    text = re.sub(r"\b(et al|e\.g|i\.e|cf|vs|Fig|Sec|Eq|App|Prop|Thm|no)\. ", r"\1 ", readable(text))
    return re.split(r"(?<=[.!?])[)\"'*_]*\s+(?=[\"'(\[*]*[A-Z0-9])", text)


def words(text: str) -> Iterator[str]:
    """Yield the words to avoid in a text, each with what to write instead."""
    for pattern, better in PATTERNS:
        for match in pattern.finditer(readable(text)):
            yield f"{match.group()!r}: write {better}"


def faults(path: Path) -> Iterator[str]:
    """Yield what breaks the rules in a file, with its line."""
    text = path.read_text()
    if path == Path(__file__):
        return
    if path.suffix == ".py":
        yield from (
            f"{line}: docstring begins {first[:40]!r}" for line, first in first_lines(text) if FIRST.match(first)
        )
        yield from (f"{line}: {word}" for line, string in strings_and_comments(text) for word in words(string))
    elif path.suffix == ".md":
        paragraphs = list(prose(text))
        split = [(line, len(sentence.split()), sentence) for line, one in paragraphs for sentence in sentences(one)]
        yield from (f"{line}: {n} words: {one[:60]}..." for line, n, one in split if n > LONGEST)
        mean = sum(n for _, n, _ in split) / max(len(split), 1)
        if mean > AVERAGE:
            yield f"sentences average {mean:.1f} words"
        for line, row in enumerate(text.splitlines(), 1):
            yield from (f"{line}: {word}" for word in words(row) if row.startswith("|"))
            if path.is_relative_to(ROOT / "docs") and re.match(r"\|[ :|-]+\|$", row) and row.count("|") > COLUMNS + 1:
                yield f"{line}: a table of {row.count('|') - 1} columns"
        yield from (f"{line}: {word}" for line, one in paragraphs for word in words(one))
    else:
        yield from (f"{n}: {word}" for n, one in enumerate(text.splitlines(), 1) for word in words(one) if "#" in one)


def files(*roots: str) -> list[Path]:
    """Return the code and pages in some files and folders."""
    found = [
        path for root in roots for path in ([ROOT / root] if (ROOT / root).is_file() else (ROOT / root).rglob("*"))
    ]
    skipped = {ROOT / "analyses/README.md"}  # written by `make index` from the results
    return sorted({path for path in found if path.suffix in (".py", ".md") or path.name == "Makefile"} - skipped)


@pytest.mark.parametrize("root", sorted({*CODE, *PAGES}))
def test_plain_english(root):
    broken = {str(path.relative_to(ROOT)): list(faults(path)) for path in files(root)}
    too_many = [
        f"{name}:{one}"
        for name, all_of_it in broken.items()
        if len(all_of_it) > MEANT.get(name, 0)
        for one in all_of_it
    ]
    assert not too_many, "\n".join(too_many)


def test_the_rules_find_what_they_are_for():
    assert list(words("The cache holds what is left of it"))
    assert not list(words("This holds for held-out prompts"))
    assert sentences("One two (Oswald et al. 2023). Three `a b c`.") == ["One two (Oswald et al 2023).", "Three CODE."]
    assert [text for _, text in prose("# T\n\na\nb\n\n| x |\n\n- c\n- d\n\n```\ncode\n```\n")] == ["a b", "c", "d"]


if __name__ == "__main__":
    roots = sys.argv[1:] or [*CODE, *PAGES]
    lines = [f"{path.relative_to(ROOT)}:{one}" for path in files(*roots) for one in faults(path)]
    print("\n".join([*lines, f"{len(lines)} places"]))
    sys.exit(bool(lines))
