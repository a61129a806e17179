"""Training of linear transformers, compared with plain PyTorch, its compiler, and jax."""

import tempfile
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from benchmarks.apart import INSTRUCTIONS, Apart
from benchmarks.rows import Row, Settings, alternate, compare_speeds, ratios, row, seconds
from mechicl.training import PRESETS, TrainingConfig, train

EAGER, JAX = "plain eager PyTorch", "jax's best twin"
BARS = {1: {EAGER: ">= 3", JAX: ">= 1.2"}, 5: {EAGER: ">= 1.5", JAX: ">= 2"}}
ONE_CORE_BARS = {1: {EAGER: ">= 3", JAX: ">= 1"}, 5: {EAGER: ">= 1.5", JAX: ">= 1.5"}}
WORDS = {1: "one layer", 5: "five layers"}
STEPS = {1: 300, 5: 60}
BATCH_SIZE = 2048


def linear_peers(n_layers: int, one_core: bool, environment: Mapping[str, str]) -> dict[str, Callable[[], Apart]]:
    """Return the trainings of the same model by name, each in its own process."""
    sizes: dict[str, Any] = {"n_layers": n_layers, "batch_size": BATCH_SIZE}
    a_third = STEPS[n_layers] // 3

    def torch_twin(**options: Any) -> Apart:
        return Apart("torch_twins:plain_training", one_core=one_core, environment=environment, **sizes, **options)

    def jax_twin(name: str) -> Apart:
        return Apart(f"jax_twins:{name}", one_core=one_core, environment=environment, steps=a_third, **sizes)

    made: dict[str, Callable[[], Apart]] = {EAGER: torch_twin, JAX: lambda: jax_twin("Quickest")}
    if not one_core and not environment:
        made |= {
            "the same under torch.compile": lambda: torch_twin(compiled=True),
            "jax as one writes it first": lambda: jax_twin("usual"),
        }
    return made


def linear_rows(
    rounds: int, n_layers: int, *, one_core: bool = False, instructions: str = next(iter(INSTRUCTIONS))
) -> list[Row]:
    """Steps per second of ours over each peer's, by single operations and by compiled steps.

    With a set of instructions, single operations only.
    """
    environment = INSTRUCTIONS[instructions]
    steps, where = STEPS[n_layers], ", one core" if one_core else ""
    where += f", {instructions}" if environment else ""
    bars = (ONE_CORE_BARS if one_core else BARS)[n_layers]
    sizes: dict[str, Any] = {"one_core": one_core, "n_layers": n_layers, "batch_size": BATCH_SIZE}
    ours = {"": lambda: Apart("our_training:Linear", ours=True, environment=environment, **sizes)}
    if not environment:
        ours[", compile=True"] = lambda: Apart("our_training:Linear", ours=True, compiled=True, **sizes)
    speeds, forms = compare_speeds(
        {**ours, **linear_peers(n_layers, one_core, environment)},
        lambda name: steps // (1 if name in ours else 3 if "jax" in name else 4), rounds,
    )  # fmt: skip
    rows = []
    for words in ours:
        mine = speeds.pop(words)
        rows += [
            row(f"training speed over {name}, {WORDS[n_layers]}{where}{words}", ratios(mine, others),
                bars.get(name, "shown"), speed_words(mine, others, forms.get(name)))
            for name, others in speeds.items() if name not in ours
        ]  # fmt: skip
    return rows


def speed_words(mine: list[float], others: list[float], form: str | None) -> str:
    words = f"{median(mine):.3g} against {median(others):.3g} steps/s, batch {BATCH_SIZE}"
    return f"{words}; {form}" if form else words


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
        *(each for name in list(INSTRUCTIONS)[1:] for n in (1, 5) for each in linear_rows(few, n, instructions=name)),
        *seeds_rows(few),
        *(ensemble_row(name, batch_size, few) for name in ("linear", "relu") for batch_size in (64, 256)),
    ]
