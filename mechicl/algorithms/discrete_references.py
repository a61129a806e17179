"""Reference learners of tasks of tokens, Boolean functions and classes."""

import math
from typing import Any

import torch.nn.functional as F

from mechicl.algorithms.baselines import nearest_neighbours
from mechicl.algorithms.boolean import MOST_FUNCTIONS, conjunction_bayes, elimination, gf2_elimination, parity_bayes
from mechicl.algorithms.clusters import in_context_classifier, in_weights_classifier
from mechicl.algorithms.least_squares import ols
from mechicl.algorithms.markov import bigram_bayes, uniform_tokens, unigram_bayes
from mechicl.algorithms.references import register_references
from mechicl.learners import AlgorithmLearner, TokenAlgorithmLearner
from mechicl.tasks import Conjunctions, GaussianClusters, MarkovChains, Parities


@register_references
def _markov_chains(task: MarkovChains) -> dict[str, Any]:
    """Bigrams are exact Bayes where the first state tells nothing of the chain."""
    counting = {"d_vocab": task.d_vocab, "concentration": task.concentration}
    return {
        "bigram": TokenAlgorithmLearner(bigram_bayes, counting),
        "unigram": TokenAlgorithmLearner(unigram_bayes, counting),
        "uniform": TokenAlgorithmLearner(uniform_tokens, {"d_vocab": task.d_vocab}),
    }


@register_references
def _conjunctions(task: Conjunctions) -> dict[str, Any]:
    """Exact Bayes where the class can be enumerated."""
    settings = {"literal_probability": task.literal_probability, "positive_share": task.positive_share}
    exact = {"bayes": AlgorithmLearner(conjunction_bayes, settings)} if 3**task.x_dim <= MOST_FUNCTIONS else {}
    return {
        **exact,
        "elimination": AlgorithmLearner(elimination),
        "nearest neighbour": AlgorithmLearner(nearest_neighbours, {"n_neighbours": 1}),
        "ols": AlgorithmLearner(ols),
    }


@register_references
def _parities(task: Parities) -> dict[str, Any]:
    """Exact Bayes: by enumeration for a known degree, by elimination for any subset."""
    sparse = task.degree is not None and math.comb(task.x_dim, task.degree) <= MOST_FUNCTIONS
    exact = {"bayes": AlgorithmLearner(parity_bayes, {"degree": task.degree})} if sparse else {}
    return {
        **exact,
        "elimination over GF(2)": AlgorithmLearner(gf2_elimination),
        "nearest neighbour": AlgorithmLearner(nearest_neighbours, {"n_neighbours": 1}),
        "ols": AlgorithmLearner(ols),
    }


@register_references
def _gaussian_clusters(task: GaussianClusters) -> dict[str, Any]:
    """What the weights tell where classes are known, and what the context tells where they are not."""
    noise = {"within_class_noise": max(task.within_class_noise, 1e-6)}
    table = {"means": task.means, "labels": F.one_hot(task.labels, task.n_labels).double()}
    weights = AlgorithmLearner(in_weights_classifier, {**table, "frequencies": task.frequencies, **noise})
    context = AlgorithmLearner(in_context_classifier, {"burstiness": task.burstiness, **noise})
    both = {"in weights": weights, "in context": context}
    if task.classes in ("new", "swapped"):
        both = {"in context": context, "in weights": weights}
    return {**both, "nearest neighbour": AlgorithmLearner(nearest_neighbours, {"n_neighbours": 1})}
