"""Markov chains, each sequence of a chain of its own: what follows a token must be counted in the context."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import check_fields
from mechicl.base.checks import check_positive, require_whole
from mechicl.prompts import TokenSequences
from mechicl.tasks.sampling import RandomTensors, TokenDistribution, sampling_generator


@dataclass(frozen=True)
class MarkovChains(TokenDistribution):
    """Sequences of Markov chains with random transition matrices, one chain a sequence.

    Each row of a chain's transition matrix is drawn from a Dirichlet distribution. The best prediction counts which
    tokens followed earlier occurrences of the last one (`algorithms.bigram_bayes`); counting tokens alone
    (`algorithms.unigram_bayes`) is the simpler one that models learn first.

    Source: Edelman et al. 2024, "The Evolution of Statistical Induction Heads".

    Attributes:
        d_vocab: number of states, each a token.
        n_ctx: number of tokens that a model reads; a sequence has one more, its last target.
        concentration: of the Dirichlet distribution of each row; 1 is uniform over distributions, and small ones are
            nearly deterministic.
        start: of the first state: "uniform", which tells nothing about the chain, so that `bigram_bayes` is exactly the
            best learner; or from the chain's "stationary" distribution.

    Raises:
        ValueError: a field out of range.

    Example:
        >>> chains = MarkovChains(d_vocab=3, n_ctx=50)
        >>> chains.sample(2, seed=0).ids.shape, chains.transitions(2, seed=0).shape
        (torch.Size([2, 51]), torch.Size([2, 3, 3]))
    """

    d_vocab: int = 3
    n_ctx: int = 64
    concentration: float = 1.0
    start: Literal["uniform", "stationary"] = "uniform"

    def __post_init__(self):
        check_fields(self)
        require_whole(self, d_vocab=2, n_ctx=2)
        check_positive(concentration=self.concentration)
        if self.start not in ("uniform", "stationary"):
            raise ValueError(f"start must be 'uniform' or 'stationary', got {self.start!r}")

    def transitions(
        self, n_prompts: int, *, seed: int | None = None, generator: torch.Generator | None = None
    ) -> Float[Tensor, "prompt state next_state"]:
        """The transition matrices of the chains that `sample` draws with the same seed, float64; rows sum to 1.

        Raises:
            ValueError: as for `sample`.
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
        # the next state is how many of the cumulated probabilities a uniform number exceeds; the last of them is 1
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
    """The distribution that each chain keeps: `π P = π`, with entries that sum to 1.

    Example:
        >>> stationary_distributions(torch.tensor([[0.5, 0.5], [1.0, 0.0]]).double())
        tensor([0.6667, 0.3333], dtype=torch.float64)
    """
    k = transitions.shape[-1]
    # π (P - I + 1 1ᵀ) = 1ᵀ, which has one solution for a chain whose states can all be reached
    matrix = transitions - torch.eye(k).to(transitions) + 1
    ones = torch.ones(*transitions.shape[:-2], k, 1).to(transitions)
    return torch.linalg.solve(matrix.mT, ones)[..., 0].clamp(min=0)
