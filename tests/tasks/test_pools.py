"""Pools of tasks and fixed sets of prompts."""

import numpy as np
import pytest
import scipy.stats
import torch

from mechicl.tasks import FixedTasks, LinearRegression, SineRegression, TaskPool
from tests.tasks.reference import LEAST_P, MOST_Z, assert_follows, z_score


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
    assert fixed.prompts is fixed.prompts
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


def test_targets_are_those_of_the_pool_with_noise():
    task = TaskPool(x_dim=3, n_context=7, n_tasks=5, noise_std=0.2, seed=4)
    prompts = task.sample(4000, seed=0, dtype=torch.float64)
    assert prompts.xs.shape == (4000, 8, 3)
    assert prompts.ys.shape == (4000, 8, 1)
    assert_follows(prompts.xs.numpy(), scipy.stats.norm())
    residuals = prompts.ys[..., 0, None] - torch.einsum("npx,tx->npt", prompts.xs, task.weights)
    drawn = residuals.square().sum(1).argmin(-1)
    noise = residuals[torch.arange(4000), :, drawn].numpy()
    assert np.abs(z_score(noise.mean(1), 0.0)) < MOST_Z
    assert np.abs(z_score((noise**2).mean(1), 0.04)) < 2 * MOST_Z  # a wrong nearest task makes it a little too small
    counts = np.bincount(drawn.numpy(), minlength=5)
    assert scipy.stats.chisquare(counts).pvalue > 1e-4


def test_without_noise_every_prompt_is_a_task_of_the_pool_and_its_inputs_are_new():
    task = TaskPool(x_dim=3, n_context=9, n_tasks=6, noise_std=0.0)
    prompts = task.sample(200, seed=1, dtype=torch.float64)
    fitted = torch.linalg.lstsq(prompts.xs, prompts.ys).solution[..., 0]
    assert (fitted[:, None] - task.weights).norm(dim=-1).amin(-1).max() < 1e-9
    assert len(prompts.xs.unique(dim=0)) == 200
    assert torch.equal(task.weights, task.replace(n_context=3, noise_std=1.0).weights)
    assert not torch.equal(task.weights, task.replace(seed=1).weights)


def test_a_large_pool_has_standard_normal_weights_and_new_tasks_are_its_limit():
    task = TaskPool(x_dim=4, n_tasks=5000)
    assert_follows(task.weights.numpy(), scipy.stats.norm())
    assert task.new_tasks == LinearRegression(x_dim=4, n_context=15, inputs="gaussian", noise_std=0.5)
    pool, new = (each.sample(20_000, seed=0).ys[:, -1, 0].numpy() for each in (task, task.new_tasks))
    assert abs(pool.var() / new.var() - 1) < 0.1
