"""Prompts that algorithms can compute with in float64."""

from typing import Annotated, Any

import torch

from mechicl.base.annotations import constraint
from mechicl.prompts import Prompts


def _with_sizes(least: float, most: float) -> Any:
    def fit(prompts: Prompts) -> bool:
        values = prompts.xs.detach(), prompts.ys[:, :-1].detach()  # the query's target is not read
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, values)):  # type: ignore[attr-defined]
            return True  # values are hidden
        sizes = torch.cat([each.abs().amax(-1).double().flatten() for each in values])
        return not bool(((sizes != 0) & ((sizes < least) | (sizes > most))).any())

    return constraint(f"with points of sizes (largest entries) of {least:g} to {most:g}, or 0: scale them", fit)


Sized = Annotated[Prompts, _with_sizes(1e-130, 1e130)]
"""Prompts for sums of squares in float64: those of smaller points would be 0, those of larger ones infinite."""
SizedForFourthPowers = Annotated[Prompts, _with_sizes(1e-65, 1e65)]
"""Prompts for squares of such sums."""
