from dataclasses import dataclass

import numpy as np
import pytest
import torch

from mechicl import algorithms, tasks
from mechicl.learners import AlgorithmLearner, Learner, TokenLearner, squared_errors, token_losses
from mechicl.prompts import Prompts
from mechicl.tasks import FixedTasks, LinearRegression, MarkovChains, Parities, PromptDistribution

TASK = LinearRegression(x_dim=3, n_context=6, inputs="gaussian", noise_std=0.5, weight_scale=2.0)


@pytest.mark.parametrize("changes", [{}, {"condition_number": 50.0, "weight_covariance": "inverse"}])
def test_linear_regression_has_ridge_with_the_precision_of_its_weights(changes):
    task = TASK.replace(**changes)
    learners = algorithms.references(task)
    assert list(learners) == ["bayes", "ols"]
    precision = task.input_covariance().numpy() if changes else np.eye(3)
    prompts = task.sample(50, seed=0, dtype=torch.float64)
    expected = [
        x[-1] @ np.linalg.solve(x[:-1].T @ x[:-1] + 0.25 / 4 * precision, x[:-1].T @ y[:-1])
        for x, y in zip(prompts.xs.numpy(), prompts.ys.numpy(), strict=True)
    ]
    np.testing.assert_allclose(learners["bayes"].predict(prompts).numpy(), expected, rtol=1e-8)


@pytest.mark.parametrize(("changes", "names"), [
    ({}, ["bayes", "ols"]),
    ({"weight_scale": 0.0}, ["bayes", "ols"]),
    ({"n_distractors": 2}, ["ridge", "ols"]),
    ({"n_distractors": 2, "noise_std": 0.0}, ["ols"]),
])  # fmt: skip
def test_only_what_is_exact_is_called_bayes(changes, names):
    task = TASK.replace(**changes)
    learners = algorithms.references(task)
    assert list(learners) == names
    for each in learners.values():
        assert each.predict_prefixes(task.sample(4, seed=0)).shape == (4, 7, 1)


def test_fixed_tasks_have_the_references_of_their_task():
    for task in (TASK, Parities()):
        assert list(algorithms.references(FixedTasks(task, n_tasks=4))) == list(algorithms.references(task))


@dataclass(frozen=True)
class Constant(PromptDistribution):
    x_dim: int = 2
    n_context: int = 3
    y_dim: int = 1

    def _sample(self, n_prompts, random):
        return Prompts(random.normal(n_prompts, 4, 2), torch.ones(n_prompts, 4, 1))


class WithReferences(Constant):
    def references(self):
        return {"one": AlgorithmLearner(lambda prompts: torch.ones_like(prompts.ys))}


def test_a_task_of_ones_own_brings_its_references():
    assert squared_errors(algorithms.references(WithReferences())["one"], WithReferences().sample(3, seed=0)).max() == 0


POINTS = {
    "linear": (tasks.LinearRegression(x_dim=3, n_context=6, noise_std=0.5), "bayes"),
    "pool": (tasks.TaskPool(n_tasks=16), "dmmse"),
    "mixed noise": (tasks.MixedRegression(x_dim=4, n_context=8, noise_stds=(0.1, 2.0)), "bayes"),
    "sparse": (tasks.SparseLinearRegression(x_dim=8, n_context=12, sparsity=2, noise_std=0.3), "bayes"),
    "quadratic": (tasks.QuadraticRegression(x_dim=4, n_context=8, noise_std=1.0), "bayes"),
    "drifting": (tasks.DriftingRegression(x_dim=3, n_context=12, noise_std=0.3), "bayes"),
    "recall": (tasks.AssociativeRecall(x_dim=3, n_context=12), "nearest neighbour"),
    "networks": (tasks.ReluNetworks(x_dim=4, n_context=40, n_hidden=20), "network descent"),
    "trees": (tasks.DecisionTrees(x_dim=4, n_context=60, depth=3), "greedy tree"),
    "sampled labels": (tasks.LogisticRegression(x_dim=3, n_context=6, weight_scale=2.0), "laplace"),
    "signs": (tasks.LogisticRegression(x_dim=3, n_context=20, labels="sign"), "logistic regression"),
    "bayes conjunctions": (tasks.Conjunctions(x_dim=5, n_context=12), "bayes"),
    "conjunctions too many to enumerate": (tasks.Conjunctions(x_dim=20, n_context=12), "elimination"),
    "sparse parities": (tasks.Parities(x_dim=6, n_context=12), "bayes"),
    "parities": (tasks.Parities(x_dim=6, n_context=12, degree=None), "elimination over GF(2)"),
    "known clusters": (tasks.GaussianClusters(n_classes=32), "in weights"),
    "absent clusters": (tasks.GaussianClusters(n_classes=32, classes="absent"), "in weights"),
    "new clusters": (tasks.GaussianClusters(n_classes=32, classes="new"), "in context"),
    "swapped labels": (tasks.GaussianClusters(n_classes=32, classes="swapped"), "in context"),
    "clusters without noise": (
        tasks.GaussianClusters(n_classes=32, classes="new", within_class_noise=0.0),
        "in context",
    ),
}


@pytest.mark.parametrize("name", POINTS)
def test_the_first_reference_loses_least(name):
    task, first = POINTS[name]
    learners = algorithms.references(task)
    assert next(iter(learners)) == first
    assert all(isinstance(each, Learner) for each in learners.values())
    prompts = task.sample(500, seed=0)
    losses = [(each.predict(prompts) - prompts.query.ys).square().mean().item() for each in learners.values()]
    assert losses[0] <= min(losses) + 1e-9


def test_markov_chains_are_counted_with_their_own_prior():
    task = MarkovChains(d_vocab=4, n_ctx=30, concentration=0.3)
    learners = algorithms.references(task)
    assert list(learners) == ["bigram", "unigram", "uniform"]
    assert all(isinstance(each, TokenLearner) for each in learners.values())
    losses = [token_losses(each, task.sample(300, seed=0)).mean().item() for each in learners.values()]
    assert losses == sorted(losses)
    other = algorithms.references(task.replace(concentration=3.0))["bigram"]
    assert losses[0] < token_losses(other, task.sample(300, seed=0)).mean()


@pytest.mark.parametrize(("task", "names"), [
    (MarkovChains(n_ctx=30, n_chains=4), ["pool", "pool's unigrams", "bigram", "unigram", "uniform"]),
    (MarkovChains(n_ctx=30, n_chains=4, start="stationary", concentration=0.3), ["pool", "pool's unigrams"]),
    (MarkovChains(n_ctx=60, d_vocab=2, order=2, concentration=0.2), ["order 2", "bigram", "unigram", "uniform"]),
    (MarkovChains(n_ctx=60, d_vocab=2, order=2, n_chains=3, concentration=0.2), ["pool", "order 2", "bigram"]),
    (tasks.BallsAndUrns(n_ctx=30, n_urns=4), ["pool", "unigram", "uniform"]),
    (tasks.BallsAndUrns(n_ctx=30), ["unigram", "uniform"]),
    (tasks.GraphTracing(n_ctx=100), ["bigram", "unigram", "uniform"]),
])  # fmt: skip
def test_finite_pools_and_graphs_have_their_learners_the_best_first(task, names):
    learners = algorithms.references(task)
    assert list(learners)[: len(names)] == names
    seen = task.sample(400, seed=0)
    losses = [token_losses(each, seen).nanmean().item() for each in learners.values()]
    assert losses[0] == min(losses)
