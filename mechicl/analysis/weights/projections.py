"""The member of a family nearest to trained weights, in closed form: nearest as weights, or in what layers write."""

import itertools
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.weights.construction_families import Family, combine
from mechicl.analysis.weights.products import WeightProducts, concatenate, read_weight_products, replace_products
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts

PROMPTS_AT_A_TIME = 256
"""Prompts whose streams, and what each parameter would add to them, are held by `fit_layer_outputs`."""


@dataclass(frozen=True, eq=False)
class Projection:
    """One model's weights, projected on a family; for the fields see `ConstructionFit`."""

    parameters: Float[Tensor, "parameter"]
    beta: Float[Tensor, "layer head"]
    products: WeightProducts
    nearest: WeightProducts
    distance_KQ: Float[Tensor, "layer head"]
    distance_PV: Float[Tensor, "layer head"]


def project_weights(family: Family, model: HookedTransformer) -> Projection:
    """The member of a family nearest to a model's weights.

    Raises:
        ValueError: a head whose products have no part along those of the construction, so that no gauge brings it
            there.
    """
    looped = model.cfg.recurrent
    raw, base, basis = (
        products.without_unread_parts(looped) for products in (read_weight_products(model), family.base, family.basis)
    )
    # The gauge. (c W_KQ, W_PV / c) is the same head for every c, and the family's products lie in one of these gauges:
    # parameters move one product alone, and the other stays what it is in `base` (W_KQ = 1 on x for gradient descent,
    # W_PV where W_KQ moves). So β is chosen such that in the new gauge this product of the model differs from the
    # construction's only orthogonally to it: <W_KQ / β - base, base> = 0, or <β W_PV - base, base> = 0.
    if not basis.W_KQ.any():
        along, norm = _inner(raw.W_KQ, base.W_KQ), _inner(base.W_KQ, base.W_KQ)
        beta = torch.where(norm > 0, along / norm, 1.0)
    else:
        along, norm = _inner(raw.W_PV, base.W_PV), _inner(base.W_PV, base.W_PV)
        beta = torch.where(norm > 0, norm / along, 1.0)
    if not (beta.isfinite() & (beta != 0)).all():
        raise ValueError(f"no gauge for a head without a part along the construction's: β is {beta.flatten().tolist()}")
    products = raw.in_gauge(beta)
    # In the gauge, members are base + Σ_p θ_p basis_p: the nearest one is a linear least-squares projection. With a
    # family of one head, each head of the model is projected by itself, and θ is the sum over heads: their scores are
    # alike (W_KQ is near the base for each), and what they write adds up.
    n_layers, n_heads = beta.shape
    same_heads = n_heads == base.W_KQ.shape[1]
    groups = [slice(None)] if same_heads else [slice(head, head + 1) for head in range(n_heads)]
    total, nearest = torch.zeros(family.n_parameters, dtype=torch.float64), []
    for group in groups:
        head = products.part(heads=group)
        parameters = _least_squares(basis, head, base)
        total = total + parameters
        if same_heads:
            nearest.append(combine(base, parameters, basis))
            continue
        # heads that share a step may share it differently in each layer: the nearest is sought layer by layer
        by_layer = []
        for layer in (slice(i, i + 1) for i in range(n_layers)):
            in_layer = _least_squares(basis.part(layer), head.part(layer), base.part(layer))
            by_layer.append(combine(base.part(layer), in_layer, basis.part(layer)))
        nearest.append(concatenate(by_layer, axis=0))
    target = concatenate(nearest, axis=1)
    return Projection(
        total,
        beta,
        products,
        target,
        _relative_distance(products.W_KQ, target.W_KQ),
        _relative_distance(products.W_PV, target.W_PV),
    )


@torch.no_grad()
def fit_layer_outputs(family: Family, model: HookedTransformer, prompts: Prompts) -> Float[Tensor, "parameter"]:
    """Parameters of the member whose layers write most nearly what the model's layers write on the same streams.

    The squared distance on x and on y is divided, prompt by prompt, by the square of what the model writes there on all
    tokens, so that no prompt with large eigenvalues outweighs the others.
    """
    cfg, base, basis = model.cfg, family.base, family.basis
    model = replace_products(model, read_weight_products(model))  # in float64
    factor = 1 / (cfg.n_context or 1) if cfg.normalize_by_context else 1.0
    on_x, on_y = slice(0, base.x_dim), slice(base.x_dim, base.x_dim + base.y_dim)

    def written(stream: Tensor, W_KQ: Tensor, W_PV: Tensor) -> Float[Tensor, "prompt pos d_model"]:
        context = stream[:, :-1]  # Σ_i (q W_KQ t_iᵀ) t_i W_PV = q W_KQ (Σ_i t_iᵀ t_i) W_PV over its tokens t_i
        moments = context.mT @ context
        return factor * torch.stack([stream @ K @ moments @ V for K, V in zip(W_KQ, W_PV, strict=True)]).sum(0)

    # What a layer writes is bilinear in its two products, and a family moves only one of them: on a fixed stream it is
    # affine in the parameters, base + Σ_p θ_p gain_p. So θ solves the normal equations, summed over prompts and layers.
    count = family.n_parameters
    normal, right = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for part in prompts.split(PROMPTS_AT_A_TIME):
        streams = list(model.layer_streams(part, at="positions"))
        for layer, (before, after) in enumerate(itertools.pairwise(streams)):
            moved = [p for p in range(count) if basis.W_KQ[p, layer].any() or basis.W_PV[p, layer].any()]
            if not moved:
                continue
            by_base = written(before, base.W_KQ[layer], base.W_PV[layer])
            members = (
                (base.W_KQ[layer] + basis.W_KQ[p, layer], base.W_PV[layer] + basis.W_PV[p, layer]) for p in moved
            )
            gains = torch.stack([written(before, *member) - by_base for member in members])
            change = after - before
            for columns in (on_x, on_y) if layer < cfg.n_layers - 1 else (on_y,):  # the last layer's x is never read
                weight = 1 / change[..., columns].square().sum((1, 2)).clamp(min=1e-300)
                design, target = gains[..., columns], (change - by_base)[..., columns]
                normal[torch.tensor(moved)[:, None], moved] += torch.einsum("pbij,qbij,b->pq", design, design, weight)
                right[moved] += torch.einsum("pbij,bij,b->p", design, target, weight)
    return torch.linalg.lstsq(normal, right[:, None], driver="gelsd").solution[:, 0]  # of minimum norm


def _least_squares(basis: WeightProducts, products: WeightProducts, base: WeightProducts) -> Float[Tensor, "parameter"]:
    """The parameters of minimum norm at which `base + Σ_p θ_p basis_p` is nearest to the products."""
    design = torch.cat([basis.W_KQ.flatten(1), basis.W_PV.flatten(1)], dim=1).T
    rest = torch.cat([(products.W_KQ - base.W_KQ).flatten(), (products.W_PV - base.W_PV).flatten()])
    return torch.linalg.lstsq(design, rest[:, None], driver="gelsd").solution[:, 0]


def _inner(a: Tensor, b: Tensor) -> Float[Tensor, "layer head"]:
    return (a * b).sum((-2, -1))


def _relative_distance(a: Tensor, b: Tensor) -> Float[Tensor, "layer head"]:
    return (a - b).flatten(2).norm(dim=-1) / b.flatten(2).norm(dim=-1).clamp(min=1e-300)
