"""Permutation tests of patching: does a patch depend on which prompt it comes from?"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.analysis.interventions.metrics import Inputs, SomeMetrics, name_metrics
from mechicl.analysis.interventions.patching import Axes, patch
from mechicl.analysis.interventions.sweeps import InterventionSweep
from mechicl.base.arguments import Count, checked

BLOCK = 8  # prompts among which partners are exchanged, and so the number of sweeps


@dataclass(frozen=True, eq=False)
class PatchingTest(InterventionSweep):
    """A sweep of `patch`, and permutation tests of each cell's effect; see `patch_and_test`.

    Attributes:
        mismatched_values: each metric, as a mean over patches from other prompts' clean runs, `[*axes prompt]`.
        p_values: p-value of each cell by metric, `[*axes]`; NaN where a metric is undefined.
        adjusted_p_values: the same, corrected for the number of cells, `[*axes]`.
    """

    mismatched_values: dict[str, Float[Tensor, "..."]] = field(default_factory=dict)
    p_values: dict[str, Float[Tensor, "..."]] = field(default_factory=dict)
    adjusted_p_values: dict[str, Float[Tensor, "..."]] = field(default_factory=dict)

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """Return the sweep's table with the columns NAME_mismatched_effect, NAME_p and NAME_p_adjusted."""
        columns = {}
        for name, p_values in self.p_values.items():
            mismatched = self.mismatched_values[name] - self.unpatched_values[name]
            columns[f"{name}_mismatched_effect"] = mismatched.mean(-1)
            columns |= {f"{name}_p": p_values, f"{name}_p_adjusted": self.adjusted_p_values[name]}
        return super().to_dataframe(level).assign(**{name: each.flatten().tolist() for name, each in columns.items()})


@checked(locks=True)
def patch_and_test(
    model: Any,
    clean: Inputs,
    corrupted: Inputs,
    component: str = "z",
    axes: Axes | None = None,
    *,
    metrics: SomeMetrics = None,
    n_permutations: Count = 999,
    seed: int = 0,
    progress: bool | None = None,
) -> PatchingTest:
    """Patch as `patch` does, and test each cell against patches from the clean runs of other prompts.

    Under the null hypothesis a patch does the same whichever prompt's clean run it comes from, as for an activation
    that only shows that a run is not corrupted. The mean effect over prompts is compared with that of random
    permutations of the clean prompts, in blocks of up to 8, so a test takes up to 8 sweeps of `patch` and any number of
    permutations. The corrected p-values bound the probability of any false positive among all cells: they compare each
    cell with the largest effect of each permutation, in units of its cell's standard deviation (Westfall & Young 1993).

    The arguments that are not listed are those of `patch`; metrics are of the query's predictions.

    Args:
        clean: the prompts whose activations are patched in, at least 4.
        n_permutations: number of random permutations; the smallest p-value is 1 / (n_permutations + 1).

    Raises:
        ValueError: fewer than 4 prompts, no metric, or what `patch` refuses.

    Example:
        >>> tested = patch_and_test(model, prompts, corrupt(prompts, "labels"), "z", ("layer", "head"))
        >>> tested.to_dataframe().query("loss_p_adjusted < 0.05")
    """
    if len(clean) < 4:
        raise ValueError(f"a permutation test needs at least 4 prompts, got {len(clean)}")
    named = name_metrics(metrics, clean, "query")
    if not named:
        raise ValueError("a test is of a metric: give metrics=, for instance logit_difference(correct, wrong)")
    partners, sizes = _shifted_partners(len(clean))
    sweeps = [
        patch(model, clean[partner], corrupted, component, axes, metrics=named, progress=progress)
        for partner in partners
    ]
    there, prompts = torch.arange(len(partners)) < sizes[:, None], torch.arange(len(clean))
    shifts = _random_shifts(sizes, n_permutations, seed)
    mismatched, plain, adjusted = {}, {}, {}
    for name in named:
        stacked = torch.stack([each.values[name].double().cpu() for each in sweeps], -1)  # [*axes prompt shift]
        paired = stacked.masked_fill(~there, 0)
        mismatched[name] = paired[..., 1:].sum(-1) / (sizes - 1)
        mean = (paired.sum(-1) / sizes).mean(-1, keepdim=True)  # over all permutations
        permuted = torch.stack([stacked[..., prompts, each].mean(-1) for each in shifts], -1) - mean
        observed = (stacked[..., 0].mean(-1, keepdim=True) - mean)[..., 0]
        tests = _compare(observed.flatten(), permuted.flatten(0, -2))
        plain[name], adjusted[name] = (each.view_as(observed) for each in tests)
    fields = {each.name: getattr(sweeps[0], each.name) for each in dataclasses.fields(sweeps[0])}
    return PatchingTest(**fields, mismatched_values=mismatched, p_values=plain, adjusted_p_values=adjusted)


def _shifted_partners(n_prompts: int) -> tuple[list[Int[Tensor, "prompt"]], Int[Tensor, "prompt"]]:
    """For each shift, the index of each prompt's partner that many places later in its block; and the blocks' sizes."""
    blocks = torch.arange(n_prompts).tensor_split(-(-n_prompts // BLOCK))
    partners = [torch.cat([block.roll(-shift) for block in blocks]) for shift in range(max(map(len, blocks)))]
    return partners, torch.cat([torch.full_like(block, len(block)) for block in blocks])


def _random_shifts(sizes: Int[Tensor, "prompt"], n: int, seed: int) -> Int[Tensor, "permutation prompt"]:
    """Random permutations in each block, as the number of places from each prompt to its partner."""
    generator, blocks, first = torch.Generator().manual_seed(seed), [], 0
    while first < len(sizes):
        size = int(sizes[first])
        order = torch.rand(n, size, generator=generator).argsort(-1)
        blocks.append((order - torch.arange(size)) % size)
        first += size
    return torch.cat(blocks, -1)


def _compare(
    observed: Float[Tensor, "cell"], permuted: Float[Tensor, "cell permutation"]
) -> tuple[Float[Tensor, "cell"], Float[Tensor, "cell"]]:
    """Two-sided p-values of each cell alone, and against the largest of all cells."""
    spread = torch.cat([observed[:, None], permuted], 1).square().mean(1).sqrt()
    # where patches from all prompts do the same there is only rounding
    null = spread <= 1e-12 * spread.nan_to_num().max()
    sizes = (observed.abs() / spread).masked_fill(null, 0)
    others = (permuted.abs() / spread[:, None]).masked_fill(null[:, None], 0)
    limit = sizes[:, None] * (1 - 1e-9)  # the same permutation, up to rounding
    counts = ((others >= limit).sum(1), (others.nan_to_num().amax(0) >= limit).sum(1))
    alone, together = ((1 + count.double()) / (1 + permuted.shape[1]) for count in counts)
    return alone.masked_fill(sizes.isnan(), torch.nan), together.masked_fill(sizes.isnan(), torch.nan)
