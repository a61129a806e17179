"""Copying emerges on alternate tokens (von Oswald et al. 2023, section 4, Fig. 5 and Proposition 3).

python analyses/oswald_copying.py
"""

import copy
from dataclasses import dataclass

import torch

from mechicl import viz
from mechicl.analysis import find_transitions, measure_target_copying
from mechicl.analysis.behaviour import tuned_descent
from mechicl.analysis.dynamics import Transitions
from mechicl.analysis.heads import TargetCopying, TokenSensitivity, measure_token_sensitivity
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.learners import squared_errors
from mechicl.prompts import Prompts
from mechicl.reports import Claim, Claims, Comparison, Row, Section
from mechicl.reports.script import ScriptArgs, run_script
from mechicl.statistics import Interval, interval, ratio_interval

FIELDS = ("attention", "pattern_cosine", "decoding_errors", "decoding_errors_of_inputs", "errors", "errors_without",
          "errors_without_elsewhere", "errors_transplanted")  # fmt: skip
COPIES = 0.5
"""A first layer copies if a linear readout of it has less than this share of the targets' mean square as its error."""


@dataclass(frozen=True)
class Args(ScriptArgs):
    """When two layers learn to copy targets to their inputs' tokens, and what they do with them."""

    checkpoints: tuple[str, ...] = ("copy-2l", "copy-2l-one-hot", "copy-2l-linear")
    """Names or folders of two-layer models on interleaved prompts of one task."""
    n_prompts: int = 10_000
    """Held-out prompts for losses."""
    n_opened: int = 1024
    """Held-out prompts that activations are read on; derivatives are taken on a 64th of these."""
    seed: int = 1_000_003
    """Seed of the held-out prompts."""


@dataclass(frozen=True, eq=False)
class CopyStudy:
    """What was measured in the seeds of one checkpoint."""

    checkpoint: Checkpoint
    copies: list[TargetCopying]
    sensitivities: list[TokenSensitivity]
    transitions: Transitions
    losses: torch.Tensor

    @property
    def copying(self) -> torch.Tensor:
        """Which seeds' first layers copy."""
        return torch.stack([copying.decoding_errors.mean() for copying in self.copies]) < COPIES


def compare(args: Args) -> Comparison:
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
        seeds = study.checkpoint.record["seeds"]
        figures.append(
            Section(
                f"{name}: loss during training",
                "Half the held-out mean squared error of each seed; diamonds mark where it has fallen half of the way.",
                viz.losses_over_training(
                    curve["eval_step"],
                    {"seeds": curve["eval_loss"]},
                    transitions={"seeds": study.transitions},
                    references={"one step of gradient descent": reference.mean().item(), "predicting 0": nothing},
                    log_y=max(map(max, curve["eval_loss"])) > 10 * nothing,  # large initial weights
                ),
            )
        )
        if study.checkpoint.snapshots is not None:
            steps, over_training = _sensitivity_over_training(study.checkpoint, _for_derivatives(read_on))
            rows.append(_rise_row(study, steps, over_training))
            copied = [seed for seed, fine in zip(range(len(seeds)), study.copying.tolist(), strict=True) if fine]
            if copied:
                figures.append(_sensitivity_figure(study, steps, over_training, copied[0], reference.mean().item()))
                figures.append(_patterns_figure(study, copied[0], read_on))
            data[f"{name}, sensitivity over training"] = {
                "steps": steps,
                **{k: v.tolist() for k, v in over_training.items()},
            }
        data[name] = {
            "seeds": seeds,
            "mse": study.losses.tolist(),
            "copies": study.copying.tolist(),
            "transition": [study.transitions.before.tolist(), study.transitions.after.tolist()],
            **{
                field: [getattr(c, field).mean().item() for c in study.copies]
                for field in FIELDS
            },
        }  # fmt: skip
    lead = (
        f"Two layers of attention on alternate tokens, x ~ U(-1/2, 1/2), d = n = 10, on {args.n_prompts:,} held-out "
        f"prompts (seed {args.seed}); the first layer is read on {args.n_opened:,} of them. The mean square of the "
        f"targets is {nothing:.3f}: what predicting 0 loses."
    )
    return Comparison("Copying emerges (section 4, Fig. 5)", lead, rows, figures, data)


def _measure(checkpoint: Checkpoint, held_out: Prompts, read_on: Prompts, nothing: float) -> CopyStudy:
    models = [copy.deepcopy(model).double() for model in checkpoint.models]
    curve = checkpoint.record["curve"]
    return CopyStudy(
        checkpoint,
        [measure_target_copying(model, read_on) for model in models],
        [measure_token_sensitivity(model, _for_derivatives(read_on)) for model in models],
        find_transitions(curve["eval_step"], curve["eval_loss"], plateau=nothing),
        torch.stack([squared_errors(model, held_out)[:, 0].mean() for model in models]),
    )


def _for_derivatives(prompts: Prompts) -> Prompts:
    """The prompts on which derivatives are taken: they cost much more than a forward pass."""
    return prompts[: max(1, len(prompts) // 64)]


def _rise_row(study: CopyStudy, steps: list[int], over_training: dict[str, torch.Tensor]) -> Row:
    """Whether the first layer reads the next token before the loss falls, as far as the snapshots tell."""
    ratio = over_training["next"] / over_training["other"]
    words, before = [], 0
    for seed, fine in enumerate(study.copying.tolist()):
        if not fine:
            continue
        fall = study.transitions.before[seed].item()
        earlier = [i for i, step in enumerate(steps) if step <= fall]
        later = [i for i, step in enumerate(steps) if step > fall]
        if earlier and later:
            before += bool(ratio[earlier[-1], seed] > 3)
            words.append(f"{ratio[earlier[-1], seed]:.2g} (step {steps[earlier[-1]]}) to {ratio[later[0], seed]:.2g} "
                         f"(step {steps[later[0]]})")  # fmt: skip
    quantity = f"{study.checkpoint.name}: seeds that read the next token 3 times more than others before the loss falls"
    note = f"norms' ratio at the snapshots around the fall: {'; '.join(words)}"
    return Row(quantity, "all", f"{before} of {len(words)} seeds", "seeds that copy", note)


def _rows(study: CopyStudy, reference: torch.Tensor) -> list[Row]:
    """Rows of one checkpoint; intervals are over the seeds that copy, where there are two or more."""
    name, n, fine = study.checkpoint.name, len(study.copies), study.copying
    linear_only = "softmax" not in study.checkpoint.models[0].cfg.attention
    claim = "none (could not be trained)" if linear_only else "all"
    which = f"{int(fine.sum())} of {n} seeds"
    falls = study.transitions
    seen = f"{int(falls.fell.sum())} of {n} seeds, latest over earliest {falls.spread():.2g}"
    rows = [
        Row(f"{name}: first layers that copy", claim, which, "seeds"),
        Row(f"{name}: step of the transition", None, falls.mean_step(), "seeds", seen),
    ]
    kept = fine if fine.any() else torch.ones_like(fine)
    over = "seeds that copy" if fine.any() else "seeds"

    def mean(values: list[torch.Tensor]) -> Interval:
        return interval(torch.stack(values)[kept])

    ratios = study.losses / reference.mean()
    by_seed = f"by seed {', '.join(f'{r:.3f}' for r in ratios)}"
    expected = None if linear_only else 1
    rows.append(Row(f"{name}: loss over one step of gradient descent", expected, interval(ratios[kept]), over, by_seed))
    rows.append(Row(f"{name}: loss over one step of gradient descent, all seeds", expected, interval(ratios), "seeds"))
    for label, words, values in (
        ("the token itself", None, [s.itself.mean() for s in study.sensitivities]),
        ("the next token, its target", None if linear_only else "high", [s.next.mean() for s in study.sensitivities]),
        ("any other token", None if linear_only else "near 0", [s.other.mean() for s in study.sensitivities]),
    ):
        rows.append(Row(f"{name}: |d first layer / d token| at x tokens, {label}", words, mean(values), over))
    rows += [
        Row(f"{name}: share of attention on the target's token", None, mean([c.attention.mean() for c in study.copies]),
            over),
        Row(f"{name}: cosine of its pattern with that of copy_targets", None,
            mean([c.pattern_cosine.mean() for c in study.copies]), over),
        Row(f"{name}: target not readable at its input's token, before and after the layer", None,
            mean([c.decoding_errors.mean() for c in study.copies]), over,
            f"before: {study.copies[0].decoding_errors_before.mean():.3f}; share of the mean square"),
    ]  # fmt: skip
    rows.append(
        Row(f"{name}: input not readable at its target's token after the layer", None,
            mean([c.decoding_errors_of_inputs.mean() for c in study.copies]), over,
            "by seed " + ", ".join(f"{c.decoding_errors_of_inputs.mean():.2f}" for c in study.copies))
    )  # fmt: skip
    for label, field in (
        ("without the first layer at x tokens", "errors_without"),
        ("without it elsewhere", "errors_without_elsewhere"),
        ("with the pattern of copy_targets at x tokens", "errors_transplanted"),
    ):
        values = [ratio_interval(getattr(c, field), c.errors).mean for c in study.copies]
        rows.append(Row(f"{name}: loss {label} over the model's", None, mean(list(torch.tensor(values))), over))
    return rows


def _sensitivity_over_training(checkpoint: Checkpoint, prompts: Prompts) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Steps, and by relation the mean norm `[step seed]`."""
    assert checkpoint.snapshots is not None
    steps = list(checkpoint.snapshots.steps)
    by_step = [
        [measure_token_sensitivity(model.double(), prompts) for model in checkpoint.models_at(i)]
        for i in range(len(steps))
    ]
    return steps, {
        relation: torch.tensor([[getattr(s, relation).mean().item() for s in row] for row in by_step])
        for relation in ("itself", "next", "other")
    }


def _sensitivity_figure(
    study: CopyStudy, steps: list[int], by_relation: dict[str, torch.Tensor], seed: int, gd_mse: float
) -> Section:
    name = study.checkpoint.name
    names = {"itself": "the token itself", "next": "the next token (its target)", "other": "other tokens"}
    one = {names[relation]: values[:, seed].tolist() for relation, values in by_relation.items()}
    curve = study.checkpoint.record["curve"]
    figure = viz.sensitivity_over_training(
        steps, one, curve["eval_step"], [line[seed] for line in curve["eval_loss"]], gd_mse=gd_mse
    )
    words = (
        f"Norm of the derivative of the first layer's output at the context's x tokens, seed "
        f"{study.checkpoint.record['seeds'][seed]}, at the saved snapshots, above its loss."
    )
    return Section(f"{name}: what the first layer depends on", words, figure)


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
    return Section(f"{checkpoint.name}: attention patterns", words, viz.mean_patterns(panels, labels))


def claims(comparison: Comparison) -> list[Claim]:
    """What the paper says of copying."""
    paper = Claims("vonoswald2023", comparison.rows)
    names = ("copy-2l", "copy-2l-one-hot", "copy-2l-linear")
    sines, one_hot, linear = (paper[f"{name}: loss over one step of gradient descent"] for name in names)
    elsewhere = paper["copy-2l-one-hot: loss without it elsewhere over the model's"]
    one, two = paper["half-MSE, one tuned step of gradient descent"], paper["half-MSE, two tuned steps"]
    by_seed = zip(comparison.data["copy-2l"]["mse"], comparison.data["copy-2l"]["copies"], strict=True)
    others = [mse / 2 / one.ends[1] for mse, copies in by_seed if not copies]
    paper.add(
        "Fig. 5, left", "softmax, then linear attention on alternate tokens: loss over one step of gradient descent, "
        "seeds that copy", sines, why=sines.note,
    )  # fmt: skip
    paper.add(
        "Fig. 5, left", "softmax, then linear attention: loss over one step of gradient descent, half-MSE of one step "
        "and of two", lines={"loss over one step": [sines], "one step": [one], "two steps": [two]},
        check=f"A > {two.ends[1] / one.ends[1]:.6g}", published="one step, not two",
        why="taken as: above the loss of two steps",
    )  # fmt: skip
    paper.add("Fig. 5, left", "one-hot positions: loss over one step of gradient descent, seeds that copy", one_hot,
              why="the first layer also writes at other tokens, without which the loss is "
              f"{elsewhere} times this; {one_hot.note}")  # fmt: skip
    transition = paper["copy-2l: step of the transition"]
    paper.add("Fig. 5, left", "training speed differs between seeds: step of the transition", transition,
              check=f"{transition.ends[2]:.6g} > {1.5 * transition.ends[0]:.6g}", published="highly variable",
              why=f"taken as: even the mean is not known to within a factor of 1.5; {transition.note}")  # fmt: skip
    paper.add(
        "Fig. 5, right", "|d first layer / d token| at inputs' tokens after training: by the target's token, by any "
        "other", "copy-2l: |d first layer / d token| at x tokens, the next token, its target",
        "copy-2l: |d first layer / d token| at x tokens, any other token", check="a > b",
    )  # fmt: skip
    rise = paper["copy-2l: seeds that read the next token 3 times more than others before the loss falls"]
    paper.add("Fig. 5, right", "seeds in which the first layer reads the next token before the loss falls", rise,
              check="all", why=f"both happen between the same two snapshots in most; {rise.note}")  # fmt: skip
    paper.add("Section 4", "seeds whose first layer copies, sinusoidal positions", "copy-2l: first layers that copy",
              check="all", why="the others stay at a higher loss: "
              f"{', '.join(f'{ratio:.2f}' for ratio in others)} of one step's")  # fmt: skip
    paper.add("Section 4", "seeds whose first layer copies, one-hot positions",
              "copy-2l-one-hot: first layers that copy", check="all")  # fmt: skip
    paper.add("Section 4", "seeds whose first layer copies, linear attention in the first layer",
              "copy-2l-linear: first layers that copy", check="none",
              why=f"inputs are partly readable at targets' tokens; loss {linear} of one step's")  # fmt: skip
    return paper.stated


if __name__ == "__main__":
    run_script(Args, compare, "oswald_copying", claims)
