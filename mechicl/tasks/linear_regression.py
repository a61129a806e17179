"""Linear functions of random inputs, whose covariance may be anything."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import Count, Natural, NonNegative, at_least, check_fields
from mechicl.prompts import Prompts
from mechicl.tasks.sampling import (
    InputDistribution,
    PromptDistribution,
    RandomTensors,
    check_active_dims,
    random_rotations,
    targets_of,
)


@dataclass(frozen=True, repr=False)
class LinearRegression(PromptDistribution):
    """Linear functions `y = x W + noise` of random inputs, one `W` a prompt; `sample(n, seed=...)` draws `Prompts`.

    The defaults are the authors' of von Oswald et al. 2023: inputs uniform on (-1/2, 1/2), ten of them, standard
    normal weights, no noise. (The paper prints U(-1, 1); its figures are those of U(-1/2, 1/2).)

    Attributes:
        x_dim: dimension of the inputs.
        n_context: number of context points, without the query.
        y_dim: dimension of the targets.
        inputs: distribution of the inputs: "uniform" on (-1/2, 1/2) per coordinate, "gaussian" with unit variance,
            "exponential" with rate 1, "laplace" with scale 1, "sphere" (the unit sphere), or "gamma_sphere" (a point
            of the sphere times the root of a Gamma(0.1, scale 10) variable, as Ahn et al. 2024). A tuple of names
            picks one of them at random for each prompt (von Oswald et al. 2023, A.2, uses three).
        input_scale: factor on all inputs.
        covariance: covariance Σ of Gaussian inputs, as a tuple of rows; by default I. Give at most one of `covariance`,
            `condition_number` and `eigenvalues`.
        condition_number: gives Gaussian inputs the covariance eigenvalues `condition_number ** (i / (x_dim - 1))`,
            i = 0 .. x_dim - 1 (Nertinger 2025, section 4).
        eigenvalues: gives Gaussian inputs these covariance eigenvalues instead (Fu et al. 2024, B.3, takes half
            of them 100 and half 1).
        eigenbasis: eigenvectors of these eigenvalues: "axes", "shared" (one random rotation for all prompts, from
            `eigenbasis_seed`) or "per_task" (a random rotation for each prompt).
        eigenbasis_seed: seed of the shared rotation.
        weight_scale: standard deviation of the entries of W; a factor on W where `weight_covariance` is "inverse".
        weight_covariance: covariance of each column of W: "identity", or "inverse" of the covariance that `covariance`,
            `condition_number` or `eigenvalues` gives to the inputs, so that all directions matter as much to the
            targets (Ahn et al. 2023, section 4: `x ~ N(0, Σ)`, `w ~ N(0, Σ⁻¹)`). `input_scale` does not enter. Theorems
            about `w ~ N(0, I)` (`constructions.linear_optimum`, `linear_attention_optimum`) apply here to
            the whitened inputs `Σ^(-1/2) x`: the best preconditioner of one step is then a multiple of Σ⁻¹.
        noise_std: standard deviation of Gaussian noise on the targets.
        query_noise: add noise to the query's target too. Nertinger 2025 measures against the clean one.
        normalize_inputs: divide each prompt's inputs, the query's too, by the Frobenius norm of its context's, before
            `input_scale`. The authors' code of von Oswald et al. 2023 does so out of distribution; their text does not
            mention it.
        n_distractors: number of context points, at random places, whose labels follow another rule.
        distractor_labels: that rule: "other_weights", one other W a prompt, or standard normal "noise", as in the
            authors' code of von Oswald et al. 2023.
        active_dims: number of input coordinates that are not zero, the first ones; None for all (the curriculum of Garg
            et al. 2022).

    Example:
        >>> task = LinearRegression(x_dim=5, n_context=20, noise_std=0.5)
        >>> task
        LinearRegression(x_dim=5, n_context=20, noise_std=0.5)
        >>> task.sample(3, seed=0)
        Prompts(n_prompts=3, n_context=20, x_dim=5, y_dim=1, dtype=torch.float32, device='cpu')
    """

    x_dim: Count = 10
    n_context: Natural = 10
    y_dim: Count = 1
    inputs: InputDistribution | tuple[InputDistribution, ...] = "uniform"
    input_scale: NonNegative = 1.0
    covariance: tuple[tuple[float, ...], ...] | None = None
    condition_number: Annotated[float, at_least(1)] | None = None
    eigenvalues: tuple[NonNegative, ...] | None = None
    eigenbasis: Literal["axes", "shared", "per_task"] = "axes"
    eigenbasis_seed: Natural = 0
    weight_scale: NonNegative = 1.0
    weight_covariance: Literal["identity", "inverse"] = "identity"
    noise_std: NonNegative = 0.0
    query_noise: bool = True
    normalize_inputs: bool = False
    n_distractors: Natural = 0
    distractor_labels: Literal["other_weights", "noise"] = "other_weights"
    active_dims: Count | None = None

    def __post_init__(self):
        check_fields(self)
        names = (self.inputs,) if isinstance(self.inputs, str) else self.inputs
        if not names:
            raise ValueError("inputs must name one distribution or more, got ()")
        shapes = [f for f in ("covariance", "condition_number", "eigenvalues") if getattr(self, f) is not None]
        if len(shapes) > 1:
            raise ValueError(f"{' and '.join(shapes)} exclude each other: each fixes the covariance of the inputs")
        if shapes and names != ("gaussian",):
            raise ValueError(f"{shapes[0]} is for Gaussian inputs, got inputs={self.inputs!r}")
        if self.eigenbasis != "axes" and self.condition_number is None and self.eigenvalues is None:
            raise ValueError(f"eigenbasis={self.eigenbasis!r} needs a condition_number or eigenvalues to rotate")
        if self.eigenvalues is not None and len(self.eigenvalues) != self.x_dim:
            raise ValueError(f"eigenvalues must be x_dim={self.x_dim} numbers, got {self.eigenvalues}")
        if self.covariance is not None:
            self._covariance_root  # noqa: B018 - refuses a matrix that is not a covariance
        if self.weight_covariance == "inverse":
            if not shapes:
                raise ValueError("weight_covariance='inverse' needs covariance, condition_number or eigenvalues")
            if self.eigenbasis == "per_task":
                raise ValueError("weight_covariance='inverse' is for one covariance, not for eigenbasis='per_task'")
            if torch.linalg.matrix_rank(self.input_covariance()) < self.x_dim:
                raise ValueError("weight_covariance='inverse': the covariance of the inputs has no inverse")
        if self.normalize_inputs and not self.n_context:
            raise ValueError("normalize_inputs=True needs a context, n_context >= 1, whose norm it divides by")
        if self.n_distractors > self.n_context:
            raise ValueError(f"n_distractors must be 0 to n_context={self.n_context}, got {self.n_distractors}")
        check_active_dims(self)

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        xs = self._sample_inputs(n_prompts, random)
        ys = targets_of(xs, self._sample_weights(n_prompts, random))
        if self.n_distractors:
            if self.distractor_labels == "noise":
                other = random.normal(n_prompts, self.n_context, self.y_dim)
            else:
                other = xs[:, :-1] @ self._sample_weights(n_prompts, random)
            # each point's rank among random numbers is below n_distractors for that number of random places
            places = random.uniform(n_prompts, self.n_context).argsort(dim=1).argsort(dim=1) < self.n_distractors
            ys[:, :-1] = torch.where(places[..., None], other, ys[:, :-1])
        if self.noise_std:
            noise = random.normal(*ys.shape).mul_(self.noise_std)
            if not self.query_noise:
                noise[:, -1] = 0
            ys = ys + noise
        return Prompts(xs, ys)

    def _sample_weights(self, n_prompts: int, random: RandomTensors) -> Float[Tensor, "prompt x y"]:
        weights = random.normal(n_prompts, self.x_dim, self.y_dim).mul_(self.weight_scale)
        return self._inverse_root.to(weights) @ weights if self.weight_covariance == "inverse" else weights

    def _sample_inputs(self, n_prompts: int, random: RandomTensors) -> Float[Tensor, "prompt point x"]:
        shape = (n_prompts, self.n_context + 1, self.x_dim)
        if isinstance(self.inputs, str):
            xs = random.inputs(self.inputs, *shape)
        else:
            choice = (random.uniform(n_prompts, 1, 1) * len(self.inputs)).long()
            xs = torch.zeros(shape, dtype=random.dtype, device=random.device)
            for i, name in enumerate(self.inputs):
                xs = torch.where(choice == i, random.inputs(name, *shape), xs)
        if self.covariance is not None:
            xs = xs @ self._covariance_root.to(xs)
        spectrum = self._spectrum()
        if spectrum is not None:
            xs = xs * spectrum.sqrt().to(xs)
            if self.eigenbasis == "shared":
                xs = xs @ self._shared_basis.to(xs)
            elif self.eigenbasis == "per_task":
                xs = xs @ random_rotations(random.normal(n_prompts, self.x_dim, self.x_dim))
        if self.active_dims is not None:
            xs[..., self.active_dims :] = 0
        if self.normalize_inputs:
            xs = xs / xs[:, :-1].flatten(1).norm(dim=1)[:, None, None]
        if self.input_scale != 1:
            xs = xs * self.input_scale
        return xs

    def _spectrum(self) -> Float[Tensor, "x"] | None:
        if self.eigenvalues is not None:
            return torch.tensor(self.eigenvalues, dtype=torch.float64)
        if self.condition_number is not None:
            return self.condition_number ** torch.linspace(0, 1, self.x_dim, dtype=torch.float64)
        return None

    def input_covariance(self) -> Float[Tensor, "x x"]:
        """Return the covariance of Gaussian inputs, float64, without `input_scale` and `active_dims`."""
        if self.covariance is not None:
            return torch.tensor(self.covariance, dtype=torch.float64)
        spectrum = self._spectrum()
        if spectrum is None:
            return torch.eye(self.x_dim, dtype=torch.float64)
        if self.eigenbasis == "per_task":
            raise ValueError("eigenbasis='per_task' gives each prompt its own covariance")
        if self.eigenbasis == "axes":
            return spectrum.diag()
        return self._shared_basis.T @ spectrum.diag() @ self._shared_basis

    @cached_property
    def _inverse_root(self) -> Float[Tensor, "x x"]:
        values, vectors = torch.linalg.eigh(self.input_covariance())
        return vectors @ values.rsqrt().diag() @ vectors.T

    def shared_basis(self) -> Float[Tensor, "eigenvector x"]:
        """Return the rotation of `eigenbasis="shared"`, float64; rows are the covariance's eigenvectors."""
        return self._shared_basis.clone()

    @cached_property
    def _shared_basis(self) -> Float[Tensor, "eigenvector x"]:
        generator = torch.Generator().manual_seed(self.eigenbasis_seed)
        return random_rotations(torch.randn(1, self.x_dim, self.x_dim, generator=generator, dtype=torch.float64))[0]

    @cached_property
    def _covariance_root(self) -> Float[Tensor, "x x"]:
        matrix, shape = torch.tensor(self.covariance, dtype=torch.float64), (self.x_dim, self.x_dim)
        if matrix.shape != shape or not matrix.isfinite().all() or not torch.allclose(matrix, matrix.T):
            raise ValueError(
                f"covariance must be a finite symmetric matrix with x_dim={self.x_dim} rows, got {list(matrix.shape)}"
            )
        values, vectors = torch.linalg.eigh(matrix)
        if values.min() < -1e-10 * values.abs().max():
            raise ValueError(f"covariance must have no negative eigenvalue, got {values.min().item():.3g}")
        return vectors @ values.clamp(min=0).sqrt().diag() @ vectors.T
