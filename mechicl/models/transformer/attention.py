"""Attention with every activation on a hook point: the readable route; `fast.py` has quicker ones.

Shapes are TransformerLens': q, k, v, z `[batch pos head d_head]`; scores and pattern `[batch head query_pos key_pos]`.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens import FactoredMatrix, TransformerLensKeyValueCache
from transformer_lens.hook_points import HookPoint

from mechicl.base.precision import at_least_float32
from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.config_rules import ELEMENTWISE
from mechicl.models.transformer.norms import BlockPart, LayerNorm

ALL = slice(None)


@dataclass(frozen=True)
class Run:
    """The padding of a run of tokens, and the positions that were run before.

    Attributes:
        tokens: False at padding, for the earlier positions too; None for none.
        cache: keys and values of the earlier positions, to which the run adds its own.
        n_before: number of the earlier positions.
    """

    tokens: Bool[Tensor, "batch key_pos"] | None = None
    cache: TransformerLensKeyValueCache | None = None
    n_before: int = 0

    def positions(self, n_keys: int, device: torch.device) -> Int[Tensor, "*batch key_pos"]:
        """Return the positions in the text of all keys: padding is not counted."""
        if self.tokens is None:
            return torch.arange(n_keys, device=device)
        return (self.tokens.cumsum(-1) - 1).clamp(min=0)

    def new_positions(self, tokens: Float[Tensor, "batch pos ..."]) -> Int[Tensor, "*batch pos"]:
        """Return the positions in the text of the run's own tokens (or rows of their stream)."""
        return self.positions(self.n_before + tokens.shape[1], tokens.device)[..., self.n_before :]


NOTHING_ELSE = Run()


def elementwise_attention(cfg: TransformerConfig, scores: Tensor) -> Tensor:
    """Compute the weights of linear or elementwise attention from scores, before masking and normalisation."""
    if cfg.attention == "linear":
        return scores
    if cfg.attention == "leaky_relu":
        return F.leaky_relu(scores, cfg.attention_slope)
    return ELEMENTWISE[cfg.attention](scores)


def key_mask(cfg: TransformerConfig, n_pos: int, rows: slice, device: torch.device) -> Bool[Tensor, "row key_pos"]:
    """True for the keys that the positions `rows` attend to."""
    positions = torch.arange(n_pos, device=device)
    if cfg.keys == "causal":
        mask = positions[rows, None] >= positions
    else:
        visible = positions < n_pos - 1 if cfg.keys == "context" else positions >= 0
        mask = visible.expand(len(positions[rows]), -1)
    # a layer's config has a window if the layer is local
    return mask if cfg.window_size is None else mask & (positions[rows, None] - positions < cfg.window_size)


def rotary_frequencies(
    cfg: TransformerConfig, n_pos: int, device: torch.device, dtype: torch.dtype
) -> tuple[Float[Tensor, "pair"], float]:
    """Return the angle by which each pair of dimensions turns from position to position, and a factor on the result."""
    if cfg.rope_scaling is None:
        exponents = torch.arange(0, cfg.rotary_dim, 2, device=device).to(dtype) / cfg.rotary_dim
        return 1 / cfg.rotary_base**exponents, 1.0
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": cfg.rotary_base, "max_position_embeddings": cfg.n_ctx, **cfg.rope_scaling}
    parameters["partial_rotary_factor"] = cfg.rotary_dim / cfg.d_head
    sizes: dict[str, Any] = {"hidden_size": cfg.d_model, "head_dim": cfg.d_head, "num_attention_heads": cfg.n_heads}
    sizes |= {"max_position_embeddings": parameters.pop("max_position_embeddings"), "rope_parameters": parameters}
    return ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](PretrainedConfig(**sizes), device, seq_len=n_pos)


def rotate(
    cfg: TransformerConfig,
    vectors: Float[Tensor, "batch pos head d_head"],
    positions: Int[Tensor, "*batch pos"],
    n_pos: int = 0,
) -> Float[Tensor, "batch pos head d_head"]:
    """Rotate queries or keys by their positions in a text of `n_pos` tokens (needed if `rotates_by_length`).

    The first `cfg.rotary_dim` dimensions form pairs (i and i + rotary_dim / 2, or neighbours with
    `rotary_adjacent_pairs`); pair i is rotated by position / rotary_base^(2i / rotary_dim) radians, unless
    `rope_scaling` changes these frequencies. Scores then depend on the distance of query and key only. Source: Su et
    al. 2021, section 3.2.2.
    """
    width = cfg.rotary_dim
    # angles of far positions take more digits than half precision has
    turned, rest = at_least_float32(vectors[..., :width]), vectors[..., width:]
    precision = torch.float32 if cfg.rotary_float32 else turned.dtype
    frequencies, factor = rotary_frequencies(cfg, n_pos, vectors.device, precision)
    angles = positions.to(precision)[..., None] * frequencies
    cos, sin = factor * angles.cos()[..., None, :], factor * angles.sin()[..., None, :]  # [*batch pos 1 pair]
    if cfg.rotary_adjacent_pairs:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pairs, dim=-1).flatten(-2) if cfg.rotary_adjacent_pairs else torch.cat(pairs, dim=-1)
    return torch.cat([turned.to(vectors.dtype), rest], dim=-1)


def alibi_slopes(n_heads: int) -> list[float]:
    """Return the slope of each head's linear bias, a geometric sequence (Press et al. 2022, section 3)."""
    largest = 2 ** int(math.log2(n_heads))  # heads beyond a power of two: every second one of twice as many
    slopes = [2 ** (-8 * (head + 1) / largest) for head in range(largest)]
    return slopes + [2 ** (-4 * (2 * head + 1) / largest) for head in range(n_heads - largest)]


def soft_cap(values: Tensor, cap: float) -> Tensor:
    """Bound values smoothly by `cap · tanh(values / cap)`; none without a positive cap."""
    return cap * (values / cap).tanh() if cap > 0 else values


def repeat_groups(vectors: Float[Tensor, "batch pos group d_head"], n_heads: int) -> Tensor:
    """Repeat each group's keys or values for its heads: `[batch pos head d_head]`."""
    n_groups = vectors.shape[2]
    return vectors if n_groups == n_heads else vectors.repeat_interleave(n_heads // n_groups, dim=2)


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
    layer: int = 0
    """The layer that it is in."""
    shortformer: tuple[BlockPart, HookPoint] | None = None
    """The model's positions and their hook, if queries and keys read them and not the stream (Press et al. 2021)."""

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.cfg = cfg
        h, m, d = cfg.n_heads, cfg.d_model, cfg.d_head
        g, grouped = (cfg.n_key_value_heads, "_") if cfg.n_key_value_heads else (h, "")
        matrices = {"W_Q": (h, m, d), f"{grouped}W_K": (g, m, d), f"{grouped}W_V": (g, m, d), "W_O": (h, d, m)}
        shapes = matrices if self.has_matrices else {}
        biases = {"b_Q": (h, d), f"{grouped}b_K": (g, d), f"{grouped}b_V": (g, d), "b_O": (m,)}
        self.add_weights(**shapes | (biases if cfg.attn_bias else {}))
        if cfg.use_qk_norm:
            widths = (d, d) if cfg.qk_norm_over == "head" else (h * d, g * d)
            self.q_norm, self.k_norm = (LayerNorm(cfg, width, "RMS") for width in widths)
        if cfg.sink == "learned":
            self.sink = nn.Parameter(torch.full((h,), float(cfg.sink_score)))
        # read by TransformerLens' ActivationCache when it splits the output of attention by head
        self._result_contribution_scale = cfg.damping
        rotated = ("rot_q", "rot_k") if cfg.rotates else ()
        self.add_hooks("q", "k", "v", *rotated, *self.own_hooks, "z", *(["result"] if cfg.use_attn_result else []))

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch pos *head d_model"] | None = None,
        value_input: Float[Tensor, "batch pos *head d_model"] | None = None,
        run: Run = NOTHING_ELSE,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Compute the layer's output, damping included.

        Keys and values read the same stream as queries by default; each head may have its own stream.
        """
        key_input = query_input if key_input is None else key_input
        value_input = query_input if value_input is None else value_input
        cfg, z = self.cfg, self.mix(query_input, key_input, value_input, run)
        if cfg.use_attn_result:
            result = einsum(z, self.W_O, "batch pos head d, head d model -> batch pos head model")
            out = self.hook_result(cfg.damping * result).sum(2)
        else:
            out = cfg.damping * (z.flatten(2) @ self.W_O.flatten(0, 1))
        return out + cfg.damping * self.b_O if cfg.attn_bias else out

    def mix(
        self, query_input: Tensor, key_input: Tensor, value_input: Tensor, run: Run = NOTHING_ELSE
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Compute each head's z from the streams that its queries, keys and values read; see `forward`.

        In half precision, scores and pattern are float32, as in TransformerLens: sums over keys would overflow.
        """
        q = self.hook_q(self.project(self.placed(query_input, run), "Q"))
        k = self.hook_k(self.project(self.placed(key_input, run), "K"))
        v = self.hook_v(self.project(value_input, "V"))
        cfg, dtype = self.cfg, v.dtype
        q, k, v = self.prepare(q, k, v, run)
        q, k, v = (at_least_float32(repeat_groups(part, q.shape[2])) for part in (q, k, v))
        scores = einsum(q, k, "batch query head d, batch key head d -> batch head query key")
        rows = slice(run.n_before, None)
        scores = self.shape_scores(scores, rows, run)
        mask = self.mask(k.shape[1], rows, q.device, run)
        scores = self.hook_attn_scores(self.masked(scores, mask))
        pattern = self.hook_pattern(self.softmax(scores) if cfg.attention == "softmax" else self.weigh(scores, mask))
        z = einsum(pattern, v, "batch head query key, batch key head d -> batch query head d")
        return self.hook_z((with_momentum(cfg, z, v) if cfg.momentum else z).to(dtype))

    @property
    def QK(self) -> FactoredMatrix:
        """`W_Q W_Kᵀ` `[head d_model d_model]`."""
        return FactoredMatrix(self.W_Q, self.W_K.mT)

    @property
    def OV(self) -> FactoredMatrix:
        """`W_V W_O` `[head d_model d_model]`."""
        return FactoredMatrix(self.W_V, self.W_O)

    def prepare(
        self,
        q: Float[Tensor, "batch row head d_head"],
        k: Float[Tensor, "batch pos group d_head"],
        v: Float[Tensor, "batch pos group d_head"],
        run: Run = NOTHING_ELSE,
        rows: slice = ALL,
        n_hidden: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, clip and rotate queries (of some rows) and keys, and put earlier keys and values before them.

        `n_hidden` positions at the end have no keys here.
        """
        cfg = self.cfg
        if cfg.use_qk_norm:
            q, k = self._normed(self.q_norm, q), self._normed(self.k_norm, k)
        if cfg.clip_qkv is not None:
            q, k, v = (part.clamp(-cfg.clip_qkv, cfg.clip_qkv) for part in (q, k, v))
        if run.cache is not None:
            k, v = run.cache[self.layer].append(k, v)
        if cfg.rotates:
            positions = run.positions(k.shape[1] + n_hidden, q.device)
            # of the whole text, also where some keys are hidden or queries left out
            n_pos = int(positions.max()) + 1 if cfg.rotates_by_length and positions.numel() else 0
            q = self.hook_rot_q(rotate(cfg, q, positions[..., run.n_before :][..., rows], n_pos))
            k = self.hook_rot_k(rotate(cfg, k, positions[..., : k.shape[1]], n_pos))
        return q, k, v

    def _normed(self, norm: LayerNorm, vectors: Tensor) -> Tensor:
        return norm(vectors) if self.cfg.qk_norm_over == "head" else norm(vectors.flatten(2)).view_as(vectors)

    def placed(self, x: Tensor, run: Run = NOTHING_ELSE) -> Tensor:
        """Add positions to the stream that queries or keys read, if these are not in the stream itself."""
        if self.shortformer is None:
            return x
        positions, hook = self.shortformer
        rows = positions.rows(run.new_positions(x))
        rows = hook(rows.expand(x.shape[0], -1, -1).clone())
        return x + (rows if x.ndim == 3 else rows[:, :, None])

    def shape_scores(
        self, products: Float[Tensor, "batch head row key_pos"], rows: slice, run: Run
    ) -> Float[Tensor, "batch head row key_pos"]:
        """Compute scores from products of queries (at `rows` of all positions) and keys: scale, soft cap, ALiBi."""
        cfg = self.cfg
        scores = products if cfg.score_scale == 1 else cfg.score_scale * products
        scores = soft_cap(scores, cfg.attn_scores_soft_cap)
        if cfg.positional_embedding_type != "alibi":
            return scores
        positions = run.positions(scores.shape[-1], scores.device)
        slopes = torch.tensor(alibi_slopes(cfg.n_heads), dtype=torch.float32, device=scores.device)[:, None, None]
        if cfg.falcon_alibi:  # of the key's position, which differs by a constant of the query
            biases = slopes.bfloat16() * positions[..., None, None, :]
            return scores + biases.to(scores) / math.sqrt(cfg.d_head)
        distances = positions[..., rows, None] - positions[..., None, :]  # [*batch row key_pos]
        return scores - (slopes * distances.unsqueeze(-3)).to(scores)

    def mask(
        self, n_keys: int, rows: slice, device: torch.device, run: Run = NOTHING_ELSE
    ) -> Bool[Tensor, "*batch row key_pos"]:
        """True for the keys that rows attend to, `[row key_pos]`, or `[batch 1 row key_pos]` with padding."""
        mask = key_mask(self.cfg, n_keys, rows, device)
        return mask if run.tokens is None else mask & run.tokens[:, None, None]

    def masked(self, scores: Tensor, mask: Tensor) -> Float[Tensor, "batch head row key_pos"]:
        """Return the scores with those of hidden keys replaced."""
        return scores.masked_fill(~mask, -torch.inf if self.cfg.attention == "softmax" else 0)

    def weigh(self, scores: Tensor, mask: Tensor) -> Float[Tensor, "batch head row key_pos"]:
        """Compute the weights of linear or elementwise attention from masked scores."""
        # masked on both sides: a function like exp would give hidden keys weight, or overflow on them
        pattern = elementwise_attention(self.cfg, scores) * mask
        return pattern / mask.sum(-1, keepdim=True).clamp(min=1) if self.cfg.normalize_by_context else pattern

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
        weights, bias = self.weights(which)
        if x.ndim == 3:
            flat = None if bias is None else bias.flatten()
            out = F.linear(x, weights.mT.flatten(0, 1), flat)
            return out.unflatten(-1, (len(weights), -1))
        out = einsum(x, weights, "batch pos head model, head model d -> batch pos head d")
        return out if bias is None else out + bias

    def weights(self, which: str) -> tuple[Float[Tensor, "head d_model d_head"], Float[Tensor, "head d_head"] | None]:
        """Return the matrices and the biases of queries ("Q"), or of each group's keys ("K") or values ("V")."""
        cfg = self.cfg
        shared = "_" if which != "Q" and cfg.n_key_value_heads and not cfg.ungroup_grouped_query_attention else ""
        return getattr(self, f"{shared}W_{which}"), getattr(self, f"{shared}b_{which}") if cfg.attn_bias else None


def _of_each_head(name: str) -> property:
    def repeated(attn: "GroupedQueryAttention") -> Tensor:
        weights = getattr(attn, f"_{name}")
        return weights.repeat_interleave(attn.cfg.n_heads // len(weights), dim=0)

    def refuse(attn: "GroupedQueryAttention", value: Tensor) -> None:
        raise AttributeError(f"heads share {name}: change _{name}, which has {attn.cfg.n_key_value_heads} groups")

    return property(repeated, refuse, doc=f"`_{name}`, repeated for each head that shares it.")


class GroupedQueryAttention(Attention):
    """Attention whose heads share keys and values in groups (Ainslie et al. 2023).

    `_W_K`, `_W_V` `[group d_model d_head]` and `_b_K`, `_b_V` `[group d_head]` are the parameters; `hook_k` and
    `hook_v` have groups instead of heads, and `W_K` and the like repeat each group's weights for its heads.
    """

    W_K, W_V, b_K, b_V = map(_of_each_head, ("W_K", "W_V", "b_K", "b_V"))


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
