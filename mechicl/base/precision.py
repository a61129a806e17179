"""Half precision: float16 overflows at 65504, bfloat16 has three digits."""

import torch
from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """Convert half-precision values to float32, for sums and metrics; others are returned unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32)) if values.is_floating_point() else values
