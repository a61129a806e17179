"""Phase transitions during training: seeds, heads, grokking (von Oswald et al. 2023, A.11, Fig. 15)."""

from typing import Any

import torch

from analyses.support.script import Option, regression_checkpoint, script
from analyses.support.sweeps import count
from mechicl import viz
from mechicl.analysis import find_transitions
from mechicl.analysis.behaviour import tuned_descent
from mechicl.analysis.dynamics import Transitions
from mechicl.analysis.weights import one_step_optimum
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.learners import squared_errors
from mechicl.reports import Comparison, Row, Section
from mechicl.statistics import interval, median_interval
from mechicl.tasks import FixedTasks


@script(
    checkpoints=("lsa-1l-phases", "lsa-1l-2h-phases"),
    grokking=Option("lsa-1l-mlp-tasks8192", "name or folder of a training on fixed tasks"),
    few=Option("lsa-1l-tasks128", "the same of a layer alone on few fixed tasks, which does memorise"),
)
def compare(args: Any) -> Comparison:
    """Transition steps by number of heads, and train and test loss of the block on fixed tasks."""
    _, task = regression_checkpoint(args.checkpoints[0])
    nothing, best = task.sample(100_000, seed=0).query.ys.square().mean().item(), one_step_optimum(task).mse
    rows: list[Row] = [Row("half-MSE, best single step of gradient descent", 0.2, best / 2, "exact")]
    figures: list[Section] = []
    for checkpoint in map(load_checkpoint, args.checkpoints):
        name, curve = count(checkpoint.models[0].cfg.n_heads, "head"), checkpoint.record["curve"]
        falls = find_transitions(curve["eval_step"], curve["eval_loss"], plateau=nothing)
        rows += _rows(name, falls, curve["eval_step"][-1])
        words = f"{len(falls.steps)} seeds; diamonds mark where a loss has come half of the way down."
        references = {"best step of gradient descent": best, "predicting 0": nothing}
        picture = viz.losses_over_training(
            curve["eval_step"], {name: curve["eval_loss"]}, references=references, transitions={name: falls},
            log_x=True, half=True,
        )  # fmt: skip
        figures.append(Section(f"Loss during training, {name}", words, picture))
    rows += _grokking(load_checkpoint(args.grokking), best, nothing, figures)
    curve = load_checkpoint(args.few).record["curve"]  # memorising: about as many tasks as the layer has parameters
    tests, trains = torch.tensor(curve["eval_loss"]), torch.tensor(curve["loss"])
    rise, least = tests.max(0).values / tests.min(0).values, trains.min(0).values / 2
    rows.append(Row("128 tasks: highest test loss over the least", None, median_interval(rise), "models"))
    rows.append(Row("128 tasks: least training half-MSE", None, median_interval(least), "models"))
    lead = (
        "One layer of linear attention, x ~ U(-1/2, 1/2), d = n = 10, initial weights of deviation 0.002. A transition "
        "is where the held-out loss has come half of the way from that of predicting 0 to its final value for good."
    )
    return Comparison("Phase transitions (A.11, Fig. 15)", lead, rows, figures)


def _rows(name: str, falls: Transitions, last: int) -> list[Row]:
    n, n_fallen = len(falls.steps), int(falls.fell.sum())
    claim = "some seeds very late" if name == "1 head" else "fast in all"
    steps = falls.steps.nan_to_num(torch.inf)  # of those that stay: later than the last
    seen = f"from {steps.min():.0f} to {f'{falls.steps.max():.0f}' if falls.fell.all() else f'later than {last}'}"
    first, latest = (min(step.item(), float(last)) for step in (steps.min(), steps.max()))
    return [
        Row(f"seeds that leave the plateau, {name}", claim, f"{n_fallen} of {n} seeds", "seeds", f"at steps {seen}"),
        Row(f"earliest transition, {name}", None, first, "", "steps"),
        Row(f"latest transition, {name}", None, latest, "", "steps"),
        Row(f"latest transition over the earliest, {name}", None, latest / first, "", seen),
        Row(f"step of the transition where there is one, {name}", None, median_interval(falls.steps[falls.fell]),
            "seeds", f"steps {seen}"),
        Row(f"its width, from a tenth to nine tenths of the fall, {name}", None,
            median_interval((falls.end - falls.start)[falls.fell]), "seeds", "steps"),
        Row(f"half-MSE at the end where there is one, {name}", 0.2, interval(falls.final[falls.fell] / 2), "seeds"),
    ]  # fmt: skip


def _grokking(checkpoint: Checkpoint, best: float, nothing: float, figures: list[Section]) -> list[Row]:
    """Rows on train and test loss; the picture is added to those that are there."""
    curve = checkpoint.record["curve"]
    common = sorted(set(curve["eval_step"]) & set(curve["step"]))
    test = dict(zip(curve["eval_step"], torch.tensor(curve["eval_loss"]), strict=True))
    train = dict(zip(curve["step"], torch.tensor(curve["loss"]), strict=True))
    tests, trains = (torch.stack([losses[step] for step in common]) for losses in (test, train))
    falls = find_transitions(curve["eval_step"], curve["eval_loss"], plateau=nothing)
    # initial weights are large: what counts begins where the training loss is below that of predicting 0
    steps = torch.tensor(common)[:, None]
    memorising = (trains < nothing) & (steps < falls.steps.nan_to_num(torch.inf))
    fine = memorising.any(0)
    peak = tests.where(memorising, 0).max(0).values[fine]
    lowest = trains.where(memorising, torch.inf).min(0).values[fine]
    begin = tests.gather(0, memorising.int().argmax(0)[None])[0][fine]
    references = {"best step of gradient descent": best, "predicting 0": nothing}
    lines = {"test": tests.tolist(), "train": trains.tolist()}
    picture = viz.losses_over_training(common, lines, references=references, log_x=True, half=True)
    # one step of gradient descent, tuned on the distribution, on the prompts that the curve is measured on
    task, training = checkpoint.task, checkpoint.record["training"]
    assert isinstance(task, FixedTasks)
    step = tuned_descent(task.task.sample(50_000, seed=2**31 + 1, dtype=torch.float64), 1)
    prompts = task.task.sample(training["eval_prompts"], seed=training["eval_seed"], dtype=torch.float64)
    words = "Attention and MLP, trained on a fixed set of prompts."
    figures.append(Section("Train and test loss of a block on 8,192 tasks", words, picture))
    return [
        Row("grokking: highest test half-MSE while memorising", "increases drastically", interval(peak / 2),
            "seeds", f"predicting 0: {nothing / 2:.3f}"),
        Row("grokking: highest test loss while memorising over the one at its beginning", "above 1",
            median_interval(peak / begin), "seeds"),
        Row("grokking: least train half-MSE while memorising", "low", interval(lowest / 2), "seeds"),
        Row("grokking: seeds whose test loss falls", "all", f"{int(falls.fell.sum())} of {len(falls.steps)} seeds",
            "seeds"),
        Row("grokking: step of the test loss' fall", None, median_interval(falls.steps[falls.fell]), "seeds"),
        Row("grokking: width of the test loss' fall over the training's length", "sudden",
            median_interval((falls.end - falls.start)[falls.fell] / common[-1]), "seeds"),
        Row("grokking: test half-MSE at the end", 0.2, interval(falls.final / 2), "seeds"),
        Row("grokking: test loss at the end over gradient descent's on the same prompts", 1.0,
            interval(falls.final / squared_errors(step, prompts).mean().item()), "seeds"),
        Row("grokking: train half-MSE at the end", None, interval(trains[-len(trains) // 20 :].median(0).values / 2),
            "seeds"),
    ]  # fmt: skip


if __name__ == "__main__":
    compare.run()
