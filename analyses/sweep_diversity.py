"""How many tasks teach ridge regression in the pool's place, and what moves that number (after Raventós et al. 2023).

python analyses/sweep_diversity.py                        # from the tables in analyses/results/
python analyses/sweep_diversity.py --folder runs/sweeps   # train them: `mechicl sweep diversity` and its variations
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from mechicl import viz
from mechicl.reports import Comparison, Row, Section
from mechicl.reports.script import ScriptArgs, run_script
from mechicl.statistics import Interval, median_interval
from mechicl.sweeps import GridTable, find_threshold, ready_table

KEPT = Path(__file__).parent / "results"
MAIN, TASKS, POSITION = "diversity", "task.n_tasks", "pool_position"
VARIATIONS = {
    "diversity-points": ("n_context", "points"),
    "diversity-noise": ("task.noise_std", "noise deviation"),
    "diversity-dimensions": ("x_dim", "dimensions"),
    "diversity-draws": ("task.seed", "draw of the pool"),
}
"""The axis of each variation, and its name in words."""


@dataclass(frozen=True)
class Args(ScriptArgs):
    """The number of tasks from which on models are nearer to ridge regression than to dMMSE."""

    folder: Path | None = None
    """Folder to train the sweeps in, a folder for each; by default the tables are read that come with this script."""
    workers: int = 1
    """Processes that train."""
    variations: bool = True
    """Measure the sweeps over points, noise, dimensions and draws of the pool too."""


def compare(args: Args) -> Comparison:
    """Positions between dMMSE and ridge by the number of tasks, their threshold, and what moves it."""
    main = table_of(MAIN, args)
    frame = main.frame
    rows = [threshold_row("threshold", frame), *_of_each_size(frame), *_during_training(frame)]
    sections = _pictures(main)
    if args.variations:
        for name, (axis, words) in VARIATIONS.items():
            more = table_of(name, args)
            joined = _with_main(more.frame, frame, axis)
            rows += _variation(joined, axis, words)
            picture = viz.phase_diagram(joined, TASKS, axis, POSITION, threshold=0.5, log=False)
            sections.append(Section(f"Position by {words}", "0 is dMMSE, 1 is ridge regression; medians.", picture))
    lead = (
        "Two layers of softmax attention and MLPs, width 32, 3,000 steps of SOAP, on pairs (x, y) with the "
        "query's loss; y = x w + noise, and w one of M draws from N(0, I); d = 4, 4 points, noise deviation 0.5 "
        "unless said otherwise. The position is where a model's predictions stand on the way from dMMSE's (0) to "
        "ridge regression's (1): below 1/2 it is nearer to dMMSE. The threshold is the M at which the mean "
        "position of all seeds passes 1/2 for good, with a bootstrap interval over seeds, which share one pool."
    )
    return Comparison("Task diversity: where the pool gives way to ridge regression", lead, rows, sections)


def table_of(name: str, args: Args) -> GridTable:
    """The table of one of the sweeps."""
    folder = args.folder and args.folder / name
    kept = (args.out if args.folder else KEPT) / f"sweep_{name}.csv"
    return ready_table(name, kept, folder, workers=args.workers)


def threshold_row(words: str, frame: pd.DataFrame, value: str = POSITION) -> Row:
    """Where the mean position passes 1/2."""
    passed = find_threshold(frame, TASKS, value, level=0.5)
    sizes = sorted(frame[TASKS].unique())
    inside = [size for size in sizes if size < passed.mean]
    between = f"between {inside[-1]} and {sizes[len(inside)]} tasks" if 0 < len(inside) < len(sizes) else "beyond all"
    return Row(f"{words}: number of tasks", None, passed, "seeds", between)


def _of_each_size(frame: pd.DataFrame) -> list[Row]:
    """Position, and the control: how far the training came, as loss over that of the best learner of the pool."""
    rows = []
    for n_tasks, part in frame.groupby(TASKS):
        for quantity, values in {
            "position on the pool's tasks": part[POSITION],
            "position on new tasks": part["new_position"],
            "distance to dMMSE over that to ridge": part["pool_to_dmmse"] / part["pool_to_ridge"],
            "distance to dMMSE": part["pool_to_dmmse"],
            "distance to ridge": part["pool_to_ridge"],
            "distance to dMMSE, new tasks": part["new_to_dmmse"],
            "distance to ridge, new tasks": part["new_to_ridge"],
            "loss over dMMSE's": part["pool_loss"] / part["pool_dmmse_loss"],
            "loss over ridge's": part["pool_loss"] / part["pool_ridge_loss"],
            "loss over ridge's, new tasks": part["new_loss"] / part["new_ridge_loss"],
        }.items():
            rows.append(Row(f"M = {n_tasks}: {quantity}", None, _over_seeds(values), "seeds"))
        apart = part["pool_apart"].iloc[0]
        rows.append(Row(f"M = {n_tasks}: distance between dMMSE and ridge", None, float(apart)))
    return rows


def _during_training(frame: pd.DataFrame) -> list[Row]:
    """The threshold at the snapshots: a number that still moves is not that of a finished training."""
    steps = sorted(int(name.rpartition("_")[2]) for name in frame.columns if name.startswith("position_at_"))
    return [threshold_row(f"threshold after {step} steps", frame, f"position_at_{step}") for step in steps]


def _with_main(frame: pd.DataFrame, main: pd.DataFrame, axis: str) -> pd.DataFrame:
    """A variation with the main sweep's models of the same sizes and seeds as its middle value."""
    middle = {"n_context": 4, "task.noise_std": 0.5, "x_dim": 4, "task.seed": 0}[axis]
    same = main[TASKS].isin(frame[TASKS]) & main["seed"].isin(frame["seed"])
    return pd.concat([frame, main[same].assign(**{axis: middle})], ignore_index=True)


def _variation(frame: pd.DataFrame, axis: str, words: str) -> list[Row]:
    rows = []
    for value, part in frame.groupby(axis):
        rows.append(threshold_row(f"{words} {value:g}", part))
        sizes = sorted(part[TASKS].unique())
        for n_tasks, learner, column in ((sizes[0], "dMMSE", "dmmse"), (sizes[-1], "ridge", "ridge")):
            size = part[part[TASKS] == n_tasks]
            excess = _over_seeds(size["pool_loss"] / size[f"pool_{column}_loss"])
            rows.append(Row(f"{words} {value:g}: loss over {learner}'s at M = {n_tasks}", None, excess, "seeds"))
    return rows


def _over_seeds(values: pd.Series) -> Interval:
    return median_interval(torch.tensor(values.to_numpy(dtype=float)))


def _pictures(table: GridTable) -> list[Section]:
    ratio = table.frame.assign(excess=table.frame["pool_loss"] / table.frame["pool_dmmse_loss"])
    distances = viz.lines(
        table, TASKS, ["pool_to_dmmse", "pool_to_ridge", "pool_apart"], title="Squared differences, the pool's tasks",
        y_title="mean squared difference", middle="median",
    )  # fmt: skip
    new = viz.lines(
        table, TASKS, ["new_to_dmmse", "new_to_ridge", "new_apart"], title="Squared differences, new tasks",
        y_title="mean squared difference", middle="median",
    )  # fmt: skip
    position = viz.lines(
        table, TASKS, [POSITION, "new_position"], title="From dMMSE (0) to ridge (1)", references={"halfway": 0.5},
        y_title="position", log_y=False,
    )  # fmt: skip
    control = viz.lines(
        ratio, TASKS, "excess", title="Control: loss over that of the pool's best learner", references={"best": 1.0},
        y_title="loss over dMMSE's", middle="median", log_y=False,
    )  # fmt: skip
    words = "Medians over seeds (means of positions) with 95% intervals."
    return [
        Section("Distances on the pool's tasks", words, distances),
        Section("Distances on new tasks", words, new),
        Section("Position", words, position),
        Section("How far training came", "1 would be the best that can be done on the pool.", control),
    ]


if __name__ == "__main__":
    run_script(Args, compare, "sweep_diversity")
