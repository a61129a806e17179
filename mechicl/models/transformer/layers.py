"""The parts of a transformer, with every activation on a hook point: read-in, positions, blocks, read-out.

These are the readable routes with hooks; `fast.py` has the quicker ones that the model takes without hooks.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import repeat
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechicl.models.transformer.attention import Attention, GradientDescentStep, GroupedQueryAttention, Run
from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.config_rules import ELEMENTWISE, RECURRENT, SOLU
from mechicl.models.transformer.norms import BlockPart, LayerNorm
from mechicl.models.transformer.recurrent import Recurrence

LEARNED = ("standard", "shortformer")
"""Kinds of positions with a learned vector for each."""
SPLIT_INPUTS = ("hook_q_input", "hook_k_input", "hook_v_input")


class MLP(BlockPart):
    """One hidden layer: `hook_pre` and `hook_post` `[batch pos d_mlp]` around the activation.

    A gated one multiplies its activation by a second projection, `hook_pre_linear` (Shazeer 2020); there, as in
    TransformerLens, `b_in` is added after the product. With "solu_ln" a norm `ln` follows the activation `hook_mid`
    (Elhage et al. 2022, "Softmax linear units").
    """

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        assert cfg.d_mlp is not None
        self.act_fn = SOLU[cfg.act_fn] if cfg.act_fn in SOLU else ELEMENTWISE[cfg.act_fn]
        self.gated = cfg.gated_mlp
        kind = "LN" if cfg.normalization_type == "LN" else "LNPre"  # as in TransformerLens
        self.ln = LayerNorm(cfg, cfg.d_mlp, kind) if cfg.act_fn == "solu_ln" else None
        m, d = cfg.d_model, cfg.d_mlp
        self.add_weights(W_in=(m, d), b_in=(d,), W_out=(d, m), b_out=(m,))
        if self.gated:
            self.add_weights(W_gate=(m, d))
        self.add_hooks(*([] if self.ln is None else ["mid"]), "pre", *(["pre_linear"] if self.gated else []), "post")

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Compute `act(x W_in + b_in) W_out + b_out`, or `(act(x W_gate) * x W_in + b_in) W_out + b_out`."""
        if self.gated:
            gate = self.act_fn(self.hook_pre(x @ self.W_gate))
            return self.hook_post(gate * self.hook_pre_linear(x @ self.W_in) + self.b_in) @ self.W_out + self.b_out
        pre = self.hook_pre(x @ self.W_in + self.b_in)
        post = self.act_fn(pre) if self.ln is None else self.ln(self.hook_mid(self.act_fn(pre)))
        return self.hook_post(post) @ self.W_out + self.b_out


class Block(BlockPart):
    """Attention and MLP, each with its norm and its residual update, then clipping."""

    def __init__(self, cfg: TransformerConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.cfg = cfg = cfg.for_layer(layer)
        # a looped model's blocks are one block, so it skips the first norm in every pass
        first = layer == 0 or cfg.recurrent
        self.ln1 = nn.Identity() if cfg.skip_first_norm and first else self._norm()
        plain = GroupedQueryAttention if cfg.n_key_value_heads else Attention
        plain = Recurrence if cfg.attention in RECURRENT else plain
        self.attn = (GradientDescentStep if cfg.attention_weights == "gradient_descent" else plain)(cfg)
        self.attn.layer = layer
        norms = ["ln1"]
        if cfg.block_mlp:
            self.ln2 = self._norm()
            self.mlp = MLP(cfg)
            norms.append("ln2")
        for name in norms if cfg.normalization_type and cfg.norm_location == "both" else ():
            # never folded: their weights scale what is written
            self.add_module(f"{name}_post", LayerNorm(cfg, kind=str(cfg.normalization_type).removesuffix("Pre")))
        # read by TransformerLens' ActivationCache, to split the output of the MLP by neuron, and by its logit lens
        self.residual_contribution_scale = cfg.damping
        self.hook_out_is_single_residual_stream = True
        of_mlp = ("mlp_out",) if cfg.parallel_attn_mlp else ("resid_mid", "mlp_out")
        self.add_hooks("resid_pre", "attn_out", "resid_post", *(of_mlp if cfg.block_mlp else ()))
        self.add_requested_hooks()

    def add_requested_hooks(self) -> None:
        """Make the hook points that the config requires (`use_...`), and remove the others."""
        cfg = self.cfg
        requested = {"hook_attn_in": cfg.use_attn_in, "hook_mlp_in": cfg.use_hook_mlp_in}
        requested |= dict.fromkeys(SPLIT_INPUTS, cfg.use_split_qkv_input)
        if not cfg.block_mlp:
            requested["hook_mlp_out"] = cfg.use_hook_mlp_in
        places = [(self, name, wanted) for name, wanted in requested.items()]
        # TransformerLens 4 has the heads' inputs in the attention, TransformerLens 3 in the block: here both
        places += [(self.attn, name, requested[name]) for name in ("hook_attn_in", *SPLIT_INPUTS)]
        places += [(self.attn, "hook_result", cfg.use_attn_result)]
        places += [(self.attn, "hook_state", cfg.use_attn_state)] if isinstance(self.attn, Recurrence) else []
        for module, name, wanted in places:
            if wanted and not hasattr(module, name):
                module.add_module(name, HookPoint().train(module.training))
            elif not wanted and hasattr(module, name):
                delattr(module, name)

    def forward(
        self, residual: Float[Tensor, "batch pos d_model"], run: Run | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Compute the stream after this block; every hook fires."""
        cfg = self.cfg
        before = residual = self.hook_resid_pre(residual)
        known = {} if run is None else {"run": run}  # a user's replacement may take the stream only
        attended = self.attn(*self._attention_inputs(residual), **known)
        residual = residual + self.hook_attn_out(self.normed_output(attended, "ln1"))
        if cfg.block_mlp:
            residual = residual if cfg.parallel_attn_mlp else self.hook_resid_mid(residual)
            read = before if cfg.parallel_attn_mlp else residual
            read = self.hook_mlp_in(read.clone()) if cfg.use_hook_mlp_in else read
            residual = residual + self.hook_mlp_out(self.write_mlp(read))
        elif cfg.use_hook_mlp_in:  # an MLP without neurons, for code that expects one in every layer
            neurons = self.hook_mlp_in(residual.clone())[..., :0]
            residual = residual + self.hook_mlp_out(neurons @ neurons.new_zeros(0, cfg.d_model))
        if cfg.token_clip is not None:
            residual = residual.clamp(-cfg.token_clip, cfg.token_clip)
        return self.hook_resid_post(residual)

    def write_mlp(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Compute what the MLP adds to the stream, norms and damping included."""
        return self.normed_output(self.cfg.damping * self.mlp(self.normed_input(stream, "ln2")), "ln2")

    def normed_input(self, stream: Float[Tensor, "*batch d_model"], norm: str) -> Float[Tensor, "*batch d_model"]:
        """Apply the norm ("ln1", "ln2") of what a part reads, if it has one there."""
        return stream if self.cfg.norm_location == "after" else getattr(self, norm)(stream)

    def normed_output(self, written: Float[Tensor, "*batch d_model"], norm: str) -> Float[Tensor, "*batch d_model"]:
        """Apply the norm ("ln1", "ln2") of what a part writes, if it has one there."""
        after = self.output_norm(norm)
        return written if after is None else after(written)

    def output_norm(self, norm: str) -> LayerNorm | nn.Identity | None:
        """Return the norm ("ln1", "ln2") of what a part writes; None if it has none there."""
        if self.cfg.norm_location == "before" or not self.cfg.normalization_type:
            return None
        return getattr(self, norm if self.cfg.norm_location == "after" else f"{norm}_post")

    def _attention_inputs(self, residual: Tensor) -> tuple[Tensor, ...]:
        cfg = self.cfg

        def read(name: str) -> Float[Tensor, "batch pos head d_model"]:
            n_heads = cfg.n_groups if name[5] in "kv" else cfg.n_heads
            copies = repeat(residual, "batch pos model -> batch pos head model", head=n_heads).clone()
            return getattr(self.attn, name)(getattr(self, name)(copies))

        together = read("hook_attn_in") if cfg.use_attn_in else residual
        if not cfg.use_split_qkv_input:
            return (self.normed_input(together, "ln1"),)
        return tuple(self.normed_input(read(name), "ln1") for name in SPLIT_INPUTS)

    def _norm(self) -> LayerNorm | nn.Identity:
        return LayerNorm(self.cfg) if self.cfg.normalization_type else nn.Identity()


class Embed(BlockPart):
    """The read-in: token ids looked up in `W_E` `[token d_model]`, continuous tokens mapped by it or padded.

    Weights: `W_E` and, for continuous tokens with `read_bias`, `b_E` `[d_model]`; none if the read-in is the identity,
    which makes tokens the first dimensions of the stream.
    """

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.cfg = cfg
        if cfg.read_in == "linear":
            self.W_E = nn.Parameter(torch.zeros(cfg.d_in, cfg.d_model))
            if cfg.read_bias and cfg.prompt_format != "token_ids":
                self.b_E = nn.Parameter(torch.zeros(cfg.d_model))
        if cfg.post_embedding_ln:
            # never folded: the stream contains what it writes
            self.ln = LayerNorm(cfg, kind="RMS" if str(cfg.normalization_type).startswith("RMS") else "LN")

    def forward(
        self, tokens: Float[Tensor, "batch pos d_token"] | Int[Tensor, "batch pos"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """Embed tokens in the stream, without positions."""
        cfg = self.cfg
        if cfg.prompt_format == "token_ids":
            try:
                embedded = F.embedding(tokens, self.W_E)  # refuses negative ids, which indexing would wrap
            except IndexError:
                ids = f"{int(tokens.min())} to {int(tokens.max())}"
                raise IndexError(f"token ids out of range: got {ids}, the vocabulary has 0 to {cfg.d_in - 1}") from None
            return self.ln(embedded) if cfg.post_embedding_ln else embedded
        if cfg.read_in == "identity":
            return F.pad(tokens, (0, cfg.d_model - cfg.d_token)) if cfg.d_model > cfg.d_token else tokens
        embedded = tokens @ self.W_E
        return embedded + self.b_E if cfg.read_bias else embedded


class PosEmbed(BlockPart):
    """The update of the stream by positions: rows of `W_pos`, or a table of fixed positions that it maps.

    Weights: `W_pos` `[pos d_model]` for "standard" positions; `[d_pos d_model]` for one-hot and sinusoidal ones with a
    linear read-in; none if these are concatenated to the token.
    """

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.cfg = cfg
        if cfg.positional_embedding_type in LEARNED:
            self.W_pos = nn.Parameter(torch.zeros(cfg.n_ctx, cfg.d_model))
        elif cfg.read_in == "linear":
            self.W_pos = nn.Parameter(torch.zeros(cfg.d_pos, cfg.d_model))

    def forward(
        self, tokens: Float[Tensor, "batch pos d"] | Int[Tensor, "batch pos"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the update by the positions of these tokens (or rows of a stream), a copy for each prompt."""
        rows = self.rows(range(tokens.shape[1]))
        rows = rows.to(tokens) if tokens.is_floating_point() else rows
        return rows.repeat(tokens.shape[0], 1, 1)

    def rows(self, positions: range | Int[Tensor, "*batch pos"]) -> Float[Tensor, "*batch pos d_model"]:
        """Return the update by each of these positions; from a fixed table, in float64 on the CPU."""
        cfg, kind = self.cfg, self.cfg.positional_embedding_type
        if isinstance(positions, range):
            n_pos, rows = max(positions, default=-1) + 1, slice(positions.start, positions.stop, positions.step)
        else:
            n_pos, rows = int(positions.max()) + 1 if positions.numel() else 0, positions
        if kind != "sinusoidal" and n_pos > cfg.n_ctx:
            raise ValueError(f"{n_pos} positions, but this model has {cfg.n_ctx} ({kind})")
        if kind in LEARNED:
            return self.W_pos[rows]
        one_hot = kind == "one_hot"
        table = torch.eye(n_pos, cfg.d_pos, device="cpu") if one_hot else sinusoidal_positions(n_pos, cfg.d_pos)
        if cfg.read_in == "linear":
            return table[rows].to(self.W_pos) @ self.W_pos
        return F.pad(table[rows].double(), (cfg.d_token, cfg.d_model - cfg.d_token - cfg.d_pos))


class Unembed(BlockPart):
    """The read-out: a linear map `W_U` `[d_model d_out]`, or minus the y-dimensions of the stream.

    Weights: `W_U` and, with `read_bias`, `b_U` `[d_out]`; none if the read-out is the identity. Hooks: `hook_in`
    `[batch pos d_model]`, after the final norm, and `hook_out` `[batch pos d_out]`.
    """

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.cfg = cfg
        if cfg.read_out == "linear":
            if not cfg.tie_word_embeddings:
                self.W_U = nn.Parameter(torch.zeros(cfg.d_model, cfg.d_out))
            if cfg.read_bias:
                self.b_U = nn.Parameter(torch.zeros(cfg.d_out))
        self.add_hooks("in", "out")

    def forward(self, residual: Float[Tensor, "batch row d_model"]) -> Float[Tensor, "batch row d_out"]:
        """Compute outputs (predictions before they are decoded, or logits) from a normalized stream."""
        cfg, residual = self.cfg, self.hook_in(residual)
        if cfg.read_out == "identity":
            return self.hook_out(-residual[..., cfg.y_slot])
        if tied := cfg.tie_word_embeddings and cfg.embedding_scale != 1:
            residual = residual / cfg.embedding_scale  # the stream is smaller than the vocabulary
        weights = self.embed.W_E if tied else self.W_U.mT
        return self.hook_out(F.linear(residual, weights, self.b_U if cfg.read_bias else None))


class TiedUnembed(Unembed):
    """A read-out by the token embeddings: `W_U` is `W_E` transposed, less the embeddings' scale."""

    def __init__(self, cfg: TransformerConfig, embed: Embed):
        super().__init__(cfg)
        vars(self)["embed"] = embed  # not a part of this one

    @property
    def W_U(self) -> Float[Tensor, "d_model d_out"]:
        """The read-out as a matrix."""
        weights = self.embed.W_E.mT
        return weights if self.cfg.embedding_scale == 1 else weights / self.cfg.embedding_scale


def sinusoidal_positions(n_pos: int, d_pos: int) -> Float[Tensor, "pos d_pos"]:
    """Compute sines and cosines of geometrically spaced wavelengths, float64 (Vaswani et al. 2017, section 3.5)."""
    index = torch.arange(d_pos, device="cpu")
    wavelengths = 10000.0 ** (2 * (index // 2).double() / d_pos)
    angles = torch.arange(n_pos, device="cpu").double()[:, None] / wavelengths
    return torch.where(index % 2 == 0, angles.sin(), angles.cos())
