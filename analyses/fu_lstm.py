"""Fu et al. 2024, Table 1 and Fig. 14: transformer against LSTM against online gradient descent, and forgetting.

python analyses/fu_lstm.py
"""

from dataclasses import dataclass

from mechicl import algorithms, viz
from mechicl.analysis import Lens, match, measure_forgetting
from mechicl.checkpoints import load_checkpoint
from mechicl.learners import AlgorithmFamily, AlgorithmLearner, Learner, squared_errors
from mechicl.reports import Claim, Claims, Comparison, Row, Section, published
from mechicl.reports.layers import reference_families
from mechicl.reports.script import ScriptArgs, run_script
from mechicl.statistics import ratio_interval

OGD_STEP_SIZES = tuple(round(0.5 * 2 ** (-i / 2), 4) for i in range(16))


@dataclass(frozen=True)
class Args(ScriptArgs):
    """What a transformer and an LSTM have in common with batch and online algorithms."""

    transformer: str = "gpt2-8l"
    """Name or folder of an interleaved transformer."""
    lstm: str = "lstm-4l"
    """Name or folder of an LSTM trained on the same task."""
    n_prompts: int = 2048
    """Held-out prompts."""
    seed: int = 1
    """Seed of the prompts."""


def compare(args: Args) -> Comparison:
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
    models = {
        kind: load_checkpoint(name).models[0] for kind, name in (("transformer", args.transformer), ("lstm", args.lstm))
    }
    printed = published("fu2024_table1")
    rows: list[Row] = []
    for kind, model in models.items():
        final = Lens(model).trajectory(prompts)
        for family, learner in families.items():
            best = match(final, learner, prompts).best()[-1]
            note = f"best step {best.column:g} ({best.low:g} to {best.high:g})"
            known = printed[kind].get(family)
            rows.append(Row(f"similarity of errors, {kind} and {family}", known, best.similarity, "prompts", note))
    learners: dict[str, Learner] = {
        "transformer": models["transformer"],
        "LSTM": models["lstm"],
        "online GD": AlgorithmLearner(algorithms.online_gradient_descent),
        "Newton, 5 iterations": AlgorithmLearner(algorithms.newton, {"steps": [5]}),
        "OLS": AlgorithmLearner(algorithms.ols),
    }
    square = prompts.ys.double().square().mean((1, 2))  # of each prompt's targets
    signal = square.mean().item()
    losses = {name: squared_errors(learner, prompts, at="points") for name, learner in learners.items()}
    by_points = {name: [ratio_interval(point, square) for point in loss.T] for name, loss in losses.items()}
    forgotten = {name: measure_forgetting(learner, prompts) for name, learner in learners.items() if name != "OLS"}
    for name, result in forgotten.items():
        first, last = result.squared_errors[0], result.squared_errors[-1]
        again = f"forgetting: MSE / E y² of the first point asked again, {name}"
        rows.append(Row(again, None, ratio_interval(first, square), "prompts"))
        rows.append(Row(f"forgetting: first minus last point, {name}",
                        "positive for LSTM and online GD, 0 for Newton (Fig. 14)",
                        ratio_interval(first - last, square), "prompts"))  # fmt: skip
    gaps = {
        name: [ratio_interval(point, square) for point in result.squared_errors] for name, result in forgotten.items()
    }
    figures = [
        Section(
            "Loss by number of context points",
            "Means with 95% intervals over prompts (Fig. 14, left).",
            viz.interval_lines(
                "Loss by number of context points",
                "context points",
                "MSE / E y²",
                list(range(task.n_context + 1)),
                by_points,
            ),
        ),
        Section(
            "Forgetting",
            "Each context point asked again after the whole context, by how long ago it stood (Fig. 14, centre). "
            "Online gradient descent fits the last point exactly.",
            viz.interval_lines(
                "Forgetting", "points since it was shown", "MSE / E y²", forgotten["transformer"].gaps, gaps
            ),
        ),
    ]
    lead = (
        f"{args.transformer} and {args.lstm} (d = {task.x_dim}, {task.n_context} points) on {args.n_prompts} held-out "
        f"prompts (seed {args.seed}), the models' own predictions against the best step of every family. Published "
        f"numbers are of the paper's "
        f"12-layer transformer and 10-layer LSTM with d = 20 and 40 points."
    )
    data = {
        "n_prompts": args.n_prompts,
        "losses": {name: (loss.mean(0) / signal).tolist() for name, loss in losses.items()},
        "forgetting": {name: (r.squared_errors / signal).mean(-1).tolist() for name, r in forgotten.items()},
    }
    return Comparison("Transformer, LSTM and online gradient descent", lead, rows, figures, data)


def claims(comparison: Comparison) -> list[Claim]:
    """What the paper says of transformers and LSTMs."""
    paper = Claims("fu2024", comparison.rows)
    names = {"newton": "Newton", "gd": "gradient descent", "ogd": "online gradient descent"}
    for family, name in names.items():
        paper.add(
            "Table 1", f"similarity of errors: transformer, LSTM and {name}",
            lines={model: [f"similarity of errors, {model.lower()} and {family}"] for model in ("transformer", "LSTM")},
            why="smaller models, fewer dimensions; the best number of steps is taken here, up to 4096, and the paper "
            "does not say how many it took" if family == "gd" else "",
        )  # fmt: skip
    near = ("transformer and newton", "transformer and gd", "lstm and ogd")
    far = ("lstm and newton", "lstm and gd", "transformer and ogd")
    paper.add(
        "Table 1", "which of the two is nearer: transformer to Newton, transformer to gradient descent, LSTM to online "
        "gradient descent, and the other one",
        lines={"these": [f"similarity of errors, {pair}" for pair in near],
               "the others": [f"similarity of errors, {pair}" for pair in far]},
        check="A > B", published="these",
    )  # fmt: skip
    forgetting = "forgetting: first minus last point,"
    paper.add(
        "Fig. 14, centre", "forgetting, MSE of the first minus the last point asked again: LSTM, online gradient "
        "descent", f"{forgetting} LSTM", f"{forgetting} online GD", check="> 0", published="positive",
    )  # fmt: skip
    paper.add(
        "Fig. 14, centre", "forgetting, MSE of the first minus the last point asked again: Newton after 5 iterations, "
        "transformer", f"{forgetting} Newton, 5 iterations", f"{forgetting} transformer", check="covers 0",
        published="0",
    )  # fmt: skip
    return paper.stated


if __name__ == "__main__":
    run_script(Args, compare, "fu_lstm", claims)
