"""Labelled texts as token ids: queries alone, queries after demonstrations, and demonstrations as training examples."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.prompts import Shots
from mechicl.prompts.tokenizing import own_ids, start_ids
from mechicl.text.classification import LabelledTexts, TextTask


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
        A `Shots` of token ids: `zero_shot` (each query alone), `in_context` (each query after all demonstrations),
        `targets` (tokens of the queries' labels), `examples` and `example_targets` (each demonstration alone, and its
        label), and `choices` (the token of every label of the task).

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
    start, whole = own_ids(tokenizer, before), own_ids(tokenizer, before + text)
    continues = before and whole[: len(start)] == start and len(whole) > len(start)
    return _tensor(whole[len(start) :] if continues else own_ids(tokenizer, text))


def _tensor(ids: Sequence[int]) -> Int[Tensor, "pos"]:
    return torch.tensor(ids, dtype=torch.int64)
