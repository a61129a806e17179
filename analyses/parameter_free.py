"""One layer of attention compared with formulas that have no fitted number: shifted inputs, other targets, two heads.

python analyses/parameter_free.py --folder runs/parameter_free   # trains three small models on the first call; resumes
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from analyses.support.resamples import over_seeds
from analyses.support.script import Option, script
from analyses.support.seeds import kept_seeds, query_errors
from mechicl import algorithms
from mechicl.analysis import align
from mechicl.checkpoints import Checkpoint, load_checkpoint, untrained
from mechicl.learners import AlgorithmLearner, squared_errors
from mechicl.models import HookedTransformer
from mechicl.reports import Comparison, Row, Section
from mechicl.reports.rows import over_seeds_and_prompts
from mechicl.statistics import Interval, interval
from mechicl.tasks import LinearRegression, ReluNetworks
from mechicl.training import PRESETS, train
from mechicl.viz.elements import interval_dots

SHIFTS = {
    "as in training": (1.0, 1.0, 1.0, 1.0, 1.0),
    "half the variance": (0.5, 0.5, 0.5, 0.5, 0.5),
    "twice the variance": (2.0, 2.0, 2.0, 2.0, 2.0),
    "condition number 5": (2.0, 1.2, 0.8, 0.6, 0.4),
    "one wide direction": (3.0, 0.5, 0.5, 0.5, 0.5),
    "one wide direction, the others narrow": (4.6, 0.1, 0.1, 0.1, 0.1),
}
"""Eigenvalues of the covariance of test inputs; models are trained with the identity."""
SEED = 3_000_017
PENALTY = 5.0
"""Of ridge regression: the signal's variance in a direction is about 1, and that of what is not linear about 5."""


@script(
    folder=Option(Path("runs/parameter_free"), "folder of the training on non-linear targets"),
    n_prompts=Option(50_000, "held-out prompts of each kind"),
)
def compare(args: Any) -> Comparison:
    """The three comparisons, each with an untrained model or another predictor as control."""
    rows, ratios = shifted(args)
    rows += other_targets(args) + two_heads()
    lead = (
        "One layer of attention, trained by Adam, next to theorems on what training leads to. Shifted inputs: "
        "lsa-1l-gaussian (5 dimensions, 20 points, covariance I), next to Zhang, Frei and Bartlett 2024. Other "
        "targets: the same layer trained on random ReLU networks, next to Mahankali, Hashimoto and Ma 2024. Two heads: "
        "softmax-2h, next to He et al. 2025. Theorems are about gradient flow or minimisers, and as we know them; "
        "ratios of losses are on shared prompts."
    )
    title = "Loss of the trained layer over the predicted loss"
    figure = interval_dots(title, "ratio (95% interval)", list(ratios), list(ratios.values()))
    return Comparison("Theorems without a fitted number", lead, rows, [Section("Shifted inputs", "", figure)])


# ---- inputs whose covariance differs from training ----


def predicted_loss(task: LinearRegression, covariance: Tensor) -> float:
    """The loss of the layer that gradient flow reaches, on inputs with another covariance.

    The layer predicts x Γ⁻¹ Σ_i y_i x_i / n with Γ = (1 + 1/n) Λ + tr(Λ) I / n for the covariance Λ = I of training.
    With weights from N(0, I) and covariance S, its mean squared error is tr(S) - 2 tr(S Γ⁻¹ S) + tr(S Γ⁻¹ M Γ⁻¹), where
    M = (1 + 1/n) S² + tr(S) S / n is the mean of the squared second moments of n points.
    """
    n, d = task.n_context, task.x_dim
    inverse = 1 / (1 + 1 / n + d / n)
    second = (1 + 1 / n) * covariance @ covariance + covariance.trace() * covariance / n
    squares = covariance.trace() - 2 * inverse * (covariance @ covariance).trace()
    return (squares + inverse**2 * (covariance @ second).trace()).item()


def shifted(args: Any) -> tuple[list[Row], dict[str, Interval]]:
    """Losses over those of the theorem's predictor on the same prompts, and its own over the formula."""
    checkpoint = load_checkpoint("lsa-1l-gaussian")
    task = checkpoint.task
    assert isinstance(task, LinearRegression)
    step = 1 / (task.n_context + 1 + task.x_dim)
    theory = AlgorithmLearner(algorithms.gradient_descent, {"steps": [1], "step_size": step})
    start = untrained(checkpoint.select([0])).models[0]
    rows, ratios = [], {}
    for name, eigenvalues in SHIFTS.items():
        prompts = task.replace(eigenvalues=eigenvalues).sample(args.n_prompts, seed=SEED)
        expected = predicted_loss(task, torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)))
        own = squared_errors(theory, prompts)[:, 0]
        errors = query_errors(checkpoint.models, prompts)
        measured, over, note = over_seeds_and_prompts(errors, checkpoint, own)
        ratios[name] = measured
        without = squared_errors(start, prompts)[:, 0]
        tuned = {"steps": [1], "step_size": algorithms.tuned_step_size(prompts)}
        other = AlgorithmLearner(algorithms.gradient_descent, tuned)
        adapted = squared_errors(other, prompts)[:, 0].mean() / own.mean()
        rows += [
            Row(f"{name}: loss over the predicted loss", 1.0, measured, over, note),
            Row(f"{name}: predictor's loss over the formula {expected:.4g}", 1.0, interval(own / expected), "prompts"),
            Row(f"{name}: untrained layer over the predicted loss", None, (without.mean() / own.mean()).item()),
            Row(f"{name}: a step tuned to these inputs over the predicted loss", None, adapted.item()),
        ]
    return rows, ratios


# ---- targets that are not linear ----


def other_targets(args: Any) -> list[Row]:
    """A layer trained on ReLU networks, next to the best single step of gradient descent on a linear model."""
    preset = PRESETS["lsa-1l-gaussian"]
    task = ReluNetworks(x_dim=5, n_context=20, n_hidden=20)
    config = preset.replace(task=task, seeds=(0, 1, 2), steps=4000, n_snapshots=0, cpu=True)
    result = train(config, args.folder / "relu")
    checkpoint = Checkpoint("lsa-1l on ReLU networks", result.models, result.record)
    prompts, tuning = task.sample(args.n_prompts, seed=SEED), task.sample(4 * args.n_prompts, seed=SEED + 1)
    step = algorithms.tuned_step_size(tuning)
    best = AlgorithmLearner(algorithms.gradient_descent, {"steps": [1], "step_size": step})
    own, errors = squared_errors(best, prompts)[:, 0], query_errors(checkpoint.models, prompts)
    cosines = torch.stack([align(model, best, prompts[:4000]).sensitivity_cosine for model in checkpoint.models])
    zero = prompts.query.ys[:, 0].square()
    ridge = squared_errors(AlgorithmLearner(algorithms.ridge, {"penalty": PENALTY}), prompts)[:, 0]
    name = f"ReLU networks: ridge regression (penalty {PENALTY:g}) over the best step"
    return [
        Row("ReLU networks: loss over that of the best step", 1.0, *over_seeds_and_prompts(errors, checkpoint, own)),
        Row("ReLU networks: cosine of the sensitivities", 1.0, *over_seeds_and_prompts(cosines, checkpoint)),
        Row("ReLU networks: predicting 0 over the best step", None, (zero.mean() / own.mean()).item()),
        Row(name, None, (ridge.mean() / own.mean()).item()),
    ]


# ---- two softmax heads ----


@torch.no_grad()
def head_numbers(model: HookedTransformer) -> tuple[Tensor, Tensor, Tensor]:
    """Return each head's mean diagonal of scores on x, the RMS off the diagonal, and its output weight of y."""
    d = model.cfg.x_dim
    assert d is not None
    scores = (model.W_Q[0] @ model.W_K[0].mT).double()[:, :d, :d]
    mean = scores.diagonal(dim1=1, dim2=2).mean(1)
    rest = scores - torch.diag_embed(scores.diagonal(dim1=1, dim2=2))
    return mean, rest.square().sum((1, 2)).div(d * (d - 1)).sqrt(), (model.W_V[0] @ model.W_O[0]).double()[:, d, d]


def two_heads() -> list[Row]:
    """Signs and sizes of both heads, in seeds that are not stuck."""
    checkpoint = load_checkpoint("softmax-2h")
    kept = kept_seeds(checkpoint)
    part = checkpoint.select(kept)
    scores, rest, outputs = (torch.stack(each) for each in zip(*map(head_numbers, part.models), strict=True))
    n = len(kept)
    start = torch.stack([head_numbers(model)[2] for model in untrained(part).models])

    def smaller_over_larger(values: Tensor) -> Tensor:
        return values.abs().amin(1) / values.abs().amax(1)

    products = (scores[:, 0] - scores[:, 1]).abs() * outputs.abs().mean(1)

    def opposite(values: Tensor) -> str:
        return f"{int((values.prod(1) < 0).sum())} of {n} seeds"

    return [
        Row("two heads: scores with opposite signs", f"{n} of {n} seeds", opposite(scores), "seeds"),
        Row("two heads: outputs with opposite signs", f"{n} of {n} seeds", opposite(outputs), "seeds"),
        Row("two heads: smaller output over larger", 1.0, *over_seeds(smaller_over_larger(outputs), part)),
        Row("two heads: smaller score over larger", 1.0, *over_seeds(smaller_over_larger(scores), part)),
        Row("two heads: scores off the diagonal over the mean of the diagonal", 0.0,
            *over_seeds((rest / scores.abs()).mean(1), part)),
        Row("two heads: (κ₁ - κ₂) times the output, over its mean", None,
            *over_seeds(products / products.mean(), part)),
        Row("untrained two heads: smaller output over larger", None, *over_seeds(smaller_over_larger(start), part)),
    ]  # fmt: skip


if __name__ == "__main__":
    compare.run()
