"""The report on models of paired prompts: against gradient descent and GD++ (von Oswald et al. 2023)."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl import viz
from mechicl.algorithms.spectral_fit import SpectralLearner
from mechicl.analysis import align, fit_construction, interpolate, measure_shifted_losses
from mechicl.analysis.behaviour import FOREIGN_INPUTS, ClippedDescent, tuned_clipped_descent, tuned_descent
from mechicl.analysis.weights import ConstructionFit, FamilyName
from mechicl.analysis.weights.construction_families import family_for
from mechicl.checkpoints import Checkpoint, CheckpointError
from mechicl.learners import Learner, squared_errors
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.reports.algorithm import AlgorithmQuestion, causes_in_words
from mechicl.reports.causes import causes, no_causes, slow_causes
from mechicl.reports.comparison import Comparison, Part, Section, published
from mechicl.reports.engine import Kind
from mechicl.reports.model_parts import model_parts, no_model_parts
from mechicl.reports.rows import Row, over_seeds
from mechicl.reports.study import Study, as_study
from mechicl.reports.verdict import NEAR, Verdict, percent
from mechicl.statistics import Interval, interval, median_interval, ratio_interval
from mechicl.tasks import LinearRegression

N_HELD_OUT, PROMPT_SEED = 10_000, 1_000_003
N_SHIFTED = 4096  # prompts at each scale
N_TUNING, TUNING_SEED = 8192, 2**31 + 1
N_DEEP_PATHS = 2000  # prompts along paths of models with five layers and more, which take so much longer
MOST_OWN = 8  # steps with parameters of their own that are tuned with a clip: many take minutes
SOURCE = "vonoswald2023"
SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
WORDS = {
    "learning": "Half the held-out loss of each seed; the dashed line is gradient descent with as many steps, tuned.",
    "shifts": "Inputs or weights scaled by α; the last panel draws inputs that training never showed. The trained "
    "model is the opened seed; lines end where predictions overflow.",
    "paths": "From the opened seed to the tuned member of the family, to the one nearest to its weights, and to the "
    "one whose layers write most nearly what its layers write, in the products W_KQ and W_PV, on held-out prompts. "
    "Raw, in the gauge of A.3, and with both models' heads side by side.",
}


Tuned = SpectralLearner | ClippedDescent


@dataclass(frozen=True, eq=False)
class References:
    """Descent with as many steps as the model has layers, tuned on the task: step sizes and γ shared or one a step.

    Where the model clips its tokens, so does the descent, and it is tuned with the clip (von Oswald et al. 2023, A.2).
    """

    learners: dict[str, Tuned]
    squared_errors: dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class DescentSetting:
    """Models on paired prompts in float64, tuned descent that they are compared with, and held-out prompts."""

    checkpoint: Checkpoint
    task: LinearRegression
    models: list[HookedTransformer]
    held_out: Prompts
    seed: int
    references: References
    squared_errors: Float[Tensor, "seed prompt"]

    @property
    def cfg(self) -> TransformerConfig:
        """The models' config."""
        return self.models[0].cfg

    @cached_property
    def family(self) -> FamilyName:
        """The constructions that have this architecture."""
        return _family(self.cfg.n_layers, self.cfg.recurrent)

    @cached_property
    def fit(self) -> ConstructionFit | str:
        """The members of the family nearest to weights and predictions; or why weights cannot be read off."""
        try:
            return fit_construction(self.models, self.family, self.task)
        except ValueError as error:  # softmax, norms, MLPs
            return str(error)


def compare_with_descent(
    checkpoint: Checkpoint, *, n_prompts: int = 10_000, seed: int = 1_000_003, progress: bool = True
) -> Comparison:
    """Losses, alignment, fitted weights, paths and the nearest algorithm of a model on paired prompts.

    Args:
        checkpoint: a model on paired prompts, with its task in the record.
        n_prompts: held-out prompts.
        seed: of the held-out prompts; tuning and fitting use others.
        progress: show progress bars.

    Raises:
        CheckpointError: a model of another kind, or without a task of linear regression.

    Source: von Oswald et al. 2023, Figs. 3, 7, 8, 12 and 14.
    """
    setting = _setting(checkpoint, n_prompts, seed)
    question = AlgorithmQuestion(as_study(checkpoint), progress, min(n_prompts, 4096), seed=0)
    data = {"mse": setting.squared_errors.mean(-1).tolist()}
    comparison = Comparison(_title(checkpoint), _lead(setting), [], [], data).with_more(*_losses(setting))
    for part in (question.part(), _weights(setting), _shifts(setting)):
        comparison = comparison.with_more(*part)
    return comparison


def descent_kind(study: Study, *, n_prompts: int | None = None, progress: bool = True) -> Kind:
    """The comparison of `compare_with_descent`, and what the heads do."""
    setting = _setting(study, n_prompts or N_HELD_OUT, PROMPT_SEED)
    question = AlgorithmQuestion(study, progress)
    parts: dict[str, Callable[[], Part]] = {
        "loss": partial(_losses, setting), "algorithm": question.part, "weights": partial(_weights, setting),
        "shifts": partial(_shifts, setting),
    }  # fmt: skip
    missing, on_request = {}, {}
    if reason := no_causes(study):
        missing["causes"] = reason
    else:
        parts["causes"] = partial(causes, study, progress=progress)
        on_request = {"causes": slow} if (slow := slow_causes(study)) else {}
    if reason := no_model_parts(study):
        missing["heads"] = reason
    else:
        parts["heads"] = partial(model_parts, study, progress=progress)

    def verdict(comparison: Comparison) -> Verdict:
        return question.verdict(comparison, _weights_in_words(setting), causes_in_words(comparison.rows))

    data = {"mse": setting.squared_errors.mean(-1).tolist()}
    return Kind(_title(study), f"{_lead(setting)} {study.chosen}", parts, verdict, data, on_request, missing)


def _setting(checkpoint: Checkpoint, n_prompts: int, seed: int) -> DescentSetting:
    cfg, task = checkpoint.models[0].cfg, checkpoint.task
    if cfg.prompt_format != "paired" or not isinstance(task, LinearRegression):
        raise CheckpointError(
            f"{checkpoint.name} has {cfg.prompt_format} prompts of {type(task).__name__}: this report is for models on "
            f"paired prompts of LinearRegression"
        )
    models = [copy.deepcopy(model).double() for model in checkpoint.models if isinstance(model, HookedTransformer)]
    held_out = task.sample(n_prompts, seed=seed, dtype=torch.float64)
    learners = tuned_references(task, cfg.n_layers, cfg.recurrent, cfg.token_clip)
    references = References(
        dict(learners), {name: squared_errors(each, held_out)[:, 0] for name, each in learners.items()}
    )
    errors = torch.stack([squared_errors(model, held_out)[:, 0] for model in models])
    return DescentSetting(checkpoint, task, models, held_out, seed, references, errors)


def _title(checkpoint: Checkpoint) -> str:
    return f"Against gradient descent ({checkpoint.name})"


def _lead(setting: DescentSetting) -> str:
    cfg, task, n = setting.cfg, setting.task, len(setting.models)
    heads = f"{cfg.n_heads} {cfg.attention} head{'s' if cfg.n_heads > 1 else ''}"
    layers = f"{cfg.n_layers} layer{'s' if cfg.n_layers > 1 else ''}{' (one, looped)' if cfg.recurrent else ''}"
    clipped = ""
    if cfg.token_clip is not None:
        clipped = (
            f" Tokens are clipped at {cfg.token_clip:g} after every layer, those of descent too, which is tuned so."
        )
    return (
        f"{setting.checkpoint.name}: {n} seed{'s' if n > 1 else ''}, {layers} with {heads} each, on "
        f"{task.n_context} points in {task.x_dim} dimensions; {len(setting.held_out):,} held-out prompts (seed "
        f"{setting.seed}). Losses are halved where the paper's are; its inputs are U(-1/2, 1/2).{clipped}"
    )


def _losses(setting: DescentSetting) -> Part:
    """Losses of the seeds and of tuned descent, and how alike they are to its sensitivities."""
    errors, references, models, held_out = setting.squared_errors, setting.references, setting.models, setting.held_out
    cfg, one = setting.cfg, len(models) == 1  # no interval over seeds
    over = "prompts" if one else "seeds"
    left = f"{int(left_the_plateau(errors, held_out).sum())} of {len(models)} left the plateau of predicting 0"
    rows = [
        Row("half-MSE, trained, mean of the seeds", None, interval(errors.mean(0) / 2), "prompts", left),
        *(
            Row(f"half-MSE, {name}, tuned", None, interval(values / 2), "prompts", _settings(references.learners[name]))
            for name, values in references.squared_errors.items()
        ),
    ]
    claims = _claims(cfg.n_layers, cfg.attention, cfg.normalization_type)
    for name, values in references.squared_errors.items():
        ratio, _, note = over_seeds(errors.mean(-1) / values.mean(), setting.checkpoint)
        ratio = ratio_interval(errors[0], values) if one else ratio
        claim, check = claims.get(_kind(name), (None, ""))
        quantity, note = f"loss, trained over {name}", note or "on the same prompts"
        rows.append(Row(quantity, claim, ratio, over, note, check, SOURCE if claim else ""))
    for name, learner in references.learners.items():
        alignments = [align(model, learner, held_out[:4096]) for model in models]
        cosines = torch.stack([alignment.sensitivity_cosine for alignment in alignments])
        cosine = interval(cosines[0][cosines[0].isfinite()] if one else cosines.nanmean(-1))
        quantity = f"sensitivity cosine with {name}"
        if "++" in name:
            rows.append(Row(quantity, "near 1", cosine, over, "", "near 1", SOURCE))
        else:
            rows.append(Row(quantity, None, cosine, over))
    data = {"references": {name: values.mean().item() for name, values in references.squared_errors.items()}}
    record = setting.checkpoint.record
    if "curve" not in record or (isinstance(setting.checkpoint, Study) and setting.checkpoint.is_own):
        return rows, [], data
    curve, (name, values) = record["curve"], next(iter(references.squared_errors.items()))
    curves = viz.losses_over_training(
        curve["eval_step"], {"each seed": curve["eval_loss"]}, log_x=True,
        references={f"{name}, tuned": values.mean().item()},
    )  # fmt: skip
    return rows, [Section("Learning", WORDS["learning"], curves)], data


def _weights(setting: DescentSetting) -> Part:
    """The construction in the weights, and the paths to it."""
    fit = setting.fit
    if isinstance(fit, str):
        return [], [], {"no_fit": fit}
    cfg = setting.cfg
    rows = fit_rows(fit, setting.task, looped=cfg.recurrent and cfg.n_layers == 2)
    drawn = setting.held_out[: N_DEEP_PATHS if cfg.n_layers >= 5 else None]
    path_rows, figure, barriers = _paths(setting.models, fit, setting.references, setting.family, drawn)
    data = {"parameters": {k: v.tolist() for k, v in fit.best.parameters.items()}, "barriers": barriers}
    return rows + path_rows, [figure], data


def _shifts(setting: DescentSetting) -> Part:
    """Losses on scaled inputs and weights, and on other inputs."""
    drawn = _shifted(setting.models[0], setting.references, setting.task, setting.seed)
    return [], [Section("Losses out of distribution", WORDS["shifts"], drawn)], {}


def _weights_in_words(setting: DescentSetting) -> str:
    """Whether the member of the family nearest to the weights predicts what the opened seed predicts."""
    fit = setting.fit
    if isinstance(fit, str):
        return "Its weights cannot be read as an algorithm: softmax, layer norms or MLPs stand in the way."
    name = {"gd": "gradient descent", "gd++": "GD++", "gd++ per layer": "GD++ with parameters for each step"}
    distance, ratio = fit.relative_distances(fit.projected)[0], fit.loss_ratios(fit.projected)[0]
    read = f"The {name[setting.family]} nearest to its weights leaves {percent(distance)} of its squared predictions"
    if distance.mean <= NEAR:
        return f"{read}: the weights agree."
    return f"{read}, at {ratio.mean:.2g} times its loss: the weights do not show it."


def fit_rows(fit: ConstructionFit, task: LinearRegression, *, looped: bool) -> list[Row]:
    """Parameters in the weights, with intervals over seeds, and how far weights and predictions are from the family."""
    paper = (
        published_gammas().get(task.n_context)
        if looped and task == LinearRegression(n_context=task.n_context)
        else None
    )
    rows = []
    kinds = {"in the weights": fit.projected, "layer by layer": fit.layerwise, "matched to predictions": fit.matched}
    for kind, members in kinds.items():
        if members is None:
            continue
        for name, values in members.parameters.items():
            if kind == "matched to predictions" and values.shape[1] > 1:
                continue  # one a layer: they are in the data
            for layer, of_layer in enumerate(values.unbind(1)):
                where = f", layer {layer}" if values.shape[1] > 1 else ""
                known = paper if name == "gamma" and kind == "in the weights" else None
                symbol = {"step_size": "step size a", "gamma": "γ"}.get(name, name)
                source = "" if known is None else SOURCE
                rows.append(Row(f"{symbol}{where}, {kind}", known, interval(of_layer), "seeds", source=source))
    for kind, members in (("projected", fit.projected), ("layerwise", fit.layerwise), ("matched", fit.matched)):
        if members is None:
            continue
        ratio = interval(torch.tensor([r.mean for r in fit.loss_ratios(members)]))
        distance = interval(torch.tensor([d.mean for d in fit.relative_distances(members)]))
        rows.append(Row(f"loss, {kind} member over trained", None, ratio, "seeds"))
        name = f"squared distance of predictions, {kind} member, over squared predictions"
        rows.append(Row(name, None, distance, "seeds"))
    for name in ("distance_KQ", "distance_PV"):
        values = interval(getattr(fit, name).flatten(1).mean(1))
        label = f"relative distance of W_{name[-2:]} from the projected member, mean of the layers"
        rows.append(Row(label, None, values, "seeds"))
    return rows


def published_gammas() -> dict[int, float]:
    """γ of von Oswald et al.'s two looped layers by the number of points (A.10)."""
    printed = published("oswald2023_a10")
    return dict(zip(printed["n"], printed["gamma_of_trained_2_layer_recurrent"], strict=True))


def left_the_plateau(squared_errors: Float[Tensor, "seed prompt"], prompts: Prompts) -> Bool[Tensor, "seed"]:
    """Which seeds have a loss below 0.9 of that of predicting 0, where trainings from small weights begin."""
    return squared_errors.mean(-1) < 0.9 * prompts.query.ys.square().mean()


def barrier_over_seeds(barriers: list[Interval]) -> Interval:
    """Median over seeds of each seed's mean barrier, with its bootstrap interval."""
    return median_interval(torch.tensor([barrier.mean for barrier in barriers]))


@cache
def tuned_references(task: LinearRegression, steps: int, looped: bool, clip: float | None) -> Mapping[str, Tuned]:
    """Tuned descent by name, from the least to the most parameters."""
    tuning = task.sample(N_TUNING, seed=TUNING_SEED, dtype=torch.float64)

    def tuned(**kind: bool) -> Tuned:
        return (
            tuned_descent(tuning, steps, **kind) if clip is None else tuned_clipped_descent(tuning, steps, clip, **kind)
        )

    learners = {f"gradient descent, {steps} step{'s' if steps > 1 else ''}": tuned()}
    if steps > 1:
        learners[f"GD++, {steps} steps"] = tuned(gamma=True)
        if not looped and (clip is None or steps <= MOST_OWN):
            learners[f"GD++, {steps} steps, each its own"] = tuned(gamma=True, per_step=True)
    return learners


def _settings(learner: Tuned) -> str:
    return ", ".join(f"{name}={value:.3g}" for name, value in learner.hyperparameters.items())


def _kind(name: str) -> str:
    return "GD++" if "++" in name else "gradient descent"


def _claims(n_layers: int, attention: str, norm: str | None) -> dict[str, tuple[str, str]]:
    """What the paper says of the loss over that of descent, and how that is checked."""
    if attention == "softmax":
        return {"gradient descent": ("above 1; less with two heads (Fig. 12)", "> 1")}
    if norm is not None:
        return {"gradient descent": ("above 1 (Fig. 14)", "> 1"), "GD++": ("above 1 (Fig. 14)", "> 1")}
    if n_layers == 1:
        return {"gradient descent": ("1 (Fig. 2)", "= 1")}
    return {"gradient descent": ("below 1 (Figs. 3, 7, 8)", "< 1"), "GD++": ("1 (Figs. 3, 7, 8)", "= 1")}


def _family(n_layers: int, looped: bool) -> FamilyName:
    if n_layers == 1:
        return "gd"
    return "gd++" if looped else "gd++ per layer"


def _paths(
    models: list[HookedTransformer],
    fit: ConstructionFit,
    references: References,
    family: FamilyName,
    held_out: Prompts,
) -> tuple[list[Row], Section, dict[str, list[float]]]:
    tuned = _member(list(references.learners.values())[-1], family, models[0].cfg)
    shown, rows, barriers = {}, [], {}
    targets = {
        "tuned member": [tuned] * len(models),
        "member nearest in weights": fit.projected.models,
        "member fitted layer by layer": (fit.layerwise or fit.projected).models,
    }
    for target, members in targets.items():
        for kind in ("raw", "rescaled", "lifted"):
            paths = [interpolate(a, b, held_out, kind=kind) for a, b in zip(models, members, strict=True)]
            if kind != "raw" or target == "tuned member":
                shown[f"{target}, {kind}"] = paths[0]
            each = [path.barrier() for path in paths]
            barriers[f"{target}, {kind}"] = [barrier.mean for barrier in each]
            stated = (
                ("none (Fig. 3)", "near 0", SOURCE)
                if (kind, target) == ("rescaled", "tuned member")
                else (None, "", "")
            )
            largest = max(each, key=lambda barrier: barrier.mean)
            rows.append(
                Row(f"barrier to the {target}, {kind}", stated[0], barrier_over_seeds(each), "seeds",
                    f"largest {largest} over prompts; relative to the loss", *stated[1:])
            )  # fmt: skip
    return rows, Section("From the trained weights to GD++", WORDS["paths"], viz.connectivity_paths(shown)), barriers


def _member(descent: Tuned, family: FamilyName, cfg: TransformerConfig) -> HookedTransformer:
    """The tuned learner in the model's architecture."""
    members, tuned = family_for(family, cfg), descent.hyperparameters
    values = [  # one for all layers, or one a layer; the last γ, which does nothing, was not tuned
        tuned.get(name, tuned.get(f"{name}_{i + 1}", 0.0)) for name, (n,) in members.shapes.items() for i in range(n)
    ]
    return members.member(torch.tensor(values, dtype=torch.float64))


def _shifted(model: HookedTransformer, references: References, task: LinearRegression, seed: int) -> Any:
    learners: dict[str, Learner] = {"trained": model, **_distinct(references)}
    foreign = task.replace(inputs=FOREIGN_INPUTS, input_scale=0.25)
    panels = {
        "inputs scaled": measure_shifted_losses(
            learners, task, SCALES, scaled="input_scale", n_prompts=N_SHIFTED, seed=seed
        ),
        "weights scaled": measure_shifted_losses(
            learners, task, SCALES, scaled="weight_scale", n_prompts=N_SHIFTED, seed=seed
        ),
        "foreign inputs": measure_shifted_losses(
            learners, foreign, SCALES, scaled="input_scale", n_prompts=N_SHIFTED, seed=seed
        ),
    }
    return viz.shifted_losses(panels)


def _distinct(references: References) -> dict[str, Learner]:
    """Gradient descent, and the best of the others."""
    names = list(references.learners)
    chosen: dict[str, Learner] = {"gradient descent": references.learners[names[0]]}
    return chosen | ({"GD++": references.learners[names[-1]]} if len(names) > 1 else {})
