"""Sequences of draws from an urn, and of random walks on a graph."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechicl.base.arguments import Count, Natural, Positive, check_fields, checked
from mechicl.prompts import TokenSequences
from mechicl.tasks.sampling import RandomTensors, TokenDistribution, sampling_generator
from mechicl.tasks.token_sequences import AtLeastTwo


@dataclass(frozen=True, repr=False)
class BallsAndUrns(TokenDistribution):
    """Sequences of independent draws from an urn: new for each sequence, or from a finite pool.

    An urn is a distribution over tokens (colours of balls), drawn from a Dirichlet distribution; draws are with
    replacement. For new urns, counting tokens (`algorithms.unigram_bayes`) is exactly the best learner; for a finite
    pool it is Bayes over the urns (`algorithms.pool_bayes`). `sample(n, seed=...)` draws `TokenSequences`.

    Source: Wurgaft et al. 2025, after the finite pools of Park et al. 2024; their sizes are not reproduced here.

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

    @property
    def pool(self) -> Float[Tensor, "urn token"]:
        """Distributions of the finite pool, float64 on the CPU; rows sum to 1.

        Raises:
            ValueError: the task has no finite pool.
        """
        return self._pool.clone()

    @property
    def new_urns(self) -> "BallsAndUrns":
        """The task with a new urn in every sequence, from the distribution that the pool was drawn from."""
        return self.replace(n_urns=None)

    @cached_property
    def _pool(self) -> Float[Tensor, "urn token"]:
        if self.n_urns is None:
            raise ValueError("n_urns=None has no pool: every sequence has a new urn")
        random = RandomTensors(torch.Generator().manual_seed(self.urn_seed))
        return random.dirichlet(self.concentration, self.n_urns, self.d_vocab)

    @checked
    def urns(
        self, n_prompts: int, *, seed: int | None = None, generator: torch.Generator | None = None
    ) -> Float[Tensor, "prompt token"]:
        """Return the distributions that `sample` draws from with the same seed, float64; rows sum to 1.

        Args:
            n_prompts: number of urns, as for `sample`.
            seed: seed that `sample` was given; or a generator in the same state.
            generator: generator to use instead of a seed.
        """
        return self._urns(n_prompts, RandomTensors(sampling_generator(n_prompts, seed, generator, None)))

    def _urns(self, n_prompts: int, random: RandomTensors) -> Float[Tensor, "prompt token"]:
        if self.n_urns is None:
            return random.dirichlet(self.concentration, n_prompts, self.d_vocab)
        return self._pool.to(random.device)[random.integers(0, self.n_urns, n_prompts)]

    def _sample(self, n_prompts: int, random: RandomTensors) -> TokenSequences:
        # a token is the number of cumulated probabilities below a uniform number; the last of them is 1
        cumulated = self._urns(n_prompts, random).cumsum(-1)[:, None, :-1]
        ids = (random.uniform(n_prompts, self.n_ctx + 1)[..., None] > cumulated).sum(-1)
        return TokenSequences(ids, _all_but_first(ids))


@dataclass(frozen=True, repr=False)
class GraphTracing(TokenDistribution):
    """Random walks on a fixed graph whose nodes have tokens that are permuted anew for each sequence.

    The graph is a lattice: a grid, or with `periodic` a ring (one side) or a torus (two). A walk starts at a uniformly
    random node, and each step goes to one of the neighbours, all equally likely. A model must find out from the
    sequence which tokens are neighbours. `algorithms.seen_neighbours` predicts those that have been next to each other
    so far. `sample(n, seed=...)` draws `TokenSequences`.

    Source: Park et al. 2025, who give such walks to language models, with words as tokens.

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
            raise ValueError(
                f"sides must have at least 2 nodes in all, and with periodic=True at least 3 along each axis, got "
                f"{self.sides}"
            )

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

    @checked
    def tokens(
        self, n_prompts: int, *, seed: int | None = None, generator: torch.Generator | None = None
    ) -> Int[Tensor, "prompt node"]:
        """Return the token of each node in the sequences that `sample` draws with the same seed.

        Args:
            n_prompts: number of sequences, as for `sample`.
            seed: seed that `sample` was given; or a generator in the same state.
            generator: generator to use instead of a seed.
        """
        return self._tokens(n_prompts, RandomTensors(sampling_generator(n_prompts, seed, generator, None)))

    def _tokens(self, n_prompts: int, random: RandomTensors) -> Int[Tensor, "prompt node"]:
        return random.uniform(n_prompts, self.d_vocab).argsort(-1)

    def _sample(self, n_prompts: int, random: RandomTensors) -> TokenSequences:
        tokens, adjacency = self._tokens(n_prompts, random), self.adjacency
        degrees = adjacency.sum(1).to(random.device)
        neighbours = adjacency.double().argsort(dim=1, descending=True, stable=True).to(random.device)
        draws = random.uniform(n_prompts, self.n_ctx + 1)
        node = (draws[:, 0] * self.d_vocab).long()
        nodes = [node]
        for t in range(1, self.n_ctx + 1):
            node = neighbours[node, (draws[:, t] * degrees[node]).long()]
            nodes.append(node)
        ids = tokens.gather(1, torch.stack(nodes, dim=1))
        return TokenSequences(ids, _all_but_first(ids))


def _all_but_first(ids: Int[Tensor, "prompt pos"]) -> Bool[Tensor, "prompt pos"]:
    return (torch.arange(ids.shape[1], device=ids.device) > 0).expand_as(ids).clone()
