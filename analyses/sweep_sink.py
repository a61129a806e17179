"""Softmax heads and a step of gradient descent: the gap by heads, width and sink (after von Oswald et al. 2023).

python analyses/sweep_sink.py                        # from the table in analyses/results/
python analyses/sweep_sink.py --folder runs/sweeps   # train it: `mechicl sweep sink`
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
from mechicl.sweeps import ready_table

KEPT = Path(__file__).parent / "results"
HEADS, WIDTH, SINK = "model.n_heads", "model.d_head", "sink"


@dataclass(frozen=True)
class Args(ScriptArgs):
    """How far softmax layers stay above one tuned step of gradient descent."""

    folder: Path | None = None
    """Folder to train the sweep in, in its folder `sink`; by default the table is read that comes with this script."""
    workers: int = 1
    """Processes that train."""


def compare(args: Args) -> Comparison:
    """The gap of each combination, and the difference that a sink makes to the same seeds."""
    kept = (args.out if args.folder else KEPT) / "sweep_sink.csv"
    table = ready_table("sink", kept, args.folder and args.folder / "sink", workers=args.workers)
    frame = table.frame
    known = frame[frame["gap"].notna()].iloc[0]
    rows = [
        Row("loss of one tuned step of gradient descent", None, float(known["gd_loss"]), "prompts"),
        Row("gap of predicting 0", None, float(known["zero_loss"] / known["gd_loss"] - 1), "prompts"),
    ]
    for (width, heads), part in frame.groupby([WIDTH, HEADS]):
        name = f"{_count(heads, 'head')} of width {width}"
        by_sink = {sink: each.set_index("seed") for sink, each in part.groupby(SINK, sort=False)}
        for sink, each in by_sink.items():
            rows.append(_row(f"{name}, sink {sink}: gap", each["gap"]))
            rows.append(_row(f"{name}, sink {sink}: least gap of the seeds", each["gap"].nsmallest(1)))
            rows.append(_row(f"{name}, sink {sink}: cosine of sensitivities", each["sensitivity_cosine"]))
        for sink in (each for each in by_sink if each != "none"):
            change = by_sink[sink]["gap"] - by_sink["none"]["gap"]
            rows.append(_row(f"{name}: gap with the sink {sink} minus that without, seed by seed", change))
    lead = (
        "One layer of softmax attention, trained for 2,000 steps of Adam on the query's loss; x ~ U(-1/2, 1/2), d"
        " = 5, 10 points, no noise. The gap is the loss over that of one tuned step of gradient descent, minus 1."
        " A sink is a key with a score of its own and value 0; its score begins at 0, or at 4. Medians with "
        "bootstrap intervals over five seeds, which are their range; a seed that stays in a plateau is in them."
    )
    sections = []
    for width, part in frame.groupby(WIDTH):
        figure = viz.lines(part, HEADS, "gap", SINK, middle="median", log_x=False, log_y=True, y_title="gap",
                           title=f"Loss above gradient descent's, heads of width {width}")  # fmt: skip
        sections.append(Section(f"Heads of width {width}", "Medians with intervals over seeds.", figure))
    return Comparison("Softmax heads, sinks and gradient descent", lead, rows, sections)


def _row(quantity: str, values: pd.Series) -> Row:
    return Row(quantity, None, median_interval(torch.tensor(values.dropna().to_numpy(dtype=float))), "seeds")


def _count(number: Any, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


if __name__ == "__main__":
    run_script(Args, compare, "sweep_sink")
