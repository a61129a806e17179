"""Functions of points against closed forms, and the distributions that they claim."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from mechicl import tasks
from tests.tasks.reference import MOST_Z, assert_follows, z_score

# ---- function classes ----
NOISY = (
    tasks.SparseLinearRegression, tasks.QuadraticRegression, tasks.ReluNetworks, tasks.DecisionTrees,
    tasks.DriftingRegression,
)  # fmt: skip
KINDS = (*NOISY, tasks.LogisticRegression, tasks.MixedRegression, partial(tasks.LinearRegression, inputs="gaussian"))


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


@pytest.mark.parametrize("kind", NOISY)
def test_noise_is_added_to_the_same_function(kind):
    task = kind(x_dim=3, n_context=4)
    plain, noisy = (each.sample(3000, seed=2, dtype=torch.float64) for each in (task, task.replace(noise_std=0.3)))
    assert torch.equal(plain.xs, noisy.xs)
    assert_follows((noisy.ys - plain.ys).numpy(), scipy.stats.norm(scale=0.3))


def test_sparse_weights_are_few_normal_and_anywhere():
    task = tasks.SparseLinearRegression(x_dim=5, n_context=9, sparsity=2)
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


def test_weights_drift_as_fast_as_their_share_that_is_new():
    """In one dimension y / x is the weight, whose correlation over k points is `(1 - ρ)^(k / 2)`."""
    task = tasks.DriftingRegression(x_dim=1, n_context=6, renewed=0.2)
    prompts = task.sample(20_000, seed=0, dtype=torch.float64)
    weights = (prompts.ys / prompts.xs)[..., 0]
    assert_follows(weights[:, 3].numpy(), scipy.stats.norm())
    for k in (1, 2, 5):
        assert abs(z_score((weights[:, 6] * weights[:, 6 - k]).numpy(), 0.8 ** (k / 2))) < MOST_Z
    still = task.replace(renewed=0.0).sample(50, seed=0, dtype=torch.float64)
    torch.testing.assert_close(still.ys / still.xs, (still.ys / still.xs)[:, :1].expand(-1, 7, -1))


def test_recalled_inputs_come_with_their_target_and_the_query_is_in_the_context():
    prompts = tasks.AssociativeRecall(x_dim=3, n_context=9, n_keys=4).sample(300, seed=0)
    repeats = []
    for xs, ys in zip(prompts.xs, prompts.ys, strict=True):
        same = (xs[:, None] == xs).all(-1)
        assert torch.equal(same, (ys[:, None] == ys).all(-1))
        assert same[-1, :-1].any()
        assert len(xs.unique(dim=0)) <= 4
        repeats.append(same[0, 1].item())
    assert abs(z_score(repeats, 0.25)) < MOST_Z


def test_quadratic_targets_are_linear_in_squares():
    prompts = tasks.QuadraticRegression(x_dim=3, n_context=7).sample(2000, seed=0, dtype=torch.float64)
    weights = torch.linalg.lstsq(prompts.xs.square(), prompts.ys).solution[..., 0]
    torch.testing.assert_close(torch.einsum("npx,nx->np", prompts.xs**2, weights), prompts.ys[..., 0])
    assert_follows(weights.numpy(), scipy.stats.norm(scale=3**-0.5))


def test_networks_are_homogeneous_and_piecewise_linear():
    """With no biases f(2x) = 2 f(x); with one hidden unit f is 0 on one side of a plane and linear on the other."""
    task = tasks.ReluNetworks(x_dim=3, n_context=20, n_hidden=1)
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
    task = tasks.DecisionTrees(x_dim=3, n_context=200, depth=2)
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
    task = tasks.LogisticRegression(x_dim=2, n_context=60, weight_scale=3.0)
    prompts = task.replace(labels="sign").sample(100, seed=0, dtype=torch.float64)
    separable = 0
    for xs, ys in zip(prompts.xs, prompts.ys, strict=True):
        # some direction of a fine circle has all labels right, but for planes that cross between two points
        angles = torch.linspace(0, 2 * math.pi, 2000, dtype=torch.float64)
        scores = xs @ torch.stack([angles.cos(), angles.sin()])
        separable += int((scores.sign() == ys).all(0).any())
    assert separable > 95
    same = tasks.LogisticRegression(x_dim=1, n_context=2000, weight_scale=2.0).sample(40, seed=0, dtype=torch.float64)
    scores = []
    for xs, ys in zip(same.xs[..., 0].numpy(), same.ys[..., 0].numpy(), strict=True):
        # in one dimension E[x y] = E[x tanh(x w / 2)] tells w; its likelihood is best near there
        grid = np.linspace(-8, 8, 201)
        likelihood = -np.logaddexp(0, -np.outer(grid, xs * ys)).sum(1)
        scores.append(grid[likelihood.argmax()])
    assert_follows(scores, scipy.stats.norm(scale=2.0))


def test_settings_of_a_mixture_are_equally_likely():
    task = tasks.MixedRegression(x_dim=2, n_context=400, noise_stds=(0.1, 0.5, 1.0), weight_stds=(1.0, 1.0, 10.0))
    assert tasks.MixedRegression(x_dim=4).settings == ((0.1, 0.5), (0.5, 0.5))
    assert tasks.MixedRegression(weight_stds=(2.0,)).settings == ((0.1, 2.0), (0.5, 2.0))
    prompts = task.sample(900, seed=0, dtype=torch.float64)
    solution = torch.linalg.lstsq(prompts.xs, prompts.ys).solution
    noise = (prompts.ys - prompts.xs @ solution)[..., 0].std(1)
    setting = (noise[:, None] - torch.tensor([0.1, 0.5, 1.0])).abs().argmin(-1)
    assert scipy.stats.chisquare(np.bincount(setting.numpy(), minlength=3)).pvalue > 1e-3
    for index, scale in enumerate((1.0, 1.0, 10.0)):
        assert abs(solution[setting == index].std() / scale - 1) < 0.15


@pytest.mark.parametrize("amplitude_phase", ["independent", "one_key"])
def test_sine_targets_are_sines_with_the_authors_amplitudes_and_phases(amplitude_phase):
    prompts = tasks.SineRegression(amplitude_phase=amplitude_phase).sample(1000, seed=0, dtype=torch.float64)
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
    task = tasks.SineRegression(n_context=3, x_range=(1.0, 2.0), amplitude_range=(3.0, 3.0), phase_range=(0.5, 0.5))
    prompts = task.sample(50, seed=0, dtype=torch.float64)
    assert 1.0 <= prompts.xs.min() <= prompts.xs.max() <= 2.0
    np.testing.assert_allclose(prompts.ys.numpy(), 3.0 * np.sin(prompts.xs.numpy() + 0.5), rtol=1e-12)
    assert task.replace(n_context=0).sample(2, seed=0).n_context == 0


# ---- boolean functions ----
def explains(literals, xs, ys):
    return all(
        (y == 1) == all(v in (0, x) for v, x in zip(literals, row, strict=True)) for row, y in zip(xs, ys, strict=True)
    )


@given(st.integers(1, 4), st.integers(0, 6), st.floats(0, 1), st.floats(0, 1), st.integers(0, 10**6))
def test_targets_are_those_of_some_conjunction(d, n, p, share, seed):
    task = tasks.Conjunctions(d, n, p, share)
    prompts = task.sample(3, seed=seed)
    assert (prompts.xs.abs() == 1).all()
    for xs, ys in zip(prompts.xs.tolist(), prompts.ys[..., 0].tolist(), strict=True):
        assert any(explains(f, xs, ys) for f in itertools.product((-1, 0, 1), repeat=d))


@given(st.integers(1, 5), st.integers(0, 5), st.integers(0, 10**6), st.data())
def test_targets_are_those_of_some_parity_of_the_degree(d, n, seed, data):
    degree = data.draw(st.none() | st.integers(0, d))
    prompts = tasks.Parities(d, n, degree).sample(3, seed=seed)
    sizes = range(d + 1) if degree is None else [degree]
    for xs, ys in zip(prompts.xs.tolist(), prompts.ys[..., 0].tolist(), strict=True):
        assert any(
            all(math.prod(x[i] for i in subset) == y for x, y in zip(xs, ys, strict=True))
            for size in sizes
            for subset in itertools.combinations(range(d), size)
        )


def test_subsets_are_equally_likely():
    """A parity's correlation with its own product is 1, with others 0: means over prompts are the subsets' chances."""
    prompts = tasks.Parities(x_dim=4, n_context=200, degree=2).sample(3000, seed=0)
    for i, j in itertools.combinations(range(4), 2):
        agrees = (prompts.xs[..., i] * prompts.xs[..., j] == prompts.ys[..., 0]).all(1)
        assert abs(agrees.double().mean() - 1 / 6) < 0.03


# ---- gaussian clusters ----
TASK = tasks.GaussianClusters(x_dim=32, n_context=8, n_classes=20, n_labels=4, burstiness=2, within_class_noise=0.01)


def classes_of(task, prompts):
    """The nearest known class of each point."""
    return torch.cdist(prompts.xs.flatten(0, 1).double(), task.means).argmin(-1).view(len(prompts), -1)


def test_known_classes_are_bursty_and_have_their_labels():
    prompts = TASK.sample(200, seed=0)
    classes = classes_of(TASK, prompts)
    assert torch.equal(prompts.ys.argmax(-1), TASK.labels[classes])
    for row in classes.tolist():
        assert sorted(row[:-1].count(each) for each in set(row[:-1])) == [2, 2, 2, 2]
        assert row[-1] in row[:-1]
    assert any(row[0] != row[1] for row in classes.tolist())  # in random order


def test_the_query_is_absent_or_labels_are_swapped():
    absent = TASK.replace(classes="absent")
    prompts = absent.sample(200, seed=0)
    classes = classes_of(TASK, prompts)
    assert all(row[-1] not in row[:-1] for row in classes.tolist())
    assert torch.equal(prompts.ys.argmax(-1), TASK.labels[classes])
    swapped = TASK.replace(classes="swapped").sample(200, seed=0)
    classes, labels = classes_of(TASK, swapped), swapped.ys.argmax(-1)
    assert (labels != TASK.labels[classes]).all()
    for row, labelled in zip(classes.tolist(), labels.tolist(), strict=True):
        assert labelled[-1] == labelled[row.index(row[-1])]


def test_new_classes_are_not_those_of_training_and_their_labels_are_random():
    prompts = TASK.replace(classes="new").sample(2000, seed=0)
    assert torch.cdist(prompts.xs[:, -1].double(), TASK.means).amin() > 0.3
    query = (prompts.xs[:, :-1] - prompts.xs[:, -1:]).square().sum(-1)
    nearest = query.argmin(-1)
    assert torch.equal(prompts.ys[torch.arange(2000), nearest], prompts.ys[:, -1])
    assert ((query < 0.1).sum(-1) == 2).all()
    assert torch.allclose(prompts.ys[:, -1].mean(0), torch.full((4,), 0.25), atol=0.04)


def test_moments_of_inputs():
    task = tasks.GaussianClusters(x_dim=5, n_classes=9, n_labels=2, within_class_noise=0.8, classes="new")
    xs = task.sample(20_000, seed=0).xs
    assert torch.allclose(xs.var((0, 1)), torch.full((5,), 1 / 5), rtol=0.03)
    one = tasks.GaussianClusters(x_dim=5, n_context=2, burstiness=2, n_classes=2, n_labels=2, within_class_noise=0.8)
    xs = one.replace(classes="new").sample(20_000, seed=0).xs  # all three points of one class
    covariance = (xs[:, 0] * xs[:, 2]).mean(0)
    assert torch.allclose(covariance, torch.full((5,), 1 / (1 + 0.8**2) / 5), atol=0.006)


def test_zipf_and_burstiness():
    task = TASK.replace(zipf_exponent=1.0, bursty_share=0.0)
    counts = torch.bincount(classes_of(TASK, task.sample(4000, seed=0)).flatten(), minlength=20)
    assert torch.allclose(counts / counts.sum(), task.frequencies.float(), atol=0.01)
    assert task.frequencies[0] / task.frequencies[9] == pytest.approx(10)
    assert not torch.equal(TASK.means, TASK.replace(class_seed=1).means)
    half = classes_of(TASK, TASK.replace(bursty_share=0.5).sample(2000, seed=0)).tolist()
    bursty = sum(sorted(row[:-1].count(each) for each in set(row[:-1])) == [2, 2, 2, 2] for row in half)
    assert 0.45 < bursty / 2000 < 0.56
    first = classes_of(TASK, TASK.replace(zipf_exponent=1.0, burstiness=8).sample(4000, seed=0))[:, 0]
    assert (first == 0).double().mean() == pytest.approx(task.frequencies[0].item(), abs=0.03)


# ---- pools ----
def rows(prompts):
    return [tuple(xs.flatten().tolist() + ys.flatten().tolist()) for xs, ys in zip(prompts.xs, prompts.ys, strict=True)]


@pytest.mark.parametrize("task", [tasks.LinearRegression(x_dim=2, y_dim=2), tasks.SineRegression(n_context=3)])
def test_fixed_tasks_are_a_sample_of_their_task_and_never_change(task):
    fixed = tasks.FixedTasks(task, n_tasks=8, seed=3)
    assert (fixed.x_dim, fixed.y_dim, fixed.n_context) == (task.x_dim, task.y_dim, task.n_context)
    pool = set(rows(task.sample(8, seed=3, dtype=torch.float64)))
    assert set(rows(fixed.prompts)) == pool
    for seed in range(5):
        assert set(rows(fixed.sample(6, seed=seed, dtype=torch.float64))) <= pool
    assert set(rows(tasks.FixedTasks(task, n_tasks=8, seed=4).prompts)).isdisjoint(pool)


def test_a_minibatch_of_fixed_tasks_repeats_none_while_it_can():
    fixed = tasks.FixedTasks(tasks.LinearRegression(x_dim=2, n_context=3), n_tasks=8)
    assert fixed.prompts is fixed.prompts
    everything = rows(fixed.prompts)
    assert len(set(rows(fixed.sample(5, seed=0, dtype=torch.float64)))) == 5
    whole = rows(fixed.sample(8, seed=0, dtype=torch.float64))
    assert sorted(whole) == sorted(everything)
    assert whole != everything
    assert len(fixed.sample(20, seed=0)) == 20


def test_targets_are_those_of_a_normal_pool_with_noise():
    task = tasks.TaskPool(x_dim=3, n_context=7, n_tasks=5, noise_std=0.2, seed=4)
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
    assert_follows(tasks.TaskPool(x_dim=4, n_tasks=5000).weights.numpy(), scipy.stats.norm())
    assert torch.equal(task.weights, task.replace(n_context=3, noise_std=1.0).weights)
    assert not torch.equal(task.weights, task.replace(seed=1).weights)
    plain = tasks.LinearRegression(x_dim=3, n_context=7, inputs="gaussian", noise_std=0.2)
    assert task.new_tasks == plain
    assert task.replace(active_dims=2).new_tasks == plain.replace(active_dims=2)
