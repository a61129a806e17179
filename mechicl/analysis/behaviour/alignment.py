"""How alike two learners are: their predictions, sensitivities, errors, and the weights that contexts induce."""

import math
from dataclasses import dataclass, field

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.layers.layer_learners import LayerLearner
from mechicl.base.arguments import ArgumentError, checked
from mechicl.base.memory import Budget
from mechicl.base.progress import progress_bar
from mechicl.learners import IterativeLearner, Learner, Trajectory
from mechicl.learners.learners import bytes_per_prompt, predictions_at, trajectory_of
from mechicl.prompts import Prompts
from mechicl.statistics import Result
from mechicl.statistics.results import COSINE

GRAPH_COPIES = 8  # a graph keeps the activations of every layer, where `bytes_per_prompt` counts two layers'


@dataclass(frozen=True, eq=False)
class Alignment(Result):
    """Distances and cosines between two learners on each prompt; `align` defines the fields."""

    prediction_distance: Float[Tensor, "prompt"]
    sensitivity_cosine: Float[Tensor, "prompt"] = field(metadata=COSINE)
    sensitivity_distance: Float[Tensor, "prompt"]


@checked
def align(a: Learner, b: Learner, prompts: Prompts, *, progress: bool | None = None) -> Alignment:
    """Measure how alike two learners are, by their predictions of each prompt's query and their derivatives.

    Args:
        a: a model, an `AlgorithmLearner`, or anything else with `predict(prompts)`, whose predictions must be
            differentiable with respect to the query's input.
        b: the learner to compare it with, of the same kinds.
        prompts: prompts to compare them on; the papers use 10,000.

    Returns:
        An `Alignment` with one value per prompt `[prompt]`: `prediction_distance` (L2 norm of the difference of the
        predictions, in the targets' unit), `sensitivity_cosine` (from -1 to 1, between their derivatives d prediction /
        d query; NaN where one is zero) and `sensitivity_distance` (L2 norm of the difference of the derivatives).

    Source: von Oswald et al. 2023, section 3.

    Example:
        >>> step = AlgorithmLearner(algorithms.gradient_descent, dict(steps=1, step_size=0.6))
        >>> print(align(load("lsa-1l"), step, LinearRegression().sample(1000, seed=0)))
    """
    if len(prompts) == 0:
        raise ValueError("align() needs at least one prompt")
    per_prompt = GRAPH_COPIES * max(bytes_per_prompt(learner, prompts) for learner in (a, b))
    batches, parts = list(prompts.split(Budget().rows(per_prompt, at_most=4096))), []
    for part in progress_bar(batches, unit="batch", progress=progress, desc="align"):
        # learners may be on other devices than the prompts
        (y_a, s_a), (y_b, s_b) = (
            [each.to(part.device) for each in predictions_and_sensitivities(learner, part)] for learner in (a, b)
        )
        parts.append(((y_a - y_b).norm(dim=1), cosine_of_sensitivities(s_a, s_b), (s_a - s_b).flatten(1).norm(dim=1)))
    return Alignment(*(torch.cat(column) for column in zip(*parts, strict=True)))


def cosine_of_sensitivities(a: Float[Tensor, "prompt y x"], b: Float[Tensor, "prompt y x"]) -> Float[Tensor, "prompt"]:
    """Cosine between two learners' sensitivities on each prompt; NaN where one is zero."""
    flat_a, flat_b = a.flatten(1), b.flatten(1)
    cosine = (flat_a * flat_b).sum(1) / (flat_a.norm(dim=1) * flat_b.norm(dim=1))
    return cosine.clamp(-1, 1)


@checked
def sensitivities(learner: Learner, prompts: Prompts) -> Float[Tensor, "prompt y x"]:
    """Differentiate a learner's prediction of each query with respect to the query's input, exactly, in float64.

    For a learner that is linear in the query this is the linear model that it has learned from the context. Any learner
    with a differentiable `predict(prompts)` will do. Entry `[prompt y x]` is d prediction_y / d query_x.

    Example:
        >>> sensitivities(model, prompts).norm(dim=(1, 2)).mean()
    """
    return predictions_and_sensitivities(learner, prompts)[1]


def predictions_and_sensitivities(
    learner: Learner, prompts: Prompts, *, required: bool = True
) -> tuple[Float[Tensor, "prompt y"], Float[Tensor, "prompt y x"]]:
    """Query predictions and derivatives, float64 and detached; without derivatives NaN, or ValueError if required."""
    query = prompts.query.xs.detach().clone().requires_grad_()
    name = type(learner).__name__
    with torch.enable_grad():
        try:
            predictions = predictions_at(learner, prompts.with_query(query))[:, 0]
        except ArgumentError:  # such as numpy's on a tensor with gradients
            if required:
                raise
            predictions = predictions_at(learner, prompts)[:, 0]
        if required and not predictions.requires_grad:
            raise ValueError(f"{name}.predict is not differentiable with respect to the query")
        # one prompt's prediction does not see another's query: the sum over prompts has each prompt's own derivative
        rows = [
            torch.autograd.grad(predictions[:, i].sum(), query, retain_graph=True, allow_unused=True)[0]
            for i in range(predictions.shape[1] if predictions.requires_grad else 0)
        ]
    found = [row for row in rows if row is not None]
    if len(found) == predictions.shape[1]:
        slopes = torch.stack(found, dim=1).detach()
    elif required:
        raise ValueError(f"{name}.predict does not depend on the query")
    else:
        slopes = torch.full((*predictions.shape, prompts.x_dim), math.nan, device=predictions.device)
    return predictions.detach().double(), slopes.double()


def similarity_of_errors(a: Trajectory, b: Trajectory, prompts: Prompts) -> Float[Tensor, "step_a step_b prompt"]:
    """Cosine between the errors that two learners make along each prompt, for all pairs of their steps.

    Errors are those of points 2 to n + 1, each predicted from the points before it, or of the query alone if that is
    all that was predicted. NaN where a learner makes no error at all. Source: Fu et al. 2024, A.3.1, eq. 11 and 12.
    """
    if prompts.n_context == 0:
        raise ValueError("prompts without context points have no errors to compare")
    errors_a, errors_b = _errors(a, prompts), _errors(b, prompts)
    if errors_a.shape[1:] != errors_b.shape[1:]:
        raise ValueError(f"one trajectory has {errors_a.shape[2]} errors a prompt, the other {errors_b.shape[2]}")
    cosines = einsum(_normed(errors_a), _normed(errors_b), "a prompt error, b prompt error -> a b prompt")
    return cosines.clamp(-1, 1)


def similarity_by_prefix(a: Trajectory, b: Trajectory, prompts: Prompts) -> Float[Tensor, "step_a step_b prompt"]:
    """Cosine between the errors of two learners for each number of points before, over all prompts.

    In `similarity_of_errors`, a cosine along each prompt, prefixes with large errors decide: without noise those with
    no more points than dimensions, where all learners that fit their points err alike. Here each number n of points
    counts equally.

    Returns a term for each prompt, whose mean is the mean over n of the cosines and whose spread gives its interval
    (delta method). If one learner makes no error after n points (below 4e-6 of the targets in float32, 1e-10 in
    float64), the cosine is 0; if neither does, n is left out.
    """
    n_points = min(a.predictions.shape[2], prompts.n_context)
    sizes = prompts.ys.double().square().mean((0, 2)).sqrt()[-n_points:]
    units = []
    for trajectory in (a, b):
        errors = _errors(trajectory, prompts).unflatten(2, (n_points, -1))  # [step prompt point y]
        root = errors.square().mean((1, 3), keepdim=True).sqrt()
        none = root <= max(32 * torch.finfo(prompts.dtype).eps, 1e-10) * sizes[:, None]
        units.append((torch.where(none, 0.0, errors / root.masked_fill(none, 1.0)), ~none[:, 0, :, 0]))
    (unit_a, errs_a), (unit_b, errs_b) = units
    counted = errs_a[:, None] | errs_b[None]  # [step_a step_b point]
    n_y = unit_a.shape[-1]
    products = einsum(unit_a, unit_b, "a prompt point y, b prompt point y -> a b prompt") / n_y
    cosines = einsum(unit_a, unit_b, "a prompt point y, b prompt point y -> a b point") / (n_y * len(prompts))
    # c = Σ uv / (Σ u² Σ v²)^(1/2) moves by uv - c (u² + v²) / 2 with a prompt, whose mean over prompts is 0
    squares_a = einsum(unit_a.square().mean(-1), cosines, "a prompt point, a b point -> a b prompt")
    squares_b = einsum(unit_b.square().mean(-1), cosines, "b prompt point, a b point -> a b prompt")
    products = products - (squares_a + squares_b) / 2 + cosines.sum(-1, keepdim=True)
    return products / counted.sum(-1, keepdim=True)


def similarity_of_weights(a: Trajectory, b: Trajectory) -> Float[Tensor, "step_a step_b prompt point"]:
    """Cosine between two learners' induced weights for each prefix; NaN for zero weights (Fu et al. 2024, A.3.1)."""
    weights = []
    for trajectory in (a, b):
        if trajectory.weights is None:
            raise ValueError(f"{trajectory.name or 'a trajectory'} has no weights: ask for with_weights=True")
        weights.append(trajectory.weights)
    shapes = [[*each.shape[1:]] for each in weights]
    if shapes[0] != shapes[1]:
        raise ValueError(f"weights of different prompts [prompt point x y]: {shapes[0]} and {shapes[1]}")
    first, second = (_normed(_after_first(each).double().flatten(3)) for each in weights)
    cosines = einsum(first, second.to(first), "a prompt point weight, b prompt point weight -> a b prompt point")
    return cosines.clamp(-1, 1)


def _errors(trajectory: Trajectory, prompts: Prompts) -> Float[Tensor, "step prompt error"]:
    predictions = trajectory.predictions.to(prompts.device).double()
    targets = (prompts.ys[:, -1:] if predictions.shape[2] == 1 else prompts.ys).double()
    if predictions.shape[1:] != targets.shape:
        raise ValueError(f"predictions {[*predictions.shape]} by {trajectory.name or 'a learner'} are not of {prompts}")
    return _after_first(predictions - targets).flatten(2)


def _after_first(values: Float[Tensor, "step prompt point *rest"]) -> Tensor:
    return values[:, :, 1:] if values.shape[2] > 1 else values


def _normed(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


CACHED_ROWS = 2**13  # queries' streams per batch: this number fits a processor's cache, and larger batches are slower


@checked
def induced_weights(learner: Learner, prompts: Prompts) -> Float[Tensor, "step prompt point x y"]:
    """Differentiate each prediction exactly with respect to its query's input, for every prefix of the prompts.

    For a learner that is linear in the query these are the weights W of its predictions `x W`. Learners with steps (an
    `AlgorithmLearner`, or a model read layer by layer: `Lens`, `fit_readouts`) give weights after each step, any other
    differentiable learner (a plain model) once: the `step` axis has size 1. Source: Fu et al. 2024, A.3.1, who regress
    the weights on sampled queries: see `regressed_weights`.

    Returns:
        Weights `[step prompt point x y]`. Entry t of `point` is the derivative of the prediction of point t from the t
        points before it: t = 0 has no context, t = n_context is the query. A `Lens` of a model that predicts the query
        alone (paired prompts: one token (x, y) per point) has only the query's entry: a point axis of length 1.

    Example:
        >>> induced_weights(AlgorithmLearner(algorithms.ols), prompts).shape
    """
    if isinstance(learner, IterativeLearner):
        weights = trajectory_of(learner, prompts, with_weights=True).weights
        if weights is None:
            raise ValueError(f"{type(learner).__name__}.trajectory returned no weights")
        return weights
    prefixes = [prompts.prefix(t) for t in range(prompts.n_context + 1)]
    return torch.stack([sensitivities(learner, prefix).mT for prefix in prefixes], dim=1)[None]


@checked
@torch.no_grad()
def regressed_weights(
    learner: Learner, prompts: Prompts, queries: Float[Tensor, "query x"]
) -> Float[Tensor, "step prompt point x y"]:
    """Fit linear weights by least squares to a learner's predictions on sampled queries, for every prefix.

    Use it for learners that are not linear in the query or not differentiable; else `induced_weights` is exact. Source:
    Fu et al. 2024, A.3.1, eq. 13 and 14.

    Args:
        learner: any learner; one with steps (an `AlgorithmLearner`, `Lens`, `fit_readouts`) gives weights after each
            step, any other one once: the `step` axis has size 1.
        queries: inputs to predict after every prefix. Draw them from the inputs' distribution, many more of them than x
            has dimensions, as in the paper.

    Returns:
        Weights `[step prompt point x y]`, float64. Entry t of `point` uses the first t points: t = 0 has no context,
        t = n_context all of it. A `Lens` of a model that predicts the query alone (paired prompts) has only this entry.

    Example:
        >>> regressed_weights(Lens(model), prompts[:4], torch.randn(30, task.x_dim)).shape
    """
    if queries.shape[1] != prompts.x_dim or len(queries) < prompts.x_dim:
        raise ValueError(
            f"queries must be [query x] with x = {prompts.x_dim}, at least x of them, got {[*queries.shape]}"
        )
    per_prompt = (1 + len(queries)) * bytes_per_prompt(learner, prompts)
    cached = max(1, CACHED_ROWS // (len(queries) * (prompts.n_context + 1)))
    parts = []
    for part in prompts.split(Budget().rows(per_prompt, at_most=cached)):
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
            if isinstance(learner, IterativeLearner):
                predicted.append(trajectory_of(learner, prefix).query())
            else:
                predicted.append(predictions_at(learner, prefix).transpose(0, 1))
        prefixes.append(torch.stack(predicted, dim=2))
    return torch.stack(prefixes, dim=2)
