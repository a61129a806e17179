"""Boolean functions of inputs in {-1, 1}: conjunctions and parities, one function a prompt."""

from dataclasses import dataclass

import torch

from mechicl.base.arguments import Count, Fraction, Natural, check_fields
from mechicl.prompts import Prompts
from mechicl.tasks.sampling import PromptDistribution, RandomTensors


@dataclass(frozen=True, repr=False)
class Conjunctions(PromptDistribution):
    """Conjunctions of literals: y is 1 where every literal of the prompt's function is true, else -1.

    A literal is a variable or its negation. Each variable is in the function with some probability, and is then negated
    or not with equal chances. Inputs are uniform on {-1, 1}, but some of them, chosen at random, are made to satisfy
    the function: a conjunction of m literals accepts only one uniform input in 2^m. The exact Bayes learner
    (`algorithms.conjunction_bayes`) uses both probabilities. `sample(n, seed=...)` draws `Prompts`, one function each.
    Source: Bhattamishra et al. 2024, "Understanding in-context learning in transformers and LLMs by learning to learn
    discrete functions". They code inputs as 0 and 1, in 28 dimensions; eight leave a class that can be enumerated.

    Attributes:
        x_dim: number of variables.
        n_context: number of context points, without the query.
        literal_probability: probability that a variable is in the function.
        positive_share: share of the inputs that are made to satisfy the function; some of the others do by chance.

    Example:
        >>> Conjunctions(x_dim=5, n_context=8).sample(3, seed=0)
        Prompts(n_prompts=3, n_context=8, x_dim=5, y_dim=1, dtype=torch.float32, device='cpu')
    """

    x_dim: Count = 8
    n_context: Natural = 30
    literal_probability: Fraction = 0.3
    positive_share: Fraction = 0.3
    y_dim = 1

    def __post_init__(self):
        check_fields(self)

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        literals = random.signs(n_prompts, 1, self.x_dim)
        literals = literals * (random.uniform(n_prompts, 1, self.x_dim) < self.literal_probability)
        xs = random.signs(n_prompts, self.n_context + 1, self.x_dim)
        satisfied = random.uniform(n_prompts, self.n_context + 1, 1) < self.positive_share
        xs = torch.where(satisfied & (literals != 0), literals, xs)
        true = (literals == 0) | (literals == xs)  # a literal is the value its variable must have, 0 if any will do
        return Prompts(xs, 2 * true.all(-1, keepdim=True).to(xs.dtype) - 1)


@dataclass(frozen=True, repr=False)
class Parities(PromptDistribution):
    """Parities: y is the product of some of the inputs, which are uniform on {-1, 1}; one subset of them a prompt.

    They are hard: no single variable is correlated with y. A parity is a linear function over the field of two
    elements, so Gaussian elimination in that field solves it (`algorithms.gf2_elimination`). `sample(n, seed=...)`
    draws `Prompts`. Source: Bhattamishra et al. 2024, with "parity" (any subset) and "sparse parity" (of a known size).

    Attributes:
        x_dim: number of variables.
        n_context: number of context points, without the query.
        degree: number of variables in the product, all subsets of that size equally likely; None for any subset.

    Example:
        >>> Parities(x_dim=10, degree=2).sample(3, seed=0).ys.unique()
        tensor([-1.,  1.])
    """

    x_dim: Count = 10
    n_context: Natural = 40
    degree: Natural | None = 2
    y_dim = 1

    def __post_init__(self):
        check_fields(self)
        if self.degree is not None and self.degree > self.x_dim:
            raise ValueError(f"degree must be at most x_dim={self.x_dim}, got {self.degree}")

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        xs = random.signs(n_prompts, self.n_context + 1, self.x_dim)
        draws = random.uniform(n_prompts, 1, self.x_dim)
        chosen = draws < 0.5 if self.degree is None else draws.argsort(-1).argsort(-1) < self.degree
        return Prompts(xs, torch.where(chosen, xs, torch.ones_like(xs)).prod(-1, keepdim=True))
