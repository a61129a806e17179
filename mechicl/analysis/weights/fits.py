"""Fit a construction's free parameters to trained weights: closed-form projection, then matching of predictions."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call

from mechicl.analysis.weights.construction_families import Family, FamilyName, family_for
from mechicl.analysis.weights.products import WeightProducts, read_weight_products, replace_products
from mechicl.learners import prompt_batches
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, interval, ratio_interval
from mechicl.tasks import LinearRegression


@dataclass(frozen=True, eq=False)
class Members:
    """One member of a family for each trained model, and how it compares with that model on held-out prompts.

    Attributes:
        parameters: name to values `[seed ...]`; a parameter that is one a layer has the layer on its second axis.
        models: the members as models, float64, one a seed.
        squared_distances: squared difference of their predictions from the trained model's, `[seed prompt]`, averaged
            over the target's dimensions.
        squared_errors: of their predictions, `[seed prompt]`, likewise.
    """

    parameters: dict[str, Tensor]
    models: list[HookedTransformer]
    squared_distances: Float[Tensor, "seed prompt"]
    squared_errors: Float[Tensor, "seed prompt"]


@dataclass(frozen=True, eq=False)
class ConstructionFit:
    """A family of constructions fitted to trained weights, seed by seed.

    Attributes:
        family: its name.
        beta: the gauge that was divided out of each head, `[seed layer head]`: W_KQ / β and W_PV β are compared.
        products: the trained products in that gauge, one a seed, without the parts that predictions cannot depend on.
        nearest: the products of the family that are nearest to them, one a seed: those of the projected member, or,
            where the model has more heads than the family, the nearest to each layer's head by itself.
        distance_KQ: Frobenius distance of W_KQ from the nearest over the norm of the nearest, `[seed layer head]`;
            large for heads that hardly act.
        distance_PV: the same for W_PV.
        projected: the members nearest to the weights, in closed form.
        layerwise: the members whose layers write what the model's layers write, in closed form; None for Newton's
            method, whose layers have MLPs.
        matched: the members nearest to the predictions, from there; None if that was not asked for.
        squared_errors: of the trained models on the held-out prompts, `[seed prompt]`.
        squared_predictions: the trained models' squared predictions, `[seed prompt]`.
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
        """The matched members, or the projected ones where nothing was matched."""
        return self.projected if self.matched is None else self.matched

    def intervals(self) -> dict[str, Interval]:
        """Each entry of each parameter of `best`, by name and place, with its interval over seeds."""
        found = {}
        for name, seeds_first in self.best.parameters.items():
            for place in np.ndindex(*seeds_first.shape[1:]):
                label = f"{name}[{','.join(map(str, place))}]" if seeds_first[0].numel() > 1 else name
                found[label] = interval(seeds_first[(slice(None), *place)])
        return found

    def relative_distances(self, members: Members | None = None) -> list[Interval]:
        """Squared distance of predictions over the trained model's squared predictions, one a seed, over prompts."""
        distances = (self.best if members is None else members).squared_distances
        return [ratio_interval(d, p) for d, p in zip(distances, self.squared_predictions, strict=True)]

    def loss_ratios(self, members: Members | None = None) -> list[Interval]:
        """The members' loss over the trained models', one a seed, over prompts."""
        errors = (self.best if members is None else members).squared_errors
        return [ratio_interval(e, own) for e, own in zip(errors, self.squared_errors, strict=True)]

    def to_dataframe(self) -> pd.DataFrame:
        """One row a seed and kind of member: loss, loss over the trained model's, relative distance of predictions."""
        rows = []
        for kind, members in (("projected", self.projected), ("layerwise", self.layerwise), ("matched", self.matched)):
            if members is None:
                continue
            for seed, (ratio, distance) in enumerate(
                zip(self.loss_ratios(members), self.relative_distances(members), strict=True)
            ):
                rows.append({
                    "family": self.family, "member": kind, "model": seed,
                    "mse": members.squared_errors[seed].mean().item(), "loss_ratio": ratio.mean,
                    "relative_distance": distance.mean, "low": distance.low, "high": distance.high,
                })  # fmt: skip
        return pd.DataFrame(rows)

    def blocks(self) -> pd.DataFrame:
        """Relative distance of each block of the products, a row a seed, layer, head, product and block.

        A block is named by what it reads and writes (W_PV), or by the query's and the key's part (W_KQ); its distance
        is relative to the norm of the whole nearest product. Dimensions of the stream beside x and y are left out.
        """
        rows = []
        for seed, (products, nearest) in enumerate(zip(self.products, self.nearest, strict=True)):
            d = products.x_dim
            parts = {"x": slice(0, d), "y": slice(d, d + products.y_dim)}
            for name in ("W_KQ", "W_PV"):
                own, theirs = getattr(products, name), getattr(nearest, name)
                for layer, head in torch.cartesian_prod(*map(torch.arange, own.shape[:2])).tolist():
                    other = theirs[layer, head]
                    for first, rows_of in parts.items():
                        for second, columns in parts.items():
                            difference = (own[layer, head] - other)[rows_of, columns].norm() / other.norm()
                            rows.append({
                                "model": seed, "layer": layer, "head": head, "product": name,
                                "block": f"{first} to {second}", "distance": difference.item(),
                            })  # fmt: skip
        return pd.DataFrame(rows)


def fit_construction(
    models: HookedTransformer | Sequence[HookedTransformer],
    family: FamilyName,
    task: LinearRegression,
    *,
    refine: bool = True,
    n_prompts: int = 4096,
    seed: int = 0,
) -> ConstructionFit:
    """Fit the free parameters of a family of constructions to trained weights.

    Each head is first brought into the gauge of the family, its scale β chosen such that β times the construction's
    product without parameters is nearest to the model's (for gradient descent: the mean diagonal of W_KQ's x-block is
    1). There the family is affine in its parameters, and the least-squares projection has a closed form; several heads
    add up. Entries that predictions cannot depend on are left out. That is the projected member. A second one, also in
    closed form and free of any gauge, is nearest in what each layer writes on x and on y, given the model's own stream
    before it, relative to what the model writes there on each prompt. From the projection the parameters are then moved
    to the least squared distance between the member's predictions and the model's: the matched member.

    Args:
        models: a trained model, or one a seed, with one config.
        family: "gd" (one step size), "gd++" (and one γ), either "... per layer", "pgd" (a preconditioner `[x x]`),
            "pgd per layer", or "newton" (α of a model in the construction's own shape).
        task: for the prompts that predictions are matched on, and others that they are compared on.
        refine: also match predictions.
        n_prompts: prompts to match on, and held-out prompts.
        seed: of the prompts to match on; the held-out ones have the next.

    Raises:
        ValueError: no models, models of different configs, an unknown family or one that the architecture cannot
            express, initial weights W_0 other than 0, or a head without a gauge.

    Source: von Oswald et al. 2023, A.3, A.4 and A.10.

    Example:
        >>> task = LinearRegression()
        >>> fit = fit_construction(load("lsa-1l"), "gd", task)
        >>> round(fit.best.parameters["step_size"].item(), 2)
        0.61
    """
    trained = [models] if isinstance(models, HookedTransformer) else list(models)
    _check_models(trained)
    if n_prompts < 1:
        raise ValueError(f"n_prompts must be at least 1, got {n_prompts}")
    members_of = family_for(family, trained[0].cfg)
    fitting, held_out = (task.sample(n_prompts, seed=seed + i, dtype=torch.float64) for i in range(2))
    readings = [_project(members_of, model) for model in trained]
    parameters = torch.stack([reading.parameters for reading in readings])
    predictions = [_predict(model, held_out) for model in trained]
    projected = _members(members_of, parameters, predictions, held_out)
    layerwise = None
    if members_of.template.cfg.d_mlp is None:  # what an MLP writes is not the heads'
        by_layer = torch.stack([_layerwise(members_of, model, fitting) for model in trained])
        layerwise = _members(members_of, by_layer, predictions, held_out)
    matched = None
    if refine:
        found = [
            best_member(members_of, start, fitting, _predict(model, fitting))
            for model, start in zip(trained, parameters, strict=True)
        ]
        matched = _members(members_of, torch.stack(found), predictions, held_out)
    return ConstructionFit(
        family=family,
        beta=torch.stack([reading.beta for reading in readings]),
        products=[reading.products for reading in readings],
        nearest=[reading.nearest for reading in readings],
        distance_KQ=torch.stack([reading.distance_KQ for reading in readings]),
        distance_PV=torch.stack([reading.distance_PV for reading in readings]),
        projected=projected,
        layerwise=layerwise,
        matched=matched,
        squared_errors=torch.stack([(p - held_out.query.ys).square().mean(-1) for p in predictions]),
        squared_predictions=torch.stack([p.square().mean(-1) for p in predictions]),
    )


def best_member(
    family: Family,
    start: Float[Tensor, "parameter"],
    prompts: Prompts,
    targets: Float[Tensor, "prompt y"],
    max_iterations: int = 300,
) -> Float[Tensor, "parameter"]:
    """Parameters, from a start, with the least squared distance of predictions from targets (L-BFGS in float64)."""
    tokens = family.template.encode(prompts)
    size = start.abs().max().item()
    scale = start.abs().clamp(min=0.1 * size) if size else torch.ones_like(start)
    moved = torch.zeros_like(start).requires_grad_()  # in units of each parameter's own size
    optimizer = torch.optim.LBFGS(
        [moved], max_iter=max_iterations, tolerance_grad=1e-11, tolerance_change=1e-14, history_size=50,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def loss() -> Tensor:
        products = family.products(start + scale * moved)
        weights = {}
        for layer, (W_KQ, W_PV) in enumerate(zip(products.W_KQ, products.W_PV, strict=True)):
            if layer == 0 or not family.template.cfg.recurrent:
                weights |= {f"blocks.{layer}.attn.W_Q": W_KQ, f"blocks.{layer}.attn.W_V": W_PV}
        outputs = functional_call(family.template, weights, (tokens,), {"at": "query"})[:, -1]
        return (outputs - targets).square().mean()

    best, least = start, float("inf")

    def closure() -> Tensor:
        nonlocal best, least
        optimizer.zero_grad()
        value = loss()
        value.backward()
        if value.item() < least:  # a line search may end elsewhere where the loss is all rounding, or overflows
            best, least = (start + scale * moved).detach(), value.item()
        return value

    optimizer.step(closure)
    return best


@dataclass(frozen=True, eq=False)
class _Reading:
    """One model's projection on a family."""

    parameters: Tensor
    beta: Tensor
    products: WeightProducts
    nearest: WeightProducts
    distance_KQ: Tensor
    distance_PV: Tensor


def _project(family: Family, model: HookedTransformer) -> _Reading:
    cfg, raw = model.cfg, read_weight_products(model)
    looped = cfg.recurrent
    own, base = raw.without_unread_parts(looped), family.base.without_unread_parts(looped)
    bases = [
        WeightProducts(W_KQ, W_PV, raw.x_dim, raw.y_dim).without_unread_parts(looped)
        for W_KQ, W_PV in zip(family.basis_KQ, family.basis_PV, strict=True)
    ]
    basis_KQ, basis_PV = (torch.stack([getattr(b, name) for b in bases]) for name in ("W_KQ", "W_PV"))
    n_heads, size = own.W_KQ.shape[1], base.W_KQ.shape[1]
    # the product that no parameter moves fixes the gauge
    if not basis_KQ.any():
        along, norm = _inner(own.W_KQ, base.W_KQ), _inner(base.W_KQ, base.W_KQ)
        beta = torch.where(norm > 0, along / norm, 1.0)
    else:
        along, norm = _inner(own.W_PV, base.W_PV), _inner(base.W_PV, base.W_PV)
        beta = torch.where(norm > 0, norm / along, 1.0)
    if not (beta.isfinite() & (beta != 0)).all():
        raise ValueError(f"no gauge for a head without a part along the construction's: β is {beta.flatten().tolist()}")
    scale = beta[..., None, None]
    fixed = WeightProducts(own.W_KQ / scale, own.W_PV * scale, raw.x_dim, raw.y_dim)
    # a construction with one head is compared with each head of the model; what the heads do adds up
    groups = [slice(0, n_heads)] if size == n_heads else [slice(h, h + 1) for h in range(n_heads)]
    total, targets_KQ, targets_PV = torch.zeros(family.n_parameters, dtype=torch.float64), [], []
    for group in groups:
        rest_KQ, rest_PV = fixed.W_KQ[:, group] - base.W_KQ, fixed.W_PV[:, group] - base.W_PV
        found = _least_squares(basis_KQ, basis_PV, rest_KQ, rest_PV)
        total = total + found
        each = [found] * len(own.W_KQ)
        if len(groups) > 1:  # several heads share a step, and may share it otherwise in each layer
            each = [
                _least_squares(basis_KQ[:, i], basis_PV[:, i], rest_KQ[i], rest_PV[i]) for i in range(len(own.W_KQ))
            ]
        targets_KQ.append(base.W_KQ + torch.einsum("lp,plhij->lhij", torch.stack(each), basis_KQ))
        targets_PV.append(base.W_PV + torch.einsum("lp,plhij->lhij", torch.stack(each), basis_PV))
    target_KQ, target_PV = torch.cat(targets_KQ, dim=1), torch.cat(targets_PV, dim=1)
    return _Reading(
        total,
        beta,
        fixed,
        WeightProducts(target_KQ, target_PV, raw.x_dim, raw.y_dim),
        _relative_distance(fixed.W_KQ, target_KQ),
        _relative_distance(fixed.W_PV, target_PV),
    )


@torch.no_grad()
def _layerwise(
    family: Family, model: HookedTransformer, prompts: Prompts, batch_size: int = 256
) -> Float[Tensor, "parameter"]:
    """The member whose layers write most nearly what the model's write on the same streams (weighted least squares).

    The squared distance on x and on y is divided, prompt by prompt, by the square of what the model writes there on all
    tokens, so that no prompt with large eigenvalues outweighs the others.
    """
    cfg, count = model.cfg, family.n_parameters
    model = replace_products(model, read_weight_products(model))  # in float64
    factor = 1 / (cfg.n_context or 1) if cfg.normalize_by_context else 1.0
    parts = (slice(0, family.base.x_dim), slice(family.base.x_dim, family.base.x_dim + family.base.y_dim))
    normal, right = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)

    def written(stream: Tensor, W_KQ: Tensor, W_PV: Tensor) -> Tensor:
        context = stream[:, :-1]
        second = context.mT @ context
        return factor * torch.stack([stream @ K @ second @ V for K, V in zip(W_KQ, W_PV, strict=True)]).sum(0)

    for part in prompts.split(batch_size):
        streams = list(model.layer_streams(part, at="positions"))
        for layer, (before, after) in enumerate(itertools.pairwise(streams)):
            last = layer == cfg.n_layers - 1
            base_KQ, base_PV = family.base.W_KQ[layer], family.base.W_PV[layer]
            by_base = written(before, base_KQ, base_PV)
            rest = after - before - by_base
            moved = [p for p in range(count) if family.basis_KQ[p, layer].any() or family.basis_PV[p, layer].any()]
            if not moved:
                continue
            gains = torch.stack(
                [
                    written(before, base_KQ + family.basis_KQ[p, layer], base_PV + family.basis_PV[p, layer]) - by_base
                    for p in moved
                ]
            )
            for columns in parts[1:] if last else parts:  # what the last layer writes on x is never read
                weight = 1 / (after - before)[..., columns].square().sum((1, 2)).clamp(min=1e-300)
                design, wanted = gains[..., columns], rest[..., columns]
                normal[torch.tensor(moved)[:, None], moved] += torch.einsum("pbij,qbij,b->pq", design, design, weight)
                right[moved] += torch.einsum("pbij,bij,b->p", design, wanted, weight)
    return torch.linalg.lstsq(normal, right[:, None], driver="gelsd").solution[:, 0]  # minimum norm


def _least_squares(basis_KQ: Tensor, basis_PV: Tensor, rest_KQ: Tensor, rest_PV: Tensor) -> Float[Tensor, "parameter"]:
    """The parameters of minimum norm with which the bases add up to these products most nearly."""
    design = torch.cat([basis_KQ.flatten(1), basis_PV.flatten(1)], dim=1).T
    rest = torch.cat([rest_KQ.flatten(), rest_PV.flatten()])
    return torch.linalg.lstsq(design, rest[:, None], driver="gelsd").solution[:, 0]


def _inner(a: Tensor, b: Tensor) -> Float[Tensor, "layer head"]:
    return (a * b).sum((-2, -1))


def _relative_distance(a: Tensor, b: Tensor) -> Float[Tensor, "layer head"]:
    return (a - b).flatten(2).norm(dim=-1) / b.flatten(2).norm(dim=-1).clamp(min=1e-300)


def _members(family: Family, parameters: Tensor, predictions: list[Tensor], prompts: Prompts) -> Members:
    models = [family.member(row) for row in parameters]
    found = [_predict(model, prompts) for model in models]
    distances = [(p - own).square().mean(-1) for p, own in zip(found, predictions, strict=True)]
    errors = [(p - prompts.query.ys).square().mean(-1) for p in found]
    return Members(family.named(parameters), models, torch.stack(distances), torch.stack(errors))


@torch.no_grad()
def _predict(model: HookedTransformer, prompts: Prompts) -> Float[Tensor, "prompt y"]:
    return torch.cat([model.predict(part).cpu().double() for part in prompt_batches(model, prompts)])


def _check_models(models: list[HookedTransformer]) -> None:
    if not models:
        raise ValueError("no models to fit a construction to")
    for model in models:
        if model.cfg.to_dict() != models[0].cfg.to_dict():
            raise ValueError("models of different configs: fit them one by one")
        if model.cfg.prompt_format == "paired" and model.initial_weights.any():
            raise ValueError(f"constructions start at W_0 = 0; this model has {model.initial_weights.tolist()}")
