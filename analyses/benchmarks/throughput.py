"""How many prompts a second one-layer training takes, by batch and d; `growth` measures how times grow with sizes."""

import pandas as pd

from benchmarks.our_training import linear_config, steps_per_second
from benchmarks.rows import Row, Settings, row

DIMENSIONS = (5, 10, 20)
BATCHES = (64, 256, 1024, 4096)


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


def measure(settings: Settings) -> list[Row]:
    training, rows = training_frame(min(settings.rounds, 3)), []
    for x_dim, part in training.groupby("d"):
        speeds = part.groupby("batch size")["prompts a second"].median()
        detail = ", ".join(f"{batch}: {speed / 1e3:.0f}" for batch, speed in speeds.items())
        best = part[part["batch size"] == speeds.idxmax()]["prompts a second"]
        rows.append(row(f"one-layer training, d = n = {x_dim}: thousand prompts a second at the best batch",
                        (best / 1e3).tolist(), "shown", f"by batch: {detail}"))  # fmt: skip
    return rows
