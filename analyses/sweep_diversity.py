"""How many tasks teach ridge regression in the pool's place, and what moves that number (after Raventós et al. 2023).

python analyses/sweep_diversity.py                        # from the tables in analyses/results/
python analyses/sweep_diversity.py --folder runs/sweeps   # train them: `mechicl sweep diversity` and its variations
"""

from typing import Any

import pandas as pd

from analyses.support.script import script
from analyses.support.sweeps import SweepArgs, change, coverage_words, over_seeds, rows_of
from mechicl import viz
from mechicl.learners import AlgorithmLearner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.reports import Comparison, Row, Section
from mechicl.statistics.grids import GridTable
from mechicl.sweeps import SWEEPS, find_threshold
from mechicl.sweeps.measures.pools import compare_on_pool
from mechicl.tasks import TaskPool

MAIN, TASKS, POSITION, NEARNESS = "diversity", "task.n_tasks", "pool_position", "nearness"
MAIN_STEPS = 3000
CONTROLS = (2, 8, 16, 16384)
"""Sizes of pools that are compared with learners that do not know the pool."""
VARIATIONS = {
    "diversity-points": ("n_context", "points"),
    "diversity-noise": ("task.noise_std", "noise deviation"),
    "diversity-dimensions": ("x_dim", "dimensions"),
    "diversity-draws": ("task.seed", "draw of the pool"),
}
"""The axis of each variation, and its description."""


@script(base=SweepArgs)
def compare(args: Any) -> Comparison:
    """Positions between dMMSE and ridge by the number of tasks, where they pass 1/2, and what moves that number."""
    main = args.table(MAIN)
    frame = main.frame.assign(nearness=nearness)
    # at the snapshots: a number that still moves is not that of a finished training
    steps = sorted(int(name.rpartition("_")[2]) for name in frame.columns if name.startswith("position_at_"))
    rows = [
        crossing_row("crossing of the position", frame, POSITION),
        crossing_row("crossing of nearness", frame),
        *_of_each_size(frame),
        *_controls(frame["seed"].unique().tolist()),
        *(crossing_row(f"crossing of the position after {step} steps", frame, f"position_at_{step}") for step in steps),
        *_by_length(args.table("diversity-steps").frame.assign(nearness=nearness), frame),
    ]
    sections = _pictures(GridTable(frame, main.axes))
    for name, (axis, words) in VARIATIONS.items():
        joined = _with_main(args.table(name).frame.assign(nearness=nearness), frame, axis)
        rows += _variation(joined, axis, words)
        picture = viz.phase_diagram(joined, TASKS, axis, NEARNESS, threshold=0.5, log=False)
        sections.append(Section(f"Nearness by {words}", "Below 1/2 models are nearer to dMMSE; medians.", picture))
    lead = (
        "Two layers of softmax attention and MLPs, width 32, 3,000 steps of SOAP, on pairs (x, y) with the "
        "query's loss; y = x w + noise, and w one of M draws from N(0, I); d = 4, 4 points, noise deviation 0.5 "
        "unless said otherwise. A model's predictions are fitted as a dMMSE + b ridge (least squares): its position "
        "is b / (a + b), its scale a + b, and its residual the share of its predictions' mean square that is "
        "left. Nearness is where they stand on the way from dMMSE (0) to ridge (1), whatever else they are: below 1/2 "
        "they are nearer to dMMSE. A crossing is the M at which the mean over seeds passes 1/2 for good, with a 95% "
        "interval by a jackknife over seeds (Student's t), which share one pool. It is that of a length of training: "
        "the rows on trainings of other lengths show if it converges. Other rows are medians. "
        f"{coverage_words(5)}."
    )
    return Comparison("Task diversity: where the pool gives way to ridge regression", lead, rows, sections)


def nearness(frame: pd.DataFrame) -> pd.Series:
    """How far on the way from dMMSE to ridge the point is that is nearest to a model's predictions."""
    to_dmmse, to_ridge, apart = (frame[f"pool_{name}"] for name in ("to_dmmse", "to_ridge", "apart"))
    return (to_dmmse - to_ridge + apart) / (2 * apart)


def crossing_row(words: str, frame: pd.DataFrame, value: str = NEARNESS) -> Row:
    """Where the mean over seeds passes 1/2."""
    passed = find_threshold(frame, TASKS, value, level=0.5)
    sizes = sorted(frame[TASKS].unique())
    inside = [size for size in sizes if size < passed.mean]
    between = f"between {inside[-1]} and {sizes[len(inside)]} tasks" if 0 < len(inside) < len(sizes) else "beyond all"
    return Row(f"{words}: number of tasks", None, passed, "seeds", between)


def _of_each_size(frame: pd.DataFrame) -> list[Row]:
    """Positions and what they leave, and the control: how far the training came, as loss over the best learner's."""
    rows = []
    for n_tasks, part in frame.groupby(TASKS):
        left = part["pool_residual"] * part["pool_energy"]
        rows += rows_of(f"M = {n_tasks}", {
            "position on the pool's tasks": part[POSITION],
            "length of a model's 95% interval of it, over prompts":
                part["pool_position_high"].astype(float) - part["pool_position_low"].astype(float),
            "scale on the pool's tasks": part["pool_scale"],
            "residual on the pool's tasks": part["pool_residual"],
            "distance between dMMSE and ridge over the residual": part["pool_apart"] / left,
            "nearness on the pool's tasks": part[NEARNESS],
            "position on new tasks": part["new_position"],
            "scale on new tasks": part["new_scale"],
            "residual on new tasks": part["new_residual"],
            "distance to dMMSE over that to ridge": part["pool_to_dmmse"] / part["pool_to_ridge"],
            "distance to dMMSE": part["pool_to_dmmse"],
            "distance to ridge": part["pool_to_ridge"],
            "distance to dMMSE, new tasks": part["new_to_dmmse"],
            "distance to ridge, new tasks": part["new_to_ridge"],
            "loss over dMMSE's": part["pool_loss"] / part["pool_dmmse_loss"],
            "loss over ridge's": part["pool_loss"] / part["pool_ridge_loss"],
            "loss over ridge's, new tasks": part["new_loss"] / part["new_ridge_loss"],
        })  # fmt: skip
        apart = float(part["pool_apart"].iloc[0])
        rows.append(Row(f"M = {n_tasks}: distance between dMMSE and ridge", None, apart))
    return rows


def _controls(seeds: list[int]) -> list[Row]:
    """Return the same numbers for predicting 0 and for untrained models, which are not mixtures of the two."""
    config = SWEEPS[MAIN].sweep().base
    assert isinstance(config.task, TaskPool)
    assert isinstance(config.model, TransformerConfig)
    nothing = AlgorithmLearner(lambda prompts: 0 * prompts.query.ys)
    untrained = [HookedTransformer(config.model, seed=seed).eval() for seed in seeds]
    rows = []
    for n_tasks in CONTROLS:
        task = config.task.replace(n_tasks=n_tasks)
        zero = pd.DataFrame([compare_on_pool(nothing, task)]).assign(nearness=nearness)
        name = f"control, M = {n_tasks}"
        rows.append(Row(f"{name}, predicting 0: nearness", None, float(zero[NEARNESS].iloc[0]), "prompts"))
        scale = float(zero["pool_scale"].iloc[0])
        rows.append(Row(f"{name}, predicting 0: scale", None, scale, "prompts", "it has no position"))
        frame = pd.DataFrame([compare_on_pool(model, task) for model in untrained]).assign(nearness=nearness)
        unknown = int((frame["pool_position_high"].astype(float) == float("inf")).sum())
        columns = {"nearness": NEARNESS, "scale": "pool_scale", "residual": "pool_residual"}
        rows += rows_of(f"{name}, untrained", {words: frame[column] for words, column in columns.items()})
        note = f"{unknown} of {len(frame)} have no interval"
        rows.append(over_seeds(f"{name}, untrained: position", frame[POSITION], note))
    return rows


def _by_length(frame: pd.DataFrame, main: pd.DataFrame) -> list[Row]:
    """Positions after trainings of other lengths, each to its end: do they converge to a number of tasks?"""
    same = main[TASKS].isin(frame[TASKS]) & main["seed"].isin(frame["seed"])
    joined = pd.concat([frame, main[same].assign(steps=MAIN_STEPS)], ignore_index=True)
    rows = []
    for steps, part in joined.groupby("steps"):
        rows.append(crossing_row(f"trainings of {steps:,} steps: crossing of the position", part, POSITION))
        for n_tasks, size in part.groupby(TASKS):
            rows += rows_of(f"trainings of {steps:,} steps, M = {n_tasks}", {
                "position": size[POSITION], "scale": size["pool_scale"], "residual": size["pool_residual"],
                "loss over dMMSE's": size["pool_loss"] / size["pool_dmmse_loss"],
                "loss over ridge's, new tasks": size["new_loss"] / size["new_ridge_loss"],
            })  # fmt: skip
    longest = joined["steps"].max()
    for n_tasks, part in joined.groupby(TASKS):
        before, after = (part[part["steps"] == steps][POSITION] for steps in (MAIN_STEPS, longest))
        rows.append(change(f"M = {n_tasks}: change of the position from {MAIN_STEPS:,} to {longest:,} steps", before,
                           after))  # fmt: skip
    return rows


def _with_main(frame: pd.DataFrame, main: pd.DataFrame, axis: str) -> pd.DataFrame:
    """A variation with the main sweep's models of the same sizes and seeds as its middle value."""
    middle = {"n_context": 4, "task.noise_std": 0.5, "x_dim": 4, "task.seed": 0}[axis]
    same = main[TASKS].isin(frame[TASKS]) & main["seed"].isin(frame["seed"])
    return pd.concat([frame, main[same].assign(**{axis: middle})], ignore_index=True)


def _variation(frame: pd.DataFrame, axis: str, words: str) -> list[Row]:
    rows = []
    for value, part in frame.groupby(axis):
        rows.append(crossing_row(f"{words} {value:g}: crossing of nearness", part))
        sizes = sorted(part[TASKS].unique())
        for n_tasks, learner, column in ((sizes[0], "dMMSE", "dmmse"), (sizes[-1], "ridge", "ridge")):
            size = part[part[TASKS] == n_tasks]
            excess = size["pool_loss"] / size[f"pool_{column}_loss"]
            rows.append(over_seeds(f"{words} {value:g}: loss over {learner}'s at M = {n_tasks}", excess))
    return rows


def _pictures(table: GridTable) -> list[Section]:
    ratio = table.frame.assign(excess=table.frame["pool_loss"] / table.frame["pool_dmmse_loss"])
    distances, new = (
        viz.lines(table, TASKS, [f"{kind}_{name}" for name in ("to_dmmse", "to_ridge", "apart")], middle="median",
                  title=f"Squared differences, {words}").update_yaxes(title_text="mean squared difference")
        for kind, words in (("pool", "the pool's tasks"), ("new", "new tasks"))
    )  # fmt: skip
    position = viz.lines(
        table, TASKS, [POSITION, "new_position"], title="b / (a + b): dMMSE is 0, ridge 1", references={"halfway": 0.5},
        log_y=False,
    ).update_yaxes(title_text="position")  # fmt: skip
    fit = viz.lines(
        table, TASKS, ["pool_scale", "pool_residual"], title="a + b, and the share that a dMMSE + b ridge leaves",
        references={"a mixture's scale": 1.0, "a mixture's residual, and 0's scale": 0.0}, log_y=False,
    ).update_yaxes(title_text="scale, residual")  # fmt: skip
    control = viz.lines(
        ratio, TASKS, "excess", title="Control: loss over that of the pool's best learner", references={"best": 1.0},
        middle="median", log_y=False,
    ).update_yaxes(title_text="loss over dMMSE's")  # fmt: skip
    words = "Medians with the range of five seeds, each a point."
    means = "Means with 95% intervals (Student's t) of five seeds, each a point."
    return [
        Section("Distances on the pool's tasks", words, distances),
        Section("Distances on new tasks", words, new),
        Section("Position", means, position),
        Section("Scale and residual", f"{means} Predicting 0 has the scale 0.", fit),
        Section("How far training came", "1 would be the best that can be done on the pool.", control),
    ]


if __name__ == "__main__":
    compare.run()
