"""Seeds, generators, devices and dtypes of every task, and random rotations."""

import itertools

import numpy as np
import pytest
import scipy.stats
import torch

from mechicl.sampling import random_rotations
from mechicl.tasks import Task
from tests.tasks.reference import PROMPT_TASKS, TOKEN_TASKS, assert_follows, same

every_task = pytest.mark.parametrize("task", PROMPT_TASKS + TOKEN_TASKS, ids=repr)


@pytest.mark.parametrize("task", PROMPT_TASKS, ids=repr)
@pytest.mark.parametrize(("n_prompts", "dtype"), [(0, torch.float32), (12, torch.float64)])
def test_prompts_have_the_sizes_and_the_dtype_that_were_asked_for(task, dtype, n_prompts):
    prompts = task.sample(n_prompts, seed=2**40, dtype=dtype)
    assert prompts.xs.shape == (n_prompts, task.n_context + 1, task.x_dim)
    assert prompts.ys.shape == (n_prompts, task.n_context + 1, task.y_dim)
    assert prompts.dtype == dtype
    assert isinstance(task, Task)


@pytest.mark.parametrize("task", TOKEN_TASKS, ids=repr)
def test_sequences_have_their_length_and_no_floating_point_type(task):
    for n_prompts in (0, 5):
        sequences = task.sample(n_prompts, seed=0)
        assert sequences.ids.shape == sequences.predictable.shape == (n_prompts, task.n_ctx + 1)
        assert sequences.targets().shape == sequences.read.shape == (n_prompts, task.n_ctx)
    with pytest.raises(TypeError, match="dtype"):
        task.sample(2, seed=0, dtype=torch.float64)
    assert not isinstance(task, Task)


@every_task
def test_a_seed_gives_the_same_bits_and_a_generator_moves_on(task):
    first, state = task.sample(4, seed=0), torch.get_rng_state()
    assert same(first, task.sample(4, seed=0, device="cpu"))
    generator = torch.Generator().manual_seed(0)
    assert same(first, task.sample(4, generator=generator, device=torch.device("cpu", 0)))
    assert not same(first, task.sample(4, generator=generator))
    assert not same(first, task.sample(4, seed=1))
    assert torch.equal(torch.get_rng_state(), state)  # the global random numbers are left alone


@pytest.mark.parametrize("task", PROMPT_TASKS, ids=repr)
def test_half_precision_prompts_are_the_single_precision_ones_rounded(task):
    assert same(task.sample(50, seed=0, dtype=torch.bfloat16), task.sample(50, seed=0).to(torch.bfloat16))


@every_task
def test_what_cannot_be_sampled_is_refused(task):
    for arguments, message in (
        ({}, "a seed or a generator"),
        ({"seed": 0, "generator": torch.Generator()}, "not both"),
        ({"generator": torch.Generator(), "device": "cuda"}, "cannot sample on cuda"),
        ({"n_prompts": -1, "seed": 0}, "n_prompts must not be negative, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            task.sample(**{"n_prompts": 1, **arguments})


def test_prompts_of_whole_numbers_are_refused():
    with pytest.raises(TypeError, match="floating point"):
        PROMPT_TASKS[0].sample(1, seed=0, dtype=torch.int64)


def test_random_rotations_are_orthogonal_and_point_anywhere():
    generator = torch.Generator().manual_seed(0)
    rotations = random_rotations(torch.randn(400, 3, 3, generator=generator, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(rotations @ rotations.swapaxes(1, 2), np.eye(3)[None].repeat(400, 0), atol=1e-12)
    for i, j in itertools.product(range(3), repeat=2):  # a coordinate of a random direction in three dimensions
        assert_follows(rotations[:, i, j], scipy.stats.uniform(-1.0, 2.0))
