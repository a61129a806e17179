"""Small runs that the tests of training share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mechicl.models import LSTMConfig, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression, RandomTensors, RepeatedTokens, register
from mechicl.training import TrainingConfig, TrainingResult, train

TASK = LinearRegression(x_dim=3, n_context=4)
MODEL = TransformerConfig(x_dim=3, n_context=4, n_layers=1, initializer_range=0.3)
INTERLEAVED = TransformerConfig(
    x_dim=3, n_context=4, prompt_format="interleaved", d_model=8, n_heads=2, attention="softmax"
)
EXACT = MODEL.replace(dtype="float64")
LSTM = LSTMConfig(x_dim=3, n_context=4, n_layers=2, d_model=6, dtype="float64")
WORDS = RepeatedTokens(d_vocab=7, n_ctx=12, min_period=2, max_period=5)
READER = TransformerConfig(
    prompt_format="token_ids", d_vocab=7, n_ctx=12, n_layers=2, n_heads=2, d_model=8, attention="softmax",
    initializer_range=0.3, attn_only=True, normalization_type=None, attn_bias=False, read_bias=False,
)  # fmt: skip


@register
@dataclass(frozen=True)
class BlowsUp(LinearRegression):
    """One training batch in four has a target whose square is not finite."""

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        prompts = super()._sample(n_prompts, random)
        if n_prompts == small().batch_size and float(prompts.xs[0, 0, 0]) > 0.25:
            prompts.ys[0] = 1e30
        return prompts


def small(**changes: object) -> TrainingConfig:
    """A run of a fraction of a second on the CPU."""
    fields: dict[str, object] = {
        "task": TASK, "model": MODEL, "steps": 12, "batch_size": 16, "learning_rate": 0.01, "eval_every": 4,
        "eval_prompts": 32, "log_every": 1, "save_every": 5, "cpu": True,
    }  # fmt: skip
    return TrainingConfig(**(fields | changes))  # pyright: ignore[reportArgumentType]


def reading(**changes: object) -> TrainingConfig:
    """The same on sequences of tokens."""
    return small(**({"task": WORDS, "model": READER} | changes))


def interrupted(config: TrainingConfig, folder: Path, step: int, **options: Any) -> None:
    """A run that is interrupted right after its save at `step`."""

    def stop(saved: int) -> None:
        if saved == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, folder, progress=False, on_save=stop, **options)


def weights(result: TrainingResult, index: int = 0) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in result.models[index].named_parameters()}


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], atol: float, rtol: float = 0.0) -> None:
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], atol=atol, rtol=rtol, msg=lambda text, name=name: f"{name}: {text}"
        )
