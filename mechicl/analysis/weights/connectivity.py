"""Paths between two models through weight space, and the loss along them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call
from tqdm.auto import tqdm

from mechicl.analysis.weights import symmetries
from mechicl.analysis.weights.construction_families import FamilyName
from mechicl.analysis.weights.fits import fit_construction
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, interval, ratio_interval
from mechicl.tasks import LinearRegression

PathKind = Literal["raw", "rescaled", "aligned", "lifted", "curved"]
"""See `connect_modes`."""
BENDING_RATE, BENDING_BATCH = 3e-3, 1024


@dataclass(frozen=True, eq=False)
class WeightCurve:
    """Models between two models: a Bézier curve through weight space, straight with two control points.

    Attributes:
        template: a model of the shape.
        points: weights by name, first model first.
    """

    template: HookedTransformer
    points: tuple[dict[str, Tensor], ...]

    def weights(self, alpha: float | Tensor) -> dict[str, Tensor]:
        """Weights at α: 0 is the first model, 1 the last."""
        beta = 1 - alpha
        shares = (beta, alpha) if len(self.points) == 2 else (beta * beta, 2 * alpha * beta, alpha * alpha)
        return {
            name: sum((share * point[name] for share, point in zip(shares, self.points, strict=True)), start=0 * own)
            for name, own in self.points[0].items()
        }

    def model(self, alpha: float) -> HookedTransformer:
        """The model at α."""
        made = HookedTransformer(self.template.cfg, initial_weights=self.template.initial_weights)
        weights = self.weights(alpha)
        with torch.no_grad():
            for name, weight in made.named_parameters():
                weight.copy_(weights[name])
        return made.eval()

    def squared_errors(self, prompts: Prompts, alpha: float | Tensor) -> Float[Tensor, "prompt"]:
        """Squared errors of the query's prediction at α, averaged over the target's dimensions; differentiable."""
        tokens = self.template.encode(prompts)
        outputs = functional_call(self.template, self.weights(alpha), (tokens,), {"at": "query"})[:, -1]
        return (outputs - prompts.query.ys.to(outputs)).square().mean(-1)


@dataclass(frozen=True, eq=False)
class LossPath:
    """Losses of the models between two models.

    Attributes:
        kind: how the models were brought near each other.
        alphas: 0 is the first model, 1 the second, `[alpha]`.
        squared_errors: on held-out prompts, `[alpha prompt]`, averaged over the target's dimensions.
        curve: the models.
    """

    kind: str
    alphas: Float[Tensor, "alpha"]
    squared_errors: Float[Tensor, "alpha prompt"]
    curve: WeightCurve

    def barrier(self) -> Interval:
        """The largest excess of the loss over the line between the ends, relative to the ends' mean loss.

        `max_α L(α) - ((1-α) L(0) + α L(1))`, with an interval over prompts at the α where the mean excess is largest.
        """
        excess = self._excess()
        return self._relative(excess[excess.mean(-1).argmax()])

    def midpoint_excess(self) -> Interval:
        """Loss at the α nearest 1/2 over the line between the ends there, relative to their mean loss."""
        return self._relative(self._excess()[(self.alphas - 0.5).abs().argmin()])

    def to_dataframe(self) -> pd.DataFrame:
        """One row an alpha: mean squared error and its interval."""
        rows = []
        for alpha, errors in zip(self.alphas.tolist(), self.squared_errors, strict=True):
            i = interval(errors)
            rows.append({"path": self.kind, "alpha": alpha, "mse": i.mean, "low": i.low, "high": i.high})
        return pd.DataFrame(rows)

    def _excess(self) -> Float[Tensor, "alpha prompt"]:
        alphas = self.alphas[:, None]
        return self.squared_errors - ((1 - alphas) * self.squared_errors[0] + alphas * self.squared_errors[-1])

    def _relative(self, excess: Float[Tensor, "prompt"]) -> Interval:
        return ratio_interval(excess, (self.squared_errors[0] + self.squared_errors[-1]) / 2)


@dataclass(frozen=True, eq=False)
class ModeConnectivity:
    """Paths of several kinds between the same two models.

    Attributes:
        paths: by kind.
        fitted: paths from the first model to the construction fitted to its weights, by kind; empty without a family.
    """

    paths: dict[str, LossPath]
    fitted: dict[str, LossPath]

    def barriers(self) -> dict[str, Interval]:
        """Barrier of each path; those to the fitted construction are named "fitted, ..."."""
        fitted = {f"fitted, {kind}": path.barrier() for kind, path in self.fitted.items()}
        return {kind: path.barrier() for kind, path in self.paths.items()} | fitted

    def to_dataframe(self) -> pd.DataFrame:
        """One row a path and alpha: mean squared error and its interval."""
        named = {**self.paths, **{f"fitted, {kind}": path for kind, path in self.fitted.items()}}
        return pd.concat([path.to_dataframe().assign(path=name) for name, path in named.items()], ignore_index=True)


def connect_modes(
    a: HookedTransformer,
    b: HookedTransformer,
    task: LinearRegression,
    *,
    kinds: Sequence[PathKind] | None = None,
    family: FamilyName | None = None,
    n_alphas: int = 11,
    n_prompts: int = 4096,
    bending_steps: int = 1000,
    seed: int = 0,
    progress: bool = False,
) -> ModeConnectivity:
    """Losses along paths between two models, after more and more of what does not matter has been taken out.

    Paths run through the products W_KQ and W_PV of each head. These do not change under invertible maps between W_Q and
    W_K or W_V and W_O; where a head is narrower than the stream, its products on the way may have a higher rank.

    - "raw": the straight line between the products W_KQ, W_PV as they are;
    - "rescaled": each head in the gauge where the mean diagonal of W_KQ is 1 (A.3; linear attention);
    - "aligned": the second model's heads in the order, sign and scale nearest to the first's, hidden units likewise;
    - "lifted": both models with the heads of both, so that each layer's function moves linearly: no symmetry matters,
      but the models on the way have twice the heads (layer norms keep no such promise: their weights move, too);
    - "curved": from the aligned ends, a quadratic Bézier curve bent to the least mean loss on other prompts.

    With a family, the first model is also connected to the construction fitted to it (the layerwise member of
    `fit_construction`, for Newton's method the projected one), by the same kinds of path.

    Args:
        a: a model on paired prompts without biases in attention, such as a trained one.
        b: another of the same shape (it may have fewer heads): another seed, or a construction.
        task: for the held-out prompts, and for those that a curve is bent on.
        kinds: of paths; by default all, without "rescaled" where attention is not linear or sums values (momentum).
        family: of the construction to fit to the first model; see `fit_construction`.
        n_alphas: models on each path, the ends included.
        n_prompts: held-out prompts.
        bending_steps: of Adam, 1024 fresh prompts each, for "curved".
        seed: of the prompts to bend and fit on; the held-out ones have the next.
        progress: show a progress bar while bending.

    Raises:
        ValueError: models of different shape or kind, no kinds of path, an unknown one or one that needs linear
            attention, a head without the gauge of "rescaled", or fewer than two alphas; and the errors of
            `fit_construction`.

    Source: von Oswald et al. 2023, section 3 and A.3; Garipov et al. 2018 for the curve; Entezari et al. 2021 for the
    matching of units.

    Example:
        >>> task, (a, b) = LinearRegression(), load_checkpoint("lsa-1l").models[:2]
        >>> connect_modes(a, b, task, kinds=("raw", "rescaled")).barriers()["rescaled"].mean < 0.01
        True
    """
    if kinds is None:
        trades = a.cfg.attention == "linear" and not symmetries.sums_values(a.cfg)
        kinds = [kind for kind in get_args(PathKind) if kind != "rescaled" or trades]
    unknown = [kind for kind in kinds if kind not in get_args(PathKind)]
    if unknown:
        raise ValueError(f"kinds must be among {list(get_args(PathKind))}, got {unknown}")
    if not kinds:
        raise ValueError("no kinds of path to measure")
    symmetries.check_same_shape(a, b)
    held_out = task.sample(n_prompts, seed=seed + 1, dtype=torch.float64)

    def paths_to(other: HookedTransformer) -> dict[str, LossPath]:
        found: dict[str, LossPath] = {}
        for kind in kinds:
            curve = _straight(*_PAIRS["aligned" if kind == "curved" else kind](a, other))
            if kind == "curved":
                curve = _bent(curve, task, bending_steps, seed, progress)
            found[kind] = _measured(kind, curve, held_out, n_alphas)
        return found

    fitted = {}
    if family is not None:
        fit = fit_construction(a, family, task, refine=False, n_prompts=n_prompts, seed=seed)
        fitted = paths_to((fit.layerwise or fit.projected).models[0])
    return ModeConnectivity(paths_to(b), fitted)


_PAIRS = {
    "raw": symmetries.express_in_products,
    "rescaled": symmetries.rescale_heads,
    "aligned": symmetries.align_heads,
    "lifted": symmetries.lift_heads,
}


def interpolate(
    a: HookedTransformer, b: HookedTransformer, prompts: Prompts, *, n_alphas: int = 11, kind: PathKind = "rescaled"
) -> LossPath:
    """Losses along the straight line between two models, in the weight products W_KQ and W_PV.

    Args:
        a: a model on paired prompts without biases in attention.
        b: another of the same shape, such as a construction.
        prompts: held-out prompts.
        n_alphas: number of models, the ends included; an odd number has the midpoint among them.
        kind: "raw", "rescaled" (linear attention), "aligned" or "lifted"; see `connect_modes`.

    Raises:
        ValueError: models of different shapes, fewer than two alphas, or another kind.

    Source: von Oswald et al. 2023, A.3.
    """
    if kind not in _PAIRS:
        raise ValueError(f"kind must be one of {list(_PAIRS)}, got {kind!r}")
    symmetries.check_same_shape(a, b)
    return _measured(kind, _straight(*_PAIRS[kind](a, b)), prompts, n_alphas)


def _straight(a: HookedTransformer, b: HookedTransformer) -> WeightCurve:
    ends = tuple({name: w.detach() for name, w in model.named_parameters()} for model in (a, b))
    return WeightCurve(a, ends)


@torch.no_grad()
def _measured(kind: str, curve: WeightCurve, prompts: Prompts, n_alphas: int) -> LossPath:
    if n_alphas < 2:
        raise ValueError(f"a path has at least its two ends, got n_alphas={n_alphas}")
    alphas = torch.linspace(0, 1, n_alphas, dtype=torch.float64)
    prompts = prompts.to(torch.float64)
    return LossPath(kind, alphas, torch.stack([curve.squared_errors(prompts, alpha) for alpha in alphas]), curve)


def _bent(line: WeightCurve, task: LinearRegression, steps: int, seed: int, progress: bool) -> WeightCurve:
    """The quadratic Bézier curve between the same ends with the least mean loss over α (Garipov et al. 2018).

    Every step draws fresh prompts: rare ones decide the loss of deep models, and a curve can be bent around any few
    thousand. The straight line itself where bending does not help.
    """
    generator, (first, last) = torch.Generator().manual_seed(seed), line.points
    middles = {name: (own + last[name]) / 2 for name, own in first.items() if not torch.equal(own, last[name])}
    sizes = {name: (first[name].square() + last[name].square()).mean().sqrt() for name in middles}
    moved = {name: torch.zeros_like(middle).requires_grad_() for name, middle in middles.items()}
    if not moved:
        return line  # the ends are one model

    def curve() -> WeightCurve:
        middle = {name: middles[name] + sizes[name] * moved[name] for name in middles}
        return WeightCurve(line.template, (first, first | middle, last))

    optimizer = torch.optim.Adam(moved.values(), lr=BENDING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for _ in tqdm(range(steps), desc="bending", disable=not progress):
        prompts = task.sample(BENDING_BATCH, generator=generator, dtype=torch.float64)
        alpha = torch.rand((), generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        curve().squared_errors(prompts, alpha).mean().backward()
        torch.nn.utils.clip_grad_norm_(moved.values(), 1.0)
        optimizer.step()
        schedule.step()
    bent = WeightCurve(line.template, tuple({n: w.detach() for n, w in point.items()} for point in curve().points))
    check = task.sample(8192, generator=generator, dtype=torch.float64)
    barriers = [_measured("", each, check, 9).barrier().mean for each in (line, bent)]
    return bent if barriers[1] < barriers[0] else line  # also where a loss is no number
