"""CPU time of what users wait for. Other programs disturb it much less than time on the clock."""

import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from learning_coefficients import plain_chain

from benchmarks.circuits import largest_row
from benchmarks.language import waiting_rows
from benchmarks.rows import Row, Settings, alternate, ratios, row
from benchmarks.training import whole_row
from mechicl.analysis.dynamics import Sampler, SamplingWarning, learning_coefficient
from mechicl.checkpoints import load_checkpoint

REPORTS = {"lsa-1l": 8, "topics-3l": 15, "gpt2-8l": 30}
"""Bars of the reports' seconds; all but the first are measured with `--full`."""
IMPORTS = {
    "import mechicl.analysis": "import transformer_lens",
    "from mechicl.analysis import *": "import transformer_lens",
    "import mechicl.algorithms, mechicl.tasks": "import torch",
}
"""Statements, and the imports that they are compared with."""


def of_process(*arguments: str) -> float:
    """CPU seconds of a process of Python and its children, that may write its files."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = os.times()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)
    after = os.times()
    return sum(getattr(after, name) - getattr(before, name) for name in ("children_user", "children_system"))


def of_call(call: Callable[[], object], n: int = 1) -> float:
    """CPU seconds of a call, the mean of n."""
    started = time.process_time()
    for _ in range(n):
        call()
    return (time.process_time() - started) / n


def import_rows(rounds: int) -> list[Row]:
    statements = {*IMPORTS, *IMPORTS.values()}
    measures = {each: partial(of_process, "-c", each) for each in statements}
    times = {each: values[1:] for each, values in alternate(measures, rounds + 1).items()}  # the first writes bytecode
    rows = []
    for ours, theirs in IMPORTS.items():
        more = [a - b for a, b in zip(times[ours], times[theirs], strict=True)]
        detail = f"{min(times[ours]):.2f} s against {min(times[theirs]):.2f} s"
        bar = "<= 0.3" if "analysis" in ours else "shown"
        rows.append(row(f"{ours}: seconds more than {theirs}", more, bar, detail))
    both = "import mechicl.algorithms, mechicl.tasks"
    return [*rows, row(f"{both}: seconds", times[both], "<= 2")]


def predict_row(rounds: int) -> Row:
    checkpoint = load_checkpoint("lsa-1l")
    model, prompt = checkpoint.models[0], checkpoint.task.sample(1, seed=0)

    @torch.no_grad()
    def forward() -> None:
        model(prompt, at="query")[:, -1]

    calls = {"predict": lambda: model.predict(prompt), "forward": forward}
    measures = {name: lambda call=call: min(of_call(call, 100) for _ in range(10)) for name, call in calls.items()}
    times = alternate(measures, rounds)
    detail = " against ".join(f"{min(each) * 1e6:.0f}" for each in times.values())
    return row("predict of one prompt over the model's forward", ratios(*times.values()), "<= 1.05", f"{detail} µs")


def chains_row(rounds: int, n_chains: int = 32, n_steps: int = 20, n: int = 1024) -> Row:
    checkpoint = load_checkpoint("lsa-1l")
    model, prompts = checkpoint.models[0], checkpoint.task.sample(n, seed=0)
    sampler = Sampler(n_chains, n_steps, burn_in=0, step_size=1e-4, batch_size=n)
    stacked = partial(learning_coefficient, model, prompts, sampler=sampler, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        measures = {
            "loop": lambda: n_chains * of_call(partial(plain_chain, model, prompts, n, n_steps), 4),
            "ours": lambda: of_call(stacked),
        }
        times = alternate(measures, rounds)
    detail = f"{n_chains} chains, an eighth of them in the loop"
    return row("learning_coefficient, 1,024 prompts: a loop over ours", ratios(*times.values()), ">= 1", detail)


def report_rows(full: bool) -> list[Row]:
    rows = []
    for name, bar in list(REPORTS.items())[: None if full else 1]:
        with tempfile.TemporaryDirectory() as folder:
            seconds = of_process("-m", "mechicl.cli", "report", name, "--out", folder, "--quiet")
        rows.append(row(f"mechicl report {name}: seconds", [seconds], f"<= {bar}", "whole process, with its imports"))
    return rows


def measure(settings: Settings) -> list[Row]:
    rounds = settings.rounds
    rows = [*import_rows(rounds), predict_row(rounds), chains_row(rounds), *report_rows(settings.full)]
    rows += [*filter(None, [whole_row(1, ">= 1.2"), whole_row(5, ">= 1.5")]), largest_row()]
    try:
        return [*rows, *waiting_rows(min(rounds, 3))]
    except ImportError as error:
        print(f"left out: what needs a language model: {error}", flush=True)
        return rows
