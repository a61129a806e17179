"""Statistical tests of samplers, and a task of each kind."""

import math

import numpy as np
import scipy.stats
import torch

from mechicl import tasks
from mechicl.prompts import Prompts

INPUTS = ("uniform", "gaussian", "exponential", "laplace", "sphere", "gamma_sphere")
# Seeds are fixed, so these tests either always pass or always fail; the thresholds are such that a right sampler
# fails for about one seed in a thousand or fewer.
LEAST_P = 1e-3
MOST_Z = 4.5

SMALL = tasks.LinearRegression(x_dim=2, n_context=3)
PROMPT_TASKS = [
    SMALL,
    SMALL.replace(n_context=0, y_dim=3, input_scale=2.0, weight_scale=0.0),
    SMALL.replace(inputs=INPUTS, noise_std=0.1, query_noise=False, n_distractors=1, active_dims=1),
    SMALL.replace(inputs=("gaussian",), covariance=((1.0, 0.1), (0.1, 2.0))),
    SMALL.replace(inputs="gaussian", eigenvalues=(0.0, 100.0), eigenbasis="shared", eigenbasis_seed=2**40),
    SMALL.replace(inputs="gaussian", condition_number=3.0, eigenbasis="per_task"),
    tasks.SineRegression(n_context=3, x_range=(-1.0, 2.0)),
    tasks.FixedTasks(SMALL, n_tasks=10),
    tasks.FixedTasks(tasks.SineRegression(n_context=3), n_tasks=4, seed=5),
    tasks.TaskPool(x_dim=2, n_context=3, n_tasks=4, noise_std=0.1, seed=5, active_dims=1),
    tasks.SparseLinearRegression(x_dim=4, n_context=3, sparsity=2, noise_std=0.1),
    tasks.QuadraticRegression(x_dim=2, n_context=3, active_dims=1),
    tasks.ReluNetworks(x_dim=2, n_context=3, n_hidden=4),
    tasks.DecisionTrees(x_dim=2, n_context=3, depth=2),
    tasks.LogisticRegression(x_dim=2, n_context=3, weight_scale=2.0, labels="sign"),
    tasks.MixedRegression(x_dim=2, n_context=3, noise_stds=(0.1, 0.2, 0.3), weight_stds=(1.0,)),
    tasks.Conjunctions(x_dim=3, n_context=4),
    tasks.Parities(x_dim=3, n_context=4, degree=None),
    tasks.GaussianClusters(x_dim=3, bursty_share=0.5),
    tasks.DriftingRegression(x_dim=2, n_context=3, renewed=0.2, noise_std=0.1, active_dims=1),
    tasks.AssociativeRecall(x_dim=2, n_context=3, n_keys=2),
]
TOKEN_TASKS = [
    tasks.RepeatedTokens(d_vocab=5, n_ctx=8, min_period=2, max_period=4),
    tasks.TopicClassification(n_ctx=20, share_repeated=0.5),
    tasks.MarkovChains(d_vocab=5, n_ctx=7, start="stationary"),
    tasks.MarkovChains(d_vocab=3, n_ctx=7, order=2, n_chains=4, chain_seed=1),
    tasks.BallsAndUrns(d_vocab=5, n_ctx=7, n_urns=3),
    tasks.GraphTracing(sides=(3, 3), periodic=True, n_ctx=7),
]


def z_score(samples, expected):
    """Standard errors between the mean of independent samples (first axis) and what it should be."""
    samples = np.asarray(samples, dtype=np.float64)
    return (samples.mean(0) - expected) / (samples.std(0, ddof=1) / math.sqrt(len(samples)))


def assert_follows(samples, distribution):
    """Kolmogorov-Smirnov test of independent samples."""
    p = scipy.stats.kstest(np.asarray(samples, dtype=np.float64).ravel(), distribution.cdf).pvalue
    assert p > LEAST_P, f"p = {p:.2g}"


def same(a, b):
    """True if two batches have the same bits."""
    if isinstance(a, Prompts):
        return torch.equal(a.xs, b.xs) and torch.equal(a.ys, b.ys) and a.dtype == b.dtype
    return torch.equal(a.ids, b.ids) and torch.equal(a.predictable, b.predictable)
