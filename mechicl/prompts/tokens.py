"""Token ids: of texts, in sequences, and as demonstrations with queries, alone and in context."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechicl.base.arguments import calling, check_fields, checked
from mechicl.prompts.prompts import refuse_bytes


@dataclass(frozen=True, eq=False)
class TokenSequences:
    """A batch of sequences of token ids, and which of the tokens are to be predicted from those before them.

    Attributes:
        ids: token ids `[prompt pos]`, int64.
        predictable: mask `[prompt pos]` of the tokens that a loss is taken over; False for the first token.
    """

    ids: Int[Tensor, "prompt pos"]
    predictable: Bool[Tensor, "prompt pos"]

    def __post_init__(self):
        check_fields(self)
        if self.ids.shape != self.predictable.shape:
            shapes = tuple(self.ids.shape), tuple(self.predictable.shape)
            raise ValueError("ids and predictable must both be [prompt pos], got {} and {}".format(*shapes))
        if self.ids.dtype != torch.int64:
            raise ValueError(f"ids must be int64, got {self.ids.dtype}")
        if (self.ids < 0).any():
            raise ValueError(f"ids must not be negative, got {self.ids.min().item()}")
        if self.predictable[:, :1].any():
            raise ValueError("predictable must be False for the first token, which has no tokens before it")

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __getitem__(self, index: slice | Tensor) -> "TokenSequences":
        refuse_bytes(index)
        return TokenSequences(self.ids[index], self.predictable[index])

    @classmethod
    @checked
    def concatenate(cls, sequences: "Sequence[TokenSequences]") -> "TokenSequences":
        """Join several batches of sequences of one length."""
        lengths = {s.ids.shape[1] for s in sequences}
        if len(lengths) != 1:
            raise ValueError(f"sequences must be one or more batches of one length, got lengths {sorted(lengths)}")
        return cls(torch.cat([s.ids for s in sequences]), torch.cat([s.predictable for s in sequences]))

    @property
    def read(self) -> Int[Tensor, "prompt read"]:
        """The tokens that a model reads: all but the last. Its prediction at position i is of token i + 1."""
        return self.ids[:, :-1]

    def targets(self) -> Int[Tensor, "prompt read"]:
        """Return the next token at each position read; -100, which torch's cross entropy ignores, if not scored."""
        return self.ids[:, 1:].masked_fill(~self.predictable[:, 1:], -100)


@dataclass(frozen=True, eq=False)
class Shots:
    """Queries alone, the same queries after demonstrations, and the demonstrations as training examples.

    `prompt_shots` and `text_shots` make them, for comparisons of in-context learning with fine-tuning. Every sequence
    ends where a prediction is read. Sequences are token ids `[pos]` or continuous tokens `[pos d_token]`, and may
    differ in length.

    Attributes:
        zero_shot: each query alone.
        in_context: each query after all demonstrations, which are the same for all queries.
        targets: targets of the queries: ids `[query]`, or targets of a regression `[query y]`.
        query_lengths: number of tokens of each query; both its sequences end with these tokens.
        examples: the input of each demonstration alone, in the order of the context.
        example_targets: targets of the demonstrations: ids `[example]` or `[example y]`.
        example_spans: for each example the position of its first token in context, and the number of its tokens. Its
            sequence ends with these tokens.
        choices: ids that a prediction is chosen among; None for a regression.
    """

    zero_shot: tuple[Tensor, ...]
    in_context: tuple[Tensor, ...]
    targets: Int[Tensor, "query"] | Float[Tensor, "query y"]
    query_lengths: tuple[int, ...]
    examples: tuple[Tensor, ...]
    example_targets: Int[Tensor, "example"] | Float[Tensor, "example y"]
    example_spans: tuple[tuple[int, int], ...]
    choices: Int[Tensor, "choice"] | None = None

    def __post_init__(self):
        check_fields(self, undefined=True)
        n, k = len(self.zero_shot), len(self.examples)
        if n == 0 or k == 0:
            raise ValueError(f"zero_shot and examples must not be empty, got {n} queries and {k} demonstrations")
        for name, number in [*dict.fromkeys(("in_context", "targets", "query_lengths"), n).items(),
                             *dict.fromkeys(("example_targets", "example_spans"), k).items()]:  # fmt: skip
            if (given := len(getattr(self, name))) != number:
                raise ValueError(f"{name} must have {number} entries, got {given}")
        for alone, in_context, length in zip(self.zero_shot, self.in_context, self.query_lengths, strict=True):
            if not 1 <= length <= min(len(alone), len(in_context)):
                lengths = f"{len(alone)} and {len(in_context)} tokens"
                raise ValueError(f"query_lengths must fit sequences of {lengths}, got {length}")
        shortest = min(map(len, self.in_context))
        for example, (first, number) in zip(self.examples, self.example_spans, strict=True):
            if not (1 <= number <= len(example) and 0 <= first <= shortest - number):
                fits = f"an example of {len(example)} tokens in a context of {shortest}"
                raise ValueError(f"example_spans must fit {fits}, got {(first, number)}")
        if self.choices is not None:
            targets = {*self.targets.tolist(), *self.example_targets.tolist()}
            if wrong := targets - set(self.choices.tolist()):
                raise ValueError(f"targets must be of the choices {self.choices.tolist()}, got {sorted(wrong)}")

    def __len__(self) -> int:
        return len(self.zero_shot)

    def after(self, n_demonstrations: int) -> tuple[Tensor, ...]:
        """Return each query after the first few demonstrations."""
        if not 0 <= n_demonstrations <= len(self.examples):
            raise ValueError(f"n_demonstrations must be 0 to {len(self.examples)}, got {n_demonstrations}")
        if n_demonstrations in (0, len(self.examples)):
            return self.in_context if n_demonstrations else self.zero_shot
        end, _ = self.example_spans[n_demonstrations]
        queries = zip(self.in_context, self.query_lengths, strict=True)
        return tuple(torch.cat([tokens[:end], tokens[-length:]]) for tokens, length in queries)

    def demonstration_positions(self) -> Int[Tensor, "token"]:
        """Return the positions in context of the demonstrations' own tokens, one example after the other."""
        return torch.cat([torch.arange(first, first + number) for first, number in self.example_spans])


# ---- a text's own tokens, and those that a tokenizer puts before every text ----


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
