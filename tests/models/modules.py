"""Modules as a reader might bring them: plain torch, without anything of this package."""

from typing import Any

import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, width: int, n_heads: int, causal: bool):
        super().__init__()
        self.n_heads, self.causal = n_heads, causal
        self.qkv, self.proj, self.dropout = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        pattern = self.dropout(scores.softmax(-1))
        return self.proj((pattern @ v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, n_heads: int, causal: bool):
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, n_heads, causal)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class NanoGPT(nn.Module):
    """On continuous tokens; `name` is an attribute of its own, which wrapping must not touch."""

    name = "mine"

    def __init__(self, d_in: int = 3, width: int = 16, n_heads: int = 4, n_layers: int = 2, causal: bool = True):
        super().__init__()
        self.read_in = nn.Linear(d_in, width)
        self.positions = nn.Parameter(torch.randn(64, width))
        self.blocks = nn.ModuleList(Block(width, n_heads, causal) for _ in range(n_layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, tokens):
        x = self.read_in(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


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


class Looped(nn.Module):
    """One block three times."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.read_in, self.block, self.head = nn.Linear(4, width), Block(width, 2, True), nn.Linear(width, 1)

    def forward(self, tokens):
        x = self.read_in(tokens)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


def mlp(n_numbers: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(n_numbers, 32), nn.ReLU(), nn.Linear(32, 1))


def seeded(make: Any, *args: Any, **kwargs: Any) -> Any:
    """A module with the same weights every time, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(*args, **kwargs).eval()
