"""Paths between two models through weight space, straight or bent, and the loss along them."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import comb, cos, pi
from typing import Annotated, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call

from mechicl.analysis.weights import symmetries
from mechicl.analysis.weights.construction_families import FamilyName
from mechicl.analysis.weights.fits import fit_construction
from mechicl.base.arguments import Count, Natural, at_least, between, checked
from mechicl.base.progress import progress_bar
from mechicl.base.warning import warn
from mechicl.learners import squared_errors
from mechicl.models import HookedTransformer
from mechicl.models.transformer.fast import put_prompts_last
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, ratio_interval
from mechicl.tasks import LinearRegression
from mechicl.training import SOAP

PathKind = Literal["raw", "rescaled", "aligned", "lifted", "curved"]
"""How two models are brought near each other before a line is drawn between them; see `connect_modes`."""

PREPARE = {
    "raw": symmetries.express_in_products,
    "rescaled": symmetries.rescale_heads,
    "aligned": symmetries.align_heads,
    "lifted": symmetries.lift_heads,
}
ThreeOrMore = Annotated[int, at_least(3)]
PROMPTS_AT_ONCE = 4096  # prompts whose activations stay in a processor's cache
N_CONTROL, BENDING_RATE, BENDING_BATCH, BENDING_CLIP = 3, 1e-3, 512, 0.1


@dataclass(frozen=True, eq=False)
class WeightCurve:
    """Models between two models: a Bézier curve through weight space, straight with two control points."""

    template: HookedTransformer
    points: tuple[dict[str, Tensor], ...]  # weights by name of each control point, the first model first

    def weights(self, alpha: float | Tensor) -> dict[str, Tensor]:
        """Compute the weights at α: 0 is the first model, 1 the last."""
        degree = len(self.points) - 1
        shares = [comb(degree, i) * (1 - alpha) ** (degree - i) * alpha**i for i in range(degree + 1)]
        return {
            name: sum((share * point[name] for share, point in zip(shares, self.points, strict=True)), start=0 * first)
            for name, first in self.points[0].items()
        }

    def model(self, alpha: float) -> HookedTransformer:
        """Make the model at α."""
        made = HookedTransformer(self.template.cfg, initial_weights=self.template.initial_weights)
        weights = self.weights(alpha)
        with torch.no_grad():
            for name, weight in made.named_parameters():
                weight.copy_(weights[name])
        return made.eval()

    def squared_errors(self, prompts: Prompts, *alphas: float | Tensor) -> Float[Tensor, "alpha prompt"]:
        """Compute the query's squared errors at some α, averaged over the target's dimensions; differentiable."""
        tokens = self.template.encode(prompts)
        if len(alphas) > 1 and self.template.cfg.n_layers == 1:
            tokens = put_prompts_last(tokens)  # a copy, after which each run of a single layer takes half as long
        outputs = [
            functional_call(self.template, self.weights(alpha), (tokens,), {"at": "query"})[:, -1] for alpha in alphas
        ]
        return (torch.stack(outputs) - prompts.query.ys.to(outputs[0])).square().mean(-1)


@dataclass(frozen=True, eq=False)
class LossPath(Result):
    """Losses of the models on a path between two models; see `interpolate` and, for the kinds, `connect_modes`.

    Attributes:
        curve: the models; not saved with the result.
    """

    kind: str
    alphas: tuple[float, ...]
    squared_errors: Float[Tensor, "alpha prompt"]
    curve: WeightCurve | None = field(metadata={"stored": False}, default=None)

    def model(self, alpha: Annotated[float, between(-1000, 1000)]) -> HookedTransformer:
        """Make the model at α, from -1000 to 1000; a ValueError for a path loaded from a file, which has no models."""
        if self.curve is None:
            raise ValueError("a loaded path has no models: measure it again")
        return self.curve.model(alpha)

    def barrier(self) -> Interval:
        """Measure the largest loss above the line between the ends, `max_α L(α) - ((1-α) L(0) + α L(1))`.

        It is relative to the mean loss of the two ends (NaN if that is 0); 0 means that there is no barrier. The 95%
        interval is over prompts at the α where the mean excess is largest, and is widened for the choice of that α
        (Bonferroni's correction).
        """
        excess = self._excess()
        largest = excess[excess.mean(-1).argmax()]  # NaN if there is one
        return replace(self._relative(largest, 1 - 0.05 / max(len(excess) - 2, 1)), level=0.95)

    def midpoint_excess(self) -> Interval:
        """Measure the loss above the line between the ends at the α nearest 1/2, relative to the ends' mean loss."""
        middle = min(range(len(self.alphas)), key=lambda i: abs(self.alphas[i] - 0.5))
        return self._relative(self._excess()[middle])

    def _excess(self) -> Float[Tensor, "alpha prompt"]:
        alphas = self.squared_errors.new_tensor(self.alphas)[:, None]
        return self.squared_errors - ((1 - alphas) * self.squared_errors[0] + alphas * self.squared_errors[-1])

    def _relative(self, excess: Float[Tensor, "prompt"], level: float = 0.95) -> Interval:
        return ratio_interval(excess, (self.squared_errors[0] + self.squared_errors[-1]) / 2, level)


@dataclass(frozen=True, eq=False)
class ModeConnectivity(Result):
    """Paths of several kinds between the same two models; see `connect_modes`."""

    paths: dict[str, LossPath]
    fitted: dict[str, LossPath]

    def named_paths(self) -> dict[str, LossPath]:
        """Return all paths by name; those to the fitted construction are named "fitted, ..."."""
        return self.paths | {f"fitted, {kind}": path for kind, path in self.fitted.items()}

    def samples(self) -> dict[str, Float[Tensor, "alpha prompt"]]:
        """Return the squared errors along each path."""
        return {name: path.squared_errors for name, path in self.named_paths().items()}

    def barriers(self) -> dict[str, Interval]:
        """Measure the barrier of each path."""
        return {name: path.barrier() for name, path in self.named_paths().items()}

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """Make a table with one row per path and alpha: mean squared error and its interval."""
        tables = [path.to_dataframe(level).assign(path=name) for name, path in self.named_paths().items()]
        return pd.concat(tables, ignore_index=True)


@checked
def interpolate(
    a: HookedTransformer, b: HookedTransformer, prompts: Prompts, *, n_alphas: ThreeOrMore = 11,
    kind: Literal["raw", "rescaled", "aligned", "lifted"] = "rescaled",
) -> LossPath:  # fmt: skip
    """Measure losses along the straight line between the weights of two models, to see if they are the same solution.

    Weights are interpolated as the products `W_KQ = W_Q W_Kᵀ` and `W_PV = W_V W_O` of each head. Source: von Oswald et
    al. 2023, A.3.

    Args:
        a: a model on paired prompts without biases in attention.
        b: another model of the same shape, such as a construction.
        prompts: prompts to measure the losses on.
        n_alphas: number of models on the line, the ends included; an odd number has the midpoint among them.
        kind: symmetry that is removed first, see `connect_modes`.

    Returns:
        A `LossPath`: `alphas` (0 is a, 1 is b), `squared_errors` `[alpha prompt]` of the query; `midpoint_excess()` and
        `barrier()`, how much the loss is above the line between the ends' losses; `model(alpha)`.

    Example:
        >>> by_hand = constructions.gradient_descent(x_dim=10, n_context=10, step_size=0.61)
        >>> path = interpolate(load("lsa-1l"), by_hand, LinearRegression().sample(64, seed=1))
        >>> print(path.midpoint_excess())
    """
    symmetries.check_same_shape(a, b)
    path = measure_path(kind, straight_line(*PREPARE[kind](a, b)), prompts, n_alphas)
    _check_clip(a, b, prompts, path)
    return path


def _check_clip(a: HookedTransformer, b: HookedTransformer, prompts: Prompts, path: LossPath) -> None:
    """Warn if the models of a path clip tokens as `a` does, and `b` does not have the loss of its end."""
    if a.cfg.token_clip != b.cfg.token_clip:
        own, end = squared_errors(b, prompts).mean().item(), path.squared_errors[-1].mean().item()
        if not math.isclose(own, end, rel_tol=1e-3, abs_tol=1e-12):
            warn(f"models of the path have token_clip={a.cfg.token_clip!r} of a, with a loss of {end:.4g} at its end; "
                 f"b, with token_clip={b.cfg.token_clip!r}, has {own:.4g}")  # fmt: skip


def straight_line(a: HookedTransformer, b: HookedTransformer) -> WeightCurve:
    """Make the line between the weights of two models of one architecture."""
    ends = tuple({name: weight.detach() for name, weight in model.named_parameters()} for model in (a, b))
    return WeightCurve(a, ends)


@torch.no_grad()
def measure_path(kind: str, curve: WeightCurve, prompts: Prompts, n_alphas: int = 11) -> LossPath:
    """Measure losses at evenly spaced models of a curve."""
    alphas = torch.linspace(0, 1, n_alphas, dtype=torch.float64)
    prompts = prompts.to(torch.float64)
    errors = [curve.squared_errors(part, *alphas) for part in prompts.split(PROMPTS_AT_ONCE)]
    return LossPath(kind, tuple(alphas.tolist()), torch.cat(errors, dim=-1), curve)


@checked
def connect_modes(
    a: HookedTransformer,
    b: HookedTransformer,
    task: LinearRegression,
    *,
    kinds: Sequence[PathKind] | None = None,
    family: FamilyName | None = None,
    n_prompts: Count = 4096,
    bending_steps: Natural = 400,
    seed: int = 0,
    progress: bool | None = None,
) -> ModeConnectivity:
    """Measure the loss along paths between two models, after the removal of more and more symmetries.

    Paths run through the products `W_KQ = W_Q W_Kᵀ` and `W_PV = W_V W_O` of each head, which do not change under
    invertible maps between W_Q and W_K, or W_V and W_O. If a head is narrower than the stream, its products on the way
    may have a higher rank.

    - "raw": the straight line between the products W_KQ, W_PV;
    - "rescaled": each head scaled so that the mean diagonal of W_KQ on x is 1 (linear attention only);
    - "aligned": the second model's heads in the order, sign and scale nearest to the first's, hidden units likewise;
    - "lifted": both models with the heads of both, so that each layer's function moves linearly (except for layer
      norms, whose weights move too): no symmetry matters, but the models on the way have twice the heads;
    - "curved": from the aligned ends, a Bézier curve of three control points bent to the least mean loss on other
      prompts.

    With a family of constructions, the first model is also connected to the member whose layer outputs are nearest to
    its own (`layerwise` of `fit_construction`; for "newton" the nearest in weights). Source: von Oswald et al. 2023,
    section 3 and A.3; Garipov et al. 2018 for the curve; Entezari et al. 2021 for the matching of units.

    Args:
        a: a model on paired prompts (one token (x, y) per point) without biases in attention.
        b: another model of the same shape (it may have fewer heads): another seed, or a construction.
        task: task of the held-out prompts, and of those that a curve is bent on.
        kinds: kinds of paths; by default all, without "rescaled" if attention is not linear or has momentum over
            values.
        family: hand-written models to fit to the first model: "gd", "gd++", "pgd" (preconditioned gradient descent),
            each also with " per layer", or "newton".
        n_prompts: number of held-out prompts, and of prompts to fit the construction on.
        bending_steps: steps of the optimizer SOAP for "curved", each on 512 fresh prompts.
        seed: seed of the prompts to bend and fit on; the held-out prompts have `seed + 1`.

    Returns:
        A `ModeConnectivity`: `paths` has a `LossPath` by kind, `fitted` those to the fitted construction (empty without
        `family`), both on held-out prompts; `barriers()` has the barrier of each path by name.

    Example:
        >>> task, (a, b) = LinearRegression(), load_checkpoint("lsa-1l").models[:2]
        >>> connect_modes(a, b, task, kinds=("raw", "rescaled")).barriers()["rescaled"].mean < 0.01
        True
    """
    if kinds is None:
        trades = a.cfg.attention == "linear" and not symmetries.sums_values(a.cfg)
        kinds = [kind for kind in get_args(PathKind) if kind != "rescaled" or trades]
    if not kinds:
        raise ValueError("kinds must not be empty")
    symmetries.check_same_shape(a, b)
    held_out = task.sample(n_prompts, seed=seed + 1, dtype=torch.float64)

    def paths_to(other: HookedTransformer) -> dict[str, LossPath]:
        paths = {}
        for kind in kinds:
            curve = straight_line(*PREPARE["aligned" if kind == "curved" else kind](a, other))
            if kind == "curved":
                curve = bend(curve, task, steps=bending_steps, seed=seed, progress=progress)
            paths[kind] = measure_path(kind, curve, held_out)
        _check_clip(a, other, held_out, next(iter(paths.values())))
        return paths

    fitted = {}
    if family is not None:
        fit = fit_construction(a, family, task, refine=False, n_prompts=n_prompts, seed=seed)
        fitted = paths_to((fit.layerwise or fit.projected).models[0])
    return ModeConnectivity(paths_to(b), fitted)


@torch.enable_grad()
def bend(
    line: WeightCurve, task: LinearRegression, *, steps: int, seed: int = 0, progress: bool | None = None
) -> WeightCurve:
    """Bend a line to the Bézier curve with three control points that has the least mean loss over α.

    Every step draws fresh prompts: a curve can overfit a few thousand. Returns the line itself where bending does not
    help. Source: Garipov et al. 2018, with three control points in place of one.
    """
    generator, (first, last) = torch.Generator().manual_seed(seed), line.points
    # The control points start at even distances on the line and move in units of each tensor's size, so that one
    # learning rate suits all; tensors that the ends share stay.
    names = [name for name, start in first.items() if not torch.equal(start, last[name])]
    if not names:
        return line  # the ends are one model
    sizes = {name: (first[name].square() + last[name].square()).mean().sqrt() for name in names}
    shapes = [first[name].shape for _ in range(N_CONTROL) for name in names]
    moved = torch.zeros(1, sum(shape.numel() for shape in shapes), requires_grad=True)
    template = copy.deepcopy(line.template).float()

    def curve(template: HookedTransformer, dtype: torch.dtype) -> WeightCurve:
        moves, points = iter(moved[0].split([shape.numel() for shape in shapes])), [first]
        for i in range(1, N_CONTROL + 1):
            share = i / (N_CONTROL + 1)
            start = {name: (1 - share) * first[name] + share * last[name] for name in names}
            point = {n: w + sizes[n] * next(moves).view(w.shape).to(w.dtype) for n, w in start.items()}
            points.append(first | point)
        return WeightCurve(template, tuple({n: w.to(dtype) for n, w in point.items()} for point in (*points, last)))

    optimizer = SOAP(moved, shapes, lr=BENDING_RATE)
    for step in progress_bar(range(steps), unit="step", desc="bending", progress=progress):
        optimizer.param_groups[0]["lr"] = BENDING_RATE * min(1.0, (step + 1) / 20) * (1 + cos(pi * step / steps)) / 2
        prompts = task.sample(BENDING_BATCH, generator=generator, dtype=torch.float64)
        alpha = torch.rand((), generator=generator)
        optimizer.zero_grad()
        curve(template, torch.float32).squared_errors(prompts, alpha).mean().backward()
        torch.nn.utils.clip_grad_norm_([moved], BENDING_CLIP)
        optimizer.step()
    with torch.no_grad():
        bent = curve(line.template, next(iter(first.values())).dtype)
    bent = WeightCurve(line.template, (first, *bent.points[1:-1], last))
    check = task.sample(8192, generator=generator, dtype=torch.float64)
    before, after = (measure_path("", each, check, 9).barrier().mean for each in (line, bent))
    return bent if after < before else line  # the line also where a loss is NaN
