"""The loss along a straight line between two models, with or without the gauge corrected first."""

from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.weights import WeightProducts, weight_products, with_products
from mechicl.learners import Interval, interval
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts


@dataclass(frozen=True, eq=False)
class InterpolationPath:
    """Losses of the models between two models.

    Attributes:
        alphas: 0 is the first model, 1 the second, `[alpha]`.
        squared_errors: `[alpha prompt]`, averaged over the target's dimensions.
        rescaled: whether the gauge was corrected.
    """

    alphas: Float[Tensor, "alpha"]
    squared_errors: Float[Tensor, "alpha prompt"]
    rescaled: bool

    def barrier(self) -> Interval:
        """The largest excess of the loss over the line between the ends, relative to the ends' mean loss.

        The interval is over prompts, at the alpha where the mean excess is largest.
        """
        ends = (1 - self.alphas[:, None]) * self.squared_errors[0] + self.alphas[:, None] * self.squared_errors[-1]
        excess = self.squared_errors - ends
        worst = excess.mean(-1).argmax()
        return interval(excess[worst] / self._end_loss())

    def midpoint_excess(self) -> Interval:
        """Loss at the alpha nearest 1/2 over the mean loss of the ends, minus 1, with an interval over prompts."""
        middle = (self.alphas - 0.5).abs().argmin()
        ends = (self.squared_errors[0] + self.squared_errors[-1]) / 2
        return interval((self.squared_errors[middle] - ends) / self._end_loss())

    def to_dataframe(self) -> pd.DataFrame:
        """One row an alpha: mean squared error and its interval."""
        rows = []
        for alpha, errors in zip(self.alphas.tolist(), self.squared_errors, strict=True):
            i = interval(errors)
            rows.append({"alpha": alpha, "mse": i.mean, "low": i.low, "high": i.high, "rescaled": self.rescaled})
        return pd.DataFrame(rows)

    def _end_loss(self) -> Tensor:
        return (self.squared_errors[0].mean() + self.squared_errors[-1].mean()) / 2


def interpolate(
    a: HookedTransformer, b: HookedTransformer, prompts: Prompts, *, n_alphas: int = 11, rescale: bool = True
) -> InterpolationPath:
    """Losses of `(1 - α) a + α b`, in the weight products W_KQ and W_PV.

    Args:
        a: a linear-attention model on paired prompts.
        b: another with the same number of layers and heads, such as a construction.
        prompts: held-out prompts.
        n_alphas: number of models, the ends included; an odd number has the midpoint among them.
        rescale: bring both into the gauge where the mean diagonal of W_KQ's x-block is 1.

    Raises:
        ValueError: models that differ in more than their attention weights, or fewer than two alphas.

    Source: von Oswald et al. 2023, A.3.
    """
    if n_alphas < 2:
        raise ValueError(f"a path has at least its two ends, got n_alphas={n_alphas}")
    ends = [weight_products(a), weight_products(b)]
    if ends[0].W_KQ.shape != ends[1].W_KQ.shape or ends[0].x_dim != ends[1].x_dim:
        raise ValueError(
            f"models of different shape cannot be interpolated: products {tuple(ends[0].W_KQ.shape)} with "
            f"x_dim={ends[0].x_dim}, and {tuple(ends[1].W_KQ.shape)} with x_dim={ends[1].x_dim}"
        )
    for name in ("damping", "keys", "recurrent"):
        if getattr(a.cfg, name) != getattr(b.cfg, name):
            raise ValueError(f"the models differ in {name}: {getattr(a.cfg, name)} and {getattr(b.cfg, name)}")
    if not torch.equal(a.initial_weights.cpu().double(), b.initial_weights.cpu().double()):
        raise ValueError("the models differ in their initial weights W_0, which no path of products connects")
    if rescale:
        ends = [products.fixed() for products in ends]
    alphas = torch.linspace(0, 1, n_alphas, dtype=torch.float64)
    prompts = prompts.to(torch.float64)
    errors = []
    for alpha in alphas:
        between = WeightProducts(
            torch.lerp(ends[0].W_KQ, ends[1].W_KQ, alpha),
            torch.lerp(ends[0].W_PV, ends[1].W_PV, alpha),
            ends[0].x_dim,
            ends[0].y_dim,
        )
        with torch.no_grad():
            predictions = with_products(a, between).predict(prompts)
        errors.append((predictions - prompts.query.ys).square().mean(-1))
    return InterpolationPath(alphas, torch.stack(errors), rescale)
