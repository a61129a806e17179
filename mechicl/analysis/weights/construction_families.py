"""Families of constructions, weights by theorem with free parameters, and the members nearest to a trained model."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl import constructions
from mechicl.analysis.weights.products import WeightProducts, read_weight_products, replace_products
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts

FamilyName = Literal["gd", "gd per layer", "gd++", "gd++ per layer", "pgd", "pgd per layer", "newton"]
"""Gradient descent, GD++ and preconditioned gradient descent, with one set of parameters or one per layer; Newton."""

PROMPTS_AT_A_TIME = 256  # prompts for which `fit_layer_outputs` keeps streams and each parameter's contributions


@dataclass(frozen=True, eq=False)
class ConstructionFamily:
    """A construction with free parameters, at the sizes of a model, as an affine map from parameters to products."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    template: HookedTransformer  # a member in the model's architecture
    base: WeightProducts  # the products at parameters 0
    # the derivative of the products with respect to each parameter, `[parameter layer head d_model d_model]`.
    basis: WeightProducts

    @property
    def n_parameters(self) -> int:
        """Number of free numbers."""
        return len(self.basis.W_KQ)

    def products(self, parameters: Float[Tensor, "parameter"]) -> WeightProducts:
        """Compute the products at these parameters, differentiable."""
        return combine(self.base, parameters, self.basis)

    def member(self, parameters: Float[Tensor, "parameter"]) -> HookedTransformer:
        """Make the model at these parameters."""
        return replace_products(self.template, self.products(parameters))

    def named(self, parameters: Float[Tensor, "*seed parameter"]) -> dict[str, Tensor]:
        """Split the flat parameters into tensors by name."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        parts = parameters.split(sizes, dim=-1)
        return {
            name: part.reshape(*parameters.shape[:-1], *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def combine(base: WeightProducts, parameters: Float[Tensor, "parameter"], basis: WeightProducts) -> WeightProducts:
    """Compute `base + Σ_p parameters[p] basis[p]`."""
    return base.map(lambda start, slopes: start + torch.einsum("p,plhij->lhij", parameters, slopes), basis)


def family_for(name: FamilyName, cfg: TransformerConfig) -> ConstructionFamily:
    """Make a family at the sizes of a model; a ValueError names what models with this config lack for it."""
    if cfg.prompt_format != "paired":
        raise ValueError(f"the family {name!r} is for models on paired prompts, not on {cfg.prompt_format!r}")
    per_layer = name.endswith("per layer")
    if per_layer and cfg.recurrent and cfg.n_layers > 1:
        raise ValueError(f"a looped model has one set of parameters for all layers: fit {name.split(' per')[0]!r}")
    steps = cfg.n_layers - 2 if name == "newton" else cfg.n_layers
    if steps < 1:
        raise ValueError(f"{name} takes at least {cfg.n_layers - steps + 1} layers; the model has {cfg.n_layers}")
    sizes = {"x_dim": cfg.x_dim, "y_dim": cfg.y_dim, "n_context": cfg.n_context, "steps": steps}
    kind, n_sets = name.removesuffix(" per layer"), steps if per_layer else 1
    shapes = {
        "gd": {"step_size": (n_sets,)},
        "gd++": {"step_size": (n_sets,), "gamma": (n_sets,)},
        "pgd": {"preconditioner": (n_sets, cfg.x_dim, cfg.x_dim)},
        "newton": {"alpha": (1,)},
    }[kind]
    # The map from parameters to products is affine, so its slopes are differences of products one unit apart, from any
    # origin: here 0, and 1 for Newton's alpha, which must be positive.
    origin = {key: torch.full(shape, float(name == "newton"), dtype=torch.float64) for key, shape in shapes.items()}
    made = _construct(kind, sizes, origin)
    _check_expressible(name, cfg, made.cfg)
    at_origin = _in_architecture(made, cfg)
    shifted = []
    for key, shape in shapes.items():
        for place in itertools.product(*map(range, shape)):
            moved = {k: value.clone() for k, value in origin.items()}
            moved[key][place] += 1
            shifted.append(_in_architecture(_construct(kind, sizes, moved), cfg))
    basis = at_origin.map(lambda start, *moved: torch.stack(moved) - start, *shifted)
    start = torch.cat([value.flatten() for value in origin.values()])
    return ConstructionFamily(name, shapes, _template(made, cfg), combine(at_origin, -start, basis), basis)


def _construct(kind: str, sizes: dict[str, Any], parameters: Mapping[str, Tensor]) -> HookedTransformer:
    by_step = {name: value.expand(sizes["steps"], *value.shape[1:]) for name, value in parameters.items()}
    if kind == "newton":
        return constructions.newton(**sizes, alpha=parameters["alpha"].item())
    if kind == "pgd":
        return constructions.preconditioned_gd(**sizes, preconditioner=list(by_step["preconditioner"]))
    gamma = by_step.get("gamma", torch.zeros(sizes["steps"]))
    return constructions.gd_plus_plus(**sizes, step_size=by_step["step_size"].tolist(), gamma=gamma.tolist())


def _check_expressible(name: str, cfg: TransformerConfig, needed: TransformerConfig) -> None:
    fields = ["attention", "attn_bias", "normalization_type", "prompt_format", "read_in", "read_out", "keys", "sink"]
    fields += ["positional_embedding_type", "damping", "d_model", "d_mlp"]
    fields += ["act_fn", "mlp_location", "n_heads"] if needed.d_mlp is not None else []
    fields += ["recurrent"] if name == "newton" else []  # its layers differ
    lacks = {f: getattr(needed, f) for f in fields if getattr(cfg, f) != getattr(needed, f)}
    if lacks:
        has = {f: getattr(cfg, f) for f in lacks}
        raise ValueError(f"the family {name!r} needs an architecture with {lacks}; this model has {has}")


def _in_architecture(made: HookedTransformer, cfg: TransformerConfig) -> WeightProducts:
    """The construction's products, in a model that may divide attention by the number of points."""
    products = read_weight_products(made)
    factor = float(cfg.n_context or 1) ** (cfg.normalize_by_context - made.cfg.normalize_by_context)
    return dataclasses.replace(products, W_PV=products.W_PV * factor)


def _template(made: HookedTransformer, cfg: TransformerConfig) -> HookedTransformer:
    """The construction in a model that normalises, clips and shares its weights as in the config."""
    same = {name: getattr(cfg, name) for name in ("normalize_by_context", "token_clip", "recurrent", "n_layers")}
    model = HookedTransformer(made.cfg.replace(**same))
    model.load_state_dict(made.state_dict(), strict=False)
    return replace_products(model, _in_architecture(made, cfg))


# ---- the nearest member, in closed form: nearest as weights, or in what layers write ----


@dataclass(frozen=True, eq=False)
class Projection:
    """One model's weights, projected on a family; for the fields see `ConstructionFit`."""

    parameters: Float[Tensor, "parameter"]
    beta: Float[Tensor, "layer head"]
    products: WeightProducts
    nearest: WeightProducts
    distance_KQ: Float[Tensor, "layer head"]
    distance_PV: Float[Tensor, "layer head"]


def project_weights(family: ConstructionFamily, model: HookedTransformer) -> Projection:
    """The member of a family nearest to a model's weights, once each head is in the family's gauge."""
    looped = model.cfg.recurrent
    raw, base, basis = (
        products.without_unread_parts(looped) for products in (read_weight_products(model), family.base, family.basis)
    )
    # The gauge. (c W_KQ, W_PV / c) is the same head for every c, and the family's products are in one of these gauges:
    # parameters move one product, and the other is constant, equal to `base` (W_KQ = 1 on x for gradient descent, W_PV
    # where W_KQ moves). So β is chosen such that in the new gauge this product of the model differs from the
    # construction's only orthogonally to it: <W_KQ / β - base, base> = 0, or <β W_PV - base, base> = 0.
    product, fixed = (raw.W_PV, base.W_PV) if basis.W_KQ.any() else (raw.W_KQ, base.W_KQ)
    along, norm = (product * fixed).sum((-2, -1)), (fixed * fixed).sum((-2, -1))
    beta = torch.where(norm > 0, norm / along if basis.W_KQ.any() else along / norm, 1.0)
    if not (beta.isfinite() & (beta != 0)).all():
        raise ValueError(f"a head has no gauge: it is orthogonal to the construction's (β {beta.flatten().tolist()})")
    products = raw.in_gauge(beta)
    # In the gauge, members are base + Σ_p θ_p basis_p: the nearest one is a linear least-squares projection. If the
    # family has one head, each head of the model is projected separately, and θ is the sum over heads: their scores are
    # similar (W_KQ is near the base for each), and their writes add up.
    n_layers, n_heads = beta.shape
    if n_heads == base.W_KQ.shape[1]:
        total = _least_squares(basis, products, base)
        nearest = combine(base, total, basis)
    else:
        heads = [products.part(heads=slice(head, head + 1)) for head in range(n_heads)]
        total = torch.stack([_least_squares(basis, head, base) for head in heads]).sum(0)

        def nearest_in(layer: slice, head: WeightProducts) -> WeightProducts:
            b, gains = base.part(layer), basis.part(layer)
            return combine(b, _least_squares(gains, head.part(layer), b), gains)

        # heads may share a step differently in each layer, so the nearest is found layer by layer
        layers = [slice(i, i + 1) for i in range(n_layers)]
        by_head = [_joined([nearest_in(layer, head) for layer in layers], axis=0) for head in heads]
        nearest = _joined(by_head, axis=1)
    pairs = ((products.W_KQ, nearest.W_KQ), (products.W_PV, nearest.W_PV))
    distances = [(a - b).flatten(2).norm(dim=-1) / b.flatten(2).norm(dim=-1).clamp(min=1e-300) for a, b in pairs]
    return Projection(total, beta, products, nearest, *distances)


def _joined(parts: Sequence[WeightProducts], axis: int) -> WeightProducts:
    return parts[0].map(lambda *products: torch.cat(products, axis), *parts[1:])


@torch.no_grad()
def fit_layer_outputs(
    family: ConstructionFamily, model: HookedTransformer, prompts: Prompts
) -> Float[Tensor, "parameter"]:
    """Find the parameters of the member whose layer outputs are nearest to the model's on the same streams.

    The squared distance on x and on y is divided, prompt by prompt, by the squared norm of the model's outputs there,
    so that prompts with large eigenvalues do not outweigh the others.
    """
    cfg, base, basis = model.cfg, family.base, family.basis
    model = replace_products(model, read_weight_products(model))  # in float64
    factor = 1 / (cfg.n_context or 1) if cfg.normalize_by_context else 1.0
    on_x, on_y = slice(0, base.x_dim), slice(base.x_dim, base.x_dim + base.y_dim)

    def written(stream: Tensor, W_KQ: Tensor, W_PV: Tensor) -> Float[Tensor, "prompt pos d_model"]:
        context = stream[:, :-1]  # Σ_i (q W_KQ t_iᵀ) t_i W_PV = q W_KQ (Σ_i t_iᵀ t_i) W_PV over its tokens t_i
        moments = context.mT @ context
        return factor * torch.stack([stream @ K @ moments @ V for K, V in zip(W_KQ, W_PV, strict=True)]).sum(0)

    # A layer's output is bilinear in its two products, and a family moves only one of them: on a fixed stream it is
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
    """Find the parameters of minimum norm at which `base + Σ_p θ_p basis_p` is nearest to the products."""
    design = torch.cat([basis.W_KQ.flatten(1), basis.W_PV.flatten(1)], dim=1).T
    rest = torch.cat([(products.W_KQ - base.W_KQ).flatten(), (products.W_PV - base.W_PV).flatten()])
    return torch.linalg.lstsq(design, rest[:, None], driver="gelsd").solution[:, 0]
