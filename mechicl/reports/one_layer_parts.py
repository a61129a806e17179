"""The parts of the report on one layer: losses, alignment, weights, paths, shifted inputs, repeated application."""

from dataclasses import asdict

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl import algorithms, viz
from mechicl.analysis import align, align_over_training, interpolate, measure_shifted_losses
from mechicl.analysis.behaviour.losses import FOREIGN_INPUTS, ShiftedLosses
from mechicl.analysis.weights.paths import PathKind
from mechicl.analysis.weights.products import read_weight_products, replace_products
from mechicl.models import HookedTransformer
from mechicl.reports.comparison import Measured, Section
from mechicl.reports.one_layer_setting import OneLayerSetting, exact_optimum
from mechicl.reports.published import published
from mechicl.reports.rows import Row, equal, near
from mechicl.statistics import Interval, interval
from mechicl.tasks import LinearRegression

SOURCE = "vonoswald2023"
N_ALIGNED = 4096  # prompts for derivatives
N_FEWER = 256  # prompts for what is measured repeatedly: at every snapshot, after every repeat
N_SHIFTED = 1024  # prompts at each scale
SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
DAMPINGS, REPEATS = (0.5, 0.75, 1.0), 50
WORDS = {
    "learning": """
        Each seed's loss on held-out prompts; the dashed line is one step of gradient descent with the tuned step
        size.""",
    "alignment": """
        Predictions and sensitivities (d prediction / d query, exact) compared with those of gradient descent. Means
        over seeds with 95% intervals, at the saved snapshots.""",
    "attention": """
        Linear attention of the trained layer (first seed): scores, not probabilities; negative ones are red (with a
        negative β, a token's score with itself is negative). Every token attends to the context, none to the query.""",
    "weights": """
        The two products that linear attention depends on, for the first seed, with the free scale between them fixed,
        and those of the construction of Proposition 1. Only the rows of W_KQ that read x and the columns of W_PV that
        write y can act on the prediction; the rest keeps its small random initial values.""",
    "interpolation": """
        Loss along the straight line from the trained weight products to the construction's. After the rescaling of
        appendix A.3, which divides by β, the mean diagonal of W_KQ, the line is flat. Without it the middle can be far
        worse than either end: β is not 1, and the initial weights decide its sign.""",
    "shifts": """
        Inputs or weights scaled by α, and the same on inputs from distributions that training never showed (Gaussian,
        exponential or Laplace, one at random for each prompt; as drawn, where the code of von Oswald et al. 2023
        divides them by the norm of their context: `LinearRegression(normalize_inputs=True)`). All learners see the
        same prompts.""",
    "roll-out": """
        The trained layer applied repeatedly, every update scaled by λ, and gradient descent with the same damping.
        Entries that training never reached are set to zero for the dashed lines; left at their initial values, as in
        the dotted lines, they feed the prediction back into the scores, and some prompts diverge.""",
}


def losses(setting: OneLayerSetting) -> Measured:
    """Losses of the seeds and of the tuned step."""
    half = published("oswald2023_fig2")["half_mse_gd_and_trained"] if setting.standard else None
    rows = [
        Row("half-MSE, tuned gradient descent", half, interval(setting.descent_errors / 2), "prompts", source=SOURCE),
        Row("half-MSE, trained, mean of the seeds", half, interval(setting.squared_errors.mean(0) / 2), "prompts",
            source=SOURCE),
        Row("loss, trained over tuned gradient descent", "1 (Fig. 2)" if setting.standard else None,
            setting.loss_ratio, "seeds", "on the same prompts", equal(setting.loss_ratio, 1), SOURCE),
    ]  # fmt: skip
    curve, training = setting.study.record.get("curve"), setting.study.record.get("training", {})
    if curve is None or setting.study.is_own:
        return rows, [], {"learning_curve": None}
    reference = setting.descent_errors.mean().item()
    if "eval_prompts" in training and "eval_seed" in training:  # on the prompts of the learning curve
        prompts = setting.task.sample(training["eval_prompts"], seed=training["eval_seed"])
        step = algorithms.gradient_descent(prompts, 1, step_size=setting.step_size, at="query")
        reference = (step.query()[0] - prompts.query.ys).square().mean().item()
    drawn = viz.losses_over_training(
        curve["eval_step"], {"each seed": curve["eval_loss"]}, log_x=True,
        references={"gradient descent, tuned": reference},
    )  # fmt: skip
    return rows, [Section("Learning", WORDS["learning"], drawn)], {"learning_curve": curve}


def alignment(setting: OneLayerSetting) -> Measured:
    """Cosines and distances of sensitivities and predictions, at the end and over training."""
    alignments = [align(model, setting.construction, setting.prompts[:N_ALIGNED]) for model in setting.models]
    means = {
        name: interval(torch.stack([getattr(each, name).mean() for each in alignments]))
        for name in ("sensitivity_cosine", "prediction_distance", "sensitivity_distance")
    }
    claim, cosine = "near 1 (Fig. 2)" if setting.standard else None, means["sensitivity_cosine"]
    against = "trained against gradient descent"
    rows = [
        Row(f"sensitivity cosine, {against}", claim, cosine, "seeds", "", near(cosine, 1), SOURCE),
        Row(f"prediction distance, {against}", None, means["prediction_distance"], "seeds"),
        Row(f"sensitivity distance, {against}", None, means["sensitivity_distance"], "seeds"),
    ]
    if setting.study.snapshots is None or setting.study.is_own:
        return rows, [], {"alignment_over_training": None}
    during = align_over_training(setting.study, setting.construction, setting.prompts[:N_FEWER])
    names = ("sensitivity_cosine", "prediction_distance", "sensitivity_distance", "mse")
    data = {"steps": during.steps, **{name: getattr(during, name).tolist() for name in names}}
    drawn = viz.alignments_over_training({"trained": during})
    return rows, [Section("Alignment over training", WORDS["alignment"], drawn)], {"alignment_over_training": data}


def exact_loss(setting: OneLayerSetting) -> Measured:
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


def attention(setting: OneLayerSetting) -> Measured:
    """The first seed's attention on one prompt."""
    prompt = setting.task.sample(1, seed=setting.seed)
    drawn = viz.prompt_attention(setting.study.models[0], prompt)
    return [], [Section("Attention of one prompt", WORDS["attention"], drawn)], {}


def weights(setting: OneLayerSetting) -> Measured:
    """The step size in the weights, and the weights next to the construction's."""
    task, fit = setting.task, setting.fit
    step_sizes = fit.projected.parameters["step_size"]
    eta, tuned = interval(step_sizes[:, 0] * task.n_context), f"tuned: {setting.step_size * task.n_context:.4f}"
    rows = [
        Row("η read from the weights", None, eta, "seeds", tuned),
        Row("η read from the weights over tuned η", None, interval(step_sizes[:, 0] / setting.step_size), "seeds"),
    ]
    products = [read_weight_products(model).gauge_fixed() for model in setting.study.models]
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


def paths(setting: OneLayerSetting) -> Measured:
    """The loss on straight lines between the trained weights and gradient descent's."""
    kinds: dict[str, PathKind] = {"rescaled": "rescaled", "not rescaled": "raw"}
    between = {
        name: [interpolate(model, setting.construction, setting.prompts, kind=kind) for model in setting.models]
        for name, kind in kinds.items()
    }
    excess = {name: interval(torch.tensor([p.midpoint_excess().mean for p in each])) for name, each in between.items()}
    claim = "none (Fig. 2)" if setting.standard else None
    rows = [
        Row("excess loss at the middle of the rescaled path", claim, excess["rescaled"], "seeds",
            "relative to the ends", near(excess["rescaled"], 0), SOURCE),
        Row("excess loss at the middle of the path without rescaling", None, excess["not rescaled"], "seeds"),
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
        for each in between.values()
        for path in each
    ]
    return rows, [Section("Interpolation", words, viz.connectivity_paths(between))], {"interpolation": data}


def shifts(setting: OneLayerSetting) -> Measured:
    """Losses where inputs or weights are scaled, or inputs come from other distributions."""
    task = setting.task
    foreign = task.replace(
        inputs=FOREIGN_INPUTS, input_scale=1.0, covariance=None, condition_number=None, eigenvalues=None,
        eigenbasis="axes", weight_covariance="identity",
    )  # fmt: skip
    learners = {"gradient descent": setting.construction}
    for seed, model in zip(setting.seeds, setting.models, strict=True):
        learners[f"trained {seed}"] = model
    for seed, model in zip(setting.seeds, setting.models, strict=True):
        learners[f"interpolated {seed}"] = interpolate(model, setting.construction, setting.prompts[:2]).model(0.5)
    losses_of = {
        f"{inputs}{scaled.replace('_', ' ')}": measure_shifted_losses(
            learners,
            drawn_from,
            SCALES,
            scaled=scaled,
            n_prompts=min(len(setting.prompts), N_SHIFTED),
            seed=setting.seed,
        )
        for inputs, drawn_from in (("", task), ("foreign inputs, ", foreign))
        for scaled in ("input_scale", "weight_scale")
    }
    worst = {name: _largest_difference(losses, setting.seeds) for name, losses in losses_of.items()}
    label = "largest |trained / gradient descent - 1| for input scales 0.5 to 2"
    data = {
        name: {"learners": losses.learners, "scales": losses.scales, "mse": losses.mean().tolist()}
        for name, losses in losses_of.items()
    }
    return (
        [Row(label, None, interval(worst["input scale"]), "seeds")],
        [Section("Out of distribution", WORDS["shifts"], viz.shifted_losses(losses_of))],
        {"out_of_distribution": data, "largest_difference": {name: seeds.tolist() for name, seeds in worst.items()}},
    )


def _largest_difference(losses: ShiftedLosses, seeds: tuple[int, ...]) -> Float[Tensor, "seed"]:
    """Largest relative difference between the trained and gradient descent's loss over scales from 0.5 to 2."""
    by_learner = dict(zip(losses.learners, losses.mean(), strict=True))
    ratio = torch.stack([by_learner[f"trained {seed}"] / by_learner["gradient descent"] for seed in seeds], -1)
    scales = torch.tensor(losses.scales)
    return (ratio[(scales >= 0.5) & (scales <= 2)] - 1).abs().amax(0)


def roll_outs(setting: OneLayerSetting) -> Measured:
    """The layer applied repeatedly: the part of it that training reaches, all of it, and gradient descent."""
    prompts = setting.prompts[:N_FEWER]
    layers = {
        "gradient_descent": [setting.construction],
        "trained": [
            replace_products(model, read_weight_products(model).without_unread_parts()) for model in setting.models
        ],
        "whole_layer": setting.models,
    }

    @torch.no_grad()
    def losses(model: HookedTransformer, damping: float) -> Float[Tensor, "step"]:
        stream = model.embed_tokens(model.encode(prompts))
        steps = []
        for step in range(REPEATS + 1):
            if step:
                stream = stream + damping * (model(stream, start_at_layer=0, stop_at_layer=1) - stream)
            predicted = model.decode(model(stream, start_at_layer=1))[:, -1]
            steps.append((predicted - prompts.query.ys).square().mean())
        return torch.stack(steps)

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
