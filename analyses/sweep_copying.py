"""When targets are copied on alternate tokens, by positions and number of points (after von Oswald et al. 2023).

python analyses/sweep_copying.py                        # from the table in analyses/results/
python analyses/sweep_copying.py --folder runs/sweeps   # train it: `mechicl sweep copying`
"""

from typing import Any

import pandas as pd

from analyses.support.script import script
from analyses.support.sweeps import SweepArgs, change, coverage_words, over_seeds
from mechicl import viz
from mechicl.reports import Comparison, Row, Section
from mechicl.sweeps import SWEEPS

POSITIONS, POINTS, STEP = "model.positional_embedding_type", "n_context", "transition_step"
BASE = SWEEPS["copying"].sweep().base


@script(base=SweepArgs)
def compare(args: Any) -> Comparison:
    """The step at which the loss leaves that of predicting 0, whether the first layer copies, and where it ends."""
    table = args.table("copying")
    rows: list[Row] = []
    for (kind, points), part in table.frame.groupby([POSITIONS, POINTS], sort=False):
        name = f"positions {kind}, {points} points"
        fell, paired = int(part["fell"].sum()), int(part["paired"].sum())
        rows.append(Row(f"{name}: seeds whose loss fell", None, f"{fell} of {len(part)}", "seeds"))
        rows.append(Row(f"{name}: seeds whose first layer pairs inputs and targets", None, f"{paired} of {len(part)}",
                        "seeds"))  # fmt: skip
        if fell:
            rows.append(over_seeds(f"{name}: step of the transition", part[STEP], f"of {fell} seeds"))
        rows.append(over_seeds(f"{name}: loss over that of one tuned step", 1 + part["gap"]))
        rows.append(Row(f"{name}: loss of predicting 0 over that of one tuned step", None,
                        float((part["zero_loss"] / part["gd_loss"]).iloc[0]), "prompts"))  # fmt: skip
    rows += _differences(table.frame)
    lead = (
        "A layer of softmax attention and one of linear attention on alternate tokens x1, y1, x2, y2, ...; x ~ U(-1/2, "
        f"1/2), d = {BASE.model.x_dim}, no noise; {BASE.steps:,} steps of Adam at a constant rate. A transition is "
        "where the held-out loss has come half of the way from that of predicting 0 to its last for good, the middle "
        f"between two evaluations, which are {BASE.eval_every} steps apart; a loss that has not fallen by the end has "
        "none. A first layer pairs inputs and targets where a linear readout of one at the other's token has less than "
        "half of its mean square as its error. Medians over seeds. "
        f"{coverage_words(3)}. Differences are of means, with the 95% interval of Welch's t, and called established "
        f"where that, {BASE.eval_every} steps longer at both ends, leaves out 0. Without positions a layer cannot tell "
        "the token before: the control."
    )
    moved = table.frame[table.frame["fell"] == 1]
    figures = [
        viz.lines(moved, POINTS, STEP, POSITIONS, middle="median", log_x=False, log_y=False,
                  title="Step of the transition, of seeds that have one").update_yaxes(title_text="step"),
        viz.lines(table.frame.assign(ratio=1 + table.frame["gap"]), POINTS, "ratio", POSITIONS, middle="median",
                  log_x=False, log_y=False, references={"one step": 1.0},
                  title="Loss at the end over that of one tuned step").update_yaxes(title_text="loss over one step's"),
    ]  # fmt: skip
    words = "Medians with the range of three seeds, each a point."
    sections = [Section(title, words, figure) for title, figure in zip(("Time", "Where it ends"), figures, strict=True)]
    return Comparison("Copying: when it is learned", lead, rows, sections)


def _differences(frame: pd.DataFrame) -> list[Row]:
    """Neighbouring lengths, where all seeds of both have a transition: of those that have none it would be a choice."""
    rows = []
    for kind, part in frame.groupby(POSITIONS, sort=False):
        by_points = {points: each for points, each in part.groupby(POINTS) if (each["fell"] == 1).all()}
        for (few, first), (many, second) in zip(by_points.items(), list(by_points.items())[1:], strict=False):
            words = f"positions {kind}: steps later with {many} points than with {few}"
            rows.append(change(words, first[STEP], second[STEP], BASE.eval_every))
    return rows


if __name__ == "__main__":
    compare.run()
