"""The two ends of a transformer: tokens and positions into the residual stream, and outputs out of it."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechicl.models.transformer.attention import Part
from mechicl.models.transformer.config import TransformerConfig


class Embed(Part):
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


class PosEmbed(Part):
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
        table = torch.eye(n_pos, cfg.d_pos) if kind == "one_hot" else sinusoidal_positions(n_pos, cfg.d_pos)
        if cfg.read_in == "linear":
            return table[rows].to(self.W_pos) @ self.W_pos
        return F.pad(table[rows].double(), (cfg.d_token, cfg.d_model - cfg.d_token - cfg.d_pos))


class Unembed(Part):
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
    index = torch.arange(d_pos)
    wavelengths = 10000.0 ** (2 * (index // 2).double() / d_pos)
    angles = torch.arange(n_pos).double()[:, None] / wavelengths
    return torch.where(index % 2 == 0, angles.sin(), angles.cos())
