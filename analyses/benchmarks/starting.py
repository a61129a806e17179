"""The time of imports and of the smallest report."""

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from statistics import median

from benchmarks.rows import Row, Settings, alternate, ratios, row, seconds


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


def report_row() -> Row:
    """The command of the first page."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mechicl.cli", "report", "lsa-1l", "--out", folder, "--quiet"]
        elapsed = seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
    return row("mechicl report lsa-1l, seconds", [elapsed], "< 60", "whole process")


def measure(settings: Settings) -> list[Row]:
    return [*import_rows(settings.rounds), report_row()]
