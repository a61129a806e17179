"""Run the parts of the benchmark one after another, and measure the load by other processes."""

import importlib
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.load import Load, machine, measure_load
from benchmarks.rows import Row, Settings, table

PARTS = (
    "training", "routes", "roofline", "time-to-result", "gpt2", "recurrent", "throughput", "growth",
    "memory", "threads", "learners", "starting", "checks", "layers", "interventions", "circuits", "sweeping",
    "language", "pretrained", "waiting",
)  # fmt: skip
"""Modules of this package, each with a function `measure(settings)` that returns rows."""
CPU_TIMES = ("waiting",)
"""Parts that measure CPU time: they are quoted, with the load, also if other processes take the cores."""


class MachineIsLoadedError(RuntimeError):
    """The machine is too busy to measure speeds."""


def measure_part(
    measure: Callable[[Settings], list[Row]], settings: Settings, *, loaded: bool = False, cpu_times: bool = False,
    attempts: int = 2,
) -> dict[str, Any]:  # fmt: skip
    """Measure one part, and the load by other processes right before and after; try again if that is too high.

    Args:
        loaded: accept any load.
        cpu_times: the part measures CPU time, which may be quoted at any load.

    Raises:
        MachineIsLoadedError: the machine was busy in each attempt.
    """
    for _ in range(attempts):
        before, rows = measure_load(), measure(settings)
        load = max(before, measure_load(), key=lambda load: load.others)
        if load.is_quiet or loaded or cpu_times:
            return {"load": load.to_dict(), "quiet": load.is_quiet or cpu_times, "rows": [asdict(row) for row in rows]}
    raise MachineIsLoadedError(f"not quoted: while it was measured {load}")


def run(parts: Sequence[str], settings: Settings, results: Path, *, loaded: bool = False) -> list[str]:
    """Measure and print parts, and write each to the JSON file `results` as soon as it is measured.

    Returns:
        The parts that failed, or could not be measured because of the load.

    Raises:
        MachineIsLoadedError: the machine is busy from the start, unless `loaded`.
    """
    before = measure_load()
    if not (before.is_quiet or loaded or {*parts} <= {*CPU_TIMES}):
        raise MachineIsLoadedError(f"{before}: end them and run this again, or measure all the same with --loaded")
    everything: dict[str, Any] = json.loads(results.read_text()) if results.is_file() else {"parts": {}}
    everything["machine"] = machine()
    print(f"{everything['machine']}\nbefore the start {before}\n", flush=True)
    left_out = []
    for part in parts:
        try:
            module = importlib.import_module(f"benchmarks.{part.replace('-', '_')}")
            measured = measure_part(module.measure, settings, loaded=loaded, cpu_times=part in CPU_TIMES)
        except Exception as error:  # the other parts are measured all the same
            if not isinstance(error, MachineIsLoadedError | ImportError):
                traceback.print_exc()
            missing = "what it is compared with is not installed: " if isinstance(error, ImportError) else ""
            print(f"{part}: {missing}{error}\n", flush=True)
            left_out.append(part)
            continue
        everything["parts"][part] = measured
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(everything, indent=1) + "\n")
        print(f"{part}\n{part_in_words(measured)}\n", flush=True)
    return left_out


def part_in_words(measured: Mapping[str, Any]) -> str:
    """Return the rows of a part as text, below the load."""
    warning = "" if measured["quiet"] else "NOT TO BE QUOTED: "
    return f"{warning}{Load(**measured['load'])}\n{table([Row(**row) for row in measured['rows']])}"


def write_page(page: Path, results: Path) -> None:
    """Write each part's rows into the text block after `<!-- part: NAME -->` on a page.

    Raises:
        ValueError: a part was measured on a busy machine, or the page has no block for it.
    """
    text, everything = page.read_text(), json.loads(results.read_text())
    blocks = {part: part_in_words(measured) for part, measured in everything["parts"].items()}
    for part, measured in everything["parts"].items():
        if not measured["quiet"]:
            raise ValueError(f"{part} was measured on a busy machine: measure it again")
    for part, block in {"machine": everything["machine"], **blocks}.items():
        start, fence, end = f"<!-- part: {part} -->\n\n", "```text\n", "\n```"
        if start + fence not in text:
            raise ValueError(f"{page} has no place for {part}: write {start!r} and a block of text there")
        head, rest = text.split(start + fence, 1)
        text = head + start + fence + block + end + rest.split(end, 1)[1]
    page.write_text(text)
