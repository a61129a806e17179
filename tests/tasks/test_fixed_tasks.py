import pytest
import scipy.stats
import torch

from mechicl.tasks import FixedTasks, LinearRegression, SineRegression
from tests.tasks.reference import LEAST_P


def rows(prompts):
    return [tuple(xs.flatten().tolist() + ys.flatten().tolist()) for xs, ys in zip(prompts.xs, prompts.ys, strict=True)]


@pytest.mark.parametrize("task", [LinearRegression(x_dim=2, n_context=3, y_dim=2), SineRegression(n_context=3)])
def test_fixed_tasks_are_a_sample_of_their_task_and_never_change(task):
    fixed = FixedTasks(task, n_tasks=8, seed=3)
    assert (fixed.x_dim, fixed.y_dim, fixed.n_context) == (task.x_dim, task.y_dim, task.n_context)
    pool = set(rows(task.sample(8, seed=3, dtype=torch.float64)))
    assert set(rows(fixed.prompts)) == pool
    for seed in range(5):
        assert set(rows(fixed.sample(6, seed=seed, dtype=torch.float64))) <= pool
    assert set(rows(FixedTasks(task, n_tasks=8, seed=4).prompts)).isdisjoint(pool)


def test_a_minibatch_of_fixed_tasks_repeats_none_while_it_can():
    fixed = FixedTasks(LinearRegression(x_dim=2, n_context=3), n_tasks=8)
    everything = rows(fixed.prompts)
    assert len(set(rows(fixed.sample(5, seed=0, dtype=torch.float64)))) == 5
    whole = rows(fixed.sample(8, seed=0, dtype=torch.float64))
    assert sorted(whole) == sorted(everything)
    assert whole != everything
    assert len(fixed.sample(20, seed=0)) == 20


@pytest.mark.parametrize("n_prompts", [3, 13])
def test_every_fixed_task_is_drawn_equally_often(n_prompts):
    fixed = FixedTasks(LinearRegression(x_dim=1, n_context=0), n_tasks=10)
    generator = torch.Generator().manual_seed(0)
    drawn = [row for _ in range(200) for row in rows(fixed.sample(n_prompts, generator=generator, dtype=torch.float64))]
    counts = [drawn.count(row) for row in rows(fixed.prompts)]
    assert sum(counts) == 200 * n_prompts
    # Without repeats the counts vary a little less than the test allows for, so it is only more lenient.
    assert scipy.stats.chisquare(counts).pvalue > LEAST_P


def test_fixed_tasks_are_drawn_once_and_kept():
    fixed = FixedTasks(LinearRegression(), n_tasks=4)
    assert fixed.prompts is fixed.prompts
    assert fixed == FixedTasks(LinearRegression(), n_tasks=4)
    assert fixed.replace(n_tasks=5).prompts.xs.shape[0] == 5


@pytest.mark.parametrize("fields", [{"n_tasks": 0}, {"n_tasks": 3, "seed": -1}])
def test_fixed_tasks_out_of_range_are_refused(fields):
    with pytest.raises(ValueError, match="must be an int of at least"):
        FixedTasks(LinearRegression(), **fields)
