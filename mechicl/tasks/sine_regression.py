"""Sine waves, which no linear model of the input fits."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mechicl.base.arguments import check_fields
from mechicl.base.checks import is_finite, require_whole
from mechicl.prompts import Prompts
from mechicl.tasks.sampling import PromptDistribution, RandomTensors


@dataclass(frozen=True)
class SineRegression(PromptDistribution):
    """Sine waves `y = a sin(x + phase)` with a random amplitude and phase a prompt.

    Source: von Oswald et al. 2023, A.7. The paper prints amplitudes from U(0.1, 5); the authors' code, and this
    default, has U(0.1, 0.5). Their code also draws amplitude and phase with the same random key, so that one decides
    the other (their correlation is 1): `amplitude_phase="one_key"`. The default is the text's, two independent numbers.

    Attributes:
        n_context: number of context points.
        x_range: interval of the inputs.
        amplitude_range: interval of the amplitudes.
        phase_range: interval of the phases, in radians.
        amplitude_phase: "independent" draws of the two, or "one_key": the phase is as far up its interval as the
            amplitude is up its own.
    """

    n_context: int = 10
    x_range: tuple[float, float] = (-5.0, 5.0)
    amplitude_range: tuple[float, float] = (0.1, 0.5)
    phase_range: tuple[float, float] = (0.0, math.pi)
    amplitude_phase: Literal["independent", "one_key"] = "independent"

    def __post_init__(self):
        check_fields(self)
        require_whole(self, n_context=0)
        for name in ("x_range", "amplitude_range", "phase_range"):
            ends = getattr(self, name)
            if len(ends) != 2 or not all(map(is_finite, ends)) or ends[0] > ends[1]:
                raise ValueError(f"{name} must be (low, high), finite, with low <= high, got {ends}")

        if self.amplitude_phase not in ("independent", "one_key"):
            raise ValueError(f"amplitude_phase {self.amplitude_phase!r} is not one of 'independent', 'one_key'")

    @property
    def x_dim(self) -> int:
        """One input."""
        return 1

    @property
    def y_dim(self) -> int:
        """One target."""
        return 1

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        def between(interval: tuple[float, float], shares: Tensor) -> Tensor:
            low, high = interval
            return low + (high - low) * shares

        xs = between(self.x_range, random.uniform(n_prompts, self.n_context + 1, 1))
        key = random.uniform(n_prompts, 1, 1)
        amplitude = between(self.amplitude_range, key)
        other_key = key if self.amplitude_phase == "one_key" else random.uniform(n_prompts, 1, 1)
        return Prompts(xs, amplitude * torch.sin(xs + between(self.phase_range, other_key)))
