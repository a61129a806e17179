"""Are fixed tasks learned by heart before new ones are solved? By width, initial weights, learning rate and batch size.

python analyses/sweep_grokking.py                        # from the tables in analyses/results/
python analyses/sweep_grokking.py --folder runs/sweeps   # train them: `mechicl sweep grokking`, and the others
"""

from typing import Any

import pandas as pd

from analyses.support.script import script
from analyses.support.sweeps import SweepArgs, coverage_words, over_seeds, rows_of
from mechicl import viz
from mechicl.reports import Comparison, Row, Section

WIDTH, SCALE = "model.d_mlp", "model.initializer_range"
GRIDS = {
    "grokking": ((WIDTH, SCALE), "width {}, scale {:g}", ""),
    "grokking-rates": (("batch_size", "learning_rate"), "batch {}, rate {:g}", "8,192 tasks: "),
    "grokking-decay": (("weight_decay",), "weight decay {:g}", "weight decay: "),
}
"""Ready-made sweeps: axes, the name of a cell, and the beginning of the names of rows on the whole grid."""
FACTOR = 1.2
"""A rise or fall of a loss by less than this factor is not counted."""


@script(base=SweepArgs)
def compare(args: Any) -> Comparison:
    """The steps at which both losses become low, and what the loss on new tasks does, in each cell of the grid."""
    frames = {sweep: _read(args.table(sweep).frame) for sweep in GRIDS}
    rows = []
    for sweep, (axes, place, prefix) in GRIDS.items():
        for cell, part in frames[sweep].groupby(list(axes)):
            rows += _of_cell(place.format(*cell), part)
        rows += _of_grid(prefix, frames[sweep])
    frame = frames["grokking"]
    nothing = frame["nothing_loss"] / frame["step_loss"]
    rows.append(Row("loss of predicting 0 over the best step's", None, float(nothing.iloc[0])))
    lead = (
        "One layer of linear attention and an MLP, x ~ U(-1/2, 1/2), trained on fixed prompts by Adam at a constant "
        "rate. By width and scale: d = n = 5, 512 prompts, all of them in each of 2,000 steps at the rate 0.001. By "
        "batch and rate: d = n = 10, 8,192 prompts, width 1,024, scale 0.3, 2,000 steps with 64 prompts each or 600 "
        "with 512. By weight decay: as by width and scale, at 1,024 and 0.6, but 1,000 steps at the rate 0.01. The "
        "scale is the standard deviation of the initial weights. A loss is low from the first step at which it is "
        "below the middle between predicting 0 and the best step of gradient descent, on new tasks. A rise is the "
        "largest factor by which the loss on new tasks exceeds its least value before; a fall is what follows it. By "
        "width and scale they are those of all recorded losses, else of running medians of five, without spikes. "
        f"Medians over seeds. {coverage_words(3)}."
    )
    pictures = [
        Section(title, "Medians of three seeds.", viz.phase_diagram(frame, WIDTH, SCALE, value, log=False))
        for title, value in (
            ("Loss on new tasks at the end over that of the best step of gradient descent", "new_ratio"),
            ("Rise of the loss on new tasks", "rise"),
        )
    ]
    return Comparison("Fixed tasks: learning by heart, and grokking", lead, rows, pictures)


def _read(frame: pd.DataFrame) -> pd.DataFrame:
    """The table of a sweep: losses over that of the best step; rises without spikes, where they were measured."""
    losses = {"fit_ratio": "fit_loss", "new_ratio": "new_loss", "least_ratio": "least_new_loss"}
    frame = frame.assign(**{ratio: frame[loss] / frame["step_loss"] for ratio, loss in losses.items()})
    steady = {name: frame.get(f"steady_{name}", frame[name]) for name in ("rise", "fall")}
    # a training loss is that of a step's batch: of 64 prompts it is too noisy for a first step
    exact = pd.Series(frame.get("batch_size", 512), frame.index) >= 512
    spiked = (frame["rise"] >= FACTOR) & (frame["fall"] >= FACTOR)
    grokked = (steady["rise"] >= FACTOR) & (steady["fall"] >= FACTOR)
    return frame.assign(**steady, exact=exact, spiked=spiked, grokked=grokked)


def _of_grid(prefix: str, frame: pd.DataFrame) -> list[Row]:
    late = frame["delay"][frame["exact"]] >= 2
    counts = {
        "models whose loss becomes low on both, on new tasks after twice as many steps or later": late,
        "models whose loss on new tasks first rises and then falls, by a fifth each": frame["grokked"],
        "those of them whose loss on new tasks is ever low": frame["grokked"] & frame["new_step"].notna(),
        "models with such a rise and fall if spikes of the loss are counted": frame["spiked"],
    }
    return [Row(prefix + words, None, f"{int(which.sum())} of {len(which)} models") for words, which in counts.items()]


def _of_cell(name: str, part: pd.DataFrame) -> list[Row]:
    n, rows = len(part), []
    for column, words in {
        "fit_step": "first step at which the loss on the training tasks is low",
        "new_step": "first step at which the loss on new tasks is low",
        "delay": "the second of these steps over the first",
    }.items():
        if column != "new_step" and not part["exact"].all():
            continue
        known = part[column].notna()
        if known.any():
            rows.append(over_seeds(f"{name}: {words}", part[column], f"{int(known.sum())} of {n} seeds"))
        else:
            rows.append(Row(f"{name}: {words}", None, f"in none of {n} seeds"))
    rows += rows_of(name, {
        "rise of the loss on new tasks": part["rise"],
        "fall of the loss on new tasks after the rise": part["fall"],
        **({"training loss at its peak over the one before": part["fit_change"]} if "fit_change" in part else {}),
        "loss on the training tasks at the end over the best step's": part["fit_ratio"],
        "least loss on new tasks over the best step's": part["least_ratio"],
        "loss on new tasks at the end over the best step's": part["new_ratio"],
    })  # fmt: skip
    return [*rows, Row(f"{name}: models with such a rise and fall", None, f"{int(part['grokked'].sum())} of {n} seeds")]


if __name__ == "__main__":
    compare.run()
