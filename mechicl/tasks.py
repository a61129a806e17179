"""Distributions over prompts.

A task is a small frozen dataclass: it can be shown, compared, saved as JSON and varied with `replace`.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.checks import is_finite, require_finite, require_whole
from mechicl.prompts import Prompts
from mechicl.random_tensors import INPUTS, Draw, InputDistribution, drawing_dtype, random_rotations, sampling_generator
from mechicl.text.topics import TopicClassification
from mechicl.tokens import RepeatedTokens


@runtime_checkable
class Task(Protocol):
    """What training and the analyses need of a task."""

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
        """A batch of prompts, each of a task of its own."""
        ...

    def replace(self, **changes: Any) -> "Task":
        """A copy with some fields changed."""
        ...


@dataclass(frozen=True)
class LinearRegression:
    """Linear functions `y = x W + noise` of random inputs, one `W` a prompt.

    The defaults are the authors' of von Oswald et al. 2023: inputs uniform on (-1/2, 1/2), ten of them, standard
    normal weights, no noise. (The paper prints U(-1, 1); its figures are those of U(-1/2, 1/2).)

    Attributes:
        x_dim: dimension of the inputs.
        n_context: number of context points; the query comes on top.
        y_dim: dimension of the targets.
        inputs: distribution of the inputs: "uniform" on (-1/2, 1/2) per coordinate, "gaussian" with unit variance,
            "exponential" with rate 1, "laplace" with scale 1, "sphere" (the unit sphere), or "gamma_sphere" (a point
            of the sphere times the root of a Gamma(0.1, scale 10) variable, as Ahn et al. 2024). A tuple of names
            draws one of them for each prompt (von Oswald et al. 2023, A.2, uses three).
        input_scale: factor on all inputs.
        covariance: second-moment matrix that Gaussian inputs get, as a tuple of rows.
        condition_number: gives Gaussian inputs the covariance eigenvalues `condition_number ** (i / (x_dim - 1))`,
            i = 0 .. x_dim - 1 (Nertinger, section 4).
        eigenvalues: gives Gaussian inputs these covariance eigenvalues instead (Fu et al. 2024, B.3, takes half
            of them 100 and half 1).
        eigenbasis: of that spectrum: "axes", "shared" (one random rotation for all prompts, from
            `eigenbasis_seed`) or "per_task" (a random rotation for each prompt).
        eigenbasis_seed: see above.
        weight_scale: standard deviation of the entries of W.
        noise_std: standard deviation of Gaussian noise on the targets.
        query_noise: whether the query's target is noisy too. Nertinger measures against the clean one.
        n_distractors: so many context points of each prompt, at random places, are labelled by other weights.
        active_dims: all but the first so many input coordinates are zero (the curriculum of Garg et al. 2022).

    Raises:
        ValueError: a field is out of range, or two fields exclude each other.

    Example:
        >>> task = LinearRegression(x_dim=5, n_context=20, inputs="gaussian", condition_number=10.0)
        >>> task.sample(3, seed=0)
        Prompts(n_prompts=3, n_context=20, x_dim=5, y_dim=1, dtype=torch.float32, device='cpu')
    """

    x_dim: int = 10
    n_context: int = 10
    y_dim: int = 1
    inputs: InputDistribution | tuple[InputDistribution, ...] = "uniform"
    input_scale: float = 1.0
    covariance: tuple[tuple[float, ...], ...] | None = None
    condition_number: float | None = None
    eigenvalues: tuple[float, ...] | None = None
    eigenbasis: Literal["axes", "shared", "per_task"] = "axes"
    eigenbasis_seed: int = 0
    weight_scale: float = 1.0
    noise_std: float = 0.0
    query_noise: bool = True
    n_distractors: int = 0
    active_dims: int | None = None

    def __post_init__(self):
        require_whole(self, x_dim=1, n_context=0, y_dim=1, eigenbasis_seed=0, n_distractors=0)
        require_finite(self, "input_scale", "weight_scale", "noise_std", least=0.0)
        names = (self.inputs,) if isinstance(self.inputs, str) else self.inputs
        unknown = [name for name in names if name not in get_args(InputDistribution)]
        if unknown or not names:
            raise ValueError(f"inputs {self.inputs!r}: choose among {get_args(InputDistribution)}")
        shapes = [f for f in ("covariance", "condition_number", "eigenvalues") if getattr(self, f) is not None]
        if len(shapes) > 1:
            raise ValueError(f"{' and '.join(shapes)} exclude each other: each fixes the covariance of the inputs")
        if shapes and names != ("gaussian",):
            raise ValueError(f"{shapes[0]} is for Gaussian inputs, got inputs={self.inputs!r}")
        if self.eigenbasis not in ("axes", "shared", "per_task"):
            raise ValueError(f"eigenbasis {self.eigenbasis!r} is not one of 'axes', 'shared', 'per_task'")
        if self.eigenbasis != "axes" and self.condition_number is None and self.eigenvalues is None:
            raise ValueError(f"eigenbasis={self.eigenbasis!r} needs a condition_number or eigenvalues to rotate")
        if self.condition_number is not None:
            require_finite(self, "condition_number", least=1.0)
        if self.eigenvalues is not None and (
            len(self.eigenvalues) != self.x_dim or not all(is_finite(v) and v >= 0 for v in self.eigenvalues)
        ):
            raise ValueError(f"eigenvalues must be {self.x_dim} finite numbers >= 0, got {self.eigenvalues}")
        if self.covariance is not None:
            _covariance_root(self.covariance, self.x_dim)
        if not isinstance(self.query_noise, bool):
            raise ValueError(f"query_noise must be True or False, got {self.query_noise!r}")
        if self.n_distractors > self.n_context:
            raise ValueError(f"n_distractors must be 0 to n_context={self.n_context}, got {self.n_distractors}")
        if self.active_dims is not None:
            require_whole(self, active_dims=1)
            if self.active_dims > self.x_dim:
                raise ValueError(f"active_dims must be 1 to x_dim={self.x_dim}, got {self.active_dims}")

    def replace(self, **changes: Any) -> "LinearRegression":
        """A copy with some fields changed, e.g. a shifted one for out-of-distribution tests."""
        return dataclasses.replace(self, **changes)

    def sample(
        self,
        n_prompts: int,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Prompts:
        """Prompts of independent tasks.

        Args:
            n_prompts: how many.
            seed: starts a new generator on `device`; the same seed gives the same bits there.
            generator: draws from this one instead, on its own device.
            device: where to sample; by default the generator's, else the CPU.
            dtype: floating-point type of the prompts. Half precision is float32 rounded at the end.

        Raises:
            TypeError: dtype is not floating point.
            ValueError: neither or both of seed and generator, a generator on another device, or a negative number
                of prompts.
        """
        draw = Draw(sampling_generator(n_prompts, seed, generator, device), drawing_dtype(dtype))
        xs = self._sample_inputs(n_prompts, draw)
        weights = draw.normal(n_prompts, self.x_dim, self.y_dim).mul_(self.weight_scale)
        ys = xs @ weights
        if self.n_distractors:
            other = xs[:, :-1] @ draw.normal(n_prompts, self.x_dim, self.y_dim).mul_(self.weight_scale)
            places = draw.uniform(n_prompts, self.n_context).argsort(dim=1).argsort(dim=1) < self.n_distractors
            ys[:, :-1] = torch.where(places[..., None], other, ys[:, :-1])
        if self.noise_std:
            noise = draw.normal(*ys.shape).mul_(self.noise_std)
            if not self.query_noise:
                noise[:, -1] = 0
            ys = ys + noise
        return Prompts(xs.to(dtype), ys.to(dtype))

    def _sample_inputs(self, n_prompts: int, draw: "Draw") -> Float[Tensor, "prompt point x"]:
        shape = (n_prompts, self.n_context + 1, self.x_dim)
        if isinstance(self.inputs, str):
            xs = INPUTS[self.inputs](draw, shape)
        else:
            choice = (draw.uniform(n_prompts, 1, 1) * len(self.inputs)).long()
            xs = torch.zeros(shape, dtype=draw.dtype, device=draw.device)
            for i, name in enumerate(self.inputs):
                xs = torch.where(choice == i, INPUTS[name](draw, shape), xs)
        if self.covariance is not None:
            xs = xs @ _covariance_root(self.covariance, self.x_dim).to(xs)
        spectrum = self._spectrum()
        if spectrum is not None:
            xs = xs * spectrum.sqrt().to(xs)
            if self.eigenbasis == "shared":
                xs = xs @ self._shared_basis.to(xs)
            elif self.eigenbasis == "per_task":
                xs = xs @ random_rotations(draw.normal(n_prompts, self.x_dim, self.x_dim))
        if self.input_scale != 1:
            xs = xs * self.input_scale
        if self.active_dims is not None:
            xs[..., self.active_dims :] = 0
        return xs

    def _spectrum(self) -> Float[Tensor, "x"] | None:
        if self.eigenvalues is not None:
            return torch.tensor(self.eigenvalues, dtype=torch.float64)
        if self.condition_number is not None:
            exponents = torch.linspace(0, 1, self.x_dim, dtype=torch.float64)
            return self.condition_number**exponents
        return None

    def shared_basis(self) -> Float[Tensor, "eigenvector x"]:
        """The rotation of `eigenbasis="shared"`, float64; rows are the covariance's eigenvectors."""
        return self._shared_basis.clone()

    @cached_property
    def _shared_basis(self) -> Float[Tensor, "eigenvector x"]:
        generator = torch.Generator().manual_seed(self.eigenbasis_seed)
        return random_rotations(torch.randn(1, self.x_dim, self.x_dim, generator=generator, dtype=torch.float64))[0]


@dataclass(frozen=True)
class SineRegression:
    """Sine waves `y = a sin(x + phase)` with a random amplitude and phase a prompt.

    Source: von Oswald et al. 2023, A.7. The paper prints amplitudes from U(0.1, 5); the authors' code, and this
    default, has U(0.1, 0.5).

    Attributes:
        n_context: number of context points.
        x_range: interval of the inputs.
        amplitude_range: interval of the amplitudes.
        phase_range: interval of the phases, in radians.
    """

    n_context: int = 10
    x_range: tuple[float, float] = (-5.0, 5.0)
    amplitude_range: tuple[float, float] = (0.1, 0.5)
    phase_range: tuple[float, float] = (0.0, math.pi)

    def __post_init__(self):
        require_whole(self, n_context=0)
        for name in ("x_range", "amplitude_range", "phase_range"):
            ends = getattr(self, name)
            if len(ends) != 2 or not all(map(is_finite, ends)) or ends[0] > ends[1]:
                raise ValueError(f"{name} must be (low, high), finite, with low <= high, got {ends}")

    @property
    def x_dim(self) -> int:
        """One input."""
        return 1

    @property
    def y_dim(self) -> int:
        """One target."""
        return 1

    def replace(self, **changes: Any) -> "SineRegression":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def sample(
        self,
        n_prompts: int,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Prompts:
        """Prompts of independent sine waves; arguments as for `LinearRegression.sample`."""
        draw = Draw(sampling_generator(n_prompts, seed, generator, device), drawing_dtype(dtype))

        def between(interval: tuple[float, float], *shape: int) -> Tensor:
            low, high = interval
            return low + (high - low) * draw.uniform(*shape)

        xs = between(self.x_range, n_prompts, self.n_context + 1, 1)
        amplitude = between(self.amplitude_range, n_prompts, 1, 1)
        phase = between(self.phase_range, n_prompts, 1, 1)
        return Prompts(xs.to(dtype), (amplitude * torch.sin(xs + phase)).to(dtype))


@dataclass(frozen=True)
class FixedTasks:
    """A finite set of prompts to train on, drawn once from another task.

    Source: von Oswald et al. 2023, A.12 and Fig. 16 (128 to 8192 tasks), and Fig. 15 (grokking).

    Attributes:
        task: where the prompts come from.
        n_tasks: how many there are.
        seed: of their drawing.
    """

    task: LinearRegression | SineRegression
    n_tasks: int
    seed: int = 0

    def __post_init__(self):
        if not isinstance(self.task, LinearRegression | SineRegression):
            raise ValueError(f"fixed tasks are drawn from a task of points, got {type(self.task).__name__}")
        require_whole(self, n_tasks=1, seed=0)

    @property
    def x_dim(self) -> int:
        """Dimension of the inputs."""
        return self.task.x_dim

    @property
    def y_dim(self) -> int:
        """Dimension of the targets."""
        return self.task.y_dim

    @property
    def n_context(self) -> int:
        """Number of context points."""
        return self.task.n_context

    @cached_property
    def prompts(self) -> Prompts:
        """All of them, float64 on the CPU."""
        return self.task.sample(self.n_tasks, seed=self.seed, dtype=torch.float64)

    def replace(self, **changes: Any) -> "FixedTasks":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def sample(
        self,
        n_prompts: int,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Prompts:
        """A minibatch: without repeats while it can be (so `n_tasks` of them are the whole set), else with.

        Arguments and errors as for `LinearRegression.sample`.
        """
        generator = sampling_generator(n_prompts, seed, generator, device)
        device = generator.device
        if n_prompts <= self.n_tasks:
            index = torch.randperm(self.n_tasks, generator=generator, device=device)[:n_prompts]
        else:
            index = torch.randint(self.n_tasks, (n_prompts,), generator=generator, device=device)
        return self.prompts[index.cpu()].to(device, dtype)


if TYPE_CHECKING:  # callers know which kind theirs is, and need not prove it to a type checker
    AnyTask = LinearRegression | Any
else:
    AnyTask = LinearRegression | SineRegression | FixedTasks | RepeatedTokens | TopicClassification
OF_TOKENS = (RepeatedTokens, TopicClassification)
"""Tasks whose prompts are `TokenSequences`, for models that read token ids."""
TASKS: dict[str, type] = {cls.__name__: cls for cls in (LinearRegression, SineRegression, FixedTasks, *OF_TOKENS)}


def task_to_dict(task: AnyTask) -> dict[str, Any]:
    """A task as plain JSON data; `task_from_dict` is the inverse."""
    fields = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}
    if isinstance(task, FixedTasks):
        fields["task"] = task_to_dict(task.task)
    return {"type": type(task).__name__, **fields}


def task_from_dict(data: dict[str, Any]) -> AnyTask:
    """The task that `task_to_dict` wrote.

    Raises:
        ValueError: unknown type or field, a field missing, or a value that the task refuses.
    """
    fields = dict(data)
    kind = fields.pop("type", None)
    if not isinstance(kind, str) or kind not in TASKS:
        raise ValueError(f"task type {kind!r} is not one of {sorted(TASKS)}")
    unknown = set(fields) - {f.name for f in dataclasses.fields(TASKS[kind])}
    if unknown:
        raise ValueError(f"{kind} has no field {sorted(unknown)}")
    if isinstance(fields.get("task"), dict):
        fields["task"] = task_from_dict(fields["task"])
    elif "task" in fields:
        raise ValueError(f"the task of {kind} must be a dict of its own, got {fields['task']!r}")
    try:
        return TASKS[kind](**{name: _tuples(value) for name, value in fields.items()})
    except TypeError as error:  # a field is missing, or of a type that the checks do not expect
        raise ValueError(f"{kind}: {error}") from error


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _covariance_root(covariance: tuple[tuple[float, ...], ...], x_dim: int) -> Float[Tensor, "x x"]:
    matrix = torch.tensor(covariance, dtype=torch.float64)
    if matrix.shape != (x_dim, x_dim) or not matrix.isfinite().all() or not torch.allclose(matrix, matrix.T):
        raise ValueError(f"covariance must be a finite symmetric {x_dim} x {x_dim} matrix, got {covariance}")
    values, vectors = torch.linalg.eigh(matrix)
    if values.min() < -1e-10 * values.abs().max():
        raise ValueError(f"covariance must have no negative eigenvalue, got {values.min().item():.3g}")
    return vectors @ values.clamp(min=0).sqrt().diag() @ vectors.T
