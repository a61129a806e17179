"""Sequences of tokens: random tokens repeated, and Markov chains, a new chain for each sequence."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import Count, Positive, at_least, check_fields, checked
from mechicl.prompts import TokenSequences
from mechicl.tasks.sampling import RandomTensors, TokenDistribution, sampling_generator

AtLeastTwo = Annotated[int, at_least(2)]


@dataclass(frozen=True, repr=False)
class RepeatedTokens(TokenDistribution):
    """Sequences that repeat a random segment of tokens until they are full: the task that induction heads solve.

    From the second token of the second copy on, every token can be predicted: it is the token that followed the
    previous occurrence. The segment's length is random for each sequence, so attending a fixed distance back does not
    help: a model has to find the token's earlier occurrence, as induction heads do. `sample(n, seed=...)` draws
    `TokenSequences`.

    Source: sequences of Elhage et al. 2021 ("A Mathematical Framework for Transformer Circuits", induction heads)
    and Olsson et al. 2022, with a random period.

    Attributes:
        d_vocab: number of different tokens, all equally likely.
        n_ctx: number of tokens that a model reads; a sequence has one more, its last target.
        min_period: length of the shortest segment; lengths are uniform.
        max_period: length of the longest segment, below `n_ctx`.

    Example:
        >>> RepeatedTokens(d_vocab=5, n_ctx=5, min_period=3, max_period=3).sample(1, seed=0).ids.shape
        torch.Size([1, 6])
    """

    d_vocab: AtLeastTwo = 64
    n_ctx: AtLeastTwo = 64
    min_period: Count = 4
    max_period: Count = 32

    def __post_init__(self):
        check_fields(self)
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


@dataclass(frozen=True, repr=False)
class MarkovChains(TokenDistribution):
    """Sequences of Markov chains with random transition matrices, one chain a sequence.

    Each row of a chain's transition matrix is drawn from a Dirichlet distribution. The best prediction counts which
    tokens followed earlier occurrences of the last one (`algorithms.bigram_bayes`); counting tokens alone
    (`algorithms.unigram_bayes`) is simpler, and models learn it first. `sample(n, seed=...)` draws `TokenSequences`.

    Source: Edelman et al. 2024, "The Evolution of Statistical Induction Heads".

    Attributes:
        d_vocab: number of states, each a token.
        n_ctx: number of tokens that a model reads; a sequence has one more, its last target.
        concentration: concentration of the Dirichlet distribution of each row; 1 is uniform over distributions, small
            values give nearly deterministic chains.
        start: distribution of the first state: "uniform", which is independent of the chain, so that `bigram_bayes` is
            exactly the best learner; or the chain's "stationary" distribution.

    Example:
        >>> chains = MarkovChains(d_vocab=3, n_ctx=50)
        >>> chains.sample(2, seed=0).ids.shape, chains.transitions(2, seed=0).shape
        (torch.Size([2, 51]), torch.Size([2, 3, 3]))
    """

    d_vocab: AtLeastTwo = 3
    n_ctx: AtLeastTwo = 64
    concentration: Positive = 1.0
    start: Literal["uniform", "stationary"] = "uniform"

    def __post_init__(self):
        check_fields(self)

    @checked
    def transitions(
        self, n_prompts: int, *, seed: int | None = None, generator: torch.Generator | None = None
    ) -> Float[Tensor, "prompt state next_state"]:
        """Return the transition matrices of the chains that `sample` draws with the same seed, float64; rows sum to 1.

        Args:
            n_prompts: number of chains, as for `sample`.
            seed: seed that `sample` was given; or a generator in the same state.
            generator: generator to use instead of a seed.
        """
        return self._transitions(n_prompts, RandomTensors(sampling_generator(n_prompts, seed, generator, None)))

    def _transitions(self, n_prompts: int, random: RandomTensors) -> Float[Tensor, "prompt state next_state"]:
        return random.dirichlet(self.concentration, n_prompts, self.d_vocab, self.d_vocab)

    def _sample(self, n_prompts: int, random: RandomTensors) -> TokenSequences:
        transitions = self._transitions(n_prompts, random)
        if self.start == "uniform":
            first = torch.full_like(transitions[:, 0], 1 / self.d_vocab)
        else:
            first = stationary_distributions(transitions)
        draws = random.uniform(n_prompts, self.n_ctx + 1)
        # the next state is the number of cumulated probabilities below a uniform number; the last of them is 1
        cumulated = transitions.cumsum(-1)[..., :-1]
        state = (draws[:, :1] > first.cumsum(-1)[:, :-1]).sum(-1)
        states, prompts = [state], torch.arange(n_prompts, device=random.device)
        for t in range(1, self.n_ctx + 1):
            state = (draws[:, t, None] > cumulated[prompts, state]).sum(-1)
            states.append(state)
        ids = torch.stack(states, dim=1)
        predictable = torch.arange(self.n_ctx + 1, device=random.device) > 0
        return TokenSequences(ids, predictable.expand_as(ids).clone())


def stationary_distributions(
    transitions: Float[Tensor, "*chain state next_state"],
) -> Float[Tensor, "*chain state"]:
    """Return the stationary distribution of each chain: `π P = π`, with entries that sum to 1.

    Example:
        >>> stationary_distributions(torch.tensor([[0.5, 0.5], [1.0, 0.0]]).double())
        tensor([0.6667, 0.3333], dtype=torch.float64)
    """
    k = transitions.shape[-1]
    # π (P - I + 1 1ᵀ) = 1ᵀ, which has one solution if all states of the chain can be reached
    matrix = transitions - torch.eye(k).to(transitions) + 1
    ones = torch.ones(*transitions.shape[:-2], k, 1).to(transitions)
    return torch.linalg.solve(matrix.mT, ones)[..., 0].clamp(min=0)
