"""The report on one layer of linear attention beside one step of gradient descent (von Oswald et al. 2023, Fig. 2)."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl import algorithms, constructions, viz
from mechicl.analysis import align, align_over_training, fit_construction, interpolate, measure_shifted_losses
from mechicl.analysis.behaviour import FOREIGN_INPUTS, ShiftedLosses
from mechicl.analysis.layers.layer_learners import Lens
from mechicl.analysis.weights import linear_attention_optimum, one_step_optimum
from mechicl.analysis.weights.paths import PathKind
from mechicl.analysis.weights.products import read_weight_products, replace_products
from mechicl.analysis.weights.rollout import repeat_layers
from mechicl.checkpoints import Checkpoint, CheckpointError
from mechicl.learners import squared_errors
from mechicl.models import HookedTransformer
from mechicl.progress import progress_bar
from mechicl.prompts import Prompts
from mechicl.reports.comparison import Comparison, Row, Section, published
from mechicl.reports.finetuning import add_finetuning
from mechicl.reports.model_parts import add_model_parts
from mechicl.statistics import Interval, interval
from mechicl.tasks import LinearRegression
from mechicl.viz.page import table

Part = tuple[list[Row], list[Section], dict[str, Any]]  # rows, sections and numbers of a comparison
N_TUNING = 100_000  # prompts that the step size is tuned on
N_FEWER = 2000  # prompts for what is measured again and again: at every snapshot, after every repeat
SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
DAMPINGS, REPEATS = (0.5, 0.75, 1.0), 50
WORDS = {
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


@dataclass(frozen=True, eq=False)
class Setting:
    """Trained layers, the tuned step of gradient descent that they are compared with, and held-out prompts.

    `models` are the layers as their weight products alone, in float64, one a seed; `construction` is gradient descent
    with the tuned `step_size` as a layer (the paper's η is n_context times as much).
    """

    checkpoint: Checkpoint
    task: LinearRegression
    models: list[HookedTransformer]
    seeds: tuple[int, ...]
    step_size: float
    construction: HookedTransformer
    prompts: Prompts
    prompt_seed: int
    squared_errors: Float[Tensor, "seed prompt"]
    gd_squared_errors: Float[Tensor, "prompt"]

    @property
    def standard(self) -> bool:
        """Whether the task is the one of the paper's figures."""
        return self.task == LinearRegression()

    @property
    def loss_ratio(self) -> Interval:
        """Loss over gradient descent's, over seeds."""
        return interval(self.squared_errors.mean(-1) / self.gd_squared_errors.mean())


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
    setting = _setting(checkpoint, n_prompts, seed)
    task = setting.task
    lead = (
        f"{checkpoint.name}: {len(setting.seeds)} seeds of one linear self-attention layer on {task.n_context} points "
        f"in {task.x_dim} dimensions, compared with one step of gradient descent on {n_prompts:,} held-out prompts "
        f"(seed {seed}; von Oswald et al. 2023). Losses are mean squared errors of the query's prediction; the paper "
        f"plots half of that. Intervals are 95%, over the held-out prompts or over the training seeds."
    )
    data = {
        "checkpoint": checkpoint.name,
        "command": checkpoint.record.get("command"),
        "seeds": setting.seeds,
        "n_prompts": n_prompts,
        "prompt_seed": seed,
        "tuned_step_size": setting.step_size,
        "tuned_eta": setting.step_size * task.n_context,
    }
    comparison = Comparison(f"One layer and one step of gradient descent ({checkpoint.name})", lead, [], [], data)
    measurements = (_losses, _alignment, _weights, _paths, _shifts, _exact_loss, _roll_outs, _attention)
    for measure in progress_bar(measurements, unit="analysis", progress=progress, desc=checkpoint.name):
        comparison = comparison.with_more(*measure(setting))
    return comparison


def write_one_layer_report(checkpoint: Checkpoint, out: Path, *, n_prompts: int, progress: bool) -> Path:
    """`compare_one_layer`, what the head does and what fine-tuning does, as `report.html` and `report.json`."""
    comparison = compare_one_layer(checkpoint, n_prompts=n_prompts, progress=progress)
    comparison = add_model_parts(comparison, checkpoint, progress=progress)
    comparison = add_finetuning(comparison, checkpoint, progress=progress)
    assert isinstance(checkpoint.task, LinearRegression)
    last = [_errata(checkpoint.task, comparison), _provenance(checkpoint, comparison)]
    return comparison.with_more(sections=last).write(out, "report")


def _setting(checkpoint: Checkpoint, n_prompts: int, seed: int) -> Setting:
    cfg, task = checkpoint.models[0].cfg, checkpoint.task
    one = (cfg.n_layers, cfg.n_heads, cfg.attention, cfg.prompt_format) == (1, 1, "linear", "paired")
    if not one or not isinstance(task, LinearRegression):
        raise CheckpointError(
            f"this comparison is for linear attention with one layer and one head on paired prompts of "
            f"LinearRegression; {checkpoint.name} has {cfg.n_layers} layers, {cfg.n_heads} {cfg.attention} heads, "
            f"{cfg.prompt_format} prompts of {type(task).__name__}"
        )
    models = [replace_products(model, read_weight_products(model)) for model in checkpoint.models]
    prompts = task.sample(n_prompts, seed=seed, dtype=torch.float64)
    step_size = algorithms.tuned_step_size(task.sample(N_TUNING, seed=seed + 1))
    construction = constructions.gradient_descent(
        x_dim=task.x_dim, y_dim=task.y_dim, n_context=task.n_context, step_size=step_size
    )
    return Setting(
        checkpoint, task, models, tuple(checkpoint.record.get("seeds", range(len(models)))), step_size, construction,
        prompts, seed, torch.stack([squared_errors(model, prompts)[:, 0] for model in models]),
        squared_errors(construction, prompts)[:, 0],
    )  # fmt: skip


def _losses(setting: Setting) -> Part:
    half = published("oswald2023_fig2")["half_mse_gd_and_trained"] if setting.standard else None
    rows = [
        Row("half-MSE, tuned gradient descent", half, interval(setting.gd_squared_errors / 2), "prompts"),
        Row("half-MSE, trained, mean of the seeds", half, interval(setting.squared_errors.mean(0) / 2), "prompts"),
        Row("loss, trained over tuned gradient descent", "1 (Fig. 2)" if setting.standard else None,
            setting.loss_ratio, "seeds", "on the same prompts"),
    ]  # fmt: skip
    curve = setting.checkpoint.record.get("curve")
    if curve is None:
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
    alignments = [align(model, setting.construction, setting.prompts) for model in setting.models]

    def over_seeds(name: str) -> Interval:
        return interval(torch.stack([getattr(alignment, name).mean() for alignment in alignments]))

    claim = "near 1 (Fig. 2)" if setting.standard else None
    rows = [
        Row("sensitivity cosine, trained against gradient descent", claim, over_seeds("sensitivity_cosine"), "seeds"),
        Row("prediction distance, trained against gradient descent", None, over_seeds("prediction_distance"), "seeds"),
        Row("sensitivity distance", None, over_seeds("sensitivity_distance"), "seeds"),
    ]
    if setting.checkpoint.snapshots is None:
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


def _weights(setting: Setting) -> Part:
    task, fit = setting.task, fit_construction(setting.models, "gd", setting.task, refine=False)
    step_sizes = fit.projected.parameters["step_size"]
    eta, tuned = interval(step_sizes[:, 0] * task.n_context), f"tuned: {setting.step_size * task.n_context:.4f}"
    rows = [
        Row("η read from the weights", None, eta, "seeds", tuned),
        Row("η read from the weights over tuned η", None, interval(step_sizes[:, 0] / setting.step_size), "seeds"),
    ]
    products = [read_weight_products(model).gauge_fixed() for model in setting.checkpoint.models]
    names = [f"x{i + 1}" for i in range(task.x_dim)] + [f"y{i + 1}" for i in range(task.y_dim)]
    drawn = viz.weight_products_figure(products[0], read_weight_products(setting.construction), names)
    tensors = {
        "beta": fit.beta,
        "step_size": step_sizes,
        "distance_KQ": fit.distance_KQ,
        "distance_PV": fit.distance_PV,
    }
    data = [
        {name: values[i].tolist() for name, values in tensors.items()}
        | {"W_KQ": product.W_KQ.tolist(), "W_PV": product.W_PV.tolist()}
        for i, product in enumerate(products)
    ]
    return rows, [Section("Weights", WORDS["weights"], drawn)], {"weights": data}


def _paths(setting: Setting) -> Part:
    kinds: dict[str, PathKind] = {"rescaled": "rescaled", "not rescaled": "raw"}
    paths = {
        name: [interpolate(model, setting.construction, setting.prompts, kind=kind) for model in setting.models]
        for name, kind in kinds.items()
    }
    excess = {name: interval(torch.tensor([p.midpoint_excess().mean for p in each])) for name, each in paths.items()}
    claim = "none (Fig. 2)" if setting.standard else None
    rows = [
        Row("excess loss at the middle of the rescaled path", claim, excess["rescaled"], "seeds",
            "relative to the ends"),
        Row("the same without rescaling", None, excess["not rescaled"], "seeds"),
    ]  # fmt: skip
    betas = ", ".join(f"{read_weight_products(model).gauge().item():.3f}" for model in setting.models)
    words = f"{WORDS['interpolation']} β of the seeds: {betas}."
    data = [
        {
            "kind": path.kind,
            "alpha": list(path.alphas),
            "mse": path.squared_errors.mean(-1).tolist(),
            "midpoint_excess": asdict(path.midpoint_excess()),
            "barrier": asdict(path.barrier()),
        }
        for each in paths.values()
        for path in each
    ]
    return rows, [Section("Interpolation", words, viz.connectivity_paths(paths))], {"interpolation": data}


def _shifts(setting: Setting) -> Part:
    task = setting.task
    foreign = task.replace(
        inputs=FOREIGN_INPUTS, input_scale=1.0, covariance=None, condition_number=None, eigenvalues=None,
        eigenbasis="axes",
    )  # fmt: skip
    learners = {"gradient descent": setting.construction}
    for seed, model in zip(setting.seeds, setting.models, strict=True):
        learners[f"trained {seed}"] = model
    for seed, model in zip(setting.seeds, setting.models, strict=True):
        learners[f"interpolated {seed}"] = interpolate(model, setting.construction, setting.prompts).model(0.5)
    shifts = {
        f"{inputs}{scaled.replace('_', ' ')}": measure_shifted_losses(
            learners, drawn_from, SCALES, scaled=scaled, n_prompts=len(setting.prompts), seed=setting.prompt_seed
        )
        for inputs, drawn_from in (("", task), ("foreign inputs, ", foreign))
        for scaled in ("input_scale", "weight_scale")
    }
    worst = {name: _largest_difference(losses, setting.seeds) for name, losses in shifts.items()}
    label = "largest |trained / gradient descent - 1| for input scales 0.5 to 2"
    data = {
        name: {"learners": losses.learners, "scales": losses.scales, "mse": losses.mean().tolist()}
        for name, losses in shifts.items()
    }
    return (
        [Row(label, None, interval(worst["input scale"]), "seeds")],
        [Section("Out of distribution", WORDS["shifts"], viz.shifted_losses(shifts))],
        {"out_of_distribution": data, "largest_difference": {name: seeds.tolist() for name, seeds in worst.items()}},
    )


def _largest_difference(losses: ShiftedLosses, seeds: tuple[int, ...]) -> Float[Tensor, "seed"]:
    """Largest relative difference between the trained and gradient descent's loss over scales from 0.5 to 2."""
    by_learner = dict(zip(losses.learners, losses.mean(), strict=True))
    ratio = torch.stack([by_learner[f"trained {seed}"] / by_learner["gradient descent"] for seed in seeds], -1)
    scales = torch.tensor(losses.scales)
    return (ratio[(scales >= 0.5) & (scales <= 2)] - 1).abs().amax(0)


def _exact_loss(setting: Setting) -> Part:
    """The trained loss without the sampling error of the prompts, which the ratio on common prompts does not have."""
    exact, ratio = exact_optimum(setting.task), setting.loss_ratio
    if exact is None:
        return [], [], {}
    scaled = Interval(ratio.mean * exact, ratio.low * exact, ratio.high * exact, ratio.n)
    nertinger = setting.task == LinearRegression(x_dim=5, n_context=20, inputs="gaussian")
    printed = published("nertinger_table1")["linear"][0] if nertinger else None
    note = f"loss ratio times the exact MSE of the best single step, {exact:.5f}"
    return [Row("MSE, trained, freed of the prompts' sampling error", printed, scaled, "seeds", note)], [], {}


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


def _roll_outs(setting: Setting) -> Part:
    """The layer applied again and again: the part of it that training reaches, all of it, and gradient descent."""
    prompts = setting.prompts[:N_FEWER]
    layers = {
        "gradient_descent": [setting.construction],
        "trained": [
            replace_products(model, read_weight_products(model).without_unread_parts()) for model in setting.models
        ],
        "whole_layer": setting.models,
    }

    def losses(model: HookedTransformer, damping: float) -> Float[Tensor, "step"]:
        trajectory = Lens(repeat_layers(model, REPEATS, damping)).trajectory(prompts)
        return (trajectory.query() - prompts.query.ys).square().mean((-2, -1))

    by_damping = {
        damping: {
            name: torch.stack([losses(model, damping) for model in models], -1) for name, models in layers.items()
        }
        for damping in DAMPINGS
    }
    data = [
        {"damping": damping} | {name: values.squeeze(-1).tolist() if name == "gradient_descent" else values.tolist()
                                for name, values in curves.items()}
        for damping, curves in by_damping.items()
    ]  # fmt: skip
    return [], [Section("Roll-out", WORDS["roll-out"], viz.roll_outs(by_damping))], {"roll_outs": data}


def _attention(setting: Setting) -> Part:
    prompt = setting.task.sample(1, seed=setting.prompt_seed)
    drawn = viz.prompt_attention(setting.checkpoint.models[0], prompt)
    return [], [Section("Attention of one prompt", WORDS["attention"], drawn)], {}


def _errata(task: LinearRegression, comparison: Comparison) -> Section:
    measured = next(row.measured for row in comparison.rows if row.quantity == "half-MSE, tuned gradient descent")
    assert isinstance(measured, Interval)
    half, exact, step_size = measured.mean, exact_optimum(task), comparison.data["tuned_step_size"]
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


def _provenance(checkpoint: Checkpoint, comparison: Comparison) -> Section:
    record, prompt_seed = checkpoint.record, comparison.data["prompt_seed"]
    entries = [
        ("training", record.get("command", "")),
        ("seeds", ", ".join(map(str, comparison.data["seeds"]))),
        ("trained for", f"{record.get('steps_done')} steps, {record.get('wall_time_s')} s on {record.get('hardware')}"),
        ("versions", ", ".join(f"{k} {v}" for k, v in record.get("versions", {}).items())),
        ("this page", f"mechicl report {checkpoint.name} --out DIR; prompts from seed {prompt_seed}"),
        ("paper", "J. von Oswald et al., Transformers learn in-context by gradient descent, ICML 2023"),
    ]
    return Section("How it was made", "", table(("", ""), entries))
