"""The report on one layer of linear attention and one step of gradient descent (von Oswald et al. 2023, Fig. 2)."""

from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl import algorithms, constructions, viz
from mechicl.analysis import align, align_over_training, fit_construction, interpolate, measure_shifted_losses
from mechicl.analysis.behaviour.losses import FOREIGN_INPUTS
from mechicl.analysis.dynamics import AlignmentOverTraining, OverTraining
from mechicl.analysis.weights import one_step_optimum
from mechicl.analysis.weights.fits import ConstructionFit
from mechicl.analysis.weights.products import read_weight_products, replace_products
from mechicl.checkpoints import CheckpointError
from mechicl.checkpoints.study import Models
from mechicl.learners import squared_errors
from mechicl.models import HookedTransformer
from mechicl.reports.comparison import Measured, Section
from mechicl.reports.kind import ALGORITHM, FINETUNING, HEADS, HISTORY, Kind, Part
from mechicl.reports.published import published
from mechicl.reports.rows import Row, equal, near, seeds_and_prompts
from mechicl.reports.verdict import NEAR, percent
from mechicl.statistics import Interval, crossed_interval, interval, mean_of_intervals
from mechicl.tasks import LinearRegression

SOURCE = "vonoswald2023"
_N_TUNING = 100_000  # prompts that the step size is tuned on
N_ALIGNED = 4096  # prompts for derivatives
N_FEWER = 256  # prompts for every snapshot and every repeat
N_PER_SCALE = 1024  # prompts at each scale
_SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
DAMPINGS, REPEATS = (0.5, 0.75, 1.0), 50
_WORDS = {
    "learning": "Each seed's loss on held-out prompts. The dashed line is one step of gradient descent with the tuned "
    "step size.",
    "alignment": "Predictions and sensitivities (exact derivatives) compared with those of gradient descent at the "
    "saved snapshots. Means over seeds with 95% intervals.",
    "weights": """The two weight products that linear attention depends on, for the opened seed, with the free scale
        between them fixed, and those of the construction of Proposition 1. Only the rows of W_KQ that read x and the
        columns of W_PV that write y can affect the prediction; the others keep their small random initial values.""",
    "interpolation": """Loss along the straight line from the trained weight products to the construction's. After the
        rescaling of appendix A.3 of von Oswald et al. 2023, which divides by β, the mean diagonal of W_KQ, the line is
        flat. Without it the middle can be far worse than either end, because β is not 1 and the initial weights decide
        its sign.""",
    "shifts": """Inputs or weights scaled by α, and the same on inputs from distributions that training never showed
        (Gaussian, exponential or Laplace, one at random for each prompt). The inputs are not normalised; the code of
        von Oswald et al. 2023 divides them by their context's norm (`LinearRegression(normalize_inputs=True)`). All
        learners see the same prompts.""",
    "roll-out": """The trained layer applied repeatedly, every update scaled by λ, and gradient descent with the same
        damping. Dashed: entries that training never reached are set to zero. Dotted: they keep their initial values,
        feed the prediction back into the scores, and make some prompts diverge.""",
    "attention": """Linear attention of the trained layer: scores, not probabilities; negative ones are red (with a
        negative β, a token's score with itself is negative). Every token attends to the context, none to the query.""",
}


def _losses(kind: "OneLayer") -> Measured:
    half = published("oswald2023_fig2")["half_mse_gd_and_trained"] if kind.standard else None
    rows = [
        Row("half-MSE, tuned gradient descent", half, interval(kind.descent_errors / 2), "prompts", source=SOURCE),
        Row("half-MSE, trained, mean of the seeds", half, interval(kind.squared_errors.mean(0) / 2), "prompts",
            source=SOURCE),
        Row("loss, trained over tuned gradient descent", "1 (Fig. 2)" if kind.standard else None,
            kind.loss_ratio, kind.over, "on the same prompts", equal(kind.loss_ratio, 1), SOURCE),
    ]  # fmt: skip
    reference, training = kind.descent_errors.mean().item(), kind.study.record.get("training", {})
    if "eval_prompts" in training and "eval_seed" in training:  # on the prompts of the learning curve
        prompts = kind.task.sample(training["eval_prompts"], seed=training["eval_seed"])
        step = algorithms.gradient_descent(prompts, 1, step_size=kind.step_size, at="query")
        reference = (step.query()[0] - prompts.query.ys).square().mean().item()
    sections = kind.learning(_WORDS["learning"], {"gradient descent, tuned": reference}, log_x=True)
    data = {"tuned_step_size": kind.step_size, "tuned_eta": kind.step_size * kind.task.n_context}
    return rows, sections, data | {"learning_curve": kind.study.record["curve"] if sections else None}


def _alignment(kind: "OneLayer") -> Measured:
    alignments = [align(model, kind.construction, kind.held_out[:N_ALIGNED]) for model in kind.models]
    names = ("sensitivity_cosine", "prediction_distance", "sensitivity_distance")
    rows = []
    for name in names:
        values = torch.stack([getattr(each, name) for each in alignments])
        mean = crossed_interval(values)
        claim = ("near 1 (Fig. 2)" if kind.standard else None, near(mean, 1), SOURCE)
        published_, agrees, source = claim if name == "sensitivity_cosine" else (None, None, "")
        quantity = f"{name.replace('_', ' ')}, trained against gradient descent"
        rows.append(Row(quantity, published_, mean, seeds_and_prompts(*values.shape), "", agrees, source))
    if kind.study.snapshots is None or kind.study.is_own:
        return rows, [], {"alignment_over_training": None}
    during = kind.during
    data = {"steps": during.steps, **{name: getattr(during, name).tolist() for name in (*names, "mse")}}
    drawn = viz.alignments_over_training({"trained": during})
    return rows, [Section("Alignment over training", _WORDS["alignment"], drawn)], {"alignment_over_training": data}


def _weights(kind: "OneLayer") -> Measured:
    task, fit, n = kind.task, kind.fit, kind.task.n_context
    step_sizes = fit.projected.parameters["step_size"]
    note = f"{n} times the step size; tuned: {kind.step_size * n:.4f}"
    rows = [
        Row("η read from the weights", None, interval(step_sizes[:, 0] * n), "seeds", note),
        Row("η read from the weights over tuned η", None, interval(step_sizes[:, 0] / kind.step_size), "seeds"),
    ]
    products = [read_weight_products(model).gauge_fixed() for model in kind.study.models]
    names = [f"x{i + 1}" for i in range(task.x_dim)] + [f"y{i + 1}" for i in range(task.y_dim)]
    drawn = viz.weight_products_figure(products[0], read_weight_products(kind.construction), names)
    tensors = {"beta": fit.beta, "step_size": step_sizes, "distance_KQ": fit.distance_KQ,
               "distance_PV": fit.distance_PV}  # fmt: skip
    data = [
        {name: values[i].tolist() for name, values in tensors.items()}
        | {"W_KQ": product.W_KQ.tolist(), "W_PV": product.W_PV.tolist()}
        for i, product in enumerate(products)
    ]
    return rows, [Section("Weights", _WORDS["weights"], drawn)], {"weights": data}


def _paths(kind: "OneLayer") -> Measured:
    between = {
        "rescaled": [interpolate(m, kind.construction, kind.held_out, kind="rescaled") for m in kind.models],
        "not rescaled": [interpolate(m, kind.construction, kind.held_out, kind="raw") for m in kind.models],
    }
    excess = {name: mean_of_intervals([p.midpoint_excess() for p in each]) for name, each in between.items()}
    rows = [
        Row("excess loss at the middle of the rescaled path", "none (Fig. 2)" if kind.standard else None,
            excess["rescaled"], kind.over, "relative to the ends", near(excess["rescaled"], 0), SOURCE),
        Row("excess loss at the middle of the path without rescaling", None, excess["not rescaled"], kind.over),
    ]  # fmt: skip
    betas = ", ".join(f"{read_weight_products(model).gauge().item():.3f}" for model in kind.models)
    data = [
        {"kind": path.kind, "alpha": list(path.alphas), "mse": path.squared_errors.mean(-1).tolist(),
         "midpoint_excess": asdict(path.midpoint_excess()), "barrier": asdict(path.barrier())}
        for each in between.values() for path in each
    ]  # fmt: skip
    words = f"{_WORDS['interpolation']} β of the seeds: {betas}."
    return rows, [Section("Interpolation", words, viz.connectivity_paths(between))], {"interpolation": data}


def _shifts(kind: "OneLayer") -> Measured:
    foreign = kind.task.replace(
        inputs=FOREIGN_INPUTS, input_scale=1.0, covariance=None, condition_number=None, eigenvalues=None,
        eigenbasis="axes", weight_covariance="identity",
    )  # fmt: skip
    learners = {"gradient descent": kind.construction}
    learners |= {f"trained {seed}": model for seed, model in zip(kind.seeds, kind.models, strict=True)}
    for seed, model in zip(kind.seeds, kind.models, strict=True):
        learners[f"interpolated {seed}"] = interpolate(model, kind.construction, kind.held_out[:2]).model(0.5)
    shifted, worst, n = {}, {}, min(len(kind.held_out), N_PER_SCALE)
    for inputs, task in (("", kind.task), ("foreign inputs, ", foreign)):
        for scaled in ("input_scale", "weight_scale"):
            losses = measure_shifted_losses(learners, task, _SCALES, scaled=scaled, n_prompts=n, seed=kind.seed)
            means = dict(zip(losses.learners, losses.mean(), strict=True))
            ratios = torch.stack([means[f"trained {seed}"] / means["gradient descent"] for seed in kind.seeds])
            scales = torch.tensor(losses.scales)
            name = f"{inputs}{scaled.replace('_', ' ')}"
            shifted[name] = losses
            worst[name] = (ratios[:, (scales >= 0.5) & (scales <= 2)] - 1).abs().amax(1)
    data = {
        name: {"learners": losses.learners, "scales": losses.scales, "mse": losses.mean().tolist()}
        for name, losses in shifted.items()
    }
    label = "largest |trained / gradient descent - 1| for input scales 0.5 to 2"
    return (
        [Row(label, None, interval(worst["input scale"]), "seeds")],
        [Section("Out of distribution", _WORDS["shifts"], viz.shifted_losses(shifted))],
        {"out_of_distribution": data, "largest_difference": {name: seeds.tolist() for name, seeds in worst.items()}},
    )


def _exact_loss(kind: "OneLayer") -> Measured:
    """The trained loss without the sampling error of the prompts, which cancels in the ratio on common prompts."""
    try:
        exact, ratio = one_step_optimum(kind.task).mse, kind.loss_ratio
    except ValueError:  # no closed form
        return [], [], {}
    scaled = Interval(ratio.mean * exact, ratio.low * exact, ratio.high * exact, ratio.n)
    nertinger = kind.task == LinearRegression(x_dim=5, n_context=20, inputs="gaussian")
    printed = published("nertinger_table1")["linear"][0] if nertinger else None
    note = f"loss ratio times the exact MSE of the best single step, {exact:.5f}"
    row = Row("MSE, trained, freed of the prompts' sampling error", printed, scaled, kind.over, note,
              source="nertinger2025", section="Learning")  # fmt: skip
    return [row], [], {}


def _roll_outs(kind: "OneLayer") -> Measured:
    """The layer applied repeatedly: the part of it that training reaches, all of it, and gradient descent."""
    prompts = kind.held_out[:N_FEWER]
    reached = [replace_products(model, read_weight_products(model).without_unread_parts()) for model in kind.models]
    layers = {"gradient_descent": [kind.construction], "trained": reached, "whole_layer": kind.models}

    @torch.no_grad()
    def losses(model: HookedTransformer, damping: float) -> Float[Tensor, "step"]:
        stream = model.embed_tokens(model.encode(prompts))
        steps = []
        for step in range(REPEATS + 1):
            if step:
                stream = stream + damping * (model(stream, start_at_layer=0, stop_at_layer=1) - stream)
            predicted = model(stream, start_at_layer=1, at="query")[:, -1]
            steps.append((predicted - prompts.query.ys).square().mean())
        return torch.stack(steps)

    by_damping = {
        damping: {name: torch.stack([losses(m, damping) for m in models], -1) for name, models in layers.items()}
        for damping in DAMPINGS
    }
    data: list[dict[str, Any]] = [
        {"damping": damping} | {name: values.tolist() for name, values in curves.items()}
        | {"gradient_descent": curves["gradient_descent"].squeeze(-1).tolist()}
        for damping, curves in by_damping.items()
    ]  # fmt: skip
    return [], [Section("Roll-out", _WORDS["roll-out"], viz.roll_outs(by_damping))], {"roll_outs": data}


def _attention(kind: "OneLayer") -> Measured:
    drawn = viz.prompt_attention(kind.study.models[0], kind.task.sample(1, seed=kind.seed))
    return [], [Section("Attention of one prompt", _WORDS["attention"], drawn)], {}


class OneLayer(Kind):
    """Every seed's layer against a tuned step of gradient descent (section 3), the nearest algorithms, the head.

    `models` are the layers as their weight products alone, in float64, one per seed; `construction` is gradient
    descent with the tuned `step_size` as a layer (the paper's η is n_context times the step size).
    """

    compared = ("loss", "alignment", "weights", "paths", "shifts", "exact loss", "roll-out", "attention")
    """Names of the parts that compare the layer with gradient descent."""
    parts = (
        Part("loss", _losses), Part("alignment", _alignment), Part("weights", _weights), Part("paths", _paths),
        Part("shifts", _shifts), Part("exact loss", _exact_loss), Part("roll-out", _roll_outs),
        Part("attention", _attention), ALGORITHM, HEADS, FINETUNING, HISTORY,
    )  # fmt: skip
    dtype = torch.float64
    heading = "One layer and one step of gradient descent ({name})"
    remark = "Figures of losses during training, on scaled inputs and after repeats show half-MSE, as the paper's do."

    def __init__(self, checkpoint: Models, **options: Any):
        super().__init__(checkpoint, **options)
        cfg, self.task = checkpoint.models[0].cfg, checkpoint.task
        one = (cfg.n_layers, cfg.n_heads, cfg.attention, cfg.prompt_format) == (1, 1, "linear", "paired")
        if not one or not isinstance(self.task, LinearRegression):
            raise CheckpointError(
                f"this comparison is for linear attention with one layer and one head on paired prompts of "
                f"LinearRegression; {checkpoint.name} has {cfg.n_layers} layers, {cfg.n_heads} {cfg.attention} heads, "
                f"{cfg.prompt_format} prompts of {type(self.task).__name__}"
            )
        self.seeds = tuple(self.study.seeds)
        self.standard = self.task == LinearRegression()  # the task of the paper's figures

    @cached_property
    def models(self) -> list[HookedTransformer]:
        """The layers as their weight products."""
        return [replace_products(model, read_weight_products(model)) for model in self.study.models]

    @cached_property
    def step_size(self) -> float:
        """The step size, tuned on other prompts."""
        return algorithms.tuned_step_size(self.task.sample(_N_TUNING, seed=self.seed + 1))

    @cached_property
    def construction(self) -> HookedTransformer:
        """The tuned step as a layer."""
        task = self.task
        return constructions.gradient_descent(
            x_dim=task.x_dim, y_dim=task.y_dim, n_context=task.n_context, step_size=self.step_size
        )

    @cached_property
    def descent_errors(self) -> Float[Tensor, "prompt"]:
        """Squared errors of the tuned step."""
        return squared_errors(self.construction, self.held_out)[:, 0]

    @cached_property
    def fit(self) -> ConstructionFit:
        """The step of gradient descent nearest to each seed's weights."""
        return fit_construction(self.models, "gd", self.task, refine=False)

    @cached_property
    def during(self) -> AlignmentOverTraining:
        """Alignment with gradient descent at the snapshots."""
        return align_over_training(self.study, self.construction, self.held_out[:N_FEWER], progress=self.progress)

    @property
    def traced(self) -> dict[str, Any]:
        """The cosine with gradient descent's sensitivities, and the distance from the nearest algorithm."""
        cosine = {"with one step of gradient descent": self.during.sensitivity_cosine}
        return {"cosine of sensitivities": OverTraining(self.during.steps, cosine), **super().traced}

    @property
    def loss_ratio(self) -> Interval:
        """Loss over gradient descent's, over seeds and prompts."""
        return crossed_interval(self.squared_errors, self.descent_errors[None])

    @property
    def over(self) -> str:
        """The samples of intervals over seeds and held-out prompts."""
        return seeds_and_prompts(*self.squared_errors.shape)

    def weights_as_text(self) -> str:
        """Compare the opened seed with the step of gradient descent nearest to its weights."""
        size = self.fit.projected.parameters["step_size"][0, 0].item()
        return nearest_in_weights(self.fit, f"step of gradient descent, with step size {size:.3g},")


def nearest_in_weights(fit: ConstructionFit, name: str) -> str:
    """Describe how well the member of a family that is nearest to the opened seed's weights predicts its outputs."""
    distance, ratio = fit.relative_distances(fit.projected)[0], fit.loss_ratios(fit.projected)[0]
    if distance.mean <= NEAR:
        return f"The weights agree: the nearest {name} leaves {percent(distance)} unexplained."
    return (
        f"The weights do not show it: the nearest {name} leaves {percent(distance)} unexplained. Its loss is "
        f"{ratio.mean:.2g} times the model's."
    )
