"""A block of attention and MLP, with every activation on a hook point.

These are the readable, hooked routes; `fast.py` has the quicker ones that the model takes when nobody looks.
Batched shapes are TransformerLens': q, k, v, z `[batch pos head d_head]`; scores and pattern
`[batch head query_pos key_pos]`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from einops import repeat
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechicl.models.transformer.attention import Attention, GradientDescentStep
from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.elementwise import ELEMENTWISE
from mechicl.models.transformer.norms import LayerNorm

SPLIT_INPUTS = ("hook_q_input", "hook_k_input", "hook_v_input")


class MLP(nn.Module):
    """One hidden layer: `hook_pre` and `hook_post` `[batch pos d_mlp]` around the activation.

    A gated one multiplies its activation by a second projection, `hook_pre_linear` (Shazeer 2020); there, as in
    TransformerLens, `b_in` is added after the product.
    """

    W_in: nn.Parameter
    b_in: nn.Parameter
    W_out: nn.Parameter
    b_out: nn.Parameter
    W_gate: nn.Parameter
    hook_pre_linear: HookPoint

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
        """`act(x W_in + b_in) W_out + b_out`, or `(act(x W_gate) * x W_in + b_in) W_out + b_out`."""
        if self.gated:
            gate = self.act_fn(self.hook_pre(x @ self.W_gate))
            return self.hook_post(gate * self.hook_pre_linear(x @ self.W_in) + self.b_in) @ self.W_out + self.b_out
        pre = self.hook_pre(x @ self.W_in + self.b_in)
        return self.hook_post(self.act_fn(pre)) @ self.W_out + self.b_out


class Block(nn.Module):
    """Attention and MLP, each with its norm and its residual update, then clipping."""

    ln1: LayerNorm | nn.Identity
    ln2: LayerNorm | nn.Identity
    mlp: MLP
    hook_resid_pre: HookPoint
    hook_attn_out: HookPoint
    hook_resid_mid: HookPoint
    hook_mlp_out: HookPoint
    hook_resid_post: HookPoint
    hook_attn_in: HookPoint
    hook_q_input: HookPoint
    hook_k_input: HookPoint
    hook_v_input: HookPoint
    hook_mlp_in: HookPoint

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
        # read by TransformerLens' ActivationCache when it splits the output of the MLP by neuron
        self.residual_contribution_scale = cfg.damping
        # read by its logit lens
        self.hook_out_is_single_residual_stream = True
        for name in ("resid_pre", "attn_out", "resid_post", *(("resid_mid", "mlp_out") if cfg.block_mlp else ())):
            self.add_module(f"hook_{name}", HookPoint())
        self.add_requested_hooks()

    def add_requested_hooks(self) -> None:
        """Make the hook points that the config asks for (`use_...`), and remove those that it does not."""
        cfg = self.cfg
        requested = {"hook_attn_in": cfg.use_attn_in, "hook_mlp_in": cfg.use_hook_mlp_in}
        requested |= dict.fromkeys(SPLIT_INPUTS, cfg.use_split_qkv_input)
        if not cfg.block_mlp:
            requested["hook_mlp_out"] = cfg.use_hook_mlp_in
        places = [(self, name, wanted) for name, wanted in requested.items()]
        # TransformerLens 4 has what heads read in the attention, TransformerLens 3 in the block: here both, one by one
        places += [(self.attn, name, requested[name]) for name in ("hook_attn_in", *SPLIT_INPUTS)]
        for module, name, wanted in (*places, (self.attn, "hook_result", cfg.use_attn_result)):
            if wanted and not hasattr(module, name):
                module.add_module(name, HookPoint().train(module.training))
            elif not wanted and hasattr(module, name):
                delattr(module, name)

    def forward(self, residual: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The stream after this block; every hook fires."""
        cfg = self.cfg
        residual = self.hook_resid_pre(residual)
        residual = residual + self.hook_attn_out(self.attn(*self._attention_inputs(residual)))
        if cfg.block_mlp:
            residual = self.hook_resid_mid(residual)
            read = self.hook_mlp_in(residual.clone()) if cfg.use_hook_mlp_in else residual
            residual = residual + self.hook_mlp_out(cfg.damping * self.mlp(self.ln2(read)))
        elif cfg.use_hook_mlp_in:  # for code that asks every layer for its MLP: one without neurons
            neurons = self.hook_mlp_in(residual.clone())[..., :0]
            residual = residual + self.hook_mlp_out(neurons @ neurons.new_zeros(0, cfg.d_model))
        if cfg.token_clip is not None:
            residual = residual.clamp(-cfg.token_clip, cfg.token_clip)
        return self.hook_resid_post(residual)

    def _attention_inputs(self, residual: Tensor) -> tuple[Tensor, ...]:
        """What the attention reads, normalized: one stream, or one for each head's queries, keys and values."""
        cfg = self.cfg

        def a_copy_for_each_head() -> Float[Tensor, "batch pos head d_model"]:
            return repeat(residual, "batch pos model -> batch pos head model", head=cfg.n_heads).clone()

        def read(name: str) -> Float[Tensor, "batch pos head d_model"]:
            return getattr(self.attn, name)(getattr(self, name)(a_copy_for_each_head()))

        together = read("hook_attn_in") if cfg.use_attn_in else residual
        if not cfg.use_split_qkv_input:
            return (self.ln1(together),)
        return tuple(self.ln1(read(name)) for name in SPLIT_INPUTS)

    def _norm(self) -> LayerNorm | nn.Identity:
        return LayerNorm(self.cfg) if self.cfg.normalization_type else nn.Identity()


class Blocks(nn.ModuleList):
    """The blocks of a model, in order; type checkers know what they are."""

    if TYPE_CHECKING:

        def __getitem__(self, idx: int) -> Block: ...  # type: ignore[override]
        def __iter__(self) -> Iterator[Block]: ...  # type: ignore[override]
