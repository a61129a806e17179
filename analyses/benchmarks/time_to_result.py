"""Seconds until a model trained from scratch is within 5% of the algorithm that it comes to compute."""

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.apart import Apart, peers
from benchmarks.rows import Row, Settings, ratios, row
from mechicl.analysis.behaviour import tuned_descent
from mechicl.training import PRESETS

WITHIN, EVERY, N_SEEDS, N_TUNING = 1.05, 25, 10, 100_000
EAGER, JAX = "plain eager PyTorch", "jax's best twin"
GOALS: dict[str, dict[str, Any]] = {
    "lsa-1l": {"algorithm": "tuned gradient descent", "steps": 1, "gamma": False},
    "lsa-2l-looped": {"algorithm": "tuned GD++", "steps": 2, "gamma": True},
}


def measure(settings: Settings) -> list[Row]:
    """Measure one seed and ten at once; all with Adam 1e-3, clipping at 10, and the same held-out prompts."""
    few = min(settings.rounds, 3)
    rows = [*goal_rows("lsa-1l", 1, few), *goal_rows("lsa-1l", N_SEEDS, few), *goal_rows("lsa-2l-looped", 1, 1)]
    return [*rows, *goal_rows("lsa-2l-looped", N_SEEDS, 1)] if settings.full else rows


def goal_rows(preset: str, n_seeds: int, rounds: int) -> list[Row]:
    """Times of ours and of each peer until every model's held-out loss was below the target, checked every 25 steps.

    Eager PyTorch trains ten models one after another; its time for the deeper model is ten times that of one.
    """
    goal, config = GOALS[preset], PRESETS[preset]
    prompts = config.task.sample(config.eval_prompts, seed=config.eval_seed)
    best = tuned_descent(config.task.sample(N_TUNING, seed=1), goal["steps"], gamma=goal["gamma"])
    loss = (best.predict(prompts) - prompts.query.ys).square().mean().item()
    sizes: dict[str, Any] = {"n_layers": 1, "repeats": goal["steps"], "batch_size": config.batch_size}
    alone = n_seeds > 1 and goal["steps"] == 1 and n_seeds  # trainings of eager PyTorch, one after another
    with tempfile.TemporaryDirectory() as folder:
        for_torch, for_jax = str(Path(folder, "prompts.pt")), str(Path(folder, "prompts.npz"))
        torch.save({"xs": prompts.xs, "ys": prompts.ys}, for_torch)
        ws = torch.linalg.lstsq(prompts.xs.double(), prompts.ys.double()).solution[..., 0]
        np.savez(for_jax, xs=prompts.xs.numpy(), ws=ws.float().numpy())
        several: dict[str, Any] = {} if n_seeds == 1 else {"n_seeds": n_seeds}
        make = {
            "mechicl": lambda: Apart("our_training:ToResult", ours=True, preset=preset, n_seeds=n_seeds),
            EAGER: lambda: Apart("torch_twins:ToResult", prompts=for_torch, **sizes),
            JAX: lambda: Apart("jax_twins:ToResult", prompts=for_jax, **sizes, **several),
        }
        times: dict[str, list[float]] = {}
        steps: dict[str, list[int]] = {}
        with peers(make) as made:
            for number in range(rounds):
                for name, one in made.items():
                    seeds = range(alone or 1) if name == EAGER else [0]
                    runs = [one.call("seconds_to", WITHIN * loss, 100 * number + seed, EVERY) for seed in seeds]
                    share = n_seeds / len(runs) if name == EAGER else 1
                    times.setdefault(name, []).append(share * sum(seconds for seconds, _ in runs))
                    steps.setdefault(name, []).append(max(n for _, n in runs))
    models = "one model" if n_seeds == 1 else f"{n_seeds} models"
    words = f"{preset}, {models}, within 5% of {goal['algorithm']}"
    mine = times.pop("mechicl")
    return [
        row(f"{words}: seconds", mine, "shown", f"{median(steps['mechicl'])} steps; target {WITHIN * loss:.4f}"),
        *(
            row(f"{words}: {name}'s time over ours", ratios(theirs, mine), ">= 1",
                f"{median(theirs):.3g} s, {median(steps[name])} steps")
            for name, theirs in times.items()
        ),
    ]  # fmt: skip
