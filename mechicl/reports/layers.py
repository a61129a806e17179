"""The report on models of many layers: which iteration of which algorithm each layer matches (Fu et al. 2024)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from mechicl import viz
from mechicl.analysis import Match
from mechicl.analysis.behaviour import Growth
from mechicl.analysis.behaviour.matching import Similarity
from mechicl.analysis.layers import LayerErrors
from mechicl.checkpoints import Checkpoint, CheckpointError
from mechicl.prompts import Prompts
from mechicl.reports.comparison import Comparison, Measured, Section
from mechicl.reports.kind import ALGORITHM, CAUSES, FINETUNING, HEADS, Kind, Part
from mechicl.reports.layer_matches import GRID, GROWING, LayerMatching, seed_rows, untrained_rows
from mechicl.reports.rows import Row
from mechicl.reports.verdict import Verdict
from mechicl.statistics import interval, ratio_interval
from mechicl.viz.behaviour import match_curve

N_HELD_OUT = 1024  # the report and analyses/fu_matching.py match on the same prompts and the same grids
RESAMPLES = {1: 100}  # of the prompts, for the growth of one seed; of several, seeds give the interval
LEFT_OUT = tuple(f"minus best {rival}" for rival in ("conjugate gradients", "Chebyshev", GRID))


def match_layers(
    checkpoint: Checkpoint,
    *,
    similarities: Sequence[Similarity] = ("errors",),
    n_prompts: int = N_HELD_OUT,
    n_fitting: int = 4096,
    seed: int = 0,
    shared: bool = True,
    progress: bool = True,
) -> Measured:
    """Fit readouts, and match every layer of every seed with every family.

    Newton's method is compared with gradient descent, as in the paper, and with rivals that the paper does not try: a
    ridge path, which has no iterations, steepest descent, conjugate gradients and Chebyshev's polynomials. Steps are
    chosen on half of the prompts and similarities measured on the others. Rows are over seeds if there are several, and
    over prompts otherwise.

    Args:
        checkpoint: with interleaved, causal models and their task in the record.
        similarities: what to compare.
        n_prompts: held-out prompts.
        n_fitting: prompts to fit readouts on.
        seed: of the fitting prompts; the held-out ones have the next.
        shared: match errors also by one readout a layer for all points, and by the model's own for all layers.
        progress: show a progress bar.

    Raises:
        CheckpointError: a model of another kind.

    Source: Fu et al. 2024, section 4 and B.1 to B.4.
    """
    model, task = checkpoint.models[0], checkpoint.task
    if not model.cfg.one_pass:
        raise CheckpointError(
            f"layers are matched on interleaved prompts with causal keys; {checkpoint.name} has "
            f"{model.cfg.prompt_format} prompts with {model.cfg.keys} keys"
        )
    matching = LayerMatching(
        task, similarities, n_prompts=n_prompts, n_fitting=n_fitting, seed=seed, shared=shared, progress=progress,
        resamples=RESAMPLES.get(len(checkpoint.models), 20),
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
        label: {f"{layer:g}": [name for name in ranking.nearest(layer) if name != GRID] for layer in ranking.rows[1:]}
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
    rows += matching.resolution_rows(task)
    return rows, sections, data


def _layers(kind: Kind) -> Measured:
    """Without rows that the rows "nearest family" contain, and with an untrained model."""
    rows, sections, data = match_layers(kind.study, n_prompts=kind.n_prompts, progress=kind.progress)
    rows = [row for row in rows if not row.quantity.endswith(LEFT_OUT)]
    return [*rows, *untrained_rows(kind.study.model, kind.study.task)], sections, data


class Layers(Kind):
    """Which iterations layers match, the nearest algorithms, interventions, heads and fine-tuning."""

    parts = (Part("layers", _layers), ALGORITHM, CAUSES, HEADS, FINETUNING)
    n_held_out, prompt_seed = N_HELD_OUT, 0
    no_weights = (
        "Softmax attention, layer norms and MLPs stand between its weights and any construction: nothing is read there."
    )

    @property
    def title(self) -> str:
        """Of the page."""
        return f"Which iteration does each layer match? ({self.study.name})"

    @property
    def lead(self) -> str:
        """What was measured, on what."""
        task = self.study.task
        return (
            f"Layers of {self.study.name} ({self.study.model.cfg.n_layers} layers, d = {task.x_dim}, {task.n_context} "
            f"points), read by linear readouts fitted in closed form, against algorithms on {self.n_prompts:,} "
            f"held-out prompts (seed {self.seed + 1}). Published numbers are of the paper's 12-layer model with d = 20 "
            f"and 40 points. {self.study.chosen}"
        ).rstrip()

    @property
    def data(self) -> dict[str, Any]:
        """The checkpoint's name."""
        return {"checkpoint": self.study.name}

    def verdict(self, comparison: Comparison) -> Verdict:
        """Layers follow the algorithm in the first answer."""
        made = super().verdict(comparison)
        which = f"{made.sentences['Which algorithm?']} {layers_in_words(comparison)}".rstrip()
        return replace(made, sentences={**made.sentences, "Which algorithm?": which})


def layers_in_words(comparison: Comparison) -> str:
    """Which families are nearest to which layers, and how the best steps grow: of rates, not of algorithms."""
    nearest = comparison.data.get("nearest", {}).get("errors", {})
    if not nearest:
        return ""
    words = []
    for families, group in groupby(nearest.items(), lambda item: item[1]):
        layers = [layer for layer, _ in group]
        names = ["least squares" if name == "OLS" else name for name in families]
        either = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]} (none is nearer)"
        words.append(f"layer{f's {layers[0]} to {layers[-1]}' if layers[1:] else f' {layers[0]}'} by {either}")
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
            f" {'; '.join(grows)}: all of them say how fast errors shrink from layer to layer, and none by which "
            f"algorithm, since a ridge path has no iterations."
        )
    return f"Its errors after each layer are matched best: {'; '.join(words)}.{rates}"


def _match_figures(
    similarity: Similarity, matches: Mapping[str, Match], growths: Mapping[str, Growth]
) -> list[Section]:
    """Heatmaps, best-matching steps, and best similarities by layer."""
    compared = "errors" if similarity == "errors" else "induced weights"
    several = {name: matched for name, matched in matches.items() if len(matched.columns) > 1}
    heatmaps = [
        Section(f"Similarity of {compared}: {name}",
                "Mean cosine over held-out prompts; white squares mark each layer's best match.",
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
                "Bands: 95% intervals over prompts (Fig. 7).", best),
    ]  # fmt: skip


def loss_figure(title: str, errors: LayerErrors, prompts: Prompts, labels: Sequence[str] | None = None) -> Section:
    """Loss by number of context points, a line a layer, relative to the mean square of the targets (Fig. 3)."""
    labels = labels or [f"layer {i}" for i in range(len(errors.squared_errors))]
    square = prompts.ys.double().square().mean((1, 2))
    lines = {
        label: [ratio_interval(point, square) for point in layer]
        for label, layer in zip(labels, errors.squared_errors, strict=True)
    }
    points = list(range(errors.squared_errors.shape[1]))
    figure = viz.interval_lines(
        "Loss by number of context points", "context points", "MSE / E y²", points, lines, log_y=True
    )
    return Section(title, "Means with 95% intervals over prompts (Fig. 3).", figure)


def _numbers(matched: Match) -> dict[str, Any]:
    best = [
        {"step": b.column, "low": b.low, "high": b.high, "similarity": b.similarity.mean, "at_edge": b.at_edge}
        for b in matched.best()
    ]
    return {"layers": matched.rows, "steps": matched.columns, "mean": matched.mean().tolist(), "best": best}
