"""Functions of one target: sparse, quadratic and drifting ones, networks, trees, two classes, sine waves, recall."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import Count, Natural, NonNegative, Positive, between, check_fields
from mechicl.prompts import Prompts
from mechicl.tasks.sampling import PromptDistribution, RandomTensors, check_active_dims


@dataclass(frozen=True, repr=False)
class GaussianInputs(PromptDistribution):
    """Base of tasks with one target and standard normal inputs; `SparseLinearRegression` describes the fields."""

    x_dim: Count = 20
    n_context: Natural = 40
    active_dims: Count | None = None
    y_dim = 1

    def __post_init__(self):
        check_fields(self)
        check_active_dims(self)

    @property
    def n_active(self) -> int:
        """Number of input coordinates that are not zero."""
        return self.x_dim if self.active_dims is None else self.active_dims


@dataclass(frozen=True, repr=False)
class GaussianPoints(GaussianInputs):
    """Base of those whose targets `_targets` computes from independent inputs."""

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        xs = random.normal(n_prompts, self.n_context + 1, self.x_dim)
        xs[..., self.n_active :] = 0
        return Prompts(xs, self._targets(xs, random)[..., None])

    @abstractmethod
    def _targets(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]: ...


@dataclass(frozen=True, repr=False)
class NoisyPoints(GaussianPoints):
    """Base of functions drawn for each prompt, whose values `_values` computes, with Gaussian noise added."""

    noise_std: NonNegative = 0.0

    def _targets(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        values = self._values(xs, random)
        return values + self.noise_std * random.normal(*values.shape) if self.noise_std else values

    @abstractmethod
    def _values(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]: ...


@dataclass(frozen=True, repr=False)
class SparseLinearRegression(NoisyPoints):
    """Linear functions of which only a few weights, at random places, are not zero; these are standard normal.

    `sample(n, seed=...)` draws `Prompts`, one function each. `algorithms.references` has their best known learners.
    Source: Garg et al. 2022, section 5 (3 of 20 weights, 100 points).

    Attributes:
        x_dim: dimension of the inputs, which are standard normal.
        n_context: number of context points, without the query.
        active_dims: number of input coordinates that are not zero, the first ones; None for all (used by curricula).
        noise_std: standard deviation of Gaussian noise on all targets, the query's too.
        sparsity: number of weights that are not zero.

    Example:
        >>> SparseLinearRegression(x_dim=5, n_context=10, sparsity=2).sample(3, seed=0).ys.shape
        torch.Size([3, 11, 1])
    """

    n_context: Natural = 100
    sparsity: Count = 3

    def __post_init__(self):
        super().__post_init__()
        if self.sparsity > self.x_dim:
            raise ValueError(f"sparsity must be 1 to x_dim={self.x_dim}, got {self.sparsity}")

    def _values(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        places = random.uniform(len(xs), self.x_dim)
        places[:, self.n_active :] = 2.0  # after all others
        kept = places.argsort(-1).argsort(-1) < min(self.sparsity, self.n_active)
        return torch.einsum("npx,nx->np", xs, random.normal(len(xs), self.x_dim) * kept)


@dataclass(frozen=True, repr=False)
class QuadraticRegression(NoisyPoints):
    """Weighted sums of squares `y = Σ_i w_i x_i² / √3` with standard normal weights; y has the variance of `x w`.

    `sample(n, seed=...)` draws `Prompts`, one function each. Source: the authors' code of Garg et al. 2022.

    Attributes:
        x_dim, n_context, active_dims, noise_std: as for `SparseLinearRegression`.
    """

    def _values(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        # E x⁴ = 3, so that with this factor y has the variance x_dim, as x w does
        return torch.einsum("npx,nx->np", xs.square(), random.normal(len(xs), self.x_dim)) / math.sqrt(3)


@dataclass(frozen=True, repr=False)
class ReluNetworks(NoisyPoints):
    """Two-layer networks `y = √(2/r) Σ_j a_j relu(x w_j)` with r hidden units and standard normal weights.

    `sample(n, seed=...)` draws `Prompts`, one network each. Source: Garg et al. 2022, section 5 (100 hidden units, 20
    inputs, 100 points).

    Attributes:
        x_dim, n_context, active_dims, noise_std: as for `SparseLinearRegression`.
        n_hidden: number of hidden units, r.
    """

    n_context: Natural = 100
    n_hidden: Count = 100

    def _values(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        hidden = (xs @ random.normal(len(xs), self.x_dim, self.n_hidden)).relu()
        return (hidden @ random.normal(len(xs), self.n_hidden, 1))[..., 0] * math.sqrt(2 / self.n_hidden)


@dataclass(frozen=True, repr=False)
class DecisionTrees(NoisyPoints):
    """Full binary trees: each inner node tests the sign of one random input, and each leaf has a standard normal value.

    `sample(n, seed=...)` draws `Prompts`, one tree each. Source: Garg et al. 2022, section 5 (depth 4, 20 inputs, 100
    points).

    Attributes:
        x_dim, n_context, active_dims, noise_std: as for `SparseLinearRegression`.
        depth: number of inner nodes on the way to a leaf.
    """

    n_context: Natural = 100
    depth: Count = 4

    def _values(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        inputs = random.integers(0, self.n_active, len(xs), 2**self.depth)  # entry 0 is unused
        leaves = random.normal(len(xs), 2**self.depth)
        node = torch.ones(xs.shape[:2], dtype=torch.long, device=xs.device)  # node k has the children 2k and 2k + 1
        for _ in range(self.depth):
            tested = inputs.gather(1, node)
            node = 2 * node + (xs.gather(2, tested[..., None])[..., 0] > 0).long()
        return leaves.gather(1, node - 2**self.depth)


@dataclass(frozen=True, repr=False)
class LogisticRegression(GaussianPoints):
    """Two classes, -1 and 1, on the sides of a random plane: `P(y = 1) = 1 / (1 + exp(-x w))`, w normal.

    `sample(n, seed=...)` draws `Prompts`, one plane each. Source: Bai et al. 2023; their experiments have labels that
    are the sign of `x w`.

    Attributes:
        x_dim, n_context, active_dims: as for `SparseLinearRegression`.
        weight_scale: standard deviation of the weights w.
        labels: "sampled" draws each label with that probability; "sign" takes the sign of `x w`.

    Example:
        >>> LogisticRegression(x_dim=5).sample(100, seed=0).ys.unique()
        tensor([-1.,  1.])
    """

    weight_scale: Positive = 1.0
    labels: Literal["sampled", "sign"] = "sampled"

    def _targets(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        scores = torch.einsum("npx,nx->np", xs, self.weight_scale * random.normal(len(xs), self.x_dim))
        ones = random.uniform(*scores.shape) < scores.sigmoid() if self.labels == "sampled" else scores > 0
        return 2 * ones.to(xs) - 1


@dataclass(frozen=True, repr=False)
class MixedRegression(GaussianPoints):
    """Linear functions with noise, where each prompt has one of a few noise levels and weight scales.

    Which ridge penalty is best differs from prompt to prompt and must be inferred from the context: the best predictor,
    `algorithms.mixture_bayes`, averages ridge regressions by the likelihood of their setting. `sample(n, seed=...)`
    draws `Prompts`. Source: Bai et al. 2023, on mixed noise levels: noise 0.1 or 0.5, weights N(0, I/d) in d = 20
    dimensions, 40 points.

    Attributes:
        x_dim, n_context, active_dims: as for `SparseLinearRegression`.
        noise_stds: standard deviations of the label noise, one for each setting; all settings are equally likely.
        weight_stds: standard deviations of the weights, one for each setting, or one for all; by default 1/√x_dim.

    Example:
        >>> MixedRegression(x_dim=5, noise_stds=(0.1, 0.5, 0.1), weight_stds=(1.0, 1.0, 3.0)).settings
        ((0.1, 1.0), (0.5, 1.0), (0.1, 3.0))
    """

    noise_stds: tuple[Positive, ...] = (0.1, 0.5)
    weight_stds: tuple[Positive, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        n = len(self.noise_stds)
        if not n or len(self.weight_stds) not in (0, 1, n):
            raise ValueError(
                f"noise_stds needs one value or more, and weight_stds one for each of the {n} noise_stds, one for all, "
                f"or none, got {self.weight_stds}"
            )

    @property
    def settings(self) -> tuple[tuple[float, float], ...]:
        """Pairs (noise, weights) of standard deviations; each prompt has one of them, all equally likely."""
        stds = self.weight_stds or (self.x_dim**-0.5,)
        stds = stds * len(self.noise_stds) if len(stds) == 1 else stds
        return tuple(zip(self.noise_stds, stds, strict=True))

    def _targets(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        choice = random.integers(0, len(self.settings), len(xs))
        noise_std, weight_std = torch.tensor(self.settings, dtype=xs.dtype, device=xs.device)[choice].unbind(-1)
        weights = weight_std[:, None] * random.normal(len(xs), self.x_dim)
        noise = noise_std[:, None] * random.normal(*xs.shape[:2])
        return torch.einsum("npx,nx->np", xs, weights) + noise


@dataclass(frozen=True, repr=False)
class SineRegression(PromptDistribution):
    """Sine waves `y = a sin(x + phase)` of one input, with a random amplitude and phase for each prompt, without noise.

    `sample(n, seed=...)` draws `Prompts`. Source: von Oswald et al. 2023, A.7. The paper prints amplitudes from U(0.1,
    5); the authors' code, and this default, has U(0.1, 0.5). Their code also draws amplitude and phase with the same
    random key, so that one determines the other (their correlation is 1): `amplitude_phase="one_key"`. The default is
    the text's, two independent numbers.

    Attributes:
        n_context: number of context points, without the query.
        x_range: interval of the inputs, which are uniform.
        amplitude_range: interval of the amplitudes a, uniform.
        phase_range: interval of the phases in radians, uniform.
        amplitude_phase: "independent" draws the two separately; "one_key" puts both at the same fraction of their
            intervals.
    """

    n_context: Natural = 10
    x_range: tuple[float, float] = (-5.0, 5.0)
    amplitude_range: tuple[float, float] = (0.1, 0.5)
    phase_range: tuple[float, float] = (0.0, math.pi)
    amplitude_phase: Literal["independent", "one_key"] = "independent"
    x_dim = 1
    y_dim = 1

    def __post_init__(self):
        check_fields(self)
        for name in ("x_range", "amplitude_range", "phase_range"):
            low, high = getattr(self, name)
            if not -math.inf < low <= high < math.inf:
                raise ValueError(f"{name} must be (low, high), finite, with low <= high, got {(low, high)}")

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        def between(interval: tuple[float, float], shares: Tensor) -> Tensor:
            low, high = interval
            return low + (high - low) * shares

        xs = between(self.x_range, random.uniform(n_prompts, self.n_context + 1, 1))
        key = random.uniform(n_prompts, 1, 1)
        amplitude = between(self.amplitude_range, key)
        other_key = key if self.amplitude_phase == "one_key" else random.uniform(n_prompts, 1, 1)
        return Prompts(xs, amplitude * torch.sin(xs + between(self.phase_range, other_key)))


@dataclass(frozen=True, repr=False)
class DriftingRegression(NoisyPoints):
    """Linear functions whose weights take a random walk along the prompt, so that old points mislead.

    `w_t = √(1 - ρ) w_{t-1} + √ρ e_t` with standard normal `w_0` and e, so the weights' variance stays 1. The query has
    the last weights. `sample(n, seed=...)` draws `Prompts`.

    Source: Haykin 2002, chapter 14 (tracking a random walk).

    Attributes:
        x_dim, n_context, active_dims, noise_std: as for `SparseLinearRegression`.
        renewed: ρ, the share of the weights' variance that is new at each point.

    Example:
        >>> DriftingRegression(x_dim=5, n_context=20, renewed=0.1).sample(3, seed=0).ys.shape
        torch.Size([3, 21, 1])
    """

    n_context: Natural = 20
    renewed: Annotated[float, between(0, 1)] = 0.05

    def _values(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        steps = random.normal(*xs.shape)
        weights = [steps[:, 0]]
        for t in range(1, xs.shape[1]):
            weights.append((1 - self.renewed) ** 0.5 * weights[-1] + self.renewed**0.5 * steps[:, t])
        return (xs * torch.stack(weights, dim=1)).sum(-1)


@dataclass(frozen=True, repr=False)
class AssociativeRecall(GaussianInputs):
    """Pairs of random inputs and unrelated targets that come again: the query is one of the context's inputs.

    Each prompt has `n_keys` standard normal inputs, each with a target from N(0, 1). Every point is one of these pairs,
    drawn with replacement, and the query is one that the context contains. `sample(n, seed=...)` draws `Prompts`.

    Source: Arora et al. 2023, whose keys and values are tokens.

    Attributes:
        x_dim, n_context, active_dims: as for `SparseLinearRegression`.
        n_keys: number of pairs in a prompt.

    Example:
        >>> AssociativeRecall(x_dim=5, n_context=20, n_keys=8).sample(3, seed=0).xs.shape
        torch.Size([3, 21, 5])
    """

    n_context: Natural = 20
    n_keys: Count = 8

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        n = self.n_context
        keys, values = random.normal(n_prompts, self.n_keys, self.x_dim), random.normal(n_prompts, self.n_keys, 1)
        keys[..., self.n_active :] = 0
        chosen = random.integers(0, self.n_keys, n_prompts, n + 1)
        if n:  # the query's pair is that of a random point
            chosen[:, -1:] = chosen.gather(1, random.integers(0, n, n_prompts, 1))
        xs, ys = (pairs.gather(1, chosen[..., None].expand(-1, -1, pairs.shape[-1])) for pairs in (keys, values))
        return Prompts(xs, ys)
