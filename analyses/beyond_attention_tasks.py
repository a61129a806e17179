"""Do layers with a state forget where that pays, and recall? One layer of each kind, trained on drift and on recall."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from beyond_attention import _loss, forgetting

from analyses.support.script import Option, script
from mechicl import algorithms
from mechicl.algorithms.card import FitProblem
from mechicl.algorithms.recursive import fit_discounted, fit_normalized, fit_recursive
from mechicl.analysis import identify
from mechicl.checkpoints import load_checkpoint
from mechicl.learners import AlgorithmLearner
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row
from mechicl.statistics import crossed_interval, interval
from mechicl.tasks import AssociativeRecall, DriftingRegression
from mechicl.training import PRESETS, train

SIZES: dict[str, Any] = {"x_dim": 5, "n_context": 20}
TASKS = {"drift": DriftingRegression(**SIZES, renewed=0.05), "recall": AssociativeRecall(**SIZES, n_keys=8)}
KINDS: dict[str, dict[str, Any]] = {
    "DeltaNet": {"attention": "delta"},
    "DeltaNet with a gate": {"attention": "delta", "gate": "head"},
    "Mesa": {"attention": "mesa"},
    "gated linear": {"attention": "gated_linear"},
    "Mamba-2": {"attention": "mamba2"},
    "linear attention": {"attention": "linear"},
    "softmax": {"attention": "softmax"},
}
WITHOUT = {  # the same layers, trained without drift
    "DeltaNet": "delta-1l", "Mesa": "mesa-1l", "gated linear": "gated-linear-1l", "Mamba-2": "mamba2-1l",
    "linear attention": "lsa-1l-gaussian",
}  # fmt: skip
N_FITTING, N_TESTING = 1024, 1024


@script(
    runs=Option(Path("runs/beyond-attention"), "folder of the trainings; finished ones are read again"),
    kinds=Option(tuple(KINDS), "kinds of layers"),
)
def compare(args: Any) -> Comparison:
    """Train, and measure losses, families and forgetting next to tuned algorithms."""
    rows = []
    for name, task in TASKS.items():
        prompts, tuning = (task.sample(n, seed=s, dtype=torch.float64) for n, s in ((N_TESTING, 12), (N_FITTING, 11)))
        rows += _references(name, task, prompts, tuning)
        for kind in args.kinds:
            preset = PRESETS["delta-1l"]
            model = preset.model.replace(attention=None).replace(**KINDS[kind])
            folder = args.runs / f"{kind}-{name}".replace(" ", "-").lower()
            models = train(preset.replace(task=task, model=model, save_every=100), folder, progress=False).models
            models = [each.to(torch.float64) for each in models]
            rows.append(_mean_loss(f"{kind}: loss, {name}", models, prompts))
            if name == "drift":
                rows.append(_kept(f"{kind}: weight of old points, {name}", models, prompts))
                if kind in WITHOUT:
                    others = [each.to(torch.float64) for each in load_checkpoint(WITHOUT[kind]).models[:3]]
                    rows.append(_mean_loss(f"{kind}: loss, {name}, trained without", others, prompts))
                    rows.append(_kept(f"{kind}: weight of old points, {name}, trained without", others, prompts))
                found = [identify(each, task, n_prompts=256, with_limits=False, with_references=False, steps=1,
                                  progress=False) for each in models]  # fmt: skip
                distances = torch.tensor([each.distance(each.best).mean for each in found], dtype=torch.float64)
                answers = "; ".join(dict.fromkeys(each.answer.name for each in found))
                rows.append(Row(f"{kind}: identify, {name}", None, answers))
                rows.append(Row(f"{kind}: distance of the nearest family, {name}", None, interval(distances), "seeds"))
    lead = (
        f"Three seeds of each layer, trained as `delta-1l` on 20 points in 5 dimensions, on {N_TESTING} other prompts. "
        f"Drift: 5% of the weights' variance is renewed at each point. Recall: 8 pairs that come again. Algorithms are "
        f"tuned on {N_FITTING} further prompts."
    )
    return Comparison("Beyond attention: drift and recall", lead, rows)


def _mean_loss(quantity: str, models: Sequence[Any], prompts: Prompts) -> Row:
    errors = torch.stack([_loss(each, prompts) for each in models])
    return Row(quantity, None, crossed_interval(errors), "seeds and prompts")


def _kept(quantity: str, models: Sequence[Any], prompts: Prompts) -> Row:
    kept = torch.tensor([forgetting(each, prompts) for each in models], dtype=torch.float64)
    return Row(quantity, None, interval(kept), "seeds")


def _references(name: str, task: Any, prompts: Prompts, tuning: Prompts) -> list[Row]:
    problem = FitProblem(tuning, tuning.query.ys[None], 1)
    learners: dict[str, Any] = {f"{fit(problem).name}, tuned": fit(problem).learner
                                for fit in (fit_normalized, fit_recursive, fit_discounted)}  # fmt: skip
    penalties = [AlgorithmLearner(algorithms.ridge, {"penalty": 10 ** (k / 4)}) for k in range(-12, 9)]
    losses = [_loss(each, tuning).mean().item() for each in penalties]
    learners["ridge, tuned"] = penalties[losses.index(min(losses))]
    best, learner = next(iter(algorithms.references(task).items()))
    learners[f"{best} (best known)"] = learner
    learners["0"] = AlgorithmLearner(lambda part: torch.zeros_like(part.ys))
    rows = [Row(f"{label}: loss, {name}", None, interval(_loss(each, prompts)), "prompts")
            for label, each in learners.items()]  # fmt: skip
    if name == "drift":
        rows += [Row(f"{label}: weight of old points, {name}", None, forgetting(each, prompts))
                 for label, each in learners.items() if label != "0"]  # fmt: skip
    return rows


if __name__ == "__main__":
    compare.run()
