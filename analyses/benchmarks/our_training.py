"""The library's side of what training is compared with: `train`, without what comes before the first step."""

import tempfile
import time
from pathlib import Path
from typing import Any

from mechicl.models import TransformerConfig
from mechicl.tasks import LinearRegression
from mechicl.training import PRESETS, TrainingConfig, train
from mechicl.training.metrics import Metrics


def steps_per_second(config: TrainingConfig) -> float:
    """The speed of `train`, without the time before the first step; of compiled steps, that of the second half."""
    every = config.steps // 2 if config.compile else config.steps
    config = config.replace(eval_every=config.steps, log_every=every)
    with tempfile.TemporaryDirectory() as folder:
        train(config, folder, progress=False)
        return [line for line in Metrics.read(Path(folder)) if "steps_per_second" in line][-1]["steps_per_second"]


def linear_config(
    n_layers: int, steps: int, batch_size: int, n_seeds: int = 1, x_dim: int = 10, n_context: int = 10,
    compiled: bool | None = False,
) -> TrainingConfig:  # fmt: skip
    """Linear attention on uniform inputs, Adam 1e-3, gradients clipped at 10."""
    return TrainingConfig(
        task=LinearRegression(x_dim=x_dim, n_context=n_context),
        model=TransformerConfig(x_dim=x_dim, n_context=n_context, n_layers=n_layers),
        seeds=tuple(range(n_seeds)), steps=steps, batch_size=batch_size, log_every=steps, eval_every=steps,
        eval_prompts=64, cpu=True, routes="measured", compile=compiled,
    )  # fmt: skip


class ToResult:
    """Trainings of a preset's task and model with a constant learning rate, up to a held-out loss."""

    def __init__(self, preset: str, n_seeds: int = 1):
        self.config = PRESETS[preset].replace(schedule="constant", n_snapshots=0, cpu=True)
        self.n_seeds = n_seeds

    def seconds_to(self, target: float, seed: int, every: int) -> tuple[float, int]:
        """Return the seconds of a training until each model's loss was at most `target`, and its steps."""
        seeds = tuple(range(seed, seed + self.n_seeds))
        config = self.config.replace(target_loss=target, eval_every=every, seeds=seeds)
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            result = train(config, folder, progress=False)
            return time.perf_counter() - started, result.record["steps_done"]


GPT2 = PRESETS["gpt2-8l"].replace(curriculum=None, eval_prompts=64, n_snapshots=0, cpu=True, routes="measured")


class OfPreset:
    """Trainings of a GPT-2 style preset; with its own size alone, so that all have one batch size and optimiser."""

    def __init__(self, compiled: bool = False, preset: str = "gpt2-8l"):
        own, known = PRESETS[preset], preset == "gpt2-8l"
        # timing the routes of the large one would take minutes
        self.config = GPT2.replace(
            task=own.task, model=own.model, compile=compiled, routes="measured" if known else "rule"
        )

    def steps_per_second(self, steps: int) -> float:
        return steps_per_second(self.config.replace(steps=steps))


class Linear(OfPreset):
    """Trainings of linear attention."""

    def __init__(self, **sizes: Any):
        self.config = linear_config(steps=1, **sizes)

    def seconds(self, steps: int) -> float:
        """How long a whole training takes: with choosing routes, compiling, evaluation and saves."""
        config = self.config.replace(steps=steps, log_every=steps, eval_every=steps)
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            train(config, folder, progress=False)
            return time.perf_counter() - started


class Recurrent(OfPreset):
    """Trainings of four layers with a state, or with softmax attention."""

    def __init__(self, kind: str):
        base = PRESETS["delta-4l"].replace(curriculum=None, seeds=(0,), eval_prompts=64, cpu=True, routes="measured")
        self.config = base.replace(model=base.model.replace(attention=kind))
