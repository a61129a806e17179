"""Models of every kind with prompts that they read, for hooks and threads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mechicl import constructions
from mechicl.models import LSTMConfig, TransformerConfig, build, wrap
from mechicl.tasks import LinearRegression, RepeatedTokens
from tests.models.modules import NanoGPT

TASK = LinearRegression(x_dim=2, n_context=4)
WORDS = RepeatedTokens(d_vocab=5, n_ctx=8, min_period=2, max_period=4)


@dataclass(frozen=True)
class Opened:
    """A model, prompts of any number by seed, and how it is asked."""

    name: str
    model: Any
    draw: Callable[[int, int], Any]
    ask: Callable[[Any], torch.Tensor]


def make_models() -> list[Opened]:
    """A construction, a softmax transformer, one of tokens, an LSTM, and a wrapped module."""

    def points(n: int, seed: int) -> Any:
        return TASK.sample(n, seed=seed)

    softmax = TransformerConfig(
        x_dim=2, n_context=4, prompt_format="interleaved", attention="softmax", read_in="linear", read_out="linear",
        n_layers=2, n_heads=2, d_model=6, d_mlp=4, attn_only=False, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    attention = {"out": "blocks.{}.attn"}
    wrapped = wrap(
        NanoGPT(d_in=3).eval(), encode="paired", layers="blocks.{}", attention=attention, mlp="blocks.{}.mlp"
    )
    models = {
        "construction": constructions.gradient_descent(x_dim=2, n_context=4, step_size=0.1, steps=2),
        "softmax": build(softmax).eval(),
        "LSTM": build(LSTMConfig(x_dim=2, n_context=4, n_layers=2, d_model=6)).eval(),
        "wrapped": wrapped,
    }
    opened = [Opened(name, model, points, model.predict) for name, model in models.items()]
    tokens = constructions.induction(d_vocab=5, n_ctx=8)
    opened.append(Opened("tokens", tokens, lambda n, seed: WORDS.sample(n, seed=seed).read, tokens))
    return opened
