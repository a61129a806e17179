"""Few-shot prompts of word tasks and of labelled texts as token ids: demonstrations with labels, then a query."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from mechicl.base.arguments import Count, Natural, check_fields, checked
from mechicl.base.warning import warn
from mechicl.prompts import Shots
from mechicl.prompts.tokens import ids_after, own_ids, start_ids
from mechicl.text.classification import LabelledTexts, TextTask
from mechicl.text.words import WORD_TASKS, WordTask

WordLabels = Literal["true", "shuffled", "random", "other task"]
"""Outputs of the demonstrations: true ones, those of other demonstrations, random words, or another task's pairs."""


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
        shown: inputs of each prompt's demonstrations.
    """

    ids: Int[Tensor, "prompt pos"]
    targets: Int[Tensor, " prompt"]
    task: str
    labels: WordLabels
    n_shots: int
    queries: tuple[str, ...]
    answers: tuple[str, ...]
    n_pairs: Natural = 0
    shown: tuple[tuple[str, ...], ...] = ()

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
            tasks; "other task": the demonstrations are pairs of `other` instead, of which one may have the query's
                input.
        other: task of the demonstrations, required for labels="other task" and refused otherwise.

    Returns:
        A `WordPrompts`, whose `ids` `[prompt pos]` end where the answers begin to differ.

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
    answer_ids = _pairs_of_one_length(tokenizer, task)
    pairs = list(answer_ids)
    if len(pairs) < n_shots + 1:
        raise ValueError(
            f"task {task.name!r} has {len(pairs)} pairs of one length for this tokenizer, and n_shots={n_shots} need "
            f"{n_shots + 1}: show fewer demonstrations, or give a task with more pairs"
        )
    instead: list[Any] = []  # pairs or outputs to show instead of the true ones
    if labels == "other task":
        instead = list(_pairs_of_one_length(tokenizer, replace(_named(other), template=task.template)))
    elif labels == "random":
        instead = _random_words(tokenizer, task, pairs[0])
    if labels in ("other task", "random") and len(instead) < n_shots:
        needed = f"outputs of other tasks with as many tokens as those of task {task.name!r}"
        needed = needed if other is None else f"pairs of one length of task {_named(other).name!r}"
        raise ValueError(f"labels={labels!r} and n_shots={n_shots} need {n_shots} {needed}, got {len(instead)}")
    if len(pairs) < len(task.pairs):
        warn(f"{len(pairs)} of {len(task.pairs)} pairs of task {task.name!r} are used; the others have other numbers "
             "of tokens with this tokenizer, or tokens that it does not know")  # fmt: skip
    generator, of_labels = (torch.Generator().manual_seed(seed) for _ in range(2))
    texts, queries, shown = [], [], []
    unasked: set[int] = set()
    for _ in range(n_prompts):
        order = torch.randperm(len(pairs), generator=generator).tolist()
        unasked = unasked or set(order)
        query = next(i for i in order if i in unasked)
        unasked.remove(query)
        queries.append(pairs[query])
        examples = [pairs[i] for i in order if i != query][:n_shots]
        n_drawn = len(instead) if labels == "other task" else max(len(pairs), len(instead))
        draw = torch.randperm(n_drawn, generator=of_labels).tolist()
        drawn = [instead[i] for i in draw if i < len(instead)][:n_shots]
        if labels in ("random", "shuffled"):
            outputs = drawn if labels == "random" else _exchanged([output for _, output in examples])
            examples = [(word, output) for (word, _), output in zip(examples, outputs, strict=True)]
        examples = drawn if labels == "other task" else examples
        shown.append(tuple(word for word, _ in examples))
        lines = [task.write(*pair) for pair in examples]
        texts.append(task.separator.join([*lines, task.write(queries[-1][0])]))
    start, tails = start_ids(tokenizer), list(answer_ids.values())
    shared = 0  # tokens with which all answers begin
    while len({tail[shared] for tail in tails}) == 1 and shared + 1 < len(tails[0]):
        shared += 1
    rows = [start + own_ids(tokenizer, text) + tails[0][:shared] for text in texts]
    if len(lengths := set(map(len, rows))) > 1:
        raise ValueError(
            f"prompts of task {task.name!r} have {min(lengths)} to {max(lengths)} tokens with this tokenizer, because "
            "tokens span several words: use another template"
        )
    targets = _tensor([answer_ids[pair][shared] for pair in queries])
    asked, answers = zip(*queries, strict=True)
    return WordPrompts(_tensor(rows), targets, task.name, labels, n_shots, asked, answers, len(pairs), tuple(shown))


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


def _encode_pair(tokenizer: Any, task: WordTask, word: str, output: str) -> tuple[list[int], list[int]] | None:
    """Tokenize a query and its answer; None if a token is unknown or contains parts of both."""
    query, whole = own_ids(tokenizer, task.write(word)), own_ids(tokenizer, task.write(word, output))
    answer, unknown = ids_after(query, whole), getattr(tokenizer, "unk_token_id", None)
    return None if not answer or (unknown is not None and unknown in whole) else (query, answer)


def _pairs_of_one_length(tokenizer: Any, task: WordTask) -> dict[tuple[str, str], list[int]]:
    """Return the pairs with the most common numbers of tokens, and the ids of their answers."""
    encoded = {pair: ids for pair in task.pairs if (ids := _encode_pair(tokenizer, task, *pair))}
    if not encoded:
        raise ValueError(f"the tokenizer cannot write task {task.name!r}: each pair has an unknown token, or one that "
                         "contains the end of a query and the start of its answer; use another template")  # fmt: skip
    lengths = {pair: tuple(map(len, ids)) for pair, ids in encoded.items()}
    ((common, _),) = Counter(lengths.values()).most_common(1)
    return {pair: answer for pair, (_, answer) in encoded.items() if lengths[pair] == common}


def _random_words(tokenizer: Any, task: WordTask, pair: tuple[str, str]) -> list[str]:
    """Return the outputs of other tasks that have as many tokens as the pair's."""
    own = {output for _, output in task.pairs}
    words = {output for each in WORD_TASKS.values() for _, output in each.pairs} - own
    encoded = {word: _encode_pair(tokenizer, task, pair[0], word) for word in (pair[1], *words)}
    lengths = {word: tuple(map(len, ids)) for word, ids in encoded.items() if ids}
    return sorted(word for word in words if lengths.get(word) == lengths[pair[1]])


@checked
def text_shots(tokenizer: Any, demonstrations: LabelledTexts, queries: LabelledTexts) -> Shots:
    """Tokenize demonstrations and queries of a classification task, for `fine_tune` and `compare_with_finetuning`.

    Each demonstration and each query is tokenized separately, so that a query has the same tokens with and without
    demonstrations. The tokenizer's start token, if any, comes once before a prompt.

    Args:
        tokenizer: the language model's tokenizer, with the interface of `transformers`.
        demonstrations: labelled texts that every context shows in this order; fine-tuning uses the same ones.
        queries: texts with the labels to predict.

    Returns:
        A `Shots` of token ids; its targets are the labels' tokens, and its `choices` the token of every label.

    Raises:
        ValueError: texts of two tasks; a label that is not one token or unknown; or two labels with the same token.

    Example:
        >>> from mechicl.text import load_texts, text_shots, topic_tokenizer
        >>> shown, queries = (load_texts("farm", split, n_texts=8) for split in ("train", "validation"))
        >>> shots = text_shots(topic_tokenizer(), shown, queries)
    """
    task = queries.task
    if demonstrations.task != task:
        raise ValueError(f"demonstrations of {demonstrations.task.name!r} for queries of {task.name!r}")
    choices = _label_ids(tokenizer, task)
    start = _tensor(start_ids(tokenizer))
    separator = _encode(tokenizer, task.separator, task.labels[0])
    examples = [_encode(tokenizer, task.write(text)) for text in demonstrations.texts]
    context, spans = [start], []
    for example, label in zip(examples, demonstrations.labels, strict=True):
        spans.append((sum(map(len, context)), len(example)))
        context += [example, choices[label : label + 1], separator]
    texts = [_encode(tokenizer, task.write(text)) for text in queries.texts]
    return Shots(
        zero_shot=tuple(torch.cat([start, text]) for text in texts),
        in_context=tuple(torch.cat([*context, text]) for text in texts),
        targets=choices[_tensor(queries.labels)],
        query_lengths=tuple(map(len, texts)),
        examples=tuple(torch.cat([start, example]) for example in examples),
        example_targets=choices[_tensor(demonstrations.labels)],
        example_spans=tuple(spans),
        choices=choices,
    )


def _label_ids(tokenizer: Any, task: TextTask) -> Int[Tensor, "choice"]:
    labels = []
    for label in task.labels:
        ids = _encode(tokenizer, label, task.template)
        if len(ids) != 1:
            tokens = tokenizer.convert_ids_to_tokens(ids.tolist())
            raise ValueError(
                f"the label {label!r} of {task.name!r} is {len(ids)} tokens, {tokens}, and one is needed: choose "
                f"another word, dataclasses.replace(task, labels=...)"
            )
        if ids.item() == getattr(tokenizer, "unk_token_id", None):
            raise ValueError(f"the tokenizer does not know the label {label!r} of {task.name!r}: choose another word")
        labels.append(ids)
    choices = torch.cat(labels)
    if len(set(choices.tolist())) < len(choices):
        raise ValueError(f"two labels of {task.name!r}, {task.labels}, have the same token: {choices.tolist()}")
    return choices


def _encode(tokenizer: Any, text: str, before: str = "") -> Int[Tensor, "pos"]:
    """Tokenize a text as it continues another, unless their tokens merge; some tokenizers begin texts with a space."""
    continued = ids_after(own_ids(tokenizer, before), own_ids(tokenizer, before + text)) if before else []
    return _tensor(continued or own_ids(tokenizer, text))


def _tensor(ids: Sequence[Any]) -> Int[Tensor, "..."]:
    return torch.tensor(ids, dtype=torch.int64)
