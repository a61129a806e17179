"""A GPT-2 style model on points, set up as Garg et al. 2022 do it, by `transformers` and by torch's own encoder."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor
from transformers import GPT2Config, GPT2Model

from benchmarks.torch_twins import Loop

BATCH_SIZE = 64


@dataclass(frozen=True)
class Size:
    """Sizes of a model and its prompts."""

    x_dim: int = 5
    n_context: int = 20
    width: int = 64
    layers: int = 8
    heads: int = 4

    @property
    def n_pos(self) -> int:
        return 2 * self.n_context + 1


SIZES = {"gpt2-8l": Size(), "gpt2-12l": Size(x_dim=20, n_context=40, width=256, layers=12, heads=8)}


class OnPoints(nn.Module):
    """Points and labels in turn, read in and out by linear maps: predictions at the points, `[prompt point]`."""

    def __init__(self, backbone: Callable[[Tensor], Tensor], x_dim: int, width: int):
        super().__init__()
        self.read_in, self.backbone, self.read_out = nn.Linear(x_dim, width), backbone, nn.Linear(width, 1)

    def forward(self, xs: Tensor, ys: Tensor) -> Tensor:
        labels = torch.cat([ys[..., None], ys.new_zeros(*ys.shape, xs.shape[-1] - 1)], dim=2)
        tokens = torch.stack([xs, labels], dim=2).flatten(1, 2)[:, :-1]  # without the query's label
        return self.read_out(self.backbone(self.read_in(tokens)))[:, ::2, 0]


class OfTransformers(nn.Module):
    """`GPT2Model` on embeddings that it is given.

    Args:
        attention: "sdpa" (fused) or "eager".
        activation: "gelu_new", its default, is several operations; "gelu_pytorch_tanh" is the same function as one.
    """

    def __init__(self, size: Size, attention: str, activation: str):
        super().__init__()
        self.model = GPT2Model(
            GPT2Config(
                n_positions=size.n_pos + 1, n_embd=size.width, n_layer=size.layers, n_head=size.heads, vocab_size=1,
                bos_token_id=0, eos_token_id=0, activation_function=activation, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0, use_cache=False,
            )
        )  # fmt: skip
        self.model.set_attn_implementation(attention)

    def forward(self, embedded: Tensor) -> Tensor:
        return self.model(inputs_embeds=embedded).last_hidden_state


class OfTorch(nn.Module):
    """`nn.TransformerEncoder` with a causal mask and learned positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, size.layers, nn.LayerNorm(size.width), enable_nested_tensor=False)
        self.positions = nn.Parameter(0.02 * torch.randn(size.n_pos, size.width))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.n_pos))

    def forward(self, embedded: Tensor) -> Tensor:
        return self.encoder(embedded + self.positions, mask=self.mask, is_causal=True)


def training(kind: str, compiled: bool = False, preset: str = "gpt2-8l", **options: str) -> Loop:
    """A plain loop: new prompts, the mean squared error at all points, gradients clipped at 1, fused Adam.

    Args:
        kind: "transformers" or "torch".
        preset: of ours, for the size.
        options: of `OfTransformers`.
    """
    torch.manual_seed(0)
    size = SIZES[preset]
    backbone = OfTransformers(size, **options) if kind == "transformers" else OfTorch(size)
    model = OnPoints(backbone, size.x_dim, size.width).train()
    run = torch.compile(model) if compiled else model

    def loss() -> Tensor:
        xs = torch.randn(BATCH_SIZE, size.n_context + 1, size.x_dim)
        ys = (xs @ torch.randn(BATCH_SIZE, size.x_dim, 1))[..., 0]
        return (run(xs, ys) - ys).square().mean()

    return Loop(model, loss, clip=1.0, fused=True)
