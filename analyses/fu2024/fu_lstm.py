"""Fu et al. 2024, Table 1 and Fig. 14: transformer against LSTM against online gradient descent, and forgetting."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.support.script import Option, script
from mechicl import algorithms, viz
from mechicl.analysis import Lens, match
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.learners import AlgorithmFamily, AlgorithmLearner, Learner, Trajectory, squared_errors
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row, Section, published
from mechicl.reports.layer_matches import reference_families
from mechicl.reports.rows import over_models
from mechicl.statistics import interval, ratio_interval

FEW_STEPS = 16
OGD_STEP_SIZES = tuple(round(0.5 * 2 ** (-i / 2), 4) for i in range(16))


@script(
    transformer=Option("gpt2-8l", "name or folder of an interleaved transformer"),
    lstm=Option("lstm-4l", "name or folder of an LSTM trained on the same task"),
    n_prompts=2048,
    seed=1,
)
def compare(args: Any) -> Comparison:
    """Table 1 with the best step of every family, losses by number of points, and forgetting."""
    task = load_checkpoint(args.transformer).task
    prompts = task.sample(args.n_prompts, seed=args.seed)
    references = reference_families(task)
    families = {
        "newton": references["Newton"],
        "gd": references["gradient descent"],
        "ogd": AlgorithmLearner(algorithms.online_gradient_descent),  # the step that fits each point
        "ogd with one step size": AlgorithmFamily(algorithms.online_gradient_descent, "step_size", OGD_STEP_SIZES),
    }
    checkpoints = {"transformer": load_checkpoint(args.transformer), "lstm": load_checkpoint(args.lstm)}
    models = {kind: checkpoint.best for kind, checkpoint in checkpoints.items()}
    trajectories = {name: learner.trajectory(prompts) for name, learner in families.items()}
    printed = published("fu2024_table1")
    rows: list[Row] = []
    for kind, checkpoint in checkpoints.items():
        rows += _similarities(kind, checkpoint, trajectories, prompts, printed[kind])
    learners: dict[str, Learner] = {
        "transformer": models["transformer"],
        "LSTM": models["lstm"],
        "online GD": AlgorithmLearner(algorithms.online_gradient_descent),
        "Newton, 5 iterations": AlgorithmLearner(algorithms.newton, {"steps": [5]}),
        "OLS": AlgorithmLearner(algorithms.ols),
    }
    square = prompts.ys.double().square().mean((1, 2))  # of each prompt's targets
    losses = {name: squared_errors(learner, prompts, at="points") for name, learner in learners.items()}
    by_points = {name: [ratio_interval(point, square) for point in loss.T] for name, loss in losses.items()}
    forgotten = {name: errors_asked_again(learner, prompts) for name, learner in learners.items() if name != "OLS"}
    for name, errors in forgotten.items():
        first, last = errors[0], errors[-1]
        again = f"forgetting: MSE / E y² of the first point asked again, {name}"
        rows.append(Row(again, None, ratio_interval(first, square), "prompts"))
        rows.append(Row(f"forgetting: first minus last point, {name}",
                        "positive for LSTM and online GD, 0 for Newton (Fig. 14)",
                        ratio_interval(first - last, square), "prompts"))  # fmt: skip
    gaps = {name: [ratio_interval(point, square) for point in errors] for name, errors in forgotten.items()}
    title, points = "Loss by number of context points", list(range(task.n_context + 1))
    since = list(reversed(range(task.n_context)))
    figures = [
        Section(title, "Means with 95% intervals over prompts (Fig. 14, left).",
                viz.interval_lines(title, "context points", "MSE / E y²", points, by_points)),
        Section("Forgetting", "Each context point asked again after the whole context, by how long ago it stood (Fig. "
                "14, centre). Online gradient descent fits the last point exactly.",
                viz.interval_lines("Forgetting", "points since it was shown", "MSE / E y²", since, gaps)),
    ]  # fmt: skip
    lead = (
        f"{args.transformer} and {args.lstm} (d = {task.x_dim}, {task.n_context} points) on {args.n_prompts} held-out "
        f"prompts (seed {args.seed}), the models' own predictions against the best step of every family. Published "
        f"numbers are of the paper's "
        f"12-layer transformer and 10-layer LSTM with d = 20 and 40 points."
    )
    return Comparison("Transformer, LSTM and online gradient descent", lead, rows, figures)


def errors_asked_again(learner: Learner, prompts: Prompts) -> Float[Tensor, "point prompt"]:
    """Squared errors if each context point is the query after the whole context (B.5, eq. 16)."""
    places = ([*range(prompts.n_context), t] for t in range(prompts.n_context))
    return torch.stack([squared_errors(learner, Prompts(prompts.xs[:, at], prompts.ys[:, at]))[:, 0] for at in places])


def _similarities(
    kind: str, checkpoint: Checkpoint, families: Mapping[str, Trajectory], prompts: Prompts,
    printed: Mapping[str, float],
) -> list[Row]:  # fmt: skip
    """The models' own predictions against each family: by its best step, and gradient descent's after few steps."""
    finals = [Trajectory((1,), Lens(model).trajectory(prompts).predictions[-1:], kind) for model in checkpoint.models]
    rows = []
    for family, trajectory in families.items():
        matches = [match(final, trajectory, prompts) for final in finals]
        best = [matched.best()[-1] for matched in matches]
        note = f"best step {', '.join(f'{b.column:g} ({b.low:g} to {b.high:g})' for b in best)}"
        rows.append(over_models(f"similarity of errors, {kind} and {family}", [b.similarity for b in best], checkpoint,
                                printed.get(family), note))  # fmt: skip
        if family == "gd":
            column = trajectory.steps.index(FEW_STEPS)
            few = [interval(matched.similarities[-1, column]) for matched in matches]
            rows.append(over_models(f"similarity of errors, {kind} and {FEW_STEPS} steps of gd", few, checkpoint))
    return rows


if __name__ == "__main__":
    compare.run()
