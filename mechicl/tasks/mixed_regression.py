"""Linear regression at several levels of noise, or sizes of weights, one a prompt."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.checks import is_finite
from mechicl.tasks.function_classes import GaussianPoints
from mechicl.tasks.sampling import RandomTensors


@dataclass(frozen=True)
class MixedRegression(GaussianPoints):
    """Linear functions with noise, where each prompt has one of a few noise levels and sizes of weights.

    Which ridge penalty is best differs from prompt to prompt and must be told from the context: the best predictor,
    `algorithms.mixture_bayes`, averages ridge regressions by how likely their setting is.

    Source: Bai et al. 2023, on mixed noise levels: noise 0.1 or 0.5, weights N(0, I/d) in d = 20 dimensions, 40 points.

    Attributes:
        x_dim: dimension of the inputs, standard normal.
        n_context: number of context points; the query comes on top.
        active_dims: all but the first so many input coordinates are zero.
        noise_stds: standard deviations of the noise, one for each setting.
        weight_stds: standard deviations of the weights, one for each setting, or one for all; by default 1/√x_dim.

    Raises:
        ValueError: a field is out of range, or there are other numbers of noise levels than of sizes.

    Example:
        >>> MixedRegression(x_dim=5, noise_stds=(0.1, 0.5, 0.1), weight_stds=(1.0, 1.0, 3.0)).settings
        ((0.1, 1.0), (0.5, 1.0), (0.1, 3.0))
    """

    noise_stds: tuple[float, ...] = (0.1, 0.5)
    weight_stds: tuple[float, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("noise_stds", 1), ("weight_stds", 0)):
            values = getattr(self, name)
            if len(values) < least or not all(is_finite(v) and v > 0 for v in values):
                raise ValueError(f"{name} must be positive and finite, got {values}")
        if len(self.weight_stds) not in (0, 1, len(self.noise_stds)):
            raise ValueError(
                f"weight_stds must be one for all settings or one for each of the {len(self.noise_stds)} noise_stds, "
                f"got {self.weight_stds}"
            )

    @property
    def settings(self) -> tuple[tuple[float, float], ...]:
        """Pairs of noise and weights, in standard deviations; each prompt has one of them, all equally likely."""
        stds = self.weight_stds or (self.x_dim**-0.5,)
        stds = stds * len(self.noise_stds) if len(stds) == 1 else stds
        return tuple(zip(self.noise_stds, stds, strict=True))

    def _targets(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        choice = random.integers(0, len(self.settings), len(xs))
        noise_std, weight_std = torch.tensor(self.settings, dtype=xs.dtype, device=xs.device)[choice].unbind(-1)
        weights = weight_std[:, None] * random.normal(len(xs), self.x_dim)
        noise = noise_std[:, None] * random.normal(*xs.shape[:2])
        return torch.einsum("npx,nx->np", xs, weights) + noise
