"""A GPT-2 style model on points, set up as Garg et al. 2022 do it, by `transformers` and by torch's own encoder."""

from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor
from transformers import GPT2Config, GPT2Model

from benchmarks.torch_twins import Loop

X_DIM, N_CONTEXT, WIDTH, LAYERS, HEADS, BATCH_SIZE = 5, 20, 64, 8, 4, 64
N_POS = 2 * N_CONTEXT + 1


class OnPoints(nn.Module):
    """Points and labels in turn, read in and out by linear maps: predictions at the points, `[prompt point]`."""

    def __init__(self, backbone: Callable[[Tensor], Tensor], width: int = WIDTH):
        super().__init__()
        self.read_in, self.backbone, self.read_out = nn.Linear(X_DIM, width), backbone, nn.Linear(width, 1)

    def forward(self, xs: Tensor, ys: Tensor) -> Tensor:
        labels = torch.cat([ys[..., None], ys.new_zeros(*ys.shape, X_DIM - 1)], dim=2)
        tokens = torch.stack([xs, labels], dim=2).flatten(1, 2)[:, :-1]  # without the query's label
        return self.read_out(self.backbone(self.read_in(tokens)))[:, ::2, 0]


class OfTransformers(nn.Module):
    """`GPT2Model` on embeddings that it is given.

    Args:
        attention: "sdpa" (fused) or "eager".
        activation: "gelu_new", its default, is several operations; "gelu_pytorch_tanh" is the same function as one.
    """

    def __init__(self, attention: str, activation: str):
        super().__init__()
        self.model = GPT2Model(
            GPT2Config(
                n_positions=N_POS + 1, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=1, bos_token_id=0,
                eos_token_id=0, activation_function=activation, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                use_cache=False,
            )
        )  # fmt: skip
        self.model.set_attn_implementation(attention)

    def forward(self, embedded: Tensor) -> Tensor:
        return self.model(inputs_embeds=embedded).last_hidden_state


class OfTorch(nn.Module):
    """`nn.TransformerEncoder` with a causal mask and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.positions = nn.Parameter(0.02 * torch.randn(N_POS, WIDTH))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(N_POS))

    def forward(self, embedded: Tensor) -> Tensor:
        return self.encoder(embedded + self.positions, mask=self.mask, is_causal=True)


def training(kind: str, compiled: bool = False, **options: str) -> Loop:
    """A plain loop: new prompts, the mean squared error at all points, gradients clipped at 1, fused Adam.

    Args:
        kind: "transformers" or "torch".
        options: of `OfTransformers`.
    """
    torch.manual_seed(0)
    model = OnPoints(OfTransformers(**options) if kind == "transformers" else OfTorch()).train()
    run = torch.compile(model) if compiled else model

    def loss() -> Tensor:
        xs = torch.randn(BATCH_SIZE, N_CONTEXT + 1, X_DIM)
        ys = (xs @ torch.randn(BATCH_SIZE, X_DIM, 1))[..., 0]
        return (run(xs, ys) - ys).square().mean()

    return Loop(model, loss, clip=1.0, fused=True)
