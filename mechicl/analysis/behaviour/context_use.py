"""How a learner uses its context: forgetting, and dependence on the order of the points."""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.layers.layer_learners import LayerLearner, Lens
from mechicl.base.arguments import at_least, checked
from mechicl.base.progress import progress_bar
from mechicl.learners import Learner, prompt_batches
from mechicl.learners.learners import predictions_at, query_predictions
from mechicl.models import PromptedModel
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, ratio_interval


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
