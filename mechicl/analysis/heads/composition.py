"""Scores of heads from their weights: circuits from tokens to tokens, and composition between heads."""

import itertools
from typing import Any, Literal, NamedTuple

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from transformer_lens import FactoredMatrix
from transformer_lens.utilities import matrix

from mechicl.base.arguments import checked, count_undefined

BASELINE_DRAWS = 64  # pairs of random matrices whose mean score is the baseline of composition scores
TOKENS_AT_A_TIME = 8192  # of a vocabulary, in float64


@checked
@torch.no_grad()
def composition_scores(
    model: Any, kind: Literal["Q", "K", "V"] = "K", *, baseline: bool = False, seed: int = 0
) -> Float[Tensor, "layer head layer head"]:
    """Score how strongly each head's output feeds into the keys, queries or values of each later head, by weights.

    The score is the Frobenius norm of the product of the earlier head's OV matrix and the later one's QK matrix (its
    transpose for "K", the OV matrix for "V"), divided by the product of their norms. Source: Elhage et al. 2021,
    section "Two-layer attention-only transformers".

    Args:
        model: any model with W_Q, W_K, W_V and W_O. Norms between the weights are left out.
        kind: input of the later head: keys "K" (as induction heads compose), queries "Q" or values "V".
        baseline: subtract the mean score of random normal matrices of these shapes, from 64 draws.

    Returns:
        `[earlier layer, its head, later layer, its head]`, from 0 (no composition) to 1 without the baseline; 0 unless
        the first layer is earlier. With a baseline, a pair in which a matrix is 0 scores minus the baseline. Float64 on
        the CPU.

    Example:
        >>> composition_scores(constructions.induction(d_vocab=5, n_ctx=6), "K")[0, 0, 1, 0].item() > 0.4
        True
    """
    return _compositions(_head_weights(model), kind, seed if baseline else None)


class _HeadWeights(NamedTuple):
    """Weights of all heads, `[layer head d_model d_head]`, of the output `[layer head d_head d_model]`."""

    Q: Tensor
    K: Tensor
    V: Tensor
    O: Tensor

    @property
    def heads(self) -> tuple[int, int]:
        return self.Q.shape[0], self.Q.shape[1]


def _head_weights(model: Any) -> _HeadWeights:
    """Weights in float64 on the CPU; keys and values that a group of heads shares are repeated for each."""
    weights = [getattr(model, f"W_{name}", None) for name in "QKVO"]
    if not all(isinstance(weight, Tensor) for weight in weights):
        raise TypeError(f"model must have heads with weights W_Q, W_K, W_V and W_O, got {type(model).__name__}")
    stacked = [weight.detach().cpu().double() for weight in weights if weight is not None]
    if any(map(count_undefined, stacked)):
        raise ValueError("the model's weights W_Q, W_K, W_V or W_O are not finite")
    n_heads = stacked[0].shape[1]
    return _HeadWeights(*(part.repeat_interleave(n_heads // part.shape[1], dim=1) for part in stacked))


def _over_vocabulary(left: Float[Tensor, "token a"], right: Float[Tensor, "token b"]) -> Float[Tensor, "a b"]:
    product = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64)
    for a, b in zip(left.detach().split(TOKENS_AT_A_TIME), right.detach().split(TOKENS_AT_A_TIME), strict=True):
        product += einsum(a.cpu().double(), b.cpu().double(), "token a, token b -> a b")
    return product


def _eigenvalue_score(product: FactoredMatrix) -> Float[Tensor, "*batch"]:
    values = product.eigenvalues
    size = values.abs().sum(-1)
    return values.real.sum(-1) / size.masked_fill(size == 0, 1)


def circuit_scores(model: Any) -> dict[str, Float[Tensor, "layer head"]]:
    """Scores of weights in `score_heads`: `copying` if outputs have the same vocabulary, and `prefix_matching`."""
    weights, W_E, W_U = _head_weights(model), model.W_E, model.W_U.mT
    scores = {}
    if len(W_E) == len(W_U):
        read = einsum(
            _over_vocabulary(W_U, W_E), weights.V, "out model, layer head model moved -> layer head out moved"
        )
        scores["copying"] = _eigenvalue_score(FactoredMatrix(read, weights.O))
    inner = _over_vocabulary(W_E, W_E)  # moving W_E cyclically to the other end keeps all eigenvalues that are not 0
    compositions = _compositions(weights, "K", None)
    matching = torch.zeros(weights.heads, dtype=torch.float64)
    for layer in range(1, len(matching)):
        strongest = compositions[:layer, :, layer].flatten(0, 1).argmax(0)  # of all earlier heads, for each head
        W_V, W_O = (part[:layer].flatten(0, 1)[strongest] for part in (weights.V, weights.O))
        W_Q, W_K = weights.Q[layer], weights.K[layer]
        read = einsum(W_V, inner, W_Q, "... model moved, model query, ... query score -> ... moved score")
        brought = einsum(W_O, W_K, "... moved model, ... model score -> ... moved score")
        matching[layer] = _eigenvalue_score(FactoredMatrix(read, brought.mT))
    return {**scores, "prefix_matching": matching}


def _compositions(
    weights: _HeadWeights, kind: str, baseline_seed: int | None
) -> Float[Tensor, "layer head layer head"]:
    Q, K, V, O = weights
    left, right = {"Q": (Q, K.mT), "K": (K, Q.mT), "V": (V, O)}[kind]
    chance = 0.0
    if baseline_seed is not None:
        generator = torch.Generator().manual_seed(baseline_seed)
        drawn = [
            torch.randn(BASELINE_DRAWS, *part.shape[2:], generator=generator, dtype=torch.float64)
            for part in (V, O, left, right)
        ]
        pairs = FactoredMatrix(drawn[0], drawn[1]), FactoredMatrix(drawn[2], drawn[3])
        chance = matrix.composition_scores(*pairs, broadcast_dims=False).mean().item()
    # a layer at a time, since the products of all pairs would be large; each matrix keeps its decomposition
    written = [FactoredMatrix(values[:, None], outputs[:, None]) for values, outputs in zip(V, O, strict=True)]
    reads = [FactoredMatrix(a[None], b[None]) for a, b in zip(left, right, strict=True)]
    compositions = torch.zeros(weights.heads * 2, dtype=torch.float64)
    for first, second in itertools.combinations(range(len(weights.Q)), 2):
        scores = matrix.composition_scores(written[first], reads[second], broadcast_dims=False)
        compositions[first, :, second] = scores.nan_to_num(0.0) - chance  # 0 / 0 for a head that is 0
    return compositions
