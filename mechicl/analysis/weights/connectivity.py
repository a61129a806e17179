"""Whether two models are connected: losses along several kinds of path between them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import get_args

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.weights.construction_families import FamilyName
from mechicl.analysis.weights.fits import fit_construction
from mechicl.analysis.weights.paths import PREPARE, LossPath, PathKind, WeightCurve, measure_path, straight_line
from mechicl.analysis.weights.symmetries import check_same_shape, sums_values
from mechicl.base.progress import progress_bar
from mechicl.models import HookedTransformer
from mechicl.statistics import Interval, Result
from mechicl.tasks import LinearRegression
from mechicl.training import SOAP

N_CONTROL, BENDING_RATE, BENDING_BATCH, BENDING_CLIP = 3, 1e-3, 512, 0.1


@dataclass(frozen=True, eq=False)
class ModeConnectivity(Result):
    """Paths of several kinds between the same two models.

    Attributes:
        paths: by kind.
        fitted: paths from the first model to the construction fitted to its weights, by kind; empty without a family.
    """

    paths: dict[str, LossPath]
    fitted: dict[str, LossPath]

    def named_paths(self) -> dict[str, LossPath]:
        """All paths; those to the fitted construction are named "fitted, ..."."""
        return self.paths | {f"fitted, {kind}": path for kind, path in self.fitted.items()}

    def samples(self) -> dict[str, Float[Tensor, "alpha prompt"]]:
        """The squared errors along each path."""
        return {name: path.squared_errors for name, path in self.named_paths().items()}

    def barriers(self) -> dict[str, Interval]:
        """Barrier of each path."""
        return {name: path.barrier() for name, path in self.named_paths().items()}

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """One row a path and alpha: mean squared error and its interval."""
        tables = [path.to_dataframe(level).assign(path=name) for name, path in self.named_paths().items()]
        return pd.concat(tables, ignore_index=True)


def connect_modes(
    a: HookedTransformer,
    b: HookedTransformer,
    task: LinearRegression,
    *,
    kinds: Sequence[PathKind] | None = None,
    family: FamilyName | None = None,
    n_alphas: int = 11,
    n_prompts: int = 4096,
    bending_steps: int = 400,
    seed: int = 0,
    progress: bool = True,
) -> ModeConnectivity:
    """Losses along paths between two models, after more and more of what does not matter has been taken out.

    Paths run through the products W_KQ and W_PV of each head. These do not change under invertible maps between W_Q and
    W_K or W_V and W_O; where a head is narrower than the stream, its products on the way may have a higher rank.

    - "raw": the straight line between the products W_KQ, W_PV as they are;
    - "rescaled": each head in the gauge where the mean diagonal of W_KQ is 1 (A.3; linear attention);
    - "aligned": the second model's heads in the order, sign and scale nearest to the first's, hidden units likewise;
    - "lifted": both models with the heads of both, so that each layer's function moves linearly: no symmetry matters,
      but the models on the way have twice the heads (layer norms keep no such promise: their weights move, too);
    - "curved": from the aligned ends, a Bézier curve of three control points bent to the least mean loss on other
      prompts.

    With a family, the first model is also connected to the construction fitted to it (the layerwise member of
    `fit_construction`, for Newton's method the projected one), by the same kinds of path.

    Args:
        a: a model on paired prompts without biases in attention.
        b: another of the same shape (it may have fewer heads): another seed, or a construction.
        task: for the held-out prompts, and for those that a curve is bent on.
        kinds: of paths; by default all, without "rescaled" where attention is not linear or sums values (momentum).
        family: of the construction to fit to the first model; see `fit_construction`.
        n_alphas: models on each path, the ends included.
        n_prompts: held-out prompts.
        bending_steps: of SOAP, 512 fresh prompts each, for "curved".
        seed: of the prompts to bend and fit on; the held-out ones have the next.
        progress: show a bar while bending.

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
        trades = a.cfg.attention == "linear" and not sums_values(a.cfg)
        kinds = [kind for kind in get_args(PathKind) if kind != "rescaled" or trades]
    unknown = [kind for kind in kinds if kind not in get_args(PathKind)]
    if unknown:
        raise ValueError(f"kinds must be among {list(get_args(PathKind))}, got {unknown}")
    if not kinds:
        raise ValueError("no kinds of path to measure")
    check_same_shape(a, b)
    held_out = task.sample(n_prompts, seed=seed + 1, dtype=torch.float64)

    def paths_to(other: HookedTransformer) -> dict[str, LossPath]:
        paths = {}
        for kind in kinds:
            curve = straight_line(*PREPARE["aligned" if kind == "curved" else kind](a, other))
            if kind == "curved":
                curve = bend(curve, task, steps=bending_steps, seed=seed, progress=progress)
            paths[kind] = measure_path(kind, curve, held_out, n_alphas)
        return paths

    fitted = {}
    if family is not None:
        fit = fit_construction(a, family, task, refine=False, n_prompts=n_prompts, seed=seed)
        fitted = paths_to((fit.layerwise or fit.projected).models[0])
    return ModeConnectivity(paths_to(b), fitted)


def bend(line: WeightCurve, task: LinearRegression, *, steps: int, seed: int = 0, progress: bool = True) -> WeightCurve:
    """The Bézier curve with three control points between the ends with the least mean loss over α.

    Every step draws fresh prompts: rare ones decide the loss of deep models, and a curve can be bent around any few
    thousand. The straight line itself where bending does not help.

    Source: Garipov et al. 2018, with three control points in place of one.
    """
    generator, (first, last) = torch.Generator().manual_seed(seed), line.points
    # The control points move, from even distances on the line, in units of each tensor's size, so that one learning
    # rate suits all; tensors that the ends share stay.
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
    return bent if after < before else line  # the line also where a loss is no number
