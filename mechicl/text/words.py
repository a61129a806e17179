"""In-context tasks on words: pairs of input and output, and the template that prompts write them with."""

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mechicl.base.arguments import check_fields, checked
from mechicl.base.files import check_text

FOLDER = Path(__file__).parent / "words"
_MOST_BYTES = 2**22
"""Largest CSV file of pairs in bytes."""


@dataclass(frozen=True)
class WordTask:
    """Pairs of words, and how a prompt writes them.

    Attributes:
        name: name of the task.
        pairs: inputs with their outputs.
        template: text of one example, with `{input}` and, at its end, `{output}`.
        separator: text between examples.

    Raises:
        ArgumentError: a template without the two fields or with text after `{output}`, fewer than two pairs, a blank
            word, or an input that occurs twice.

    Source: the template is that of Todd et al. 2024 ("Function vectors in large language models").

    Example:
        >>> WordTask("double", (("a", "aa"), ("b", "bb"))).write("a", "aa")
        'Q: a\\nA: aa'
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    template: str = "Q: {input}\nA: {output}"
    separator: str = "\n\n"

    def __post_init__(self):
        check_fields(self)
        if self.template.count("{input}") != 1 or not self.template.endswith("{output}"):
            raise ValueError(f"template must contain {{input}} once and end with {{output}}, got {self.template!r}")
        if len(self.pairs) < 2:
            raise ValueError(f"task {self.name!r} needs at least two pairs, got {len(self.pairs)}")
        if blank := [pair for pair in self.pairs if not all(word.strip() for word in pair)]:
            raise ValueError(f"task {self.name!r} has a blank word in {blank[0]}")
        (word, times), *_ = Counter(word for word, _ in self.pairs).most_common(1)
        if times > 1:
            raise ValueError(f"task {self.name!r} has the input {word!r} {times} times; inputs must be unique")

    @checked
    def write(self, word: str, output: str | None = None) -> str:
        """Write an example as text; without an output, a query, which ends where the output and its space would begin.

        Args:
            word: the input.
            output: the output; None for a query.
        """
        text = self.template.replace("{input}", word)
        return text.replace("{output}", output) if output is not None else text.removesuffix("{output}").rstrip(" ")


@checked
def read_word_task(path: str | Path, *, name: str | None = None, template: str = WordTask.template) -> WordTask:
    """Read an in-context task on words from a CSV file with the columns `input` and `output`.

    Args:
        path: CSV file (UTF-8, at most 4 MiB) with a row for each pair.
        name: name of the task in results; by default the file's name without suffix.
        template: text of one example in a prompt, with `{input}` and, at its end, `{output}`.

    Returns:
        A `WordTask` with these pairs, for `word_prompts` and `icl_score`.

    Raises:
        ValueError: the file is too large, has other columns, or its pairs are invalid (see `WordTask`).
        FileNotFoundError: no such file.

    Example:
        >>> read_word_task("my_pairs.csv", template="{input} -> {output}")
    """
    path = Path(path)
    check_text(path, _MOST_BYTES)
    pairs = []
    with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
        rows = csv.DictReader(file, strict=True)
        try:
            if not {"input", "output"} <= set(rows.fieldnames or ()):
                raise ValueError(f"{path} must have the columns input and output, got {rows.fieldnames}")
            for row in rows:
                if None in row:
                    raise ValueError(f"{path}, line {rows.line_num}, has more cells than the header: put texts with "
                                     "commas in quotes")  # fmt: skip
                pairs.append(tuple((row[name] or "").strip() for name in ("input", "output")))
        except csv.Error as error:
            raise ValueError(f"{path}, line {rows.line_num + 1}, cannot be read: {error}") from error
    return WordTask(name or path.stem, tuple(pairs), template)


WORD_TASKS: dict[str, WordTask] = {path.stem: read_word_task(path) for path in sorted(FOLDER.glob("*.csv"))}
"""The word tasks of the library, by name: antonyms, capitals, plural, past tense, translation, addition, ..."""
