"""Function-preserving changes of weights that bring two models near each other.

Each function takes two models of one shape and returns two models with the same functions, between whose weights a
straight line makes sense.
"""

import dataclasses
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from mechicl.analysis.weights.products import WeightProducts, read_weight_products, replace_products
from mechicl.base.arguments import count_undefined
from mechicl.models import HookedTransformer, TransformerConfig

Pair = tuple[HookedTransformer, HookedTransformer]
_MAY_DIFFER = {
    "d_head", "score_scale", "n_heads", "initializer_range", "dtype", "device", "seed", "use_attn_result",
    "use_attn_state", "use_attn_in", "use_split_qkv_input", "use_hook_mlp_in", "token_clip",
}  # fmt: skip
_ANY_SCALE, _POSITIVE_SCALE = ("linear",), ("relu", "leaky_relu")


def check_same_shape(a: HookedTransformer, b: HookedTransformer) -> None:
    """Raise ValueError for models that differ in more than weights, number and width of heads, and clipping."""
    fields, others = a.cfg.to_dict(), b.cfg.to_dict()
    differ = {k: (fields[k], others[k]) for k in fields if fields[k] != others[k] and k not in _MAY_DIFFER}
    if differ:
        listed = ", ".join(f"{name}: {first!r} and {second!r}" for name, (first, second) in differ.items())
        raise ValueError(f"a and b must be models of one shape and kind, which differ in {listed}")
    start_a, start_b = (m.initial_weights if a.cfg.prompt_format == "paired" else torch.zeros(0) for m in (a, b))
    if not torch.equal(start_a.cpu().double(), start_b.cpu().double()):
        raise ValueError("a and b must have the same initial weights W_0, which are not on a path of weights")


def sums_values(cfg: TransformerConfig) -> bool:
    """True if momentum sums values without scores, so that values and scores cannot trade a factor."""
    return cfg.momentum > 0 and cfg.momentum_over == "values"


def express_in_products(a: HookedTransformer, b: HookedTransformer) -> Pair:
    """Convert both to float64 models of weights W_KQ and W_PV; fewer heads are padded with idle ones."""
    first, second = _read_padded(a, b)
    return replace_products(a, first), replace_products(b, second)


def rescale_heads(a: HookedTransformer, b: HookedTransformer) -> Pair:
    """Convert both to the gauge where the mean diagonal of W_KQ's x-block is 1 (von Oswald et al. 2023, A.3)."""
    if a.cfg.attention != "linear":
        raise ValueError(f"scores and values can trade a factor in linear attention only, not in {a.cfg.attention!r}")
    if sums_values(a.cfg):
        raise ValueError("scores and values cannot trade a factor with momentum_over='values', which sums values alone")
    first, second = _pad(read_weight_products(a).gauge_fixed(), read_weight_products(b).gauge_fixed())
    return replace_products(a, first), replace_products(b, second)


def align_heads(a: HookedTransformer, b: HookedTransformer) -> Pair:
    """Convert the second model's heads and hidden units to the order, sign and scale nearest to the first one's.

    Heads are matched by assignment: for linear attention by the inner products of `W_KQ ⊗ W_PV`, and the factor c in
    `c W_KQ, W_PV / c` is the one with the least relative squared distance, of either sign; for relu and leaky relu it
    is positive; for softmax, and with momentum over values, there is none. Hidden units of MLPs are only reordered, by
    the inner products of their weights.
    """
    first, second = _read_padded(a, b)
    kind = "softmax" if sums_values(a.cfg) else a.cfg.attention  # softmax has no gauge either
    W_KQ, W_PV, orders = torch.empty_like(second.W_KQ), torch.empty_like(second.W_PV), []
    for layer in range(len(first.W_KQ)):
        order = _assignment((first.W_KQ[layer], first.W_PV[layer]), (second.W_KQ[layer], second.W_PV[layer]), kind)
        orders.append(order)
        for head, other in enumerate(order):
            KQ, PV = second.W_KQ[layer, other], second.W_PV[layer, other]
            factor = _factor(first.W_KQ[layer, head], first.W_PV[layer, head], KQ, PV, kind)
            W_KQ[layer, head], W_PV[layer, head] = factor * KQ, PV / factor
    pair = replace_products(a, first), replace_products(b, dataclasses.replace(second, W_KQ=W_KQ, W_PV=W_PV))
    if a.cfg.sink == "learned":
        sinks = zip(_sinks(replace_products(b, second)), orders, strict=True)
        _set_sinks(pair[1], [values[order] for values, order in sinks])
    if a.cfg.d_mlp is not None:
        _align_hidden_units(*pair)
    return pair


def lift_heads(a: HookedTransformer, b: HookedTransformer) -> Pair:
    """Give both models the heads and hidden units of both; those of the other write nothing.

    On the straight line between these two, each layer's output as a function of its stream moves linearly from the one
    to the other: no gauge, order or sign of heads matters.
    """
    # Both models contain the same W_KQ, so scores are constant on the line; W_PV moves from (PV_a, 0) to (0, PV_b), and
    # a head's write is linear in it.
    first, second = _read_padded(a, b)
    both, silent = torch.cat([first.W_KQ, second.W_KQ], dim=1), torch.zeros_like(first.W_PV)
    values = torch.cat([first.W_PV, silent], dim=1), torch.cat([silent, second.W_PV], dim=1)
    pairs = zip((a, b), values, strict=True)
    wide = [replace_products(m, dataclasses.replace(first, W_KQ=both, W_PV=v)) for m, v in pairs]
    if a.cfg.sink == "learned":
        halves = [_sinks(replace_products(m, p)) for m, p in ((a, first), (b, second))]
        for model in wide:
            _set_sinks(model, [torch.cat(pair) for pair in zip(*halves, strict=True)])
    if a.cfg.d_mlp is None:
        return wide[0], wide[1]
    return _with_both_units(wide[0], wide[1], 0), _with_both_units(wide[1], wide[0], 1)


def _read_padded(a: HookedTransformer, b: HookedTransformer) -> tuple[WeightProducts, WeightProducts]:
    for name, model in (("a", a), ("b", b)):
        if bad := [weight for weight, values in model.named_parameters() if count_undefined(values)]:
            raise ValueError(f"model {name} has weights that are not finite, in {bad[0]}")
    if "," in a.cfg.attention:
        raise ValueError(f"all layers must have one kind of attention for heads to be matched, got {a.cfg.attention!r}")
    return _pad(read_weight_products(a), read_weight_products(b))


def _pad(a: WeightProducts, b: WeightProducts) -> tuple[WeightProducts, WeightProducts]:
    n_heads = max(a.W_KQ.shape[1], b.W_KQ.shape[1])

    def padded(products: Tensor) -> Tensor:
        return torch.nn.functional.pad(products, (0, 0, 0, 0, 0, n_heads - products.shape[1]))

    return a.map(padded), b.map(padded)


def _sinks(model: HookedTransformer) -> list[Tensor]:
    return [block.attn.sink.detach().clone() for block in model.blocks]


@torch.no_grad()
def _set_sinks(model: HookedTransformer, sinks: list[Tensor]) -> None:
    for block, values in zip(model.blocks, sinks, strict=True):
        block.attn.sink.copy_(values)


def _assignment(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], attention: str) -> list[int]:
    pairs = list(zip(a, b, strict=True))
    inner = torch.stack([torch.einsum("aij,bij->ab", x, y) for x, y in pairs])
    if attention in _ANY_SCALE + _POSITIVE_SCALE:
        # <W_KQ ⊗ W_PV, W_KQ' ⊗ W_PV'> = <W_KQ, W_KQ'> <W_PV, W_PV'>, independent of the gauge
        gain = (inner.clamp(min=0) if attention in _POSITIVE_SCALE else inner).prod(0)  # opposite signs do not cancel
    else:  # without a gauge: the least relative squared distance of both products
        gain = sum(each / max(float(x.norm() * y.norm()), 1e-300) for each, (x, y) in zip(inner, pairs, strict=True))
    return scipy.optimize.linear_sum_assignment(np.asarray(gain), maximize=True)[1].tolist()


def _factor(KQ_a: Tensor, PV_a: Tensor, KQ_b: Tensor, PV_b: Tensor, attention: str) -> float:
    """c with the least `|KQ_a - c KQ_b|² / |KQ_a|² + |PV_a - PV_b / c|² / |PV_a|²`."""
    norms = [float(m.norm()) for m in (KQ_a, PV_a, KQ_b, PV_b)]
    if attention not in _ANY_SCALE + _POSITIVE_SCALE or min(norms) == 0:
        return 1.0
    KQ_a, KQ_b, PV_a, PV_b = KQ_a / norms[0], KQ_b / norms[0], PV_a / norms[1], PV_b / norms[1]
    square, linear = float((KQ_b * KQ_b).sum()), float((KQ_a * KQ_b).sum())
    inverse_square, inverse = float((PV_b * PV_b).sum()), float((PV_a * PV_b).sum())
    # With a's norms 1 the distance is c² |KQ_b|² - 2c <KQ_a, KQ_b> + |PV_b|² / c² - 2 <PV_a, PV_b> / c, and constants.
    # Its derivative, times c³ / 2, is a polynomial of degree 4, whose real roots are few enough to try them all.
    roots = np.roots([square, -linear, 0.0, inverse, -inverse_square])
    real = roots[np.abs(roots.imag) < 1e-9 * np.abs(roots)].real
    if attention in _POSITIVE_SCALE:
        real = real[real > 0]
    values = square * real**2 - 2 * linear * real + inverse_square / real**2 - 2 * inverse / real
    return float(real[values.argmin()])


@torch.no_grad()
def _align_hidden_units(a: HookedTransformer, b: HookedTransformer) -> None:
    for one, other in zip(_mlps(a), _mlps(b), strict=True):
        gain = one.W_out @ other.W_out.T + torch.outer(one.b_in, other.b_in)
        for weight, others in zip(_reading(one), _reading(other), strict=True):
            gain += weight.T @ others
        order = scipy.optimize.linear_sum_assignment(gain.numpy(), maximize=True)[1]
        for weight in _reading(other):
            weight.copy_(weight[:, order])
        other.b_in.copy_(other.b_in[order])
        other.W_out.copy_(other.W_out[order])


@torch.no_grad()
def _with_both_units(model: HookedTransformer, other: HookedTransformer, place: int) -> HookedTransformer:
    """Give a model the other's hidden units too, which write nothing; the model's own come first at place 0."""
    cfg = model.cfg
    wide = HookedTransformer(cfg.replace(d_mlp=2 * (cfg.d_mlp or 0)), initial_weights=model.initial_weights)
    narrow = dict(model.named_parameters())
    for name, weight in wide.named_parameters():
        if not name.endswith((".W_in", ".W_gate", ".W_out", ".b_in")):
            weight.copy_(narrow[name])
    for both, acting, silent in zip(_mlps(wide), _mlps(model), _mlps(other), strict=True):
        ordered = (acting, silent) if place == 0 else (silent, acting)
        for weight, *parts in zip(*map(_reading, (both, *ordered)), strict=True):
            weight.copy_(torch.cat(parts, dim=1))
        both.b_in.copy_(torch.cat([m.b_in for m in ordered]))
        both.W_out.copy_(torch.cat([m.W_out if m is acting else torch.zeros_like(m.W_out) for m in ordered]))
        both.b_out.copy_(acting.b_out)
    return wide.eval()


def _reading(mlp: Any) -> list[Tensor]:
    return [mlp.W_in, mlp.W_gate] if mlp.gated else [mlp.W_in]


def _mlps(model: HookedTransformer) -> list[Any]:
    if model.cfg.mlp_location == "input" and model.cfg.d_mlp is not None:
        return [model.input_mlp]
    blocks = list(model.blocks)[:1] if model.cfg.recurrent or model.cfg.share_mlp else list(model.blocks)
    return [block.mlp for block in blocks]
