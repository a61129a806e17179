"""Random tensors from one generator: the input distributions of the tasks, and random rotations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

InputDistribution = Literal["uniform", "gaussian", "exponential", "laplace", "sphere", "gamma_sphere"]


@dataclass(frozen=True)
class Draw:
    """Random tensors of one dtype from one generator."""

    generator: torch.Generator
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where they are made."""
        return self.generator.device

    def uniform(self, *shape: int) -> Tensor:
        """Uniform on [0, 1)."""
        return torch.rand(shape, generator=self.generator, dtype=self.dtype, device=self.device)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal."""
        return torch.randn(shape, generator=self.generator, dtype=self.dtype, device=self.device)

    def exponential(self, *shape: int) -> Tensor:
        """Exponential with rate 1."""
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
        # would draw from the global one.
        concentration = torch.full((*shape[:-1], 1), 0.1, dtype=self.dtype, device=self.device)
        radius = torch._standard_gamma(concentration, generator=self.generator).mul_(10).sqrt_()
        return self.sphere(*shape) * radius


INPUTS: dict[str, Callable[[Draw, tuple[int, ...]], Tensor]] = {
    "uniform": lambda draw, shape: draw.uniform(*shape).sub_(0.5),
    "gaussian": lambda draw, shape: draw.normal(*shape),
    "exponential": lambda draw, shape: draw.exponential(*shape),
    "laplace": lambda draw, shape: draw.laplace(*shape),
    "sphere": lambda draw, shape: draw.sphere(*shape),
    "gamma_sphere": lambda draw, shape: draw.gamma_sphere(*shape),
}


def sampling_generator(
    n_prompts: int, seed: int | None, generator: torch.Generator | None, device: torch.device | str | None
) -> torch.Generator:
    """The generator that a task draws from: a given one, or a new one from a seed.

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
        wanted, have = torch.device(device), generator.device
        if wanted.type != have.type or (wanted.index is not None and wanted.index != (have.index or 0)):
            raise ValueError(f"the generator is on {have}, so it cannot sample on {device}")
    return generator


def drawing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32 for half precision, whose random numbers are too coarse and for which torch lacks some samplers."""
    if not dtype.is_floating_point:
        raise TypeError(f"prompts are floating point, got dtype={dtype}")
    return torch.promote_types(dtype, torch.float32)


def random_rotations(normals: Float[Tensor, "*prompt x x"]) -> Float[Tensor, "*prompt x x"]:
    """Rotations uniform over the orthogonal group, from standard normal matrices (QR with a positive diagonal)."""
    q, r = torch.linalg.qr(normals)
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
