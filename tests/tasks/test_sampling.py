"""Seeds, generators, devices and dtypes of every task, and random rotations."""

import itertools

import numpy as np
import pytest
import scipy.stats
import torch

from mechicl.prompts import Prompts, prompt_format
from mechicl.prompts.prompts import lies_prompts_last
from mechicl.tasks import LinearRegression, Task
from mechicl.tasks.sampling import QuickGenerator, random_rotations
from tests.tasks.reference import PROMPT_TASKS, TOKEN_TASKS, assert_follows, same

every_task = pytest.mark.parametrize("task", PROMPT_TASKS + TOKEN_TASKS, ids=repr)


@every_task
@pytest.mark.parametrize(("n_prompts", "dtype"), [(0, torch.float32), (12, torch.float64)])
def test_samples_have_the_requested_number_sizes_and_dtype(task, dtype, n_prompts):
    assert isinstance(task, Task) == (task in PROMPT_TASKS)
    if task in TOKEN_TASKS:
        sequences = task.sample(n_prompts, seed=2**40)
        assert sequences.ids.shape == sequences.predictable.shape == (n_prompts, task.n_ctx + 1)
        assert sequences.targets().shape == sequences.read.shape == (n_prompts, task.n_ctx)
        return
    prompts = task.sample(n_prompts, seed=2**40, dtype=dtype)
    assert prompts.xs.shape == (n_prompts, task.n_context + 1, task.x_dim)
    assert prompts.ys.shape == (n_prompts, task.n_context + 1, task.y_dim)
    assert prompts.dtype == dtype


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


def test_random_rotations_are_orthogonal_and_point_anywhere():
    generator = torch.Generator().manual_seed(0)
    rotations = random_rotations(torch.randn(400, 3, 3, generator=generator, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(rotations @ rotations.swapaxes(1, 2), np.eye(3)[None].repeat(400, 0), atol=1e-12)
    for i, j in itertools.product(range(3), repeat=2):  # a coordinate of a random direction in three dimensions
        assert_follows(rotations[:, i, j], scipy.stats.uniform(-1.0, 2.0))


def quick(seed, *shape):
    return QuickGenerator().manual_seed(seed).uniform(*shape)


def test_a_quick_generator_goes_on_from_its_state_and_small_blocks_are_torchs():
    generator = QuickGenerator().manual_seed(7)
    state = generator.get_state()
    first, second = generator.uniform(300, 301), generator.uniform(300, 301)
    assert first.shape == (300, 301)
    assert not torch.equal(first, second)
    generator.set_state(state)
    assert torch.equal(first, generator.uniform(300, 301))
    assert torch.equal(second, generator.uniform(300, 301))
    plain = torch.Generator().manual_seed(7)
    few = QuickGenerator.LARGE - 1
    assert torch.equal(quick(7, few), torch.rand(few, generator=plain))
    # of an odd number of them, and what a block starts from: 128 bits of torch's
    words = np.random.SFC64(torch.randint(-(2**63), 2**63 - 1, (2,), generator=plain.manual_seed(7)).numpy().view("u8"))
    expected = (words.random_raw(2**15 + 1).view(np.uint32)[: 2**16 + 1] & 0xFFFFFF) * 2.0**-24
    np.testing.assert_array_equal(quick(7, 2**16 + 1).numpy(), expected.astype(np.float32))


def test_only_training_has_quick_numbers_and_double_precision_none():
    task = LinearRegression(x_dim=10, n_context=10)
    plain, other = (kind().manual_seed(3) for kind in (torch.Generator, QuickGenerator))
    assert same(task.sample(2048, seed=3), task.sample(2048, generator=plain))
    assert not same(task.sample(2048, seed=3), task.sample(2048, generator=other))
    double = task.sample(2048, generator=QuickGenerator().manual_seed(3), dtype=torch.float64)
    assert same(double, task.sample(2048, seed=3, dtype=torch.float64))


@pytest.mark.parametrize("n_prompts", [7, 2048])
def test_prompts_that_lie_last_in_memory_are_prompts_like_any_others(n_prompts):
    plain, across = (QuickGenerator(prompts_last=last).manual_seed(5) for last in (False, True))
    for kind in ("uniform", "normal"):  # the same numbers, in another order
        numbers, turned = getattr(plain, kind)(n_prompts, 11, 10), getattr(across, kind)(n_prompts, 11, 10)
        assert torch.equal(numbers.flatten(), turned.permute(1, 2, 0).flatten())
        assert lies_prompts_last(turned)
        assert not lies_prompts_last(numbers)
    prompts = LinearRegression(x_dim=10, n_context=10).sample(n_prompts, generator=across)
    assert lies_prompts_last(prompts.xs)
    weights = torch.linalg.solve(prompts.xs[:, :10].double(), prompts.ys[:, :10].double())
    residual = (prompts.xs[:, 10:].double() @ weights - prompts.ys[:, 10:]).abs().flatten()
    assert residual.median() < 1e-5  # linear in the inputs, as far as ten points of float32 say it
    if n_prompts > 100:
        assert_follows((prompts.xs + 0.5).flatten()[::7].double().numpy(), scipy.stats.uniform())
        assert_follows(weights.flatten().numpy(), scipy.stats.norm())
    copy = Prompts(prompts.xs.contiguous(), prompts.ys.contiguous())
    layout = prompt_format("paired", x_dim=10, y_dim=1)
    assert torch.equal(layout.encode(prompts), layout.encode(copy))
    assert lies_prompts_last(layout.encode(prompts))
    both = Prompts.concatenate([prompts, prompts[:5]])
    assert same(both, Prompts.concatenate([copy, copy[:5]]))
    assert lies_prompts_last(both.xs)


def test_quick_numbers_are_uniform_and_independent_over_seeds_and_blocks():
    """Blocks are started from torch's numbers for 20 seeds in a row, as a training's, 4 blocks each: 6.6 million."""
    blocks = []
    for seed in range(20):
        generator = QuickGenerator().manual_seed(2**40 + seed)
        blocks += [generator.uniform(2**13, 10) for _ in range(4)]
    values = torch.stack(blocks).double().flatten(1).numpy()  # [block number]
    n = values.size
    assert values.min() >= 0
    assert values.max() < 1
    assert scipy.stats.kstest(values.ravel(), "uniform").pvalue > 1e-4
    of_blocks = [scipy.stats.kstest(block[:10_000], "uniform").pvalue for block in values]
    assert scipy.stats.kstest(of_blocks, "uniform").pvalue > 1e-4
    for power in range(1, 7):  # moments of a uniform variable: 1 / (power + 1), in standard errors
        error = (1 / (2 * power + 1) - 1 / (power + 1) ** 2) ** 0.5 / n**0.5
        assert abs((values**power).mean() - 1 / (power + 1)) < 4.5 * error
    bits = (values * 2**24).astype(np.int64)
    for bit in range(24):  # each of the 24 is 0 as often as 1
        assert abs(((bits >> bit) & 1).mean() - 0.5) < 4.5 * 0.5 / n**0.5
    centred = (values - 0.5) * 12**0.5
    for shift in (1, 2, 10, 11, 110):  # neighbours, coordinates of one point, points of one prompt
        assert abs((centred[:, shift:] * centred[:, :-shift]).mean()) < 4.5 / n**0.5
        squares = (centred[:, shift:] ** 2 - 1) * (centred[:, :-shift] ** 2 - 1)
        assert abs(squares.mean()) < 4.5 * 0.8 / n**0.5
    between = centred @ centred.T / values.shape[1]  # the same places of any two blocks
    pairs = between[np.triu_indices(len(between), 1)] * values.shape[1] ** 0.5
    assert scipy.stats.kstest(pairs, "norm").pvalue > 1e-4
    assert np.abs(pairs).max() < 6
