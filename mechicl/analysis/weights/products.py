"""The two weight products per head that attention depends on, the gauge between them, and models made of them."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import Count, check_fields, checked
from mechicl.models import HookedTransformer
from mechicl.models.transformer.config_rules import check_attends
from mechicl.models.wrapping.wrapped import refuse_wrapped
from mechicl.statistics import storable


@storable
@dataclass(frozen=True, eq=False)
class WeightProducts:
    """The two products per layer and head that attention depends on.

    A head of linear attention writes `Σ_i (q W_KQ t_iᵀ) t_i W_PV` for tokens t_i. This depends only on the tensor
    product of W_KQ and W_PV: scaling one by a factor and the other by its inverse changes nothing (the gauge).

    Attributes:
        W_KQ: `W_Q W_Kᵀ` `[layer head d_model d_model]`, the bilinear form of the scores (score scale included). Axes
            before the layer's are allowed, here and in W_PV.
        W_PV: `W_V W_O` `[layer head d_model d_model]`, the map from an attended token to the head's write.
        x_dim: number of leading dimensions, which contain x.
        y_dim: number of dimensions after them, which contain y.
    """

    W_KQ: Float[Tensor, "*batch layer head d_model d_model"]
    W_PV: Float[Tensor, "*batch layer head d_model d_model"]
    x_dim: Count
    y_dim: Count

    def __post_init__(self):
        check_fields(self, undefined=True)
        if self.x_dim + self.y_dim > self.W_KQ.shape[-1]:
            raise ValueError(f"x_dim={self.x_dim} and y_dim={self.y_dim} exceed the width {self.W_KQ.shape[-1]}")

    def gauge(self) -> Float[Tensor, "*batch layer head"]:
        """Compute β of each head, the mean diagonal of the part of W_KQ between x and x."""
        return self.W_KQ[..., : self.x_dim, : self.x_dim].diagonal(dim1=-2, dim2=-1).mean(-1)

    def gauge_fixed(self) -> "WeightProducts":
        """Rescale each head to β = 1 (von Oswald et al. 2023, A.3); ValueError if β is 0 or not finite."""
        beta = self.gauge()
        if not (beta.isfinite() & (beta != 0)).all():
            raise ValueError(f"a head has no gauge: the mean diagonals of W_KQ are {beta.flatten().tolist()}")
        return self.in_gauge(beta)

    @checked
    def in_gauge(self, beta: Float[Tensor, "*batch layer head"]) -> "WeightProducts":
        """Rescale to `W_KQ / β` and `β W_PV`, which are the same linear attention."""
        beta = beta[..., None, None]
        return dataclasses.replace(self, W_KQ=self.W_KQ / beta, W_PV=self.W_PV * beta)

    @checked
    def map(self, function: Callable[..., Tensor], *others: "WeightProducts") -> "WeightProducts":
        """Apply a function to W_KQ, and to W_PV, of this and of other products."""
        every = (self, *others)
        W_KQ, W_PV = function(*(each.W_KQ for each in every)), function(*(each.W_PV for each in every))
        return dataclasses.replace(self, W_KQ=W_KQ, W_PV=W_PV)

    @checked
    def part(self, layers: slice = slice(None), heads: slice = slice(None)) -> "WeightProducts":
        """Select the products of some layers and heads."""
        return self.map(lambda product: product[..., layers, heads, :, :])

    @checked
    def without_unread_parts(self, recurrent: bool = False) -> "WeightProducts":
        """Set the parts to zero that the query's prediction cannot depend on, unless the layer is looped (recurrent).

        The last layer's output outside y is never read; with W_0 = 0 the query has y = 0 in the first layer, so that
        with one layer the y-rows of W_KQ are multiplied by zeros. These parts keep their random initial values in
        training, which matters only if the layer is repeated. Only for models whose layers are attention alone: an MLP,
        a norm and concatenated positions read these parts too.
        """
        W_KQ, W_PV, one_layer = self.W_KQ.clone(), self.W_PV.clone(), self.W_KQ.shape[-4] == 1
        if one_layer:
            W_KQ[..., self.x_dim :, :] = 0
        if one_layer or not recurrent:
            last = W_PV[..., -1, :, :, :]
            last[..., : self.x_dim] = 0
            last[..., self.x_dim + self.y_dim :] = 0
        return dataclasses.replace(self, W_KQ=W_KQ, W_PV=W_PV)


@checked
def read_weight_products(model: HookedTransformer) -> WeightProducts:
    """Read the products of weights that attention depends on.

    The model is on paired prompts (one token (x, y) per point), without attention biases, rotary
    positions, and norms or clips of queries and keys.

    Returns:
        A `WeightProducts`, float64 on the CPU: `W_KQ = W_Q W_Kᵀ` (with the score scale) and `W_PV = W_V W_O`, both
        `[layer head d_model d_model]`. `gauge_fixed()` rescales each head of linear attention so that the mean diagonal
        of W_KQ on x is 1, which makes heads of different models comparable.

    Example:
        >>> read_weight_products(load("lsa-1l")).gauge_fixed().W_PV[0, 0, -1, -1]  # minus the step size
    """
    refuse_wrapped(model, "weight products are those")
    cfg = model.cfg
    needed = {
        "attn_bias": False, "prompt_format": "paired", "read_in": "identity", "read_out": "identity",
        "use_qk_norm": False, "clip_qkv": None,
    }  # fmt: skip
    other = {name: getattr(cfg, name) for name, value in needed.items() if getattr(cfg, name) != value}
    if other:
        raise ValueError(f"weight products describe models with {needed}; this one has {other}")
    check_attends(cfg)
    if cfg.rotates:
        raise ValueError("with positional_embedding_type='rotary' scores depend on positions, not on products alone")
    assert cfg.x_dim is not None
    W_Q, W_K, W_V, W_O = (w.detach().cpu().double() for w in (model.W_Q, model.W_K, model.W_V, model.W_O))
    return WeightProducts(cfg.score_scale * W_Q @ W_K.mT, W_V @ W_O, cfg.x_dim, cfg.y_dim)


@checked
def replace_products(model: HookedTransformer, products: WeightProducts) -> HookedTransformer:
    """Make a float64 model whose heads have given products `W_KQ = W_Q W_Kᵀ` and `W_PV = W_V W_O`.

    Its weights are `W_Q = W_KQ` and `W_V = W_PV`, with identities as W_K and W_O.

    Args:
        model: the model to copy everything else from; it stays unchanged.
        products: the products of all heads, such as edited ones of `read_weight_products`. The new model has their
            number of heads; learned sinks of heads that `model` lacks start at `sink_score`.

    Example:
        >>> lsa = load("lsa-1l")
        >>> in_float64 = replace_products(lsa, read_weight_products(lsa))
    """
    cfg = model.cfg.replace(
        n_heads=products.W_KQ.shape[1], d_head=model.cfg.d_model, score_scale=1.0, dtype="float64", device="cpu",
        initializer_range=0.0, attention_weights="learned", n_key_value_heads=None,
    )  # fmt: skip
    made = HookedTransformer(cfg, initial_weights=model.initial_weights)
    identity = torch.eye(cfg.d_model, dtype=torch.float64)
    sources = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith(".attn.sink"):
                common = min(len(weight), len(sources[name]))
                weight[:common] = sources[name][:common]
            elif ".attn.W_" not in name:
                weight.copy_(sources[name])
        for block, W_KQ, W_PV in zip(made.blocks, products.W_KQ, products.W_PV, strict=True):
            block.attn.W_Q.copy_(W_KQ)
            block.attn.W_K.copy_(identity)
            block.attn.W_V.copy_(W_PV)
            block.attn.W_O.copy_(identity)
    return made.eval()
