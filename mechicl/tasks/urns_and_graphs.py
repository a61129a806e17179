"""Sequences of draws from an urn, and of random walks on a graph."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechicl.base.arguments import Count, Natural, Positive, check_fields
from mechicl.prompts import TokenSequences
from mechicl.tasks.sampling import RandomTensors, TokenDistribution
from mechicl.tasks.token_sequences import AtLeastTwo, MarkovChains


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
