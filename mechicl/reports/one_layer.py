"""The report on one layer of linear attention beside one step of gradient descent (von Oswald et al. 2023, Fig. 2)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mechicl import algorithms, viz
from mechicl.analysis import align, align_over_training
from mechicl.base.progress import progress_bar
from mechicl.checkpoints import Checkpoint
from mechicl.reports.algorithm import AlgorithmQuestion, causes_in_words
from mechicl.reports.comparison import Comparison, Part, Section, published
from mechicl.reports.engine import Kind
from mechicl.reports.one_layer_setting import N_FEWER, SOURCE, Setting, exact_optimum, layers_and_step
from mechicl.reports.one_layer_shifts import roll_outs, shifts
from mechicl.reports.one_layer_weights import paths, weights
from mechicl.reports.opened import heads_and_finetuning
from mechicl.reports.rows import Row
from mechicl.reports.study import Study
from mechicl.reports.verdict import NEAR, Verdict, percent
from mechicl.statistics import Interval, interval
from mechicl.tasks import LinearRegression
from mechicl.viz.page import table

N_HELD_OUT, PROMPT_SEED = 10_000, 1_000_003
N_ALIGNED = 4096  # prompts for derivatives
WORDS = {
    "learning": """
        Each seed's loss on held-out prompts, beside one step of gradient descent with the tuned step size.""",
    "alignment": """
        How close predictions and sensitivities (d prediction / d query, exact) come to those of gradient descent. Means
        over seeds with 95% intervals, at the saved snapshots.""",
    "attention": """
        Linear attention of the trained layer (first seed): scores, not probabilities; negative ones are red (with a
        negative β, a token's score with itself is negative). Every token attends to the context, none to the query.""",
}


def compare_one_layer(
    checkpoint: Checkpoint, *, n_prompts: int = 10_000, seed: int = 1_000_003, progress: bool = True
) -> Comparison:
    """Compare every seed's layer with tuned gradient descent in all ways of von Oswald et al. 2023, section 3.

    Args:
        checkpoint: of one layer of linear attention with one head, on paired prompts of linear regression.
        n_prompts: held-out prompts for each measurement.
        seed: of those prompts; the step size is tuned on others.
        progress: show a progress bar.

    Raises:
        CheckpointError: a checkpoint of another kind of model or task.
    """
    setting = layers_and_step(checkpoint, n_prompts, seed)
    comparison = Comparison(_title(checkpoint), _lead(setting), [], [], _data(setting))
    for measure in progress_bar(
        list(_parts(setting).values()), unit="section", progress=progress, desc=checkpoint.name
    ):
        comparison = comparison.with_more(*measure())
    return comparison


def one_layer_kind(study: Study, *, n_prompts: int | None = None, progress: bool = True) -> Kind:
    """The comparison of `compare_one_layer`, the nearest algorithms, what the head does and what fine-tuning does."""
    setting = layers_and_step(study, n_prompts or N_HELD_OUT, PROMPT_SEED)
    question = AlgorithmQuestion(study, progress)
    opened, on_request, missing = heads_and_finetuning(study, progress=progress)
    parts = _parts(setting) | {"algorithm": question.part, **opened}
    parts["provenance"] = lambda: ([], [_errata(setting), _provenance(study, setting)], {})

    def verdict(comparison: Comparison) -> Verdict:
        return question.verdict(comparison, _weights_in_words(setting), causes_in_words(comparison.rows))

    return Kind(_title(study), f"{_lead(setting)} {study.chosen}", parts, verdict, _data(setting), on_request, missing)


def _parts(setting: Setting) -> dict[str, Callable[[], Part]]:
    """What is compared, by name."""
    measurements = {"loss": _losses, "alignment": _alignment, "weights": weights, "paths": paths, "shifts": shifts,
                    "exact loss": _exact_loss, "roll-out": roll_outs, "attention": _attention}  # fmt: skip
    return {name: partial(measure, setting) for name, measure in measurements.items()}


def _title(checkpoint: Checkpoint) -> str:
    return f"One layer and one step of gradient descent ({checkpoint.name})"


def _lead(setting: Setting) -> str:
    task = setting.task
    return (
        f"{setting.checkpoint.name}: {len(setting.seeds)} seeds of one linear self-attention layer on {task.n_context} "
        f"points in {task.x_dim} dimensions, compared with one step of gradient descent on {len(setting.prompts):,} "
        f"held-out prompts (seed {setting.prompt_seed}; von Oswald et al. 2023). Losses are mean squared errors of the "
        f"query's prediction; the paper plots half of that. Intervals are 95%, over the held-out prompts or over the "
        f"training seeds."
    )


def _data(setting: Setting) -> dict[str, Any]:
    return {
        "checkpoint": setting.checkpoint.name,
        "command": setting.checkpoint.record.get("command"),
        "seeds": setting.seeds,
        "n_prompts": len(setting.prompts),
        "prompt_seed": setting.prompt_seed,
        "tuned_step_size": setting.step_size,
        "tuned_eta": setting.step_size * setting.task.n_context,
    }


def _weights_in_words(setting: Setting) -> str:
    """Whether the step of gradient descent nearest to the weights predicts what the opened seed predicts."""
    fit = setting.fit
    distance, ratio = fit.relative_distances(fit.projected)[0], fit.loss_ratios(fit.projected)[0]
    size = fit.projected.parameters["step_size"][0, 0].item()
    read = f"The step of gradient descent nearest to its weights (step size {size:.3g})"
    if distance.mean <= NEAR:
        return f"{read} leaves {percent(distance)} of its squared predictions: the weights agree."
    return (
        f"{read} leaves {percent(distance)} of its squared predictions and has {ratio.mean:.2g} times its loss: the "
        f"weights do not show gradient descent."
    )


def _losses(setting: Setting) -> Part:
    half = published("oswald2023_fig2")["half_mse_gd_and_trained"] if setting.standard else None
    rows = [
        Row("half-MSE, tuned gradient descent", half, interval(setting.gd_squared_errors / 2), "prompts",
            source=SOURCE),
        Row("half-MSE, trained, mean of the seeds", half, interval(setting.squared_errors.mean(0) / 2), "prompts",
            source=SOURCE),
        Row("loss, trained over tuned gradient descent", "1 (Fig. 2)" if setting.standard else None,
            setting.loss_ratio, "seeds", "on the same prompts", "= 1", SOURCE),
    ]  # fmt: skip
    curve = setting.checkpoint.record.get("curve")
    if curve is None or setting.with_other_task:
        return rows, [], {"learning_curve": None}
    drawn = viz.losses_over_training(
        curve["eval_step"], {"each seed": curve["eval_loss"]}, log_x=True,
        references={"gradient descent, tuned": _loss_on_curve_prompts(setting)},
    )  # fmt: skip
    return rows, [Section("Learning", WORDS["learning"], drawn)], {"learning_curve": curve}


def _loss_on_curve_prompts(setting: Setting) -> float:
    """Tuned gradient descent's MSE on the prompts that the learning curve was measured on."""
    training = setting.checkpoint.record["training"]
    if "eval_prompts" not in training or "eval_seed" not in training:
        return float(setting.gd_squared_errors.mean())
    prompts = setting.task.sample(training["eval_prompts"], seed=training["eval_seed"])
    trajectory = algorithms.gradient_descent(prompts, 1, step_size=setting.step_size, at="query")
    return float((trajectory.query()[0] - prompts.query.ys).square().mean())


def _alignment(setting: Setting) -> Part:
    alignments = [align(model, setting.construction, setting.prompts[:N_ALIGNED]) for model in setting.models]

    def over_seeds(name: str) -> Interval:
        return interval(torch.stack([getattr(alignment, name).mean() for alignment in alignments]))

    claim = "near 1 (Fig. 2)" if setting.standard else None
    rows = [
        Row(
            "sensitivity cosine, trained against gradient descent",
            claim,
            over_seeds("sensitivity_cosine"),
            "seeds",
            "",
            "near 1",
            SOURCE,
        ),
        Row("prediction distance, trained against gradient descent", None, over_seeds("prediction_distance"), "seeds"),
        Row(
            "sensitivity distance, trained against gradient descent", None, over_seeds("sensitivity_distance"), "seeds"
        ),
    ]
    if setting.checkpoint.snapshots is None or setting.with_other_task:
        return rows, [], {"alignment_over_training": None}
    during = align_over_training(setting.checkpoint, setting.construction, setting.prompts[:N_FEWER])
    names = ("sensitivity_cosine", "prediction_distance", "sensitivity_distance", "mse")
    data = {"steps": during.steps, **{name: getattr(during, name).tolist() for name in names}}
    drawn = viz.alignments_over_training({"trained": during})
    return (
        rows,
        [Section("Alignment over training", WORDS["alignment"], drawn)],
        {"alignment_over_training": data},
    )


def _exact_loss(setting: Setting) -> Part:
    """The trained loss without the sampling error of the prompts, which the ratio on common prompts does not have."""
    exact, ratio = exact_optimum(setting.task), setting.loss_ratio
    if exact is None:
        return [], [], {}
    scaled = Interval(ratio.mean * exact, ratio.low * exact, ratio.high * exact, ratio.n)
    nertinger = setting.task == LinearRegression(x_dim=5, n_context=20, inputs="gaussian")
    printed = published("nertinger_table1")["linear"][0] if nertinger else None
    note = f"loss ratio times the exact MSE of the best single step, {exact:.5f}"
    row = Row("MSE, trained, freed of the prompts' sampling error", printed, scaled, "seeds", note,
              source="nertinger2025", section="Learning")  # fmt: skip
    return [row], [], {}


def _attention(setting: Setting) -> Part:
    prompt = setting.task.sample(1, seed=setting.prompt_seed)
    drawn = viz.prompt_attention(setting.checkpoint.models[0], prompt)
    return [], [Section("Attention of one prompt", WORDS["attention"], drawn)], {}


def _errata(setting: Setting) -> Section:
    task, step_size = setting.task, setting.step_size
    half, exact = setting.gd_squared_errors.mean().item() / 2, exact_optimum(task)
    entries = [
        (
            "von Oswald et al., section 3",
            "η multiplies the mean gradient. The step size a of this package multiplies the sum: η = a n. "
            f"Tuned here: a = {step_size:.4f}, η = {step_size * task.n_context:.4f}.",
        ),
        (
            "Nertinger, section 2",
            "Preconditioned gradient descent is printed with a plus sign before the gradient; the sign is minus.",
        ),
    ]
    if task.inputs == "uniform":
        entries = [
            (
                "von Oswald et al., section 3, inputs",
                "The paper prints x ~ U(-1, 1); its figures are those of U(-1/2, 1/2), this package's default. On "
                "U(-1, 1) all losses and eigenvalues would be four times larger.",
            ),
            (
                "von Oswald et al., Fig. 2, loss",
                "The plotted loss 0.2 is half the mean squared error, though eq. 5 has no factor 1/2. Measured for "
                f"tuned gradient descent here: MSE {2 * half:.4f}, half of it {half:.4f}."
                + (f" Exact for the best step: {exact / 2:.5f}." if exact is not None else ""),
            ),
            *entries,
        ]
    return Section("Errata of the paper that touch this page", "", table(("where", "what"), entries))


def _provenance(checkpoint: Checkpoint, setting: Setting) -> Section:
    record, prompt_seed = checkpoint.record, setting.prompt_seed
    entries = [
        ("training", record.get("command", "")),
        ("seeds", ", ".join(map(str, setting.seeds))),
        ("trained for", f"{record.get('steps_done')} steps, {record.get('wall_time_s')} s on {record.get('hardware')}"),
        ("versions", ", ".join(f"{k} {v}" for k, v in record.get("versions", {}).items())),
        (
            "this page",
            f"mechicl report {checkpoint.name} --seed {setting.seeds[0]} --out DIR; prompts from seed {prompt_seed}",
        ),
        ("paper", "J. von Oswald et al., Transformers learn in-context by gradient descent, ICML 2023"),
    ]
    return Section("How it was made", "", table(("", ""), entries))
