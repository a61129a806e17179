"""The report on models of paired prompts: against gradient descent and GD++ (von Oswald et al. 2023)."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl import viz
from mechicl.algorithms.spectral_fit import SpectralLearner
from mechicl.analysis import align, fit_construction, interpolate, measure_shifted_losses
from mechicl.analysis.behaviour import tuned_clipped_descent, tuned_descent
from mechicl.analysis.behaviour.losses import FOREIGN_INPUTS, Scaled
from mechicl.analysis.behaviour.tuned_descent import ClippedDescent
from mechicl.analysis.weights.construction_families import FamilyName, family_for
from mechicl.analysis.weights.fits import ConstructionFit
from mechicl.checkpoints import CheckpointError
from mechicl.checkpoints.study import Models
from mechicl.learners import Learner, squared_errors
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports.comparison import Measured, Section
from mechicl.reports.kind import ALGORITHM, CAUSES, FINETUNING, HEADS, HISTORY, Kind, Part
from mechicl.reports.published import published
from mechicl.reports.rows import (
    Row,
    Value,
    above,
    as_text,
    below,
    equal,
    near,
    over_models,
    over_seeds_and_prompts,
    seeds_and_prompts,
)
from mechicl.reports.verdict import NEAR, percent
from mechicl.statistics import crossed_interval, interval, median_interval, ratio_interval
from mechicl.tasks import LinearRegression

N_SHIFTED = 4096  # prompts at each scale
N_TUNING, TUNING_SEED = 8192, 2**31 + 1
N_DEEP_PATHS = 2000  # prompts along paths of models with five layers and more
MOST_OWN = 8  # steps with separate parameters that are tuned with a clip: more take minutes
_SOURCE = "vonoswald2023"
TRIM, TRIMMED = 0.01, "each without the 1% of prompts that it is worst on"
SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
_WORDS = {
    "learning": "Squared error of each seed on held-out prompts. The dashed line is tuned gradient descent with the "
    "same number of steps.",
    "shifts": "Squared error where inputs or weights are scaled by α; the last panel has inputs that training never "
    "showed. The trained model is the opened seed. Lines end where predictions overflow.",
    "paths": """From the opened seed to three members of the family of constructions: the one tuned on the task, the one
        nearest to the model's weights, and the one whose layers write most nearly what the model's layers write. Paths
        run through the products W_KQ and W_PV: raw, rescaled as in appendix A.3 of von Oswald et al. 2023, and with
        both models' heads side by side.""",
}
Tuned = SpectralLearner | ClippedDescent


def _losses(kind: "Descent") -> Measured:
    errors, references, held_out, one = kind.squared_errors, kind.reference_errors, kind.held_out, len(kind.models) == 1
    left = f"{int(left_the_plateau(errors, held_out).sum())} of {len(kind.models)} left the plateau of predicting 0"
    rows = [Row("squared error (MSE), trained, mean of the seeds", None, interval(errors.mean(0)), "prompts", left)]
    for name, values in references.items():
        tuned = kind.references[name].hyperparameters
        settings = ", ".join(f"{key.replace('_', ' ')} {value:.3g}" for key, value in tuned.items())
        rows.append(Row(f"squared error (MSE), {name}, tuned", None, interval(values), "prompts", settings))
    claims = _claims(kind) if kind.is_papers_task else {}
    for name, values in references.items():
        ratio, over, note = over_seeds_and_prompts(errors, kind.study, values)
        ratio = ratio_interval(errors[0], values) if one else ratio
        claim, check = claims.get("GD++" if "++" in name else "gradient descent", (None, None))
        rows.append(Row(f"loss, trained over {name}", claim, ratio, over, note or "on the same prompts",
                        check(ratio) if check else None, _SOURCE if claim else ""))  # fmt: skip
        trimmed, _, note = over_seeds_and_prompts(errors, kind.study, values, trim=TRIM)
        rows.append(Row(f"loss, trained over {name}, {TRIMMED}", None, trimmed, over, note))
    for name, learner in kind.references.items():
        cosines = torch.stack([align(model, learner, held_out[:4096]).sensitivity_cosine for model in kind.models])
        cosine = crossed_interval(cosines) if not one else interval(cosines[0][cosines[0].isfinite()])
        claim = ("near 1", near(cosine, 1), _SOURCE) if "++" in name else (None, None, "")
        over = "prompts" if one else seeds_and_prompts(*cosines.shape)
        rows.append(Row(f"sensitivity cosine with {name}", claim[0], cosine, over, "", *claim[1:]))
    data = {
        "mse": errors.mean(-1).tolist(),
        "references": {name: each.mean().item() for name, each in references.items()},
    }
    name, values = next(iter(references.items()))
    return rows, kind.learning(_WORDS["learning"], {f"{name}, tuned": values.mean().item()}, log_x=True), data


def _claims(kind: "Descent") -> dict[str, tuple[str, Callable[[Value], bool]]]:
    """The paper's claims on the loss relative to that of descent, with their checks."""
    if kind.cfg.attention == "softmax":
        return {"gradient descent": ("above 1; less with two heads (Fig. 12)", lambda ratio: above(ratio, 1))}
    if kind.cfg.normalization_type is not None:
        return dict.fromkeys(("gradient descent", "GD++"), ("above 1 (Fig. 14)", lambda ratio: above(ratio, 1)))
    if kind.cfg.n_layers == 1:
        return {"gradient descent": ("1 (Fig. 2)", lambda ratio: equal(ratio, 1))}
    return {
        "gradient descent": ("below 1 (Figs. 3, 7, 8)", lambda ratio: below(ratio, 1)),
        "GD++": ("1 (Figs. 3, 7, 8)", lambda ratio: equal(ratio, 1)),
    }


def _weights(kind: "Descent") -> Measured:
    fit, models = kind.fit, kind.models
    if isinstance(fit, str):
        return [], [], {"no_fit": fit}
    prompts = kind.held_out[: N_DEEP_PATHS if kind.cfg.n_layers >= 5 else None]
    rows = fit_rows(fit, kind.task, looped=kind.cfg.recurrent and kind.cfg.n_layers == 2)
    shown, barriers = {}, {}
    targets = {
        "tuned member": [kind.tuned_member] * len(models),
        "member nearest in weights": fit.projected.models,
        "member fitted layer by layer": (fit.layerwise or fit.projected).models,
    }
    for target, members in targets.items():
        for path_kind in ("raw", "rescaled", "lifted"):
            paths = [interpolate(a, b, prompts, kind=path_kind) for a, b in zip(models, members, strict=True)]
            if path_kind != "raw" or target == "tuned member":
                shown[f"{target}, {path_kind}"] = paths[0]
            each = [path.barrier() for path in paths]
            barriers[f"{target}, {path_kind}"] = [barrier.mean for barrier in each]
            over = median_interval(torch.tensor([barrier.mean for barrier in each]))
            stated = kind.is_papers_task and (path_kind, target) == ("rescaled", "tuned member")
            note = f"largest {as_text(max(each, key=lambda barrier: barrier.mean))} over prompts; relative to the loss"
            rows.append(Row(f"barrier to the {target}, {path_kind}", "none (Fig. 3)" if stated else None, over, "seeds",
                            note, near(over, 0) if stated else None, _SOURCE if stated else ""))  # fmt: skip
    reached = "gradient descent" if kind.family == "gd" else "GD++"
    section = Section(f"From the trained weights to {reached}", _WORDS["paths"], viz.connectivity_paths(shown))
    parameters = {name: values.tolist() for name, values in fit.best.parameters.items()}
    return rows, [section], {"parameters": parameters, "barriers": barriers}


def _shifts(kind: "Descent") -> Measured:
    names = list(kind.references)
    learners: dict[str, Learner] = {"trained": kind.models[0], "gradient descent": kind.references[names[0]]}
    learners |= {"GD++": kind.references[names[-1]]} if len(names) > 1 else {}
    foreign = kind.task.replace(
        inputs=FOREIGN_INPUTS, input_scale=0.25, covariance=None, condition_number=None, eigenvalues=None,
        eigenbasis="axes",
    )  # fmt: skip
    settings: tuple[tuple[str, LinearRegression, Scaled], ...] = (
        ("inputs scaled", kind.task, "input_scale"), ("weights scaled", kind.task, "weight_scale"),
        ("foreign inputs", foreign, "input_scale"),
    )  # fmt: skip
    panels = {
        name: measure_shifted_losses(learners, task, SCALES, scaled=scaled, n_prompts=N_SHIFTED, seed=kind.seed)
        for name, task, scaled in settings
    }
    return [], [Section("Losses out of distribution", _WORDS["shifts"], viz.shifted_losses(panels))], {}


class Descent(Kind):
    """Models on paired prompts, in float64, against tuned descent with one step per layer and the same clip.

    Step sizes and γ are shared or one per step (von Oswald et al. 2023, A.2, Figs. 3, 7, 8, 12 and 14).
    """

    parts = (
        Part("loss", _losses), ALGORITHM, Part("weights", _weights), Part("shifts", _shifts), CAUSES, HEADS, FINETUNING,
        HISTORY,
    )  # fmt: skip
    dtype = torch.float64
    heading = "Against gradient descent ({name})"

    def __init__(self, checkpoint: Models, **options: Any):
        super().__init__(checkpoint, **options)
        self.cfg, self.task = checkpoint.models[0].cfg, checkpoint.task
        if self.cfg.prompt_format != "paired" or not isinstance(self.task, LinearRegression):
            raise CheckpointError(
                f"{checkpoint.name} has {self.cfg.prompt_format} prompts of {type(self.task).__name__}: this report is "
                f"for models on paired prompts of LinearRegression"
            )

    @cached_property
    def models(self) -> list[HookedTransformer]:
        """The models in float64."""
        return [copy.deepcopy(model).double() for model in self.study.models if isinstance(model, HookedTransformer)]

    @property
    def references(self) -> Mapping[str, Tuned]:
        """Tuned descent, by name."""
        return tuned_references(self.task, self.cfg.n_layers, self.cfg.recurrent, self.cfg.token_clip)

    @cached_property
    def reference_errors(self) -> dict[str, Float[Tensor, "prompt"]]:
        """Squared errors of tuned descent."""
        return {name: squared_errors(each, self.held_out)[:, 0] for name, each in self.references.items()}

    @property
    def family(self) -> FamilyName:
        """The constructions that have this architecture."""
        return "gd" if self.cfg.n_layers == 1 else "gd++" if self.cfg.recurrent else "gd++ per layer"

    @property
    def is_papers_task(self) -> bool:
        """True on the task of the paper's figures, of any size."""
        sizes = {name: getattr(self.task, name) for name in ("x_dim", "n_context")}
        return self.task == LinearRegression(**sizes)

    @cached_property
    def fit(self) -> ConstructionFit | str:
        """The members of the family nearest to weights and predictions; or the reason why weights cannot be read."""
        try:
            return fit_construction(self.models, self.family, self.task)
        except ValueError as error:  # softmax, norms, MLPs
            return str(error)

    @property
    def tuned_member(self) -> HookedTransformer:
        """The tuned learner with the most parameters in the model's architecture."""
        members, tuned = family_for(self.family, self.cfg), list(self.references.values())[-1].hyperparameters
        values = [  # one for all layers, or one a layer; the last γ, which does nothing, was not tuned
            tuned.get(name, tuned.get(f"{name}_{i + 1}", 0.0))
            for name, (n,) in members.shapes.items()
            for i in range(n)
        ]
        return members.member(torch.tensor(values, dtype=torch.float64))

    @property
    def remark(self) -> str:  # type: ignore[override]
        """The clip."""
        clip = self.cfg.token_clip
        return f"Tokens are clipped at {clip:g} after every layer, in tuned descent too." if clip else ""

    def weights_as_text(self) -> str:
        """Compare the opened seed with the member of the family nearest to its weights."""
        if isinstance(self.fit, str):
            return "Its weights cannot be read as an algorithm: no construction has layers of this kind."
        names = {
            "gd": "step of gradient descent",
            "gd++": "GD++",
            "gd++ per layer": "GD++ with parameters for each step",
        }
        distance = self.fit.relative_distances(self.fit.projected)[0]
        leaves = f"the nearest {names[self.family]} leaves {percent(distance)} unexplained."
        if distance.mean <= NEAR:
            return f"The weights agree: {leaves}"
        ratio = self.fit.loss_ratios(self.fit.projected)[0]
        return f"The weights do not show it: {leaves} Its loss is {ratio.mean:.2g} times the model's."


def fit_rows(fit: ConstructionFit, task: LinearRegression, *, looped: bool) -> list[Row]:
    """Make rows of the parameters in the weights, and of the distance of weights and predictions from the family."""
    of_paper = looped and task == LinearRegression(n_context=task.n_context)
    paper = published_gammas().get(task.n_context) if of_paper else None
    kinds = {"projected": fit.projected, "layerwise": fit.layerwise, "matched": fit.matched}
    places = {"projected": "in the weights", "layerwise": "layer by layer", "matched": "matched to predictions"}
    fitted, rows = {kind: members for kind, members in kinds.items() if members is not None}, []
    for kind, members in fitted.items():
        for name, values in members.parameters.items():
            if kind == "matched" and values.shape[1] > 1:
                continue  # one a layer: they are in the data
            for layer, of_layer in enumerate(values.unbind(1)):
                where = f", layer {layer}" if values.shape[1] > 1 else ""
                known = paper if name == "gamma" and kind == "projected" else None
                symbol = {"step_size": "step size a", "gamma": "γ"}.get(name, name)
                source = "" if known is None else _SOURCE
                rows.append(Row(f"{symbol}{where}, {places[kind]}", known, interval(of_layer), "seeds", source=source))
    for kind, members in fitted.items():
        rows.append(over_models(f"loss, {kind} member over trained", fit.loss_ratios(members)))
        name = f"squared distance of predictions, {kind} member, over squared predictions"
        rows.append(replace(over_models(name, fit.relative_distances(members)), share=True))
    for name in ("distance_KQ", "distance_PV"):
        values = interval(getattr(fit, name).flatten(1).mean(1))
        label = f"relative distance of W_{name[-2:]} from the projected member, mean of the layers"
        rows.append(Row(label, None, values, "seeds"))
    return rows


def published_gammas() -> dict[int, float]:
    """Return γ of von Oswald et al.'s two looped layers by the number of points (A.10)."""
    printed = published("oswald2023_a10")
    return dict(zip(printed["n"], printed["gamma_of_trained_2_layer_recurrent"], strict=True))


def left_the_plateau(squared_errors: Float[Tensor, "seed prompt"], prompts: Prompts) -> Bool[Tensor, "seed"]:
    """Return True for seeds with a loss below 0.9 of that of predicting 0, where trainings from small weights begin."""
    return squared_errors.mean(-1) < 0.9 * prompts.query.ys.square().mean()


def tune(prompts: Prompts, steps: int, clip: float | None, **kind: bool) -> Tuned:
    """Tune gradient descent or GD++ with a model's clip of tokens, if it has one; `kind` is gamma and per_step."""
    if clip is None:
        return tuned_descent(prompts, steps, **kind)
    return tuned_clipped_descent(prompts, steps, clip, **kind)


@cache
def tuned_references(task: LinearRegression, steps: int, looped: bool, clip: float | None) -> Mapping[str, Tuned]:
    """Tune gradient descent and GD++; by name, from the least to the most parameters."""
    tuning = task.sample(N_TUNING, seed=TUNING_SEED, dtype=torch.float64)
    tuned = partial(tune, tuning, steps, clip)
    learners = {f"gradient descent, {steps} step{'s' if steps > 1 else ''}": tuned()}
    if steps > 1:
        learners[f"GD++, {steps} steps"] = tuned(gamma=True)
        if not looped and (clip is None or steps <= MOST_OWN):
            learners[f"GD++, {steps} steps, each its own"] = tuned(gamma=True, per_step=True)
    return learners
