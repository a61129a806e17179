"""The linear model that a context has led a learner to, whether or not the learner ever forms one."""

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.behaviour.alignment import sensitivities
from mechicl.analysis.layers.layer_learners import LayerLearner
from mechicl.base.arguments import checked
from mechicl.base.memory import MEMORY, Budget
from mechicl.learners import IterativeLearner, Learner, bytes_per_prompt
from mechicl.prompts import Prompts

CACHED_ROWS = 2**13  # queries' streams per batch: this number fits a processor's cache, and larger batches are slower


@checked
def induced_weights(learner: Learner, prompts: Prompts) -> Float[Tensor, "step prompt point x y"]:
    """Differentiate each prediction exactly with respect to its query, for every prefix of the prompts.

    For a learner that is linear in the query these are the weights that it predicts by. Iterative learners (models
    read layer by layer, algorithms) give them after every step; any other learner once, from one differentiation for
    each prefix.

    Args:
        learner: any learner that is differentiable with respect to the query.
        prompts: the contexts; point t of the result follows the t points before it.

    Source: Fu et al. 2024, A.3.1, whose weights are regressed on sampled queries: see `regressed_weights`.

    Example:
        >>> induced_weights(AlgorithmLearner(algorithms.ols), prompts).shape
    """
    if isinstance(learner, IterativeLearner):
        weights = learner.trajectory(prompts, with_weights=True).weights
        if weights is None:
            raise ValueError(f"{type(learner).__name__}.trajectory returned no weights")
        return weights
    prefixes = [prompts.prefix(t) for t in range(prompts.n_context + 1)]
    return torch.stack([sensitivities(learner, prefix).mT for prefix in prefixes], dim=1)[None]


@checked
@torch.no_grad()
def regressed_weights(
    learner: Learner, prompts: Prompts, queries: Float[Tensor, "query x"], *, memory: float = MEMORY
) -> Float[Tensor, "step prompt point x y"]:
    """Fit weights by least squares to a learner's predictions on sampled queries, for every prefix.

    A model that is read layer by layer computes each context once for all queries and all prefixes. The result is
    float64, on the learner's device.

    Args:
        learner: any learner; an iterative one gives the weights after each of its steps.
        prompts: the contexts; point t of the result follows the t points before it.
        queries: the same for all contexts, many more than dimensions; the paper draws them from the inputs'
            distribution.

    Source: Fu et al. 2024, A.3.1, eq. 13 and 14.

    Example:
        >>> regressed_weights(Lens(model), prompts[:4], torch.randn(30, task.x_dim)).shape
    """
    if queries.shape[1] != prompts.x_dim or len(queries) < prompts.x_dim:
        raise ValueError(
            f"queries must be [query x] with x = {prompts.x_dim} and at least that many queries, got "
            f"{tuple(queries.shape)}"
        )
    per_prompt = (1 + len(queries)) * bytes_per_prompt(learner, prompts)
    cached = max(1, CACHED_ROWS // (len(queries) * (prompts.n_context + 1)))
    parts = []
    for part in prompts.split(Budget(memory).rows(per_prompt, at_most=cached)):
        if isinstance(learner, LayerLearner):
            n_points = part.n_context + 1 if learner.gives_all_points else 1
            parts.append(learner.predict_queries(part, queries.expand(len(part), n_points, *queries.shape)))
        else:
            parts.append(predict_queries_one_by_one(learner, part, queries))
    predictions = torch.cat(parts, dim=1).double()
    # the same queries everywhere: one pseudo-inverse solves the least-squares problems of all prompts and prefixes
    return torch.linalg.pinv(queries.to(predictions)) @ predictions


def predict_queries_one_by_one(
    learner: Learner, prompts: Prompts, queries: Float[Tensor, "query x"]
) -> Float[Tensor, "step prompt point query y"]:
    """Predict with a separate pass for each query and prefix: the route for learners that share nothing."""
    prefixes = []
    for t in range(prompts.n_context + 1):
        predicted = []
        for query in queries:
            prefix = prompts.prefix(t).with_query(query.to(prompts.xs).expand(len(prompts), -1))
            iterative = isinstance(learner, IterativeLearner)
            predicted.append(learner.trajectory(prefix).query() if iterative else learner.predict(prefix)[None])
        prefixes.append(torch.stack(predicted, dim=2))
    return torch.stack(prefixes, dim=2)
