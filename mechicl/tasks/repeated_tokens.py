"""Random tokens over and over, from which induction heads are learned."""

from dataclasses import dataclass

import torch

from mechicl.base.arguments import check_fields
from mechicl.base.checks import require_whole
from mechicl.prompts import TokenSequences
from mechicl.tasks.sampling import RandomTensors, TokenDistribution


@dataclass(frozen=True)
class RepeatedTokens(TokenDistribution):
    """Random tokens over and over: a random segment, repeated until the sequence is full.

    From the second token of the second copy on, every token can be predicted: it is what followed the last time. The
    segment's length is random for each sequence, so that looking back by a fixed distance does not help: a model has to
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
        check_fields(self)
        require_whole(self, d_vocab=2, n_ctx=2, min_period=1, max_period=1)
        if not self.min_period <= self.max_period < self.n_ctx:
            raise ValueError(
                f"periods need min_period <= max_period < n_ctx={self.n_ctx}, got {self.min_period} to "
                f"{self.max_period}"
            )

    def _sample(self, n_prompts: int, random: RandomTensors) -> TokenSequences:
        period = random.integers(self.min_period, self.max_period + 1, n_prompts, 1)
        segment = random.integers(0, self.d_vocab, n_prompts, self.max_period)
        pos = torch.arange(self.n_ctx + 1, device=random.device)
        return TokenSequences(segment.gather(1, pos % period), pos > period)
