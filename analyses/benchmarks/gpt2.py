"""Training of a GPT-2 style model beside `transformers` and torch's own encoder, as Garg et al. 2022 set them up."""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn as nn
from torch import Tensor
from transformers import GPT2Config, GPT2Model

from benchmarks.rows import Row, alternate, ratios, row
from benchmarks.settings import Settings
from benchmarks.training import steps_per_second
from mechicl.training import PRESETS

OURS = PRESETS["gpt2-8l"].replace(curriculum=None, eval_prompts=64, n_snapshots=0, cpu=True)
X_DIM, N_CONTEXT, WIDTH, LAYERS, HEADS = 5, 20, 64, 8, 4
N_POS = 2 * N_CONTEXT + 1


class OnPoints(nn.Module):
    """Points and labels in turn, read in and out by linear maps: predictions at the points, `[prompt point]`."""

    def __init__(self, backbone: Callable[[Tensor], Tensor]):
        super().__init__()
        self.read_in, self.backbone, self.read_out = nn.Linear(X_DIM, WIDTH), backbone, nn.Linear(WIDTH, 1)

    def forward(self, xs: Tensor, ys: Tensor) -> Tensor:
        labels = torch.cat([ys[..., None], ys.new_zeros(*ys.shape, X_DIM - 1)], dim=2)
        tokens = torch.stack([xs, labels], dim=2).flatten(1, 2)[:, :-1]  # without the query's label
        return self.read_out(self.backbone(self.read_in(tokens)))[:, ::2, 0]


class OfTransformers(nn.Module):
    """`GPT2Model` on embeddings that it is given."""

    def __init__(self, attention: str):
        super().__init__()
        self.model = GPT2Model(
            GPT2Config(
                n_positions=N_POS + 1, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=1, bos_token_id=0,
                eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
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


class PeerTraining:
    """A plain loop: new prompts, the mean squared error at all points, gradients clipped at 1, fused Adam."""

    def __init__(self, backbone: nn.Module, compiled: bool = False):
        torch.manual_seed(0)
        self.model = OnPoints(backbone).train()
        self.run = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)
        self.step()  # compiles

    def step(self) -> float:
        xs = torch.randn(OURS.batch_size, N_CONTEXT + 1, X_DIM)
        ys = (xs @ torch.randn(OURS.batch_size, X_DIM, 1))[..., 0]
        loss = (self.run(xs, ys) - ys).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def steps_per_second(self, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        return steps / (time.perf_counter() - started)


def measure(settings: Settings, steps: int = 30) -> list[Row]:
    """Steps per second of ours over each peer's."""
    ours = OURS.replace(steps=steps, eval_every=steps, log_every=steps)
    peers = {
        "transformers' GPT-2, fused attention": PeerTraining(OfTransformers("sdpa")),
        "transformers' GPT-2, plain attention": PeerTraining(OfTransformers("eager")),
        "transformers' GPT-2 under torch.compile": PeerTraining(OfTransformers("eager"), compiled=True),
        "nn.TransformerEncoder": PeerTraining(OfTorch()),
    }
    speeds = alternate(
        {
            "ours": lambda: steps_per_second(ours),
            **{name: lambda peer=peer: peer.steps_per_second(steps) for name, peer in peers.items()},
        },
        settings.rounds,
    )
    size = f"{LAYERS} layers, width {WIDTH}, {N_POS} positions, batch {ours.batch_size}, float32"
    return [
        row(f"training speed of gpt2-8l over {name}", ratios(speeds["ours"], speeds[name]),
            ">= 1.3" if name.endswith("attention") else "shown",
            f"{median(speeds['ours']):.3g} against {median(speeds[name]):.3g} steps/s; {size}")
        for name in peers
    ]  # fmt: skip
