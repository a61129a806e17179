"""Are fixed tasks learned by heart before new ones are solved? By width of the MLP and scale of initial weights.

python analyses/sweep_grokking.py                        # from the table in analyses/results/
python analyses/sweep_grokking.py --folder runs/sweeps   # train it: `mechicl sweep grokking`
"""

from typing import Any

import pandas as pd

from analyses.support.script import script
from analyses.support.sweeps import SweepArgs, coverage_words, over_seeds, rows_of
from mechicl import viz
from mechicl.reports import Comparison, Row, Section

WIDTH, SCALE = "model.d_mlp", "model.initializer_range"
FACTOR = 1.2
"""A rise or fall of a loss by less than this factor is not counted."""


@script(base=SweepArgs)
def compare(args: Any) -> Comparison:
    """The steps at which both losses become low, and what the loss on new tasks does, in each cell of the grid."""
    table = args.table("grokking")
    losses = {"fit_ratio": "fit_loss", "new_ratio": "new_loss", "least_ratio": "least_new_loss"}
    frame = table.frame.assign(
        **{ratio: table.frame[loss] / table.frame["step_loss"] for ratio, loss in losses.items()}
    )
    rows = []
    for (width, scale), part in frame.groupby([WIDTH, SCALE]):
        rows += _of_cell(f"width {width}, scale {scale:g}", part)
    late = frame["delay"] >= 2
    rows.append(Row("models whose loss becomes low on both, on new tasks after twice as many steps or later", None,
                    f"{int(late.sum())} of {len(frame)} models"))  # fmt: skip
    nothing = frame["nothing_loss"] / frame["step_loss"]
    rows.append(Row("loss of predicting 0 over the best step's", None, float(nothing.iloc[0])))
    rows.append(Row("models whose loss on new tasks first rises and then falls, by a fifth each", None,
                    f"{int(_grokked(frame).sum())} of {len(frame)} models"))  # fmt: skip
    lead = (
        "One layer of linear attention and an MLP, d = n = 5, x ~ U(-1/2, 1/2), trained on 512 fixed prompts, all of "
        "them in each of 2,000 steps of Adam at the rate 0.001. The scale is the standard deviation of the initial "
        "weights. A loss is low from the first step at which it is below the middle between predicting 0 and the best "
        "step of gradient descent, on new tasks. A rise is the largest factor by which the loss on new tasks exceeds "
        f"its least value before; a fall is what follows it. Medians over seeds. {coverage_words(3)}."
    )
    pictures = [
        Section(title, "Medians of three seeds.", viz.phase_diagram(frame, WIDTH, SCALE, value, log=False))
        for title, value in (
            ("Loss on new tasks at the end over that of the best step of gradient descent", "new_ratio"),
            ("Rise of the loss on new tasks", "rise"),
        )
    ]
    return Comparison("Fixed tasks: learning by heart, and grokking", lead, rows, pictures)


def _grokked(frame: pd.DataFrame) -> pd.Series:
    return (frame["rise"] >= FACTOR) & (frame["fall"] >= FACTOR)


def _of_cell(name: str, part: pd.DataFrame) -> list[Row]:
    n, rows = len(part), []
    for column, words in {
        "fit_step": "first step at which the loss on the training tasks is low",
        "new_step": "first step at which the loss on new tasks is low",
        "delay": "the second of these steps over the first",
    }.items():
        known = part[column].notna()
        if known.any():
            rows.append(over_seeds(f"{name}: {words}", part[column], f"{int(known.sum())} of {n} seeds"))
        else:
            rows.append(Row(f"{name}: {words}", None, f"in none of {n} seeds"))
    rows += rows_of(name, {
        "rise of the loss on new tasks": part["rise"],
        "fall of the loss on new tasks after the rise": part["fall"],
        "loss on the training tasks at the end over the best step's": part["fit_ratio"],
        "least loss on new tasks over the best step's": part["least_ratio"],
        "loss on new tasks at the end over the best step's": part["new_ratio"],
    })  # fmt: skip
    return [*rows, Row(f"{name}: models with such a rise and fall", None, f"{int(_grokked(part).sum())} of {n} seeds")]


if __name__ == "__main__":
    compare.run()
