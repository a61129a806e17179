"""Fit a construction's free parameters to trained weights: closed-form projections, then matching of predictions."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call

from mechicl.analysis.weights.construction_families import (
    ConstructionFamily,
    FamilyName,
    family_for,
    fit_layer_outputs,
    project_weights,
)
from mechicl.analysis.weights.products import WeightProducts
from mechicl.base.arguments import Count, checked
from mechicl.base.optimizers import LBFGS
from mechicl.checkpoints.study import takes_study
from mechicl.learners import prompt_batches
from mechicl.models import HookedTransformer
from mechicl.models.wrapping.wrapped import refuse_wrapped
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, ratio_interval, storable
from mechicl.tasks import LinearRegression


@storable
@dataclass(frozen=True, eq=False)
class Members:
    """One member of a family for each trained model, compared with that model on held-out prompts."""

    parameters: dict[str, Tensor]  # name to values `[seed ...]`; a parameter per layer has the layer on its second axis
    # squared difference of predictions from the trained model's, averaged over the target's dimensions.
    squared_distances: Float[Tensor, "seed prompt"]
    squared_errors: Float[Tensor, "seed prompt"]  # squared errors of predictions, averaged likewise
    # the members as models, float64, one per seed; not saved with a result.
    models: list[HookedTransformer] = field(metadata={"stored": False}, default_factory=list)


@dataclass(frozen=True, eq=False)
class ConstructionFit(Result):
    """A family of constructions fitted to trained weights, seed by seed. Samples are seeds.

    Attributes:
        beta: the gauge of each head, `[seed layer head]`: W_KQ / β and W_PV β are compared.
        products: the trained products in that gauge, one per seed, without the parts that predictions cannot depend on.
        nearest: the family's products that are nearest to them, one per seed: those of the projected member, or, if the
            model has more heads than the family, the nearest to each layer's head separately.
        distance_KQ: Frobenius distance of W_KQ from the nearest over the norm of the nearest, `[seed layer head]`;
            large for heads that hardly act.
        distance_PV: the same for W_PV.
        projected: the members nearest to the weights, in closed form.
        layerwise: the members whose layer outputs are nearest to the model's, in closed form; None for Newton's
            method, whose layers have MLPs.
        matched: the members nearest to the predictions, by optimisation from the projected ones; None if not requested.
        squared_errors: squared errors of the trained models on the held-out prompts.
    """

    family: str
    beta: Float[Tensor, "seed layer head"]
    products: list[WeightProducts]
    nearest: list[WeightProducts]
    distance_KQ: Float[Tensor, "seed layer head"]
    distance_PV: Float[Tensor, "seed layer head"]
    projected: Members
    layerwise: Members | None
    matched: Members | None
    squared_errors: Float[Tensor, "seed prompt"]
    squared_predictions: Float[Tensor, "seed prompt"]

    @property
    def best(self) -> Members:
        """The matched members, or the projected ones if none were matched."""
        return self.projected if self.matched is None else self.matched

    def samples(self) -> dict[str, Float[Tensor, "seed"]]:
        """Return each entry of each parameter of `best`, by name and place: `step_size`, `preconditioner[0,0,1]`."""
        entries = {}
        for name, values in self.best.parameters.items():
            for place in np.ndindex(*values.shape[1:]):
                label = f"{name}[{','.join(map(str, place))}]" if values[0].numel() > 1 else name
                entries[label] = values[(slice(None), *place)]
        return entries

    def relative_distances(self, members: Members | None = None, level: float = 0.95) -> list[Interval]:
        """Measure each seed's squared distance of predictions over the trained model's mean squared prediction."""
        distances = (self.best if members is None else members).squared_distances
        return [ratio_interval(d, p, level) for d, p in zip(distances, self.squared_predictions, strict=True)]

    def loss_ratios(self, members: Members | None = None) -> list[Interval]:
        """Measure the members' loss over the trained models', for each seed."""
        errors = (self.best if members is None else members).squared_errors
        return [ratio_interval(e, trained) for e, trained in zip(errors, self.squared_errors, strict=True)]

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """Make a table, one row per seed and kind of member: loss, its ratio to the trained one, relative distance."""
        rows = []
        by_kind = {"projected": self.projected, "layerwise": self.layerwise, "matched": self.matched}
        for kind, members in ((kind, members) for kind, members in by_kind.items() if members is not None):
            pairs = zip(self.loss_ratios(members), self.relative_distances(members, level), strict=True)
            for seed, (ratio, distance) in enumerate(pairs):
                rows.append({
                    "family": self.family, "member": kind, "model": seed,
                    "mse": members.squared_errors[seed].mean().item(), "loss_ratio": ratio.mean,
                    **distance.columns("relative_distance"),
                })  # fmt: skip
        return pd.DataFrame(rows)


@takes_study
@checked
def fit_construction(
    models: HookedTransformer | Sequence[HookedTransformer],
    family: FamilyName,
    task: LinearRegression,
    *,
    refine: bool = True,
    n_prompts: Count = 4096,
    seed: int = 0,
) -> ConstructionFit:
    """Fit the free parameters of a family of constructions (weights that run an algorithm exactly) to trained weights.

    Each model gets up to three members of the family. The projected one is nearest in weights, after each head is
    rescaled like the family's: `W_Q W_Kᵀ / β` with `β W_V W_O` is the same head for every β. The layerwise one is
    nearest in the layers' outputs on the model's own streams. The matched one, found from the projected one by
    optimisation, has the least squared distance between predictions. Source: von Oswald et al. 2023, A.3, A.4 and A.10.

    Args:
        models: a trained model, or one per seed, all with the same config; on paired prompts (one token (x, y) per
            point), W_0 = 0.
        family: "gd" (one step size), "gd++" (and one γ), either "... per layer", "pgd" (a preconditioner `[x x]`),
            "pgd per layer", or "newton" (α of a model in the construction's own shape).
        task: task whose prompts predictions are matched on, and measured on.
        refine: also find the matched member.
        n_prompts: number of prompts to match on, and of held-out prompts.
        seed: seed of the prompts to match on; the held-out prompts have `seed + 1`.

    Returns:
        A `ConstructionFit` with the members `projected`, `layerwise`, `matched`, and `best`, each with `parameters` by
        name `[seed ...]` and `models`. `relative_distances()` and `loss_ratios()` compare `best` with the trained ones.

    Example:
        >>> task = LinearRegression()
        >>> fit = fit_construction(load("lsa-1l"), "gd", task)
        >>> round(fit.best.parameters["step_size"].item(), 2)
        0.61
    """
    refuse_wrapped(models, "constructions are fitted to the weights")
    trained = [models] if isinstance(models, HookedTransformer) else list(models)
    if not trained:
        raise ValueError("models must not be empty")
    for model in trained:
        if model.cfg.to_dict() != trained[0].cfg.to_dict():
            raise ValueError("models of different configs: fit them one by one")
        if model.cfg.prompt_format == "paired" and model.initial_weights.any():
            raise ValueError(f"constructions start at W_0 = 0; this model has {model.initial_weights.tolist()}")
    constructions = family_for(family, trained[0].cfg)
    fitting, held_out = (task.sample(n_prompts, seed=seed + i, dtype=torch.float64) for i in range(2))
    predictions = [_predict(model, held_out) for model in trained]

    def members(parameters: Sequence[Float[Tensor, "parameter"]]) -> Members:
        rows = torch.stack(list(parameters))
        models = [constructions.member(row) for row in rows]
        by_members = [_predict(model, held_out) for model in models]
        distances = [(a - b).square().mean(-1) for a, b in zip(by_members, predictions, strict=True)]
        errors = [(predicted - held_out.query.ys).square().mean(-1) for predicted in by_members]
        return Members(constructions.named(rows), torch.stack(distances), torch.stack(errors), models)

    projections = [project_weights(constructions, model) for model in trained]
    layerwise = matched = None
    if constructions.template.cfg.d_mlp is None:  # an MLP's output is not the heads'
        layerwise = members([fit_layer_outputs(constructions, model, fitting) for model in trained])
    if refine:
        pairs = zip(trained, projections, strict=True)
        matched = members(
            [match_predictions(constructions, p.parameters, fitting, _predict(model, fitting)) for model, p in pairs]
        )
    return ConstructionFit(
        family=family,
        beta=torch.stack([projection.beta for projection in projections]),
        products=[projection.products for projection in projections],
        nearest=[projection.nearest for projection in projections],
        distance_KQ=torch.stack([projection.distance_KQ for projection in projections]),
        distance_PV=torch.stack([projection.distance_PV for projection in projections]),
        projected=members([projection.parameters for projection in projections]),
        layerwise=layerwise,
        matched=matched,
        squared_errors=torch.stack([(p - held_out.query.ys).square().mean(-1) for p in predictions]),
        squared_predictions=torch.stack([p.square().mean(-1) for p in predictions]),
    )


def match_predictions(
    family: ConstructionFamily, start: Float[Tensor, "parameter"], prompts: Prompts, targets: Float[Tensor, "prompt y"]
) -> Float[Tensor, "parameter"]:
    """Find the parameters with the least squared distance of predictions from targets (L-BFGS in float64)."""
    tokens = family.template.encode(prompts)
    # In units of each parameter's own size, so that one step length suits all of them; one that starts near 0 gets a
    # tenth of the largest as its unit.
    size = start.abs().max().item()
    unit = start.abs().clamp(min=0.1 * size) if size else torch.ones_like(start)
    moved = torch.zeros_like(start).requires_grad_()
    optimizer = LBFGS(
        [moved], max_iter=300, tolerance_grad=1e-11, tolerance_change=1e-14, history_size=50,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    best, least = start, float("inf")

    def closure() -> Tensor:
        nonlocal best, least
        optimizer.zero_grad()
        products = family.products(start + unit * moved)
        weights = {}
        for layer, (W_KQ, W_PV) in enumerate(zip(products.W_KQ, products.W_PV, strict=True)):
            if layer == 0 or not family.template.cfg.recurrent:
                weights |= {f"blocks.{layer}.attn.W_Q": W_KQ, f"blocks.{layer}.attn.W_V": W_PV}
        outputs = functional_call(family.template, weights, (tokens,), {"at": "query"})[:, -1]
        loss = (outputs - targets).square().mean()
        loss.backward()
        if loss.item() < least:  # a line search may end elsewhere where the loss is all rounding, or overflows
            best, least = (start + unit * moved).detach(), loss.item()
        return loss

    optimizer.step(closure)
    return best


@torch.no_grad()
def _predict(model: HookedTransformer, prompts: Prompts) -> Float[Tensor, "prompt y"]:
    return torch.cat([model.predict(part).cpu().double() for part in prompt_batches(model, prompts)])
