"""Sequences of tokens: repeated, of Markov chains, draws from an urn, and random walks on a graph."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechicl.base.arguments import Count, Natural, Positive, at_least, check_fields, checked
from mechicl.prompts import TokenSequences
from mechicl.tasks.sampling import RandomTensors, TokenDistribution, sampling_generator

AtLeastTwo = Annotated[int, at_least(2)]
MOST_HISTORIES = 2**12
"""Largest number of rows of a transition matrix."""


@dataclass(frozen=True, repr=False)
class RepeatedTokens(TokenDistribution):
    """Sequences that repeat a random segment of tokens until they are full: the task that induction heads solve.

    From the second token of the second copy on, every token can be predicted: it is the token that followed the
    previous occurrence. The segment's length is random for each sequence, so attending a fixed distance back does not
    help: a model has to find the token's earlier occurrence, as induction heads do. `sample(n, seed=...)` draws
    `TokenSequences`. Source: sequences of Elhage et al. 2021 ("A Mathematical Framework for Transformer Circuits",
    induction heads) and Olsson et al. 2022, with a random period.

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
    """Sequences of Markov chains with random transition matrices: new for each sequence, or from a finite pool.

    Each row of a chain's transition matrix is drawn from a Dirichlet distribution. For new chains, the best prediction
    counts which tokens followed earlier occurrences of the last one (`algorithms.bigram_bayes`; for a higher order,
    `algorithms.ngram_bayes`); counting tokens alone (`algorithms.unigram_bayes`) is simpler, and models learn it first.
    For a finite pool, the best prediction is Bayes over its chains (`algorithms.pool_bayes`). `sample(n, seed=...)`
    draws `TokenSequences`. Source: Edelman et al. 2024, "The Evolution of Statistical Induction Heads"; Park et al.
    2024 for finite pools.

    Attributes:
        d_vocab: number of states, each a token.
        n_ctx: number of tokens that a model reads; a sequence has one more, its last target.
        concentration: concentration of the Dirichlet distribution of each row; 1 is uniform over distributions, small
            values give nearly deterministic chains.
        start: distribution of the first state: "uniform", which is independent of the chain, so that `bigram_bayes` is
            exactly the best learner; or the chain's "stationary" distribution (for order 1).
        n_chains: number of chains in a finite pool, all equally likely; None for a new chain in each sequence.
        chain_seed: seed of the pool.
        order: number of previous tokens that the next one depends on; with 0 tokens are independent. The first `order`
            tokens are drawn from `start` and are not scored.

    Example:
        >>> chains = MarkovChains(d_vocab=3, n_ctx=50)
        >>> chains.sample(2, seed=0).ids.shape, chains.transitions(2, seed=0).shape
        (torch.Size([2, 51]), torch.Size([2, 3, 3]))
        >>> MarkovChains(d_vocab=3, n_chains=16, order=2).pool.shape
        torch.Size([16, 9, 3])
    """

    d_vocab: AtLeastTwo = 3
    n_ctx: AtLeastTwo = 64
    concentration: Positive = 1.0
    start: Literal["uniform", "stationary"] = "uniform"
    n_chains: Count | None = None
    chain_seed: Natural = 0
    order: Natural = 1

    def __post_init__(self):
        check_fields(self)
        if self.order >= self.n_ctx or self.d_vocab**self.order > MOST_HISTORIES:
            raise ValueError(
                f"order must be below n_ctx={self.n_ctx} with d_vocab ** order at most {MOST_HISTORIES}, got "
                f"order={self.order} and d_vocab={self.d_vocab}"
            )
        if self.start == "stationary" and self.order != 1:
            raise ValueError(f"start='stationary' needs order=1, got order={self.order}")

    @property
    def pool(self) -> Float[Tensor, "chain history next_state"]:
        """Transition matrices of the finite pool, float64 on the CPU, with rows as in `transitions`."""
        return self._pool.clone()

    @property
    def new_chains(self) -> "MarkovChains":
        """The task with a new chain in every sequence, from the distribution that the pool was drawn from."""
        return self.replace(n_chains=None)

    @cached_property
    def _pool(self) -> Float[Tensor, "chain history next_state"]:
        if self.n_chains is None:
            raise ValueError("n_chains=None has no pool: every sequence has a new chain")
        random = RandomTensors(torch.Generator().manual_seed(self.chain_seed))
        return random.dirichlet(self.concentration, self.n_chains, self.d_vocab**self.order, self.d_vocab)

    @checked
    def transitions(
        self, n_prompts: int, *, seed: int | None = None, generator: torch.Generator | None = None
    ) -> Float[Tensor, "prompt history next_state"]:
        """Return the transition matrices of the chains that `sample` draws with the same seed, float64; rows sum to 1.

        For order 1 a row is the current state. For a higher order it is the number that the last `order` states have as
        digits of base `d_vocab`, the current state last.

        Args:
            n_prompts: number of chains, as for `sample`.
            seed: seed that `sample` was given; or a generator in the same state.
            generator: generator to use instead of a seed.
        """
        return self._transitions(n_prompts, RandomTensors(sampling_generator(n_prompts, seed, generator, None)))

    def _transitions(self, n_prompts: int, random: RandomTensors) -> Float[Tensor, "prompt history next_state"]:
        if self.n_chains is None:
            return random.dirichlet(self.concentration, n_prompts, self.d_vocab**self.order, self.d_vocab)
        return self._pool.to(random.device)[random.integers(0, self.n_chains, n_prompts)]

    def _sample(self, n_prompts: int, random: RandomTensors) -> TokenSequences:
        transitions = self._transitions(n_prompts, random)
        if self.start == "uniform":
            first = torch.full_like(transitions[:, 0], 1 / self.d_vocab)
        else:
            first = stationary_distributions(transitions)
        draws = random.uniform(n_prompts, self.n_ctx + 1)
        # the next state is the number of cumulated probabilities below a uniform number; the last of them is 1
        cumulated = transitions.cumsum(-1)[..., :-1]
        prompts = torch.arange(n_prompts, device=random.device)
        states, history = [], torch.zeros_like(prompts)
        for t in range(self.n_ctx + 1):
            below = first.cumsum(-1)[:, :-1] if t < self.order else cumulated[prompts, history]
            states.append((draws[:, t, None] > below).sum(-1))
            history = (history * self.d_vocab + states[-1]) % self.d_vocab**self.order
        ids = torch.stack(states, dim=1)
        predictable = torch.arange(self.n_ctx + 1, device=random.device) >= max(self.order, 1)
        return TokenSequences(ids, predictable.expand_as(ids).clone())


def stationary_distributions(transitions: Float[Tensor, "*chain state next_state"]) -> Float[Tensor, "*chain state"]:
    """Return the stationary distribution of each chain: `π P = π`, with entries that sum to 1.

    If a chain has several, because some states cannot be reached from others, it is the one with the least norm.

    Example:
        >>> stationary_distributions(torch.tensor([[0.5, 0.5], [1.0, 0.0]]).double())
        tensor([0.6667, 0.3333], dtype=torch.float64)
    """
    k = transitions.shape[-1]
    # π (P - I + 1 1ᵀ) = 1ᵀ, which has one solution if all states of the chain can be reached
    matrix = transitions - torch.eye(k).to(transitions) + 1
    ones = torch.ones(*transitions.shape[:-2], k, 1).to(transitions)
    found = torch.linalg.solve_ex(matrix.mT, ones).result[..., 0]
    rounding = torch.finfo(found.dtype).eps ** 0.5
    left = ((found[..., None, :] @ transitions)[..., 0, :] - found).abs().amax(-1)
    several = ~((left < rounding) & (found.amin(-1) > -rounding))  # or nearly
    if several.any():
        found[several] = (torch.linalg.pinv(matrix[several].mT, rtol=rounding) @ ones[several])[..., 0]
    found = found.clamp(min=0)
    return torch.where(several[..., None], found / found.sum(-1, keepdim=True), found)


@dataclass(frozen=True, repr=False)
class BallsAndUrns(TokenDistribution):
    """Sequences of draws from an urn with replacement; urns are new for each sequence, or from a finite pool.

    An urn is a distribution over tokens (colours of balls), drawn from a Dirichlet distribution. For new urns, counting
    tokens (`algorithms.unigram_bayes`) is exactly the best learner; for a finite pool it is Bayes over the urns
    (`algorithms.pool_bayes`). `sample(n, seed=...)` draws `TokenSequences`. Source: Wurgaft et al. 2025, after the
    finite pools of Park et al. 2024; their sizes are not reproduced here.

    Attributes:
        d_vocab: number of colours, each a token.
        n_ctx: number of tokens that a model reads; a sequence has one more, its last target.
        concentration: concentration of the Dirichlet distribution of urns; 1 is uniform over distributions.
        n_urns: number of urns in a finite pool, all equally likely; None for a new urn in each sequence.
        urn_seed: seed of the pool.

    Example:
        >>> task = BallsAndUrns(d_vocab=4, n_ctx=20, n_urns=8)
        >>> task.sample(2, seed=0).ids.shape, task.pool.shape
        (torch.Size([2, 21]), torch.Size([8, 4]))
    """

    d_vocab: AtLeastTwo = 8
    n_ctx: AtLeastTwo = 64
    concentration: Positive = 1.0
    n_urns: Count | None = None
    urn_seed: Natural = 0

    def __post_init__(self):
        check_fields(self)

    @cached_property
    def chains(self) -> MarkovChains:
        """The same task as Markov chains of order 0."""
        return MarkovChains(self.d_vocab, self.n_ctx, self.concentration, "uniform", self.n_urns, self.urn_seed, 0)

    @property
    def pool(self) -> Float[Tensor, "urn token"]:
        """Distributions of the finite pool, float64 on the CPU; rows sum to 1."""
        return self.chains.pool[:, 0]

    @property
    def new_urns(self) -> "BallsAndUrns":
        """The task with a new urn in every sequence, from the distribution that the pool was drawn from."""
        return self.replace(n_urns=None)

    def _sample(self, n_prompts: int, random: RandomTensors) -> TokenSequences:
        return self.chains._sample(n_prompts, random)


@dataclass(frozen=True, repr=False)
class GraphTracing(TokenDistribution):
    """Random walks on a fixed graph whose nodes have tokens that are permuted anew for each sequence.

    The graph is a lattice: a grid, or with `periodic` a ring (one side) or a torus (two). A walk starts at a uniformly
    random node, and each step goes to one of the neighbours, all equally likely. A model must find out from the
    sequence which tokens are neighbours. `sample(n, seed=...)` draws `TokenSequences`. Source: Park et al. 2025, who
    give such walks to language models, with words as tokens.

    Attributes:
        sides: number of nodes along each axis of the lattice; (4, 4) is the paper's grid.
        periodic: join the ends of each axis; sides are then at least 3.
        n_ctx: number of tokens that a model reads; a sequence has one more, its last target.

    Example:
        >>> task = GraphTracing(sides=(10,), periodic=True, n_ctx=30)
        >>> task.d_vocab, task.adjacency.sum(1).unique().tolist(), task.sample(2, seed=0).ids.shape
        (10, [2], torch.Size([2, 31]))
    """

    sides: tuple[Count, ...] = (4, 4)
    periodic: bool = False
    n_ctx: AtLeastTwo = 128

    def __post_init__(self):
        check_fields(self)
        if not self.sides or self.d_vocab < 2 or (self.periodic and min(self.sides) < 3):
            raise ValueError(f"sides must have 2 or more nodes, with periodic=True 3 along each axis, got {self.sides}")

    @property
    def d_vocab(self) -> int:
        """Number of nodes, each with a token."""
        return math.prod(self.sides)

    @property
    def adjacency(self) -> Bool[Tensor, "node other_node"]:
        """True for pairs of nodes that an edge joins."""
        places = torch.cartesian_prod(*map(torch.arange, self.sides)).view(-1, len(self.sides))
        apart = (places[:, None] - places).abs()
        if self.periodic:
            apart = torch.minimum(apart, torch.tensor(self.sides) - apart)
        return apart.sum(-1) == 1

    def _tokens(self, n_prompts: int, random: RandomTensors) -> Int[Tensor, "prompt node"]:
        return random.uniform(n_prompts, self.d_vocab).argsort(-1)

    def _sample(self, n_prompts: int, random: RandomTensors) -> TokenSequences:
        tokens, adjacency = self._tokens(n_prompts, random), self.adjacency.to(random.device)
        degrees, neighbours = adjacency.sum(1), adjacency.double().argsort(dim=1, descending=True, stable=True)
        draws = random.uniform(n_prompts, self.n_ctx + 1)
        nodes = [(draws[:, 0] * self.d_vocab).long()]
        for t in range(1, self.n_ctx + 1):
            nodes.append(neighbours[nodes[-1], (draws[:, t] * degrees[nodes[-1]]).long()])
        ids = tokens.gather(1, torch.stack(nodes, dim=1))
        return TokenSequences(ids, (torch.arange(ids.shape[1], device=ids.device) > 0).expand_as(ids).clone())
