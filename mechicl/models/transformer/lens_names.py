"""A transformer's weights under the names by which TransformerLens' tools look for them."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import FactoredMatrix
from transformer_lens.utilities import composition_scores

from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.embeddings import Embed, PosEmbed, Unembed
from mechicl.models.transformer.layers import Block, Blocks
from mechicl.models.transformer.lens_methods import LensMethods


class HeadLabels(list[str]):
    """Names of heads: a list, which may also be called for itself, as in TransformerLens before 4."""

    def __call__(self) -> list[str]:
        """The names."""
        return list(self)


class LensNames(LensMethods):
    """The weights of all layers stacked, and the rest of the protocol `TransformerLensModelWithWeights`."""

    cfg: TransformerConfig
    blocks: Blocks
    embed: Embed
    unembed: Unembed
    pos_embed: PosEmbed
    ln_final: Any
    parameters: Callable[..., Iterator[nn.Parameter]]

    def _stack(self, part: str, name: str) -> Tensor:
        return torch.stack([getattr(getattr(block, part), name) for block in self.blocks])

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Query weights of all layers."""
        return self._stack("attn", "W_Q")

    @property
    def W_K(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Key weights of all layers."""
        return self._stack("attn", "W_K")

    @property
    def W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Value weights of all layers."""
        return self._stack("attn", "W_V")

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        """Output weights of all layers."""
        return self._stack("attn", "W_O")

    @property
    def W_in(self) -> Float[Tensor, "layer d_model d_mlp"]:
        """First MLP weights of all layers."""
        return self._stack("mlp", "W_in")

    @property
    def W_out(self) -> Float[Tensor, "layer d_mlp d_model"]:
        """Second MLP weights of all layers."""
        return self._stack("mlp", "W_out")

    @property
    def W_gate(self) -> Float[Tensor, "layer d_model d_mlp"] | None:
        """Gate weights of all layers' gated MLPs; None without gates."""
        return self._stack("mlp", "W_gate") if self.cfg.gated_mlp else None

    @property
    def b_Q(self) -> Float[Tensor, "layer head d_head"]:
        """Query biases of all layers, 0 where they have none."""
        return self._attention_biases("b_Q")

    @property
    def b_K(self) -> Float[Tensor, "layer head d_head"]:
        """Key biases of all layers, 0 where they have none."""
        return self._attention_biases("b_K")

    @property
    def b_V(self) -> Float[Tensor, "layer head d_head"]:
        """Value biases of all layers, 0 where they have none."""
        return self._attention_biases("b_V")

    @property
    def b_O(self) -> Float[Tensor, "layer d_model"]:
        """Output biases of all layers' attention, 0 where they have none."""
        return self._attention_biases("b_O")

    @property
    def b_in(self) -> Float[Tensor, "layer d_mlp"]:
        """First MLP biases of all layers."""
        return self._stack("mlp", "b_in")

    @property
    def b_out(self) -> Float[Tensor, "layer d_model"]:
        """Second MLP biases of all layers."""
        return self._stack("mlp", "b_out")

    def _attention_biases(self, name: str) -> Tensor:
        if self.cfg.attn_bias:
            return self._stack("attn", name)
        cfg = self.cfg
        shape = (cfg.d_model,) if name == "b_O" else (cfg.n_heads, cfg.d_head)
        return self.W_Q.new_zeros(cfg.n_layers, *shape)

    @property
    def QK(self) -> FactoredMatrix:
        """`W_Q W_Kᵀ` `[layer head d_model d_model]`, the product W_KQ that scores are made of."""
        return FactoredMatrix(self.W_Q, self.W_K.mT)

    @property
    def OV(self) -> FactoredMatrix:
        """`W_V W_O` `[layer head d_model d_model]`, the product W_PV that a head writes by."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def W_E(self) -> Float[Tensor, "token d_model"]:
        """The read-in as a matrix."""
        if self.cfg.read_in == "linear":
            return self.embed.W_E
        return torch.eye(self.cfg.d_token, self.cfg.d_model, device=self.cfg.device, dtype=self.cfg.torch_dtype)

    @property
    def W_pos(self) -> Float[Tensor, "pos d_model"]:
        """What each position adds to the stream.

        Raises:
            AttributeError: positions are not added to the stream.
        """
        return self.pos_embed.rows(range(self.cfg.n_ctx)).to(self.W_E)

    @property
    def W_E_pos(self) -> Float[Tensor, "token_and_pos d_model"]:
        """`W_E` and `W_pos`, one below the other."""
        return torch.cat([self.W_E, self.W_pos])

    @property
    def b_U(self) -> Float[Tensor, "d_out"]:
        """The bias of the read-out, 0 where it has none."""
        return self.unembed.b_U if hasattr(self.unembed, "b_U") else self.W_U.new_zeros(self.cfg.d_out)

    @property
    def W_U(self) -> Float[Tensor, "d_model d_out"]:
        """The read-out as a matrix (without the final norm)."""
        if self.cfg.read_out == "linear":
            return self.unembed.W_U
        eye = torch.eye(self.cfg.d_model, device=self.cfg.device, dtype=self.cfg.torch_dtype)
        return -eye[:, self.cfg.y_slot]

    def blocks_with(self, part: str) -> list[tuple[int, Block]]:
        """The blocks that have a part ("attn", "mlp"), with their numbers, as TransformerLens 4 asks for them."""
        return [(layer, block) for layer, block in enumerate(self.blocks) if hasattr(block, part)]

    @property
    def all_head_labels(self) -> HeadLabels:
        """Names of all heads: "L0H0", "L0H1" ..."""
        return HeadLabels(f"L{layer}H{head}" for layer in range(self.cfg.n_layers) for head in range(self.cfg.n_heads))

    @property
    def n_params_total(self) -> int:
        """Number of all parameters, where `cfg.n_params` counts the matrices of the blocks."""
        return sum(weight.numel() for weight in self.parameters())

    def all_composition_scores(
        self, mode: Literal["Q", "K", "V"]
    ) -> Float[Tensor, "layer head layer_after head_after"]:
        """How much each head's output is read by the queries, keys or values of the heads of later layers.

        `|W_OV W| / (|W_OV| |W|)` in Frobenius norms, where W is the later head's `W_QK`, `W_QKᵀ` or `W_OV`; 0 for
        heads that are not later.

        Args:
            mode: "Q", "K" or "V".

        Raises:
            ValueError: another mode.

        Source: Elhage et al. 2021, "A mathematical framework for transformer circuits".
        """
        if mode not in ("Q", "K", "V"):
            raise ValueError(f"mode={mode!r} is not one of ('Q', 'K', 'V')")
        reads = {"Q": self.QK, "K": self.QK.T, "V": self.OV}[mode]
        layers = torch.arange(self.cfg.n_layers, device=self.W_Q.device)
        later = layers[:, None, None, None] < layers[:, None]
        return composition_scores(self.OV, reads, broadcast_dims=True) * later

    def tokens_to_residual_directions(
        self, tokens: str | int | Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch_out d_model"]:
        """The direction of the scaled stream that raises each output (a token's logit, or a dimension of y).

        A column of `W_U`, times the final norm's weights where these are not folded: so the products with the parts of
        a stream, as `ActivationCache.logit_attrs` takes them, sum to the logit less its bias (`output_biases`) whether
        `process_weights` was called or not. TransformerLens gives the column of `W_U`, and says that the weights
        should be folded first; then the two agree. One token, a tensor of one too, gives one direction `[d_model]`.

        Raises:
            ValueError: a text that is not one token.
        """
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        directions = self.W_U if not hasattr(self.ln_final, "w") else self.ln_final.w[:, None] * self.W_U
        if isinstance(tokens, Tensor) and tokens.numel() == 1:
            tokens = int(tokens)
        return directions.T[tokens]

    @property
    def output_biases(self) -> Float[Tensor, "d_out"]:
        """What outputs have without any stream: `b_U`, and what the final norm's bias adds where it is not folded."""
        return self.b_U + self.ln_final.b @ self.W_U if hasattr(self.ln_final, "b") else self.b_U

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, "d_model"]:
        """Sum of the output biases of the blocks before `layer` (and its attention's, with `mlp_input`)."""
        bias = torch.zeros(self.cfg.d_model, device=self.cfg.device, dtype=self.cfg.torch_dtype)
        for index in range(min(layer + mlp_input, self.cfg.n_layers)):
            block = self.blocks[index]
            if self.cfg.attn_bias:
                bias = bias + self.cfg.damping * block.attn.b_O
            if self.cfg.block_mlp and include_mlp_biases and index < layer:
                bias = bias + self.cfg.damping * block.mlp.b_out
        return bias
