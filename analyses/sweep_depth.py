"""Linear layers, compared with the best first-order and second-order learners of their depth, looped and not.

python analyses/sweep_depth.py                        # from the table in analyses/results/
python analyses/sweep_depth.py --folder runs/sweeps   # train it: `mechicl sweep depth`
"""

from typing import Any

import pandas as pd

from analyses.support.script import script
from analyses.support.sweeps import SweepArgs, count, coverage_words, over_seeds
from mechicl import viz
from mechicl.reports import Comparison, Row, Section

LAYERS = "model.n_layers"
LEARNERS = {
    "gd": "gradient descent, one step size",
    "gd_plus_plus_shared": "GD++, one step size and γ",
    "gd_plus_plus": "GD++, parameters for each step",
    "first_order": "any first-order learner",
    "newton": "Newton",
}
"""Columns of the losses of learners with as many steps as layers, and what they are."""
LEAST = 1e-5
"""Losses below are those of no model that was trained in float32 for so short: ratios to them say nothing."""


@script(base=SweepArgs)
def compare(args: Any) -> Comparison:
    """Losses by depth, of models and of the learners."""
    frame, rows = args.table("depth").frame, []
    for n_layers, part in frame.groupby(LAYERS):
        layers = count(n_layers, "layer")
        for column, words in LEARNERS.items():
            rows.append(Row(f"{layers}: loss of {words}", None, float(part[column].iloc[0]), "prompts"))
        for kind in ("independent", "looped"):
            models = part[part["weights"] == kind]
            rows.append(_row(f"{layers}, {kind}: loss", models["model_loss"], models))
            descent = "gd_plus_plus" if kind == "independent" else "gd_plus_plus_shared"
            for limit in ("first_order", "newton", descent):
                if part[limit].iloc[0] > LEAST:
                    over = models["model_loss"] / models[limit]
                    rows.append(_row(f"{layers}, {kind}: loss over that of {LEARNERS[limit]}", over, models))
    lead = (
        "Layers of linear attention, trained for 1,000 steps of SOAP (looped ones with a third of the rate) on "
        "the query's loss; x ~ U(-1/2, 1/2), d = 5, 10 points, no noise: least squares has no loss. The learners "
        "have as many steps as a model has layers and are tuned on 16,384 prompts of the task; losses are mean "
        f"squared errors on 8,192 others. Medians over seeds. {coverage_words(3)}."
    )
    return Comparison("Depth: linear layers and the best learners of their depth", lead, rows, _pictures(frame))


def _row(quantity: str, values: pd.Series, models: pd.DataFrame) -> Row:
    diverged = int(models["diverged_at"].notna().sum())
    return over_seeds(quantity, values, f"{diverged} diverged" if diverged else "")


def _pictures(frame: pd.DataFrame) -> list[Section]:
    """Losses of models and learners over depth, in one frame with a column a line."""
    models = {f"trained, {kind}": frame[frame["weights"] == kind] for kind in ("independent", "looped")}
    lines = [part.assign(who=name, mse=part["model_loss"]) for name, part in models.items()]
    first = frame[frame["model_loss"].notna()].groupby(LAYERS, as_index=False).first()
    lines += [first.assign(who=words, mse=first[name], diverged_at=float("nan")) for name, words in LEARNERS.items()]
    drawn = pd.concat(lines, ignore_index=True)
    figure = viz.lines(drawn, LAYERS, "mse", "who", middle="median", log_y=True, log_x=False, title="Loss by depth")
    figure.update_yaxes(range=[-6, 0], title_text="mean squared error of the query")
    words = "Medians with the range of three seeds, each a point; learners have one tuning. GD++ continues below."
    return [Section("Loss by depth", words, figure)]


if __name__ == "__main__":
    compare.run()
