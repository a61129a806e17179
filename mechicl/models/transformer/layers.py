"""The parts of a transformer, with every activation on a hook point: read-in, positions, blocks, read-out.

These are the readable routes with hooks; `fast.py` has the quicker ones that the model takes without hooks. Batched
shapes are TransformerLens': q, k, v, z `[batch pos head d_head]`; scores and pattern `[batch head query_pos key_pos]`.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import repeat
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechicl.base.precision import at_least_float32
from mechicl.models.transformer.attention import Attention, BlockPart, GradientDescentStep
from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.config_rules import ELEMENTWISE, RECURRENT
from mechicl.models.transformer.recurrent import Recurrence

SPLIT_INPUTS = ("hook_q_input", "hook_k_input", "hook_v_input")


class LayerNorm(BlockPart):
    """Layer norm or root-mean-square norm, with weights or without.

    The kind is the config's `normalization_type`: "LN" and "LNPre" subtract the mean, "RMS" and "RMSPre" do not; "LN"
    has weights `w` and `b` `[d_model]`, "RMS" has `w`.

    Hooks: `hook_scale` `[batch pos 1]` is the divisor of the stream, `hook_normalized` the quotient, before the weights
    (as in TransformerLens from 3.0 on). In half precision both are float32, as there, and the result is rounded.
    """

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.eps = cfg.eps
        self.centres = cfg.normalization_type in ("LN", "LNPre")
        self.has_weights = cfg.normalization_type in ("LN", "RMS")
        if self.has_weights:
            self.w = nn.Parameter(torch.ones(cfg.d_model))
            if self.centres:
                self.b = nn.Parameter(torch.zeros(cfg.d_model))
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def forward(self, residual: Float[Tensor, "batch pos *head d_model"]) -> Float[Tensor, "batch pos *head d_model"]:
        """Centre if the kind does, divide by the scale, apply weights if there are any."""
        stream = at_least_float32(residual)
        centred = stream - stream.mean(-1, keepdim=True) if self.centres else stream
        scale = self.hook_scale((centred.square().mean(-1, keepdim=True) + self.eps).sqrt())
        normalized = self.hook_normalized(centred / scale)
        if self.has_weights:
            normalized = normalized * self.w + self.b if self.centres else normalized * self.w
        return normalized.to(residual.dtype)


class MLP(BlockPart):
    """One hidden layer: `hook_pre` and `hook_post` `[batch pos d_mlp]` around the activation.

    A gated one multiplies its activation by a second projection, `hook_pre_linear` (Shazeer 2020); there, as in
    TransformerLens, `b_in` is added after the product.
    """

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        assert cfg.d_mlp is not None
        self.act_fn = ELEMENTWISE[cfg.act_fn]
        self.gated = cfg.gated_mlp
        shapes = {"W_in": (cfg.d_model, cfg.d_mlp), "b_in": (cfg.d_mlp,)}
        shapes |= {"W_out": (cfg.d_mlp, cfg.d_model), "b_out": (cfg.d_model,)}
        if cfg.gated_mlp:
            shapes["W_gate"] = (cfg.d_model, cfg.d_mlp)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.hook_pre = HookPoint()
        if cfg.gated_mlp:
            self.hook_pre_linear = HookPoint()
        self.hook_post = HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Compute `act(x W_in + b_in) W_out + b_out`, or `(act(x W_gate) * x W_in + b_in) W_out + b_out`."""
        if self.gated:
            gate = self.act_fn(self.hook_pre(x @ self.W_gate))
            return self.hook_post(gate * self.hook_pre_linear(x @ self.W_in) + self.b_in) @ self.W_out + self.b_out
        pre = self.hook_pre(x @ self.W_in + self.b_in)
        return self.hook_post(self.act_fn(pre)) @ self.W_out + self.b_out


class Block(BlockPart):
    """Attention and MLP, each with its norm and its residual update, then clipping."""

    def __init__(self, cfg: TransformerConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.cfg = cfg = cfg.for_layer(layer)
        # a looped model's blocks are one block, so it skips the first norm in every pass
        first = layer == 0 or cfg.recurrent
        self.ln1 = nn.Identity() if cfg.skip_first_norm and first else self._norm()
        kind = Recurrence if cfg.attention in RECURRENT else Attention
        self.attn = GradientDescentStep(cfg) if cfg.attention_weights == "gradient_descent" else kind(cfg)
        if cfg.block_mlp:
            self.ln2 = self._norm()
            self.mlp = MLP(cfg)
        # read by TransformerLens' ActivationCache, to split the output of the MLP by neuron, and by its logit lens
        self.residual_contribution_scale = cfg.damping
        self.hook_out_is_single_residual_stream = True
        for name in ("resid_pre", "attn_out", "resid_post", *(("resid_mid", "mlp_out") if cfg.block_mlp else ())):
            self.add_module(f"hook_{name}", HookPoint())
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

    def forward(self, residual: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Compute the stream after this block; every hook fires."""
        cfg = self.cfg
        residual = self.hook_resid_pre(residual)
        residual = residual + self.hook_attn_out(self.attn(*self._attention_inputs(residual)))
        if cfg.block_mlp:
            residual = self.hook_resid_mid(residual)
            read = self.hook_mlp_in(residual.clone()) if cfg.use_hook_mlp_in else residual
            residual = residual + self.hook_mlp_out(cfg.damping * self.mlp(self.ln2(read)))
        elif cfg.use_hook_mlp_in:  # an MLP without neurons, for code that expects one in every layer
            neurons = self.hook_mlp_in(residual.clone())[..., :0]
            residual = residual + self.hook_mlp_out(neurons @ neurons.new_zeros(0, cfg.d_model))
        if cfg.token_clip is not None:
            residual = residual.clamp(-cfg.token_clip, cfg.token_clip)
        return self.hook_resid_post(residual)

    def _attention_inputs(self, residual: Tensor) -> tuple[Tensor, ...]:
        cfg = self.cfg

        def copies_for_heads() -> Float[Tensor, "batch pos head d_model"]:
            return repeat(residual, "batch pos model -> batch pos head model", head=cfg.n_heads).clone()

        def read(name: str) -> Float[Tensor, "batch pos head d_model"]:
            return getattr(self.attn, name)(getattr(self, name)(copies_for_heads()))

        together = read("hook_attn_in") if cfg.use_attn_in else residual
        if not cfg.use_split_qkv_input:
            return (self.ln1(together),)
        return tuple(self.ln1(read(name)) for name in SPLIT_INPUTS)

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

    def forward(
        self, tokens: Float[Tensor, "batch pos d_token"] | Int[Tensor, "batch pos"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """Embed tokens in the stream, without positions."""
        cfg = self.cfg
        if cfg.prompt_format == "token_ids":
            try:
                return F.embedding(tokens, self.W_E)  # refuses negative ids, which indexing would wrap
            except IndexError:
                ids = f"{int(tokens.min())} to {int(tokens.max())}"
                raise IndexError(f"token ids out of range: got {ids}, the vocabulary has 0 to {cfg.d_in - 1}") from None
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
        if cfg.positional_embedding_type == "standard":
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

    def rows(self, positions: range) -> Float[Tensor, "pos d_model"]:
        """Return the update by each of these positions; from a fixed table, in float64 on the CPU."""
        cfg, kind = self.cfg, self.cfg.positional_embedding_type
        n_pos, rows = max(positions, default=-1) + 1, slice(positions.start, positions.stop, positions.step)
        if kind != "sinusoidal" and n_pos > cfg.n_ctx:
            raise ValueError(f"{n_pos} positions, but this model has {cfg.n_ctx} ({kind})")
        if kind == "standard":
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
            self.W_U = nn.Parameter(torch.zeros(cfg.d_model, cfg.d_out))
            if cfg.read_bias:
                self.b_U = nn.Parameter(torch.zeros(cfg.d_out))
        self.hook_in = HookPoint()
        self.hook_out = HookPoint()

    def forward(self, residual: Float[Tensor, "batch row d_model"]) -> Float[Tensor, "batch row d_out"]:
        """Compute outputs (predictions before they are decoded, or logits) from a normalized stream."""
        residual = self.hook_in(residual)
        if self.cfg.read_out == "identity":
            return self.hook_out(-residual[..., self.cfg.y_slot])
        outputs = residual @ self.W_U
        return self.hook_out(outputs + self.b_U if self.cfg.read_bias else outputs)


def sinusoidal_positions(n_pos: int, d_pos: int) -> Float[Tensor, "pos d_pos"]:
    """Compute sines and cosines of geometrically spaced wavelengths, float64 (Vaswani et al. 2017, section 3.5)."""
    index = torch.arange(d_pos, device="cpu")
    wavelengths = 10000.0 ** (2 * (index // 2).double() / d_pos)
    angles = torch.arange(n_pos, device="cpu").double()[:, None] / wavelengths
    return torch.where(index % 2 == 0, angles.sin(), angles.cos())
