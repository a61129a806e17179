"""How long the library takes to load, to check what the smallest call is given, and to report."""

import inspect
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median

from benchmarks.rows import Row, alternate, ratios, row, seconds
from benchmarks.settings import Settings


def import_rows(rounds: int) -> list[Row]:
    """Beside TransformerLens."""
    if find_spec("transformer_lens") is None:
        print("left out: import times: transformer_lens is not installed", flush=True)
        return []

    def importing(module: str) -> float:
        return seconds(lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True))

    rows = []
    for module in ("mechicl", "mechicl.analysis"):  # mechicl loads its parts when they are first named
        for warm_up in (module, "transformer_lens"):
            importing(warm_up)
        times = alternate({name: lambda n=name: importing(n) for name in (module, "transformer_lens")}, rounds)
        ours, theirs = times[module], times["transformer_lens"]
        detail = f"{median(ours):.2f} s against {median(theirs):.2f} s, whole process"
        bar = "<= 1.1" if module == "mechicl" else "shown"
        rows.append(row(f"import {module} over import transformer_lens", ratios(ours, theirs), bar, detail))
    return rows


def argument_rows(rounds: int) -> list[Row]:
    """Calls whose arguments are checked beside the same functions without."""
    import torch

    from mechicl import algorithms
    from mechicl.analysis.weights import linear_attention_optimum
    from mechicl.prompts import Prompts

    generator = torch.Generator().manual_seed(0)
    xs, ys = torch.randn(1, 11, 10, generator=generator), torch.randn(1, 11, 1, generator=generator)
    works = {
        "one step of gradient descent on one prompt": (
            algorithms.gradient_descent, {"prompts": Prompts(xs, ys), "steps": 1, "step_size": 0.1},
        ),
        "the optimum of linear attention, of 10 eigenvalues": (
            linear_attention_optimum, {"eigenvalues": [0.1 * i for i in range(1, 11)], "n_context": 10},
        ),
    }  # fmt: skip
    n_calls, rows = 300, []
    for words, (function, arguments) in works.items():

        def calling(function: Callable[..., object], arguments: dict[str, object] = arguments) -> float:
            return seconds(lambda: [function(**arguments) for _ in range(n_calls)]) / n_calls

        functions = {"checked": function, "plain": inspect.unwrap(function)}
        times = alternate({name: lambda f=each: calling(f) for name, each in functions.items()}, rounds)
        checked, plain = times["checked"], times["plain"]
        detail = f"{median(checked) * 1e6:.0f} against {median(plain) * 1e6:.0f} microseconds a call"
        rows.append(row(f"{words}: arguments checked over not", ratios(checked, plain), "shown", detail))
    return rows


def report_row() -> Row:
    """The command of the first page."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mechicl.cli", "report", "lsa-1l", "--out", folder, "--quiet"]
        elapsed = seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
    return row("mechicl report lsa-1l, seconds", [elapsed], "< 60", "whole process")


def measure(settings: Settings) -> list[Row]:
    """Everything that this part measures."""
    return [*import_rows(settings.rounds), *argument_rows(settings.rounds), report_row()]
