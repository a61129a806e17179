"""Families of constructions: weights by theorem with parameters left free, to be fitted to a trained model's."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl import constructions
from mechicl.analysis.weights.products import WeightProducts, read_weight_products, replace_products
from mechicl.models import HookedTransformer, TransformerConfig

FamilyName = Literal[
    "gd", "gd per layer", "gd++", "gd++ per layer", "pgd", "pgd per layer", "newton"
]  # fmt: skip
"""Gradient descent, GD++ and preconditioned gradient descent, with one set of parameters or one a layer; Newton."""


@dataclass(frozen=True, eq=False)
class Family:
    """A construction with free parameters, at the sizes of a model, as an affine map from parameters to products.

    Attributes:
        name: see `FamilyName`.
        shapes: name to shape of each parameter.
        template: a member in the model's architecture.
        base: the products at parameters 0.
        basis: what the products gain with each parameter's entry, `[parameter layer head d_model d_model]`.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    template: HookedTransformer
    base: WeightProducts
    basis: WeightProducts

    @property
    def n_parameters(self) -> int:
        """Number of free numbers."""
        return len(self.basis.W_KQ)

    def products(self, parameters: Float[Tensor, "parameter"]) -> WeightProducts:
        """The products at these parameters, differentiable."""
        return combine(self.base, parameters, self.basis)

    def member(self, parameters: Float[Tensor, "parameter"]) -> HookedTransformer:
        """The model at these parameters."""
        return replace_products(self.template, self.products(parameters))

    def named(self, parameters: Float[Tensor, "*seed parameter"]) -> dict[str, Tensor]:
        """The flat parameters as tensors by name."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        parts = parameters.split(sizes, dim=-1)
        return {
            name: part.reshape(*parameters.shape[:-1], *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def combine(base: WeightProducts, parameters: Float[Tensor, "parameter"], basis: WeightProducts) -> WeightProducts:
    """`base + Σ_p parameters[p] basis[p]`."""
    W_KQ = base.W_KQ + torch.einsum("p,plhij->lhij", parameters, basis.W_KQ)
    W_PV = base.W_PV + torch.einsum("p,plhij->lhij", parameters, basis.W_PV)
    return dataclasses.replace(base, W_KQ=W_KQ, W_PV=W_PV)


def family_for(name: FamilyName, cfg: TransformerConfig) -> Family:
    """A family at the sizes of a model.

    Raises:
        ValueError: an unknown family, or one that models with this config cannot express; the message says what they
            lack.
    """
    if name not in get_args(FamilyName):
        raise ValueError(f"family must be one of {list(get_args(FamilyName))}, got {name!r}")
    if cfg.prompt_format != "paired":
        raise ValueError(f"the family {name!r} is one of models on paired prompts, not on {cfg.prompt_format!r}")
    per_layer = name.endswith("per layer")
    if per_layer and cfg.recurrent and cfg.n_layers > 1:
        raise ValueError(f"a looped model has one set of parameters for all layers: fit {name.split(' per')[0]!r}")
    steps = cfg.n_layers - 2 if name == "newton" else cfg.n_layers
    if steps < 1:
        raise ValueError(f"{name} takes at least {cfg.n_layers - steps + 1} layers; the model has {cfg.n_layers}")
    sizes = {"x_dim": cfg.x_dim, "y_dim": cfg.y_dim, "n_context": cfg.n_context, "steps": steps}
    shapes, build = _parametrised(name, sizes, copies=steps if per_layer else 1)
    # The map from parameters to products is affine, so that its slopes are differences of products one unit apart, from
    # any origin: here 0, and 1 for Newton's alpha, which must be positive.
    origin = {key: torch.full(shape, float(name == "newton"), dtype=torch.float64) for key, shape in shapes.items()}
    made = build(origin)
    _check_expressible(name, cfg, made.cfg)
    at_origin = _in_architecture(made, cfg)
    shifted = []
    for key, shape in shapes.items():
        for place in itertools.product(*map(range, shape)):
            moved = {k: value.clone() for k, value in origin.items()}
            moved[key][place] += 1
            shifted.append(_in_architecture(build(moved), cfg))
    basis = dataclasses.replace(
        at_origin,
        W_KQ=torch.stack([products.W_KQ - at_origin.W_KQ for products in shifted]),
        W_PV=torch.stack([products.W_PV - at_origin.W_PV for products in shifted]),
    )
    start = torch.cat([value.flatten() for value in origin.values()])
    return Family(name, shapes, _template(made, cfg), combine(at_origin, -start, basis), basis)


Build = Callable[[Mapping[str, Tensor]], HookedTransformer]


def _parametrised(name: str, sizes: dict[str, Any], copies: int) -> tuple[dict[str, tuple[int, ...]], Build]:
    """Shapes of a family's parameters, and the construction as a function of them."""
    kind, d, steps = name.removesuffix(" per layer"), cast(int, sizes["x_dim"]), sizes["steps"]

    def each(value: Tensor) -> list[Any]:  # one entry a step
        return list(value.expand(steps, *value.shape[1:])) if copies == 1 else list(value)

    def descent(parameters: Mapping[str, Tensor]) -> HookedTransformer:
        gamma = parameters.get("gamma", torch.zeros(copies))
        a, g = ([value.item() for value in each(p)] for p in (parameters["step_size"], gamma))
        return constructions.gd_plus_plus(**sizes, step_size=a, gamma=g)

    def preconditioned(parameters: Mapping[str, Tensor]) -> HookedTransformer:
        return constructions.preconditioned_gd(**sizes, preconditioner=each(parameters["preconditioner"]))

    def newton(parameters: Mapping[str, Tensor]) -> HookedTransformer:
        return constructions.newton(**sizes, alpha=parameters["alpha"].item())

    if kind == "newton":
        return {"alpha": (1,)}, newton
    if kind == "pgd":
        return {"preconditioner": (copies, d, d)}, preconditioned
    shapes: dict[str, tuple[int, ...]] = {"step_size": (copies,)}
    return (shapes if kind == "gd" else shapes | {"gamma": (copies,)}), descent


def _check_expressible(name: str, cfg: TransformerConfig, needed: TransformerConfig) -> None:
    """Refuse a model whose architecture has no place for the construction."""
    fields = ["attention", "attn_bias", "normalization_type", "prompt_format", "read_in", "read_out", "keys", "sink"]
    fields += ["positional_embedding_type", "damping", "d_model", "d_mlp"]
    fields += ["act_fn", "mlp_location", "n_heads"] if needed.d_mlp is not None else []
    fields += ["recurrent"] if name == "newton" else []  # its layers differ
    lacks = {f: getattr(needed, f) for f in fields if getattr(cfg, f) != getattr(needed, f)}
    if lacks:
        has = {f: getattr(cfg, f) for f in lacks}
        raise ValueError(f"the family {name!r} needs an architecture with {lacks}; this model has {has}")


def _in_architecture(made: HookedTransformer, cfg: TransformerConfig) -> WeightProducts:
    """The construction's products, in a model that divides by the number of points or does not."""
    products = read_weight_products(made)
    factor = float(cfg.n_context or 1) ** (cfg.normalize_by_context - made.cfg.normalize_by_context)
    return dataclasses.replace(products, W_PV=products.W_PV * factor)


def _template(made: HookedTransformer, cfg: TransformerConfig) -> HookedTransformer:
    """The construction in a model that normalises, clips and shares its weights as the config says."""
    same = {name: getattr(cfg, name) for name in ("normalize_by_context", "token_clip", "recurrent", "n_layers")}
    model = HookedTransformer(made.cfg.replace(**same))
    model.load_state_dict(made.state_dict(), strict=False)
    return replace_products(model, _in_architecture(made, cfg))
