"""Classifiers of Gaussian clusters: exact Bayes from the context, and from the table of the classes in the weights.

Predictions are probabilities of the labels, the mean of one-hot targets.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.spectra import selected
from mechicl.base.arguments import Count, Positive, checked
from mechicl.base.settings import settings
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt

MOST_PARTITIONS = 20_000


@checked
def in_weights_classifier(
    prompts: Prompts,
    *,
    means: Float[Tensor, "class x"],
    labels: Float[Tensor, "class y"],
    frequencies: Float[Tensor, "class"],
    within_class_noise: Positive,
    at: PointsAt = "points",
) -> Trajectory:
    """Classify each input among the known training classes, without reading the context (in-weights learning).

    It is the exact posterior over classes, for inputs `(mean + ε η) / √(1 + ε²)` with η from N(0, I / x_dim). Source:
    Reddy 2024 for the task.

    Args:
        means: class means, `GaussianClusters.means`.
        labels: label of each class, one-hot.
        frequencies: prior probability of each class, `GaussianClusters.frequencies`.
        within_class_noise: ε, the noise relative to the means.
    """
    if means.shape[1] != prompts.x_dim or labels.shape[1] != prompts.y_dim:
        raise ValueError(f"means {tuple(means.shape)} and labels {tuple(labels.shape)} are not of {prompts}")
    xs = selected(prompts.xs.double(), at)
    scale = 1 + within_class_noise**2
    centres = means.to(xs) / scale**0.5
    # |x - μ|² without the term that all classes share
    distances = centres.square().sum(-1) - 2 * xs @ centres.T
    variance = within_class_noise**2 / scale / prompts.x_dim
    posterior = (frequencies.to(xs).log() - distances / (2 * variance)).softmax(-1)
    return Trajectory((1,), (posterior @ labels.to(xs)).to(prompts.dtype)[None], "in-weights classifier")


@checked
def in_context_classifier(
    prompts: Prompts, *, within_class_noise: Positive, burstiness: Count = 1, at: PointsAt = "points"
) -> Trajectory:
    """Predict labels of unknown classes by exact Bayes from the context alone (in-context learning).

    It sums over all ways to split the points so far into classes of `burstiness` points with one label each, weighted
    by how well the inputs of each class agree. With `burstiness=1` each point is a separate class, and the query's
    prediction is one head of softmax attention over the context. Source: Reddy 2024 for the task.

    Args:
        prompts: bursty prompts of `tasks.GaussianClusters` with new classes. A point before the query may be of a class
            that was not shown yet, whose labels are equally likely.
        within_class_noise: ε of the task, the noise relative to the class means.
        burstiness: number of context points of each class, B of the task.

    Raises:
        ValueError: `burstiness` does not divide `n_context`, or there are too many ways to split the context.
    """
    if prompts.n_context % burstiness:
        raise ValueError(f"burstiness must divide n_context={prompts.n_context}, got {burstiness}")
    levels = _splits(prompts.n_context, burstiness)
    # of the splits of the longest prefix: sums of inputs, and a dozen numbers for each class
    widest = max(len(level.counts) * level.counts.shape[1] for level in levels)
    per_prompt = 8 * widest * (2 * prompts.x_dim + 12 + 2 * prompts.y_dim)
    parts = [
        _posterior_labels(part, levels, within_class_noise, burstiness)
        for part in prompts.split(max(1, int(settings.memory / 4 / per_prompt)))
    ]
    predictions = torch.cat(parts).to(prompts.dtype)
    return Trajectory((1,), selected(predictions, at)[None], "in-context Bayes")


@dataclass(frozen=True)
class _Splits:
    parents: Tensor  # [split], which split of the first t - 1 points
    joined: Tensor  # [split], the class that point t went into
    counts: Tensor  # [split class], points of each class


def _splits(n_context: int, burstiness: int) -> list[_Splits]:
    groups = n_context // burstiness
    level: list[tuple[int, ...]] = [(0,) * groups]
    levels = []
    for _ in range(n_context):
        following: list[tuple[int, int, tuple[int, ...]]] = []
        for parent, counts in enumerate(level):
            n_open = sum(count > 0 for count in counts)
            for place in range(min(n_open + 1, groups)):  # classes are numbered in the order in which they come
                if counts[place] < burstiness:
                    more = (*counts[:place], counts[place] + 1, *counts[place + 1 :])
                    following.append((parent, place, more))
        if len(following) > MOST_PARTITIONS:
            raise ValueError(
                f"{n_context} context points split into classes of {burstiness} in more than {MOST_PARTITIONS} ways: "
                f"take a shorter context, or nearest_neighbours"
            )
        parents, joined, level = (list(column) for column in zip(*following, strict=True))
        levels.append(_Splits(torch.tensor(parents), torch.tensor(joined), torch.tensor(level)))
    return levels


def _posterior_labels(
    prompts: Prompts, levels: list[_Splits], epsilon: float, burstiness: int
) -> Float[Tensor, "prompt point y"]:
    xs, ys = prompts.xs.double(), prompts.ys.double()
    n_prompts, d, n = len(prompts), prompts.x_dim, prompts.n_context
    groups = n // burstiness
    splits = 1
    log_weights = xs.new_zeros(n_prompts, splits)
    sums = xs.new_zeros(n_prompts, splits, groups, d)
    labels = xs.new_zeros(n_prompts, splits, groups, prompts.y_dim)
    counts = torch.zeros(splits, groups, dtype=torch.long, device=xs.device)
    predictions = []
    for t in range(n + 1):
        # chance of the next point's class: of the places left before the query, or an equal one for the query itself
        left = (burstiness - counts).double() if t < n else torch.ones_like(counts).double()
        # all empty classes are alike: the first represents them
        empty = counts == 0
        is_first = empty & (empty.cumsum(-1) == 1)
        chances = torch.where(empty, is_first * (left * empty).sum(-1, keepdim=True), left)
        logs = log_weights[..., None] + chances.log() + _log_predictive(xs[:, t], sums, counts, epsilon)
        weights = logs.flatten(1).softmax(-1).unflatten(1, logs.shape[1:])
        unknown = (weights * empty).sum((1, 2))[:, None] / prompts.y_dim
        predictions.append(torch.einsum("psg,psgy->py", weights * ~empty, labels) + unknown)
        if t == n:
            break
        level = levels[t]
        parents, joined = level.parents.to(xs.device), level.joined.to(xs.device)
        which = joined[None, :, None].expand(n_prompts, -1, 1)
        agree = torch.einsum("psgy,py->psg", labels, ys[:, t])  # 1 where the class has this label, 0 also where none
        label_chance = torch.where(empty, torch.full_like(agree, 1 / prompts.y_dim), agree)
        log_weights = (logs + label_chance.log())[:, parents].gather(-1, which)[..., 0]
        # in contexts that no split explains, all splits get equal weights
        log_weights = torch.where(log_weights.isfinite().any(-1, keepdim=True), log_weights, 0.0)
        put = torch.nn.functional.one_hot(joined, groups).to(xs)  # [split class]
        sums = sums[:, parents] + put[None, ..., None] * xs[:, t, None, None]
        labels = torch.maximum(labels[:, parents], put[None, ..., None] * ys[:, t, None, None])
        counts = level.counts.to(xs.device)
    return torch.stack(predictions, dim=1)


def _log_predictive(
    x: Float[Tensor, "prompt x"], sums: Float[Tensor, "prompt split class x"], counts: Tensor, epsilon: float
) -> Float[Tensor, "prompt split class"]:
    """Return the log-density of an input given those of its class so far, up to a constant.

    In the unit of sqrt((1 + ε²) / d) an input is its mean, standard normal, plus noise of variance ε².
    """
    d = x.shape[-1]
    unit = math.sqrt((1 + epsilon**2) * d)
    precision = counts + epsilon**2  # of the mean's posterior, times ε²
    expected = unit * sums / precision[..., None]
    variance = epsilon**2 / precision + epsilon**2
    squares = (unit * x[:, None, None] - expected).square().sum(-1)
    return -squares / (2 * variance) - d / 2 * variance.log()
