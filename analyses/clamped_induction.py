"""Which part of induction is learned last: parts of a trained model given from the start (after Singh et al. 2024).

python analyses/clamped_induction.py                          # from the losses in analyses/results/
python analyses/clamped_induction.py --folder runs/clamped    # train: 12 conditions of five seeds, resumed if stopped
"""

import math
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from analyses.support.script import Option, script
from analyses.support.sweeps import coverage_words, over_seeds
from mechicl import constructions, viz
from mechicl.analysis import score_heads
from mechicl.checkpoints import load, load_checkpoint, save
from mechicl.reports import Comparison, Row, Section
from mechicl.statistics import interval
from mechicl.sweeps import Sweep
from mechicl.training import PRESETS, Clamp, TrainingConfig

SOURCE_SEED = 0
"""Training seed of the model that activations are copied from."""
LEVEL = math.log(64) / 2
"""The loss, in nats, at which induction counts as learned: half of a uniform guess among 64 tokens."""
NOTHING = "nothing"
CURVES = "clamped_induction.csv"


@script(
    folder=Option(None, "folder to train in; by default the saved losses are read", kind=Path | None),
    source=Option("induction-2l", "name or folder of trained models of that preset, whose activations are copied"),
)
def compare(args: Any) -> Comparison:
    """The step at which the loss passes LEVEL in each condition, and how much earlier that is than without a clamp."""
    if args.folder is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        train_conditions(args.folder, args.source).to_csv(args.out / CURVES, index=False, float_format="%.4g")
    kept = (args.out if args.folder else Path(__file__).parent / "results") / CURVES
    curves = pd.read_csv(kept).melt(["given", "step"], var_name="seed", value_name="loss")
    rows, passed = [], {}
    for given, curve in curves.groupby("given", sort=False):
        passed[given] = pd.Series({seed: passing_step(each) for seed, each in curve.groupby("seed")})
        n_passed, n = int(passed[given].notna().sum()), len(passed[given])
        name = f"{given}: step at which the loss passes {LEVEL:.2f}"
        few = Row(name, None, f"{n_passed} of {n} seeds", "seeds")
        rows.append(few if n_passed < n else over_seeds(name, passed[given]))
        if given != NOTHING and n_passed == n:
            earlier = interval(torch.tensor((passed[NOTHING] - passed[given]).to_numpy()))
            rows.append(Row(f"{given}: steps earlier than with nothing", None, earlier, "seeds"))
        last = curve[curve["step"] == curve["step"].max()]["loss"]
        rows.append(over_seeds(f"{given}: loss at the end", last))
    steps = base_config().steps
    lead = (
        f"Two layers of attention alone on random tokens that repeat (64 tokens, 32 positions, periods of 4 to 16), "
        f"{steps} steps of Adam, 100 of them warm-up, batches of 32, five seeds. Activations are copied from "
        f"{args.source}, seed {SOURCE_SEED}, on the same sequences, in all steps and evaluations; ideal patterns from "
        f"constructions.induction; untrained ones from the model's own initial weights. The step is the first "
        f"evaluation, of one every 10 steps, from which on the held-out loss is below half of ln 64. Steps earlier are "
        f"means of differences between the same seeds, with their 95% interval (Student's t). The other values are "
        f"medians. {coverage_words(5)}."
    )
    figure = viz.lines(curves, "step", "loss", "given", log_x=False, log_y=True, title="What is given from the start")
    figure.update_yaxes(title_text="held-out loss (nats)")
    sections = [Section("Losses", "Means over five seeds.", figure)]
    return Comparison("Induction: what is learned last", lead, rows, sections)


def passing_step(curve: pd.DataFrame) -> float:
    """The first step from which on a seed's loss is below LEVEL; NaN if there is none."""
    curve = curve.sort_values("step")
    above = curve["step"][curve["loss"] >= LEVEL]
    later = curve["step"][curve["step"] > (above.max() if len(above) else -1)]
    return float(later.min()) if len(later) else math.nan


def base_config() -> TrainingConfig:
    """The preset in small: shorter sequences and batches, twice its learning rate, and 600 steps."""
    preset = PRESETS["induction-2l"]
    return preset.replace(
        task=preset.task.replace(n_ctx=32, max_period=16),
        model=preset.model.replace(n_ctx=32),
        seeds=(10, 11, 12, 13, 14), steps=600, batch_size=32, learning_rate=2e-3, schedule="constant", eval_every=10,
        eval_prompts=100, log_every=600, save_every=50, n_snapshots=0, cpu=True,
    )  # fmt: skip


def make_conditions(folder: Path, source: str) -> dict[str, tuple[Clamp, ...]]:
    """The interventions by name. A model of the construction is saved in the folder, to be copied from."""
    scores = score_heads(load(source, SOURCE_SEED), progress=False)
    (early, previous, _), (late, induction, _) = scores.best("previous_token"), scores.best("induction")
    ideal = constructions.induction(
        d_vocab=64, n_ctx=32, n_heads=2, previous_token_head=previous, induction_head=induction
    )
    path = str(save(folder / "construction", ideal))

    def trained(component: str, layer: int, head: int, **more: Any) -> Clamp:
        return Clamp(component, layer, head, method="copy", source=source, source_seed=SOURCE_SEED, **more)

    def constructed(layer: int, head: int) -> Clamp:
        return Clamp("pattern", layer, head, method="copy", source=path)

    other = 1 - previous
    given_previous, given_induction = trained("pattern", early, previous), trained("pattern", late, induction)
    return {
        "nothing": (),
        "previous-token pattern": (given_previous,),
        "induction pattern": (given_induction,),
        "both patterns": (given_previous, given_induction),
        "control: pattern of the other early head": (trained("pattern", early, previous, source_head=other),),
        "control: untrained previous-token pattern": (Clamp("pattern", early, previous, method="freeze"),),
        "control: untrained induction pattern": (Clamp("pattern", late, induction, method="freeze"),),
        "all early patterns untrained": (Clamp("pattern", early, method="freeze"),),
        "keys of the induction head": (trained("k", late, induction),),
        "ideal previous-token pattern": (constructed(early, previous),),
        "ideal induction pattern": (constructed(late, induction),),
        "all late patterns untrained": (Clamp("pattern", late, method="freeze"),),
    }


def train_conditions(folder: Path, source: str) -> pd.DataFrame:
    """Train what is missing in the folder; return losses, with a line for each condition and step, a column a seed."""
    sweep = Sweep(base_config(), {"interventions": make_conditions(folder, source)})
    sweep.run(folder / "sweep", workers=1, extend=True)
    parts = []
    for cell in sweep.cells:
        record = load_checkpoint(folder / "sweep" / "cells" / cell.name / "checkpoint").record
        losses = pd.DataFrame(record["curve"]["eval_loss"], columns=record["seeds"])
        losses.insert(0, "step", record["curve"]["eval_step"])
        losses.insert(0, "given", cell.places[0]["interventions"])
        parts.append(losses)
    return pd.concat(parts)


if __name__ == "__main__":
    compare.run()
