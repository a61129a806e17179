"""Demonstrations and queries in the three forms that in-context learning and fine-tuning are compared on."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shots:
    """What a model reads: queries without demonstrations and behind them, and the demonstrations as training examples.

    Every sequence ends where something is to be predicted. Sequences are token ids `[pos]` or continuous tokens
    `[pos d_token]`, and may differ in length.

    Attributes:
        zero_shot: each query alone.
        in_context: each query behind all demonstrations, which are the same for all of them.
        targets: what is to be predicted: ids `[query]`, or targets of a regression `[query y]`.
        n_own: how many tokens at the end of both forms of a query are its own.
        examples: the input of each demonstration alone, in the order in which they are shown.
        example_targets: ids `[example]` or `[example y]`.
        places: for each example, where its own tokens, the last of its sequence, stand in context: (first, number).
        choices: ids that a prediction is chosen among; None for a regression.

    Raises:
        ValueError: no queries or no demonstrations, other numbers of targets than of sequences, counts or places that
            the sequences do not have, or targets that are no choices.
    """

    zero_shot: tuple[Tensor, ...]
    in_context: tuple[Tensor, ...]
    targets: Int[Tensor, "query"] | Float[Tensor, "query y"]
    n_own: tuple[int, ...]
    examples: tuple[Tensor, ...]
    example_targets: Int[Tensor, "example"] | Float[Tensor, "example y"]
    places: tuple[tuple[int, int], ...]
    choices: Int[Tensor, "choice"] | None = None

    def __post_init__(self):
        n, k = len(self.zero_shot), len(self.examples)
        if n == 0 or k == 0:
            raise ValueError(f"a comparison needs queries and demonstrations, got {n} and {k}")
        if not n == len(self.in_context) == len(self.targets) == len(self.n_own):
            raise ValueError(
                f"{n} queries alone, but {len(self.in_context)} in context, {len(self.targets)} targets and "
                f"{len(self.n_own)} counts of their tokens"
            )
        if not k == len(self.example_targets) == len(self.places):
            raise ValueError(f"{k} examples, but {len(self.example_targets)} targets and {len(self.places)} places")
        for alone, behind, own in zip(self.zero_shot, self.in_context, self.n_own, strict=True):
            if not 1 <= own <= min(len(alone), len(behind)):
                raise ValueError(f"{own} tokens of its own in queries of {len(alone)} and {len(behind)} tokens")
        shortest = min(map(len, self.in_context))
        for example, (first, number) in zip(self.examples, self.places, strict=True):
            if not (1 <= number <= len(example) and 0 <= first <= shortest - number):
                raise ValueError(
                    f"an example of {len(example)} tokens cannot have {number} at {first} of a prompt of {shortest}"
                )
        if self.choices is not None:
            wrong = set(self.targets.tolist()) | set(self.example_targets.tolist())
            wrong -= set(self.choices.tolist())
            if wrong:
                raise ValueError(f"targets {sorted(wrong)} are not among the choices {self.choices.tolist()}")

    def __len__(self) -> int:
        return len(self.zero_shot)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(map(len, (*self.zero_shot, *self.in_context, *self.examples)))

    def demonstration_positions(self) -> Int[Tensor, "token"]:
        """Where the demonstrations' own tokens stand in context, one example after the other."""
        return torch.cat([torch.arange(first, first + number) for first, number in self.places])
