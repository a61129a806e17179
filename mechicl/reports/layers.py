"""The report on models of many layers: which iteration of which algorithm each layer matches (Fu et al. 2024)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from mechicl import viz
from mechicl.analysis import Match
from mechicl.analysis.behaviour.growth import Growth
from mechicl.analysis.behaviour.matching import Similarity
from mechicl.analysis.layers import LayerErrors
from mechicl.checkpoints import CheckpointError
from mechicl.checkpoints.study import Models
from mechicl.prompts import Prompts
from mechicl.reports.comparison import Comparison, Measured, Section
from mechicl.reports.kind import ALGORITHM, CAUSES, FINETUNING, HEADS, HISTORY, Kind, Part
from mechicl.reports.layer_matches import EXTRA, GRID, GROWING, LayerMatching, seed_rows, untrained_rows
from mechicl.reports.rows import Row
from mechicl.reports.verdict import Verdict
from mechicl.statistics import interval, ratio_interval
from mechicl.viz.behaviour import match_curve

N_HELD_OUT = 1024  # as in analyses/fu2024/fu_matching.py
RIVALS_TAKEN_OFF = tuple(f"minus best {rival}" for rival in ("conjugate gradients", "Chebyshev", GRID, *EXTRA))


def match_layers(
    checkpoint: Models,
    *,
    similarities: Sequence[Similarity] = ("errors", "normalised errors"),
    n_prompts: int = N_HELD_OUT,
    n_fitting: int = 4096,
    seed: int = 0,
) -> Measured:
    """Fit readouts, and match every layer of every seed with every family.

    Newton's method is compared with gradient descent, as in the paper, and with rivals that the paper does not try: a
    ridge path, steepest descent, conjugate gradients and Chebyshev's polynomials. Steps are chosen on half of the
    prompts and similarities measured on the others; rows are over seeds if there are several. Readouts are fitted on
    `n_fitting` prompts of `seed`; one readout per layer for all points, and the model's own, are matched too.
    Other models than interleaved, causal ones are a CheckpointError. Source: Fu et al. 2024, section 4 and B.1 to B.4.
    """
    model, task = checkpoint.models[0], checkpoint.task
    if not model.cfg.one_pass:
        raise CheckpointError(
            f"layers are matched on interleaved prompts with causal keys; {checkpoint.name} has "
            f"{model.cfg.prompt_format} prompts with {model.cfg.keys} keys"
        )
    matching = LayerMatching(
        task, similarities, n_prompts=n_prompts, n_fitting=n_fitting, seed=seed, shared=True,
        resamples=100 if len(checkpoint.models) == 1 else 20,  # of several models, seeds give the interval
    )  # fmt: skip
    seeds = [matching.of(each) for each in checkpoint.models]
    errors, prompts = seeds[0].errors, matching.prompts
    t = min(2 * prompts.x_dim, prompts.n_context)
    first_over_last = ratio_interval(errors.squared_errors[1].mean(0), errors.squared_errors[-1].mean(0))
    rows = [
        Row(f"squared error per dimension after {t} points, last layer", None,
            interval(errors.squared_errors[-1, t] / prompts.x_dim), "prompts"),
        Row("MSE of the first layer over the last one's, all points", None, first_over_last, "prompts"),
    ]  # fmt: skip
    sections = [loss_figure(f"{checkpoint.name}: loss after each layer", errors, prompts)]
    data: dict[str, Any] = {"checkpoint": checkpoint.name, "n_prompts": n_prompts, "n_fitting": n_fitting, "seed": seed}
    for label in seeds[0].matches:
        rows += seed_rows(label, seeds, checkpoint)
    for label in similarities:
        if label in seeds[0].matches:
            matches = seeds[0].matches[label]
            sections += _match_figures(label, matches, seeds[0].growths[label])
            data[label] = {name: _numbers(each) for name, each in matches.items()}
    data["nearest"] = {
        label: {f"{layer:g}": ranking.nearest(layer, without=(GRID, *EXTRA)) for layer in ranking.rows[1:]}
        for label, ranking in seeds[0].rankings.items()
    }
    data["by_seed"] = [
        {
            label: {name: [each.columns[column] for column in each.best_columns()] for name, each in matches.items()}
            for label, matches in one.matches.items()
        }
        for one in seeds
    ]
    rows += matching.ridge_path_rows(model.cfg.n_layers)
    return rows, sections, data


def _layers(kind: Kind) -> Measured:
    """Matches of all layers without rows that "nearest family" contains, and matches of an untrained model."""
    rows, sections, data = match_layers(kind.study, n_prompts=kind.n_prompts)
    rows = [row for row in rows if not row.quantity.endswith(RIVALS_TAKEN_OFF)]
    return [*rows, *untrained_rows(kind.study.model, kind.study.task)], sections, data


class Layers(Kind):
    """Iterations that layers match, the nearest algorithms, interventions, heads and fine-tuning."""

    parts = (Part("layers", _layers), ALGORITHM, CAUSES, HEADS, FINETUNING, HISTORY)
    heading = "Which iteration does each layer match? ({name})"
    remark = "Published numbers are of the paper's 12-layer model with d = 20 and 40 points."
    n_held_out, prompt_seed = N_HELD_OUT, 0
    no_weights = "Its weights are not compared with a construction: none has layers of this kind."

    def verdict(self, comparison: Comparison) -> Verdict:
        """Append the matches of layers to the first answer."""
        made = super().verdict(comparison)
        which = f"{made.sentences['Which algorithm?']} {layers_as_text(comparison)}".rstrip()
        return replace(made, sentences={**made.sentences, "Which algorithm?": which})


def layers_as_text(comparison: Comparison) -> str:
    """Describe which family is nearest to the most layers, and how the best steps grow with the layer."""
    nearest = comparison.data.get("nearest", {}).get("errors", {})
    if not nearest:
        return ""
    counts = Counter(name.replace("OLS", "least squares") for families in nearest.values() for name in families)
    most = max(counts.values())
    names = " and ".join(name for name, n in counts.items() if n == most)
    words = f"After each layer, errors are matched best by {names} in {most} of {len(nearest)} layers, ties included."
    grows = [
        f"{name}'s best step grows {row.measured}ly"
        for name in ("Newton", "gradient descent", "ridge path")
        for row in comparison.rows
        if row.quantity == f"errors: {name}, growth of the best step with the layer"
        and row.measured in ("linear", "exponential")
    ]
    rates = ""
    if grows:
        rates = (
            f" With the layer, {', '.join(grows)}. This growth shows how fast errors shrink, not which algorithm is at "
            f"work: it is as regular for a ridge path, which has no iterations."
        )
    return words + rates


def _match_figures(
    similarity: Similarity, matches: Mapping[str, Match], growths: Mapping[str, Growth]
) -> list[Section]:
    compared = "induced weights" if similarity == "weights" else similarity
    several = {name: matched for name, matched in matches.items() if len(matched.columns) > 1}
    heatmaps = [
        Section(f"Similarity of {compared}: {name}",
                "Mean cosine over held-out prompts. White squares mark each layer's best match.",
                viz.plot(matched, title=f"Similarity of {compared}"))
        for name, matched in several.items() if name in GROWING
    ]  # fmt: skip
    lines = {name: [best.similarity for best in matched.best()] for name, matched in matches.items()}
    layers = list(next(iter(matches.values())).rows)
    words = "Bars: 95% intervals from resampled prompts."
    if any(best.at_edge for matched in several.values() for best in matched.best()):
        words += " Open circles lie at the edge of the steps that were tried."
    if growths:
        words += " Dotted: the better of a linear and an exponential curve."
    best = viz.interval_lines(f"Best similarity of {compared}", "layer", "cosine", layers, lines)
    return [
        *heatmaps,
        Section(f"Best-matching steps ({compared})", words, match_curve(several, growths)),
        Section(f"Similarity of each layer with the best of each family ({compared})",
                "Bands: 95% intervals over prompts.", best),
    ]  # fmt: skip


def loss_figure(title: str, errors: LayerErrors, prompts: Prompts, labels: Sequence[str] | None = None) -> Section:
    """Draw the loss by number of context points, one line per layer, over the mean square of the targets."""
    labels = labels or [f"layer {i}" for i in range(len(errors.squared_errors))]
    drawn = losses_by_points(dict(zip(labels, errors.squared_errors, strict=True)), prompts)
    return Section(title, "Means with 95% intervals over prompts.", drawn)


def losses_by_points(errors: Mapping[str, Float[Tensor, "point prompt"]], prompts: Prompts) -> go.Figure:
    """Draw squared errors by number of context points, relative to the mean square of the targets."""
    square = prompts.ys.double().square().mean((1, 2))
    lines = {name: [ratio_interval(point, square) for point in points] for name, points in errors.items()}
    title, points = "Loss by number of context points", list(range(prompts.n_context + 1))
    return viz.interval_lines(title, "context points", "MSE / E y²", points, lines, log_y=True)


def _numbers(matched: Match) -> dict[str, Any]:
    best = [
        {"step": b.column, "low": b.low, "high": b.high, "similarity": b.similarity.mean, "at_edge": b.at_edge}
        for b in matched.best()
    ]
    rounded = [[float(f"{value:.5g}") for value in row] for row in matched.mean().tolist()]
    return {"layers": matched.rows, "steps": matched.columns, "mean": rounded, "best": best}
