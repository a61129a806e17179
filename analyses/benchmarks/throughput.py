"""How training scales with the batch and d, and predicting with prompts, points and layers."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks.our_training import linear_config, steps_per_second
from benchmarks.rows import Row, Settings, alternate, row, seconds
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression

DIMENSIONS = (5, 10, 20)
BATCHES = (64, 256, 1024, 4096)
FACTORS = (1, 2, 4, 8, 16)


def training_frame(rounds: int) -> pd.DataFrame:
    """Prompts a second of one-layer training; as many context points as dimensions."""
    rows = []
    for each in range(rounds):
        for x_dim in DIMENSIONS:
            for batch in BATCHES:
                steps = max(20, min(200, 60_000 // batch))
                speed = steps_per_second(linear_config(1, steps, batch, x_dim=x_dim, n_context=x_dim))
                rows.append({"d": x_dim, "batch size": batch, "prompts a second": batch * speed, "seed": each})
    return pd.DataFrame(rows)


def predicting(n_prompts: int = 500, n_context: int = 20, n_layers: int = 2) -> Callable[[], float]:
    """Seconds of predicting with linear attention, d = 10."""
    model = HookedTransformer(TransformerConfig(x_dim=10, n_context=n_context, n_layers=n_layers), seed=0).eval()
    prompts = LinearRegression(x_dim=10, n_context=n_context).sample(n_prompts, seed=0)

    def measure_once() -> float:
        with torch.no_grad():
            return seconds(lambda: model.predict(prompts))

    measure_once()
    return measure_once


GROWING: Mapping[str, Callable[[int], Callable[[], float]]] = {
    "prompts": lambda factor: predicting(n_prompts=1000 * factor),
    "points": lambda factor: predicting(n_context=40 * factor),
    "layers": lambda factor: predicting(n_prompts=2000, n_layers=factor),
}


def cost_frame(rounds: int) -> pd.DataFrame:
    """Seconds by how many times as many prompts, points or layers."""
    rows = []
    for name, make in GROWING.items():
        times = alternate({str(factor): make(factor) for factor in FACTORS}, rounds)
        for factor in FACTORS:
            rows += [
                {"cost by": name, "times as many": factor, "milliseconds": 1e3 * value, "seed": each}
                for each, value in enumerate(times[str(factor)])
            ]
    return pd.DataFrame(rows)


def straightness(sizes: Any, values: Any) -> float:
    """The share of the variance of values that a straight line through them explains."""
    sizes, values = np.asarray(sizes, dtype=float), np.asarray(values, dtype=float)
    slope, start = np.polyfit(sizes, values, 1)
    return 1 - float(np.var(values - start - slope * sizes) / np.var(values))


def slope(sizes: Any, values: Any) -> float:
    """Return the slope of values over sizes on logarithmic axes: 1 if the cost is proportional to the size."""
    return float(np.polyfit(np.log(np.asarray(sizes, float)), np.log(np.asarray(values, float)), 1)[0])


def slopes(part: pd.DataFrame) -> torch.Tensor:
    """That of each round's costs."""
    rounds = [one.sort_values("times as many") for _, one in part.groupby("seed")]
    return torch.tensor([slope(one["times as many"], one["milliseconds"]) for one in rounds], dtype=torch.float64)


def measure(settings: Settings) -> list[Row]:
    """Everything that this part measures."""
    training, cost = training_frame(min(settings.rounds, 3)), cost_frame(max(settings.rounds, 3))
    rows = []
    for x_dim, part in training.groupby("d"):
        speeds = part.groupby("batch size")["prompts a second"].median()
        detail = ", ".join(f"{batch}: {speed / 1e3:.0f}" for batch, speed in speeds.items())
        best = part[part["batch size"] == speeds.idxmax()]["prompts a second"]
        rows.append(row(f"one-layer training, d = n = {x_dim}: thousand prompts a second at the best batch",
                        (best / 1e3).tolist(), "shown", f"by batch: {detail}"))  # fmt: skip
    for name, part in cost.groupby("cost by"):
        medians = part.groupby("times as many")["milliseconds"].median()
        detail = "ms: " + ", ".join(f"x{factor} {value:.1f}" for factor, value in medians.items())
        rows.append(row(f"cost of predicting by {name}: variance that a straight line explains",
                        [straightness(medians.index, medians.to_numpy())], ">= 0.98", detail))  # fmt: skip
        rows.append(row(f"cost of predicting by {name}: slope on logarithmic axes", interval(slopes(part)), "<= 1.1",
                        f"of {FACTORS[0]} to {FACTORS[-1]} times as many", over="rounds"))  # fmt: skip
    return rows
