"""Modules as a user might bring them: plain torch, without anything of this package."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """With a softmax module, or with torch's fused attention."""

    def __init__(self, width: int, n_heads: int, causal: bool, fused: bool = False):
        super().__init__()
        self.n_heads, self.causal, self.fused = n_heads, causal, fused
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.softmax, self.dropout = nn.Softmax(-1), nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.fused:
            z = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            return self.proj(z.transpose(1, 2).flatten(-2))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        pattern = self.dropout(self.softmax(scores))
        return self.proj((pattern @ v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, n_heads: int, causal: bool, fused: bool = False):
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, n_heads, causal, fused)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class NanoGPT(nn.Module):
    """On continuous tokens; it has an attribute `name`, which wrapping must not change."""

    name = "mine"

    def __init__(self, d_in: int = 3, width: int = 16, n_layers: int = 2, causal: bool = True, fused: bool = False):
        super().__init__()
        self.read_in = nn.Linear(d_in, width)
        self.positions = nn.Parameter(torch.randn(64, width))
        self.blocks = nn.ModuleList(Block(width, 4, causal, fused) for _ in range(n_layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, tokens):
        x = self.read_in(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class Checkpointed(NanoGPT):
    """Its blocks run a second time for gradients."""

    def forward(self, tokens):
        x = self.read_in(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.ln_f(x))


class Encoder(nn.Module):
    """Torch's encoder layers, with `nn.MultiheadAttention`."""

    def __init__(self, width: int = 16, n_layers: int = 2):
        super().__init__()
        self.read_in, self.head = nn.Linear(3, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, norm_first=True) for _ in range(n_layers)
        )

    def forward(self, tokens):
        x, mask = self.read_in(tokens), nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


class StackedLSTM(nn.Module):
    """Two of torch's LSTM, which return a tuple each; the answer is read at the last token."""

    def __init__(self, d_in: int = 4, width: int = 12):
        super().__init__()
        self.read_in = nn.Linear(d_in, width)
        self.first, self.second = (nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.read = nn.Linear(width, 1)

    def forward(self, tokens):
        hidden, _ = self.first(self.read_in(tokens))
        hidden, _ = self.second(input=hidden)
        return {"answer": self.read(hidden[:, -1])}


class RecurrentSecond(nn.Module):
    """Torch's LSTM with its default axes: positions first, prompts second; the second returns a tuple."""

    def __init__(self, d_in: int = 4, width: int = 8):
        super().__init__()
        self.first, self.second, self.read = nn.LSTM(d_in, width), nn.LSTM(width, width), nn.Linear(width, 1)

    def forward(self, tokens):
        return self.read(self.second(self.first(tokens)[0])[0])


class Looped(nn.Module):
    """One block three times, under one name or in a list of three."""

    def __init__(self, listed: bool = False, width: int = 8):
        super().__init__()
        self.read_in, self.block, self.head = nn.Linear(4, width), Block(width, 2, True), nn.Linear(width, 1)
        if listed:
            self.blocks = nn.ModuleList([self.block] * 3)
            del self.block

    def forward(self, tokens):
        x = self.read_in(tokens)
        for block in self.blocks if hasattr(self, "blocks") else [self.block] * 3:
            x = block(x)
        return self.head(x)


class KeywordsOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = NanoGPT()

    def forward(self, *, inputs, scale=1.0):
        return scale * self.net(inputs), scale


class GroupedAttention(nn.Module):
    """Four query heads on two of keys and values, in a joint projection, head by head: k, v, then its two queries."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.joint, self.out = nn.Linear(width, 16), nn.Linear(8, width)

    def forward(self, x):
        k, v, q = self.joint(x).unflatten(-1, (2, 4, 2)).split([1, 1, 2], -2)
        q = q.flatten(2, 3)
        k, v = (part.flatten(2, 3).repeat_interleave(2, dim=2) for part in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        return x + self.out(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(-2))


def mlp(n_numbers: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(n_numbers, 32), nn.ReLU(), nn.Linear(32, 1))


def seeded(make: Any, *args: Any, **kwargs: Any) -> Any:
    """A module with the same weights every time, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(*args, **kwargs).eval()
