"""Models out of distribution, compared with gradient descent (von Oswald et al. 2023, A.2).

python analyses/vonoswald2023/oswald_shifts.py --checkpoint lsa-2l-looped
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.support.resamples import crossed_median_interval, over_resamples, over_seeds, resampled_means
from analyses.support.script import Option, regression_checkpoint, script
from analyses.support.seeds import descent_layers, in_float64
from mechicl import viz
from mechicl.analysis import align, align_over_training, interpolate, measure_shifted_losses
from mechicl.analysis.behaviour.losses import FOREIGN_INPUTS
from mechicl.checkpoints import Checkpoint, CheckpointError
from mechicl.learners import Learner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.reports import Comparison, Row, Section
from mechicl.reports.descent import Tuned, tune
from mechicl.reports.rows import over_seeds_and_prompts
from mechicl.tasks import LinearRegression

SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
LAST = SCALES[-1]
N_ALIGNED = 256  # prompts for alignment at every snapshot
N_TUNING = 50_000
N_CLIPPED = 8192  # prompts to tune on where tokens are clipped: no prompt weighs more than the clip lets it
TUNING_SEED = 2**31 + 1
DESCENT, PLUS_PLUS, EACH = "gradient descent", "GD++", "GD++, each step its own"
ELSEWHERE = "the same, tuned on other prompts"
PANELS = ("input scale", "weight scale", "foreign inputs", "foreign inputs over their norm")


@script(
    checkpoint="lsa-2l-looped",
    n_prompts=Option(2048, "prompts at each scale, the same for all learners and scales"),
    seed=1_000_003,
)
def compare(args: Any) -> Comparison:
    """Curves of the seeds, of tuned descent and of what lies half-way between, in four panels."""
    checkpoint, task = regression_checkpoint(args.checkpoint)
    models = in_float64(checkpoint.models)
    cfg = models[0].cfg
    if cfg.prompt_format != "paired":
        raise CheckpointError(f"{args.checkpoint} has {cfg.prompt_format} prompts, this script compares paired ones")
    tuned = _tuned(task, cfg.n_layers, cfg.recurrent, cfg.token_clip)
    references = {name: as_layers(learner, cfg) for name, learner in tuned.items()}
    # the paper's comparison for the model: GD++, with separate parameters per step if layers differ
    kinds = [DESCENT] if checkpoint.name.endswith("-ln") else [EACH, PLUS_PLUS, DESCENT]
    main = next(kind for kind in kinds if kind in references)
    if cfg.token_clip is not None:
        references[ELSEWHERE] = as_layers(_tuned_elsewhere(task, cfg.n_layers, cfg.token_clip, main == EACH), cfg)
    learners: dict[str, Learner] = dict(references)
    learners |= {f"trained {i}": model for i, model in enumerate(models)}
    if cfg.attention == "linear" and cfg.n_heads == 1 and cfg.d_mlp is None and cfg.normalization_type is None:
        some = task.sample(2, seed=0, dtype=torch.float64)
        halves = [interpolate(model, references[main], some).model(0.5) for model in models]
        learners |= {f"half-way {i}": half for i, half in enumerate(halves)}
    losses = _panels(learners, task, args)
    n_prompts = args.n_prompts
    rows = [row for panel, curves in losses.items() for row in _rows(panel, curves, checkpoint, main, n_prompts)]
    rows += _robust_rows(losses, checkpoint, main, n_prompts)
    rows += _early_rows(checkpoint, tuned, task, args.seed)
    clipped = "" if cfg.token_clip is None else f", whose tokens are clipped at {cfg.token_clip:g} too"
    lead = (
        f"{checkpoint.name}: {len(models)} seeds, compared with {cfg.n_layers} step{'s' if cfg.n_layers > 1 else ''} "
        f"of tuned descent as layers of the same kind{clipped}, at scales {SCALES[0]:g} to {LAST:g} of inputs "
        f"and of weights, and on inputs from distributions that training never showed, as they are drawn and divided "
        f"by the "
        f"norm of their context as in the authors' code; {args.n_prompts:,} prompts (seed {args.seed}). The distance "
        f"of two curves is the largest difference of log10 of the loss, over the height of the curve of descent. "
        f"Medians are over seeds, with intervals over seeds and prompts and means in the notes."
    )
    drawn, few = {"trained": models[0], **references}, min(512, args.n_prompts)
    figure = viz.shifted_losses({
        name: measure_shifted_losses(drawn, _drawn(task, name), SCALES, n_prompts=few, seed=args.seed)
        for name in PANELS
    }, half=True)  # fmt: skip
    section = Section("Losses out of distribution", "The first seed and tuned descent.", figure)
    return Comparison(f"Out of distribution ({checkpoint.name})", lead, rows, [section])


@cache
def _tuned(task: LinearRegression, steps: int, looped: bool, clip: float | None) -> dict[str, Tuned]:
    """Descent with as many steps as the model has layers, tuned with the model's clip in place."""
    prompts = task.sample(N_TUNING if clip is None else N_CLIPPED, seed=TUNING_SEED, dtype=torch.float64)

    best = partial(tune, prompts, steps, clip)
    tuned = {DESCENT: best()}
    if steps > 1:
        tuned[PLUS_PLUS] = best(gamma=True)
        if not looped and steps < 12:
            tuned[EACH] = best(gamma=True, per_step=True)
    return tuned


@cache
def _tuned_elsewhere(task: LinearRegression, steps: int, clip: float, per_step: bool) -> Tuned:
    """GD++ with the least loss on another draw of prompts: how well its curves are known."""
    prompts = task.sample(N_CLIPPED, seed=TUNING_SEED + 1, dtype=torch.float64)
    return tune(prompts, steps, clip, gamma=True, per_step=per_step)


def as_layers(learner: Tuned, cfg: TransformerConfig) -> HookedTransformer:
    """Tuned descent as layers, whose tokens are clipped where the model's are (A.2: for both)."""
    return descent_layers(learner, cfg.n_layers, cfg.token_clip, x_dim=cfg.x_dim, n_context=cfg.n_context)


def _drawn(task: LinearRegression, panel: str) -> LinearRegression:
    """Where a panel's prompts come from."""
    foreign = {"inputs": FOREIGN_INPUTS, "normalize_inputs": panel.endswith("norm")}
    return task.replace(**foreign) if panel.startswith("foreign") else task


def _panels(
    learners: Mapping[str, Learner], task: LinearRegression, args: Any
) -> dict[str, dict[str, Float[Tensor, "resample scale"]]]:
    """Mean squared errors by panel and learner, on the prompts and on resamples of them."""
    panels = {}
    for panel in PANELS:
        measured = measure_shifted_losses(
            learners, _drawn(task, panel), SCALES, scaled="weight_scale" if panel == "weight scale" else "input_scale",
            n_prompts=args.n_prompts, seed=args.seed,
        )  # fmt: skip
        panels[panel] = dict(zip(measured.learners, resampled_means(measured.squared_errors).unbind(1), strict=True))
    return panels


def distance(
    curve: Float[Tensor, "*resample scale"], reference: Float[Tensor, "*resample scale"], chosen: Tensor | None = None
) -> Float[Tensor, "*resample"]:
    """Largest difference of two curves' logarithms over the height of the second; at the chosen scales."""
    apart, logs = (curve.log() - reference.log()).abs(), reference.log()
    return (apart if chosen is None else apart[..., chosen]).amax(-1) / (logs.amax(-1) - logs.amin(-1))


def _of(curves: Mapping[str, Float[Tensor, "resample scale"]], name: str) -> Float[Tensor, "seed resample scale"]:
    return torch.stack([curve for label, curve in curves.items() if label.startswith(name)])


def _rows(
    panel: str, curves: Mapping[str, Float[Tensor, "resample scale"]], checkpoint: Checkpoint, main: str, n_prompts: int
) -> list[Row]:
    """How far the seeds' curves, and those of other learners, are from that of descent."""
    trained, reference, scales = _of(curves, "trained"), curves[main], torch.tensor(SCALES)
    found: dict[str, tuple[str | None, Tensor]] = {
        f"distance from the curve of {main}": ("like it", distance(trained, reference)),
        f"distance from the curve of {main}, scales up to 1": (None, distance(trained, reference, scales <= 1)),
        f"distance from the curve of {main}, scales above 1": (None, distance(trained, reference, scales > 1)),
        f"loss over that of {main} at scale {LAST:g}": (None, (trained / reference)[..., -1]),
    }
    if any(name.startswith("half-way") for name in curves):
        found[f"distance of what is half-way to {main}"] = "like it", distance(_of(curves, "half-way"), reference)
    rows = [
        Row(f"{panel}: {quantity}", published, *over_resamples(values.T, checkpoint, n_prompts))
        for quantity, (published, values) in found.items()
    ]
    for name in (DESCENT, PLUS_PLUS, EACH, ELSEWHERE):
        if name in curves and name != main:
            apart = distance(curves[name], reference)[:, None]
            words = f"{panel}: distance of {name} from the curve of {main}"
            rows.append(Row(words, None, crossed_median_interval(apart, n_prompts)[0], f"model, {n_prompts:,} prompts"))
    return rows


def _robust_rows(panels: Mapping[str, Mapping[str, Tensor]], checkpoint: Checkpoint, main: str, n: int) -> list[Row]:
    """The seeds' losses over that of descent on the task itself, and how much more it is where a panel ends."""

    def over(panel: str, at: int) -> Float[Tensor, "resample seed"]:
        return (_of(panels[panel], "trained") / panels[panel][main])[..., at].T

    task = over(PANELS[0], SCALES.index(1.0))
    found = {f"loss over that of {main} on the task itself": task} | {
        f"{panel}: loss over that of {main} at scale {LAST:g}, over the same on the task itself": over(panel, -1) / task
        for panel in panels
    }
    return [Row(words, None, *over_resamples(values, checkpoint, n)) for words, values in found.items()]


def _early_rows(checkpoint: Checkpoint, tuned: Mapping[str, Tuned], task: LinearRegression, seed: int) -> list[Row]:
    """Alignment where that with gradient descent was closest, and at the end (Fig. 3, centre)."""
    if checkpoint.snapshots is None or PLUS_PLUS not in tuned:
        return []
    learners = {"gradient descent": tuned[DESCENT], "GD++": tuned.get(EACH, tuned[PLUS_PLUS])}
    prompts = task.sample(N_ALIGNED, seed=seed, dtype=torch.float64)
    plain = align_over_training(checkpoint, tuned[DESCENT], prompts).sensitivity_cosine
    at = plain.nan_to_num(-1).argmax(0)
    steps = torch.tensor(checkpoint.snapshots.steps, dtype=torch.float64)

    def row(words: str, name: str, snapshots: list[int], published: str | None) -> Row:
        models = [checkpoint.models_at(i)[seed].double() for seed, i in enumerate(snapshots)]
        cosines = torch.stack([align(model, learners[name], prompts).sensitivity_cosine for model in models])
        quantity = f"cosine with {name} {words}"
        return Row(quantity, published, *over_seeds_and_prompts(cosines, checkpoint))

    early, last = "where it is closest to gradient descent", [len(steps) - 1] * len(at)
    return [
        Row(f"step {early}", None, *over_seeds(steps[at].tolist(), checkpoint, median=True)),
        row(early, "gradient descent", at.tolist(), "near 1"),
        row(early, "GD++", at.tolist(), None),
        row("at the end", "gradient descent", last, None),
        row("at the end", "GD++", last, "near 1"),
    ]


if __name__ == "__main__":
    compare.run()
