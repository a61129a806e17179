"""Texts as token ids: a text's own tokens, and those that a tokenizer puts before every text."""

from contextlib import AbstractContextManager
from typing import Any

from mechicl.base.arguments import calling


def own_ids(tokenizer: Any, text: Any) -> list[Any]:
    """Return the ids of a text's own tokens, without those that the tokenizer's template adds; lists for a list."""
    if not hasattr(tokenizer, "__call__"):  # noqa: B004  (of anything callable no more would be known)
        raise TypeError(f"tokenizer must be one of transformers, got {type(tokenizer).__name__}")
    with _calling(tokenizer):
        return list(tokenizer(text, add_special_tokens=False).input_ids)


def start_ids(tokenizer: Any) -> list[int]:
    """Return the ids that a tokenizer puts before every text: that of `<s>` for the template `<s> $A </s>`.

    They are what precedes a text's own ids among all of its ids. Words of the vocabulary are tried as the text, too:
    a word that the tokenizer does not know may have the same id as `<s>`.
    """
    for text in ("a", "1 2", *list(getattr(tokenizer, "get_vocab", dict)())[-9:]):
        own = own_ids(tokenizer, text)
        with _calling(tokenizer):
            whole = list(tokenizer(text).input_ids)
        places = [i for i in range(len(whole) - len(own) + 1) if whole[i : i + len(own)] == own]
        if own and len(places) == 1:
            return whole[: places[0]]
    raise ValueError(
        "tokenizer must add its special tokens before and after a text's own tokens, which must be the same with and "
        f"without add_special_tokens, got {whole} for {text!r} and {own} without"
    )


def _calling(tokenizer: Any) -> AbstractContextManager[None]:
    return calling(f"tokenizer {type(tokenizer).__name__}")


def ids_after(start: list[int], whole: list[int]) -> list[int]:
    """Return what a text's ids add to those of its beginning; none if a token contains parts of both."""
    return whole[len(start) :] if whole[: len(start)] == start else []
