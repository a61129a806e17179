"""Sequences of token ids for models with a vocabulary, and distributions over them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mechicl.checks import require_whole
from mechicl.random_tensors import sampling_generator


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


@dataclass(frozen=True)
class RepeatedTokens:
    """Random tokens over and over: a random segment, repeated until the sequence is full.

    From the second token of the second copy on, every token can be predicted: it is what followed the last time. The
    segment's length is drawn for each sequence, so that looking back by a fixed distance does not help: a model has to
    look for the token's earlier occurrence, which is what induction heads do.

    Source: sequences of Elhage et al. 2021 ("A Mathematical Framework for Transformer Circuits", induction heads)
    and Olsson et al. 2022, with a random period.

    Attributes:
        d_vocab: number of different tokens, all equally likely.
        n_ctx: number of tokens that a model reads; a sequence has one more, its last target.
        min_period: the shortest segment; lengths are uniform.
        max_period: the longest segment.

    Raises:
        ValueError: a field out of range, or a period that leaves nothing to predict.

    Example:
        >>> RepeatedTokens(d_vocab=5, n_ctx=5, min_period=3, max_period=3).sample(1, seed=0).ids.shape
        torch.Size([1, 6])
    """

    d_vocab: int = 64
    n_ctx: int = 64
    min_period: int = 4
    max_period: int = 32

    def __post_init__(self):
        require_whole(self, d_vocab=2, n_ctx=2, min_period=1, max_period=1)
        if not self.min_period <= self.max_period < self.n_ctx:
            raise ValueError(
                f"periods need min_period <= max_period < n_ctx={self.n_ctx}, got {self.min_period} to "
                f"{self.max_period}"
            )

    def replace(self, **changes: Any) -> "RepeatedTokens":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def sample(
        self,
        n_prompts: int,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> TokenSequences:
        """Independent sequences; the same seed gives the same ones.

        Raises:
            ValueError: neither or both of seed and generator, a generator on another device, or a negative number.
        """
        generator = sampling_generator(n_prompts, seed, generator, device)
        draw: dict[str, Any] = {"generator": generator, "device": generator.device}
        period = torch.randint(self.min_period, self.max_period + 1, (n_prompts, 1), **draw)
        segment = torch.randint(self.d_vocab, (n_prompts, self.max_period), **draw)
        pos = torch.arange(self.n_ctx + 1, device=generator.device)
        return TokenSequences(segment.gather(1, pos % period), pos > period)
