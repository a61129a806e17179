"""Derivatives of the stream with respect to tokens: does a layer copy targets to their inputs' tokens?"""

import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacfwd, vmap

from mechicl.analysis.layers.layer_learners import check_layer
from mechicl.base.arguments import checked
from mechicl.base.progress import progress_bar
from mechicl.learners import prompt_batches
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.statistics import Result


@dataclass(frozen=True, eq=False)
class TokenSensitivity(Result):
    """Derivatives of the stream at each position with respect to each token; see `measure_token_sensitivity`."""

    norms: Float[Tensor, "position token prompt"]
    itself: Float[Tensor, "prompt"]
    next: Float[Tensor, "prompt"]
    other: Float[Tensor, "prompt"]


@checked(locks=True)
def measure_token_sensitivity(
    model: HookedTransformer, prompts: Prompts, layer: int = 1, *, progress: bool | None = None
) -> TokenSensitivity:
    """Measure on which tokens the stream at each position of interleaved prompts depends, by exact derivatives.

    A layer that copies each target y_i to the token of its input x_i makes the derivative for the next token large.
    Source: von Oswald et al. 2023, section 4 and Fig. 5.

    Args:
        model: a `HookedTransformer` on interleaved prompts (tokens x_1, y_1, x_2, ..., query).
        prompts: prompts to differentiate at.
        layer: the stream before this layer is differentiated; n_layers for the final stream.

    Returns:
        `norms` of d stream / d token (Frobenius), `[position token prompt]`, and means over the context's x tokens,
        `[prompt]`: of the norm for the token `itself`, for the `next` token (its target), and for all `other` tokens.
    """
    check_layer(layer, model.cfg.n_layers)
    if model.cfg.prompt_format != "interleaved" or prompts.n_context == 0 or len(prompts) == 0:
        raise ValueError(f"needs interleaved prompts with context points, got {model.cfg.prompt_format!r}, {prompts}")

    def stream(tokens: Float[Tensor, "pos d_token"]) -> Float[Tensor, "pos d_model"]:
        return model.forward(tokens[None], stop_at_layer=layer)[0]

    n_entries = (2 * prompts.n_context + 1) * max(prompts.x_dim, prompts.y_dim)  # forward mode has a tangent for each
    jacobians = vmap(jacfwd(stream))  # [prompt position d_model token d_token]
    with torch.no_grad(), warnings.catch_warnings():
        # torch's own forward mode still compiles its decompositions that way, at its first use
        warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)
        batches = list(prompt_batches(model, prompts, copies=n_entries))
        parts = [
            jacobians(model.encode(part)).square().sum((2, 4)).sqrt()
            for part in progress_bar(batches, unit="batch", progress=progress, desc="derivatives")
        ]
    norms = torch.cat(parts).permute(1, 2, 0)
    n = prompts.n_context
    inputs = torch.arange(0, 2 * n, 2)
    itself, following = norms[inputs, inputs].mean(0), norms[inputs, inputs + 1].mean(0)
    rest = norms[inputs].sum((0, 1)) / n - itself - following
    return TokenSensitivity(norms, itself, following, rest / (2 * n - 1))
