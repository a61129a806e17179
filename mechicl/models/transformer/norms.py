"""Norms with every activation on a hook point."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from mechicl.base.precision import at_least_float32
from mechicl.models.transformer.config import TransformerConfig


class BlockPart(nn.Module):
    """A part of a network, whose parameters and hooks depend on its config."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def add_weights(self, **shapes: tuple[int, ...]) -> None:
        """Make parameters of these shapes, all zeros."""
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def add_hooks(self, *names: str) -> None:
        """Make hook points, with `hook_` before these names."""
        for name in names:
            self.add_module(f"hook_{name}", HookPoint())


class LayerNorm(BlockPart):
    """Layer norm or root-mean-square norm, with weights or without.

    The kind is by default the config's `normalization_type`, the width that of the stream: "LN" and
    "LNPre" subtract the mean, "RMS" and "RMSPre" do not; "LN" has weights `w` and `b` `[d_model]`, "RMS" has `w`.

    Hooks: `hook_scale` `[batch pos 1]` is the divisor of the stream, `hook_normalized` the quotient, before the weights
    (as in TransformerLens from 3.0 on). In half precision both are float32, as there, and the result is rounded.
    """

    def __init__(self, cfg: TransformerConfig, width: int | None = None, kind: str | None = None):
        super().__init__()
        kind, width = kind or cfg.normalization_type, width or cfg.d_model
        self.eps = cfg.eps
        self.centres = kind in ("LN", "LNPre")
        self.has_weights = kind in ("LN", "RMS")
        if self.has_weights:
            self.w = nn.Parameter(torch.ones(width))
            if self.centres:
                self.b = nn.Parameter(torch.zeros(width))
        self.add_hooks("scale", "normalized")

    def forward(self, residual: Float[Tensor, "batch pos *head d_model"]) -> Float[Tensor, "batch pos *head d_model"]:
        """Centre if the kind does, divide by the scale, apply weights if there are any."""
        stream = at_least_float32(residual)
        centred = stream - stream.mean(-1, keepdim=True) if self.centres else stream
        scale = self.hook_scale((centred.square().mean(-1, keepdim=True) + self.eps).sqrt())
        normalized = self.hook_normalized(centred / scale)
        if self.has_weights:
            normalized = normalized * self.w + self.b if self.centres else normalized * self.w
        return normalized.to(residual.dtype)
