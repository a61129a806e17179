"""Every registered task has an independent computation: the mean of a statistic of its samples in closed form."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mechicl import tasks
from mechicl.tasks.registry import TASK_KINDS
from tests.tasks.reference import MOST_Z, z_score

SIZES: dict[str, Any] = {"x_dim": 5, "n_context": 3}
LINEAR, POOL = tasks.LinearRegression(**SIZES), tasks.TaskPool(**SIZES, n_tasks=4, noise_std=0.5)
FIXED = LINEAR.sample(6, seed=3, dtype=torch.float64)
NOT_CENTRED = (tasks.SineRegression, tasks.FixedTasks)


def last_square(prompts: Any) -> Tensor:
    return prompts.ys[:, -1, 0].square()


def alike(*places: int) -> Callable[[Any], Tensor]:
    """Tell in which sequences the tokens at these places are the same."""
    return lambda sequences: (sequences.ids[:, list(places)] == sequences.ids[:, places[:1]]).all(1)


def is_a_parity_of_two(prompts: Any) -> Tensor:
    pairs = torch.combinations(torch.arange(prompts.x_dim))
    return (prompts.xs[:, :, pairs].prod(-1) == prompts.ys).all(1).any(1)


MEANS: list[tuple[Any, Callable[[Any], Tensor], float]] = [  # a task, a statistic of each sample, and its mean
    (LINEAR, last_square, 5 / 12),  # inputs from U(-1/2, 1/2)
    (tasks.SineRegression(n_context=3), last_square, (0.5**3 - 0.1**3) / (3 * 0.4) / 2),  # half the mean a²
    (tasks.FixedTasks(LINEAR, n_tasks=6, seed=3), last_square, last_square(FIXED).mean().item()),
    (POOL, last_square, POOL.weights.square().sum(-1).mean().item() + 0.25),
    (tasks.SparseLinearRegression(**SIZES, sparsity=2), last_square, 2.0),  # as many weights of variance 1 as are kept
    (tasks.QuadraticRegression(**SIZES), last_square, 5.0),
    (tasks.ReluNetworks(**SIZES, n_hidden=10), last_square, 5.0),  # 2/r times r times half of |x|²
    (tasks.DecisionTrees(**SIZES, depth=3), last_square, 1.0),
    (tasks.LogisticRegression(**SIZES), last_square, 1.0),
    (tasks.MixedRegression(**SIZES, noise_stds=(0.1, 2.0)), last_square, 1.0 + (0.01 + 4.0) / 2),
    (tasks.DriftingRegression(**SIZES, renewed=0.3), last_square, 5.0),
    (tasks.AssociativeRecall(**SIZES, n_keys=2), last_square, 1.0),
    (tasks.Conjunctions(**SIZES, literal_probability=0.3, positive_share=0.4),
     lambda prompts: prompts.ys[:, -1, 0] > 0, 0.4 + 0.6 * (1 - 0.3 / 2) ** 5),
    (tasks.Parities(**SIZES, degree=2), is_a_parity_of_two, 1.0),
    (tasks.GaussianClusters(x_dim=5), lambda prompts: (prompts.xs[:, -1] * prompts.xs[:, -1]).sum(-1), 1.0),
    (tasks.TableRegression(**SIZES),  # a cell is a code from 0 to 5, heavy-tailed or normal, or positive
     lambda prompts: prompts.xs[:, -1, 0] > 0, 0.2 * 5 / 6 + 0.7 / 2 + 0.1),
    (tasks.TableClassification(**SIZES), lambda prompts: prompts.ys[:, -1, 0], 1 / 3),
    (tasks.RepeatedTokens(d_vocab=5, n_ctx=8, min_period=2, max_period=4),
     lambda sequences: sequences.predictable.sum(1), 8 - 3.0),
    (tasks.TopicClassification(min_words=2, max_words=2), alike(3, 7), (1 / 2 + 1 / 3 + 1 / 4) / 3),  # 2 to 4 classes
    (tasks.MarkovChains(d_vocab=3, n_ctx=3), alike(0, 1, 2), 1 / 6),  # the mean square of a share of Dirichlet(1, 1, 1)
    (tasks.BallsAndUrns(d_vocab=5, n_ctx=3), alike(0, 1), 1 / 3),
    (tasks.GraphTracing(sides=(3, 3), periodic=True, n_ctx=3), alike(0, 2), 1 / 4),  # back to one of four neighbours
]  # fmt: skip


def test_every_task_has_an_independent_computation():
    assert {type(task) for task, *_ in MEANS} == set(TASK_KINDS), "add a statistic of the new task to MEANS"


@pytest.mark.parametrize(("task", "statistic", "mean"), MEANS, ids=[type(task).__name__ for task, *_ in MEANS])
def test_a_statistic_of_the_samples_has_its_mean(task: Any, statistic: Callable[[Any], Tensor], mean: float):
    samples = task.sample(40_000, seed=1)
    values = statistic(samples).double().numpy()
    assert values.mean() == pytest.approx(mean, rel=0.1)
    assert values.std() < 1e-12 or abs(z_score(values, mean)) < MOST_Z
    if statistic is last_square and not isinstance(task, NOT_CENTRED):
        assert abs(z_score(samples.ys[:, -1, 0], 0.0)) < MOST_Z
