"""Training of linear transformers, compared with plain PyTorch, its compiler, and jax."""

import tempfile
from functools import partial
from statistics import median
from typing import Any

from benchmarks.apart import Apart, peers
from benchmarks.rows import Row, Settings, alternate, compare_speeds, ratios, row, seconds
from mechicl.training import PRESETS, TrainingConfig, train

EAGER, JAX = "plain eager PyTorch", "jax's best twin"
BARS = {1: {EAGER: ">= 3", JAX: ">= 1.2"}, 5: {EAGER: ">= 1.5", JAX: ">= 2"}}
ONE_CORE_BARS = {1: {EAGER: ">= 3", JAX: ">= 1"}, 5: {EAGER: ">= 1.5", JAX: ">= 1.5"}}
WORDS = {1: "one layer", 5: "five layers"}
STEPS = {1: 300, 5: 60}
BATCH_SIZE = 2048


def linear_rows(rounds: int, n_layers: int, *, one_core: bool = False) -> list[Row]:
    """Steps per second of ours over each peer's, by single operations and by compiled steps."""
    steps, bars = STEPS[n_layers], (ONE_CORE_BARS if one_core else BARS)[n_layers]
    sizes: dict[str, Any] = {"one_core": one_core, "n_layers": n_layers, "batch_size": BATCH_SIZE}
    ours = {
        words: partial(Apart, "our_training:Linear", ours=True, compiled=bool(words), **sizes)
        for words in ("", ", compile=True")
    }
    torch_twin = partial(Apart, "torch_twins:plain_training", **sizes)
    others = {EAGER: torch_twin, JAX: partial(Apart, "jax_twins:Quickest", steps=steps // 3, **sizes)}
    if not one_core:
        others["the same under torch.compile"] = partial(torch_twin, compiled=True)
        others["jax as one writes it first"] = partial(Apart, "jax_twins:usual", steps=steps // 3, **sizes)
    speeds, forms = compare_speeds(
        ours | others, lambda name: steps // (1 if name in ours else 3 if "jax" in name else 4), rounds
    )
    where = f"{WORDS[n_layers]}{', one core' if one_core else ''}"
    return [
        row(f"training speed over {name}, {where}{words}", ratios(speeds[words], speeds[name]),
            bars.get(name, "shown"), speed_words(speeds[words], speeds[name], forms.get(name)))
        for words in ours for name in others if name in speeds
    ]  # fmt: skip


def speed_words(mine: list[float], others: list[float], form: str | None) -> str:
    words = f"{median(mine):.3g} against {median(others):.3g} steps/s, batch {BATCH_SIZE}"
    return f"{words}; {form}" if form else words


def whole_row(n_layers: int, bar: str, steps: int = 10_000) -> Row | None:
    """A whole training with default settings, with compiling; jax's steps alone, at their speed over a tenth."""
    sizes: dict[str, Any] = {"n_layers": n_layers, "batch_size": BATCH_SIZE}
    make = {
        "ours": partial(Apart, "our_training:Linear", ours=True, compiled=None, **sizes),
        JAX: partial(Apart, "jax_twins:Quickest", steps=STEPS[n_layers] // 3, **sizes),
    }
    with peers(make) as made:
        if JAX not in made:
            return None
        before = steps / made[JAX].call("steps_per_second", steps // 20)
        ours = made["ours"].call("seconds", steps)
        theirs = (before + steps / made[JAX].call("steps_per_second", steps // 20)) / 2
    words = f"{theirs:.3g} s, without compiling, against {ours:.3g} s with all; {JAX}"
    return row(f"a training of {steps:,} steps as by default, {WORDS[n_layers]}: jax's time over ours",
               [theirs / ours], bar, words)  # fmt: skip


def seeds_rows(rounds: int, n_seeds: int = 5, steps: int = 60) -> list[Row]:
    """Several one-layer models at once: ours over jax's `vmap`."""
    sizes: dict[str, Any] = {"n_layers": 1, "batch_size": BATCH_SIZE, "n_seeds": n_seeds}
    both = {
        "ours": lambda: Apart("our_training:Linear", ours=True, **sizes),
        JAX: lambda: Apart("jax_twins:Quickest", steps=steps // 2, **sizes),
    }
    speeds, forms = compare_speeds(both, lambda name: steps // 2, rounds)
    if JAX not in speeds:
        return []
    mine, theirs = speeds["ours"], speeds[JAX]
    quantity = f"training speed over {JAX}, one layer, {n_seeds} seeds at once"
    return [row(quantity, ratios(mine, theirs), "shown", speed_words(mine, theirs, forms[JAX]))]


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
               ratios(times["apart"], times["together"]), ">= 5" if batch_size < 256 else ">= 3", detail)  # fmt: skip


def measure(settings: Settings) -> list[Row]:
    few = min(settings.rounds, 3)
    return [
        *linear_rows(settings.rounds, 1),
        *linear_rows(settings.rounds, 5),
        *linear_rows(few, 1, one_core=True),
        *linear_rows(few, 5, one_core=True),
        *seeds_rows(few),
        *(ensemble_row(name, batch_size, few) for name in ("linear", "relu") for batch_size in (64, 256)),
    ]
