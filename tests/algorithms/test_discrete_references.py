import pytest
import torch

from mechicl import algorithms
from mechicl.learners import Learner, TokenLearner, token_losses
from mechicl.tasks import Conjunctions, FixedTasks, GaussianClusters, MarkovChains, Parities

POINTS = {
    "bayes conjunctions": (Conjunctions(x_dim=5, n_context=12), "bayes"),
    "conjunctions too many to enumerate": (Conjunctions(x_dim=20, n_context=12), "elimination"),
    "sparse parities": (Parities(x_dim=6, n_context=12), "bayes"),
    "parities": (Parities(x_dim=6, n_context=12, degree=None), "elimination over GF(2)"),
    "known clusters": (GaussianClusters(n_classes=32), "in weights"),
    "absent clusters": (GaussianClusters(n_classes=32, classes="absent"), "in weights"),
    "new clusters": (GaussianClusters(n_classes=32, classes="new"), "in context"),
    "swapped labels": (GaussianClusters(n_classes=32, classes="swapped"), "in context"),
    "clusters without noise": (GaussianClusters(n_classes=32, classes="new", within_class_noise=0.0), "in context"),
}


@pytest.mark.parametrize("name", POINTS)
def test_the_first_reference_loses_least(name):
    task, first = POINTS[name]
    learners = algorithms.references(task)
    assert next(iter(learners)) == first
    assert all(isinstance(each, Learner) for each in learners.values())
    prompts = task.sample(300, seed=0)
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


def test_references_of_fixed_prompts_are_those_of_their_task():
    learners = algorithms.references(FixedTasks(Parities(), 4))
    assert list(learners) == list(algorithms.references(Parities()))
    assert torch.is_tensor(learners["bayes"].predict(Parities().sample(2, seed=0)))
