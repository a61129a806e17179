"""Best in-context loss of six activations and PGD on nine kinds of prompts (Nertinger, Table 1 and Fig. 1).

`make table` trains what is missing, one activation at a time, all of its models at once; then"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from analyses.support.resamples import over_resamples, resampled_means
from analyses.support.script import Option, script
from analyses.support.seeds import in_float64, kept_seeds, query_errors
from mechicl import algorithms, constructions, viz
from mechicl.analysis import align, align_over_training
from mechicl.analysis.dynamics import AlignmentOverTraining
from mechicl.analysis.weights import linear_attention_optimum
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.learners import AlgorithmLearner, Learner, squared_errors
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row, Section, published
from mechicl.reports.rows import seeds_and_prompts
from mechicl.statistics import Interval, crossed_interval, ratio_interval
from mechicl.tasks import LinearRegression

ROWS = ("linear", "leaky-relu-0.75", "leaky-relu-0.5", "leaky-relu-0.25", "relu", "softmax")
HELD_STEPS, HELD_EVERY = 1500, 20
"""Training of softmax heads with a fixed output scale, and how often they are aligned."""


class Setting:
    """One column of the table: prompts, and the learners that need no training.

    Every loss is the mean over prompts relative to the best linear layer's on the same prompts, times that layer's
    exact loss: prompts whose targets happen to be large weigh on both alike.
    """

    def __init__(self, task: LinearRegression, args: Any):
        assert task.condition_number is not None
        self.task = task
        self.prompts = task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
        self.eigenvalues = task.condition_number ** torch.linspace(0, 1, task.x_dim, dtype=torch.float64)
        self.basis = task.shared_basis()
        covariance = self.basis.T @ self.eigenvalues.diag() @ self.basis
        self.noise_variance = task.noise_std**2
        exactly = self.eigenvalues.tolist(), task.n_context, self.noise_variance
        self.exact, (_, self.exact_pgd) = linear_attention_optimum(*exactly), best_preconditioned_step(*exactly)
        optimum = constructions.linear_optimum(
            covariance=covariance, n_context=task.n_context, noise_variance=self.noise_variance
        )
        self.optimum_errors = squared_errors(optimum, self.prompts)[:, 0]
        self.pgd = tuned_pgd(covariance, task.sample(10_000, seed=args.seed + 1, dtype=torch.float64))

    @property
    def name(self) -> str:
        return f"κ = {self.task.condition_number:g}, ν² = {self.noise_variance:.1f}"

    def loss(self, learner: Learner) -> Interval:
        return self.scaled(squared_errors(learner, self.prompts)[:, 0])

    def scaled(self, errors: Float[Tensor, "prompt"]) -> Interval:
        """The loss that squared errors on the held-out prompts come to."""
        ratio = ratio_interval(errors, self.optimum_errors)
        return Interval(ratio.mean * self.exact, ratio.low * self.exact, ratio.high * self.exact, ratio.n)


def best_preconditioned_step(eigenvalues: list[float], n_context: int, noise_variance: float) -> tuple[float, float]:
    """η and the loss of the best step from 0 with preconditioner `η Σ⁻¹`; section 4.1 finds η by a search.

    The loss is `t (1 - 2η + η² (n + d + 1) / n) + η² ν² d / n`, with the trace t of Σ in d dimensions.
    """
    total, d, n = sum(eigenvalues), len(eigenvalues), n_context
    eta = total / (total * (n + d + 1) / n + noise_variance * d / n)
    return eta, total * (1 - eta)


def tuned_pgd(covariance: Tensor, prompts: Prompts) -> AlgorithmLearner:
    """One step from 0 with preconditioner η Σ⁻¹; η has the least loss on some prompts (a least-squares fit)."""
    inverse = torch.linalg.inv(covariance)
    step = AlgorithmLearner(algorithms.preconditioned_gd, {"preconditioner": inverse})
    predictions = step.predict(prompts)
    eta = (predictions * prompts.query.ys).sum() / predictions.square().sum()
    return AlgorithmLearner(algorithms.preconditioned_gd, {"preconditioner": eta * inverse})


@script(
    checkpoints=tuple(f"nertinger-{row}" for row in ROWS),
    n_prompts=Option(30_000, "held-out prompts for each setting"),
    n_aligned=Option(256, "held-out prompts that models are aligned on at each snapshot"),
    seed=Option(1_000_003, "seed of the held-out prompts; the step size of PGD is tuned on 10,000 others"),
    quiet=False,
)
def compare(args: Any) -> Comparison:
    """Measure every cell, and align the noiseless columns' models with PGD over training."""
    table = published("nertinger_table1")
    parts = {}
    for checkpoint in map(load_checkpoint, args.checkpoints):
        cfg = checkpoint.models[0].cfg
        name = f"leaky_relu_{cfg.attention_slope:g}" if cfg.attention == "leaky_relu" else cfg.attention
        parts[name] = checkpoint.by_task()
    tasks = [part.task for part in next(iter(parts.values()))]
    settings = [Setting(task, args) for task in tasks if isinstance(task, LinearRegression)]
    rows: list[Row] = []
    for i, setting in enumerate(settings):
        rows.append(Row(f"closed form (Theorem 2), {setting.name}", None, setting.exact, "exact"))
        note = f"exactly {setting.exact_pgd:.5g}, {setting.exact_pgd / table['PGD'][i]:.3f} of the printed"
        rows.append(Row(f"PGD, {setting.name}", table["PGD"][i], setting.loss(setting.pgd), "prompts", note))
    over_training: dict[str, dict[str, AlignmentOverTraining]] = {}
    stages = tqdm(total=len(parts) * len(settings), desc="table", disable=args.quiet)
    for name, parts_by_task in parts.items():
        for i, (setting, part) in enumerate(zip(settings, parts_by_task, strict=True)):
            rows.append(_cell(name, setting, part, table.get(name, [None] * len(settings))[i]))
            if part.snapshots is not None and not setting.noise_variance:
                kept = part.select(kept_seeds(part))
                alignment = align_over_training(kept, setting.pgd, setting.prompts[: args.n_aligned])
                over_training.setdefault(setting.name, {})[name] = alignment
                rows += _aligned_rows(name, setting, kept, args.n_aligned)
            stages.update()
    stages.close()
    fixed = fixed_head_over_training(settings[0])
    highest = int(fixed.mean((1, 2)).argmax())
    over = seeds_and_prompts(*fixed.shape[1:])
    rows += [
        Row("softmax fixed at 1/n, κ = 1: highest cosine during training", None, crossed_interval(fixed[highest]), over,
            f"step {highest * HELD_EVERY}"),
        Row("softmax fixed at 1/n, κ = 1: cosine after training", None, crossed_interval(fixed[-1]), over,
            f"step {HELD_STEPS}"),
    ]  # fmt: skip
    rows += _relu_rows(settings[0]) + [row for setting in settings[::3] for row in _softmax_rows(setting)]
    words = "Cosine of sensitivities and distance of predictions, mean over seeds not stuck with 95% bands (Fig. 1)."
    figures = [Section(f"Against PGD during training, {name}", words, viz.alignments_over_training(alignment))
               for name, alignment in over_training.items()]  # fmt: skip
    plain = {name: {row: _plain(each) for row, each in by_row.items()} for name, by_row in over_training.items()}
    lead = (
        f"One layer of attention on 20 points in 5 dimensions, x ~ N(0, Σ), eigenvalues κ^(i/4), w ~ N(0, I), noise of "
        f"variance ν² on the context's targets, measured against the clean query target on {args.n_prompts:,} "
        f"prompts (seed {args.seed}). Losses are relative to the best linear layer's on the same prompts, times its "
        f"exact loss. "
        f"As in the paper the best seed counts, with an interval over prompts; notes say what all seeds reach, and "
        f"those that are not stuck (held-out loss more than 10% above the best one's)."
    )
    return Comparison("Activations and conditioning (Table 1, Fig. 1)", lead, rows, figures, {"over_training": plain})


def _cell(name: str, setting: Setting, part: Checkpoint, printed: float | None) -> Row:
    """A cell of the table, the best seed's loss as in the paper."""
    errors = query_errors(in_float64(part.models), setting.prompts)
    losses = errors.mean(1) * setting.exact / setting.optimum_errors.mean()
    best = setting.scaled(errors[int(losses.argmin())])
    notes = []
    if name == "linear":
        notes.append(f"{best.mean / setting.exact:.4f} of the closed form")
    if printed is not None:
        notes.append(f"{best.mean / printed:.3f} of the printed")
    optimum = resampled_means(setting.optimum_errors)[:, None]
    resampled = resampled_means(errors) * setting.exact / optimum
    median, _, without = over_resamples(resampled, part, len(setting.prompts))
    notes.append(f"median over seeds {median}")
    over = f"prompts, best of {len(losses)} seeds"
    return Row(f"{name}, {setting.name}", printed, best, over, "; ".join(filter(None, [*notes, without])))


def _aligned_rows(name: str, setting: Setting, kept: Checkpoint, n_prompts: int) -> list[Row]:
    """Alignment with PGD after training, of the seeds outside local minima."""
    prompts, over = setting.prompts[:n_prompts], seeds_and_prompts(len(kept.models), n_prompts)
    found = [align(model, setting.pgd, prompts) for model in in_float64(kept.models)]
    return [
        Row(f"{measure} with PGD after training, {name}, {setting.name}", None,
            crossed_interval(torch.stack([getattr(each, measure) for each in found])), over)
        for measure in ("sensitivity_cosine", "prediction_distance")
    ]  # fmt: skip


def _relu_rows(setting: Setting) -> list[Row]:
    """Erratum 6: Theorem 4's weights with the sign that it prints, and with the other."""
    d, n = setting.task.x_dim, setting.task.n_context
    right = constructions.relu_optimum(x_dim=d, n_context=n)
    wrong = copy.deepcopy(right)
    with torch.no_grad():
        wrong.blocks[0].attn.W_O.neg_()
    models = {"as printed": wrong, "with Q₀ negative": right}
    return [Row(f"ReLU, Theorem 4 {words}", "optimal", setting.loss(each), "prompts") for words, each in models.items()]


def _softmax_rows(setting: Setting) -> list[Row]:
    """Return the least loss of a softmax head whose output has a fixed scale and whose scores are free."""
    n = setting.task.n_context
    rows = []
    for factor, words in ((1 / n, "fixed at 1/n, as in eq. 1 with P = 1"), (1.0, "fixed at 1")):
        loss = least_softmax_loss(setting, factor)
        quantity = f"softmax, κ = {setting.task.condition_number:g}: least loss with its output {words}"
        rows.append(Row(quantity, None, loss, f"{len(setting.prompts)} prompts"))
    return rows


def least_softmax_loss(setting: Setting, factor: float) -> float:
    """Least loss of `factor * Σ_i softmax(x_q A x_i) y_i` over scores that are diagonal in the eigenbasis of Σ.

    Relative to predicting 0 on the same prompts, times that one's exact loss: most of these are nearer to it than to
    the best linear layer.
    """
    prompts, to_eigenbasis = setting.prompts, setting.basis.T
    products = (prompts.context.xs @ to_eigenbasis) * (prompts.query.xs @ to_eigenbasis)[:, None]

    def loss(scale: Tensor) -> Tensor:
        pattern = (products @ scale).softmax(1)
        return (factor * (pattern[..., None] * prompts.context.ys).sum(1) - prompts.query.ys).square().mean()

    best = min(_minimum(loss, start / setting.eigenvalues) for start in (0.3, 3.0))
    return best * (setting.eigenvalues.sum() / prompts.query.ys.square().mean()).item()


def fixed_head_over_training(setting: Setting, n_prompts: int = 256) -> Float[Tensor, "step seed prompt"]:
    """Cosine of sensitivities with one step of PGD, while softmax heads with a fixed output scale of 1/n are trained.

    The head of `least_softmax_loss` with any scores, `x_i A x_q`: Adam with rate 0.01 on 512 new prompts a step.
    """
    task, seeds = setting.task, 5
    scores = 0.2 * torch.randn(seeds, task.x_dim, task.x_dim, generator=torch.Generator().manual_seed(0))
    scores = scores.double().requires_grad_()
    optimizer = torch.optim.Adam([scores], lr=0.01)
    held_out = setting.prompts[:n_prompts]
    covariance = setting.basis.T @ setting.eigenvalues.diag() @ setting.basis
    expected = (held_out.context.xs * held_out.context.ys).sum(1) @ torch.linalg.inv(covariance)  # up to its scale
    cosines = []
    for step in range(HELD_STEPS + 1):
        if step % HELD_EVERY == 0:
            with torch.no_grad():
                cosines.append(torch.cosine_similarity(_fixed_head(scores, held_out)[1], expected, dim=-1))
        prompts = task.sample(512, seed=10_000_000 + step, dtype=torch.float64)
        optimizer.zero_grad()
        (_fixed_head(scores, prompts)[0] - prompts.query.ys[:, 0]).square().mean((1,)).sum().backward()
        optimizer.step()
    return torch.stack(cosines)


def _fixed_head(
    scores: Float[Tensor, "seed d d"], prompts: Prompts
) -> tuple[Float[Tensor, "seed prompt"], Float[Tensor, "seed prompt d"]]:
    """Return predictions of heads with output scale 1/n, and their gradients with respect to the query's x."""
    xs, ys, query = prompts.context.xs, prompts.context.ys[..., 0], prompts.query.xs
    read = torch.einsum("pnd,sde->spne", xs, scores)
    pattern = torch.einsum("spne,pe->spn", read, query).softmax(-1)
    mean = (pattern * ys).sum(-1)
    gradient = torch.einsum("spn,spne->spe", pattern * (ys - mean[..., None]), read)
    return mean / xs.shape[1], gradient / xs.shape[1]


def _minimum(loss: Callable[[Tensor], Tensor], start: Tensor) -> float:
    at = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([at], max_iter=60, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss(at)
        value.backward()
        return value

    optimizer.step(step)  # type: ignore[arg-type]
    return loss(at).item()


def _plain(alignment: AlignmentOverTraining) -> dict[str, object]:
    return {"steps": alignment.steps, "prediction_distance": alignment.prediction_distance.tolist(),
            "sensitivity_cosine": alignment.sensitivity_cosine.tolist()}  # fmt: skip


@compare.derive
def derived_rows(comparison: Comparison) -> list[Row]:
    """Return the highest cosine of softmax with PGD during training, mean over the seeds outside local minima."""
    during = comparison.data["over_training"]["κ = 1, ν² = 0.0"]["softmax"]["sensitivity_cosine"]
    return [Row("highest cosine during training", None, torch.tensor(during).mean(1).max().item())]


if __name__ == "__main__":
    compare.run()
