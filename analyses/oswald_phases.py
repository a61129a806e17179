"""Phase transitions during training: seeds, heads, grokking (von Oswald et al. 2023, A.11, Fig. 15).

python analyses/oswald_phases.py
"""

from dataclasses import dataclass

import torch

from mechicl import viz
from mechicl.analysis import find_transitions
from mechicl.analysis.dynamics import Transitions
from mechicl.analysis.weights import one_step_optimum
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.reports import Claim, Claims, Comparison, Row, Section
from mechicl.reports.claims import numbers
from mechicl.reports.script import ScriptArgs, regression_checkpoint, run_script
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression


@dataclass(frozen=True)
class Args(ScriptArgs):
    """When each seed leaves the plateau, with one head and with two; and a block that memorises first."""

    checkpoints: tuple[str, ...] = ("lsa-1l-phases", "lsa-1l-2h-phases")
    """Names or folders of trainings on one task."""
    grokking: str = "lsa-1l-mlp-tasks8192"
    """Name or folder of a training on fixed tasks."""


def compare(args: Args) -> Comparison:
    """Transition steps by number of heads, and train and test loss of the block on fixed tasks."""
    loaded = [load_checkpoint(name) for name in args.checkpoints]
    _, task = regression_checkpoint(args.checkpoints[0])
    nothing, best = _predicting_0(task), one_step_optimum(task).mse
    rows: list[Row] = [Row("half-MSE, best single step of gradient descent", 0.2, best / 2, "exact")]
    figures: list[Section] = []
    data: dict[str, object] = {}
    n_fallen: dict[str, Transitions] = {}
    for checkpoint in loaded:
        heads = checkpoint.models[0].cfg.n_heads
        name = f"{heads} head{'s' if heads > 1 else ''}"
        curve = checkpoint.record["curve"]
        falls = n_fallen[name] = find_transitions(curve["eval_step"], curve["eval_loss"], plateau=nothing)
        n, last = len(falls.steps), curve["eval_step"][-1]
        rows += _rows(name, falls, last)
        data[name] = {"before": falls.before.tolist(), "after": falls.after.tolist(), "final": falls.final.tolist()}
        words = f"{n} seeds; diamonds mark where a loss has come half of the way down."
        references = {"best step of gradient descent": best, "predicting 0": nothing}
        picture = viz.losses_over_training(
            curve["eval_step"], {name: curve["eval_loss"]}, references=references, transitions={name: falls}, log_x=True
        )
        figures.append(Section(f"Loss during training, {name}", words, picture))
    rows += _grokking(load_checkpoint(args.grokking), best, nothing, figures, data)
    lead = (
        "One layer of linear attention, x ~ U(-1/2, 1/2), d = n = 10, initial weights of deviation 0.002. A transition "
        "is where the held-out loss has come half of the way from that of predicting 0 to its final value for good."
    )
    return Comparison("Phase transitions (A.11, Fig. 15)", lead, rows, figures, data)


def _predicting_0(task: LinearRegression) -> float:
    """Mean squared error of predicting 0, on many prompts."""
    return task.sample(100_000, seed=0).query.ys.square().mean().item()


def _rows(name: str, falls: Transitions, last: int) -> list[Row]:
    n, n_fallen = len(falls.steps), int(falls.fell.sum())
    claim = "some seeds very late" if name == "1 head" else "fast in all"
    late = f"{n_fallen} of {n}, from step {falls.steps.nan_to_num(torch.inf).min():.0f} to {_latest(falls, last)}"
    return [
        Row(f"seeds that leave the plateau, {name}", claim, late, "seeds"),
        Row(f"step of the transition where there is one, {name}", None, falls.mean_step(), "seeds",
            f"latest over earliest {falls.spread():.3g}"),
        Row(f"its width, from a tenth to nine tenths of the fall, {name}", None,
            interval((falls.end - falls.start)[falls.fell]), "seeds", "steps"),
        Row(f"half-MSE at the end where there is one, {name}", 0.2, interval(falls.final[falls.fell] / 2), "seeds"),
    ]  # fmt: skip


def _latest(falls: Transitions, last: int) -> str:
    return f"{falls.steps.max():.0f}" if falls.fell.all() else f"later than {last}"


def _grokking(
    checkpoint: Checkpoint, best: float, nothing: float, figures: list[Section], data: dict[str, object]
) -> list[Row]:
    """Rows on train and test loss; the picture and the numbers are added to what is there."""
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
    if not fine.any():
        raise ValueError(f"{checkpoint.name} never has a training loss below that of predicting 0 before its fall")
    data["grokking"] = {"steps": common, "test": tests.tolist(), "train": trains.tolist()}
    figures.append(
        Section(
            "Train and test loss of a block on 8,192 tasks",
            "Attention and MLP, trained on a fixed set of prompts.",
            viz.losses_over_training(
                common, {"test": tests.tolist(), "train": trains.tolist()},
                references={"best step of gradient descent": best, "predicting 0": nothing}, log_x=True,
            ),
        )
    )  # fmt: skip
    return [
        Row("grokking: highest test half-MSE while memorising", "increases drastically", interval(peak / 2),
            "seeds", f"predicting 0: {nothing / 2:.3f}"),
        Row("grokking: highest test loss while memorising over the one at its beginning", "above 1",
            interval(peak / begin), "seeds"),
        Row("grokking: least train half-MSE while memorising", "low", interval(lowest / 2), "seeds"),
        Row("grokking: step of the test loss' fall", "sudden", falls.mean_step(), "seeds",
            f"{int(falls.fell.sum())} of {len(falls.steps)} seeds"),
        Row("grokking: test half-MSE at the end", 0.2, interval(falls.final / 2), "seeds"),
        Row("grokking: train half-MSE at the end", None, interval(trains[-len(trains) // 20 :].median(0).values / 2),
            "seeds"),
    ]  # fmt: skip


def claims(comparison: Comparison) -> list[Claim]:
    """What the paper says of transitions: late for some seeds with one head, early with two; a block memorises."""
    paper = Claims("vonoswald2023", comparison.rows)
    one, two = (paper[f"seeds that leave the plateau, {heads}"] for heads in ("1 head", "2 heads"))
    left, n, earliest, latest = numbers(str(one.measured))
    left_two, n_two, _, latest_two = numbers(str(two.measured))
    paper.add("Fig. 15, left", "one head: seeds that leave the plateau, and when", one,
              check=f"{latest:g} >= {2 * earliest:g}" if left == n else f"{left:g} < {n:g}",
              why="taken as: not all, or the last at twice the step of the first")  # fmt: skip
    paper.add("Fig. 15, centre", "two heads, and one: seeds that leave the plateau, and when",
              lines={"two": [two], "one": [one]}, check=f"{left_two:g} = {n_two:g} and {latest_two:g} < {latest:g}",
              published="fast in all", why="taken as: all, the last before the last with one")  # fmt: skip
    paper.add("Fig. 15, left and centre", "half-MSE at the end where there is a transition: one head, two heads",
              *(f"half-MSE at the end where there is one, {heads}" for heads in ("1 head", "2 heads")),
              why=f"the best step has {paper['half-MSE, best single step of gradient descent']}")  # fmt: skip
    peak = paper["grokking: highest test half-MSE while memorising"]
    paper.add("Fig. 15, right", "a block on 8192 tasks: highest test loss while memorising over that when it begins",
              "grokking: highest test loss while memorising over the one at its beginning", check="> 1.2",
              published="increases drastically", why=f"half-MSE {peak}, {peak.note}")  # fmt: skip
    paper.add("Fig. 15, right", "a block on 8192 tasks: least training half-MSE before the fall",
              "grokking: least train half-MSE while memorising", check="< 0.2")  # fmt: skip
    fall = paper["grokking: step of the test loss' fall"]
    paper.add("Fig. 15, right", "a block on 8192 tasks: step of the test loss' fall", fall, check="< inf",
              why=f"there is one in {fall.note}")  # fmt: skip
    paper.add("Fig. 15, right", "a block on 8192 tasks: test half-MSE at the end", "grokking: test half-MSE at the end",
              why=f"training half-MSE at the end: {paper['grokking: train half-MSE at the end']}")  # fmt: skip
    return paper.stated


if __name__ == "__main__":
    run_script(Args, compare, "oswald_phases", claims)
