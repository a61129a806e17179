"""Small runs that the tests of training share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mechicl.models import LSTMConfig, TransformerConfig, build
from mechicl.prompts import Prompts, TokenSequences
from mechicl.tasks import LinearRegression, RandomTensors, RepeatedTokens, register
from mechicl.training import TrainingConfig, TrainingResult, train
from mechicl.training.data import make_generators

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


EXACT_READER = READER.replace(dtype="float64")


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


def plain_loss(model: Any, batch: Prompts | TokenSequences) -> Tensor:
    """The mean of -log softmax at the tokens that can be predicted, or of squared errors of points."""
    if isinstance(batch, TokenSequences):
        log_p = model(batch.ids[:, :-1]).log_softmax(dim=2)
        return -log_p.gather(2, batch.ids[:, 1:, None])[..., 0][batch.predictable[:, 1:]].mean()
    points = slice(None) if model.cfg.one_pass else slice(-1, None)
    return ((model.decode(model(model.encode(batch.to(torch.float64)))) - batch.ys[:, points]) ** 2).mean()


def plain_training(
    config: TrainingConfig,
    part: Callable[[Any], torch.nn.Module] | None = None,
    span: range = range(0),
    edit: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of a plain loop on the prompts that a run trains on.

    During a span of steps a part's output is `edit(output, model's input, model of step 20)`.
    """
    (seed,) = config.seeds
    model, earlier = build(config.model, seed), build(config.model, seed)
    adam = torch.optim.AdamW(model.parameters(), weight_decay=config.weight_decay)
    (generator,), losses = make_generators(config, torch.device("cpu")), []
    for step in range(config.steps):
        if step == 20:
            earlier.load_state_dict(model.state_dict())
        for group in adam.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps))
        batch: Any = config.task.sample(config.batch_size, generator=generator)
        handles = []
        if part is not None and edit is not None and step in span:
            ids = batch.ids[:, :-1]
            hook = lambda module, inputs, output, ids=ids: edit(output, ids, earlier)  # noqa: E731
            handles.append(part(model).register_forward_hook(hook))
        loss = plain_loss(model, batch)
        for handle in handles:
            handle.remove()
        adam.zero_grad()
        loss.backward()
        for weight in model.parameters():  # Adam moves weights without a gradient by their momentum, as in an ensemble
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if config.gradient_clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clip)
        adam.step()
        losses.append(loss.item())
    return {name: p.detach() for name, p in model.named_parameters()}, losses


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
