"""Layers with a state in plain PyTorch: a loop over positions that follows their definitions."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpt2_twins import OnPoints
from benchmarks.torch_twins import Loop

WIDTH, LAYERS, HEADS, BATCH_SIZE, X_DIM, N_CONTEXT = 24, 4, 2, 64, 5, 20


class Layer(nn.Module):
    """A layer of one kind: "gated_linear", "delta", "mamba2" or "mesa", with gates per head."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, size = kind, WIDTH // HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.step = (nn.Linear(WIDTH, HEADS) for _ in range(2))
        self.rate, self.skip = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.ones(HEADS))
        self.ridge = nn.Parameter(torch.zeros(HEADS, size))

    def forward(self, stream: Tensor) -> Tensor:
        x = self.norm(stream)
        q, k, v = (project(x).unflatten(-1, (HEADS, -1)) for project in (self.query, self.key, self.value))
        gate = step = torch.ones_like(q[..., 0])  # [prompt pos head]
        if self.kind in ("delta", "mesa"):
            k, step = F.normalize(k, dim=-1), self.step(x).sigmoid()
        if self.kind == "mamba2":
            step = F.softplus(self.step(x))
            gate = (-step * self.rate.exp()).exp()
        if self.kind in ("gated_linear", "mesa"):
            gate = self.gate(x).sigmoid()
        ridge = F.softplus(self.ridge).diag_embed()
        moments = state = x.new_zeros(len(x), HEADS, q.shape[-1], q.shape[-1])
        read = []
        for t in range(x.shape[1]):
            now, size = gate[:, t, :, None, None], step[:, t, :, None]
            state = now * state
            error = v[:, t]
            if self.kind == "delta":
                error = error - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
            state = state + (size * k[:, t])[..., None] * error[..., None, :]
            asked = q[:, t]
            if self.kind == "mesa":
                moments = now * moments + (size * k[:, t])[..., None] * k[:, t, :, None, :]
                asked = torch.linalg.solve(moments + ridge, asked)
            z = torch.einsum("bhk,bhkv->bhv", asked, state)
            read.append(z + self.skip[:, None] * v[:, t] if self.kind == "mamba2" else z)
        return stream + self.output(torch.stack(read, 1).flatten(2))


def training(kind: str) -> Loop:
    """A plain loop of training, with fused Adam: the mean squared error at all points."""
    model = OnPoints(nn.Sequential(*(Layer(kind) for _ in range(LAYERS)), nn.LayerNorm(WIDTH)), X_DIM, WIDTH)

    def loss() -> Tensor:
        xs = torch.randn(BATCH_SIZE, N_CONTEXT + 1, X_DIM)
        ys = (xs @ torch.randn(BATCH_SIZE, X_DIM, 1))[..., 0]
        return (model(xs, ys) - ys).square().mean()

    return Loop(model, loss, clip=1.0, fused=True)
