"""Boolean functions of inputs in {-1, 1}: conjunctions and parities, one function a prompt."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import check_fields
from mechicl.base.checks import require_finite, require_whole
from mechicl.prompts import Prompts
from mechicl.tasks.sampling import PromptDistribution, RandomTensors


@dataclass(frozen=True)
class Conjunctions(PromptDistribution):
    """Conjunctions of literals: y is 1 where every literal of the function holds, else -1.

    Each variable is in the function with some probability, and then negated or not with equal chances. Inputs are
    uniform on {-1, 1}, but a share of them, at random places, is made to satisfy the function: of uniform inputs a
    conjunction of m literals accepts only one in 2^m. Both facts are part of what a learner may know, and the exact
    Bayes learner (`algorithms.conjunction_bayes`) uses both.

    Source: Bhattamishra et al. 2024, "Understanding in-context learning in transformers and LLMs by learning to learn
    discrete functions". They code inputs as 0 and 1, in 28 dimensions; eight leave a class that can be enumerated.

    Attributes:
        x_dim: number of variables.
        n_context: number of context points; the query comes on top.
        literal_probability: that a variable is in the function.
        positive_share: of the inputs, which are made to satisfy the function; the others are uniform, so that some of
            them do too.

    Raises:
        ValueError: a field out of range.

    Example:
        >>> Conjunctions(x_dim=5, n_context=8).sample(3, seed=0)
        Prompts(n_prompts=3, n_context=8, x_dim=5, y_dim=1, dtype=torch.float32, device='cpu')
    """

    x_dim: int = 8
    n_context: int = 30
    literal_probability: float = 0.3
    positive_share: float = 0.3

    def __post_init__(self):
        check_fields(self)
        require_whole(self, x_dim=1, n_context=0)
        _require_probabilities(self, "literal_probability", "positive_share")

    @property
    def y_dim(self) -> int:
        """One target, -1 or 1."""
        return 1

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        literals = random.signs(n_prompts, 1, self.x_dim)
        literals = literals * (random.uniform(n_prompts, 1, self.x_dim) < self.literal_probability)
        xs = random.signs(n_prompts, self.n_context + 1, self.x_dim)
        satisfied = random.uniform(n_prompts, self.n_context + 1, 1) < self.positive_share
        xs = torch.where(satisfied & (literals != 0), literals, xs)
        return Prompts(xs, evaluate_conjunctions(literals[:, 0], xs)[..., None])


def evaluate_conjunctions(
    literals: Float[Tensor, "*prompt x"], xs: Float[Tensor, "*prompt point x"]
) -> Float[Tensor, "*prompt point"]:
    """1 where all literals hold, else -1. A literal is the value that its variable must have, 0 if it may have any."""
    holds = (literals[..., None, :] == 0) | (literals[..., None, :] == xs)
    return 2 * holds.all(-1).to(xs.dtype) - 1


@dataclass(frozen=True)
class Parities(PromptDistribution):
    """Parities: y is the product of some of the inputs, which are uniform on {-1, 1}.

    The hard ones among simple functions: no variable alone tells anything about y. A parity is a linear function over
    the field of two elements, so that Gaussian elimination there solves it (`algorithms.gf2_elimination`).

    Source: Bhattamishra et al. 2024, with "parity" (any subset) and "sparse parity" (of a known size).

    Attributes:
        x_dim: number of variables.
        n_context: number of context points; the query comes on top.
        degree: number of variables in the product, all subsets of that size equally likely; None for any subset.

    Raises:
        ValueError: a field out of range.

    Example:
        >>> Parities(x_dim=10, degree=2).sample(3, seed=0).ys.unique()
        tensor([-1.,  1.])
    """

    x_dim: int = 10
    n_context: int = 40
    degree: int | None = 2

    def __post_init__(self):
        check_fields(self)
        require_whole(self, x_dim=1, n_context=0)
        if self.degree is not None:
            require_whole(self, degree=0)
            if self.degree > self.x_dim:
                raise ValueError(f"degree must be at most x_dim={self.x_dim}, got {self.degree}")

    @property
    def y_dim(self) -> int:
        """One target, -1 or 1."""
        return 1

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        xs = random.signs(n_prompts, self.n_context + 1, self.x_dim)
        draws = random.uniform(n_prompts, 1, self.x_dim)
        chosen = draws < 0.5 if self.degree is None else draws.argsort(-1).argsort(-1) < self.degree
        return Prompts(xs, torch.where(chosen, xs, torch.ones_like(xs)).prod(-1, keepdim=True))


def _require_probabilities(settings: object, *names: str) -> None:
    require_finite(settings, *names, least=0.0)
    for name in names:
        if getattr(settings, name) > 1:
            raise ValueError(f"{name} is a probability, got {getattr(settings, name)}")
