"""In-context tasks on words: pairs of input and output, few-shot prompts of them, and the prompts' controls."""

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from mechicl.base.arguments import Count, Natural, check_fields, checked
from mechicl.base.files import check_text
from mechicl.base.warning import warn
from mechicl.prompts.tokenizing import own_ids, start_ids

FOLDER = Path(__file__).parent / "words"
MOST_BYTES = 2**22
"""Largest CSV file of pairs in bytes."""

WordLabels = Literal["true", "shuffled", "random", "other task"]
"""Outputs of the demonstrations: true ones, those of other demonstrations, random words, or another task's pairs."""


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
    check_text(path, MOST_BYTES)
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


@dataclass(frozen=True, eq=False)
class WordPrompts:
    """Few-shot prompts of one length, with the token that each is to continue with.

    Attributes:
        ids: token ids; the answer comes after the last one.
        targets: first token of each true answer, after those with which all answers begin.
        task: name of the task.
        labels: kind of the demonstrations' outputs.
        n_shots: number of demonstrations.
        queries: input of each query.
        answers: true answer of each query.
        n_pairs: number of the task's pairs that are used.
        n_left_out: number of pairs that are not, because of their tokens.
    """

    ids: Int[Tensor, "prompt pos"]
    targets: Int[Tensor, " prompt"]
    task: str
    labels: WordLabels
    n_shots: int
    queries: tuple[str, ...]
    answers: tuple[str, ...]
    n_pairs: Natural = 0
    n_left_out: Natural = 0

    def __post_init__(self) -> None:
        check_fields(self)

    def __len__(self) -> int:
        return len(self.ids)

    @checked(undefined=True)
    def by_query(self, values: Tensor) -> Tensor:
        """Average values `[... prompt]` over prompts with the same query, which are not independent samples."""
        rows = {query: [i for i, other in enumerate(self.queries) if other == query] for query in self.queries}
        return torch.stack([values[..., each].mean(-1) for each in rows.values()], -1)


@checked
def word_prompts(
    tokenizer: Any,
    task: WordTask | str,
    *,
    n_prompts: Count = 64,
    n_shots: Natural = 10,
    labels: WordLabels = "true",
    other: WordTask | str | None = None,
    seed: int = 0,
) -> WordPrompts:
    """Draw few-shot prompts of a word task, as token ids: demonstrations (input and output), then a query.

    All prompts have the same number of tokens, so that a position has the same meaning in each. Only pairs with the
    most common numbers of tokens in input and output are used, and none with a token that the tokenizer does not know
    or that contains the end of a query and the start of its answer. The same seed gives the same queries for all kinds
    of labels, and except for "other task" the same inputs in the demonstrations. No query repeats before all pairs have
    been one. A warning states how many pairs are used if not all are.

    Args:
        tokenizer: the language model's tokenizer, with the interface of `transformers`.
        task: task, or the name of one in `WORD_TASKS`.
        n_shots: demonstrations per prompt; 0 for zero-shot prompts.
        labels: outputs that demonstrations show. "true": the right ones; "shuffled": exchanged within a prompt, so that
            no input has its own output (if no output is that of more than half of them); "random": words of other
            tasks; "other task": the demonstrations are pairs of `other` instead.
        other: task of the demonstrations, required for labels="other task" and refused otherwise.

    Returns:
        A `WordPrompts`: `ids` `[prompt pos]` (a prompt ends where its answer would begin), `targets` `[prompt]` (the
        token that follows in the true answer), and `queries` and `answers` as text. If all answers begin with the same
        tokens, `ids` contains these too, so that `targets` distinguishes answers. `n_pairs` and `n_left_out` count the
        task's pairs.

    Raises:
        ValueError: an unknown task, too few pairs of one length for the shots, one demonstration to shuffle, or
            `other` without "other task".

    Example:
        >>> prompts = word_prompts(tokenizer, "antonyms", n_shots=4, labels="shuffled")
        >>> prompts.ids.shape
        torch.Size([64, 43])
    """
    task = _named(task)
    if (other is not None) != (labels == "other task"):
        raise ValueError(f"other= is for labels='other task', got other={other!r} and labels={labels!r}")
    if labels == "shuffled" and n_shots == 1:
        raise ValueError("labels='shuffled' needs at least two demonstrations, got n_shots=1")
    pairs = _pairs_of_one_length(tokenizer, task)
    n_left_out = len(task.pairs) - len(pairs)
    if len(pairs) < n_shots + 1:
        raise ValueError(
            f"task {task.name!r} has {len(pairs)} pairs of one length for this tokenizer, and n_shots={n_shots} need "
            f"{n_shots + 1}: show fewer demonstrations, or give a task with more pairs"
        )
    shown = pairs
    if labels == "other task":
        shown = _pairs_of_one_length(tokenizer, replace(_named(other), template=task.template))
        if len(shown) < n_shots:
            raise ValueError(f"task {_named(other).name!r} has {len(shown)} pairs of one length, n_shots is {n_shots}")
    words = _random_words(tokenizer, task, pairs) if labels == "random" else []
    if labels == "random" and len(words) < n_shots:
        raise ValueError(f"other tasks have {len(words)} outputs with as many tokens as those of task {task.name!r}, "
                         f"n_shots is {n_shots}: leave out labels='random'")  # fmt: skip
    if n_left_out:
        warn(f"{len(pairs)} of {len(task.pairs)} pairs of task {task.name!r} are used; the others have other numbers "
             "of tokens with this tokenizer, or tokens that it does not know")  # fmt: skip
    generator, of_labels = (torch.Generator().manual_seed(seed) for _ in range(2))
    texts, queries = [], []
    unasked: set[int] = set()
    for _ in range(n_prompts):
        order = torch.randperm(len(pairs), generator=generator).tolist()
        unasked = unasked or set(order)
        query = next(i for i in order if i in unasked)
        unasked.remove(query)
        queries.append(pairs[query])
        examples = [pairs[i] for i in order if i != query][:n_shots]
        draw = torch.randperm(max(len(shown), len(words)), generator=of_labels).tolist()
        if labels == "other task":
            examples = [shown[i] for i in draw if i < len(shown)][:n_shots]
        outputs = [output for _, output in examples]
        if labels == "random":
            outputs = [words[i] for i in draw if i < len(words)][:n_shots]
        elif labels == "shuffled" and n_shots:
            outputs = _exchanged(outputs)
        lines = [task.write(word, output) for (word, _), output in zip(examples, outputs, strict=True)]
        texts.append(task.separator.join([*lines, task.write(queries[-1][0])]))
    ids, targets = _with_targets(tokenizer, task, pairs, texts, [answer for _, answer in queries])
    asked, answers = (tuple(pair[i] for pair in queries) for i in range(2))
    return WordPrompts(ids, targets, task.name, labels, n_shots, asked, answers, len(pairs), n_left_out)


def _named(task: WordTask | str | None) -> WordTask:
    if isinstance(task, WordTask):
        return task
    if task not in WORD_TASKS:
        raise ValueError(f"task must be a WordTask or one of {list(WORD_TASKS)}, got {task!r}")
    return WORD_TASKS[task]


def _exchanged(outputs: list[str]) -> list[str]:
    """Exchange outputs between places. As few places as possible keep an equal output."""
    exchanged = outputs[1:] + outputs[:1]
    if any(a == b for a, b in zip(outputs, exchanged, strict=True)):  # move groups of equal outputs past each other
        order = sorted(range(len(outputs)), key=outputs.__getitem__)
        most = max(Counter(outputs).values())
        for place, source in zip(order, order[most:] + order[:most], strict=True):
            exchanged[place] = outputs[source]
    return exchanged


def _lengths(tokenizer: Any, task: WordTask, pair: tuple[str, str]) -> tuple[int, int] | None:
    """Numbers of tokens of query and answer; None if a token is unknown or contains parts of both."""
    query, whole = own_ids(tokenizer, task.write(pair[0])), own_ids(tokenizer, task.write(*pair))
    if whole[: len(query)] != query or len(whole) == len(query):
        return None
    unknown = getattr(tokenizer, "unk_token_id", None)
    return None if unknown is not None and unknown in whole else (len(query), len(whole) - len(query))


def _pairs_of_one_length(tokenizer: Any, task: WordTask) -> list[tuple[str, str]]:
    lengths = [_lengths(tokenizer, task, pair) for pair in task.pairs]
    if not any(lengths):
        raise ValueError(f"the tokenizer cannot write task {task.name!r}: each pair has an unknown token, or one that "
                         "contains the end of a query and the start of its answer; use another template")  # fmt: skip
    ((common, _),) = Counter(filter(None, lengths)).most_common(1)
    return [pair for pair, length in zip(task.pairs, lengths, strict=True) if length == common]


def _random_words(tokenizer: Any, task: WordTask, pairs: Sequence[tuple[str, str]]) -> list[str]:
    own = {output for _, output in task.pairs}
    words = {output for each in WORD_TASKS.values() for _, output in each.pairs} - own
    length, first = _lengths(tokenizer, task, pairs[0]), pairs[0][0]
    return sorted(word for word in words if _lengths(tokenizer, task, (first, word)) == length)


def _with_targets(
    tokenizer: Any, task: WordTask, pairs: Sequence[tuple[str, str]], texts: Sequence[str], answers: Sequence[str]
) -> tuple[Int[Tensor, "prompt pos"], Int[Tensor, " prompt"]]:
    """Tokenize prompts and find the first token in which answers differ; tokens that all answers share are appended."""
    tails = [
        own_ids(tokenizer, task.write(word, out))[len(own_ids(tokenizer, task.write(word))) :] for word, out in pairs
    ]
    shared = 0
    while len({tail[shared] for tail in tails}) == 1 and shared + 1 < len(tails[0]):
        shared += 1
    start = start_ids(tokenizer)
    tail_of = {output: tail for (_, output), tail in zip(pairs, tails, strict=True)}
    rows = [start + own_ids(tokenizer, text) + tails[0][:shared] for text in texts]
    if len(set(map(len, rows))) > 1:
        raise ValueError(
            f"prompts of task {task.name!r} have {min(map(len, rows))} to {max(map(len, rows))} tokens with this "
            f"tokenizer, because tokens span several words: use another template"
        )
    return torch.tensor(rows), torch.tensor([tail_of[answer][shared] for answer in answers])
