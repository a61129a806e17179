"""How a learner uses its context: forgetting, dependence on order, and weights outside the span of the points."""

from dataclasses import dataclass, field
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.layers.layer_learners import LayerLearner, Lens
from mechicl.base.arguments import at_least, checked
from mechicl.base.progress import progress_bar
from mechicl.learners import IterativeLearner, Learner, prompt_batches
from mechicl.learners.learners import predictions_at, query_predictions, trajectory_of
from mechicl.models import PromptedModel
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, interval, ratio_interval
from mechicl.statistics.results import SHARE, index_of


@dataclass(frozen=True, eq=False)
class Forgetting(Result):
    """Squared errors when each context point is the query after the whole context; see `measure_forgetting`."""

    squared_errors: Float[Tensor, "point prompt"]

    @property
    def gaps(self) -> list[int]:
        """Number of points that each one lies back: n - 1 for the first, 0 for the last ("time stamp gap")."""
        return list(reversed(range(self.squared_errors.shape[0])))


@checked
@torch.no_grad()
def measure_forgetting(learner: Learner, prompts: Prompts, *, progress: bool | None = None) -> Forgetting:
    """Measure how well a learner remembers its context: predict each context point again after the whole context.

    Args:
        learner: a model, an `AlgorithmLearner`, or anything else with `predict(prompts)`.
        prompts: each query is replaced by every point of its context in turn.

    Returns:
        A `Forgetting`: `squared_errors` `[point prompt]` at each context point, averaged over the target's dimensions;
        `gaps`, how many points back it is: n_context - 1 for the first, 0 for the last. A learner that forgets has
        larger errors at larger gaps.

    Source: Fu et al. 2024, B.5, eq. 16.

    Example:
        >>> online = AlgorithmLearner(algorithms.online_gradient_descent)
        >>> print(measure_forgetting(online, prompts))
    """
    if prompts.n_context == 0 or len(prompts) == 0:
        raise ValueError(f"measure_forgetting() needs prompts with context points to forget, got {prompts}")
    if isinstance(learner, PromptedModel):
        learner = Lens(learner)
    batches, parts = list(prompt_batches(learner, prompts, copies=2)), []  # the same number of queries again
    for part in progress_bar(batches, unit="batch", progress=progress, desc="forgetting"):
        xs, targets = part.context.xs, part.context.ys
        if isinstance(learner, LayerLearner):
            predicted = learner.predict_last_queries(part, xs)[-1]
        else:
            predicted = torch.cat([predictions_at(learner, part.with_query(x)) for x in xs.unbind(1)], dim=1)
        parts.append((predicted.to(targets.device).double() - targets.double()).square().mean(-1).T)
    return Forgetting(torch.cat(parts, dim=1))


@dataclass(frozen=True, eq=False)
class OrderSensitivity(Result):
    """Variance and mean square of predictions over orders of the context; see `measure_order_sensitivity`."""

    variance: Float[Tensor, "prompt"]
    signal: Float[Tensor, "prompt"]

    def relative(self, level: float = 0.95) -> Interval:
        """Return the variance over orders as a share of the predictions' mean square, with an interval over prompts."""
        return ratio_interval(self.variance, self.signal, level)


@checked
@torch.no_grad()
def measure_order_sensitivity(
    learner: Learner, prompts: Prompts, *, n_orders: Annotated[int, at_least(2)] = 16, seed: int = 0,
    progress: bool | None = None,
) -> OrderSensitivity:  # fmt: skip
    """Measure how much the prediction of each query changes with the order of its context.

    Learners that run gradient descent, Newton's method or least squares on the whole context predict the same for every
    order; causal models and online learners need not. Source: Nertinger 2025, Theorem 3: equivalence to gradient
    descent needs predictions that do not change under permutations of the context.

    Args:
        learner: a model, an `AlgorithmLearner`, or anything else with `predict(prompts)`.
        prompts: their context points are permuted, the query stays last.
        n_orders: number of random orders of each context, drawn with `seed`.

    Returns:
        An `OrderSensitivity`: the `variance` of each prompt's prediction over orders and its mean square `signal`, both
        averaged over the target's dimensions, `[prompt]`; `relative()`, the mean variance over the mean signal with a
        95% interval over prompts: 0 for a learner that ignores the order.

    Example:
        >>> print(measure_order_sensitivity(model, prompts).relative())
    """
    if len(prompts) == 0:
        raise ValueError("measure_order_sensitivity() needs at least one prompt")
    predictions = []
    for i in progress_bar(range(n_orders), unit="order", progress=progress, desc="order"):
        predictions.append(query_predictions(learner, prompts.permuted(seed=seed + i)))
    stacked = torch.stack(predictions)
    return OrderSensitivity(stacked.var(0).mean(-1), stacked.square().mean(0).mean(-1))


@dataclass(frozen=True, eq=False)
class OutsideSpan(Result):
    """Share of the weights' squared norm outside the span of the points seen: 1 after no point, NaN if 0."""

    steps: tuple[float, ...]
    share: Float[Tensor, "step point prompt"] = field(metadata=SHARE)

    def by_point(self, step: float | None = None, level: float = 0.95) -> list[Interval]:
        """Return mean shares after 0 to n_context points with intervals over prompts; by default at the last step."""
        i = -1 if step is None else index_of("step", step, self.steps)
        return [interval(share, level, within=(0, 1)) for share in self.share[i]]


@checked
def measure_outside_span(learner: IterativeLearner, prompts: Prompts, *, progress: bool | None = None) -> OutsideSpan:
    """Measure how much of a learner's induced weights lies outside the span of the inputs seen so far.

    Induced weights are the derivatives of a prediction with respect to the query's input (`induced_weights`). With X
    and Y the inputs and targets of a prefix, any method whose weights are a polynomial in `S = XᵀX` times `B = XᵀY`
    (gradient descent, Newton's method, ridge) stays in the span: its share is 0. Source: Fu et al. 2024, C.4, eq. 42.

    Args:
        learner: a learner with steps that predicts every prefix: an `AlgorithmLearner`, or `Lens(model)` or
            `fit_readouts(model, ...)` of a causal model on interleaved prompts. All steps are measured.

    Returns:
        An `OutsideSpan`: `share` `[step point prompt]`, from 0 to 1, of the weights' squared norm that is outside the
        span; entry t of `point` is after the first t points. `by_point(step)` lists means with 95% intervals over
        prompts.

    Example:
        >>> print(measure_outside_span(Lens(model), prompts).by_point()[3])
    """
    steps, parts = (), []
    batches = list(prompt_batches(learner, prompts, copies=4))  # weights of all steps
    for part in progress_bar(batches, unit="batch", progress=progress, desc="span"):
        trajectory = trajectory_of(learner, part, with_weights=True)
        weights = trajectory.weights
        if weights is None or weights.shape[2] != part.n_context + 1:
            raise ValueError("measure_outside_span() needs the weights of every prefix: a causal model or an algorithm")
        steps, weights = trajectory.steps, weights.detach().double()
        parts.append(_shares_outside(weights, part.xs.to(weights)))
    return OutsideSpan(steps, torch.cat(parts, dim=-1))


def _shares_outside(
    weights: Float[Tensor, "step prompt point x y"], xs: Float[Tensor, "prompt point x"]
) -> Float[Tensor, "step point prompt"]:
    shares = []
    for t in range(xs.shape[1]):
        outside = weights[:, :, t]
        if t:
            # right singular vectors with a singular value above rounding are an orthonormal basis of the inputs' span,
            # also where points repeat; the others become 0, and project nothing out
            _, singular, directions = torch.linalg.svd(xs[:, :t], full_matrices=False)
            present = singular > 1e-10 * singular[:, :1]
            basis = directions * present[..., None]
            outside = outside - basis.mT @ (basis @ outside)
        shares.append(outside.square().sum((-2, -1)) / weights[:, :, t].square().sum((-2, -1)))
    return torch.stack(shares, dim=1)
