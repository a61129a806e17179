"""Training on a fixed set of tasks: how few are enough for gradient descent (von Oswald et al. 2023, A.12, Fig. 16)."""

from dataclasses import dataclass
from typing import Any

import torch

from analyses.support.script import script
from analyses.support.seeds import in_float64, query_errors
from mechicl import viz
from mechicl.analysis import align, align_over_training, fit_construction, interpolate
from mechicl.analysis.behaviour import tuned_descent
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.constructions import gradient_descent
from mechicl.learners import squared_errors
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row, Section
from mechicl.statistics import interval, median_interval
from mechicl.tasks import FixedTasks, LinearRegression

N_ALIGNED = 4096  # prompts for derivatives and paths
OVER = "draws of tasks"


@script(checkpoints=tuple(f"lsa-1l-tasks{n}" for n in (128, 512, 2048, 8192)), n_prompts=10_000, seed=1_000_003)
def compare(args: Any) -> Comparison:
    """Loss, alignment, weights and paths, by number of tasks, at the end and where the held-out loss is least."""
    rows: list[Row] = []
    over_training = {}
    shared: tuple[Prompts, HookedTransformer, float] | None = None
    for name in args.checkpoints:
        checkpoint = load_checkpoint(name)
        task = checkpoint.task
        if not isinstance(task, FixedTasks) or not isinstance(task.task, LinearRegression):
            raise ValueError(f"{name} was not trained on fixed tasks of linear regression")
        draws = checkpoint.by_task()
        if shared is None:
            held_out = task.task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
            tuned = tuned_descent(task.task.sample(50_000, seed=args.seed + 1, dtype=torch.float64), 1)
            step_size = float(tuned.hyperparameters["step_size"])
            construction = gradient_descent(x_dim=task.x_dim, n_context=task.n_context, step_size=step_size)
            shared = held_out, construction, step_size
            reference = squared_errors(tuned, held_out)[:, 0]
            rows.append(Row("half-MSE, one tuned step of gradient descent", 0.2, interval(reference / 2), "prompts"))
        measured = [_measure(draw, task.task, *shared) for draw in draws]
        rows += _rows(measured, task.n_tasks, len(draws[0].models))
        first_seeds = checkpoint.select(range(0, len(checkpoint.models), len(draws[0].models)))
        over_training[f"{task.n_tasks} tasks"] = align_over_training(first_seeds, shared[1], shared[0][:500])
    lead = (
        f"One layer of linear attention, x ~ U(-1/2, 1/2), d = n = 10, trained by full-batch Adam on a fixed set of "
        f"tasks, on {args.n_prompts:,} held-out prompts (seed {args.seed}); intervals are over draws of the tasks, "
        f"with the mean over seeds of the initial weights for each. 120 numbers of the layer matter to its prediction."
    )
    words = "Cosine of sensitivities and distance of predictions on held-out prompts, mean over draws with 95% bands."
    figures = [Section("Alignment with gradient descent during training", words,
                      viz.alignments_over_training(over_training))]  # fmt: skip
    return Comparison("Training on few tasks (A.12, Fig. 16)", lead, rows, figures)


@dataclass(frozen=True, eq=False)
class Draw:
    """The measurements for one draw of tasks: means over seeds, compared with tuned gradient descent."""

    loss: float  # held-out, at the end
    rise: float  # held-out loss at the end over where it was least
    training: float  # loss on the draw's own tasks
    cosine: float  # of sensitivities
    distance: float  # of predictions
    step: float  # step size in the weights
    excess: float  # loss half-way to the construction, above the ends'
    spread: float  # largest difference of the cosine between seeds


def _measure(
    draw: Checkpoint, drawn_from: LinearRegression, held_out: Prompts, construction: HookedTransformer, step_size: float
) -> Draw:
    models = in_float64(draw.models)
    assert isinstance(draw.task, FixedTasks)
    reference = squared_errors(construction, held_out)[:, 0].mean()
    losses = query_errors(models, held_out).mean(1)
    alignments = [align(model, construction, held_out[:N_ALIGNED]) for model in models]
    cosines = torch.stack([alignment.sensitivity_cosine.nanmean() for alignment in alignments])
    fit = fit_construction(models, "gd", drawn_from, refine=False)
    excess = torch.tensor([interpolate(m, construction, held_out[:N_ALIGNED]).midpoint_excess().mean for m in models])
    curve = draw.record["curve"]
    tests = torch.tensor(curve["eval_loss"])
    on_training = squared_errors(construction, draw.task.prompts)[:, 0].mean()
    return Draw(
        loss=(losses / reference).mean().item(),
        rise=(tests[-1] / tests.min(0).values).mean().item(),
        training=(torch.tensor(curve["loss"][-1]) / on_training).mean().item(),
        cosine=cosines.mean().item(),
        distance=torch.stack([alignment.prediction_distance.mean() for alignment in alignments]).mean().item(),
        step=(fit.projected.parameters["step_size"][:, 0] / step_size).mean().item(),
        excess=excess.mean().item(),
        spread=(cosines.max() - cosines.min()).item(),
    )


def _rows(measured: list[Draw], n: int, n_seeds: int) -> list[Row]:
    def values(name: str) -> torch.Tensor:
        return torch.tensor([getattr(draw, name) for draw in measured], dtype=torch.float64)

    seeds = "by draw " + ", ".join(f"{value:.3g}" for value in values("cosine"))
    if n_seeds > 1:
        seeds += f"; {n_seeds} seeds of a draw differ by up to {values('spread').max():.2g}"
    claim = "aligned" if n > 2048 else "not aligned" if n == 128 else None
    return [
        Row(f"{n} tasks: held-out loss over gradient descent's, at the end", None, median_interval(values("loss")),
            OVER),
        Row(f"{n} tasks: held-out loss at the end over where it was least", None, median_interval(values("rise")), OVER,
            "on the prompts that training was evaluated on"),
        Row(f"{n} tasks: training loss over gradient descent's, at the end", None, interval(values("training")), OVER,
            "both on the fixed tasks"),
        Row(f"{n} tasks: sensitivity cosine, at the end", claim, interval(values("cosine")), OVER, seeds),
        Row(f"{n} tasks: prediction distance, at the end", None, median_interval(values("distance")), OVER),
        Row(f"{n} tasks: η in the weights over tuned η, at the end", None, interval(values("step")), OVER),
        Row(f"{n} tasks: excess loss half-way to the construction", None, median_interval(values("excess")), OVER),
    ]  # fmt: skip


if __name__ == "__main__":
    compare.run()
