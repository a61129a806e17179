"""The report on models of many layers: which iteration of which algorithm each layer matches (Fu et al. 2024)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mechicl import algorithms, viz
from mechicl.analysis import Match, Readouts, fit_readouts, match
from mechicl.analysis.behaviour import Growth, regressed_weights
from mechicl.analysis.behaviour.matching import Similarity
from mechicl.analysis.layers import LayerErrors
from mechicl.checkpoints import Checkpoint, CheckpointError
from mechicl.learners import AlgorithmLearner, IterativeLearner
from mechicl.prompts import Prompts
from mechicl.reports.algorithm import AlgorithmQuestion, causes_in_words
from mechicl.reports.comparison import Comparison, Part, Section, published
from mechicl.reports.engine import Kind
from mechicl.reports.opened import heads_and_finetuning
from mechicl.reports.rows import Row
from mechicl.reports.study import Study
from mechicl.reports.verdict import Verdict
from mechicl.statistics import interval, ratio_interval
from mechicl.tasks import Task

N_HELD_OUT = 1024  # the report and analyses/fu_matching.py match on the same prompts and the same grids
NEWTON_STEPS = tuple(range(1, 24))
CHEBYSHEV_STEPS = tuple(range(1, 31))
GD_STEPS = tuple(sorted({round(4096 ** (i / 43)) for i in range(44)}))  # 40 different ones
QUERIES = 8  # that weights are regressed on, for each dimension of the inputs
SIZES = "Published numbers are of the paper's 12-layer model with d = 20 and 40 points."
SOURCE = "fu2024"
_CLAIMS = {
    "Newton": ("linear, about 3 a layer in layers 3 to 9", "is linear"),
    "gradient descent": ("exponential", "is exponential"),
}
NO_WEIGHTS = (
    "Softmax attention, layer norms and MLPs stand between its weights and any construction: nothing is read there."
)


def reference_families(task: Task) -> dict[str, IterativeLearner]:
    """The algorithms that layers are matched with.

    Gradient descent takes the largest step that converges on all of 4096 prompts of the task, always the same ones.
    """
    step_size = algorithms.stable_step_size(task.sample(4096, seed=2**31))
    return {
        "Newton": AlgorithmLearner(algorithms.newton, {"steps": NEWTON_STEPS}),
        "gradient descent": AlgorithmLearner(algorithms.gradient_descent, {"steps": GD_STEPS, "step_size": step_size}),
        "Chebyshev": AlgorithmLearner(algorithms.chebyshev, {"steps": CHEBYSHEV_STEPS}),
        "OLS": AlgorithmLearner(algorithms.ols),
    }


def compare_layers(
    checkpoint: Checkpoint,
    *,
    similarities: Sequence[Similarity] = ("errors",),
    n_prompts: int = N_HELD_OUT,
    n_fitting: int = 8192,
    seed: int = 0,
    progress: bool = True,
) -> Comparison:
    """Fit readouts, match every layer, and put the paper's statements beside what was measured.

    Args:
        checkpoint: with an interleaved, causal model and its task in the record.
        similarities: what to compare.
        n_prompts: held-out prompts.
        n_fitting: prompts to fit readouts on.
        seed: of the fitting prompts; the held-out ones have the next.
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
    readouts = fit_readouts(model, task.sample(n_fitting, seed=seed), progress=progress)
    prompts = task.sample(n_prompts, seed=seed + 1)
    rows, sections = _loss(checkpoint, readouts, prompts)
    data: dict[str, Any] = {"checkpoint": checkpoint.name, "n_prompts": n_prompts, "n_fitting": n_fitting, "seed": seed}
    families = reference_families(task)
    for similarity in similarities:
        trajectory = readouts.trajectory(prompts)
        if similarity == "weights":  # as in the paper, A.3.1: regressed on queries from the inputs' distribution
            queries = task.sample(QUERIES * task.x_dim, seed=seed + 2).query.xs
            trajectory = dataclasses.replace(trajectory, weights=regressed_weights(readouts, prompts, queries))
        matches = {
            name: match(trajectory, learner, prompts, similarity=similarity) for name, learner in families.items()
        }
        growths = _growths(matches)
        rows += match_rows(similarity, matches, growths)
        sections += match_figures(similarity, matches, growths)
        data[similarity] = {name: _numbers(each) for name, each in matches.items()}
    lead = _lead(checkpoint, n_prompts, seed)
    return Comparison(f"Which iteration does each layer match? ({checkpoint.name})", lead, rows, sections, data)


def layers_kind(study: Study, *, n_prompts: int | None = None, progress: bool = True) -> Kind:
    """The comparison of `compare_layers`, the nearest algorithms, what the heads do and what fine-tuning does."""
    question = AlgorithmQuestion(study, progress)
    compared: dict[str, Comparison] = {}

    def layers() -> Part:
        result = compare_layers(study, n_prompts=n_prompts or N_HELD_OUT, progress=progress)
        compared["layers"] = result
        return list(result.rows), list(result.sections), result.data

    opened, on_request, missing = heads_and_finetuning(study, progress=progress)
    parts: dict[str, Callable[[], Part]] = {"layers": layers, "algorithm": question.part, **opened}

    def verdict(comparison: Comparison) -> Verdict:
        made = question.verdict(comparison, NO_WEIGHTS, causes_in_words(comparison.rows))
        sentences = dict(made.sentences)
        sentences["Which algorithm?"] += f" {_layers_in_words(comparison)}".rstrip()
        return replace(made, sentences=sentences)

    return Kind(
        f"Which iteration does each layer match? ({study.name})", f"{_lead(study, n_prompts or N_HELD_OUT)} "
        f"{study.chosen}", parts, verdict, {"checkpoint": study.name}, on_request, missing,
    )  # fmt: skip


def _layers_in_words(comparison: Comparison) -> str:
    """How the best-matching iterations grow with the layer."""
    words = []
    for name in ("Newton", "gradient descent"):
        best = comparison.data.get("errors", {}).get(name, {}).get("best", [])
        growth = f"errors: {name}, growth of the best step with the layer"
        row = next((row for row in comparison.rows if row.quantity == growth), None)
        if not best:
            continue
        steps = ", ".join(f"{'at most ' if b['at_edge'] and b['step'] <= 1 else 'at least ' if b['at_edge'] else ''}"
                          f"{b['step']:g}" for b in best[1:])  # fmt: skip
        unit = "iterations of Newton's method" if name == "Newton" else "steps of gradient descent"
        how = {"linear": ", which grows linearly", "exponential": ", which grows exponentially"}
        grows = how.get(str(row.measured), ", which grows in no way that can be told") if row else ""
        words.append(f"{steps} {unit}{grows}")
    if not words:
        return ""
    return f"Layer by layer its predictions are most like those of {'; and of '.join(words)}."


def _lead(checkpoint: Checkpoint, n_prompts: int, seed: int = 0) -> str:
    model, task = checkpoint.models[0], checkpoint.task
    return (
        f"Layers of {checkpoint.name} ({model.cfg.n_layers} layers, d = {task.x_dim}, {task.n_context} points), read "
        f"by linear readouts fitted in closed form, against algorithms on {n_prompts:,} held-out prompts "
        f"(seed {seed + 1}). {SIZES}"
    )


def match_rows(similarity: Similarity, matches: Mapping[str, Match], growths: Mapping[str, Growth]) -> list[Row]:
    """What the paper says of the matches, beside what was measured."""
    printed = published("fu2024_similarity_of_errors")
    last = {
        "Newton": max(filter(None, printed["newton_layer12_by_iteration_1_to_23"])),
        "gradient descent": max(printed["gd_layer12_by_steps"].values()),
    }
    rows: list[Row] = []
    for name, matched in matches.items():
        best = matched.best()
        rows.append(
            Row(
                f"{similarity}: last layer and its best {name} step",
                last.get(name) if similarity == "errors" else "near 1 (Fig. 7)" if name == "OLS" else None,
                best[-1].similarity,
                "prompts",
                f"step {best[-1].column:g} ({best[-1].low:g} to {best[-1].high:g})" if len(matched.columns) > 1 else "",
                "near 1" if similarity == "weights" and name == "OLS" else "",
                SOURCE,
            )
        )
        if name in growths:
            rows += _growth_rows(f"{similarity}: {name}", _CLAIMS.get(name), growths[name])
    pair = [matches[name].halves() for name in ("Newton", "gradient descent")]
    chosen = [choosing.best_columns() for choosing, _ in pair]
    for i, layer in enumerate(matches["Newton"].rows):
        if layer:
            newton, descent = (
                measured.similarities[i, columns[i]] for (_, measured), columns in zip(pair, chosen, strict=True)
            )
            difference = newton - descent
            name = f"{similarity}: layer {layer:g}, best Newton minus best gradient descent"
            alike = interval(difference[difference.isfinite()])
            rows.append(Row(name, "positive (Fig. 7)", alike, "prompts", "steps chosen on other prompts",
                            "> 0", SOURCE))  # fmt: skip
    return rows


def match_figures(similarity: Similarity, matches: Mapping[str, Match], growths: Mapping[str, Growth]) -> list[Section]:
    """Heatmaps, best-matching steps, and best similarities by layer."""
    compared = "errors" if similarity == "errors" else "induced weights"
    several = {name: matched for name, matched in matches.items() if len(matched.columns) > 1}
    sections = [
        Section(
            f"Similarity of {compared}: {name}",
            "Mean cosine over held-out prompts; white squares mark each layer's best match.",
            viz.match_heatmap(matched, f"Similarity of {compared}"),
        )
        for name, matched in several.items()
    ]
    lines = {name: [best.similarity for best in matched.best()] for name, matched in matches.items()}
    layers = list(next(iter(matches.values())).rows)
    edges = any(best.at_edge for matched in several.values() for best in matched.best())
    sections += [
        Section(
            f"Best-matching steps ({compared})",
            "Bars: 95% intervals from resampled prompts."
            + (" Open circles lie at the edge of the steps that were tried." if edges else "")
            + (" Dotted: the better of a linear and an exponential curve." if growths else ""),
            viz.match_curve(several, growths),
        ),
        Section(
            f"Similarity of each layer with the best of each family ({compared})",
            "Bands: 95% intervals over prompts (Fig. 7).",
            viz.interval_lines(f"Best similarity of {compared}", "layer", "cosine", layers, lines),
        ),
    ]
    return sections


def _growths(matches: Mapping[str, Match]) -> dict[str, Growth]:
    """Fits where there are enough layers whose best match lies inside the steps that were tried."""
    growths = {}
    for name, matched in matches.items():
        rows = matched.growth_rows()
        if len(rows) >= 5:
            growths[name] = matched.growth(rows)
    return growths


def _growth_rows(name: str, claim: tuple[str, str] | None, growth: Growth) -> list[Row]:
    layers = f"layers {growth.rows[0]:g} to {growth.rows[-1]:g}"
    note = (
        f"best steps {', '.join(f'{k:g}' for k in growth.columns)}; AICc {growth.linear_aic:.1f} (linear), "
        f"{growth.exponential_aic:.1f} (exponential); linear in {growth.linear_share:.0%} of resamples"
    )
    return [
        Row(f"{name}, growth of the best step with the layer", claim and claim[0], growth.better, layers, note,
            claim[1] if claim else "", SOURCE),
        Row(f"{name}, steps a layer (linear fit)", 3 if "Newton" in name else None, growth.slope, "prompts",
            source=SOURCE),
        Row(f"{name}, doublings a layer (exponential fit)", None, growth.doubling, "prompts"),
    ]  # fmt: skip


def _loss(checkpoint: Checkpoint, readouts: Readouts, prompts: Prompts) -> tuple[list[Row], list[Section]]:
    errors = readouts.errors(prompts)
    t = min(2 * prompts.x_dim, prompts.n_context)
    per_dimension = interval(errors.squared_errors[-1, t] / prompts.x_dim)
    first_over_last = ratio_interval(errors.squared_errors[1].mean(0), errors.squared_errors[-1].mean(0))
    rows = [
        Row(f"squared error per dimension after {t} points, last layer", None, per_dimension, "prompts"),
        Row("MSE of the first layer over the last one's, all points", None, first_over_last, "prompts"),
    ]
    return rows, [loss_figure(f"{checkpoint.name}: loss after each layer", errors, prompts)]


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
