"""A training in plain PyTorch: a loop of steps, and linear attention by batched products over all tokens."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor


class Loop:
    """A plain loop of training: a loss, its gradient clipped, a step of Adam.

    Args:
        loss: of new prompts, with a graph.
        compiled: by `torch.compile`.
        fused: Adam's kernel.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[], Tensor], *, clip: float, compiled: bool = False, fused: bool = False
    ):
        self.model = model
        self.loss: Callable[[], Tensor] = torch.compile(loss) if compiled else loss
        self.clip = clip
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
        self.step()  # compiles

    def step(self) -> float:
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.item()

    def steps_per_second(self, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        return steps / (time.perf_counter() - started)


class PlainLinearAttention(nn.Module):
    """Every layer computes queries, keys, values and scores for every token; `repeats` times all layers."""

    def __init__(self, d_model: int, n_layers: int, repeats: int = 1):
        super().__init__()
        self.repeats = repeats
        self.layers = nn.ModuleList()
        for _ in range(n_layers):
            maps = {name: nn.Linear(d_model, d_model, bias=False) for name in ("query", "key", "value", "output")}
            self.layers.append(nn.ModuleDict(maps))
        for weight in self.parameters():
            nn.init.trunc_normal_(
                weight, std=(std := (0.002 / n_layers / repeats / d_model) ** 0.5), a=-2 * std, b=2 * std
            )

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in [*self.layers] * self.repeats:
            assert isinstance(layer, nn.ModuleDict)
            context = tokens[:, :-1]
            q, k, v = layer["query"](tokens), layer["key"](context), layer["value"](context)
            tokens = tokens + layer["output"](torch.bmm(torch.bmm(q, k.transpose(1, 2)), v))
        return -tokens[:, -1, -1]


def squared_error(model: nn.Module, xs: Tensor, ys: Tensor) -> Tensor:
    """The mean squared error of the query's label."""
    tokens = torch.cat([xs, ys], dim=2)
    target = tokens[:, -1, -1].clone()
    tokens[:, -1, -1] = 0
    return (model(tokens) - target).square().mean()


def plain_training(
    n_layers: int, batch_size: int, x_dim: int = 10, n_context: int = 10, compiled: bool = False, repeats: int = 1
) -> Loop:
    """An eager loop, or the same with prompts and loss under `torch.compile`."""
    model = PlainLinearAttention(x_dim + 1, n_layers, repeats)

    def loss() -> Tensor:
        xs = torch.rand(batch_size, n_context + 1, x_dim) - 0.5
        ys = xs @ torch.randn(batch_size, x_dim, 1)
        return squared_error(model, xs, ys)

    return Loop(model, loss, clip=10.0, compiled=compiled)


class ToResult:
    """Trainings up to a held-out loss, on prompts in a file; the arguments are those of `plain_training`."""

    def __init__(self, prompts: str, **sizes: Any):
        self.held_out, self.sizes = torch.load(prompts), sizes

    def seconds_to(self, target: float, seed: int, every: int) -> tuple[float, int]:
        """Return the seconds of a training until the loss is at most `target`, and its steps."""
        torch.manual_seed(seed)
        started = time.perf_counter()
        loop, steps = plain_training(**self.sizes), 1
        while steps % every or self._loss(loop.model) > target:
            loop.step()
            steps += 1
        return time.perf_counter() - started, steps

    @torch.no_grad()
    def _loss(self, model: nn.Module) -> float:
        return squared_error(model, self.held_out["xs"], self.held_out["ys"]).item()
