"""The linear transformers of Ahn et al. 2023."""

import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from mechicl.base.arguments import Count, checked
from mechicl.models import HookedTransformer, TransformerConfig


@checked
def from_linear_transformer(
    allparam: Float32[Tensor, "layer head 2 x x"] | Float64[Tensor, "layer head 2 x x"], n_context: Count
) -> HookedTransformer:
    """Convert the parameters of a linear transformer of Ahn et al. to a model with the same predictions.

    A layer adds `(1/n) Σ_h (Z Q_h Zᵀ) M Z P_hᵀ` to the tokens Z `[pos x+1]`; M leaves the query out of the keys, P has
    a 1 in its corner for y and Q a 0. The prediction is minus the query's y.

    Args:
        allparam: `[layer, head, 0]` is the x-block of P, `[layer, head, 1]` that of Q.
        n_context: number of context points, n.

    Returns:
        A model in eval mode on paired prompts, in the parameters' dtype.

    Source: Ahn et al. 2023, "Transformers learn to implement preconditioned gradient descent for in-context learning",
    eq. 3 and its code.
    """
    n_layers, n_heads, _, x_dim, _ = allparam.shape
    cfg = TransformerConfig(
        x_dim=x_dim, n_context=n_context, n_layers=n_layers, n_heads=n_heads, attention="linear", keys="context",
        normalize_by_context=True, dtype=allparam.dtype,
    )  # fmt: skip
    model = HookedTransformer(cfg)
    eye = torch.eye(cfg.d_model)
    with torch.no_grad():
        for block, parameters in zip(model.blocks, allparam, strict=True):
            for weight in block.attn.parameters():
                weight.zero_()
            block.attn.W_Q[:, :x_dim, :x_dim] = parameters[:, 1]
            block.attn.W_K.copy_(eye.expand_as(block.attn.W_K))
            block.attn.W_V[:, :x_dim, :x_dim] = parameters[:, 0].mT
            block.attn.W_V[:, x_dim, x_dim] = 1
            block.attn.W_O.copy_(eye.expand_as(block.attn.W_O))
    return model.eval()
