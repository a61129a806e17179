"""How far a learner depends on the order of its context's points."""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import at_least, checked
from mechicl.base.progress import progress_bar
from mechicl.learners import Learner
from mechicl.learners.learners import query_predictions
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, ratio_interval


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
