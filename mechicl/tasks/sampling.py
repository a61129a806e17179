"""Sampling from a seed or a generator: the protocol of tasks and the bases of all distributions over prompts."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import ArgumentError, Positive, calling, check_fields, checked
from mechicl.prompts import Prompts, TokenSequences
from mechicl.prompts.prompts import lies_prompts_last

InputDistribution = Literal["uniform", "gaussian", "exponential", "laplace", "sphere", "gamma_sphere"]
SIZES, MOST_SHOWN = ("x_dim", "n_context", "d_vocab", "n_ctx"), 200  # always in a `repr`; characters of a value
_Batch = TypeVar("_Batch", Prompts, TokenSequences)
D = TypeVar("D", bound="Distribution")

MOST_NUMBERS = 2**32  # drawn at once: 16 GiB in float32


class QuickGenerator(torch.Generator):
    """A generator on the CPU that draws large blocks of uniform numbers faster, for the batches of a training.

    Each such block is numpy's SFC64, seeded with 128 bits from this generator, whose state is torch's own. Small
    blocks, and numbers of other kinds, are those of `torch.Generator`. With `prompts_last`, uniform and normal tensors
    have their first axis last in memory, so that computations on them run across prompts.

    Example:
        >>> generator = QuickGenerator().manual_seed(0)
        >>> LinearRegression().sample(2048, generator=generator)
        Prompts(n_prompts=2048, n_context=10, x_dim=10, y_dim=1, dtype=torch.float32, device='cpu')
    """

    LARGE = 2**16
    """Smallest block drawn by SFC64; seeding it takes as long as 15,000 of torch's numbers."""

    def __new__(cls, *, prompts_last: bool = False, device: torch.device | str = "cpu") -> "QuickGenerator":  # noqa: D102
        return super().__new__(cls, device=device)  # pyright: ignore[reportCallIssue]

    def __init__(self, *, prompts_last: bool = False, device: torch.device | str = "cpu"):
        super().__init__()
        self.prompts_last = prompts_last

    def manual_seed(self, seed: int) -> "QuickGenerator":
        """Restart from a seed."""
        super().manual_seed(seed)
        return self

    def uniform(self, *shape: int) -> Float[Tensor, "..."]:
        """Uniform on [0, 1), float32: multiples of 2^-24, as torch's."""
        n = math.prod(shape)
        numbers = self.draw("uniform", n)
        if not numbers.is_floating_point():
            numbers = numbers[:n].bitwise_and(2**24 - 1).float().mul_(2.0**-24)
        return self._laid_out(numbers, shape)

    def normal(self, *shape: int) -> Float[Tensor, "..."]:
        """Standard normal, float32: torch's."""
        return self._laid_out(self.draw("normal", math.prod(shape)), shape)

    def draw(self, kind: Literal["uniform", "normal"], n: int) -> Tensor:
        """Draw n numbers; for a large block of uniform ones n or n + 1 words of 32 bits."""
        if kind == "normal":
            return torch.randn(n, generator=self, device=self.device)
        if n < self.LARGE or self.device.type != "cpu":
            return torch.rand(n, generator=self, device=self.device)
        start = torch.randint(-(2**63), 2**63 - 1, (2,), generator=self).numpy().view(np.uint64)
        return torch.from_numpy(np.random.SFC64(start).random_raw(-(-n // 2)).view(np.int32))  # two in each of 64

    def _laid_out(self, numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not self.prompts_last:
            return numbers.view(shape)
        return numbers.view(*shape[1:], shape[0]).movedim(-1, 0)


def _check_size(shape: tuple[int, ...]) -> None:
    if math.prod(shape) >= MOST_NUMBERS:
        raise ValueError(
            f"the task's prompts, points and dimensions need {list(shape)} random numbers, too many for any machine"
        )


@dataclass(frozen=True)
class RandomTensors:
    """Random tensors from one generator, of one floating-point dtype, for `_sample` of a task.

    Every method takes the shape as its last arguments: `random.normal(n_prompts, 10)`.

    Attributes:
        generator: source of all random numbers; tensors are on its device.
        dtype: dtype of floating-point tensors.
    """

    generator: torch.Generator
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def device(self) -> torch.device:
        """The generator's device."""
        return self.generator.device

    @checked
    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Draw whole numbers from low to high - 1, all equally likely."""
        if low >= high:
            raise ValueError(f"low must be below high, got {low} and {high}")
        _check_size(shape)
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        """Draw uniform numbers on [0, 1)."""
        return self._draw("uniform", torch.rand, shape)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers."""
        return self._draw("normal", torch.randn, shape)

    def _draw(self, name: str, of_torch: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        _check_size(shape)
        if isinstance(self.generator, QuickGenerator) and self.dtype == torch.float32:
            return getattr(self.generator, name)(*shape)
        return of_torch(shape, generator=self.generator, dtype=self.dtype, device=self.device)

    def signs(self, *shape: int) -> Tensor:
        """Draw -1 or 1, equally likely."""
        return (2 * self.integers(0, 2, *shape) - 1).to(self.dtype)

    def exponential(self, *shape: int) -> Tensor:
        """Draw exponential numbers with rate 1."""
        _check_size(shape)
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return values.exponential_(generator=self.generator)

    def laplace(self, *shape: int) -> Tensor:
        """Draw numbers from the Laplace distribution with scale 1."""
        negative = self.uniform(*shape) < 0.5
        values = self.exponential(*shape)
        return torch.where(negative, -values, values)

    @checked
    def inputs(self, distribution: InputDistribution, *shape: int) -> Tensor:
        """Draw inputs from a named distribution of `LinearRegression`; "uniform" is on (-1/2, 1/2)."""
        if distribution == "uniform":
            return self.uniform(*shape).sub_(0.5)
        return self.normal(*shape) if distribution == "gaussian" else getattr(self, distribution)(*shape)

    def sphere(self, *shape: int) -> Tensor:
        """Draw vectors along the last axis, uniform on the unit sphere."""
        return torch.nn.functional.normalize(self.normal(*shape), dim=-1)

    def gamma_sphere(self, *shape: int) -> Tensor:
        """Draw vectors along the last axis: a random direction times the root of a Gamma(0.1, scale 10) variable."""
        # only the private _standard_gamma takes a generator; torch's public gamma sampler uses the global one
        concentration = torch.full((*shape[:-1], 1), 0.1, dtype=self.dtype, device=self.device)
        radius = torch._standard_gamma(concentration, generator=self.generator).mul_(10).sqrt_()
        return self.sphere(*shape) * radius

    @checked
    def dirichlet(self, concentration: Positive, *shape: int) -> Tensor:
        """Draw distributions along the last axis from a symmetric Dirichlet distribution, float64."""
        # A Gamma(a) variable is a Gamma(a + 1) one times U^(1/a). Its logarithm does not underflow for small a.
        options = {"dtype": torch.float64, "device": self.device}
        larger = torch._standard_gamma(torch.full(shape, concentration + 1, **options), generator=self.generator)
        uniform = torch.rand(shape, generator=self.generator, **options).clamp(min=1e-300)
        return (larger.log() + uniform.log() / concentration).softmax(-1)


@runtime_checkable
class Task(Protocol):
    """Interface of a task of points, which training, saving, analyses and reports use; any class may implement it.

    Members are the sizes `x_dim`, `y_dim` and `n_context` (without the query), `sample` and `replace`. The base
    `PromptDistribution` provides the last two to a frozen dataclass that draws prompts in `_sample`. To be saved with a
    checkpoint a task is a dataclass whose fields are plain data (numbers, strings, tuples of them, another task) and
    that can be found by name (see `register`).
    """

    @property
    def x_dim(self) -> int: ...  # noqa: D102
    @property
    def y_dim(self) -> int: ...  # noqa: D102
    @property
    def n_context(self) -> int: ...  # noqa: D102

    def sample(
        self,
        n_prompts: int,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Prompts:
        """Draw `n_prompts` independent prompts; takes a seed or a generator, not both."""
        ...

    def replace(self, **changes: Any) -> "Task":
        """Return a copy with some fields changed."""
        ...


@dataclass(frozen=True)
class Distribution(ABC, Generic[_Batch]):
    """Base of the tasks: frozen dataclasses that draw batches in `_sample`."""

    def replace(self: D, **changes: Any) -> D:
        """Return a copy with some fields changed, for example a shifted one for out-of-distribution tests."""
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        """The sizes and the fields that differ from their defaults."""
        shown = [
            (field.name, repr(getattr(self, field.name)))
            for field in dataclasses.fields(self)
            if field.name in SIZES or getattr(self, field.name) != field.default
        ]
        texts = [f"{name}={text if len(text) < MOST_SHOWN else f'{text[:MOST_SHOWN]}...'}" for name, text in shown]
        return f"{type(self).__name__}({', '.join(texts)})"

    @abstractmethod
    def _sample(self, n_prompts: int, random: RandomTensors) -> _Batch: ...

    def _drawn(self, n_prompts: int, random: RandomTensors, kind: type[_Batch]) -> _Batch:
        name = f"_sample of {type(self).__name__}"
        with calling(name):
            batch = self._sample(n_prompts, random)
        if not isinstance(batch, kind) or len(batch) != n_prompts:
            raise ArgumentError(f"{name} must return {n_prompts} prompts as {kind.__name__}, got {batch!r}")
        for size in ("n_context", "x_dim", "y_dim"):
            declared, drawn = getattr(self, size, None), getattr(batch, size, None)
            if None not in (declared, drawn) and declared != drawn:
                raise ArgumentError(f"{name} must return prompts of {size}={declared}, the task's, got {drawn}")
        return batch


class TokenDistribution(Distribution[TokenSequences]):
    """Base of tasks of tokens: a frozen dataclass that draws `TokenSequences` in `_sample(n_prompts, random)`.

    `random` is a `RandomTensors`. The base provides `sample` and `replace`.
    """

    @checked
    def sample(
        self,
        n_prompts: int,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> TokenSequences:
        """Draw independent sequences; arguments are those of `PromptDistribution.sample`."""
        random = RandomTensors(sampling_generator(n_prompts, seed, generator, device))
        return self._drawn(n_prompts, random, TokenSequences)


class PromptDistribution(Distribution[Prompts]):
    """Base of tasks of points: a frozen dataclass that draws `Prompts` in `_sample(n_prompts, random)`.

    `random` is a `RandomTensors`. Subclasses also have `x_dim`, `y_dim` and `n_context`; the base provides `sample` and
    `replace`.
    """

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
        """Draw prompts of independent tasks; the same seed gives the same bits on the same kind of device.

        Args:
            seed: seed of a new generator on `device`.
            generator: generator to use instead of a seed, on its own device.
            device: device of the prompts; by default the generator's, else the CPU.
            dtype: floating-point type of the prompts. Half precision is float32 rounded at the end: its own random
                numbers are too coarse, and torch lacks some samplers for it.
        """
        generator = sampling_generator(n_prompts, seed, generator, device)
        if not dtype.is_floating_point:
            raise TypeError(f"prompts are floating point, got dtype={dtype}")
        random = RandomTensors(generator, torch.promote_types(dtype, torch.float32))
        prompts = self._drawn(n_prompts, random, Prompts)
        return prompts if prompts.dtype == dtype else prompts.to(dtype)


def sampling_generator(
    n_prompts: int, seed: int | None, generator: torch.Generator | None, device: torch.device | str | None
) -> torch.Generator:
    """Check the arguments of `sample`; return the generator, or a new one with the seed."""
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
    """Return `xs @ weights`; for one target and prompts last in memory by products across prompts, which is faster."""
    if weights.shape[2] == 1 and lies_prompts_last(xs):
        return (xs.permute(1, 2, 0) * weights.permute(2, 1, 0)).sum(1).mT[..., None]
    return xs @ weights


def random_rotations(normals: Float[Tensor, "*prompt x x"]) -> Float[Tensor, "*prompt x x"]:
    """Return rotations uniform over the orthogonal group, from standard normal matrices (by QR)."""
    q, r = torch.linalg.qr(normals)
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


def check_active_dims(task: Any) -> None:
    """Refuse a task with more active dimensions than dimensions."""
    if task.active_dims is not None and task.active_dims > task.x_dim:
        raise ValueError(f"active_dims must be 1 to x_dim={task.x_dim}, got {task.active_dims}")
