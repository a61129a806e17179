"""The report on one-layer linear attention (von Oswald et al. 2023, Fig. 2)."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mechicl import algorithms, constructions, viz
from mechicl.analysis import OneLayerStudy, linear_attention_optimum, one_step_optimum, study_one_layer
from mechicl.analysis.weights.products import read_weight_products
from mechicl.checkpoints import Checkpoint, CheckpointError
from mechicl.files import write_bytes, write_json
from mechicl.report.comparison import HEADER, Comparison, Figure, Row, finite, published
from mechicl.report.finetuning import finetuning_comparison
from mechicl.report.opened import opened_comparison
from mechicl.statistics import Interval, interval
from mechicl.tasks import LinearRegression
from mechicl.viz.page import page, plot, section, table

_WORDS = {
    "table": """
        Losses are mean squared errors of the query's prediction; the paper plots half of that. Intervals are 95%, over
        the held-out prompts or over the training seeds.""",
    "learning": """
        Each seed's loss on held-out prompts, beside one step of gradient descent with the tuned step size.""",
    "alignment": """
        How close predictions and sensitivities (d prediction / d query, exact) come to those of gradient descent. Means
        over seeds with 95% intervals, at the saved snapshots.""",
    "weights": """
        The two products that linear attention depends on, for the first seed, with the free scale between them fixed,
        beside the construction of Proposition 1. Only the rows of W_KQ that read x and the columns of W_PV that write y
        can act on the prediction; the rest keeps its small random initial values.""",
    "interpolation": """
        Loss along the straight line from the trained weight products to the construction's. After the rescaling of
        appendix A.3, which divides by β, the mean diagonal of W_KQ, the line is flat. Without it the middle can be far
        worse than either end: β is not 1, and the initial weights decide its sign.""",
    "shifts": """
        Inputs or weights scaled by α, and the same on inputs from distributions that training never showed (Gaussian,
        exponential or Laplace, one at random for each prompt). All learners see the same prompts.""",
    "roll-out": """
        The one trained layer applied again and again, every update scaled by λ, beside gradient descent with the same
        damping. Entries that training never reached are set to zero for the dashed lines; left at their initial values,
        as in the dotted lines, they feed the prediction back into the scores, and some prompts diverge.""",
    "attention": """
        Linear attention of the trained layer (first seed): scores, not probabilities; negative ones are red (with a
        negative β, a token's score with itself is negative). Every token attends to the context, none to the query.""",
}


def write_one_layer_report(checkpoint: Checkpoint, out: Path, *, n_prompts: int, progress: bool) -> Path:
    """Study a checkpoint of one-layer linear attention and write `report.html` and `report.json`.

    Raises:
        CheckpointError: the checkpoint's model or record is of another kind.
    """
    started = time.perf_counter()
    task = _task(checkpoint)
    study = study_one_layer(checkpoint, task, n_prompts=n_prompts, progress=progress)
    opened = opened_comparison(Comparison("", "", table_rows(study, task)), checkpoint, progress=progress)
    opened = finetuning_comparison(opened, checkpoint, progress=progress)
    rows = [*opened.rows]
    out.mkdir(parents=True, exist_ok=True)
    data = {**report_data(checkpoint, task, study, rows), **finite(opened.data)}
    data["seconds"] = round(time.perf_counter() - started, 1)
    write_json(out / "report.json", data)
    write_bytes(out / "report.html", _html(checkpoint, task, study, rows, opened.figures).encode())
    return out / "report.html"


def _task(checkpoint: Checkpoint) -> LinearRegression:
    cfg, task = checkpoint.models[0].cfg, checkpoint.task
    if "curve" not in checkpoint.record or cfg.prompt_format != "paired":
        raise CheckpointError(
            f"a report needs a learning curve in the record and paired prompts; {checkpoint.name} has "
            f"{'a' if 'curve' in checkpoint.record else 'no'} curve and {cfg.prompt_format} prompts"
        )
    if not isinstance(task, LinearRegression) or (cfg.n_layers, cfg.n_heads, cfg.attention) != (1, 1, "linear"):
        raise CheckpointError(
            f"there is a report for linear attention with one layer and one head on linear regression; "
            f"{checkpoint.name} has {cfg.n_layers} layers, {cfg.n_heads} {cfg.attention} heads, {type(task).__name__}"
        )
    return task


def table_rows(study: OneLayerStudy, task: LinearRegression) -> list[Row]:
    """The table of the report."""
    standard = task == LinearRegression()
    half = published("000_one_step")["half_mse_gd_and_trained"] if standard else None
    eta = interval(study.fit.projected.parameters["step_size"][:, 0] * task.n_context)
    cosine = "near 1 (Fig. 2)" if standard else None
    rows = [
        Row("half-MSE, tuned gradient descent", half, interval(study.gd_squared_errors / 2), "prompts"),
        Row("half-MSE, trained, mean of the seeds", half, interval(study.squared_errors.mean(0) / 2), "prompts"),
        Row("loss, trained over tuned gradient descent", "1 (Fig. 2)" if standard else None, study.loss_ratio(),
            "seeds", "on the same prompts"),
        Row("sensitivity cosine, trained against gradient descent", cosine, study.sensitivity_cosine(), "seeds"),
        Row("prediction distance, trained against gradient descent", None,
            interval(torch.stack([a.prediction_distance.mean() for a in study.alignments])), "seeds"),
        Row("sensitivity distance", None,
            interval(torch.stack([a.sensitivity_distance.mean() for a in study.alignments])), "seeds"),
        Row("η read from the weights", None, eta, "seeds", f"tuned: {study.step_size * task.n_context:.4f}"),
        Row("η read from the weights over tuned η", None, study.step_size_ratio(), "seeds"),
        Row("excess loss at the middle of the rescaled path", "none (Fig. 2)" if standard else None,
            study.midpoint_excess(), "seeds", "relative to the ends"),
        Row("the same without rescaling", None, study.midpoint_excess(rescaled=False), "seeds"),
        Row("largest |trained / gradient descent - 1| for input scales 0.5 to 2", None,
            interval(study.worst_shift("input scale")), "seeds"),
    ]  # fmt: skip
    exact = exact_optimum(task)
    if exact is not None:
        ratio = study.loss_ratio()
        scaled = Interval(ratio.mean * exact, ratio.low * exact, ratio.high * exact, ratio.n)
        printed = published("004_table1_in_context_loss")
        nertinger = task == LinearRegression(x_dim=5, n_context=20, inputs="gaussian")
        rows.append(
            Row("MSE, trained, freed of the prompts' sampling error", printed["linear"][0] if nertinger else None,
                scaled, "seeds", f"loss ratio times the exact MSE of the best single step, {exact:.5f}")
        )  # fmt: skip
    return rows


def exact_optimum(task: LinearRegression) -> float | None:
    """The exact MSE of the best single step on a task, where there is a closed form."""
    if task.inputs == "gaussian" and task.y_dim == 1 and task.weight_scale == 1 and task.input_scale == 1:
        plain = task.covariance is None and task.condition_number is None and task.eigenvalues is None
        if plain and not task.noise_std and not task.n_distractors and task.active_dims is None:
            return linear_attention_optimum([1.0] * task.x_dim, task.n_context)
    try:
        return one_step_optimum(task).mse
    except ValueError:
        return None


def report_data(
    checkpoint: Checkpoint, task: LinearRegression, study: OneLayerStudy, rows: list[Row]
) -> dict[str, Any]:
    """Every number of the report, as JSON data; numbers that are not finite are null."""
    over_training = study.over_training
    data = {
        "checkpoint": checkpoint.name,
        "command": checkpoint.record.get("command"),
        "seeds": study.seeds,
        "n_prompts": study.n_prompts,
        "prompt_seed": study.prompt_seed,
        "tuned_step_size": study.step_size,
        "tuned_eta": study.step_size * task.n_context,
        "table": [asdict(row) for row in rows],
        "learning_curve": checkpoint.record.get("curve"),
        "alignment_over_training": None
        if over_training is None
        else {
            "steps": over_training.steps,
            "sensitivity_cosine": over_training.sensitivity_cosine.tolist(),
            "prediction_distance": over_training.prediction_distance.tolist(),
            "sensitivity_distance": over_training.sensitivity_distance.tolist(),
            "mse": over_training.mse.tolist(),
        },
        "weights": [
            {
                "beta": beta.tolist(),
                "step_size": step_size.tolist(),
                "distance_KQ": distance_KQ.tolist(),
                "distance_PV": distance_PV.tolist(),
                "W_KQ": products.W_KQ.tolist(),
                "W_PV": products.W_PV.tolist(),
            }
            for beta, step_size, distance_KQ, distance_PV, products in zip(
                study.fit.beta,
                study.fit.projected.parameters["step_size"],
                study.fit.distance_KQ,
                study.fit.distance_PV,
                [read_weight_products(model).gauge_fixed() for model in checkpoint.models],
                strict=True,
            )
        ],
        "interpolation": [
            {
                "kind": path.kind,
                "alpha": path.alphas.tolist(),
                "mse": path.squared_errors.mean(-1).tolist(),
                "midpoint_excess": asdict(path.midpoint_excess()),
                "barrier": asdict(path.barrier()),
            }
            for path in (*study.paths, *study.raw_paths)
        ],
        "out_of_distribution": {
            name: {"learners": s.learners, "scales": s.scales.tolist(), "mse": s.mean().tolist()}
            for name, s in study.shifts.items()
        },
        "roll_outs": [
            {
                "damping": r.damping,
                "trained": r.trained.tolist(),
                "whole_layer": r.whole_layer.tolist(),
                "gradient_descent": r.gradient_descent.tolist(),
            }
            for r in study.roll_outs
        ],
    }
    return finite(data)


def _html(
    checkpoint: Checkpoint, task: LinearRegression, study: OneLayerStudy, rows: list[Row], opened: Sequence[Figure]
) -> str:
    record = checkpoint.record
    construction = constructions.gradient_descent(
        x_dim=task.x_dim, y_dim=task.y_dim, n_context=task.n_context, step_size=study.step_size
    )
    names = [f"x{i + 1}" for i in range(task.x_dim)] + [f"y{i + 1}" for i in range(task.y_dim)]
    words = {title: " ".join(paragraph.split()) for title, paragraph in _WORDS.items()}
    sections = [
        section(
            "Published and measured",
            words["table"],
            table(HEADER, [row.cells() for row in rows]),
        ),
        section(
            "Learning",
            words["learning"],
            plot(viz.learning_curves(record["curve"], list(study.seeds), _curve_reference(checkpoint, task, study))),
        ),
    ]
    if study.over_training is not None:
        figure = plot(viz.alignment_over_training(study.over_training))
        sections.append(section("Alignment over training", words["alignment"], figure))
    betas = ", ".join(f"{beta:.3f}" for beta in study.fit.beta.flatten().tolist())
    trained = read_weight_products(checkpoint.models[0]).gauge_fixed()
    attention = viz.prompt_attention(checkpoint.models[0], task.sample(1, seed=study.prompt_seed))
    sections += [
        section(
            "Weights",
            words["weights"],
            plot(viz.weight_products_figure(trained, read_weight_products(construction), names)),
        ),
        section(
            "Interpolation",
            f"{words['interpolation']} β of the seeds: {betas}.",
            plot(viz.interpolation_paths(study.paths, study.raw_paths)),
        ),
        section("Out of distribution", words["shifts"], plot(viz.shifted_losses(study.shifts))),
        section("Roll-out", words["roll-out"], plot(viz.roll_outs(study.roll_outs))),
        section("Attention of one prompt", words["attention"], attention),
        *(section(figure.title, figure.words, plot(figure.figure)) for figure in opened),
        section("Errata of the paper that touch this page", "", _errata(task, study)),
        section("How it was made", "", _provenance(checkpoint, study)),
    ]
    lead = (
        f"{len(study.seeds)} seeds of one linear self-attention layer on {task.n_context} points in {task.x_dim} "
        f"dimensions, compared with one step of gradient descent on {study.n_prompts:,} held-out prompts "
        f"(von Oswald et al. 2023)."
    )
    return page(f"mechicl report: {checkpoint.name}", lead, sections)


def _curve_reference(checkpoint: Checkpoint, task: LinearRegression, study: OneLayerStudy) -> float:
    """Tuned gradient descent's MSE on the prompts that the learning curve was measured on."""
    training = checkpoint.record["training"]
    if "eval_prompts" not in training or "eval_seed" not in training:
        return float(study.gd_squared_errors.mean())
    prompts = task.sample(training["eval_prompts"], seed=training["eval_seed"])
    trajectory = algorithms.gradient_descent(prompts, 1, step_size=study.step_size, at="query")
    return float((trajectory.query()[0] - prompts.query.ys).square().mean())


def _errata(task: LinearRegression, study: OneLayerStudy) -> str:
    mse = study.gd_squared_errors.mean()
    exact = exact_optimum(task)
    entries = [
        (
            "von Oswald et al., section 3",
            "η multiplies the mean gradient. The step size a of this package multiplies the sum: η = a n. "
            f"Tuned here: a = {study.step_size:.4f}, η = {study.step_size * task.n_context:.4f}.",
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
                f"tuned gradient descent here: MSE {mse:.4f}, half of it {mse / 2:.4f}."
                + (f" Exact for the best step: {exact / 2:.5f}." if exact is not None else ""),
            ),
            *entries,
        ]
    return table(("where", "what"), entries)


def _provenance(checkpoint: Checkpoint, study: OneLayerStudy) -> str:
    record = checkpoint.record
    entries = [
        ("training", record.get("command", "")),
        ("seeds", ", ".join(map(str, study.seeds))),
        ("trained for", f"{record.get('steps_done')} steps, {record.get('wall_time_s')} s on {record.get('hardware')}"),
        ("versions", ", ".join(f"{k} {v}" for k, v in record.get("versions", {}).items())),
        ("this page", f"mechicl report {checkpoint.name} --out DIR; prompts from seed {study.prompt_seed}"),
        ("paper", "J. von Oswald et al., Transformers learn in-context by gradient descent, ICML 2023"),
    ]
    return table(("", ""), entries)
