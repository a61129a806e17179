"""Exact Bayes and classical learners, by going through all hypotheses in plain loops."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from mechicl import algorithms
from mechicl.prompts import Prompts, TokenSequences
from mechicl.tasks import (
    Conjunctions,
    GaussianClusters,
    Parities,
    SparseLinearRegression,
    TaskPool,
)
from tests.algorithms.reference import make_prompts, over_prefixes


# ---- mixtures ----
def average(models):
    """Average the models' posterior means by the density of the context under each: inputs, noise, weights."""

    def predict(xs, ys, query):
        logs, means = [], []
        for inputs, noise_std, weight_std in models:
            some = xs[:, inputs]
            covariance = weight_std**2 * some @ some.T + noise_std**2 * np.eye(len(xs))
            log = 0.0
            for k in range(ys.shape[1]):
                log += scipy.stats.multivariate_normal(cov=covariance).logpdf(ys[:, k])
            logs.append(log)
            means.append(weight_std**2 * query[inputs] @ some.T @ np.linalg.solve(covariance, ys))
        posterior = np.exp(np.array(logs) - max(logs))
        return (posterior / posterior.sum()) @ np.array(means)

    return predict


@pytest.mark.parametrize("y_dim", [1, 2])
def test_mixture_bayes_weights_ridge_regressions_by_their_evidence(y_dim):
    prompts = make_prompts(y_dim=y_dim)
    settings = [(list(range(4)), 0.1, 1.0), (list(range(4)), 0.7, 2.0), (list(range(4)), 3.0, 0.3)]
    fitted = algorithms.mixture_bayes(prompts, noise_stds=(0.1, 0.7, 3.0), weight_stds=(1.0, 2.0, 0.3))
    predictions = fitted.predictions[0]
    np.testing.assert_allclose(predictions.numpy(), over_prefixes(prompts, average(settings)), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("sparsity", "y_dim"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_sparse_bayes_weights_all_choices_of_inputs_by_their_evidence(sparsity, y_dim):
    prompts = make_prompts(y_dim=y_dim)
    models = [(list(inputs), 0.3, 1.5) for inputs in itertools.combinations(range(4), sparsity)]
    predictions = algorithms.sparse_bayes(prompts, sparsity=sparsity, noise_std=0.3, weight_std=1.5).predictions[0]
    np.testing.assert_allclose(predictions.numpy(), over_prefixes(prompts, average(models)), rtol=1e-6, atol=1e-9)


def from_rows(models):
    """As `average`, by least squares on [X / σ; I / τ]: residuals and singular values, and no squares of inputs."""

    def predict(xs, ys, query):
        logs, means = [], []
        for inputs, noise_std, weight_std in models:
            rows = np.vstack([xs[:, inputs] / noise_std, np.eye(len(inputs)) / weight_std])
            sides = np.vstack([ys / noise_std, np.zeros((len(inputs), ys.shape[1]))])
            weights = np.linalg.lstsq(rows, sides, rcond=None)[0]
            size = np.log(np.linalg.svd(rows * weight_std, compute_uv=False)).sum() + len(xs) * np.log(noise_std)
            logs.append(-ys.shape[1] * size - np.square(sides - rows @ weights).sum() / 2)
            means.append(query[inputs] @ weights)
        posterior = np.exp(np.array(logs) - max(logs))
        return (posterior[:, None] * np.array(means)).sum(0) / posterior.sum()

    return predict


@pytest.mark.filterwarnings("ignore::mechicl.algorithms.ConditioningWarning")
@pytest.mark.parametrize("c", [1.0, 1e2, 1e4, 1e6])
def test_sparse_bayes_loses_no_digits_of_large_inputs(c):
    prompts = SparseLinearRegression(x_dim=5, n_context=8, sparsity=3).sample(20, seed=0, dtype=torch.float64)
    scaled = Prompts(c * prompts.xs, c * prompts.ys)
    models = [(list(inputs), 1e-4, 1.0) for inputs in itertools.combinations(range(5), 3)]
    expected = over_prefixes(scaled, from_rows(models))
    for at in ("points", "query"):
        found = algorithms.sparse_bayes(scaled, sparsity=3, at=at).predictions[0].numpy()
        np.testing.assert_allclose(found / c, expected[:, -found.shape[1] :] / c, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("c", "noise_stds"), [(1.0, (1e-8, 5e-8)), (1e5, (1e-4, 1.0))])
def test_mixture_bayes_loses_no_digits_of_little_noise(c, noise_stds):
    prompts = make_prompts(x_dim=3, n_context=6)
    noise = noise_stds[0] * torch.randn(prompts.ys.shape, generator=torch.Generator().manual_seed(0)).double()
    scaled = Prompts(c * prompts.xs, c * prompts.xs @ torch.ones(3, 1).double() + noise)
    models = [([0, 1, 2], noise_std, 1.0) for noise_std in noise_stds]
    found = algorithms.mixture_bayes(scaled, noise_stds=noise_stds).predictions[0]
    np.testing.assert_allclose(found / c, over_prefixes(scaled, from_rows(models)) / c, rtol=0, atol=1e-6)


def test_bayes_warns_where_rounding_is_as_large_as_the_noise():
    prompts = make_prompts()
    with pytest.warns(algorithms.ConditioningWarning, match="residuals that rounding changes by up to"):
        found = algorithms.mixture_bayes(prompts, noise_stds=(1e-300, 1e-17)).predictions
    assert found.isfinite().all()


def test_without_noise_one_point_more_than_weights_settles_them():
    task = SparseLinearRegression(x_dim=6, n_context=8, sparsity=2)
    prompts = task.sample(200, seed=0, dtype=torch.float64)
    errors = (algorithms.sparse_bayes(prompts, sparsity=2).predictions[0] - prompts.ys).abs()[..., 0]
    assert errors[:, 3:].median(0).values.max() < 1e-6
    assert errors[:, 4:].max() < 1e-3  # some inputs are tiny
    assert errors[:, 2].median() > 0.01


def posterior_mean(pool: np.ndarray, noise_std: float):
    """Go through the tasks: the likelihood of each is the product over points of Gaussian densities."""

    def predict(xs: np.ndarray, ys: np.ndarray, query: np.ndarray) -> np.ndarray:
        densities = []
        for weights in pool:
            density = 1.0
            for x, y in zip(xs, ys, strict=True):
                for k in range(len(y)):
                    density *= math.exp(-((y[k] - x @ weights[:, k]) ** 2) / (2 * noise_std**2))
            densities.append(density)
        return np.sum([d * (query @ w) for d, w in zip(densities, pool, strict=True)], axis=0) / sum(densities)

    return predict


@pytest.mark.parametrize("y_dim", [1, 2])
@pytest.mark.parametrize("noise_std", [0.5, 2.0])
def test_dmmse_is_the_posterior_mean_on_every_prefix(y_dim, noise_std):
    prompts = make_prompts(y_dim=y_dim)
    pool = np.random.default_rng(0).normal(size=(6, 4, y_dim))
    expected = over_prefixes(prompts, posterior_mean(pool, noise_std), empty=True)
    weights = torch.from_numpy(pool)
    for shaped in (weights, weights[..., 0]) if y_dim == 1 else (weights,):
        trajectory = algorithms.dmmse(prompts, pool=shaped, noise_std=noise_std)
        np.testing.assert_allclose(trajectory.predictions[0].numpy(), expected, rtol=1e-9, atol=1e-12)


def test_unlikely_contexts_do_not_underflow():
    task = TaskPool(x_dim=3, n_context=12, n_tasks=4, noise_std=1e-3)
    prompts = task.replace(seed=1).sample(20, seed=0, dtype=torch.float64)  # of other tasks: likelihoods like e^(-1e6)
    costs = (prompts.ys[:, :-1] - prompts.xs[:, :-1] @ task.weights.T).square().sum(1)
    nearest = task.weights[costs.argmin(-1)].double()
    predicted = algorithms.dmmse(prompts, pool=task.weights, noise_std=1e-3).query()[0, :, 0]
    torch.testing.assert_close(predicted, (prompts.query.xs * nearest).sum(-1))


def test_without_noise_it_is_the_limit_of_little_noise_and_keeps_all_tasks_that_fit():
    task = TaskPool(x_dim=3, n_context=6, n_tasks=50, noise_std=0.0)
    prompts = task.sample(30, seed=0, dtype=torch.float64)
    exact = algorithms.dmmse(prompts, pool=task.weights, noise_std=0.0).predictions
    nearly = algorithms.dmmse(prompts, pool=task.weights, noise_std=1e-4).predictions
    torch.testing.assert_close(nearly[:, :, 2:], exact[:, :, 2:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(exact[0, :, 2:], prompts.ys[:, 2:], rtol=1e-9, atol=1e-9)
    pool = torch.tensor([[1.0, 0.0], [1.0, 2.0], [0.0, 0.0]])  # the first input fits the first two tasks
    xs = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    fitted = algorithms.dmmse(Prompts(xs, xs @ pool[0][:, None]), pool=pool, noise_std=0.0, with_weights=True)
    assert fitted.weights is not None
    torch.testing.assert_close(fitted.weights[0, 0, :, :, 0], torch.stack([pool.mean(0), pool[:2].mean(0)]))


# ---- boolean ----
def rows(prompts):
    return zip(prompts.xs.tolist(), prompts.ys[..., 0].tolist(), strict=True)


def conjunction(literals, x):
    return 1 if all(v in (0, a) for v, a in zip(literals, x, strict=True)) else -1


def plain_conjunction_bayes(xs, ys, t, p, share):
    d = len(xs[0])
    total = mean = 0.0
    for f in itertools.product((-1, 0, 1), repeat=d):
        m = sum(map(abs, f))
        weight = (p / 2) ** m * (1 - p) ** (d - m)
        for i in range(t + 1):
            value = conjunction(f, xs[i])
            weight *= (1 - share) * 0.5**d + (share * 0.5 ** (d - m) if value == 1 else 0)
            if i < t and value != ys[i]:
                weight = 0.0
        total += weight
        mean += weight * conjunction(f, xs[t])
    return mean / total


@settings(max_examples=30)
@given(st.integers(1, 3), st.integers(0, 5), st.floats(0.1, 0.9), st.floats(0, 0.9), st.integers(0, 10**6))
def test_conjunction_bayes_by_a_plain_loop(d, n, p, share, seed):
    prompts = Conjunctions(d, n, p, share).sample(2, seed=seed, dtype=torch.float64)
    got = algorithms.conjunction_bayes(prompts, literal_probability=p, positive_share=share).predictions[0, ..., 0]
    for (xs, ys), predicted in zip(rows(prompts), got.tolist(), strict=True):
        for t in range(n + 1):
            assert math.isclose(predicted[t], plain_conjunction_bayes(xs, ys, t, p, share), abs_tol=1e-9)


@pytest.mark.parametrize(("p", "share"), [(0.0, 0.3), (1.0, 0.3), (0.3, 1.0), (0.0, 0.0)])
def test_conjunction_bayes_at_the_ends_of_its_settings(p, share):
    prompts = Conjunctions(3, 6, p, share).sample(20, seed=0)
    got = algorithms.conjunction_bayes(prompts, literal_probability=p, positive_share=share).predictions[0]
    assert got.isfinite().all()
    if p == 0.0 or share == 1.0:
        assert torch.allclose(got, torch.ones_like(got))


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(0, 6), st.integers(0, 10**6), st.data())
def test_parity_bayes_by_a_plain_loop(d, n, seed, data):
    degree = data.draw(st.none() | st.integers(0, d))
    prompts = Parities(d, n, degree).sample(2, seed=seed)
    got = algorithms.parity_bayes(prompts, degree=degree).predictions[0, ..., 0]
    sizes = range(d + 1) if degree is None else [degree]
    subsets = [s for size in sizes for s in itertools.combinations(range(d), size)]
    for (xs, ys), predicted in zip(rows(prompts), got.tolist(), strict=True):
        for t in range(n + 1):
            left = [s for s in subsets if all(math.prod(xs[i][j] for j in s) == ys[i] for i in range(t))]
            mean = sum(math.prod(xs[t][j] for j in s) for s in left) / len(left)
            assert math.isclose(predicted[t], mean, abs_tol=1e-6)


@given(st.integers(1, 7), st.integers(0, 12), st.integers(0, 10**6))
def test_elimination_over_two_elements_is_bayes_over_all_parities(d, n, seed):
    prompts = Parities(d, n, None).sample(4, seed=seed, dtype=torch.float64)
    exact = algorithms.parity_bayes(prompts, degree=None).predictions
    assert torch.allclose(algorithms.gf2_elimination(prompts).predictions, exact)


@given(st.integers(1, 5), st.integers(0, 8), st.integers(0, 10**6))
def test_elimination_by_a_plain_loop(d, n, seed):
    prompts = Conjunctions(d, n).sample(3, seed=seed)
    got = algorithms.elimination(prompts).predictions[0, ..., 0]
    for (xs, ys), predicted in zip(rows(prompts), got.tolist(), strict=True):
        kept = {(i, v) for i in range(d) for v in (-1, 1)}
        for t in range(n + 1):
            assert predicted[t] == (1 if all(xs[t][i] == v for i, v in kept) else -1)
            if ys[t] == 1:
                kept = {(i, v) for i, v in kept if xs[t][i] == v}


def test_contexts_that_nothing_explains_predict_0():
    xs = torch.ones(1, 3, 2)
    ys = torch.tensor([[[1.0], [-1.0], [1.0]]])
    prompts = Prompts(xs, ys)
    for learner in (algorithms.conjunction_bayes, algorithms.parity_bayes):
        assert learner(prompts).predictions[0, 0, -1, 0] == 0


# ---- clusters ----
def assignments(n, burstiness):
    """All ways to give n places to n / burstiness numbered classes."""
    groups = n // burstiness
    return set(itertools.permutations([g for g in range(groups) for _ in range(burstiness)]))


def plain_bayes(xs, ys, t, epsilon, burstiness, n_labels):
    """Labels' probabilities of point t by summing joint densities over all classes of all places."""
    n, d = len(xs) - 1, len(xs[0])
    groups = n // burstiness
    total = np.zeros(n_labels)
    for places in assignments(n, burstiness):
        for query in range(groups):
            classes = [*places, query][: t + 1]
            density = 1.0
            for group in set(classes):
                members = [i for i, each in enumerate(classes) if each == group]
                m = len(members)
                covariance = (np.ones((m, m)) + epsilon**2 * np.eye(m)) / d / (1 + epsilon**2)
                for j in range(d):
                    density *= multivariate_normal.pdf([xs[i][j] for i in members], np.zeros(m), covariance)
            for label in range(n_labels):
                told = [*ys[:t], label]
                shown = [{told[i] for i, each in enumerate(classes) if each == group} for group in set(classes)]
                if all(len(each) == 1 for each in shown):
                    total[label] += density / n_labels ** len(shown)
    return total / total.sum()


@pytest.mark.parametrize(("n", "burstiness"), [(4, 1), (4, 2), (4, 4), (6, 3), (1, 1)])
def test_the_in_context_classifier_by_summing_over_all_classes(n, burstiness):
    task = GaussianClusters(2, n, 20, 2, burstiness, within_class_noise=0.7, classes="new")
    prompts = task.sample(3, seed=0, dtype=torch.float64)
    got = algorithms.in_context_classifier(prompts, within_class_noise=0.7, burstiness=burstiness).predictions[0]
    for i in range(3 if n < 6 else 1):
        xs, ys = prompts.xs[i].tolist(), prompts.ys[i].argmax(-1).tolist()
        for t in range(n + 1) if n < 6 else (n,):
            assert np.allclose(got[i, t], plain_bayes(xs, ys, t, 0.7, burstiness, 2), atol=1e-9)


def test_the_in_weights_classifier_by_densities():
    task = GaussianClusters(x_dim=3, n_classes=7, n_labels=3, within_class_noise=0.9, zipf_exponent=1.0, burstiness=4)
    prompts = task.sample(5, seed=0, dtype=torch.float64)
    labels = torch.nn.functional.one_hot(task.labels, 3).double()
    got = algorithms.in_weights_classifier(
        prompts, means=task.means, labels=labels, frequencies=task.frequencies, within_class_noise=0.9
    ).predictions[0]
    scale = 1 + 0.9**2
    for i, t in itertools.product(range(5), range(9)):
        chances = np.zeros(3)
        for k in range(7):
            centre = task.means[k].numpy() / math.sqrt(scale)
            density = multivariate_normal.pdf(prompts.xs[i, t].numpy(), centre, np.eye(3) * 0.81 / scale / 3)
            chances[task.labels[k]] += task.frequencies[k].item() * density
        assert np.allclose(got[i, t], chances / chances.sum(), atol=1e-9)


def test_labels_that_no_split_explains_do_not_stop_it():
    task = GaussianClusters(x_dim=3, n_context=2, burstiness=2, n_classes=4, n_labels=2, classes="new")
    prompts = task.sample(4, seed=0)
    prompts.ys[:, 0], prompts.ys[:, 1] = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    got = algorithms.in_context_classifier(prompts, within_class_noise=0.1, burstiness=2).predictions
    assert got.isfinite().all()


# ---- markov ----
def sequences_of(rows):
    ids = torch.tensor(rows)
    return TokenSequences(ids, (torch.arange(ids.shape[1]) > 0).expand_as(ids).clone())


@given(st.integers(2, 5), st.integers(2, 9), st.floats(0.05, 5), st.integers(0, 10**6))
def test_counts_by_a_plain_loop(k, length, a, seed):
    rows = torch.randint(k, (3, length), generator=torch.Generator().manual_seed(seed)).tolist()
    seen = sequences_of(rows)
    bigram = algorithms.bigram_bayes(seen, d_vocab=k, concentration=a)
    unigram = algorithms.unigram_bayes(seen, d_vocab=k, concentration=a)
    for i, row in enumerate(rows):
        for t in range(length - 1):
            past = row[: t + 1]
            for b in range(k):
                n_b = sum(token == b for token in past)
                follows = [past[s + 1] for s in range(t) if past[s] == past[t]]
                n_ab = sum(token == b for token in follows)
                assert math.isclose(unigram[i, t, b].exp(), (n_b + a) / (t + 1 + k * a), rel_tol=1e-12)
                assert math.isclose(bigram[i, t, b].exp(), (n_ab + a) / (len(follows) + k * a), rel_tol=1e-12)


def loop_over_pool(row, t, pool, order, first=None):
    """Bayes over sources by a plain loop: the probabilities of the token after places 0 to t of a row."""
    k = len(pool[0][0])
    if t + 1 < order:
        return [1 / k] * k
    total, mixed = 0.0, [0.0] * k
    for source, table in enumerate(pool):

        def row_of(s, table=table):
            return table[sum(token * k ** (order - 1 - i) for i, token in enumerate(row[s - order : s]))]

        weight = math.prod(row_of(s)[row[s]] for s in range(order, t + 1)) * (first[source][row[0]] if first else 1)
        total += weight
        for b in range(k):
            mixed[b] += weight * row_of(t + 1)[b]
    return [each / total for each in mixed]


@pytest.mark.parametrize(("order", "starts"), [(0, False), (1, False), (1, True), (2, False), (3, False)])
def test_bayes_over_a_pool_by_a_plain_loop(order, starts):
    k, generator = 3 if order < 3 else 2, torch.Generator().manual_seed(order)
    pool = torch.rand(5, k**order, k, generator=generator).double()
    pool /= pool.sum(-1, keepdim=True)
    first = torch.full((5, k), 1 / k).double().lerp(pool[:, 0], 0.5) if starts else None
    rows = torch.randint(k, (4, 9), generator=generator).tolist()
    given_pool = pool[:, 0] if order == 0 else pool
    got = algorithms.pool_bayes(sequences_of(rows), pool=given_pool, first=first).exp()
    for i, row in enumerate(rows):
        for t in range(8):
            expected = loop_over_pool(row, t, pool.tolist(), order, None if first is None else first.tolist())
            assert torch.allclose(got[i, t], torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=0)


def test_a_source_that_never_gives_a_token_is_excluded_by_it():
    pool = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.0, 0.8]], dtype=torch.float64)
    got = algorithms.pool_bayes(sequences_of([[0, 1, 0, 0]]), pool=pool)[0].exp()
    assert torch.allclose(got[1], pool[0])
    impossible = algorithms.pool_bayes(sequences_of([[1, 2, 0]]), pool=pool)[0, 1].exp()
    weights = torch.tensor([0.5, 0.8], dtype=torch.float64) / 1.3  # both urns exclude one token: the other one decides
    assert torch.allclose(impossible, weights @ pool, atol=1e-6)


@pytest.mark.parametrize(("pool", "more", "named"), [
    (torch.full((2, 3), 0.5), {}, "sum to 1"),
    (torch.tensor([[1.5, -0.5]]), {}, "sum to 1"),
    (torch.full((2, 3, 2), 0.5), {}, "a power of 2"),
    (torch.full((2, 2), 0.5), {"first": torch.full((2, 2), 0.5)}, "of order 1"),
    (torch.full((2, 2, 2), 0.5), {"first": torch.full((2, 2), 0.4)}, "pool and first must be prob"),
    (torch.full((2, 2), 0.5), {}, "below d_vocab=2"),
])  # fmt: skip
def test_bad_pools_are_refused(pool, more, named):
    with pytest.raises(ValueError, match=named):
        algorithms.pool_bayes(sequences_of([[0, 1, 2]]), pool=pool, **more)


@given(st.integers(2, 3), st.integers(2, 14), st.integers(1, 4), st.floats(0.05, 5), st.integers(0, 10**6))
def test_longer_counts_by_a_plain_loop(k, length, order, a, seed):
    rows = torch.randint(k, (2, length), generator=torch.Generator().manual_seed(seed)).tolist()
    ngram = algorithms.ngram_bayes(sequences_of(rows), d_vocab=k, order=order, concentration=a).exp()
    for i, row in enumerate(rows):
        for t in range(length - 1):
            past = row[: t + 1]
            last = past[-order:] if len(past) >= order else None
            follows = [past[s] for s in range(order, t + 1) if past[s - order : s] == last]
            for b in range(k):
                assert math.isclose(ngram[i, t, b], (follows.count(b) + a) / (len(follows) + k * a), rel_tol=1e-12)
