"""When induction is learned: by heads, kinds of positions and the length of the context.

python analyses/sweep_induction.py                        # from the tables in analyses/results/
python analyses/sweep_induction.py --folder runs/sweeps   # train: `mechicl sweep induction` and induction-context
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from mechicl import viz
from mechicl.reports import Comparison, Row, Section
from mechicl.reports.script import ScriptArgs, run_script
from mechicl.statistics import median_interval
from mechicl.sweeps import GridTable, ready_table

KEPT = Path(__file__).parent / "results"
HEADS, POSITIONS, LENGTH = "model.n_heads", "model.positional_embedding_type", "n_ctx"


@dataclass(frozen=True)
class Args(ScriptArgs):
    """Steps at which losses fall on repeated tokens."""

    folder: Path | None = None
    """Folder to train the sweeps in, a folder for each; by default the tables are read that come with this script."""
    workers: int = 1
    """Processes that train."""


def compare(args: Args) -> Comparison:
    """The step at which the loss has come half of the way down, its width, and where it ends."""
    tables = {name: _table(name, args) for name in ("induction", "induction-context")}
    rows: list[Row] = []
    for (kind, heads), part in tables["induction"].frame.groupby([POSITIONS, HEADS], sort=False):
        rows += _rows(f"positions {kind}, {_count(heads, 'head')}", part)
    for (kind, length), part in tables["induction-context"].frame.groupby([POSITIONS, LENGTH], sort=False):
        rows += _rows(f"positions {kind}, 2 heads, {length} tokens", part)
    lead = (
        "Two layers of attention alone, width 32 in all heads together, 2,000 steps of Adam at a constant rate on"
        " random tokens (16 of them) over and over, 24 of them unless said otherwise. A transition is where the "
        "held-out loss has come half of the way from its first value to its last for good. Medians with intervals"
        " over seeds; of three seeds these are their range. Without positions a layer cannot tell the token "
        "before: the control."
    )
    grid = viz.phase_diagram(tables["induction"], HEADS, POSITIONS, "transition_step", title="Step of the transition")
    final = viz.phase_diagram(tables["induction"], HEADS, POSITIONS, "final_loss", title="Loss at the end", log=False)
    context = viz.lines(tables["induction-context"], LENGTH, "transition_step", POSITIONS, middle="median", log_y=True,
                        title="Step of the transition by the length of the context", y_title="step")  # fmt: skip
    words = "Medians over seeds."
    sections = [Section("Heads and positions", words, grid), Section("Where it ends", words, final),
                Section("Length", words, context)]  # fmt: skip
    return Comparison("Induction: when it is learned", lead, rows, sections)


def _table(name: str, args: Args) -> GridTable:
    kept = (args.out if args.folder else KEPT) / f"sweep_{name}.csv"
    return ready_table(name, kept, args.folder and args.folder / name, workers=args.workers)


def _rows(name: str, part: pd.DataFrame) -> list[Row]:
    rows = [Row(f"{name}: loss at the end", None, median_interval(_known(part["final_loss"])), "seeds")]
    fell = _known(part["transition_step"])
    note = f"{len(fell)} of {len(part)} seeds"
    if len(fell):
        rows.insert(0, Row(f"{name}: step of the transition", None, median_interval(fell), "seeds", note))
        rows.insert(
            1, Row(f"{name}: its width in steps", None, median_interval(_known(part["transition_width"])), "seeds")
        )
    return rows


def _known(values: pd.Series) -> torch.Tensor:
    return torch.tensor(values.dropna().to_numpy(dtype=float))


def _count(number: Any, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


if __name__ == "__main__":
    run_script(Args, compare, "sweep_induction")
