"""When induction is learned: by heads, kinds of positions and the length of the context.

python analyses/sweep_induction.py                        # from the tables in analyses/results/
python analyses/sweep_induction.py --folder runs/sweeps   # train: `mechicl sweep induction` and induction-context
"""

from typing import Any

import pandas as pd

from analyses.support.script import script
from analyses.support.sweeps import SweepArgs, change, count, coverage_words, over_seeds
from mechicl import viz
from mechicl.reports import Comparison, Row, Section
from mechicl.sweeps import SWEEPS

HEADS, POSITIONS, LENGTH = "model.n_heads", "model.positional_embedding_type", "n_ctx"
EVERY = SWEEPS["induction"].sweep().base.eval_every
"""Steps between evaluations: a transition is known no better."""


@script(base=SweepArgs)
def compare(args: Any) -> Comparison:
    """The step at which the loss has come half of the way down, its width, and where it ends."""
    main, lengths = args.table("induction"), args.table("induction-context")
    rows: list[Row] = []
    for (kind, heads), part in main.frame.groupby([POSITIONS, HEADS], sort=False):
        rows += _rows(f"positions {kind}, {count(heads, 'head')}", part)
    for (kind, length), part in lengths.frame.groupby([POSITIONS, LENGTH], sort=False):
        rows += _rows(f"positions {kind}, 2 heads, {length} tokens", part)
    rows += _differences(main.frame, lengths.frame)
    lead = (
        "Two layers of attention alone, width 32 in all heads together, 2,000 steps of Adam at a constant rate on"
        " random tokens (16 of them) over and over, 24 of them unless said otherwise. A transition is where the "
        "held-out loss has come half of the way from its first value to its last for good: the middle between two "
        f"evaluations, which are {EVERY} steps apart, so that a difference of two may be off by {EVERY}. Medians over "
        f"seeds. {coverage_words(3)}. Differences are of means, with the 95% interval of Welch's t; one is called "
        f"established where that interval, {EVERY} steps longer at both ends, leaves out 0. Without positions a layer "
        "cannot tell the token before: the control."
    )
    grid = viz.phase_diagram(main, HEADS, POSITIONS, "transition_step", title="Step of the transition")
    final = viz.phase_diagram(main, HEADS, POSITIONS, "final_loss", title="Loss at the end", log=False)
    context = viz.lines(lengths, LENGTH, "transition_step", POSITIONS, middle="median", log_y=True,
                        title="Step of the transition by the length of the context")  # fmt: skip
    context.update_yaxes(title_text="step")
    words = "Medians over three seeds."
    sections = [Section("Heads and positions", words, grid), Section("Where it ends", words, final),
                Section("Length", "Medians with the range of three seeds, each a point.", context)]  # fmt: skip
    return Comparison("Induction: when it is learned", lead, rows, sections)


def _rows(name: str, part: pd.DataFrame) -> list[Row]:
    rows = [over_seeds(f"{name}: loss at the end", part["final_loss"])]
    fell = part["transition_step"].notna().sum()
    if fell:
        steps = over_seeds(f"{name}: step of the transition", part["transition_step"], f"{fell} of {len(part)} seeds")
        rows = [steps, over_seeds(f"{name}: its width in steps", part["transition_width"]), *rows]
    return rows


def _differences(main: pd.DataFrame, lengths: pd.DataFrame) -> list[Row]:
    """The comparisons that the page makes, and no others: the first to the last of each axis, and the two positions."""
    rows = []
    for kind, part in main.groupby(POSITIONS, sort=False):
        few, many = (part[part[HEADS] == heads]["transition_step"] for heads in (1, 4))
        rows.append(change(f"positions {kind}: steps later with 4 heads than with 1", few, many, EVERY))
    for heads, part in main.groupby(HEADS):
        added, rotary = (part[part[POSITIONS] == kind]["transition_step"] for kind in ("standard", "rotary"))
        rows.append(change(f"{count(heads, 'head')}: steps later with rotary positions than with added", added, rotary,
                           EVERY))  # fmt: skip
    for kind, part in lengths.groupby(POSITIONS, sort=False):
        short, long = (part[part[LENGTH] == length]["transition_step"] for length in (16, 48))
        rows.append(change(f"positions {kind}: steps later with 48 tokens than with 16", short, long, EVERY))
    return rows


if __name__ == "__main__":
    compare.run()
