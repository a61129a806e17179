"""Paths between two models through weight space, and the loss along them."""

from dataclasses import dataclass, field
from math import comb
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call

from mechicl.analysis.weights import symmetries
from mechicl.base.arguments import count_undefined
from mechicl.base.warning import warn
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, ratio_interval

PathKind = Literal["raw", "rescaled", "aligned", "lifted", "curved"]
"""How two models are brought near each other before a line is drawn between them; see `connect_modes`."""

PREPARE = {
    "raw": symmetries.express_in_products,
    "rescaled": symmetries.rescale_heads,
    "aligned": symmetries.align_heads,
    "lifted": symmetries.lift_heads,
}
FARTHEST = 1000.0
"""Of α: what lies beyond it on a curve is nothing but rounding."""


@dataclass(frozen=True, eq=False)
class WeightCurve:
    """Models between two models: a Bézier curve through weight space, straight with two control points.

    Any number of control points makes a curve; between the first and the last one it passes none of them.

    Attributes:
        template: a model of the shape.
        points: weights by name, first model first.
    """

    template: HookedTransformer
    points: tuple[dict[str, Tensor], ...]

    def weights(self, alpha: float | Tensor) -> dict[str, Tensor]:
        """Weights at α: 0 is the first model, 1 the last.

        Raises:
            ValueError: an α that is no single number, NaN, or more than 1,000 away from 0.
        """
        if isinstance(alpha, Tensor) and alpha.numel() != 1:
            raise ValueError(f"alpha must be one number, got a tensor {list(alpha.shape)}")
        place = float(alpha.detach() if isinstance(alpha, Tensor) else alpha)
        if not abs(place) <= FARTHEST:
            raise ValueError(f"alpha must be from {-FARTHEST:g} to {FARTHEST:g}, with models at 0 and 1, got {place:g}")
        degree = len(self.points) - 1
        shares = [comb(degree, i) * (1 - alpha) ** (degree - i) * alpha**i for i in range(degree + 1)]
        return {
            name: sum((share * point[name] for share, point in zip(shares, self.points, strict=True)), start=0 * first)
            for name, first in self.points[0].items()
        }

    def model(self, alpha: float) -> HookedTransformer:
        """The model at α."""
        made = HookedTransformer(self.template.cfg, initial_weights=self.template.initial_weights)
        weights = self.weights(alpha)
        if missing := [name for name, _ in made.named_parameters() if name not in weights]:
            raise ValueError(f"the weights of the points, at alpha={alpha}, lack {missing[0]!r}, which the model has")
        with torch.no_grad():
            for name, weight in made.named_parameters():
                weight.copy_(weights[name])
        if any(map(count_undefined, made.parameters())):
            warn(f"the model at alpha={alpha:.3g} has weights that are not finite", RuntimeWarning)
        return made.eval()

    def squared_errors(self, prompts: Prompts, alpha: float | Tensor) -> Float[Tensor, "prompt"]:
        """Squared errors of the query's prediction at α, averaged over the target's dimensions; differentiable."""
        tokens = self.template.encode(prompts)
        outputs = functional_call(self.template, self.weights(alpha), (tokens,), {"at": "query"})[:, -1]
        return (outputs - prompts.query.ys.to(outputs)).square().mean(-1)


@dataclass(frozen=True, eq=False)
class LossPath(Result):
    """Losses of the models between two models.

    Attributes:
        kind: how the models were brought near each other.
        alphas: 0 is the first model, 1 the second.
        squared_errors: on held-out prompts, `[alpha prompt]`, averaged over the target's dimensions.
        curve: the models; not saved with the result.
    """

    kind: str
    alphas: tuple[float, ...]
    squared_errors: Float[Tensor, "alpha prompt"]
    curve: WeightCurve | None = field(metadata={"stored": False}, default=None)

    def __post_init__(self):
        if len(self.alphas) != len(self.squared_errors):
            raise ValueError(f"squared_errors must have a row for each of {len(self.alphas)} alphas")

    def model(self, alpha: float) -> HookedTransformer:
        """The model at α.

        Raises:
            ValueError: the path was loaded from a file, which has no models.
        """
        if self.curve is None:
            raise ValueError("a loaded path has no models: measure it again")
        return self.curve.model(alpha)

    def barrier(self) -> Interval:
        """The largest excess of the loss over the line between the ends, relative to the ends' mean loss; NaN for 0.

        `max_α L(α) - ((1-α) L(0) + α L(1))`, with an interval over prompts at the α where the mean excess is largest.
        """
        excess = self._excess()
        return self._relative(excess[excess.mean(-1).argmax()])

    def midpoint_excess(self) -> Interval:
        """Loss at the α nearest 1/2 over the line between the ends there, relative to their mean loss; NaN for 0."""
        middle = min(range(len(self.alphas)), key=lambda i: abs(self.alphas[i] - 0.5))
        return self._relative(self._excess()[middle])

    def _excess(self) -> Float[Tensor, "alpha prompt"]:
        alphas = self.squared_errors.new_tensor(self.alphas)[:, None]
        return self.squared_errors - ((1 - alphas) * self.squared_errors[0] + alphas * self.squared_errors[-1])

    def _relative(self, excess: Float[Tensor, "prompt"]) -> Interval:
        return ratio_interval(excess, (self.squared_errors[0] + self.squared_errors[-1]) / 2)


def interpolate(
    a: HookedTransformer, b: HookedTransformer, prompts: Prompts, *, n_alphas: int = 11, kind: PathKind = "rescaled"
) -> LossPath:
    """Losses along the straight line between two models, in the weight products W_KQ and W_PV.

    Args:
        a: a model on paired prompts without biases in attention.
        b: another of the same shape, such as a construction.
        prompts: held-out prompts.
        n_alphas: models on the line, the ends included; an odd number has the midpoint among them.
        kind: "raw", "rescaled" (linear attention), "aligned" or "lifted"; see `connect_modes`.

    Raises:
        ValueError: models of different shapes, fewer than two alphas, or another kind.

    Source: von Oswald et al. 2023, A.3.

    Example:
        >>> by_hand = constructions.gradient_descent(x_dim=10, n_context=10, step_size=0.61)
        >>> path = interpolate(load("lsa-1l"), by_hand, LinearRegression().sample(64, seed=1))
        >>> print(path.midpoint_excess())
    """
    if kind not in PREPARE:
        raise ValueError(f"kind must be one of {list(PREPARE)}, got {kind!r}")
    symmetries.check_same_shape(a, b)
    return measure_path(kind, straight_line(*PREPARE[kind](a, b)), prompts, n_alphas)


def straight_line(a: HookedTransformer, b: HookedTransformer) -> WeightCurve:
    """The line between the weights of two models of one architecture."""
    ends = tuple({name: weight.detach() for name, weight in model.named_parameters()} for model in (a, b))
    return WeightCurve(a, ends)


@torch.no_grad()
def measure_path(kind: str, curve: WeightCurve, prompts: Prompts, n_alphas: int) -> LossPath:
    """Losses at evenly spaced models of a curve."""
    if n_alphas < 2:
        raise ValueError(f"a path has at least its two ends, got n_alphas={n_alphas}")
    alphas = torch.linspace(0, 1, n_alphas, dtype=torch.float64)
    prompts = prompts.to(torch.float64)
    errors = torch.stack([curve.squared_errors(prompts, alpha) for alpha in alphas])
    return LossPath(kind, tuple(alphas.tolist()), errors, curve)
