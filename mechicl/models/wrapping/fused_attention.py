"""Torch's fused attention, computed step by step while hooks listen to its parts.

`F.scaled_dot_product_attention` and `nn.MultiheadAttention` return neither scores, patterns nor single heads. A run
with hooks on these computes them from the queries, keys and values that torch's function is given.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mechicl.base.precision import at_least_float32
from mechicl.models.wrapping.trials import differ

COMPONENTS = ("q", "k", "v", "attn_scores", "pattern", "z")
See = Callable[[str, Tensor], Tensor]


class StepwiseAttention(TorchFunctionMode):
    """A context in which torch's fused attention is computed step by step.

    The first result for each function and shape, without hooks, is compared with torch's own. `see` maps a component's
    name and activation, in TransformerLens' shape, to the activation that the run continues with (None outside the
    sub-modules whose attention is opened); `n_calls` counts attentions since `see` was set.
    """

    def __init__(self, compared: set[Any]):
        super().__init__()
        self.see: See | None = None
        self.n_calls = 0
        self._compared = compared

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, stepwise = kwargs or {}, _STEPWISE.get(func)
        if self.see is None or stepwise is None:
            return func(*args, **kwargs)
        self.n_calls += 1
        shapes = [tuple(each.shape) for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        key = (stepwise, str(shapes), *(each for each in kwargs.values() if isinstance(each, bool)))
        if key not in self._compared:
            with torch.no_grad():
                outputs = func(*args, **kwargs), stepwise(lambda component, activation: activation, *args, **kwargs)
            theirs, ours = (each[0] if isinstance(each, tuple) else each for each in outputs)
            if theirs.shape != ours.shape or differ(theirs, ours):
                raise ValueError(f"torch's {func.__name__} does not return softmax attention here: it cannot be opened")
            self._compared.add(key)
        return stepwise(self.see, *args, **kwargs)


def _attend(see: See, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention of `[batch head pos d_head]`; the mask is True for visible keys, or added to the scores."""
    q, k, v = (see(name, each.transpose(1, 2)).transpose(1, 2) for name, each in (("q", q), ("k", k), ("v", v)))
    dtype, q = v.dtype, at_least_float32(q)  # as torch's kernels do
    k, v = (at_least_float32(each).repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    scores = scale * q @ k.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    scores = see("attn_scores", scores)
    no_key = (scores == -torch.inf).all(-1, keepdim=True)
    pattern = see("pattern", scores.masked_fill(no_key, 0).softmax(-1).masked_fill(no_key, 0))
    return see("z", (pattern @ v).to(dtype).transpose(1, 2)).transpose(1, 2)


def _refuse(**unsupported: bool) -> None:
    for what, given in unsupported.items():
        if given:
            advice = ": call model.eval() first" if what == "dropout" else ""
            raise ValueError(f"fused attention with {what} cannot be opened{advice}")


def _scaled_dot_product(
    see: See, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    _refuse(dropout=dropout_p > 0, other_axes_than_prompt_head_pos=query.ndim != 4)
    if is_causal:
        attn_mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    return _attend(see, query, key, value, attn_mask, query.shape[-1] ** -0.5 if scale is None else scale)


def _multi_head(
    see: See, query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, bias_k: Any, bias_v: Any, add_zero_attn: bool,
    dropout_p: float, out_proj_weight: Tensor, out_proj_bias: Tensor | None, training: bool = True,
    key_padding_mask: Tensor | None = None, need_weights: bool = True, attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False, q_proj_weight: Any = None, k_proj_weight: Any = None,
    v_proj_weight: Any = None, static_k: Any = None, static_v: Any = None, average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`F.multi_head_attention_forward`, which `nn.MultiheadAttention` calls with `[pos prompt d_model]`."""
    _refuse(
        dropout=training and dropout_p > 0,
        additional_keys=add_zero_attn or bias_k is not None or static_k is not None,
        other_axes_than_pos_prompt=query.ndim != 3,
    )
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(read, weight, bias).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
        for read, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    mask: Any = None
    if attn_mask is not None:
        mask = _added(attn_mask, q.dtype)
        mask = mask.unflatten(0, (-1, num_heads)) if mask.ndim == 3 else mask
    if key_padding_mask is not None:
        padding = _added(key_padding_mask, q.dtype)[:, None, None]
        mask = padding if mask is None else mask + padding
    patterns: list[Tensor] = []

    def keep_pattern(component: str, activation: Tensor) -> Tensor:
        activation = see(component, activation)
        if component == "pattern":
            patterns.append(activation)
        return activation

    z = _attend(keep_pattern, q, k, v, mask, q.shape[-1] ** -0.5)
    out = F.linear(z.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if not need_weights:
        return out, None
    pattern = patterns[0].to(q.dtype)
    return out, pattern.mean(1) if average_attn_weights else pattern


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)


_STEPWISE: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _scaled_dot_product,
    F.multi_head_attention_forward: _multi_head,
}
