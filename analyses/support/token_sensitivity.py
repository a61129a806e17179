"""Derivatives of the stream with respect to tokens: does a layer copy targets to their inputs' tokens?"""

import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacfwd, vmap

from mechicl.learners import prompt_batches
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts


@dataclass(frozen=True, eq=False)
class TokenSensitivity:
    """Norms of d stream / d token (Frobenius), and means over the context's x tokens."""

    norms: Float[Tensor, "position token prompt"]
    itself: Float[Tensor, "prompt"]  # for the token itself
    next: Float[Tensor, "prompt"]  # for the next token, its target
    other: Float[Tensor, "prompt"]  # for all other tokens


def measure_token_sensitivity(model: HookedTransformer, prompts: Prompts, layer: int = 1) -> TokenSensitivity:
    """Measure on which tokens the stream before a layer depends, at each position of interleaved prompts.

    A layer that copies each target y_i to the token of its input x_i makes the derivative for the next token large.
    Source: von Oswald et al. 2023, section 4 and Fig. 5.
    """
    if model.cfg.prompt_format != "interleaved":
        raise ValueError(f"needs a model of interleaved prompts, got {model.cfg.prompt_format!r}")

    def stream(tokens: Float[Tensor, "pos d_token"]) -> Float[Tensor, "pos d_model"]:
        return model.forward(tokens[None], stop_at_layer=layer)[0]

    n = prompts.n_context
    jacobians = vmap(jacfwd(stream))  # [prompt position d_model token d_token]; forward mode has a tangent for each
    batches = prompt_batches(model, prompts, copies=(2 * n + 1) * max(prompts.x_dim, prompts.y_dim))
    with torch.no_grad(), warnings.catch_warnings():
        # torch's own forward mode still compiles its decompositions that way, at its first use
        warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)
        norms = torch.cat([jacobians(model.encode(part)).square().sum((2, 4)).sqrt() for part in batches])
    norms, inputs = norms.permute(1, 2, 0), torch.arange(0, 2 * n, 2)
    itself, following = norms[inputs, inputs].mean(0), norms[inputs, inputs + 1].mean(0)
    rest = norms[inputs].sum((0, 1)) / n - itself - following
    return TokenSensitivity(norms, itself, following, rest / (2 * n - 1))
