"""One layer of linear attention and one step of gradient descent (von Oswald et al. 2023, Figs. 1, 2, 6, 9 and 10).

python analyses/oswald_one_layer.py
"""

from dataclasses import dataclass
from pathlib import Path

from mechicl import viz
from mechicl.analysis import study_one_layer
from mechicl.checkpoints import load_checkpoint
from mechicl.report import Comparison, Figure, Row
from mechicl.report.one_layer import table_rows
from mechicl.report.script import run_script
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression


@dataclass(frozen=True)
class Args:
    """The table of `mechicl report`, and what happens when the layer is applied again and again."""

    checkpoint: str = "lsa-1l"
    """Name or folder of a model with one layer of linear attention and one head."""
    out: Path = Path("analyses/results")
    """Folder for oswald_one_layer_CHECKPOINT.json and .html."""
    n_prompts: int = 10_000
    """Held-out prompts."""
    quiet: bool = False
    """No progress bar."""


def compare(args: Args) -> Comparison:
    """Losses, alignment, weights, paths, shifted prompts and roll-outs."""
    checkpoint = load_checkpoint(args.checkpoint)
    task = checkpoint.task
    if not isinstance(task, LinearRegression):
        raise ValueError(f"{checkpoint.name} was trained on {type(task).__name__}, not on linear regression")
    study = study_one_layer(checkpoint, task, n_prompts=args.n_prompts, progress=not args.quiet)
    rows = table_rows(study, task)
    for name in study.shifts:
        words = "equal (Fig. 6)" if name == "input scale" else None
        rows.append(Row(f"largest |trained / gradient descent - 1|, {name} 0.5 to 2", words,
                        interval(study.worst_shift(name)), "seeds"))  # fmt: skip
    for roll_out in study.roll_outs:
        known = "falls for 50 steps (Fig. 1)" if roll_out.damping == 0.75 else None
        words = f"loss after 50 repeats over after one, damping {roll_out.damping:g}"
        of_trained = roll_out.trained[50] / roll_out.trained[1]
        of_gd = (roll_out.gradient_descent[50] / roll_out.gradient_descent[1]).item()
        shown = interval(of_trained) if of_trained.max() < 1 else "diverges"
        rows.append(Row(f"{words}, trained", known, shown, "seeds"))
        rows.append(Row(f"{words}, gradient descent", known, of_gd if of_gd < 1 else "diverges", "2,000 prompts"))
    figures = [
        Figure("Paths to the construction", "With and without rescaling (Fig. 2).",
               viz.interpolation_paths(study.paths, study.raw_paths)),
        Figure("Shifted prompts", "Loss at other scales of inputs and weights (Figs. 2 and 6).",
               viz.shifted_losses(study.shifts)),
        Figure("Roll-outs", "One layer applied again and again (Fig. 10).", viz.roll_outs(study.roll_outs)),
    ]  # fmt: skip
    if study.over_training is not None:
        figures.append(
            Figure(
                "Alignment during training", "Fig. 2, centre left.", viz.alignment_over_training(study.over_training)
            )
        )
    lead = (
        f"One layer of linear attention on {task.n_context} points in {task.x_dim} dimensions, {len(study.seeds)} "
        f"seeds, {study.n_prompts:,} held-out prompts (seed {study.prompt_seed})."
    )
    return Comparison("One layer and one step (section 3, Fig. 2)", lead, rows, figures, {"step_size": study.step_size})


if __name__ == "__main__":
    run_script(Args, compare, "oswald_one_layer")
