import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from mechicl import algorithms
from mechicl.tasks import GaussianClusters


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
    query = algorithms.in_context_classifier(prompts, within_class_noise=0.7, burstiness=burstiness, at="query")
    torch.testing.assert_close(query.predictions[0, :, 0], got[:, -1], rtol=1e-12, atol=1e-12)


def test_without_bursts_it_is_softmax_attention():
    task = GaussianClusters(burstiness=1, within_class_noise=0.5, classes="new", n_context=6)
    prompts = task.sample(50, seed=0, dtype=torch.float64)
    alike = 1 / (1 + 0.5**2)
    distances = (prompts.xs[:, :-1] * alike - prompts.xs[:, -1:]).square().sum(-1)
    attention = (-distances * 16 / (2 * (1 - alike**2))).softmax(-1)
    expected = (attention[..., None] * prompts.ys[:, :-1]).sum(1)
    got = algorithms.in_context_classifier(prompts, within_class_noise=0.5).query()[0]
    assert torch.allclose(got, expected)


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


def test_each_is_right_where_its_knowledge_holds():
    task = GaussianClusters(n_classes=64)
    labels = torch.nn.functional.one_hot(task.labels, 4).double()
    weights = {"means": task.means, "labels": labels, "frequencies": task.frequencies, "within_class_noise": 0.1}

    def correct(shown):
        prompts = task.replace(classes=shown).sample(300, seed=0)
        predicted = [
            algorithms.in_context_classifier(prompts, within_class_noise=0.1, burstiness=2, at="query"),
            algorithms.in_weights_classifier(prompts, **weights, at="query"),
            algorithms.nearest_neighbours(prompts, n_neighbours=1, at="query"),
        ]
        target = prompts.query.ys.argmax(-1)
        return [(each.query()[0].argmax(-1) == target).double().mean().item() for each in predicted]

    assert correct("known") == [1, 1, 1]
    in_context, in_weights, neighbour = correct("new")
    assert (in_context, neighbour) == (1, 1)
    assert in_weights < 0.4
    in_context, in_weights, neighbour = correct("absent")
    assert in_weights == 1
    assert max(in_context, neighbour) < 0.4
    assert correct("swapped") == [1, 0, 1]


def test_labels_that_no_split_explains_do_not_stop_it():
    task = GaussianClusters(x_dim=3, n_context=2, burstiness=2, n_classes=4, n_labels=2, classes="new")
    prompts = task.sample(4, seed=0)
    prompts.ys[:, 0], prompts.ys[:, 1] = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    got = algorithms.in_context_classifier(prompts, within_class_noise=0.1, burstiness=2).predictions
    assert got.isfinite().all()
