"""Rows over seeds: with and without stuck ones, and medians over seeds and shared prompts."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.checkpoints.study import Models
from mechicl.reports.rows import as_text, seeds_and_prompts, without_stuck
from mechicl.statistics import Interval, interval, median_interval
from mechicl.statistics.intervals import mean_of_resamples, percentile_interval, prompt_counts


def over_seeds(
    values: Tensor | Sequence[float], checkpoint: Models, *, median: bool = False
) -> tuple[Interval, str, str]:
    """Return `measured`, `over` and `note` of a row: an interval over all seeds, and the same without stuck seeds.

    `values` has one per seed, in the checkpoint's order; `median` uses the median, with a bootstrap, for skewed ones.
    """
    sample = torch.as_tensor(values, dtype=torch.float64).flatten()
    if len(sample) != len(checkpoint.models):
        raise ValueError(f"{len(sample)} values for the {len(checkpoint.models)} seeds of {checkpoint.name}")
    statistic = median_interval if median else interval
    note = without_stuck(lambda kept: statistic(sample[kept]), checkpoint)
    return statistic(sample), f"seed{'s' if len(sample) != 1 else ''}", note


def over_resamples(
    values: Float[Tensor, "resample seed"], checkpoint: Models, n_prompts: int, note: str = ""
) -> tuple[Interval, str, str]:
    """Return `measured`, `over` and `note` of a row: a median over seeds and shared prompts; the note has the mean.

    For quantities that a few seeds or prompts decide, or that are not means: see `crossed_median_interval`.
    """
    measured, mean = crossed_median_interval(values, n_prompts)
    without = without_stuck(lambda kept: crossed_median_interval(values[:, kept], n_prompts)[0], checkpoint)
    notes = [note, f"mean {as_text(mean)}", without]
    return measured, seeds_and_prompts(values.shape[1], n_prompts), "; ".join(filter(None, notes))


def resampled_means(values: Float[Tensor, "*item prompt"], n_resamples: int = 400) -> Float[Tensor, "resample *item"]:
    """Return means over the prompts in the first row, and over resamples of the prompts in the others.

    A statistic that is computed of each row has the intervals of `crossed_median_interval`. The resamples are the same
    in every call with the same number of prompts, so that learners' means on shared prompts stay paired.
    """
    counts = torch.from_numpy(prompt_counts(values.shape[-1], n_resamples))
    return torch.einsum("rp,...p->r...", counts, values.detach().cpu().double()) / counts.sum(1).reshape(
        -1, *[1] * (values.ndim - 1)
    )


def crossed_median_interval(
    values: Float[Tensor, "resample item"], n_prompts: int, seeds: Sequence[tuple[int, ...]] | None = None,
) -> tuple[Interval, Interval]:  # fmt: skip
    """Return the median and the mean over seeds of a skewed statistic, with intervals for other seeds and prompts.

    The median's interval is a bootstrap of both (Owen 2007): seeds are resampled five times for each resample of the
    prompts. For few seeds it is at least their range, which covers as in `median_interval`.

    Args:
        values: the statistic of each seed on the prompts, then on resamples of them (`resampled_means`).
        n_prompts: number of prompts.
        seeds: the seeds of each item where items are pairs of seeds: the seeds are resampled then, and not the pairs.
    """
    sample, rng = values.detach().cpu().double().numpy(), np.random.default_rng(0)
    n_items = sample.shape[1]
    members = np.array(seeds or [(i,) for i in range(n_items)]).reshape(n_items, -1)
    n_seeds, medians = int(members.max()) + 1, []
    mean = replace(mean_of_resamples(sample, n_prompts, 0.95), n=n_items)
    median = float(np.median(sample[0]))
    if not np.isfinite(sample).all() or max(n_seeds, n_prompts) < 2:
        return Interval(median, math.nan, math.nan, n_items, middle="median"), mean
    for row in np.repeat(sample[1:], 5, 0):
        weights = np.bincount(rng.integers(n_seeds, size=n_seeds), minlength=n_seeds)[members].prod(1)
        if weights.any():  # a resample of one seed alone has no pairs
            medians.append(np.median(np.repeat(row, weights)))
    return percentile_interval(median, medians, n_items, middle="median"), mean
