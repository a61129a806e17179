"""Functions of one target against closed forms, and the distributions that they claim."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from mechicl.tasks import (
    DecisionTrees,
    LogisticRegression,
    MixedRegression,
    QuadraticRegression,
    ReluNetworks,
    SineRegression,
    SparseLinearRegression,
)
from tests.tasks.reference import MOST_Z, assert_follows, z_score

KINDS = (SparseLinearRegression, QuadraticRegression, ReluNetworks, DecisionTrees, LogisticRegression, MixedRegression)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_standard_normal_and_the_inactive_ones_are_zero(kind):
    task = kind(x_dim=4, n_context=5, active_dims=3)
    prompts = task.sample(2000, seed=0, dtype=torch.float64)
    assert prompts.xs.shape == (2000, 6, 4)
    assert prompts.ys.shape == (2000, 6, 1)
    assert_follows(prompts.xs[..., :3].numpy(), scipy.stats.norm())
    assert prompts.xs[..., 3].count_nonzero() == 0
    assert task.replace(n_context=0).sample(2, seed=0).n_context == 0
    assert task.sample(0, seed=0).ys.shape == (0, 6, 1)


@pytest.mark.parametrize(
    ("task", "variance"),
    [
        (SparseLinearRegression(x_dim=5, n_context=3, sparsity=2), 2.0),  # as many weights of variance 1 as are kept
        (QuadraticRegression(x_dim=5, n_context=3), 5.0),
        (ReluNetworks(x_dim=5, n_context=3, n_hidden=10), 5.0),  # 2/r times r times half of |x|²
        (DecisionTrees(x_dim=5, n_context=3, depth=3), 1.0),
        (LogisticRegression(x_dim=5, n_context=3), 1.0),
        (MixedRegression(x_dim=5, n_context=3, noise_stds=(0.1, 2.0)), 1.0 + (0.01 + 4.0) / 2),
    ],
)
def test_targets_have_the_mean_and_the_variance_of_their_task(task, variance):
    ys = task.sample(40_000, seed=1, dtype=torch.float64).ys[:, -1, 0].numpy()
    assert abs(z_score(ys, 0.0)) < MOST_Z
    assert (ys**2).std() < 1e-12 or abs(z_score(ys**2, variance)) < MOST_Z  # labels have the square 1
    assert abs((ys**2).mean() / variance - 1) < 0.1


@pytest.mark.parametrize("kind", [SparseLinearRegression, QuadraticRegression, ReluNetworks, DecisionTrees])
def test_noise_is_added_to_the_same_function(kind):
    task = kind(x_dim=3, n_context=4)
    plain, noisy = (each.sample(3000, seed=2, dtype=torch.float64) for each in (task, task.replace(noise_std=0.3)))
    assert torch.equal(plain.xs, noisy.xs)
    assert_follows((noisy.ys - plain.ys).numpy(), scipy.stats.norm(scale=0.3))


def test_sparse_weights_are_few_normal_and_anywhere():
    task = SparseLinearRegression(x_dim=5, n_context=9, sparsity=2)
    prompts = task.sample(3000, seed=0, dtype=torch.float64)
    weights = torch.linalg.lstsq(prompts.xs, prompts.ys).solution[..., 0]
    kept = weights.abs() > 1e-9
    assert (kept.sum(-1) == 2).all()
    assert_follows(weights[kept].numpy(), scipy.stats.norm())
    pairs = np.unique(kept.numpy(), axis=0, return_counts=True)[1]
    assert len(pairs) == 10
    assert scipy.stats.chisquare(pairs).pvalue > 1e-3
    early = task.replace(active_dims=3).sample(500, seed=0, dtype=torch.float64)
    weights = torch.linalg.lstsq(early.xs[..., :3], early.ys).solution[..., 0]
    assert ((weights.abs() > 1e-9).sum(-1) == 2).all()
    assert task.replace(active_dims=1).sample(50, seed=0).ys.abs().amin(1).min() > 0  # one weight is left to draw


def test_quadratic_targets_are_linear_in_squares():
    prompts = QuadraticRegression(x_dim=3, n_context=7).sample(2000, seed=0, dtype=torch.float64)
    weights = torch.linalg.lstsq(prompts.xs.square(), prompts.ys).solution[..., 0]
    torch.testing.assert_close(torch.einsum("npx,nx->np", prompts.xs**2, weights), prompts.ys[..., 0])
    assert_follows(weights.numpy(), scipy.stats.norm(scale=3**-0.5))


def test_networks_are_homogeneous_and_piecewise_linear():
    """With no biases f(2x) = 2 f(x); with one hidden unit f is 0 on one side of a plane and linear on the other."""
    task = ReluNetworks(x_dim=3, n_context=20, n_hidden=1)
    prompts = task.sample(200, seed=0, dtype=torch.float64)
    alive = prompts.ys[..., 0] != 0
    assert 0.4 < alive.double().mean() < 0.6
    for xs, ys, on in zip(prompts.xs, prompts.ys, alive, strict=True):
        if on.sum() > 3:
            weights = torch.linalg.lstsq(xs[on], ys[on]).solution
            torch.testing.assert_close(xs[on] @ weights, ys[on])
            slopes = (xs @ weights)[..., 0] * ys[on][0].sign()
            assert (slopes[~on] <= 1e-9).all()


def test_a_tree_gives_points_of_equal_signs_equal_values_and_has_as_many_leaves_as_its_depth_allows():
    task = DecisionTrees(x_dim=3, n_context=200, depth=2)
    prompts = task.sample(300, seed=0, dtype=torch.float64)
    signs = ((prompts.xs > 0).long() * torch.tensor([1, 2, 4])).sum(-1)
    values = []
    for cells, ys in zip(signs, prompts.ys[..., 0], strict=True):
        each = [ys[cells == cell].unique() for cell in range(8) if (cells == cell).any()]
        assert all(len(value) == 1 for value in each)
        distinct = torch.cat(each).unique()
        assert 2 <= len(distinct) <= 4
        values.append(distinct[torch.randperm(len(distinct))[0]].item())
    # four leaves where the root looks at another input than both of its children: 2/3 of 2/3
    four = np.mean([len(ys.unique()) == 4 for ys in prompts.ys])
    assert abs(four - 4 / 9) < 4.5 * math.sqrt(4 / 9 * 5 / 9 / 300)
    assert_follows(prompts.ys[:, 0, 0].numpy(), scipy.stats.norm())


def test_labels_are_one_with_the_logistic_probability_or_the_sign():
    task = LogisticRegression(x_dim=2, n_context=60, weight_scale=3.0)
    prompts = task.replace(labels="sign").sample(100, seed=0, dtype=torch.float64)
    separable = 0
    for xs, ys in zip(prompts.xs, prompts.ys, strict=True):
        # some direction of a fine circle has all labels right, but for planes that cross between two points
        angles = torch.linspace(0, 2 * math.pi, 2000, dtype=torch.float64)
        scores = xs @ torch.stack([angles.cos(), angles.sin()])
        separable += int((scores.sign() == ys).all(0).any())
    assert separable > 95
    same = LogisticRegression(x_dim=1, n_context=2000, weight_scale=2.0).sample(40, seed=0, dtype=torch.float64)
    scores = []
    for xs, ys in zip(same.xs[..., 0].numpy(), same.ys[..., 0].numpy(), strict=True):
        # in one dimension E[x y] = E[x tanh(x w / 2)] tells w; its likelihood is best near there
        grid = np.linspace(-8, 8, 201)
        likelihood = -np.logaddexp(0, -np.outer(grid, xs * ys)).sum(1)
        scores.append(grid[likelihood.argmax()])
    assert_follows(scores, scipy.stats.norm(scale=2.0))


def test_settings_of_a_mixture_are_equally_likely():
    task = MixedRegression(x_dim=2, n_context=400, noise_stds=(0.1, 0.5, 1.0), weight_stds=(1.0, 1.0, 10.0))
    assert MixedRegression(x_dim=4).settings == ((0.1, 0.5), (0.5, 0.5))
    assert MixedRegression(weight_stds=(2.0,)).settings == ((0.1, 2.0), (0.5, 2.0))
    prompts = task.sample(900, seed=0, dtype=torch.float64)
    solution = torch.linalg.lstsq(prompts.xs, prompts.ys).solution
    noise = (prompts.ys - prompts.xs @ solution)[..., 0].std(1)
    setting = (noise[:, None] - torch.tensor([0.1, 0.5, 1.0])).abs().argmin(-1)
    assert scipy.stats.chisquare(np.bincount(setting.numpy(), minlength=3)).pvalue > 1e-3
    for index, scale in enumerate((1.0, 1.0, 10.0)):
        assert abs(solution[setting == index].std() / scale - 1) < 0.15


@pytest.mark.parametrize("amplitude_phase", ["independent", "one_key"])
def test_sine_targets_are_sines_with_the_authors_amplitudes_and_phases(amplitude_phase):
    prompts = SineRegression(amplitude_phase=amplitude_phase).sample(1000, seed=0, dtype=torch.float64)
    assert prompts.xs.shape == prompts.ys.shape == (1000, 11, 1)
    assert_follows(prompts.xs.numpy(), scipy.stats.uniform(-5.0, 10.0))
    # a sin(x + p) = (a cos p) sin x + (a sin p) cos x is linear in two unknowns
    features = torch.cat([prompts.xs.sin(), prompts.xs.cos()], dim=-1)
    solution = torch.linalg.lstsq(features, prompts.ys).solution
    assert (features @ solution - prompts.ys).abs().max() < 1e-12
    cosine, sine = solution[..., 0].numpy().T
    amplitudes, phases = np.hypot(sine, cosine), np.arctan2(sine, cosine)
    assert_follows(amplitudes, scipy.stats.uniform(0.1, 0.4))
    assert_follows(phases, scipy.stats.uniform(0.0, math.pi))
    if amplitude_phase == "independent":
        assert abs(scipy.stats.pearsonr(amplitudes, phases).statistic) < MOST_Z / math.sqrt(1000)
    else:
        np.testing.assert_allclose(phases, (amplitudes - 0.1) / 0.4 * math.pi, atol=1e-6)


def test_sine_ranges_can_be_changed_and_may_be_one_value():
    task = SineRegression(n_context=3, x_range=(1.0, 2.0), amplitude_range=(3.0, 3.0), phase_range=(0.5, 0.5))
    prompts = task.sample(50, seed=0, dtype=torch.float64)
    assert 1.0 <= prompts.xs.min() <= prompts.xs.max() <= 2.0
    np.testing.assert_allclose(prompts.ys.numpy(), 3.0 * np.sin(prompts.xs.numpy() + 0.5), rtol=1e-12)
    assert task.replace(n_context=0).sample(2, seed=0).n_context == 0
