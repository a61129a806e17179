"""Functions of Gaussian inputs beyond plain linear ones: sparse, quadratic, networks, trees, and two classes."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import check_fields
from mechicl.base.checks import check_positive, require_active_dims, require_finite, require_whole
from mechicl.prompts import Prompts
from mechicl.tasks.sampling import PromptDistribution, RandomTensors


@dataclass(frozen=True)
class GaussianPoints(PromptDistribution):
    """Targets of one dimension for standard normal inputs: the base of tasks that say in `_targets` what they are.

    Attributes:
        x_dim: dimension of the inputs.
        n_context: number of context points; the query comes on top.
        active_dims: all but the first so many input coordinates are zero (the curriculum of Garg et al. 2022).
    """

    x_dim: int = 20
    n_context: int = 40
    active_dims: int | None = None

    def __post_init__(self):
        check_fields(self)
        require_whole(self, x_dim=1, n_context=0)
        require_active_dims(self)

    @property
    def y_dim(self) -> int:
        """One target."""
        return 1

    @property
    def n_active(self) -> int:
        """Number of input coordinates that are not zero."""
        return self.x_dim if self.active_dims is None else self.active_dims

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        xs = random.normal(n_prompts, self.n_context + 1, self.x_dim)
        xs[..., self.n_active :] = 0
        return Prompts(xs, self._targets(xs, random)[..., None])

    @abstractmethod
    def _targets(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]: ...


@dataclass(frozen=True)
class NoisyPoints(GaussianPoints):
    """Values of a function that is drawn for each prompt, with Gaussian noise.

    Attributes:
        noise_std: standard deviation of the noise on the targets, the query's too.
    """

    noise_std: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        require_finite(self, "noise_std", least=0.0)

    def _targets(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        values = self._values(xs, random)
        return values + self.noise_std * random.normal(*values.shape) if self.noise_std else values

    @abstractmethod
    def _values(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]: ...


@dataclass(frozen=True)
class SparseLinearRegression(NoisyPoints):
    """Linear functions of which only a few weights, at random places, are not zero; these are standard normal.

    Source: Garg et al. 2022, section 5 (3 of 20 weights, 100 points).

    Attributes:
        x_dim: dimension of the inputs, standard normal.
        n_context: number of context points; the query comes on top.
        active_dims: all but the first so many input coordinates are zero, and so are their weights.
        noise_std: standard deviation of the noise on the targets, the query's too.
        sparsity: number of weights that are not zero.

    Raises:
        ValueError: a field is out of range.

    Example:
        >>> SparseLinearRegression(x_dim=5, n_context=10, sparsity=2).sample(3, seed=0).ys.shape
        torch.Size([3, 11, 1])
    """

    n_context: int = 100
    sparsity: int = 3

    def __post_init__(self):
        super().__post_init__()
        require_whole(self, sparsity=1)
        if self.sparsity > self.x_dim:
            raise ValueError(f"sparsity must be 1 to x_dim={self.x_dim}, got {self.sparsity}")

    def _values(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        places = random.uniform(len(xs), self.x_dim)
        places[:, self.n_active :] = 2.0  # after all others
        kept = places.argsort(-1).argsort(-1) < min(self.sparsity, self.n_active)
        return torch.einsum("npx,nx->np", xs, random.normal(len(xs), self.x_dim) * kept)


@dataclass(frozen=True)
class QuadraticRegression(NoisyPoints):
    """Weighted sums of squares `y = Σ_i w_i x_i² / √3` with standard normal weights: as large as linear functions are.

    Source: the authors' code of Garg et al. 2022.

    Attributes:
        x_dim: dimension of the inputs, standard normal.
        n_context: number of context points; the query comes on top.
        active_dims: all but the first so many input coordinates are zero.
        noise_std: standard deviation of the noise on the targets, the query's too.

    Raises:
        ValueError: a field is out of range.
    """

    def _values(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        # E x⁴ = 3, so that with this factor y has the variance x_dim, as x w does
        return torch.einsum("npx,nx->np", xs.square(), random.normal(len(xs), self.x_dim)) / math.sqrt(3)


@dataclass(frozen=True)
class ReluNetworks(NoisyPoints):
    """Two-layer networks `y = √(2/r) Σ_j a_j relu(x w_j)` with r hidden units and standard normal weights.

    Source: Garg et al. 2022, section 5 (100 hidden units, 20 inputs, 100 points).

    Attributes:
        x_dim: dimension of the inputs, standard normal.
        n_context: number of context points; the query comes on top.
        active_dims: all but the first so many input coordinates are zero.
        noise_std: standard deviation of the noise on the targets, the query's too.
        n_hidden: number of hidden units, r.

    Raises:
        ValueError: a field is out of range.
    """

    n_context: int = 100
    n_hidden: int = 100

    def __post_init__(self):
        super().__post_init__()
        require_whole(self, n_hidden=1)

    def _values(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        hidden = (xs @ random.normal(len(xs), self.x_dim, self.n_hidden)).relu()
        return (hidden @ random.normal(len(xs), self.n_hidden, 1))[..., 0] * math.sqrt(2 / self.n_hidden)


@dataclass(frozen=True)
class DecisionTrees(NoisyPoints):
    """Full binary trees: each inner node looks at the sign of one random input, and each leaf has a normal value.

    Source: Garg et al. 2022, section 5 (depth 4, 20 inputs, 100 points).

    Attributes:
        x_dim: dimension of the inputs, standard normal.
        n_context: number of context points; the query comes on top.
        active_dims: all but the first so many input coordinates are zero, and no node looks at them.
        noise_std: standard deviation of the noise on the targets, the query's too.
        depth: number of inner nodes on the way to a leaf.

    Raises:
        ValueError: a field is out of range.
    """

    n_context: int = 100
    depth: int = 4

    def __post_init__(self):
        super().__post_init__()
        require_whole(self, depth=1)

    def _values(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        inputs = random.integers(0, self.n_active, len(xs), 2**self.depth)  # entry 0 is no node
        leaves = random.normal(len(xs), 2**self.depth)
        node = torch.ones(xs.shape[:2], dtype=torch.long, device=xs.device)  # node k has the children 2k and 2k + 1
        for _ in range(self.depth):
            looked_at = inputs.gather(1, node)
            node = 2 * node + (xs.gather(2, looked_at[..., None])[..., 0] > 0).long()
        return leaves.gather(1, node - 2**self.depth)


@dataclass(frozen=True)
class LogisticRegression(GaussianPoints):
    """Two classes, -1 and 1, on the sides of a random plane: `P(y = 1) = 1 / (1 + exp(-x w))`, w normal.

    Source: Bai et al. 2023; their experiments have labels that are the sign of `x w`.

    Attributes:
        x_dim: dimension of the inputs, standard normal.
        n_context: number of context points; the query comes on top.
        active_dims: all but the first so many input coordinates are zero.
        weight_scale: standard deviation of the weights.
        labels: "sampled" with that probability, or the "sign" of `x w`.

    Raises:
        ValueError: a field is out of range.

    Example:
        >>> LogisticRegression(x_dim=5).sample(100, seed=0).ys.unique()
        tensor([-1.,  1.])
    """

    weight_scale: float = 1.0
    labels: Literal["sampled", "sign"] = "sampled"

    def __post_init__(self):
        super().__post_init__()
        check_positive(weight_scale=self.weight_scale)
        if self.labels not in ("sampled", "sign"):
            raise ValueError(f"labels must be 'sampled' or 'sign', got {self.labels!r}")

    def _targets(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        scores = torch.einsum("npx,nx->np", xs, self.weight_scale * random.normal(len(xs), self.x_dim))
        ones = random.uniform(*scores.shape) < scores.sigmoid() if self.labels == "sampled" else scores > 0
        return 2 * ones.to(xs) - 1
