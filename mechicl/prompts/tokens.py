"""Sequences of token ids, for models with a vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mechicl.base.arguments import check_fields, checked


@dataclass(frozen=True, eq=False)
class TokenSequences:
    """A batch of sequences of token ids, and which of the tokens are predicted from those before them.

    Attributes:
        ids: `[prompt pos]`, int64.
        predictable: `[prompt pos]`; the tokens that a loss is taken over, never the first.

    Raises:
        ValueError: shapes that differ, another dtype, a negative id, or a first token marked as predictable.
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
        """The tokens that a model reads: all but the last."""
        return self.ids[:, :-1]

    def targets(self) -> Int[Tensor, "prompt read"]:
        """Return the next token at each position read; -100, which torch's cross entropy ignores, where not scored."""
        return self.ids[:, 1:].masked_fill(~self.predictable[:, 1:], -100)
