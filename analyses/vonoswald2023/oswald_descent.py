"""A trained model against as many steps of gradient descent and GD++ (von Oswald et al. 2023, Figs. 3, 7, 8 and 14).

python analyses/vonoswald2023/oswald_descent.py --checkpoint lsa-5l
"""

import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from analyses.support.resamples import over_seeds
from analyses.support.script import Option, regression_checkpoint, script
from analyses.support.seeds import in_float64, query_errors
from mechicl.algorithms.descent_cards import descent_filter, parameter_labels
from mechicl.algorithms.spectral_fit import SpectralProblem
from mechicl.analysis import align, align_over_training
from mechicl.analysis.behaviour import SpectralLearner, tuned_descent
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.learners import squared_errors
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row
from mechicl.reports.algorithm import AlgorithmQuestion
from mechicl.reports.descent import TRIM, TRIMMED, TUNING_SEED, Descent
from mechicl.reports.rows import over_seeds_and_prompts
from mechicl.statistics import Interval, interval, median_interval
from mechicl.training import TrainingConfig
from mechicl.training.optimizers import clip_each_seed, make_optimizer

N_POOL = 100_000
"""Prompts that GD++ is trained on where it is trained as a model is."""


@script(
    checkpoint=Option(
        "lsa-5l",
        "lsa-2l-looped and lsa-5l (Fig. 3), lsa-3l-looped (Fig. 9), lsa-10l-looped (Fig. 7), lsa-12l-mlp "
        "(Fig. 8), lsa-1l-ln and lsa-2l-ln (Fig. 14), or a folder",
    ),
    n_prompts=10_000,
    seed=1_000_003,
)
def compare(args: Any) -> Comparison:
    """One checkpoint, all its seeds."""
    checkpoint = load_checkpoint(args.checkpoint)
    kind = Descent(checkpoint, n_prompts=args.n_prompts, seed=args.seed)
    kind.question = AlgorithmQuestion(kind.study, n_prompts=min(args.n_prompts, 4096), seed=0)
    comparison = kind.measure(("loss", "algorithm", "weights", "shifts"))
    comparison = replace(comparison, rows=[_in_papers_unit(row) for row in comparison.rows])
    if checkpoint.name == "lsa-5l":
        return comparison.with_more(_trained_rows(checkpoint, args), [], {})
    if checkpoint.name == "lsa-2l-ln" and checkpoint.snapshots is not None:
        return comparison.with_more(_early_rows(checkpoint, args), [], {})
    return comparison


def _in_papers_unit(row: Row) -> Row:
    """A row with half of the squared error, which the paper's figures show, instead of the squared error."""
    unit, measured = "squared error (MSE)", row.measured
    if not (row.quantity.startswith(unit) and isinstance(measured, Interval)):
        return row
    half = replace(measured, mean=measured.mean / 2, low=measured.low / 2, high=measured.high / 2)
    return replace(row, quantity=row.quantity.replace(unit, "half-MSE"), measured=half)


@cache
def _trained(name: str) -> SpectralLearner:
    """GD++ with parameters for each step, trained in a checkpoint's setup."""
    checkpoint, task = regression_checkpoint(name)
    training = TrainingConfig.from_dict(checkpoint.record["training"])
    pool = task.sample(N_POOL, seed=TUNING_SEED, dtype=torch.float64)
    return trained_descent(pool, checkpoint.models[0].cfg.n_layers, training, gamma=True, per_step=True)


def _trained_rows(checkpoint: Checkpoint, args: Any) -> list[Row]:
    """Compare the model's loss with that of GD++ with parameters trained like the model's."""
    learner = _trained(args.checkpoint)
    held_out = checkpoint.task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
    reference = squared_errors(learner, held_out)[:, 0]
    name = f"GD++, {checkpoint.models[0].cfg.n_layers} steps, each its own, trained as the model"
    found = ", ".join(f"{key}={value:.3g}" for key, value in learner.hyperparameters.items())
    models = in_float64(checkpoint.models)
    cosines = torch.stack([align(model, learner, held_out[:2048]).sensitivity_cosine for model in models])
    over = partial(over_seeds_and_prompts, query_errors(models, held_out), checkpoint, reference)
    return [
        Row(f"sensitivity cosine with {name}", None, *over_seeds_and_prompts(cosines, checkpoint)),
        Row(f"half-MSE, {name}", None, interval(reference / 2), "prompts", found),
        Row(f"loss, trained over {name}", None, *over()),
        Row(f"loss, trained over {name}, {TRIMMED}", None, *over(trim=TRIM)),
    ]


def _early_rows(checkpoint: Checkpoint, args: Any) -> list[Row]:
    """Where in its training each seed is closest to gradient descent: alignment, and the loss over descent's."""
    assert checkpoint.snapshots is not None
    task, steps = checkpoint.task, checkpoint.snapshots.steps
    tuning = task.sample(8192, seed=TUNING_SEED, dtype=torch.float64)
    held_out = task.sample(min(args.n_prompts, 2048), seed=args.seed, dtype=torch.float64)
    n = checkpoint.models[0].cfg.n_layers
    descent, plus = tuned_descent(tuning, n), tuned_descent(tuning, n, gamma=True)
    plain, better = (
        align_over_training(checkpoint, each, held_out[:512]).sensitivity_cosine for each in (descent, plus)
    )
    at = plain.nan_to_num(-1).argmax(0)
    reference = squared_errors(descent, held_out).mean().item()
    losses = [
        squared_errors(checkpoint.models_at(i)[seed].double(), held_out).mean().item() / reference
        for seed, i in enumerate(at.tolist())
    ]
    there = [values.gather(0, at[None])[0] for values in (plain, better)]
    return [
        Row("early: step", None, *over_seeds([float(steps[i]) for i in at.tolist()], checkpoint, median=True)),
        Row("early: cosine with gradient descent", None, *over_seeds(there[0], checkpoint)),
        Row("early: cosine with GD++", None, *over_seeds(there[1], checkpoint)),
        Row("early: loss over gradient descent's", None, *over_seeds(losses, checkpoint, median=True)),
    ]


def trained_descent(
    prompts: Prompts, steps: int, training: TrainingConfig, *, gamma: bool = False, per_step: bool = False,
    seed: int = 0,
) -> SpectralLearner:  # fmt: skip
    """Gradient descent or GD++ with parameters from a model's training: its optimiser, rate, batches and clipping.

    A search (`tuned_descent`) finds better parameters than a training does where the loss has a narrow valley or is
    made by rare prompts; this is what a model that was trained the same way may be compared with as well.

    The training begins with all parameters at 0 (A.12: "an identical training setup" for η and γ).

    Args:
        prompts: the pool that batches are drawn from, each prompt once before any comes again.
        steps: number of steps of descent.
        training: the model's. The task, the model and the seeds in it are not used, nor a clip of tokens.
        gamma: as for `tuned_descent`.
        per_step: as for `tuned_descent`.
        seed: of the order of the prompts.
    """
    if steps < 1 or (gamma and steps == 1):
        raise ValueError(f"descent needs a step, and GD++ two: its last γ does nothing; got steps={steps}")
    if len(prompts) < training.batch_size:
        raise ValueError(f"a batch has {training.batch_size:,} prompts, and the pool only {len(prompts):,}: draw more")
    labels = parameter_labels(steps, gamma=gamma, per_step=per_step)
    family = partial(descent_filter, steps=steps, gamma=gamma, per_step=per_step)
    problem = SpectralProblem.from_prompts(prompts, prompts.query.ys)
    values = torch.zeros(1, len(labels), dtype=torch.float64, requires_grad=True)
    optimizer = make_optimizer(training.optimizer, values, [torch.Size([len(labels)])], training.learning_rate)
    generator, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.long)
    for step in range(training.steps):
        if len(order) < training.batch_size:
            order = torch.randperm(len(prompts), generator=generator)
        batch, order = order[: training.batch_size], order[training.batch_size :]
        drawn = SpectralProblem(problem.eigenvalues[batch], problem.contributions[batch], problem.targets[batch])
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate_at(step)
        optimizer.zero_grad()
        loss = drawn.error(family(values[0], drawn.eigenvalues))
        loss.backward()
        assert values.grad is not None
        if not math.isfinite(loss.item()):
            values.grad.zero_()
        if training.gradient_clip is not None:
            clip_each_seed(values.grad, training.gradient_clip)
        optimizer.step()
    final = values.detach()[0]
    name = f"{'GD++' if gamma else 'gradient descent'}, {steps} step{'s' if steps > 1 else ''}"
    name += f"{', parameters for each step' if per_step else ''}, trained"
    return SpectralLearner(partial(family, final), name, dict(zip(labels, final.tolist(), strict=True)))


@compare.derive
def derived_rows(comparison: Comparison) -> list[Row]:
    """Return each seed's loss over that of a reference, and the median with its bootstrap interval over seeds.

    Few prompts weigh most in a mean over prompts, so that a seed's loss may be far from the others'.
    """
    per_seed = [sum(row) / len(row) if isinstance(row, list) else row for row in comparison.data["mse"]]
    rows = []
    for name, reference in comparison.data["references"].items():
        words = [f"{mse / reference:.3g}" for mse in per_seed]
        median = median_interval(torch.tensor([float(word) for word in words], dtype=torch.float64))
        rows.append(Row(f"loss of each seed over {name}", None, ", ".join(words)))
        rows.append(Row(f"loss, trained over {name}, median", None, median, "seeds"))
    return rows


if __name__ == "__main__":
    compare.run()
