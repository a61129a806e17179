"""In-context learning that appears and vanishes again during training (after Singh et al. 2023), and what prevents it.

python analyses/transience.py --folder runs/transience   # trains 30 small models on the first call; resumes
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from analyses.support import sweeps
from analyses.support.script import Option, script
from mechicl.analysis import ablate, score_heads
from mechicl.analysis.dynamics import OverTraining, measure_over_training
from mechicl.checkpoints import Checkpoint, Snapshots
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row, Section
from mechicl.statistics import interval
from mechicl.tasks import GaussianClusters
from mechicl.training import PRESETS, TrainingConfig, train
from mechicl.viz.elements import add_intervals, figure

PRESET = PRESETS["clusters-transient"]
SEEDS = (0, 1, 2)
BASE = "base"
KINDS = ("known", "new", "absent", "swapped")
SEED = 1_000_003
CURVES = "transience.csv"
TASK = PRESET.task
assert isinstance(TASK, GaussianClusters)
TASKS = {  # all trained at once
    BASE: TASK,
    "128 classes": TASK.replace(n_classes=128),
    "512 classes": TASK.replace(n_classes=512),
    "1024 classes": TASK.replace(n_classes=1024),
    "80% bursty": TASK.replace(bursty_share=0.8),
    "100% bursty": TASK.replace(bursty_share=1.0),
}
DECAYS = (0.1, 0.3, 1.0)
TWO_LAYERS = "two layers"


def runs() -> dict[str, TrainingConfig]:
    """The trainings by name: one for all tasks, one for each weight decay, and one of two layers."""
    base = PRESET.replace(seeds=SEEDS, n_snapshots=31, snapshots_between=(0, PRESET.steps))
    two = PRESETS["clusters-2048"].model.replace(d_model=16, d_head=8, d_mlp=64, initializer_range=0.1, act_fn="gelu")
    return {
        "tasks": base.replace(more_tasks=tuple(TASKS.values())[1:]),
        **{f"weight decay {decay:g}": base.replace(weight_decay=decay) for decay in DECAYS},
        TWO_LAYERS: base.replace(
            task=TASK.replace(n_classes=512, bursty_share=0.9), model=two, learning_rate=5e-3, steps=6000,
            loss="query", snapshots_between=(0, 6000),
        ),
    }  # fmt: skip


def trained(args: Any) -> dict[str, Checkpoint]:
    """One checkpoint with snapshots for each condition."""
    found: dict[str, Checkpoint] = {}
    for name, config in runs().items():
        result = train(config, args.folder / name.replace(" ", "-"), progress=False)
        whole = Checkpoint(name, result.models, result.record, Snapshots(result.snapshot_steps, result.snapshots))
        found |= dict(zip(TASKS, whole.by_task(), strict=True)) if config.more_tasks else {name: whole}
    return found


@script(
    folder=Option(Path("runs/transience"), "folder of the trainings, which resume"),
    n_prompts=Option(1000, "held-out prompts of each kind"),
)
def compare(args: Any) -> Comparison:
    """Accuracies over training in each condition, and the heads of the base condition."""
    rows: list[Row] = []
    sections, tables = [], []
    for name, checkpoint in trained(args).items():
        prompts = prompts_of_each_kind(checkpoint.task, args.n_prompts, SEED)
        stored = stored_labels(checkpoint.task, prompts["swapped"])
        curves = measure_over_training(checkpoint, partial(accuracies, prompts, stored), progress=False)
        rows += condition_rows(name, curves, checkpoint.record["curve"])
        for i, seed in enumerate(SEEDS):
            columns = {key: each[:, i].numpy() for key, each in curves.quantities.items()}
            tables.append(pd.DataFrame({"condition": name, "seed": seed, "step": curves.steps, **columns}))
        sections.append(section(name, curves))
        if name in (BASE, TWO_LAYERS):
            rows += head_rows(name, checkpoint, curves, args.n_prompts)
    args.out.mkdir(parents=True, exist_ok=True)
    pd.concat(tables).to_csv(args.out / CURVES, index=False, float_format="%.3g")
    lead = (
        f"{TASK!r}, one layer with two softmax heads of width 12 and an MLP of width 96 on tokens of x and y together; "
        f"{PRESET.steps:,} steps of Adam at a constant rate, three seeds. Two layers: x and y in alternate tokens, "
        f"width 16, 512 classes, 90% bursty prompts, 6,000 steps. Accuracies are on {args.n_prompts:,} held-out bursty "
        "prompts of each kind. Values are medians with the range of three seeds."
    )
    return Comparison("Transience of in-context learning", lead, rows, sections)


def prompts_of_each_kind(task: Any, n_prompts: int, seed: int) -> dict[str, Prompts]:
    return {kind: task.replace(classes=kind, bursty_share=1.0).sample(n_prompts, seed=seed) for kind in KINDS}


def stored_labels(task: Any, prompts: Prompts) -> Tensor:
    """The labels that the nearest classes of the queries have in training."""
    centres = task.means / (1 + task.within_class_noise**2) ** 0.5
    return task.labels[torch.cdist(prompts.query.xs.double(), centres).argmin(1)]


@torch.no_grad()
def accuracies(
    prompts: Mapping[str, Prompts], stored: Tensor, model: HookedTransformer
) -> dict[str, Float[Tensor, "prompt"]]:
    """Whether a model is right on the kinds of prompts, and whether it gives the stored label of swapped prompts."""
    guesses = {kind: model.predict(each).argmax(-1) for kind, each in prompts.items()}
    right = {kind: guesses[kind] == each.query.ys.argmax(-1) for kind, each in prompts.items()}
    return {name: each.double() for name, each in (right | {"stored": guesses["swapped"] == stored}).items()}


def condition_rows(name: str, curves: OverTraining, curve: Mapping[str, Any]) -> list[Row]:
    """When in-context learning is best, the rest of it later, and when the weights take over."""
    steps, new = torch.tensor(curves.steps).double(), curves.quantities["new"]
    best = new.argmax(0)
    takes_over = [first_for_good(curves, seed) for seed in range(new.shape[1])]
    by_step = dict(zip(curve["eval_step"], curve["eval_loss"], strict=True))
    loss_at_best = torch.tensor([by_step[curves.steps[int(i)]][seed] for seed, i in enumerate(best)])
    quantities = {
        "highest accuracy on new classes": new.amax(0),
        "step of the highest accuracy on new classes": steps[best],
        "last accuracy on new classes": new[-1],
        "last accuracy on absent classes": curves.quantities["absent"][-1],
        "last share of swapped prompts with the context's label": curves.quantities["swapped"][-1],
        "last share of swapped prompts with the stored label": curves.quantities["stored"][-1],
        "loss when accuracy on new classes is highest": loss_at_best,
        "last loss": torch.tensor(curve["eval_loss"][-1]),
    }
    rows = [over_seeds(f"{name}: {words}", values) for words, values in quantities.items()]
    found = torch.tensor([step for step in takes_over if step is not None])
    words = f"{name}: step from which the stored label wins"
    never, note = Row(words, None, "never", "seeds"), f"{len(found)} of {len(takes_over)} seeds"
    return [*rows, over_seeds(words, found, note) if len(found) else never]


def first_for_good(curves: OverTraining, seed: int) -> float | None:
    """The first snapshot from which on swapped prompts get the stored label more often than the context's."""
    stored, context = (curves.quantities[name][:, seed] for name in ("stored", "swapped"))
    below = (stored <= context).nonzero().flatten()
    first = int(below[-1]) + 1 if len(below) else 0
    return float(curves.steps[first]) if first < len(curves.steps) else None


def over_seeds(quantity: str, values: Tensor, note: str = "") -> Row:
    """A row with the median of a quantity and the range of its seeds; a number for one seed."""
    if len(values) == 1:
        return Row(quantity, None, values.item(), "seed", note)
    return sweeps.over_seeds(quantity, pd.Series(values.tolist()), note)


def head_rows(name: str, checkpoint: Checkpoint, curves: OverTraining, n_prompts: int) -> list[Row]:
    """Where each head attends, and the loss without it, where in-context learning is best and at the end."""
    assert checkpoint.snapshots is not None
    steps, task = checkpoint.snapshots.steps, checkpoint.task
    best = int(curves.quantities["new"].mean(1).argmax())
    ends = {f"step {steps[best]}": best, f"step {steps[-1]}": len(steps) - 1}
    prompts = prompts_of_each_kind(task, n_prompts, SEED + 1)
    found: dict[str, Tensor] = {}
    for words, snapshot in ends.items():
        models, where = checkpoint.models_at(snapshot), f"{name}, {words}"
        attention = torch.stack([attention_to_class(model, prompts["known"]).max() for model in models])
        found[f"{where}: highest attention of a head to the query's class"] = attention
        if models[0].cfg.prompt_format == "interleaved":
            scores = [score_heads(model, prompts=prompts["known"][:256], progress=False) for model in models]
            previous = torch.stack([each.mean("target_to_input").max() for each in scores])
            found[f"{where}: highest attention of a head from y to its x"] = previous
        for kind in ("new", "absent"):
            lost = torch.stack([accuracy_lost(model, prompts[kind]).max() for model in models])
            found[f"{where}: accuracy lost on {kind} classes without the strongest head"] = lost
            for part, hook in (("any head", "attn.hook_z"), ("any MLP", "hook_mlp_out")):
                without = torch.stack([accuracy_without(model, hook, prompts[kind]) for model in models])
                found[f"{where}: accuracy on {kind} classes without {part}"] = without
    return [over_seeds(quantity, values) for quantity, values in found.items()]


@torch.no_grad()
def attention_to_class(model: HookedTransformer, prompts: Prompts) -> Float[Tensor, "layer head"]:
    """Mean attention of the query to the context's points of its class (to their targets, if those are tokens)."""
    # points of the query's class: with little noise these are much nearer than others
    same = (prompts.xs[:, :-1] - prompts.xs[:, -1:]).square().sum(-1) < 0.25
    _, cache = model.run_with_cache(model.encode(prompts))
    patterns = torch.stack([cache["pattern", layer][:, :, -1] for layer in range(model.cfg.n_layers)])
    interleaved = model.cfg.prompt_format == "interleaved"
    keys = patterns[..., 1:-1:2] if interleaved else patterns[..., : prompts.n_context]
    return (keys * same[None, :, None]).sum(-1).mean(1).double()


def accuracy(predictions: Float[Tensor, "*any prompt y"], prompts: Prompts) -> Float[Tensor, "*any"]:
    """Share of the queries whose largest prediction is their label."""
    return (predictions.argmax(-1) == prompts.query.ys.argmax(-1)).double().mean(-1)


@torch.no_grad()
def accuracy_lost(model: HookedTransformer, prompts: Prompts) -> Float[Tensor, "layer head"]:
    """Accuracy lost when one head's output is replaced by its mean over prompts."""
    ablated = ablate(model, prompts, "z", progress=False).predictions
    assert ablated is not None
    return accuracy(model.predict(prompts), prompts) - accuracy(ablated, prompts)


@torch.no_grad()
def accuracy_without(model: HookedTransformer, hook: str, prompts: Prompts) -> Float[Tensor, ""]:
    """Accuracy when an activation of all layers is replaced by its mean over prompts."""
    hooks: list[tuple[str | Callable[..., Any], Callable[..., Any]]] = [
        (f"blocks.{layer}.{hook}", lambda values, hook: values.mean(0, keepdim=True).expand_as(values))
        for layer in range(model.cfg.n_layers)
    ]
    outputs = model.run_with_hooks(model.encode(prompts), fwd_hooks=hooks)
    return accuracy(model.decode(outputs)[:, -1], prompts)


def section(name: str, curves: OverTraining) -> Section:
    """Draw the accuracies of a condition."""
    fig = figure(name, "step", "share of prompts")
    for key, words, color in (
        ("new", "new classes: right from the context", "#0072b2"),
        ("absent", "absent: right from the weights", "#d55e00"),
        ("stored", "swapped: label in the weights", "#999999"),
    ):
        add_intervals(fig, list(curves.steps), [interval(each) for each in curves.quantities[key]], words, color)
    return Section(name, "Means over seeds with 95% intervals.", fig)


if __name__ == "__main__":
    compare.run()
