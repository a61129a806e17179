"""Sequences of token ids, for models with a vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenSequences:
    """A batch of sequences of token ids, and which of the tokens are to be predicted from those before them.

    Attributes:
        ids: `[prompt pos]`, int64.
        predictable: `[prompt pos]`; what a loss is taken over. The first token never is.

    Raises:
        ValueError: shapes that disagree, another dtype, or a first token that is to be predicted.
    """

    ids: Int[Tensor, "prompt pos"]
    predictable: Bool[Tensor, "prompt pos"]

    def __post_init__(self):
        if self.ids.ndim != 2 or self.ids.shape != self.predictable.shape:
            raise ValueError(
                f"ids and predictable must both be [prompt pos], got {tuple(self.ids.shape)} and "
                f"{tuple(self.predictable.shape)}"
            )
        if self.ids.dtype != torch.int64 or self.predictable.dtype != torch.bool:
            raise ValueError(
                f"ids must be int64 and predictable bool, got {self.ids.dtype} and {self.predictable.dtype}"
            )
        if (self.ids < 0).any():
            raise ValueError(f"ids must not be negative, got {self.ids.min().item()}")
        if self.predictable[:, :1].any():
            raise ValueError("the first token of a sequence has nothing before it to be predicted from")

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __getitem__(self, index: slice | Tensor) -> "TokenSequences":
        return TokenSequences(self.ids[index], self.predictable[index])

    @classmethod
    def concatenate(cls, sequences: "Sequence[TokenSequences]") -> "TokenSequences":
        """Several batches of sequences of one length as one batch.

        Raises:
            ValueError: none, or different lengths.
        """
        lengths = {s.ids.shape[1] for s in sequences}
        if len(lengths) != 1:
            raise ValueError(f"one batch needs sequences of one length, got {sorted(lengths) or 'none'}")
        return cls(torch.cat([s.ids for s in sequences]), torch.cat([s.predictable for s in sequences]))

    @property
    def read(self) -> Int[Tensor, "prompt read"]:
        """What a model reads: all tokens but the last."""
        return self.ids[:, :-1]

    def targets(self) -> Int[Tensor, "prompt read"]:
        """The next token at each position read; -100, which torch's cross entropy leaves out, where not scored."""
        return self.ids[:, 1:].masked_fill(~self.predictable[:, 1:], -100)
