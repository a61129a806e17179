"""The whole study of a one-layer linear-attention model beside gradient descent (von Oswald et al. 2023, Fig. 2)."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from mechicl import algorithms, constructions
from mechicl.analysis.behaviour.alignment import Alignment, align
from mechicl.analysis.behaviour.shifts import FOREIGN_INPUTS, Scaled, ShiftedLosses, losses_over_scales
from mechicl.analysis.dynamics.snapshots import AlignmentOverTraining, align_over_training
from mechicl.analysis.layers.layer_learners import Lens
from mechicl.analysis.weights.connectivity import LossPath, interpolate
from mechicl.analysis.weights.fits import ConstructionFit, fit_construction
from mechicl.analysis.weights.products import read_weight_products, replace_products
from mechicl.analysis.weights.rollout import repeat_layers
from mechicl.checkpoints import Checkpoint
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, interval
from mechicl.tasks import LinearRegression

T = TypeVar("T")
SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)


@dataclass(frozen=True, eq=False)
class RollOut:
    """Losses of a layer applied again and again, and of gradient descent with the same damping.

    Attributes:
        damping: λ.
        trained: mean squared errors after 0, 1, ... repeats of the part of the layer that training reaches,
            `[step seed]`.
        whole_layer: the same with what training leaves at its initial values (see
            `WeightProducts.without_unread_parts`), `[step seed]`.
        gradient_descent: `[step]`.
    """

    damping: float
    trained: Float[Tensor, "step seed"]
    whole_layer: Float[Tensor, "step seed"]
    gradient_descent: Float[Tensor, "step"]


@dataclass(frozen=True, eq=False)
class OneLayerStudy:
    """Everything measured about a one-layer model and its seeds.

    Attributes:
        seeds: of the training.
        n_prompts: number of held-out prompts.
        prompt_seed: of those prompts.
        step_size: the tuned step of gradient descent, a; η is a times n_context.
        squared_errors: of each seed's model on the held-out prompts, `[seed prompt]`.
        gd_squared_errors: of tuned gradient descent on the same prompts, `[prompt]`.
        alignments: with gradient descent, one a seed.
        fit: gradient descent read off the weights, all seeds.
        paths: to the construction with rescaling, one a seed.
        raw_paths: without.
        shifts: by name, the losses of gradient descent, of each seed ("trained 0", ...) and of the model half-way
            between ("interpolated 0", ...).
        roll_outs: at several dampings, on at most 2,000 of the prompts.
        over_training: on the same 2,000; None if the checkpoint has no snapshots.
    """

    seeds: tuple[int, ...]
    n_prompts: int
    prompt_seed: int
    step_size: float
    squared_errors: Float[Tensor, "seed prompt"]
    gd_squared_errors: Float[Tensor, "prompt"]
    alignments: list[Alignment]
    fit: ConstructionFit
    paths: list[LossPath]
    raw_paths: list[LossPath]
    shifts: dict[str, ShiftedLosses]
    roll_outs: list[RollOut]
    over_training: AlignmentOverTraining | None

    def loss_ratio(self) -> Interval:
        """Loss over tuned gradient descent's, over seeds."""
        return interval(self.squared_errors.mean(-1) / self.gd_squared_errors.mean())

    def sensitivity_cosine(self) -> Interval:
        """Mean sensitivity cosine, over seeds."""
        return interval(torch.stack([a.sensitivity_cosine.mean() for a in self.alignments]))

    def step_size_ratio(self) -> Interval:
        """The step size read off the weights over the tuned one, over seeds."""
        return interval(self.fit.projected.parameters["step_size"][:, 0] / self.step_size)

    def midpoint_excess(self, rescaled: bool = True) -> Interval:
        """Excess loss at the middle of the path, over seeds."""
        paths = self.paths if rescaled else self.raw_paths
        return interval(torch.tensor([path.midpoint_excess().mean for path in paths]))

    def shift_ratio(self, name: str) -> Float[Tensor, "scale seed"]:
        """Trained over gradient descent's loss at each scale of a shift."""
        losses = self.shifts[name]
        by_learner = dict(zip(losses.learners, losses.mean(), strict=True))
        return torch.stack([by_learner[f"trained {seed}"] / by_learner["gradient descent"] for seed in self.seeds], -1)

    def worst_shift(self, name: str, low: float = 0.5, high: float = 2.0) -> Float[Tensor, "seed"]:
        """Largest relative difference between the trained and gradient descent's loss over a range of scales."""
        scales = self.shifts[name].scales
        return (self.shift_ratio(name)[(scales >= low) & (scales <= high)] - 1).abs().amax(0)


def study_one_layer(
    checkpoint: Checkpoint,
    task: LinearRegression,
    *,
    n_prompts: int = 10_000,
    seed: int = 1_000_003,
    progress: bool = True,
) -> OneLayerStudy:
    """Compare each seed's model with tuned gradient descent in every way of von Oswald et al. 2023, section 3.

    Args:
        checkpoint: one-layer linear attention on paired prompts.
        task: what it was trained on.
        n_prompts: held-out prompts for each measurement.
        seed: of those prompts. The step size is tuned on 100,000 others.
        progress: show a progress bar.

    Raises:
        ValueError: a checkpoint of another kind of model.
    """
    cfg = checkpoint.models[0].cfg
    if cfg.n_layers != 1 or cfg.n_heads != 1:
        raise ValueError(f"{checkpoint.name} has {cfg.n_layers} layers and {cfg.n_heads} heads: this study needs one")
    models = [replace_products(model, read_weight_products(model)) for model in checkpoint.models]  # in float64
    prompts = task.sample(n_prompts, seed=seed, dtype=torch.float64)
    step_size = algorithms.tuned_step_size(task.sample(100_000, seed=seed + 1))
    construction = constructions.gradient_descent(
        x_dim=task.x_dim, y_dim=task.y_dim, n_context=task.n_context, step_size=step_size
    )
    foreign = task.replace(
        inputs=FOREIGN_INPUTS, input_scale=1.0, covariance=None, condition_number=None, eigenvalues=None,
        eigenbasis="axes",
    )  # fmt: skip
    shifted_tasks: dict[str, tuple[LinearRegression, Scaled]] = {
        "input scale": (task, "input_scale"),
        "weight scale": (task, "weight_scale"),
        "foreign inputs, input scale": (foreign, "input_scale"),
        "foreign inputs, weight scale": (foreign, "weight_scale"),
    }
    seeds = tuple(checkpoint.record.get("seeds", range(len(models))))
    learners = {"gradient descent": construction}
    learners |= {f"trained {i}": model for i, model in zip(seeds, models, strict=True)}
    paths = [interpolate(model, construction, prompts) for model in models]
    learners |= {f"interpolated {i}": path.curve.model(0.5) for i, path in zip(seeds, paths, strict=True)}
    stages = tqdm(total=6, desc="study", disable=not progress)

    def done(stage: T) -> T:
        stages.update()
        return stage

    study = OneLayerStudy(
        seeds=seeds,
        n_prompts=n_prompts,
        prompt_seed=seed,
        step_size=step_size,
        squared_errors=torch.stack([_squared_errors(model, prompts) for model in models]),
        gd_squared_errors=_squared_errors(construction, prompts),
        alignments=done([align(model, construction, prompts) for model in models]),
        fit=fit_construction(models, "gd", task, refine=False),
        paths=done(paths),
        raw_paths=done([interpolate(model, construction, prompts, kind="raw") for model in models]),
        shifts=done(
            {
                name: losses_over_scales(learners, shifted, SCALES, scaled=scaled, n_prompts=n_prompts, seed=seed)
                for name, (shifted, scaled) in shifted_tasks.items()
            }
        ),
        roll_outs=done([_roll_out(models, construction, prompts[:2000], damping) for damping in (0.5, 0.75, 1.0)]),
        over_training=done(checkpoint.snapshots and align_over_training(checkpoint, construction, prompts[:2000])),
    )
    stages.close()
    return study


@torch.no_grad()
def _squared_errors(model: HookedTransformer, prompts: Prompts) -> Float[Tensor, "prompt"]:
    return (model.predict(prompts).double() - prompts.query.ys.double()).square().mean(-1)


def _roll_out(
    models: list[HookedTransformer], construction: HookedTransformer, prompts: Prompts, damping: float, steps: int = 50
) -> RollOut:
    def losses(model: HookedTransformer) -> Tensor:
        trajectory = Lens(repeat_layers(model, steps, damping)).trajectory(prompts)
        return (trajectory.query() - prompts.query.ys).square().mean((-2, -1))

    reached = [replace_products(model, read_weight_products(model).without_unread_parts()) for model in models]
    return RollOut(
        damping,
        trained=torch.stack([losses(model) for model in reached], dim=-1),
        whole_layer=torch.stack([losses(model) for model in models], dim=-1),
        gradient_descent=losses(construction),
    )
