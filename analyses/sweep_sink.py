"""Softmax heads and a step of gradient descent: the gap by heads, width and sink (after von Oswald et al. 2023).

python analyses/sweep_sink.py                        # from the table in analyses/results/
python analyses/sweep_sink.py --folder runs/sweeps   # train it: `mechicl sweep sink`
"""

from typing import Any

from analyses.support.script import script
from analyses.support.sweeps import SweepArgs, count, coverage_words, over_seeds, rows_of
from mechicl import viz
from mechicl.reports import Comparison, Row, Section

HEADS, WIDTH, SINK = "model.n_heads", "model.d_head", "sink"


@script(base=SweepArgs)
def compare(args: Any) -> Comparison:
    """The gap of each combination, and the difference that a sink makes to the same seeds."""
    frame = args.table("sink").frame
    measured = frame[frame["gap"].notna()].iloc[0]
    rows = [
        Row("loss of one tuned step of gradient descent", None, float(measured["gd_loss"]), "prompts"),
        Row("gap of predicting 0", None, float(measured["zero_loss"] / measured["gd_loss"] - 1), "prompts"),
    ]
    for (width, heads), part in frame.groupby([WIDTH, HEADS]):
        name = f"{count(heads, 'head')} of width {width}"
        by_sink = {sink: each.set_index("seed") for sink, each in part.groupby(SINK, sort=False)}
        for sink, each in by_sink.items():
            rows += rows_of(f"{name}, sink {sink}", {
                "gap": each["gap"], "least gap of the seeds": each["gap"].nsmallest(1),
                "cosine of sensitivities": each["sensitivity_cosine"],
            })  # fmt: skip
        for sink in (each for each in by_sink if each != "none"):
            change = by_sink[sink]["gap"] - by_sink["none"]["gap"]
            rows.append(over_seeds(f"{name}: gap with the sink {sink} minus that without, seed by seed", change))
    lead = (
        "One layer of softmax attention, trained for 2,000 steps of Adam on the query's loss; x ~ U(-1/2, 1/2), d"
        " = 5, 10 points, no noise. The gap is the loss over that of one tuned step of gradient descent, minus 1."
        " A sink is a key with its own score and value 0; its score begins at 0, or at 4. Medians of "
        f"five seeds; one that stays in a plateau is in them. {coverage_words(5)}."
    )
    sections = []
    for width, part in frame.groupby(WIDTH):
        figure = viz.lines(part, HEADS, "gap", SINK, middle="median", log_x=False, log_y=True,
                           title=f"Loss above gradient descent's, heads of width {width}")  # fmt: skip
        figure.update_yaxes(title_text="gap")
        words = "Medians with the range of five seeds, each a point."
        sections.append(Section(f"Heads of width {width}", words, figure))
    return Comparison("Softmax heads, sinks and gradient descent", lead, rows, sections)


if __name__ == "__main__":
    compare.run()
