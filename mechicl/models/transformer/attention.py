"""Attention with every activation on a hook point: the readable route; `fast.py` has quicker ones.

Shapes are TransformerLens': q, k, v, z `[batch pos head d_head]`; scores and pattern `[batch head query_pos key_pos]`.
"""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn as nn
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens import FactoredMatrix
from transformer_lens.hook_points import HookPoint

from mechicl.base.precision import at_least_float32
from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.config_rules import ELEMENTWISE


def elementwise_attention(cfg: TransformerConfig, scores: Tensor) -> Tensor:
    """Compute the weights of linear or elementwise attention from scores, before masking and normalisation."""
    if cfg.attention == "linear":
        return scores
    if cfg.attention == "leaky_relu":
        return torch.nn.functional.leaky_relu(scores, cfg.attention_slope)
    return ELEMENTWISE[cfg.attention](scores)


def key_mask(cfg: TransformerConfig, n_pos: int, rows: slice, device: torch.device) -> Bool[Tensor, "row key_pos"]:
    """True for the keys that the positions `rows` attend to."""
    positions = torch.arange(n_pos, device=device)
    if cfg.keys == "causal":
        return positions[rows, None] >= positions
    visible = positions < n_pos - 1 if cfg.keys == "context" else positions >= 0
    return visible.expand(len(positions[rows]), -1)


def rotate(
    cfg: TransformerConfig, vectors: Float[Tensor, "batch pos head d_head"], positions: Int[Tensor, "pos"]
) -> Float[Tensor, "batch pos head d_head"]:
    """Rotate queries or keys by their positions.

    The first `cfg.rotary_dim` dimensions form pairs (i and i + rotary_dim / 2, or neighbours with
    `rotary_adjacent_pairs`); pair i is rotated by position / rotary_base^(2i / rotary_dim) radians. Scores then depend
    on the distance of query and key only. Source: Su et al. 2021, section 3.2.2.
    """
    width = cfg.rotary_dim
    # angles of far positions take more digits than half precision has
    turned, rest = at_least_float32(vectors[..., :width]), vectors[..., width:]
    exponents = torch.arange(0, width, 2, device=vectors.device, dtype=turned.dtype) / width
    angles = positions.to(turned.dtype)[:, None] / cfg.rotary_base**exponents
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]  # [pos 1 pair]
    if cfg.rotary_adjacent_pairs:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pairs, dim=-1).flatten(-2) if cfg.rotary_adjacent_pairs else torch.cat(pairs, dim=-1)
    return torch.cat([turned.to(vectors.dtype), rest], dim=-1)


def with_momentum(
    cfg: TransformerConfig, z: Float[Tensor, "batch pos head d_head"], v: Float[Tensor, "batch pos head d_head"]
) -> Float[Tensor, "batch pos head d_head"]:
    """Compute momentum attention's z from plain attention's z and the values.

    Both kinds are sums over earlier positions with powers of η (`momentum`): over values z_t + Σ_{i<t} η^(t-i) v_i;
    over outputs Σ_{s<=t} η^(t-s) (1 - η) z_s, except that z_0, where the average starts, has the weight η^t.
    """
    positions = torch.arange(z.shape[1], device=z.device)
    steps = positions[:, None] - positions
    # powers of a number near 1 need more digits than half precision has
    decay = cfg.momentum ** steps.clamp(min=0).to(torch.promote_types(z.dtype, torch.float32))
    summed = "row pos, batch pos head d -> batch row head d"
    if cfg.momentum_over == "values":
        return z + einsum((decay * (steps > 0)).to(z), v, summed)
    shares = 1 - cfg.momentum * (positions > 0).to(decay)
    return einsum((decay * (steps >= 0) * shares).to(z), z, summed)


class BlockPart(nn.Module):
    """A part of a transformer, whose parameters and hooks depend on its config."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Attention(BlockPart):
    """Multi-head attention with softmax or any elementwise function of the scores.

    Weights: W_Q, W_K, W_V `[head d_model d_head]`, W_O `[head d_head d_model]`; biases b_Q, b_K, b_V
    `[head d_head]`, b_O `[d_model]`, and `sink` `[head]` if learned, by the config.
    """

    fused: bool = False
    """True to use torch's fused kernel in runs without hooks: see `fast.fuse_attention`."""
    route: str | None = None
    """Route of runs without hooks through the attention, or None for the cheapest by a rule: see `fast.take_route`."""
    has_matrices: ClassVar[bool] = True
    """True if the four matrices are parameters."""
    own_hooks: ClassVar[tuple[str, ...]] = ("attn_scores", "pattern")
    """Hooks between those of q, k, v and that of z."""

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.cfg = cfg
        h, m, d = cfg.n_heads, cfg.d_model, cfg.d_head
        matrices = {"W_Q": (h, m, d), "W_K": (h, m, d), "W_V": (h, m, d), "W_O": (h, d, m)}
        shapes = matrices if self.has_matrices else {}
        biases = {"b_Q": (h, d), "b_K": (h, d), "b_V": (h, d), "b_O": (m,)} if cfg.attn_bias else {}
        for name, shape in (shapes | biases).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        if cfg.sink == "learned":
            self.sink = nn.Parameter(torch.full((h,), float(cfg.sink_score)))
        # read by TransformerLens' ActivationCache when it splits the output of attention by head
        self._result_contribution_scale = cfg.damping
        rotated = ("rot_q", "rot_k") if cfg.rotates else ()
        for name in ("q", "k", "v", *rotated, *self.own_hooks, "z"):
            self.add_module(f"hook_{name}", HookPoint())
        if cfg.use_attn_result:
            self.hook_result = HookPoint()

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch pos *head d_model"] | None = None,
        value_input: Float[Tensor, "batch pos *head d_model"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Compute the layer's output, damping included.

        Keys and values read the same stream as queries by default; each head may have its own stream.
        """
        cfg, z = self.cfg, self.mix(query_input, key_input, value_input)
        if cfg.use_attn_result:
            result = einsum(z, self.W_O, "batch pos head d, head d model -> batch pos head model")
            out = self.hook_result(cfg.damping * result).sum(2)
        else:
            out = cfg.damping * einsum(z, self.W_O, "batch pos head d, head d model -> batch pos model")
        return out + cfg.damping * self.b_O if cfg.attn_bias else out

    def mix(
        self, query_input: Tensor, key_input: Tensor | None = None, value_input: Tensor | None = None
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Compute each head's z from the streams that its queries, keys and values read; see `forward`."""
        q = self.hook_q(self.project(query_input, "Q"))
        k = self.hook_k(self.project(query_input if key_input is None else key_input, "K"))
        v = self.hook_v(self.project(query_input if value_input is None else value_input, "V"))
        return self.attend(q, k, v)

    @property
    def QK(self) -> FactoredMatrix:
        """`W_Q W_Kᵀ` `[head d_model d_model]`."""
        return FactoredMatrix(self.W_Q, self.W_K.mT)

    @property
    def OV(self) -> FactoredMatrix:
        """`W_V W_O` `[head d_model d_model]`."""
        return FactoredMatrix(self.W_V, self.W_O)

    def attend(
        self,
        q: Float[Tensor, "batch pos head d_head"],
        k: Float[Tensor, "batch pos head d_head"],
        v: Float[Tensor, "batch pos head d_head"],
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Compute each head's scores, pattern and z from queries, keys and values.

        In half precision, scores and pattern are float32, as in TransformerLens: sums over keys would overflow.
        """
        cfg, dtype = self.cfg, v.dtype
        if cfg.rotates:
            positions = torch.arange(q.shape[1], device=q.device)
            q, k = self.hook_rot_q(rotate(cfg, q, positions)), self.hook_rot_k(rotate(cfg, k, positions))
        q, k, v = at_least_float32(q), at_least_float32(k), at_least_float32(v)
        scores = cfg.score_scale * einsum(q, k, "batch query head d, batch key head d -> batch head query key")
        mask = key_mask(cfg, q.shape[1], slice(None), q.device)
        if cfg.attention == "softmax":
            scores = self.hook_attn_scores(scores.masked_fill(~mask, -torch.inf))
            pattern = self.softmax(scores)
        else:
            # masked on both sides: a function like exp would give hidden keys weight, or overflow on them
            scores = self.hook_attn_scores(scores.masked_fill(~mask, 0))
            pattern = elementwise_attention(cfg, scores) * mask
            if cfg.normalize_by_context:
                pattern = pattern / mask.sum(-1, keepdim=True).clamp(min=1)
        pattern = self.hook_pattern(pattern)
        z = einsum(pattern, v, "batch head query key, batch key head d -> batch query head d")
        return self.hook_z((with_momentum(cfg, z, v) if cfg.momentum else z).to(dtype))

    def softmax(self, scores: Float[Tensor, "batch head row key_pos"]) -> Float[Tensor, "batch head row key_pos"]:
        """Compute the softmax over the keys and the sink; a position without visible keys attends to nothing."""
        if self.cfg.sink != "none":
            if self.cfg.sink == "learned":
                sink = self.sink[:, None, None].to(scores).expand(*scores.shape[:-1], 1)
            else:
                sink = scores.new_full((*scores.shape[:-1], 1), self.cfg.sink_score)
            return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        no_key = (scores == -torch.inf).all(-1, keepdim=True)
        return scores.masked_fill(no_key, 0).softmax(-1).masked_fill(no_key, 0)

    def project(self, x: Tensor, which: str) -> Float[Tensor, "batch pos head d_head"]:
        """Compute queries ("Q"), keys ("K") or values ("V") of a stream, or of one stream per head."""
        reads = "batch pos model" if x.ndim == 3 else "batch pos head model"
        out = einsum(x, getattr(self, f"W_{which}"), f"{reads}, head model d -> batch pos head d")
        return out + getattr(self, f"b_{which}") if self.cfg.attn_bias else out


class GradientDescentStep(Attention):
    """Linear attention that computes a step of gradient descent on the stream, with a learned step size.

    The y-dimensions of the stream are targets, the others inputs: the weights are those of von Oswald et al. 2023,
    Proposition 1, and `step_size` `[1]` is the only parameter.
    """

    has_matrices: ClassVar[bool] = False

    def __init__(self, cfg: TransformerConfig):
        super().__init__(cfg)
        self.step_size = nn.Parameter(torch.zeros(1))

    def _targets(self) -> Float[Tensor, "d_model"]:
        indicator = self.step_size.new_zeros(self.cfg.d_model)
        indicator[self.cfg.y_slot] = 1
        return indicator

    @property
    def W_Q(self) -> Float[Tensor, "1 d_model d_model"]:  # type: ignore[override]
        """Reads the inputs."""
        return (1 - self._targets()).diag()[None]

    W_K = W_Q  # type: ignore[assignment]

    @property
    def W_V(self) -> Float[Tensor, "1 d_model d_model"]:  # type: ignore[override]
        """Reads minus the targets."""
        return -self._targets().diag()[None]

    @property
    def W_O(self) -> Float[Tensor, "1 d_model d_model"]:  # type: ignore[override]
        """Writes to the targets."""
        return self.step_size * self._targets().diag()[None]
