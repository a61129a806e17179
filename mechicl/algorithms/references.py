"""The best known learners of each task, which a model trained on it is measured against."""

import math
from collections.abc import Callable
from functools import singledispatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mechicl import tasks
from mechicl.algorithms.baselines import averaging, greedy_tree, lasso, nearest_neighbours
from mechicl.algorithms.clusters import in_context_classifier, in_weights_classifier
from mechicl.algorithms.discrete import MOST_FUNCTIONS, conjunction_bayes, elimination, gf2_elimination, parity_bayes
from mechicl.algorithms.least_squares import bayes, ols, ridge
from mechicl.algorithms.mixtures import dmmse, mixture_bayes, sparse_bayes
from mechicl.algorithms.nonlinear import logistic, network_descent, on_features, sine_and_cosine
from mechicl.algorithms.token_counts import bigram_bayes, ngram_bayes, pool_bayes, uniform_tokens, unigram_bayes
from mechicl.base.arguments import checked
from mechicl.learners import AlgorithmLearner, Learner, TokenAlgorithmLearner
from mechicl.learners.learners import named_learners
from mechicl.learners.token_learners import named_token_learners
from mechicl.prompts import Prompts
from mechicl.tasks.sampling import TokenDistribution
from mechicl.tasks.token_sequences import stationary_distributions

MOST_SUPPORTS = 200  # for which the exact Bayes learner of sparse functions takes a moment
LASSO_PENALTY = 0.01
LARGE_WEIGHTS = 10.0  # makes the logistic function nearly a step
OLS = AlgorithmLearner(ols)
NEAREST = {"nearest neighbour": AlgorithmLearner(nearest_neighbours, {"n_neighbours": 1})}
NEAREST_NEIGHBOURS = {"3 nearest neighbours": AlgorithmLearner(nearest_neighbours)}


@checked
def references(task: Any) -> dict[str, Any]:
    """Return the best known learners of a task by name, to measure a model against; the best comes first.

    Where the first one is exact Bayes, no learner has a smaller expected loss on the task. No reference of
    `GaussianClusters` with known classes uses both the context and the table of the classes: "in weights" comes first,
    but "in context" is better where classes are many or overlap, and regrets may be negative.

    Args:
        task: a task of the library, or your own with a method `references()`, which returns its learners by name or in
            a list, the best first.

    Returns:
        Learners by name: with `predict(prompts)`, or for tasks of tokens with `log_probabilities(sequences)`.

    Raises:
        TypeError: no learner is known for this class of tasks.

    Example:
        >>> learners = algorithms.references(TaskPool(n_tasks=16))
        >>> list(learners)
        ['dmmse', 'ridge', 'ols']
        >>> learners["dmmse"].predict(TaskPool(n_tasks=16).sample(5, seed=0)).shape
        torch.Size([5, 1])
    """
    brought: Callable[[], Any] | None = getattr(task, "references", None)
    learners = brought() if callable(brought) else _references(task)
    return named_token_learners(learners) if isinstance(task, TokenDistribution) else named_learners(learners)


@singledispatch
def _references(task: Any) -> dict[str, Learner]:
    kind = type(task).__name__
    raise TypeError(
        f"no reference learner is known for {kind}: give it a method references() that returns learners by name"
    )


# ---- regressions ----


@_references.register
def _linear_regression(task: tasks.LinearRegression) -> dict[str, Learner]:
    """Exact Bayes; with distractors, whose labels come from other weights, ridge regression."""
    least_squares: dict[str, Learner] = {"ols": OLS}
    if task.weight_scale == 0:
        return {"bayes": AlgorithmLearner(lambda prompts: torch.zeros_like(prompts.ys)), **least_squares}
    prior: dict[str, Any] = {"noise_std": task.noise_std, "weight_std": task.weight_scale}
    if task.weight_covariance == "inverse":
        prior["weight_covariance"] = torch.linalg.inv(task.input_covariance())
    posterior_mean = AlgorithmLearner(bayes, prior)
    if not task.n_distractors:
        return {"bayes": posterior_mean, **least_squares}
    return {"ridge": posterior_mean, **least_squares} if task.noise_std else least_squares


@_references.register
def _task_pool(task: tasks.TaskPool) -> dict[str, Learner]:
    noise = {"noise_std": task.noise_std}
    exact = AlgorithmLearner(dmmse, {"pool": task.weights, **noise})
    return {"dmmse": exact, "ridge": AlgorithmLearner(bayes, noise), "ols": OLS}


_references.register(tasks.FixedTasks, lambda task: references(task.task))
ON_WAVES = AlgorithmLearner(on_features, {"features": sine_and_cosine})
_references.register(tasks.SineRegression, lambda _: {"least squares on sine and cosine": ON_WAVES, **NEAREST})


@_references.register
def _mixed_regression(task: tasks.MixedRegression) -> dict[str, Learner]:
    noise_stds, weight_stds = zip(*task.settings, strict=True)
    exact = AlgorithmLearner(mixture_bayes, {"noise_stds": noise_stds, "weight_stds": weight_stds})
    penalties = sorted({(noise / weight) ** 2 for noise, weight in task.settings})
    each = {f"ridge {penalty:.3g}": AlgorithmLearner(ridge, {"penalty": penalty}) for penalty in penalties}
    return {"bayes": exact, **each}


@_references.register
def _sparse(task: tasks.SparseLinearRegression) -> dict[str, Learner]:
    noise = {"noise_std": task.noise_std}
    few = task.active_dims is None and math.comb(task.x_dim, task.sparsity) <= MOST_SUPPORTS
    return {
        **({"bayes": AlgorithmLearner(sparse_bayes, {"sparsity": task.sparsity, **noise})} if few else {}),
        "lasso": AlgorithmLearner(lasso, {"penalty": LASSO_PENALTY}),
        **({"ridge": AlgorithmLearner(bayes, noise)} if task.noise_std else {}),
        "ols": OLS,
    }


@_references.register
def _quadratic(task: tasks.QuadraticRegression) -> dict[str, Learner]:
    prior = {"noise_std": task.noise_std, "weight_std": 3**-0.5}
    exact = {"features": torch.square, "algorithm": bayes, "hyperparameters": prior}
    return {
        "bayes": AlgorithmLearner(on_features, exact),
        "least squares on squares": AlgorithmLearner(on_features, {"features": torch.square}),
        "ols": OLS,
    }


def _drifting_bayes(prompts: Prompts, renewed: float, noise_std: float) -> Tensor:
    """Targets are a Gaussian process with the covariance `<x_s, x_t> (1 - ρ)^(|s - t| / 2)`, plus noise.

    With its Cholesky factor L and `y = L e`, the mean of y_t given the targets before it is `Σ_{s<t} L_ts e_s`.
    """
    xs, ys = prompts.xs.double(), prompts.ys.double()
    t = torch.arange(xs.shape[1], dtype=torch.float64, device=xs.device)
    covariance = (xs @ xs.mT) * (1 - renewed) ** ((t[:, None] - t).abs() / 2)
    jitter = noise_std**2 + 1e-9  # without drift and noise the targets have only x_dim degrees of freedom
    factor = torch.linalg.cholesky(covariance + jitter * torch.eye(len(t), dtype=t.dtype, device=t.device))
    return (factor.tril(-1) @ torch.linalg.solve_triangular(factor, ys, upper=False)).to(prompts.dtype)


@_references.register
def _drifting(task: tasks.DriftingRegression) -> dict[str, Learner]:
    exact = {"renewed": task.renewed, "noise_std": task.noise_std}
    return {"bayes": AlgorithmLearner(_drifting_bayes, exact), "ols": OLS}


_references.register(tasks.AssociativeRecall, lambda _: {**NEAREST, "ols": OLS})


@_references.register
def _networks(task: tasks.ReluNetworks) -> dict[str, Learner]:
    network = AlgorithmLearner(network_descent, {"n_hidden": task.n_hidden})
    return {"network descent": network, **NEAREST_NEIGHBOURS, "ols": OLS}


@_references.register
def _trees(task: tasks.DecisionTrees) -> dict[str, Learner]:
    return {"greedy tree": AlgorithmLearner(greedy_tree, {"depth": task.depth}), **NEAREST_NEIGHBOURS, "ols": OLS}


@_references.register
def _logistic(task: tasks.LogisticRegression) -> dict[str, Learner]:
    """Bayes to second order for sampled labels, the weights of largest posterior density for signs; averaging."""
    sampled = task.labels == "sampled"
    std = task.weight_scale if sampled else LARGE_WEIGHTS
    mode = AlgorithmLearner(logistic, {"weight_std": std, "posterior": "mode"})
    first = {"laplace": AlgorithmLearner(logistic, {"weight_std": std})} if sampled else {}
    return {**first, "logistic regression": mode, "averaging": AlgorithmLearner(averaging)}


# ---- tokens, Boolean functions and classes ----


@_references.register
def _markov_chains(task: tasks.MarkovChains) -> dict[str, Any]:
    """Counts of pairs (or longer n-grams) are exact Bayes for new chains with a uniform first state.

    For a finite pool, Bayes over its chains comes first, then Bayes that knows only how often each visits each state.
    """
    counting = {"d_vocab": task.d_vocab, "concentration": task.concentration}
    pool: dict[str, Any] = {}
    if task.n_chains is not None:
        visits = stationary_distributions(task.pool) if task.order == 1 else None
        exact = {"pool": task.pool, "first": visits if task.start == "stationary" else None}
        pool["pool"] = TokenAlgorithmLearner(pool_bayes, exact)
        if visits is not None:
            pool["pool's unigrams"] = TokenAlgorithmLearner(pool_bayes, {"pool": visits})
    if task.order > 1:
        pool[f"order {task.order}"] = TokenAlgorithmLearner(ngram_bayes, {"order": task.order, **counting})
    return {
        **pool,
        "bigram": TokenAlgorithmLearner(bigram_bayes, counting),
        "unigram": TokenAlgorithmLearner(unigram_bayes, counting),
        "uniform": TokenAlgorithmLearner(uniform_tokens, {"d_vocab": task.d_vocab}),
    }


@_references.register
def _balls_and_urns(task: tasks.BallsAndUrns) -> dict[str, Any]:
    """Exact Bayes over the pool, if there is one; then the best learner for new urns, which counts."""
    pool = {} if task.n_urns is None else {"pool": TokenAlgorithmLearner(pool_bayes, {"pool": task.pool})}
    return {**pool, **{name: each for name, each in _markov_chains(task.new_urns.chains).items() if name != "bigram"}}


@_references.register
def _graph_tracing(task: tasks.GraphTracing) -> dict[str, Any]:
    """Counts of tokens that followed each token, which do not use the graph's shape; then of tokens alone."""
    return _markov_chains(tasks.MarkovChains(d_vocab=task.d_vocab, concentration=0.1))


@_references.register
def _conjunctions(task: tasks.Conjunctions) -> dict[str, Any]:
    settings = {"literal_probability": task.literal_probability, "positive_share": task.positive_share}
    exact = {"bayes": AlgorithmLearner(conjunction_bayes, settings)} if 3**task.x_dim <= MOST_FUNCTIONS else {}
    return {**exact, "elimination": AlgorithmLearner(elimination), **NEAREST, "ols": OLS}


@_references.register
def _parities(task: tasks.Parities) -> dict[str, Any]:
    sparse = task.degree is not None and math.comb(task.x_dim, task.degree) <= MOST_FUNCTIONS
    exact = {"bayes": AlgorithmLearner(parity_bayes, {"degree": task.degree})} if sparse else {}
    return {**exact, "elimination over GF(2)": AlgorithmLearner(gf2_elimination), **NEAREST, "ols": OLS}


@_references.register
def _gaussian_clusters(task: tasks.GaussianClusters) -> dict[str, Any]:
    noise = {"within_class_noise": max(task.within_class_noise, 1e-6)}
    table = {"means": task.means, "labels": F.one_hot(task.labels, task.n_labels).double()}
    both = {
        "in weights": AlgorithmLearner(in_weights_classifier, {**table, "frequencies": task.frequencies, **noise}),
        "in context": AlgorithmLearner(in_context_classifier, {"burstiness": task.burstiness, **noise}),
    }
    if task.classes in ("new", "swapped"):  # of known classes either may be better
        both = dict(reversed(both.items()))
    return {**both, **NEAREST}
