"""Copying emerges on alternate tokens (von Oswald et al. 2023, section 4, Fig. 5 and Proposition 3)."""

from dataclasses import dataclass
from typing import Any

import torch

from analyses.support.script import Option, script
from analyses.support.seeds import by_seed, in_float64, query_errors
from analyses.support.token_sensitivity import TokenSensitivity, measure_token_sensitivity
from mechicl import viz
from mechicl.analysis import find_transitions, measure_target_copying
from mechicl.analysis.behaviour import tuned_descent
from mechicl.analysis.dynamics import Transitions
from mechicl.analysis.heads import TargetCopying
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.learners import squared_errors
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row, Section
from mechicl.statistics import Interval, interval, median_interval, ratio_interval

COPIES = 0.5
"""A first layer copies if a linear readout of it has less than this share of the targets' mean square as its error."""


@dataclass(frozen=True, eq=False)
class CopyStudy:
    """The measurements in the seeds of one checkpoint."""

    checkpoint: Checkpoint
    copies: list[TargetCopying]
    sensitivities: list[TokenSensitivity]
    transitions: Transitions
    losses: torch.Tensor

    @property
    def copying(self) -> torch.Tensor:
        return torch.stack([copying.decoding_errors.mean() for copying in self.copies]) < COPIES


@script(
    checkpoints=("copy-2l", "copy-2l-one-hot", "copy-2l-linear"),
    constant=Option(
        ("copy-2l-dense", "copy-2l-late"),
        "the seeds of the first at a constant rate, as in the paper: those whose loss falls early, and the others",
    ),
    n_prompts=10_000,
    n_opened=Option(1024, "held-out prompts that activations are read on; derivatives are taken on a 64th of these"),
    seed=1_000_003,
)
def compare(args: Any) -> Comparison:
    """Losses, transitions, derivatives, attention, ablations and transplants of every seed."""
    rows: list[Row] = []
    figures: list[Section] = []
    data = {}
    task = load_checkpoint(args.checkpoints[0]).task
    held_out = task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
    read_on = held_out[: args.n_opened]
    tuning = task.sample(50_000, seed=args.seed + 1, dtype=torch.float64)
    reference, two = (squared_errors(tuned_descent(tuning, steps), held_out)[:, 0] for steps in (1, 2))
    nothing = held_out.query.ys.square().mean().item()
    rows.append(Row("half-MSE, one tuned step of gradient descent", 0.2, interval(reference / 2), "prompts"))
    rows.append(Row("half-MSE, two tuned steps", None, interval(two / 2), "prompts"))
    for name in args.checkpoints:
        study = _measure(load_checkpoint(name), held_out, read_on, nothing)
        rows += _rows(study, reference)
        curve = study.checkpoint.record["curve"]
        words = "Half the held-out mean squared error of each seed; diamonds mark where it has fallen half of the way."
        drawn = viz.losses_over_training(
            curve["eval_step"], {"seeds": curve["eval_loss"]}, transitions={"seeds": study.transitions},
            references={"one step of gradient descent": reference.mean().item(), "predicting 0": nothing},
            log_y=max(map(max, curve["eval_loss"])) > 10 * nothing,  # large initial weights
            half=True,
        )  # fmt: skip
        figures.append(Section(f"{name}: loss during training", words, drawn))
        if study.checkpoint.snapshots is not None:
            figures += [_patterns_figure(study, seed, read_on) for seed in study.copying.nonzero()[:1, 0].tolist()]
        data[name] = {"mse": study.losses.tolist(), "copies": study.copying.tolist()}
    models = in_float64(model for name in args.constant for model in load_checkpoint(name).models)
    copied = [measure_target_copying(model, read_on) for model in models]
    ratios = query_errors(models, held_out).mean(1) / reference.mean()
    which = f"{sum(map(_pairs, copied))} of {len(models)} seeds"
    targets = sum((c.decoding_errors.mean() < COPIES).item() for c in copied)
    note = f"{targets} targets to their inputs' tokens, the others inputs to their targets'; loss over one step's "
    note += by_seed(ratios, ".2f")
    rows.append(Row("constant rate: first layers that copy, either way", "all", which, "seeds", note))
    lead = (
        f"Two layers of attention on alternate tokens, x ~ U(-1/2, 1/2), d = n = 10, on {args.n_prompts:,} held-out "
        f"prompts (seed {args.seed}); the first layer is read on {args.n_opened:,} of them. The mean square of the "
        f"targets is {nothing:.3f}: what predicting 0 loses."
    )
    return Comparison("Copying emerges (section 4, Fig. 5)", lead, rows, figures, data)


def _measure(checkpoint: Checkpoint, held_out: Prompts, read_on: Prompts, nothing: float) -> CopyStudy:
    models, curve = in_float64(checkpoint.models), checkpoint.record["curve"]
    few = read_on[: max(1, len(read_on) // 64)]  # derivatives cost much more than a forward pass
    return CopyStudy(
        checkpoint,
        [measure_target_copying(model, read_on) for model in models],
        [measure_token_sensitivity(model, few) for model in models],
        find_transitions(curve["eval_step"], curve["eval_loss"], plateau=nothing),
        query_errors(models, held_out).mean(1),
    )


def _pairs(copied: TargetCopying) -> bool:
    """Whether a first layer puts inputs and targets together: at the inputs' tokens, or at the targets'."""
    both = copied.decoding_errors.mean(), copied.decoding_errors_of_inputs.mean()
    return any((errors < COPIES).item() for errors in both)


def _rows(study: CopyStudy, reference: torch.Tensor) -> list[Row]:
    """Rows of one checkpoint; intervals are over the seeds that copy, where there are two or more."""
    name, n, fine = study.checkpoint.name, len(study.copies), study.copying
    linear_only = "softmax" not in study.checkpoint.models[0].cfg.attention
    claim = "none (could not be trained)" if linear_only else "all"
    falls, either = study.transitions, f"{sum(map(_pairs, study.copies))} of {n} seeds"
    seen = f"{int(falls.fell.sum())} of {n} seeds"
    rows = [
        Row(f"{name}: first layers that copy", claim, f"{int(fine.sum())} of {n} seeds", "seeds"),
        Row(f"{name}: first layers that copy, either way", None, either, "seeds"),
        Row(f"{name}: step of the transition", None, median_interval(falls.steps[falls.fell]), "seeds", seen),
        Row(f"{name}: latest transition over the earliest", None, falls.spread(), "", seen),
    ]
    kept = fine if fine.any() else torch.ones_like(fine)
    over = "seeds that copy" if fine.any() else "seeds"

    def mean(values: list[torch.Tensor]) -> Interval:
        return interval(torch.stack(values)[kept])

    ratios, expected = study.losses / reference.mean(), None if linear_only else 1
    words = f"{name}: loss over one step of gradient descent"
    rows.append(Row(words, expected, interval(ratios[kept]), over, by_seed(ratios, ".3f")))
    rows.append(Row(f"{words}, all seeds", expected, interval(ratios), "seeds"))
    for label, words, values in (
        ("the token itself", None, [s.itself.mean() for s in study.sensitivities]),
        ("the next token, its target", None if linear_only else "high", [s.next.mean() for s in study.sensitivities]),
        ("any other token", None if linear_only else "near 0", [s.other.mean() for s in study.sensitivities]),
    ):
        rows.append(Row(f"{name}: |d first layer / d token| at x tokens, {label}", words, mean(values), over))
    of_inputs = [c.decoding_errors_of_inputs.mean() for c in study.copies]
    rows += [
        Row(f"{name}: share of attention on the target's token", None, mean([c.attention.mean() for c in study.copies]),
            over),
        Row(f"{name}: cosine of its pattern with that of copy_targets", None,
            mean([c.pattern_cosine.mean() for c in study.copies]), over),
        Row(f"{name}: target not readable at its input's token, before and after the layer", None,
            mean([c.decoding_errors.mean() for c in study.copies]), over,
            f"before: {study.copies[0].decoding_errors_before.mean():.3f}; share of the mean square"),
        Row(f"{name}: input not readable at its target's token after the layer", None, mean(of_inputs), over,
            by_seed(of_inputs, ".2f")),
    ]  # fmt: skip
    for label, field in (
        ("without the first layer at x tokens", "errors_without"),
        ("without it elsewhere", "errors_without_elsewhere"),
        ("with the pattern of copy_targets at x tokens", "errors_transplanted"),
    ):
        values = [ratio_interval(getattr(c, field), c.errors).mean for c in study.copies]
        rows.append(Row(f"{name}: loss {label} over the model's", None, mean(list(torch.tensor(values))), over))
    return rows


def _patterns_figure(study: CopyStudy, seed: int, prompts: Prompts) -> Section:
    checkpoint = study.checkpoint
    assert checkpoint.snapshots is not None
    transition = study.transitions.steps.nan_to_num(0)[seed].item()
    before = max((i for i, step in enumerate(checkpoint.snapshots.steps) if step <= 0.6 * transition), default=0)
    panels = {}
    for i in (before, len(checkpoint.snapshots.steps) - 1):
        model = checkpoint.models_at(i)[seed].double()
        _, cache = model.run_with_cache(model.encode(prompts), names_filter="blocks.0.attn.hook_pattern")
        panels[f"step {checkpoint.snapshots.steps[i]}"] = cache["blocks.0.attn.hook_pattern"][:, 0].mean(0)
    labels = checkpoint.models[0].cfg.format.labels(prompts.n_context)
    words = "Mean attention of the first layer before and after the transition; rows attend to columns."
    drawn = viz.attention_figure(torch.stack(list(panels.values())), labels, list(panels))
    return Section(f"{checkpoint.name}: attention patterns", words, drawn)


@compare.derive
def derived_rows(comparison: Comparison) -> list[Row]:
    """Return the losses of seeds that do not copy, over one step of gradient descent."""
    (one,) = (row for row in comparison.rows if row.quantity == "half-MSE, one tuned step of gradient descent")
    by_seed = zip(comparison.data["copy-2l"]["mse"], comparison.data["copy-2l"]["copies"], strict=True)
    ratios = ", ".join(f"{mse / 2 / one.ends[1]:.2f}" for mse, copies in by_seed if not copies)
    return [Row("loss of seeds that do not copy, over one step", None, ratios)]


if __name__ == "__main__":
    compare.run()
