"""Demonstrations and queries in the three forms that in-context learning and fine-tuning are compared on."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shots:
    """What a model reads: queries alone, queries after demonstrations, and the demonstrations as training examples.

    Every sequence ends where something is to be predicted. Sequences are token ids `[pos]` or continuous tokens
    `[pos d_token]`, and may differ in length.

    Attributes:
        zero_shot: each query alone.
        in_context: each query after all demonstrations, which are the same for all of them.
        targets: what is to be predicted: ids `[query]`, or targets of a regression `[query y]`.
        query_lengths: number of the query's own tokens, with which both its sequences end.
        examples: the input of each demonstration alone, in the order in which they are shown.
        example_targets: ids `[example]` or `[example y]`.
        example_spans: (first, number) of the positions in context of each example's own tokens, with which its
            sequence ends.
        choices: ids that a prediction is chosen among; None for a regression.

    Raises:
        ValueError: no queries or no demonstrations, other numbers of targets than of sequences, lengths or spans that
            the sequences do not have, or targets that are no choices.
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
        n, k = len(self.zero_shot), len(self.examples)
        if n == 0 or k == 0:
            raise ValueError(f"a comparison needs queries and demonstrations, got {n} and {k}")
        if not n == len(self.in_context) == len(self.targets) == len(self.query_lengths):
            raise ValueError(
                f"{n} queries alone, but {len(self.in_context)} in context, {len(self.targets)} targets and "
                f"{len(self.query_lengths)} lengths"
            )
        if not k == len(self.example_targets) == len(self.example_spans):
            raise ValueError(
                f"{k} examples, but {len(self.example_targets)} targets and {len(self.example_spans)} spans"
            )
        for alone, in_context, length in zip(self.zero_shot, self.in_context, self.query_lengths, strict=True):
            if not 1 <= length <= min(len(alone), len(in_context)):
                raise ValueError(f"a query of {length} tokens in prompts of {len(alone)} and {len(in_context)} tokens")
        shortest = min(map(len, self.in_context))
        for example, (first, number) in zip(self.examples, self.example_spans, strict=True):
            if not (1 <= number <= len(example) and 0 <= first <= shortest - number):
                raise ValueError(
                    f"an example of {len(example)} tokens cannot have {number} at {first} of a prompt of {shortest}"
                )
        if self.choices is not None:
            targets = {*self.targets.tolist(), *self.example_targets.tolist()}
            if wrong := targets - set(self.choices.tolist()):
                raise ValueError(f"targets {sorted(wrong)} are not among the choices {self.choices.tolist()}")

    def __len__(self) -> int:
        return len(self.zero_shot)

    def demonstration_positions(self) -> Int[Tensor, "token"]:
        """Positions in context of the demonstrations' own tokens, one example after the other."""
        return torch.cat([torch.arange(first, first + number) for first, number in self.example_spans])
