"""Momentum attention against plain attention, trained alike (Dai et al. 2023, section 5; the abstract's last claim)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from analyses.support.script import Option, script
from mechicl.analysis.finetuning import draw_texts, measure_accuracy
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.models import HookedTransformer
from mechicl.prompts import TokenSequences
from mechicl.reports import Comparison, Row, Section
from mechicl.statistics import interval
from mechicl.tasks.topics import TopicClassification, topic_tokenizer
from mechicl.text import TEXT_TASKS
from mechicl.viz.elements import add_intervals, figure

PLAIN, MOMENTUM = "plain attention", "momentum attention"
COLORS = {PLAIN: "#0072b2", MOMENTUM: "#d55e00"}
OVER = "seeds"
PAIRED = "momentum minus plain, seed by seed: the same training prompts and, at the start, the same weights"
LOSSES = (2.0, 1.0, 0.5)  # nats: how soon a training gets there
LABELS_BEFORE = ((0, 0), (1, 3), (4, 7), (8, 15))


@script(
    plain=Option("topics-3l", "a checkpoint that reads texts, without momentum"),
    momentum=Option("topics-3l-momentum", "its twin with momentum, and the same seeds"),
    others=Option(("topics-3l-momentum-0.1",), "controls: twins of another strength, with some of the seeds"),
    n_sequences=Option(4000, "held-out sequences of labelled texts"),
    n_demonstrations=Option((0, 2, 4, 8), "numbers of demonstrations of the text tasks"),
    n_queries=Option(500, "queries of each text task"),
    seed=Option(2_000_003, "seed of the sequences and texts"),
)
def compare(args: Any) -> Comparison:
    """The twins' losses, accuracies and training curves, with intervals over seeds."""
    twins = {PLAIN: load_checkpoint(args.plain), MOMENTUM: load_checkpoint(args.momentum)}
    _check_twins(twins[PLAIN], twins[MOMENTUM])
    eta, task = _strength(twins[MOMENTUM]), twins[PLAIN].task
    assert isinstance(task, TopicClassification)
    sequences = dataclasses.replace(task, share_repeated=0.0).sample(args.n_sequences, seed=args.seed)
    rows = [row for quantity, values in _measured(args, twins, sequences).items() for row in _paired(quantity, values)]
    for level in LOSSES:
        reached = {name: _steps_until(twin, level) for name, twin in twins.items()}
        rows += _paired(f"steps until the held-out loss is {level:g}", reached)
    for name in args.others:
        rows += _other_rows(args, twins, load_checkpoint(name), sequences)
    lead = (
        f"{args.plain}, and {args.momentum}, which adds Σ η^(t-i) v_i over the earlier positions i to what each head "
        f"reads, η = {eta:g}: as many weights, the same seeds, training prompts and initial weights. Losses on "
        f"{args.n_sequences:,} new sequences (seed {args.seed}), accuracies on four text tasks, {args.n_queries} "
        f"queries each."
    )
    fig = figure("Held-out loss", "step", "nats")
    for name, twin in twins.items():
        curve = twin.record["curve"]
        losses = [interval(torch.tensor(each)) for each in curve["eval_loss"]]
        add_intervals(fig, curve["eval_step"], losses, name, COLORS[name])
    sections = [Section("Held-out loss", "Of both trainings, mean over seeds with 95% intervals.", fig)]
    return Comparison("Momentum attention", lead, rows, sections, {"momentum": eta, "seed": args.seed})


def _strength(checkpoint: Checkpoint) -> float:
    return checkpoint.models[0].cfg.momentum


def _measured(
    args: Any, twins: Mapping[str, Checkpoint], sequences: TokenSequences
) -> dict[str, dict[str, Float[Tensor, "seed"]]]:
    """Losses and accuracies of each twin, by quantity."""
    ends = [f"{first}" if first == last else f"{first} to {last}" for first, last in LABELS_BEFORE]
    losses = {name: _losses_by_labels(twin, sequences) for name, twin in twins.items()}
    measured = {"held-out loss, nats": {name: torch.tensor(twin.final_losses) for name, twin in twins.items()}}
    for i, label in enumerate(ends):
        measured[f"loss of labels after {label} others, nats"] = {name: each[i] for name, each in losses.items()}
    for number, accuracies in _accuracies(args, twins).items():
        measured[f"accuracy after {number} demonstrations"] = accuracies
    return measured


def _other_rows(args: Any, twins: Mapping[str, Checkpoint], other: Checkpoint, sequences: TokenSequences) -> list[Row]:
    """How far a twin of another strength and, on its seeds, the first are from plain attention."""
    seeds = other.record["seeds"]
    indices = [twins[PLAIN].record["seeds"].index(seed) for seed in seeds]
    some = {name: twin.select(indices) for name, twin in twins.items()}
    _check_twins(some[PLAIN], other)
    rows, words = [], f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    for quantity, values in _measured(args, {**some, other.name: other}, sequences).items():
        for twin in (other, some[MOMENTUM]):
            which = values[other.name if twin is other else MOMENTUM].double() - values[PLAIN].double()
            name = f"{quantity}, η = {_strength(twin):g} minus plain, {words}"
            rows.append(Row(name, None, interval(which) if len(which) > 1 else which.item(), words))
    return rows


def _check_twins(plain: Checkpoint, momentum: Checkpoint) -> None:
    """Refuse models that differ in more than momentum, or in their training."""
    first, second = (checkpoint.models[0] for checkpoint in (plain, momentum))
    if not isinstance(first, HookedTransformer) or not isinstance(plain.task, TopicClassification):
        raise ValueError(f"{plain.name} was not trained on texts")
    alike = {"momentum": first.cfg.momentum, "momentum_over": first.cfg.momentum_over, "device": first.cfg.device}
    if second.cfg.replace(**alike) != first.cfg or plain.record["seeds"] != momentum.record["seeds"]:
        raise ValueError(f"{momentum.name} is not a twin of {plain.name}: the model or the seeds differ")
    if not second.cfg.momentum or first.cfg.momentum:
        raise ValueError(f"{plain.name} must be without momentum, and {momentum.name} with it")


@torch.no_grad()
def _losses_by_labels(checkpoint: Checkpoint, sequences: TokenSequences) -> list[Float[Tensor, "seed"]]:
    """For each range of numbers of labels before, the mean cross entropy of a label."""
    targets, scored = sequences.targets(), sequences.predictable[:, 1:]
    before = scored.cumsum(1) - 1
    by_model = []
    for model in checkpoint.models:
        nats = torch.cat([
            F.cross_entropy(model(ids).transpose(1, 2), aims, reduction="none")
            for ids, aims in zip(sequences.read.split(500), targets.split(500), strict=True)
        ])  # fmt: skip
        groups = [scored & (before >= first) & (before <= last) for first, last in LABELS_BEFORE]
        by_model.append(torch.stack([nats[group].double().mean() for group in groups]))
    return list(torch.stack(by_model, 1))


def _accuracies(args: Any, twins: Mapping[str, Checkpoint]) -> dict[int, dict[str, Float[Tensor, "seed"]]]:
    """By number of demonstrations: each seed's accuracy on its own demonstrations and queries, mean over tasks."""
    made = [task for task in TEXT_TASKS.values() if task.topics]
    draws = [
        [draw_texts(task, n_queries=args.n_queries, seed=args.seed + i) for task in made]
        for i in range(len(twins[PLAIN].models))
    ]
    tokenizer, numbers = topic_tokenizer(), args.n_demonstrations

    def of_model(model: Any, texts: Sequence[Any]) -> Float[Tensor, "number"]:
        by_task = [measure_accuracy(model, tokenizer, each, numbers).accuracy[0, 0].mean(1) for each in texts]
        return torch.stack(by_task).mean(0)

    by_twin = {name: torch.stack([of_model(*pair) for pair in zip(twin.models, draws, strict=True)], 1)
               for name, twin in twins.items()}  # fmt: skip
    return {number: {name: each[i] for name, each in by_twin.items()} for i, number in enumerate(numbers)}


def _steps_until(checkpoint: Checkpoint, level: float) -> Float[Tensor, "seed"]:
    """When a held-out loss passes a level, on straight lines between evaluations; NaN if it never does."""
    curve = checkpoint.record["curve"]
    steps, losses = torch.tensor(curve["eval_step"]).double(), torch.tensor(curve["eval_loss"]).double()
    reached = torch.full((losses.shape[1],), torch.nan)
    for seed, values in enumerate(losses.T):
        i = int((values <= level).int().argmax())  # 0 where none is
        if i > 0:
            share = (values[i - 1] - level) / (values[i - 1] - values[i])
            reached[seed] = steps[i - 1] + share * (steps[i] - steps[i - 1])
    return reached


def _paired(quantity: str, values: dict[str, Float[Tensor, "seed"]]) -> list[Row]:
    if not all(each.isfinite().all() for each in values.values()):
        return [Row(f"{quantity}, {name}", None, "not reached by all seeds") for name in (*values, "difference")]
    rows = [Row(f"{quantity}, {name}", None, interval(each), OVER) for name, each in values.items()]
    difference = values[MOMENTUM].double() - values[PLAIN].double()
    return [*rows, Row(f"{quantity}, difference", None, interval(difference), OVER, PAIRED)]


if __name__ == "__main__":
    compare.run()
