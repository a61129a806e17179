"""Test the similarity of errors of Fu et al. 2024 (A.3.1) on controls, and on layers after more points than d."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.support.script import Option, script
from mechicl import algorithms, viz
from mechicl.analysis import fit_readouts, match
from mechicl.analysis.behaviour import rank_families
from mechicl.analysis.behaviour.matching import Similarity
from mechicl.checkpoints import load_checkpoint
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row, Section
from mechicl.reports.layer_matches import reference_families
from mechicl.reports.rows import seeds_and_prompts
from mechicl.statistics import Interval, crossed_interval, interval

FAMILIES = ("Newton", "gradient descent", "steepest descent", "ridge path")
PUBLISHED, NORMALISED, LATE = "as published", "every number of points equally", "after more than d points alone"
EXCHANGED = "last layer, and the same with errors after more than d points exchanged between prompts"


def late(trajectory: Trajectory, prompts: Prompts) -> tuple[Trajectory, Prompts]:
    """The same predictions and prompts from the point after d points on, whose error the measures leave out."""
    d = prompts.x_dim
    return trajectory.part(slice(None), slice(d, None)), Prompts(prompts.xs[:, d:], prompts.ys[:, d:])


def measures(a: Trajectory, b: Trajectory, prompts: Prompts) -> dict[str, Float[Tensor, "a b prompt"]]:
    """Similarities of all pairs of steps by the three measures, prompt by prompt."""
    kinds: dict[str, Similarity] = {PUBLISHED: "errors", NORMALISED: "normalised errors"}
    found = {name: match(a, b, prompts, similarity=kind, progress=False) for name, kind in kinds.items()}
    (first, part), (second, _) = late(a, prompts), late(b, prompts)
    found[LATE] = match(first, second, part, similarity="normalised errors", progress=False)
    return {name: each.similarities for name, each in found.items()}


def with_errors(prompts: Prompts, errors: Float[Tensor, "prompt point"]) -> Trajectory:
    """A learner with these errors."""
    return Trajectory((1,), (prompts.ys + errors[..., None])[None])


def control_pairs(prompts: Prompts, errors: Float[Tensor, "prompt point"]) -> dict[str, tuple[Trajectory, Trajectory]]:
    """Pairs of learners whose likeness is known; `errors` are a model's, whose sizes some of them have."""
    rng = torch.Generator().manual_seed(0)
    d, shape, first = prompts.x_dim, errors.shape, algorithms.ols(prompts)
    least = (first.predictions[0] - prompts.ys)[..., 0]
    size = errors.square().mean(0).sqrt()

    def consistent() -> Trajectory:
        """Ridge with a penalty for each prompt and number of points, 1e-6 to 1e-2."""
        grid = [10.0**-k for k in range(2, 7)]
        drawn = torch.randint(len(grid), shape, generator=rng)
        each = torch.stack([algorithms.ridge(prompts, penalty=penalty).predictions[0, ..., 0] for penalty in grid])
        return with_errors(prompts, each.gather(0, drawn[None])[0] - prompts.ys[..., 0])

    def interpolating() -> Trajectory:
        """The interpolator of least norm in a random metric."""
        root = torch.eye(d, dtype=prompts.dtype) + 0.3 * torch.randn(d, d, generator=rng, dtype=prompts.dtype)
        return algorithms.ols(Prompts(prompts.xs @ root, prompts.ys))

    def agreeing() -> Trajectory:
        """Least squares after up to d points, then errors of the model's size that have nothing to do with it."""
        noise = size * torch.randn(shape, generator=rng, dtype=prompts.dtype)
        return with_errors(prompts, torch.where(torch.arange(shape[1]) > d, noise, least))

    exchanged = errors.clone()
    exchanged[:, d + 1 :] = errors.roll(1, 0)[:, d + 1 :]
    ridge = [algorithms.ridge(prompts, penalty=penalty) for penalty in (0.1, 0.11)]
    return {
        "ridge, penalties 0.1 and 0.11": (ridge[0], ridge[1]),
        "ridge, two draws of random tiny penalties": (consistent(), consistent()),
        "interpolators of least norm in two random metrics": (interpolating(), interpolating()),
        "least squares up to d points, then two draws of errors": (agreeing(), agreeing()),
        EXCHANGED: (with_errors(prompts, errors), with_errors(prompts, exchanged)),
    }


@script(
    checkpoint="gpt2-8l", n_prompts=1024, n_fitting=4096,
    seed=Option(0, "seed of the prompts for readouts; the held-out ones have the next"),
)  # fmt: skip
def compare(args: Any) -> Comparison:
    """Measure the share of errors, the control pairs, and all layers by the three measures."""
    checkpoint = load_checkpoint(args.checkpoint)
    task, d = checkpoint.task, checkpoint.task.x_dim
    fitting = task.sample(args.n_fitting, seed=args.seed)
    prompts = task.sample(args.n_prompts, seed=args.seed + 1, dtype=torch.float64)
    single = prompts.to(torch.float32)
    layers = [fit_readouts(model, fitting, progress=False).trajectory(single) for model in checkpoint.models]
    layers = [Trajectory(each.steps, each.predictions.double(), each.name) for each in layers]
    last = torch.stack([(each.predictions[-1] - prompts.ys)[..., 0] for each in layers])  # [seed prompt point]
    few, every_point = (last[..., 1:end].square().sum(-1) for end in (d + 1, None))
    over = seeds_and_prompts(*few.shape)
    rows = [
        Row(f"last layer: share of the squared error after 1 to d points, d = {d}", None,
            crossed_interval(few, every_point), over),
    ]  # fmt: skip
    for name, pair in control_pairs(prompts, last[0]).items():
        for measure, values in measures(*pair, prompts).items():
            known = interval(values.flatten()) if values.isfinite().all() else "no errors to compare"
            rows.append(Row(f"{name}: {measure}", None, known, "" if isinstance(known, str) else "prompts"))
    learners = reference_families(task)
    families = {name: learners[name].trajectory(prompts) for name in FAMILIES}
    lines: dict[str, dict[str, list[Interval]]] = {}
    for measure in (PUBLISHED, NORMALISED, LATE):
        lines[measure] = {family: [] for family in FAMILIES}
        rankings = [rank_families(_matches(measure, each, families, prompts)) for each in layers]
        for i, layer in enumerate(rankings[0].rows):
            for family in FAMILIES:
                alike = torch.stack([ranking.of(family)[i] for ranking in rankings])
                lines[measure][family].append(crossed_interval(alike))
                if layer >= 3:
                    rows.append(Row(f"{measure}: layer {layer:g}, similarity to the best {family} step", None,
                                    lines[measure][family][-1], seeds_and_prompts(*alike.shape)))  # fmt: skip
            for rival in FAMILIES[1:] if layer >= 3 else ():
                apart = torch.stack([ranking.of("Newton")[i] - ranking.of(rival)[i] for ranking in rankings])
                rows.append(Row(f"{measure}: layer {layer:g}, Newton minus {rival}", None, crossed_interval(apart),
                                seeds_and_prompts(*apart.shape)))  # fmt: skip
    rows += ceiling_rows(layers, prompts)
    figures = [
        Section(f"Similarity of errors, {measure}", "Means over seeds with intervals over seeds and prompts.",
                viz.interval_lines(measure, "layer", "cosine", [*layers[0].steps], of_family))
        for measure, of_family in lines.items()
    ]  # fmt: skip
    lead = (
        f"{checkpoint.name} (d = {d}, {task.n_context} points), {args.n_prompts:,} held-out prompts. Best steps are "
        f"chosen on half of the prompts, and similarities measured on the others. All families' steps adapt to each "
        f"prefix."
    )
    return Comparison("What the similarity of errors measures", lead, rows, figures, {"checkpoint": checkpoint.name})


def ceiling_rows(layers: Sequence[Trajectory], prompts: Prompts) -> list[Row]:
    """Measure how similar the errors of two seeds are after each layer: the most that an algorithm could reach."""
    pairs = [measures(*pair, prompts) for pair in itertools.combinations(layers, 2)]
    rows = []
    for measure, values in pairs[0].items():
        for i, layer in enumerate(layers[0].steps):
            if layer >= 3 and values[i, i].isfinite().all():
                means = ", ".join(f"{pair[measure][i, i].mean():.3f}" for pair in pairs)
                name = f"{measure}: layer {layer:g}, similarity of two seeds"
                rows.append(Row(name, None, means, "prompts", "each pair of seeds"))
    return rows


def _matches(measure: str, layers: Trajectory, families: Mapping[str, Trajectory], prompts: Prompts) -> dict:
    kind: Similarity = "errors" if measure == PUBLISHED else "normalised errors"
    found = {}
    for name, family in families.items():
        a, b, on = layers, family, prompts
        if measure == LATE:
            (a, on), (b, _) = late(layers, prompts), late(family, prompts)
        found[name] = match(a, b, on, similarity=kind, progress=False)
    return found


if __name__ == "__main__":
    compare.run()
