"""Training on a fixed set of tasks: how few are enough for gradient descent (von Oswald et al. 2023, A.12, Fig. 16).

python analyses/oswald_data_limits.py
"""

import copy
from dataclasses import dataclass

import torch

from mechicl import viz
from mechicl.analysis import align, align_over_training, fit_construction, interpolate
from mechicl.analysis.behaviour import tuned_descent
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.constructions import gradient_descent
from mechicl.learners import squared_errors
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports import Claim, Claims, Comparison, Row, Section
from mechicl.reports.script import ScriptArgs, run_script
from mechicl.statistics import interval
from mechicl.tasks import FixedTasks, LinearRegression

TASKS = (128, 512, 2048, 8192)
OVER = "seeds, one draw of tasks"


@dataclass(frozen=True)
class Args(ScriptArgs):
    """Alignment with gradient descent of layers that were trained on few tasks."""

    checkpoints: tuple[str, ...] = tuple(f"lsa-1l-tasks{n}" for n in TASKS)
    """Names or folders of trainings on fixed tasks."""
    n_prompts: int = 10_000
    """Held-out prompts."""
    seed: int = 1_000_003
    """Seed of the held-out prompts."""


def compare(args: Args) -> Comparison:
    """Loss, alignment, weights and paths, by number of tasks, at the end and where the held-out loss is least."""
    rows: list[Row] = []
    data: dict[str, object] = {}
    over_training = {}
    shared: tuple[Prompts, HookedTransformer, float] | None = None
    for name in args.checkpoints:
        checkpoint = load_checkpoint(name)
        task = checkpoint.task
        if not isinstance(task, FixedTasks) or not isinstance(task.task, LinearRegression):
            raise ValueError(f"{name} was not trained on fixed tasks of linear regression")
        if shared is None:
            held_out = task.task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
            tuned = tuned_descent(task.task.sample(50_000, seed=args.seed + 1, dtype=torch.float64), 1)
            step_size = float(tuned.hyperparameters["step_size"])
            construction = gradient_descent(x_dim=task.x_dim, n_context=task.n_context, step_size=step_size)
            shared = held_out, construction, step_size
            reference = squared_errors(tuned, held_out)[:, 0]
            rows.append(Row("half-MSE, one tuned step of gradient descent", 0.2, interval(reference / 2), "prompts"))
        more_rows, numbers = _rows(checkpoint, task, task.task, *shared)
        rows += more_rows
        data[name] = numbers
        over_training[f"{task.n_tasks} tasks"] = align_over_training(checkpoint, shared[1], shared[0][:1000])
    lead = (
        f"One layer of linear attention, x ~ U(-1/2, 1/2), d = n = 10, trained by full-batch Adam on a fixed set of "
        f"tasks, on {args.n_prompts:,} held-out prompts (seed {args.seed}); intervals are over seeds of the initial "
        f"weights, which see the same tasks. 120 numbers of the layer matter to its prediction."
    )
    words = "Cosine of sensitivities and distance of predictions on held-out prompts, mean over seeds with 95% bands."
    figures = [Section("Alignment with gradient descent during training", words,
                      viz.alignments_over_training(over_training))]  # fmt: skip
    return Comparison("Training on few tasks (A.12, Fig. 16)", lead, rows, figures, data)


def _rows(
    checkpoint: Checkpoint,
    task: FixedTasks,
    drawn_from: LinearRegression,
    held_out: Prompts,
    construction: HookedTransformer,
    step_size: float,
) -> tuple[list[Row], dict[str, object]]:
    n = task.n_tasks
    models = [copy.deepcopy(model).double() for model in checkpoint.models]
    reference = squared_errors(construction, held_out)[:, 0].mean()
    losses = torch.stack([squared_errors(model, held_out)[:, 0].mean() for model in models])
    alignments = [align(model, construction, held_out).intervals() for model in models]
    cosine = torch.tensor([aligned["sensitivity_cosine"].mean for aligned in alignments])
    distance = torch.tensor([aligned["prediction_distance"].mean for aligned in alignments])
    fit = fit_construction(models, "gd", drawn_from, refine=False)
    steps = fit.projected.parameters["step_size"][:, 0] / step_size
    excess = torch.tensor([interpolate(model, construction, held_out).midpoint_excess().mean for model in models])
    curve = checkpoint.record["curve"]
    tests = torch.tensor(curve["eval_loss"])
    least = tests.min(0)
    when = torch.tensor([curve["eval_step"][i] for i in least.indices.tolist()]).double()
    ratio, rise = losses / reference, tests[-1] / least.values
    on_training = squared_errors(construction, task.prompts)[:, 0].mean()
    claim = "aligned" if n > 2048 else "not aligned" if n == 128 else None
    rows = [
        Row(f"{n} tasks: held-out loss over gradient descent's, at the end", None, interval(ratio), OVER),
        Row(f"{n} tasks: held-out loss at the end over where it was least", None, interval(rise), OVER,
            f"least after {when.mean():.0f} steps on average; the prompts that training was evaluated on"),
        Row(f"{n} tasks: training loss over gradient descent's, at the end", None,
            interval(torch.tensor(curve["loss"][-1]) / on_training), OVER, "both on the fixed tasks"),
        Row(f"{n} tasks: sensitivity cosine, at the end", claim, interval(cosine), OVER),
        Row(f"{n} tasks: prediction distance, at the end", None, interval(distance), OVER),
        Row(f"{n} tasks: η in the weights over tuned η, at the end", None, interval(steps), OVER),
        Row(f"{n} tasks: excess loss half-way to the construction", None, interval(excess), OVER),
    ]  # fmt: skip
    numbers: dict[str, object] = {"mse": losses.tolist(), "gd_mse": reference.item(), "cosine": cosine.tolist()}
    return rows, numbers


def claims(comparison: Comparison) -> list[Claim]:
    """What the paper says of training on few tasks."""
    paper = Claims("vonoswald2023", comparison.rows)

    def loss(n: int) -> Row:
        return paper[f"{n} tasks: held-out loss over gradient descent's, at the end"]

    cosine = "tasks: sensitivity cosine, at the end"
    paper.add("Fig. 16a", "trained on 128 tasks: cosine of sensitivities", f"128 {cosine}", check="< 0.95",
              why=f"held-out loss {loss(128)} of gradient descent's: the layer has about as many free numbers (120) as "
              "tasks")  # fmt: skip
    paper.add("Fig. 16b, c", "trained on 512 and on 2048 tasks: cosine of sensitivities",
              lines={"512": [f"512 {cosine}"], "2048": [f"2048 {cosine}"]}, check="A < B",
              published="better with more tasks",
              why=f"held-out loss over gradient descent's {loss(512)}, {loss(2048)}")  # fmt: skip
    paper.add("Fig. 16d", "trained on 8192 tasks: cosine of sensitivities", f"8192 {cosine}", check="near 1",
              why=f"held-out loss {loss(8192)} of gradient descent's")  # fmt: skip
    return paper.stated


if __name__ == "__main__":
    run_script(Args, compare, "oswald_data_limits", claims)
