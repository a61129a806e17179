"""Training of linear transformers beside plain PyTorch, its compiler, and jax."""

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.jax_twins import quickest, usual
from benchmarks.rows import Row, alternate, ratios, row, seconds
from benchmarks.settings import Settings
from benchmarks.torch_twins import PlainTraining
from mechicl.models import TransformerConfig
from mechicl.tasks import LinearRegression
from mechicl.training import PRESETS, TrainingConfig, train
from mechicl.training.metrics import Metrics

BARS = {1: {"eager": ">= 4", "jax": ">= 1.2"}, 5: {"eager": ">= 1.5", "jax": ">= 2"}}
WORDS = {1: "one layer", 5: "five layers"}


def steps_per_second(config: TrainingConfig) -> float:
    """Of `train`, without what comes before the first step."""
    with tempfile.TemporaryDirectory() as folder:
        train(config, folder, progress=False)
        return [line for line in Metrics.read(Path(folder)) if "steps_per_second" in line][-1]["steps_per_second"]


def linear_config(
    n_layers: int, steps: int, batch_size: int, n_seeds: int = 1, x_dim: int = 10, n_context: int = 10
) -> TrainingConfig:
    """Linear attention on uniform inputs, Adam 1e-3, gradients clipped at 10."""
    return TrainingConfig(
        task=LinearRegression(x_dim=x_dim, n_context=n_context),
        model=TransformerConfig(x_dim=x_dim, n_context=n_context, n_layers=n_layers),
        seeds=tuple(range(n_seeds)), steps=steps, batch_size=batch_size, log_every=steps, eval_every=steps,
        eval_prompts=64, cpu=True,
    )  # fmt: skip


def linear_rows(rounds: int, n_layers: int, batch_size: int = 2048) -> list[Row]:
    """Steps per second of ours over each peer's."""
    steps = {1: 300, 5: 60}[n_layers]
    sizes: dict[str, Any] = {"n_layers": n_layers, "batch_size": batch_size}
    eager, compiled = PlainTraining(**sizes), PlainTraining(**sizes, compiled=True)
    form, best = quickest(**sizes, steps=steps // 3)
    written = usual(**sizes, steps=steps // 3)
    speeds = alternate(
        {
            "ours": lambda: steps_per_second(linear_config(n_layers, steps, batch_size)),
            "plain eager PyTorch": lambda: eager.steps_per_second(steps // 4),
            "the same under torch.compile": lambda: compiled.steps_per_second(steps // 4),
            "jax's best twin": best.steps_per_second,
            "jax as one writes it first": written.steps_per_second,
        },
        rounds,
    )
    ours = speeds.pop("ours")
    details = {"jax's best twin": f"; {form}", "jax as one writes it first": "; plain, unsafe_rbg"}
    bars = {"plain eager PyTorch": BARS[n_layers]["eager"], "jax's best twin": BARS[n_layers]["jax"]}
    return [
        row(f"training speed over {name}, {WORDS[n_layers]}", ratios(ours, theirs), bars.get(name, "shown"),
            f"{median(ours):.3g} against {median(theirs):.3g} steps/s, batch {batch_size}{details.get(name, '')}")
        for name, theirs in speeds.items()
    ]  # fmt: skip


def seeds_row(rounds: int, n_seeds: int = 5, batch_size: int = 2048, steps: int = 60) -> Row:
    """Several one-layer models at once: ours over jax's `vmap`."""
    form, twin = quickest(n_layers=1, batch_size=batch_size, steps=steps // 2, n_seeds=n_seeds)
    speeds = alternate(
        {
            "ours": lambda: steps_per_second(linear_config(1, steps, batch_size, n_seeds)),
            "jax": twin.steps_per_second,
        },
        rounds,
    )
    detail = f"{median(speeds['ours']):.3g} against {median(speeds['jax']):.3g} steps/s, batch {batch_size}; {form}"
    return row(f"training speed over jax's best twin, one layer, {n_seeds} seeds at once",
               ratios(speeds["ours"], speeds["jax"]), "shown", detail)  # fmt: skip


def ensemble_row(name: str, batch_size: int, rounds: int, steps: int = 200) -> Row:
    """The models of one row of Nertinger's table (nine tasks, five seeds) at once, and one after another."""
    whole = PRESETS[f"nertinger-{name}"].replace(
        seeds=(0, 1, 2, 3, 4), steps=steps, batch_size=batch_size, n_snapshots=0, eval_every=steps, log_every=steps,
        eval_prompts=16, cpu=True,
    )  # fmt: skip
    alone = [whole.replace(task=whole.tasks[task], more_tasks=(), seeds=(seed,)) for task, seed in whole.members]

    def training_seconds(config: TrainingConfig) -> float:
        with tempfile.TemporaryDirectory() as folder:
            return seconds(lambda: train(config, folder, progress=False))

    times = alternate(
        {"together": lambda: training_seconds(whole), "apart": lambda: sum(map(training_seconds, alone))}, rounds
    )
    detail = f"{median(times['apart']):.1f} s against {median(times['together']):.1f} s for {steps} steps"
    return row(f"{len(alone)} {name} models one after another over at once, batch {batch_size}",
               ratios(times["apart"], times["together"]), ">= 3", detail)  # fmt: skip


def measure(settings: Settings) -> list[Row]:
    """Everything that this part measures."""
    few = min(settings.rounds, 3)
    return [
        *linear_rows(settings.rounds, 1),
        *linear_rows(settings.rounds, 5),
        seeds_row(few),
        *(ensemble_row(name, batch_size, few) for name in ("linear", "relu") for batch_size in (64, 256)),
    ]
