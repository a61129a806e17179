"""Numbers of few digits, and NaN: float16 overflows at 65504, bfloat16 has three digits."""

import math

import torch
from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """Convert half-precision values to float32, for sums and metrics; others are returned unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32)) if values.is_floating_point() else values


def nan_last(values: Tensor) -> Tensor:
    """Replace NaN by minus infinity, so that it is ranked last: torch counts it as the largest."""
    return values.masked_fill(values.isnan(), -math.inf)
