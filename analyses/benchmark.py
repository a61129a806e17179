"""Prints, in one run, every ratio that docs/project/benchmarks.md quotes: `make bench`.

Speed is measured beside what one would otherwise run: a plain eager PyTorch loop that attends with batched matrix
products over all tokens. Both draw the same kind of prompts, clip, and step Adam. Rounds alternate, and the ratio is
taken round by round.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from mechicl.analysis.weights import linear_attention_optimum
from mechicl.checkpoints import load_checkpoint
from mechicl.models import TransformerConfig
from mechicl.reports.one_layer import compare_one_layer
from mechicl.training import PRESETS, TrainingConfig, train
from mechicl.training.state import Metrics


class PlainLinearAttention(nn.Module):
    """The baseline: every layer computes queries, keys, values and scores for every token."""

    def __init__(self, d_model: int, n_layers: int):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(n_layers):
            maps = {name: nn.Linear(d_model, d_model, bias=False) for name in ("query", "key", "value", "output")}
            self.layers.append(nn.ModuleDict(maps))
        for weight in self.parameters():
            nn.init.trunc_normal_(weight, std=(0.002 / n_layers / d_model) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            context = tokens[:, :-1]
            q, k, v = layer["query"](tokens), layer["key"](context), layer["value"](context)
            tokens = tokens + layer["output"](torch.bmm(torch.bmm(q, k.transpose(1, 2)), v))
        return -tokens[:, -1, -1]


def plain_steps_per_second(n_layers: int, steps: int, batch_size: int, x_dim: int = 10, n_context: int = 10) -> float:
    model = PlainLinearAttention(x_dim + 1, n_layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    started = time.perf_counter()
    for _ in range(steps):
        xs = torch.rand(batch_size, n_context + 1, x_dim) - 0.5
        ys = xs @ torch.randn(batch_size, x_dim, 1)
        tokens = torch.cat([xs, ys], dim=2)
        target = tokens[:, -1, -1].clone()
        tokens[:, -1, -1] = 0
        loss = (model(tokens) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    return steps / (time.perf_counter() - started)


def mechicl_steps_per_second(n_layers: int, steps: int, batch_size: int, seeds: int = 1) -> float:
    config = TrainingConfig(
        model=TransformerConfig(x_dim=10, n_context=10, n_layers=n_layers),
        seeds=tuple(range(seeds)), steps=steps, batch_size=batch_size, log_every=steps, eval_every=steps, cpu=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        train(config, folder, progress=False)
        return [line for line in Metrics.read(Path(folder)) if "steps_per_second" in line][-1]["steps_per_second"]


def speed_rows(rounds: int, batch_size: int) -> list[dict]:
    rows = []
    for n_layers, steps, bar in ((1, 400, 4.0), (5, 100, 1.5)):
        ratios, ours, plain = [], [], []
        for _ in range(rounds):
            plain.append(plain_steps_per_second(n_layers, steps, batch_size))
            ours.append(mechicl_steps_per_second(n_layers, steps, batch_size))
            ratios.append(ours[-1] / plain[-1])
        detail = f"{statistics.median(ours):.0f} against {statistics.median(plain):.0f} steps/s, batch {batch_size}"
        layers = "one layer" if n_layers == 1 else "five layers"
        rows.append(row(f"training speed over plain eager PyTorch, {layers}", ratios, f">= {bar}", detail))
    return rows


def ensemble_row(name: str, batch_size: int, rounds: int, steps: int = 200) -> dict:
    """The models of one row of Nertinger's table (nine tasks, five seeds) at once, and one after another."""
    whole = PRESETS[f"nertinger-{name}"].replace(
        seeds=(0, 1, 2, 3, 4), steps=steps, batch_size=batch_size, n_snapshots=0, eval_every=steps, log_every=steps,
        eval_prompts=16, cpu=True,
    )  # fmt: skip
    alone = [whole.replace(task=whole.tasks[task], more_tasks=(), seeds=(seed,)) for task, seed in whole.members]

    def seconds(config: TrainingConfig) -> float:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            train(config, folder, progress=False)
            return time.perf_counter() - started

    together, apart = [], []
    for _ in range(rounds):
        together.append(seconds(whole))
        apart.append(sum(map(seconds, alone)))
    detail = f"{statistics.median(apart):.1f} s against {statistics.median(together):.1f} s for {steps} steps"
    ratios = [b / a for a, b in zip(together, apart, strict=True)]
    quantity = f"{len(alone)} {name} models one after another over at once, batch {batch_size}"
    return row(quantity, ratios, ">= 3", detail)


def import_rows(rounds: int) -> list[dict]:
    def seconds(module: str) -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        return time.perf_counter() - started

    rows = []
    for module in ("mechicl", "mechicl.analysis"):  # mechicl loads its parts when they are first named
        for warm_up in (module, "transformer_lens"):
            seconds(warm_up)
        ours, theirs = zip(*((seconds(module), seconds("transformer_lens")) for _ in range(rounds)), strict=True)
        detail = f"{statistics.median(ours):.2f} s against {statistics.median(theirs):.2f} s, whole process"
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        bar = "<= 1.1" if module == "mechicl" else "shown"
        rows.append(row(f"import {module} over import transformer_lens", ratios, bar, detail))
    return rows


def report_row() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        command = [sys.executable, "-m", "mechicl.cli", "report", "lsa-1l", "--out", folder, "--quiet"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        elapsed = time.perf_counter() - started
    return row("mechicl report lsa-1l, seconds", [elapsed], "< 60", "whole process")


def accuracy_rows() -> list[dict]:
    one, gaussian = (compare_one_layer(load_checkpoint(name), progress=False) for name in ("lsa-1l", "lsa-1l-gaussian"))
    measured: dict[str, Any] = {row.quantity: row.measured for row in one.rows}
    halves = [measured[f"half-MSE, {name}"].mean for name in ("trained, mean of the seeds", "tuned gradient descent")]
    half = " over ".join(f"{loss:.4f}" for loss in halves)
    worst = max(one.data["largest_difference"]["input scale"])
    optimum = linear_attention_optimum([1.0] * 5, 20)
    # the closed form is the loss of one tuned step: the ratio on common prompts has no sampling error of theirs
    of_gaussian: dict[str, Any] = {row.quantity: row.measured for row in gaussian.rows}
    relative = of_gaussian["loss, trained over tuned gradient descent"]
    plain_mse = 2 * of_gaussian["half-MSE, trained, mean of the seeds"].mean
    return [
        row("half-MSE, trained over tuned gradient descent", measured["loss, trained over tuned gradient descent"],
            "0.995 to 1.005", f"{half}, {one.data['n_prompts']} prompts"),
        row("sensitivity cosine, trained against gradient descent",
            measured["sensitivity cosine, trained against gradient descent"], ">= 0.999", ""),
        row("eta read from the weights over tuned eta", measured["η read from the weights over tuned η"],
            "0.99 to 1.01", f"tuned on 100,000 prompts: {one.data['tuned_eta']:.4f}"),
        row("half-MSE at the middle of the rescaled path, excess over the ends",
            measured["excess loss at the middle of the rescaled path"], "<= 0.005", ""),
        row("half-MSE at the middle of the path without rescaling, excess over the ends",
            measured["excess loss at the middle of the path without rescaling"], "shown", ""),
        row("largest |trained / gradient descent - 1|, input scale 0.5 to 2", [worst], "<= 0.02",
            "worst seed and scale"),
        row("Gaussian inputs, d = 5, n = 20: MSE, trained over optimum", relative, "0.99 to 1.01",
            f"MSE {relative.mean * optimum:.4f} of {optimum:.4f} on common prompts; {plain_mse:.4f} on 10,000 prompts"),
    ]  # fmt: skip


def row(name: str, values, bar: str, detail: str, over: str = "seeds") -> dict:
    if isinstance(values, list):
        middle, low, high = statistics.median(values), min(values), max(values)
        kind = f"median, {len(values)} rounds" if len(values) > 1 else "one run"
    else:
        middle, low, high, kind = values.mean, values.low, values.high, f"mean, 95% over {values.n} {over}"
    return {"quantity": name, "value": middle, "low": low, "high": high, "of": kind, "bar": bar, "detail": detail}


def show(rows: list[dict], json_path: Path | None = None) -> None:
    print(f"{'quantity':74} {'value':>10} {'low':>10} {'high':>10}  bar")
    for r in rows:
        print(f"{r['quantity']:74} {r['value']:10.5g} {r['low']:10.5g} {r['high']:10.5g}  {r['bar']}")
        print(f"    {r['of']}{'; ' if r['detail'] else ''}{r['detail']}")
    if json_path:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--skip-accuracy", action="store_true", help="speed only")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    args = parser.parse_args()
    rows = speed_rows(args.rounds, args.batch_size)
    for name in ("linear", "relu"):
        rows += [ensemble_row(name, batch_size, min(args.rounds, 3)) for batch_size in (64, 256)]
    rows += import_rows(args.rounds)
    if not args.skip_accuracy:
        rows = [*accuracy_rows(), *rows, report_row()]
    show(rows, args.json)


if __name__ == "__main__":
    main()
