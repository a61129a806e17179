"""The best known learners of each task, which a model trained on it is measured against."""

import math
from collections.abc import Callable
from functools import singledispatch
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mechicl import tasks
from mechicl.algorithms.baselines import averaging, nearest_neighbours
from mechicl.algorithms.boolean import MOST_FUNCTIONS, conjunction_bayes, elimination, gf2_elimination, parity_bayes
from mechicl.algorithms.clusters import in_context_classifier, in_weights_classifier
from mechicl.algorithms.greedy_tree import greedy_tree
from mechicl.algorithms.lasso import lasso
from mechicl.algorithms.least_squares import bayes, ols, ridge
from mechicl.algorithms.markov import bigram_bayes, uniform_tokens, unigram_bayes
from mechicl.algorithms.mixtures import dmmse, mixture_bayes, sparse_bayes
from mechicl.algorithms.nonlinear import logistic, network_descent, on_features, sine_and_cosine
from mechicl.base.arguments import checked
from mechicl.learners import AlgorithmLearner, Learner, TokenAlgorithmLearner, named_learners, named_token_learners
from mechicl.prompts import Prompts
from mechicl.tasks.sampling import TokenDistribution

MOST_SUPPORTS = 200  # over which the exact Bayes learner of sparse functions goes in a moment
LASSO_PENALTY = 0.01
LARGE_WEIGHTS = 10.0  # makes the logistic function nearly a step
OLS = AlgorithmLearner(ols)
NEAREST = AlgorithmLearner(nearest_neighbours, {"n_neighbours": 1})
NEIGHBOURS = AlgorithmLearner(nearest_neighbours)  # three


@checked
def references(task: Any) -> dict[str, Any]:
    """Reference learners of a task by name, the best known first; learners of tokens for tasks of tokens.

    Where the first one is exact Bayes, no learner has a smaller expected loss on the task.

    Args:
        task: of the library, or one's own. A task with a method `references()` brings its own learners, by name or in
            a list; `register_references` adds a function that makes them for a class that is not one's own.

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
        f"no reference learner is known for {kind}: give the class a method references() that returns learners by "
        f"name, or decorate a function of a {kind} that does with mechicl.algorithms.register_references"
    )


Function = TypeVar("Function", bound=Callable[..., Any])


@checked
def register_references(function: Function) -> Function:
    """Decorates a function of a kind of task (its annotation says which) that returns reference learners by name."""
    try:
        return cast(Function, _references.register(function))
    except (TypeError, AttributeError, NameError) as error:
        raise TypeError(f"function must say by an annotation which class of tasks it is for: {error}") from error


# ---- regressions ----


@register_references
def _linear_regression(task: tasks.LinearRegression) -> dict[str, Learner]:
    """Exact Bayes; without it, where some context points are labelled by other weights, ridge regression."""
    least_squares: dict[str, Learner] = {"ols": OLS}
    if task.weight_scale == 0:
        return {"bayes": AlgorithmLearner(_zero), **least_squares}
    prior: dict[str, Any] = {"noise_std": task.noise_std, "weight_std": task.weight_scale}
    if task.weight_covariance == "inverse":
        prior["weight_covariance"] = torch.linalg.inv(task.input_covariance())
    posterior_mean = AlgorithmLearner(bayes, prior)
    if not task.n_distractors:
        return {"bayes": posterior_mean, **least_squares}
    return {"ridge": posterior_mean, **least_squares} if task.noise_std else least_squares


@register_references
def _task_pool(task: tasks.TaskPool) -> dict[str, Learner]:
    """Exact Bayes over the pool; then what is best where it has no end, as on new tasks."""
    exact = AlgorithmLearner(dmmse, {"pool": task.weights, "noise_std": task.noise_std})
    return {
        "dmmse": exact,
        "ridge": AlgorithmLearner(bayes, {"noise_std": task.noise_std}),
        "ols": OLS,
    }


@register_references
def _fixed_tasks(task: tasks.FixedTasks) -> dict[str, Learner]:
    """Those of the task that the prompts were drawn from."""
    return references(task.task)


@register_references
def _sine_regression(task: tasks.SineRegression) -> dict[str, Learner]:
    """Least squares on sine and cosine, exact from two points on; and a smoother that knows nothing of sines."""
    return {
        "least squares on sine and cosine": AlgorithmLearner(on_features, {"features": sine_and_cosine}),
        "nearest neighbour": NEAREST,
    }


@register_references
def _mixed_regression(task: tasks.MixedRegression) -> dict[str, Learner]:
    """Exact Bayes over the settings; then ridge with each one's penalty."""
    noise_stds, weight_stds = zip(*task.settings, strict=True)
    exact = AlgorithmLearner(mixture_bayes, {"noise_stds": noise_stds, "weight_stds": weight_stds})
    penalties = sorted({(noise / weight) ** 2 for noise, weight in task.settings})
    each = {f"ridge {penalty:.3g}": AlgorithmLearner(ridge, {"penalty": penalty}) for penalty in penalties}
    return {"bayes": exact, **each}


@register_references
def _sparse(task: tasks.SparseLinearRegression) -> dict[str, Learner]:
    """Exact Bayes over supports, where these are few; then the lasso and least squares."""
    others: dict[str, Learner] = {"lasso": AlgorithmLearner(lasso, {"penalty": LASSO_PENALTY})}
    if task.noise_std:
        others["ridge"] = AlgorithmLearner(bayes, {"noise_std": task.noise_std})
    others["ols"] = OLS
    if task.active_dims is not None or math.comb(task.x_dim, task.sparsity) > MOST_SUPPORTS:
        return others
    exact = AlgorithmLearner(sparse_bayes, {"sparsity": task.sparsity, "noise_std": task.noise_std})
    return {"bayes": exact, **others}


@register_references
def _quadratic(task: tasks.QuadraticRegression) -> dict[str, Learner]:
    """Exact Bayes, linear in the squares of the inputs; then least squares on them, and on the inputs."""
    prior = {"noise_std": task.noise_std, "weight_std": 3**-0.5}
    exact = {"features": torch.square, "algorithm": bayes, "hyperparameters": prior}
    return {
        "bayes": AlgorithmLearner(on_features, exact),
        "least squares on squares": AlgorithmLearner(on_features, {"features": torch.square}),
        "ols": OLS,
    }


@register_references
def _networks(task: tasks.ReluNetworks) -> dict[str, Learner]:
    """A network of the same size trained on the context, neighbours, and least squares."""
    return {
        "network descent": AlgorithmLearner(network_descent, {"n_hidden": task.n_hidden}),
        "3 nearest neighbours": NEIGHBOURS,
        "ols": OLS,
    }


@register_references
def _trees(task: tasks.DecisionTrees) -> dict[str, Learner]:
    """A tree of the same depth grown greedily on signs, neighbours, and least squares."""
    return {
        "greedy tree": AlgorithmLearner(greedy_tree, {"depth": task.depth}),
        "3 nearest neighbours": NEIGHBOURS,
        "ols": OLS,
    }


@register_references
def _logistic(task: tasks.LogisticRegression) -> dict[str, Learner]:
    """Bayes to second order for sampled labels, the weights of largest posterior density for signs; averaging."""
    sampled = task.labels == "sampled"
    std = task.weight_scale if sampled else LARGE_WEIGHTS
    mode = AlgorithmLearner(logistic, {"weight_std": std, "posterior": "mode"})
    first = {"laplace": AlgorithmLearner(logistic, {"weight_std": std})} if sampled else {}
    return {**first, "logistic regression": mode, "averaging": AlgorithmLearner(averaging)}


def _zero(prompts: Prompts) -> Tensor:
    """The prediction where all weights are known to be 0."""
    return torch.zeros_like(prompts.ys)


# ---- tokens, Boolean functions and classes ----


@register_references
def _markov_chains(task: tasks.MarkovChains) -> dict[str, Any]:
    """Bigrams are exact Bayes where the first state tells nothing of the chain."""
    counting = {"d_vocab": task.d_vocab, "concentration": task.concentration}
    return {
        "bigram": TokenAlgorithmLearner(bigram_bayes, counting),
        "unigram": TokenAlgorithmLearner(unigram_bayes, counting),
        "uniform": TokenAlgorithmLearner(uniform_tokens, {"d_vocab": task.d_vocab}),
    }


@register_references
def _conjunctions(task: tasks.Conjunctions) -> dict[str, Any]:
    """Exact Bayes where the class can be enumerated."""
    settings = {"literal_probability": task.literal_probability, "positive_share": task.positive_share}
    exact = {"bayes": AlgorithmLearner(conjunction_bayes, settings)} if 3**task.x_dim <= MOST_FUNCTIONS else {}
    return {
        **exact,
        "elimination": AlgorithmLearner(elimination),
        "nearest neighbour": NEAREST,
        "ols": OLS,
    }


@register_references
def _parities(task: tasks.Parities) -> dict[str, Any]:
    """Exact Bayes: by enumeration for a known degree, by elimination for any subset."""
    sparse = task.degree is not None and math.comb(task.x_dim, task.degree) <= MOST_FUNCTIONS
    exact = {"bayes": AlgorithmLearner(parity_bayes, {"degree": task.degree})} if sparse else {}
    return {
        **exact,
        "elimination over GF(2)": AlgorithmLearner(gf2_elimination),
        "nearest neighbour": NEAREST,
        "ols": OLS,
    }


@register_references
def _gaussian_clusters(task: tasks.GaussianClusters) -> dict[str, Any]:
    """What the weights tell where classes are known, and what the context tells where they are not."""
    noise = {"within_class_noise": max(task.within_class_noise, 1e-6)}
    table = {"means": task.means, "labels": F.one_hot(task.labels, task.n_labels).double()}
    weights = AlgorithmLearner(in_weights_classifier, {**table, "frequencies": task.frequencies, **noise})
    context = AlgorithmLearner(in_context_classifier, {"burstiness": task.burstiness, **noise})
    both = {"in weights": weights, "in context": context}
    if task.classes in ("new", "swapped"):
        both = {"in context": context, "in weights": weights}
    return {**both, "nearest neighbour": NEAREST}
