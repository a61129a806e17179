"""Sampling from a seed or a generator: what every distribution over prompts has in common."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.base.checks import check_positive
from mechicl.prompts import Prompts, TokenSequences, lies_prompts_last

InputDistribution = Literal["uniform", "gaussian", "exponential", "laplace", "sphere", "gamma_sphere"]
Batch = TypeVar("Batch", Prompts, TokenSequences)
D = TypeVar("D", bound="Distribution")

MOST_NUMBERS = 2**32
"""Random numbers that are drawn at once are fewer: 16 GiB in float32."""


class QuickGenerator(torch.Generator):
    """A generator on the CPU whose large blocks of uniform numbers come quicker, for the batches of a training.

    Each such block is numpy's SFC64, started from 128 bits that this generator gives: its state is torch's own. Small
    blocks, and numbers of other kinds, are those of `torch.Generator`.

    Attributes:
        prompts_last: whether the first axis of uniform and normal tensors is the last one in memory, so that what is
            computed of them runs across prompts.

    Example:
        >>> generator = QuickGenerator().manual_seed(0)
        >>> LinearRegression().sample(2048, generator=generator)
        Prompts(n_prompts=2048, n_context=10, x_dim=10, y_dim=1, dtype=torch.float32, device='cpu')
    """

    LARGE = 2**16
    """Numbers from which on it pays: starting SFC64 takes as long as 15,000 of torch's numbers."""

    def __new__(cls, *, prompts_last: bool = False) -> "QuickGenerator":
        """On the CPU."""
        return super().__new__(cls)

    def __init__(self, *, prompts_last: bool = False):
        super().__init__()
        self.prompts_last = prompts_last

    def manual_seed(self, seed: int) -> "QuickGenerator":
        """Start anew from a seed."""
        super().manual_seed(seed)
        return self

    def uniform(self, *shape: int) -> Float[Tensor, "..."]:
        """Uniform on [0, 1), float32: multiples of 2^-24, as torch's."""
        n = math.prod(shape)
        if n < self.LARGE:
            return self._laid_out(torch.rand(n, generator=self), shape)
        start = torch.randint(-(2**63), 2**63 - 1, (2,), generator=self).numpy().view(np.uint64)
        words = torch.from_numpy(np.random.SFC64(start).random_raw(-(-n // 2)).view(np.int32))  # two of 32 bits in each
        return self._laid_out(words[:n].bitwise_and_(2**24 - 1).float().mul_(2.0**-24), shape)

    def normal(self, *shape: int) -> Float[Tensor, "..."]:
        """Standard normal, float32: torch's."""
        return self._laid_out(torch.randn(math.prod(shape), generator=self), shape)

    def _laid_out(self, numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not self.prompts_last:
            return numbers.view(shape)
        return numbers.view(*shape[1:], shape[0]).movedim(-1, 0)


def _check_room(shape: tuple[int, ...]) -> None:
    """Refuse (ValueError) so many numbers that no machine holds them, before anything is allocated."""
    if math.prod(shape) >= MOST_NUMBERS:
        raise ValueError(
            f"{list(shape)} random numbers, for these prompts, points and dimensions of the task, are too many"
        )


@dataclass(frozen=True)
class RandomTensors:
    """Random tensors from one generator, of one floating-point dtype, on the generator's device."""

    generator: torch.Generator
    dtype: torch.dtype = torch.float32

    @property
    def device(self) -> torch.device:
        """Where they are made."""
        return self.generator.device

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers from low to high - 1, all equally likely.

        Raises:
            ValueError: a low that is not below high.
        """
        if low >= high:
            raise ValueError(f"low must be below high, got {low} and {high}")
        _check_room(shape)
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform on [0, 1)."""
        _check_room(shape)
        if isinstance(self.generator, QuickGenerator) and self.dtype == torch.float32:
            return self.generator.uniform(*shape)
        return torch.rand(shape, generator=self.generator, dtype=self.dtype, device=self.device)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal."""
        _check_room(shape)
        if isinstance(self.generator, QuickGenerator) and self.dtype == torch.float32:
            return self.generator.normal(*shape)
        return torch.randn(shape, generator=self.generator, dtype=self.dtype, device=self.device)

    def signs(self, *shape: int) -> Tensor:
        """-1 or 1, equally likely."""
        return (2 * self.integers(0, 2, *shape) - 1).to(self.dtype)

    def exponential(self, *shape: int) -> Tensor:
        """Exponential with rate 1."""
        _check_room(shape)
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return values.exponential_(generator=self.generator)

    def laplace(self, *shape: int) -> Tensor:
        """Laplace with scale 1."""
        negative = self.uniform(*shape) < 0.5
        values = self.exponential(*shape)
        return torch.where(negative, -values, values)

    def sphere(self, *shape: int) -> Tensor:
        """Uniform on the unit sphere of the last axis."""
        return torch.nn.functional.normalize(self.normal(*shape), dim=-1)

    def gamma_sphere(self, *shape: int) -> Tensor:
        """A direction on the sphere times the root of a Gamma(0.1, scale 10) variable."""
        # torch's gamma sampler takes a generator through the private _standard_gamma only; its public route
        # would use the global one.
        concentration = torch.full((*shape[:-1], 1), 0.1, dtype=self.dtype, device=self.device)
        radius = torch._standard_gamma(concentration, generator=self.generator).mul_(10).sqrt_()
        return self.sphere(*shape) * radius

    def dirichlet(self, concentration: float, *shape: int) -> Tensor:
        """Distributions along the last axis from a symmetric Dirichlet distribution, float64.

        Raises:
            ValueError: a concentration that is not positive and finite.
        """
        check_positive(concentration=concentration)
        # A Gamma(a) variable is a Gamma(a + 1) one times U^(1/a). Its logarithm does not underflow for small a.
        options = {"dtype": torch.float64, "device": self.device}
        larger = torch._standard_gamma(torch.full(shape, concentration + 1, **options), generator=self.generator)
        uniform = torch.rand(shape, generator=self.generator, **options).clamp(min=1e-300)
        return (larger.log() + uniform.log() / concentration).softmax(-1)


INPUTS: dict[InputDistribution, Callable[[RandomTensors, tuple[int, ...]], Tensor]] = {
    "uniform": lambda random, shape: random.uniform(*shape).sub_(0.5),
    "gaussian": lambda random, shape: random.normal(*shape),
    "exponential": lambda random, shape: random.exponential(*shape),
    "laplace": lambda random, shape: random.laplace(*shape),
    "sphere": lambda random, shape: random.sphere(*shape),
    "gamma_sphere": lambda random, shape: random.gamma_sphere(*shape),
}


@dataclass(frozen=True)
class Distribution(ABC, Generic[Batch]):
    """What is sampled in batches: the base of the tasks, which are frozen dataclasses and say how by `_sample`."""

    def replace(self: D, **changes: Any) -> D:
        """A copy with some fields changed, e.g. a shifted one for out-of-distribution tests."""
        return dataclasses.replace(self, **changes)

    @abstractmethod
    def _sample(self, n_prompts: int, random: RandomTensors) -> Batch: ...


class TokenDistribution(Distribution[TokenSequences]):
    """A distribution over sequences of token ids."""

    @checked
    def sample(
        self,
        n_prompts: int,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> TokenSequences:
        """Independent sequences; the same seed gives the same ones.

        Args:
            n_prompts: how many.
            seed: starts a new generator on `device`.
            generator: is used instead, on its own device.
            device: where to sample; by default the generator's, else the CPU.

        Raises:
            ValueError: neither or both of seed and generator, a generator on another device, or a negative number.
        """
        return self._sample(n_prompts, RandomTensors(sampling_generator(n_prompts, seed, generator, device)))


class PromptDistribution(Distribution[Prompts]):
    """A distribution over prompts of points."""

    @checked
    def sample(
        self,
        n_prompts: int,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Prompts:
        """Prompts of independent tasks; the same seed gives the same bits on the same kind of device.

        Args:
            n_prompts: how many.
            seed: starts a new generator on `device`.
            generator: is used instead, on its own device.
            device: where to sample; by default the generator's, else the CPU.
            dtype: floating-point type of the prompts. Half precision is float32 rounded at the end: its own random
                numbers are too coarse, and torch lacks some samplers for it.

        Raises:
            TypeError: dtype is not floating point.
            ValueError: neither or both of seed and generator, a generator on another device, or a negative number
                of prompts.
        """
        generator = sampling_generator(n_prompts, seed, generator, device)
        if not dtype.is_floating_point:
            raise TypeError(f"prompts are floating point, got dtype={dtype}")
        prompts = self._sample(n_prompts, RandomTensors(generator, torch.promote_types(dtype, torch.float32)))
        return prompts if prompts.dtype == dtype else prompts.to(dtype)


def sampling_generator(
    n_prompts: int, seed: int | None, generator: torch.Generator | None, device: torch.device | str | None
) -> torch.Generator:
    """The generator itself, or a new one that starts from the seed.

    Raises:
        ValueError: neither or both are given, the generator is on another device, or n_prompts is negative.
    """
    if n_prompts < 0:
        raise ValueError(f"n_prompts must not be negative, got {n_prompts}")
    if (seed is None) == (generator is None):
        raise ValueError("sample() needs a seed or a generator, and not both: the same seed gives the same prompts")
    if generator is None:
        assert seed is not None
        return torch.Generator(device=device or "cpu").manual_seed(seed)
    if device is not None:
        requested, actual = torch.device(device), generator.device
        if requested.type != actual.type or (requested.index is not None and requested.index != (actual.index or 0)):
            raise ValueError(f"the generator is on {actual}, so it cannot sample on {device}")
    return generator


def targets_of(xs: Float[Tensor, "prompt point x"], weights: Float[Tensor, "prompt x y"]) -> Tensor:
    """`xs @ weights`; one target of prompts that lie last in memory by products across prompts, which are quicker."""
    if weights.shape[2] == 1 and lies_prompts_last(xs):
        return (xs.permute(1, 2, 0) * weights.permute(2, 1, 0)).sum(1).mT[..., None]
    return xs @ weights


def random_rotations(normals: Float[Tensor, "*prompt x x"]) -> Float[Tensor, "*prompt x x"]:
    """Rotations uniform over the orthogonal group, from standard normal matrices (QR with a positive diagonal)."""
    q, r = torch.linalg.qr(normals)
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
