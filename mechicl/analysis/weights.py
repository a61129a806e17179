"""Weight products of linear attention, their gauge, and gradient descent's parameters read off them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.models import HookedTransformer


@dataclass(frozen=True, eq=False)
class WeightProducts:
    """The two products per layer and head that linear attention depends on.

    Scaling one by a factor and the other by its inverse changes nothing (the gauge).

    Attributes:
        W_KQ: `W_Q W_Kᵀ` `[layer head d_model d_model]`, the bilinear form of the scores (score scale included).
        W_PV: `W_V W_O` `[layer head d_model d_model]`, what attending writes.
        x_dim: number of leading dimensions that hold x.
        y_dim: number of dimensions after them that hold y.
    """

    W_KQ: Float[Tensor, "layer head d_model d_model"]
    W_PV: Float[Tensor, "layer head d_model d_model"]
    x_dim: int
    y_dim: int

    def gauge(self) -> Float[Tensor, "layer head"]:
        """β: the mean of the x-block's diagonal of W_KQ."""
        return self._x(self.W_KQ).diagonal(dim1=-2, dim2=-1).mean(-1)

    def fixed(self) -> "WeightProducts":
        """In the gauge where that mean is 1: `W_KQ / β`, `W_PV β` (von Oswald et al. 2023, A.3).

        Raises:
            ValueError: a head whose β is zero or not finite has no such gauge.
        """
        beta = self.gauge()[..., None, None]
        if not (beta.isfinite() & (beta != 0)).all():
            raise ValueError(f"no gauge for a head whose W_KQ has mean diagonal {beta.flatten().tolist()}")
        return WeightProducts(self.W_KQ / beta, self.W_PV * beta, self.x_dim, self.y_dim)

    def step_size(self) -> Float[Tensor, "layer head"]:
        """a, minus the mean diagonal of the y-block of W_PV: the projection on gradient descent, in this gauge."""
        return -self._y(self.W_PV).diagonal(dim1=-2, dim2=-1).mean(-1)

    def gamma(self) -> Float[Tensor, "layer head"]:
        """γ, minus the mean diagonal of the x-block of W_PV: the projection on GD++, in this gauge.

        The last layer's has no effect on the predictions.
        """
        return -self._x(self.W_PV).diagonal(dim1=-2, dim2=-1).mean(-1)

    def _x(self, product: Tensor) -> Tensor:
        return product[..., : self.x_dim, : self.x_dim]

    def _y(self, product: Tensor) -> Tensor:
        block = slice(self.x_dim, self.x_dim + self.y_dim)
        return product[..., block, block]


def weight_products(model: HookedTransformer) -> WeightProducts:
    """The weight products of a linear-attention model on paired prompts, float64.

    Raises:
        ValueError: the model's predictions are not a function of these products: another attention kind, biases,
            norms, or tokens that are not (x, y).
    """
    cfg = model.cfg
    needed = {
        "attention": "linear",
        "attn_bias": False,
        "normalize_by_context": False,
        "normalization_type": None,
        "prompt_format": "paired",
        "read_in": "identity",
        "read_out": "identity",
        "positional_embedding_type": "none",
        "d_mlp": None,
        "token_clip": None,
    }
    other = {name: getattr(cfg, name) for name, value in needed.items() if getattr(cfg, name) != value}
    if other:
        raise ValueError(f"weight products describe models with {needed}; this one has {other}")
    assert cfg.x_dim is not None
    scale = cfg.score_scale
    W_KQ = scale * model.W_Q.detach().double() @ model.W_K.detach().double().mT
    W_PV = model.W_V.detach().double() @ model.W_O.detach().double()
    return WeightProducts(W_KQ, W_PV, cfg.x_dim, cfg.y_dim)


def trained_part(products: WeightProducts) -> WeightProducts:
    """A one-layer model's products without the parts that no training signal reaches.

    With one layer and W_0 = 0 the attending query has y = 0, so the y-rows of W_KQ meet only zeros, and what is
    written on x is never read. These parts keep their random initial values, harmless until the layer is repeated.
    """
    W_KQ, W_PV = products.W_KQ.clone(), products.W_PV.clone()
    W_KQ[..., products.x_dim :, :] = 0
    W_PV[..., : products.x_dim] = 0
    return WeightProducts(W_KQ, W_PV, products.x_dim, products.y_dim)


def with_products(model: HookedTransformer, products: WeightProducts) -> HookedTransformer:
    """A float64 model like this one whose heads have these products: `W_Q = W_KQ`, `W_V = W_PV`, identities else."""
    cfg = model.cfg.replace(d_head=model.cfg.d_model, score_scale=1.0, dtype="float64", device="cpu")
    made = HookedTransformer(cfg, initial_weights=model.initial_weights)
    eye = torch.eye(cfg.d_model, dtype=torch.float64)
    own, other = dict(made.named_parameters()), dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in own.items():
            if ".attn." not in name:
                weight.copy_(other[name])
        for block, W_KQ, W_PV in zip(made.blocks, products.W_KQ, products.W_PV, strict=True):
            block.attn.W_Q.copy_(W_KQ)
            block.attn.W_K.copy_(eye)
            block.attn.W_V.copy_(W_PV)
            block.attn.W_O.copy_(eye)
    return made.eval()


@dataclass(frozen=True, eq=False)
class GradientDescentFit:
    """Gradient descent read off a model's weights, layer by layer.

    Attributes:
        products: the weight products with the gauge fixed.
        beta: the gauge that was divided out, `[layer head]`.
        step_size: a `[layer head]`.
        gamma: γ `[layer head]`; the last layer's has no effect.
        distance_KQ: relative Frobenius distance of the part of W_KQ that predictions can depend on from the
            construction's, `[layer head]`.
        distance_PV: the same for W_PV.
    """

    products: WeightProducts
    beta: Float[Tensor, "layer head"]
    step_size: Float[Tensor, "layer head"]
    gamma: Float[Tensor, "layer head"]
    distance_KQ: Float[Tensor, "layer head"]
    distance_PV: Float[Tensor, "layer head"]


def read_gradient_descent(model: HookedTransformer) -> GradientDescentFit:
    """Fix the gauge and project the weights on the GD++ family: `W_KQ = diag(I, 0)`, `W_PV = diag(-γ I, -a I)`.

    In a fixed gauge the family is linear, so the least-squares projection is the mean of each block's diagonal.
    For one layer the distances leave out what training cannot reach (see `trained_part`).

    Raises:
        ValueError: not a linear-attention model on paired prompts, one with damping or W_0, or a head without a gauge.

    Source: von Oswald et al. 2023, A.3, A.4 and A.10.
    """
    if model.cfg.damping != 1 or bool(model.initial_weights.any()):
        raise ValueError(
            f"gradient descent is read off models without damping and with W_0 = 0; this one has "
            f"damping={model.cfg.damping} and initial weights {model.initial_weights.tolist()}"
        )
    raw = weight_products(model)
    fixed = raw.fixed()
    n_layers, x, end = model.cfg.n_layers, raw.x_dim, raw.x_dim + raw.y_dim
    step_size, gamma = fixed.step_size(), fixed.gamma()
    eye = torch.eye(model.cfg.d_model, dtype=torch.float64)
    on_x, on_y = eye.clone(), torch.zeros_like(eye)
    on_x[x:], on_y[x:end, x:end] = 0, torch.eye(raw.y_dim)
    target_KQ = on_x.expand_as(fixed.W_KQ)
    target_PV = -gamma[..., None, None] * on_x - step_size[..., None, None] * on_y
    acting, target = fixed, WeightProducts(target_KQ, target_PV, raw.x_dim, raw.y_dim)
    if n_layers == 1:
        acting, target = trained_part(acting), trained_part(target)
    return GradientDescentFit(
        products=fixed,
        beta=raw.gauge(),
        step_size=step_size,
        gamma=gamma,
        distance_KQ=_relative_distance(acting.W_KQ, target.W_KQ),
        distance_PV=_relative_distance(acting.W_PV, target.W_PV),
    )


def _relative_distance(a: Tensor, b: Tensor) -> Float[Tensor, "layer head"]:
    return (a - b).flatten(2).norm(dim=-1) / b.flatten(2).norm(dim=-1)
