"""A block of attention and MLP, with every activation on a hook point.

These are the readable routes with hooks; `fast.py` has the quicker ones that the model takes without hooks.
Batched shapes are TransformerLens': q, k, v, z `[batch pos head d_head]`; scores and pattern
`[batch head query_pos key_pos]`.
"""

import torch
import torch.nn as nn
from einops import repeat
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechicl.models.transformer.attention import Attention, GradientDescentStep, Part
from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.config_rules import ELEMENTWISE

SPLIT_INPUTS = ("hook_q_input", "hook_k_input", "hook_v_input")


class LayerNorm(Part):
    """Layer norm or root-mean-square norm, with weights or without.

    The kind is the config's `normalization_type`: "LN" and "LNPre" subtract the mean, "RMS" and "RMSPre" do not; "LN"
    has weights `w` and `b` `[d_model]`, "RMS" has `w`.

    Hooks: `hook_scale` `[batch pos 1]` is the divisor of the stream, `hook_normalized` the quotient, before the weights
    (as in TransformerLens from 3.0 on).
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
        centred = residual - residual.mean(-1, keepdim=True) if self.centres else residual
        scale = self.hook_scale((centred.square().mean(-1, keepdim=True) + self.eps).sqrt())
        normalized = self.hook_normalized(centred / scale)
        if not self.has_weights:
            return normalized
        return normalized * self.w + self.b if self.centres else normalized * self.w


class MLP(Part):
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


class Block(Part):
    """Attention and MLP, each with its norm and its residual update, then clipping."""

    def __init__(self, cfg: TransformerConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.cfg = cfg = cfg.for_layer(layer)
        # a looped model's blocks are one block, so it skips the first norm in every pass
        first = layer == 0 or cfg.recurrent
        self.ln1 = nn.Identity() if cfg.skip_first_norm and first else self._norm()
        self.attn = GradientDescentStep(cfg) if cfg.attention_weights == "gradient_descent" else Attention(cfg)
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
        for module, name, wanted in (*places, (self.attn, "hook_result", cfg.use_attn_result)):
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
        """The attention's normalized inputs: one stream, or one for each head's queries, keys and values."""
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
