"""Matches of each seed's layers with families of algorithms, and the rows made from them."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mechicl.algorithms import cards
from mechicl.algorithms.card import Algorithm, Freedom
from mechicl.algorithms.descent_cards import GRADIENT_DESCENT
from mechicl.algorithms.least_squares import RIDGE_PATH
from mechicl.algorithms.newton import NEWTON
from mechicl.analysis import Lens, Match, Readouts, fit_readouts, match
from mechicl.analysis.behaviour import rank_families, regressed_weights
from mechicl.analysis.behaviour.growth import Growth
from mechicl.analysis.behaviour.matching import FamilyRanking, Similarity
from mechicl.analysis.layers import LayerErrors
from mechicl.analysis.layers.layer_learners import LayerLearner, trajectories
from mechicl.analysis.layers.readouts import fit_each
from mechicl.checkpoints.study import Models
from mechicl.learners import IterativeLearner, Trajectory
from mechicl.models import PromptedModel, build
from mechicl.reports.published import published
from mechicl.reports.rows import Row, above, near, over_models, seeds_and_prompts
from mechicl.statistics import crossed_interval, interval
from mechicl.tasks import Task

_SOURCE = "fu2024"
N_SCALE, SCALE_SEED = 4096, 2**31  # prompts that decide the step size of gradient descent
PAPER_GRID = (1, *range(50, 1301, 50))
"""Numbers of gradient descent steps in Figs. 2, 4 and 12: none between 1 and 50."""
RIVALS = ("gradient descent", "ridge path", "steepest descent", "conjugate gradients", "Chebyshev")
"""Rivals of Newton's method. Only the first is in the paper; the second has no iterations."""
GROWING = ("Newton", "gradient descent", "ridge path", "steepest descent")
PUBLISHED_GROWTH = {
    "Newton": ("linear, about 3 a layer in layers 3 to 9", "linear"),
    "gradient descent": ("exponential", "exponential"),
}
QUERIES = 2  # for each dimension of the inputs, to regress weights on
PER_LAYER, ONE_READOUT = "errors, a readout a layer", "errors, one readout for all layers"
GRID = "gradient descent on the paper's grid"
OTHER_FREEDOMS: tuple[Freedom, ...] = ("fixed", "tuned per step")
EXTRA: dict[str, tuple[Algorithm, Freedom]] = {
    f"{card.name}, {freedom}": (card, freedom) for card in (NEWTON, GRADIENT_DESCENT) for freedom in OTHER_FREEDOMS
}
"""Newton's method and gradient descent with other freedom than the rest, which adapts to each prefix."""
RIVAL_PAIRS = [("Newton", "gradient descent, fixed")] + [
    (f"Newton, {freedom}", f"gradient descent, {freedom}") for freedom in OTHER_FREEDOMS
]
"""Families that are also compared: as published (one step size for all prefixes), and with equal freedom."""
IN_ITS_PLACE = "a ridge path in the model's place"


@dataclass(frozen=True, eq=False)
class MatchedSeed:
    """Matches of one model's layers with every family, by compared quantity (such as "errors") and by family."""

    readouts: Readouts  # fitted readouts for each layer and point; errors and weights are read with them
    errors: LayerErrors  # held-out errors of the readouts
    matches: dict[str, dict[str, Match]] = field(default_factory=dict)
    rankings: dict[str, FamilyRanking] = field(default_factory=dict)  # families by similarity, by quantity
    # growth of the families' best steps over layers, where enough layers have one.
    growths: dict[str, dict[str, Growth]] = field(default_factory=dict)


class LayerMatching:
    """Matches models' layers with families; the families' trajectories are computed once for all seeds.

    Arguments are those of `match_layers`; `resamples` are those of the prompts, for the intervals of growth.
    """

    def __init__(
        self, task: Task, similarities: Sequence[Similarity], *, n_prompts: int, n_fitting: int, seed: int,
        shared: bool, resamples: int,
    ):  # fmt: skip
        self.fitting = task.sample(n_fitting, seed=seed)
        self.prompts = task.sample(n_prompts, seed=seed + 1)
        self.queries = task.sample(QUERIES * task.x_dim, seed=seed + 2).query.xs
        self.similarities, self.shared = tuple(similarities), shared
        self.resamples = resamples
        scale = task.sample(N_SCALE, seed=SCALE_SEED)
        learners: dict[str, IterativeLearner] = {
            **reference_families(task),
            GRID: GRADIENT_DESCENT.on(scale, "fixed", steps=PAPER_GRID),
            **{name: card.on(scale, freedom) for name, (card, freedom) in EXTRA.items()},
        }
        self.families = {name: learner.trajectory(self.prompts) for name, learner in learners.items()}
        known = learners if "weights" in similarities else {}
        self.with_weights = {name: each.trajectory(self.prompts, with_weights=True) for name, each in known.items()}

    def of(self, model: Any) -> MatchedSeed:
        """Match a model's layers with every family."""
        if self.shared and "errors" in self.similarities:
            # every point of a prompt is a sample of a shared readout, so that half of the prompts suffice
            n = len(self.fitting)
            readouts, shared = fit_each(model, self.fitting, {False: n, True: n // 2})
            learners: list[LayerLearner] = [readouts, shared]
            learners += [Lens(model)] if getattr(model, "reads_out", False) else []
        else:
            learners = [readouts := fit_readouts(model, self.fitting)]
        trajectory, *others = trajectories(learners, self.prompts)
        errors = LayerErrors.of(trajectory, self.prompts, at="points")
        matched = MatchedSeed(readouts, errors)
        if "weights" in self.similarities:
            # as in the paper, A.3.1: regressed on queries from the inputs' distribution
            weights = regressed_weights(readouts, self.prompts, self.queries)
            trajectory = dataclasses.replace(trajectory, weights=weights)
        for similarity in self.similarities:
            self._add(matched, similarity, trajectory, similarity)
        for label, each in zip((PER_LAYER, ONE_READOUT), others, strict=False):
            self._add(matched, label, each)
        return matched

    def ridge_path_rows(self, n_layers: int) -> list[Row]:
        """Measure the growths for a ridge path in the model's place, as a control."""
        rows: list[Row] = []
        for similarity in self.similarities:
            with_weights = similarity == "weights"
            families = self.with_weights if with_weights else self.families
            steps = tuple(range(1, 2 * n_layers + 2, 2))  # two halvings a layer
            path = RIDGE_PATH.on(self.prompts, steps=steps).trajectory(self.prompts, with_weights=with_weights)
            trajectory = dataclasses.replace(path, steps=tuple(range(n_layers + 1)))
            matches = {
                name: match(trajectory, families[name], self.prompts, similarity=similarity)
                for name in ("Newton", "gradient descent")
            }
            growths = fit_growths(matches, self.resamples)
            rows += growth_rows(f"{similarity}, {IN_ITS_PLACE}", [growths], list(matches), with_source=False)
        return rows

    def _add(self, matched: MatchedSeed, label: str, trajectory: Trajectory, similarity: Similarity = "errors") -> None:
        families = self.with_weights if similarity == "weights" else self.families
        matches = {
            name: match(trajectory, each, self.prompts, similarity=similarity) for name, each in families.items()
        }
        matched.matches[label] = {name: each for name, each in matches.items() if name not in (GRID, *EXTRA)}
        matched.rankings[label] = rank_families(matches)
        matched.growths[label] = fit_growths({name: matches[name] for name in GROWING}, self.resamples)


def reference_families(task: Task) -> dict[str, IterativeLearner]:
    """Return every algorithm that has steps to match layers with, by name."""
    prompts = task.sample(N_SCALE, seed=SCALE_SEED)
    known = {card.layer_name or card.name: card.on(prompts) for card in cards() if card.path is not None}
    return {name: known[name] for name in (*GROWING, *RIVALS, *known)}


def untrained_rows(model: Any, task: Task) -> list[Row]:
    """Match the layers of an untrained model of this config, as a control."""
    if not isinstance(model, PromptedModel):
        return []
    readouts = fit_readouts(build(model.cfg, seed=1_000_003).eval(), task.sample(1024, seed=0), progress=False)
    prompts = task.sample(256, seed=1)
    trajectory, rows = readouts.trajectory(prompts), []
    errors = trajectory.step_errors(prompts).mean((1, 2)).double()
    ratio = Row("untrained model: MSE of the first layer over the last one's, all points", None,
                (errors[1] / errors[-1]).item())  # fmt: skip
    for name, learner in reference_families(task).items():
        if name in GROWING:
            best = match(trajectory, learner, prompts).best()[-1]
            quantity = f"untrained model, errors: last layer and its best {name} step"
            rows.append(Row(quantity, None, best.similarity, "prompts", f"step {best.column:g}"))
    return [ratio, *rows]


def fit_growths(matches: Mapping[str, Match], resamples: int) -> dict[str, Growth]:
    """Fit growths where at least five layers have their best match inside the steps that were tried."""
    rows = {name: matched.growth_rows() for name, matched in matches.items()}
    return {name: matches[name].growth(each, resamples=resamples) for name, each in rows.items() if len(each) >= 5}


def seed_rows(label: str, seeds: Sequence[MatchedSeed], checkpoint: Models) -> list[Row]:
    """Make all rows of one compared quantity: last layer, growth, differences from Newton, the nearest family."""
    own = label in ("errors", "normalised errors", "weights")
    rows = _last_layer(label, seeds, checkpoint) if own else []
    rows += growth_rows(label, [seed.growths[label] for seed in seeds], GROWING, checkpoint)
    rankings = [seed.rankings[label] for seed in seeds]
    rivals = [("Newton", rival) for rival in ((*RIVALS, GRID) if own else ("gradient descent", "ridge path"))]
    for first, rival in (*rivals, *(RIVAL_PAIRS if own else ())):
        claim = rival == "gradient descent" and label != "normalised errors"
        differences = torch.stack([ranking.of(first) - ranking.of(rival) for ranking in rankings], 1)
        for layer, values in zip(rankings[0].rows, differences, strict=True):
            if layer:
                measured = crossed_interval(values) if len(values) > 1 else interval(values[values.isfinite()])
                over = seeds_and_prompts(*values.shape) if len(values) > 1 else "prompts"
                rows.append(Row(f"{label}: layer {layer:g}, best {first} minus best {rival}",
                                "positive (Fig. 7)" if claim else None, measured, over, "steps chosen on other prompts",
                                above(measured, 0) if claim else None, _SOURCE if claim else ""))  # fmt: skip
    if own:
        rows += [over_models(f"{label}: layer {layer:g}, similarity to the best Newton step",
                             [each.best_similarities("Newton")[i] for each in rankings], checkpoint)
                 for i, layer in enumerate(rankings[0].rows) if layer]  # fmt: skip
    over = f"{len(seeds)} seeds" if len(seeds) > 1 else ""
    rows += [Row(f"{label}: layer {layer:g}, nearest family", None, _nearest(rankings, layer), over)
             for layer in rankings[0].rows[1:]]  # fmt: skip
    return rows


def _last_layer(label: str, seeds: Sequence[MatchedSeed], checkpoint: Models) -> list[Row]:
    printed = published("fu2024_similarity_of_errors")
    last = {
        "Newton": max(filter(None, printed["newton_layer12_by_iteration_1_to_23"])),
        "gradient descent": max(printed["gd_layer12_by_steps"].values()),
    }
    rows = []
    for name in seeds[0].matches[label]:
        best = [seed.matches[label][name].best()[-1] for seed in seeds]
        steps = ", ".join(f"{b.column:g}" + f" ({b.low:g} to {b.high:g})" * (b.low < b.high) for b in best)
        known = last.get(name) if label == "errors" else "near 1 (Fig. 7)" if name == "OLS" else None
        note = f"step{'s' * (len(best) > 1)} {steps}" if len(seeds[0].matches[label][name].columns) > 1 else ""
        check = (lambda value: near(value, 1)) if label == "weights" and name == "OLS" else None
        rows.append(over_models(f"{label}: last layer and its best {name} step", [b.similarity for b in best],
                                checkpoint, known, note, check, _SOURCE if known else ""))  # fmt: skip
    return rows


def growth_rows(
    label: str, growths: Sequence[Mapping[str, Growth]], families: Sequence[str],
    checkpoint: Models | None = None, *, with_source: bool = True,
) -> list[Row]:  # fmt: skip
    """Make rows of the growth of the best steps: its kind for each seed, and rates over seeds with enough layers."""
    rows = []
    names = list(checkpoint.record.get("seeds", range(len(growths)))) if checkpoint else []
    for family in families:
        claim, kind = (PUBLISHED_GROWTH.get(family) if with_source else None) or (None, None)
        each = [seed.get(family) for seed in growths]
        for i, growth in enumerate(each):
            seed = f", seed {names[i]}" if len(each) > 1 else ""
            measured, over, note = "cannot be determined", "", "fewer than 5 layers match a step inside those tried"
            if growth is not None:
                measured, over = growth.better, f"layers {growth.rows[0]:g} to {growth.rows[-1]:g}"
                note = (
                    f"best steps {', '.join(f'{k:g}' for k in growth.columns)}; AICc {growth.linear_aic:.1f} (linear), "
                    f"{growth.exponential_aic:.1f} (exponential); linear in {growth.linear_share:.0%} of resamples"
                )
            rows.append(Row(f"{label}: {family}, growth of the best step with the layer{seed}", claim, measured, over,
                            note, measured == kind if claim and growth else None, _SOURCE))  # fmt: skip
        grown = [growth for growth in each if growth is not None]
        if grown:
            note = f"{len(grown)} of {len(each)} seeds" if len(grown) < len(each) else ""
            models = checkpoint if len(grown) == len(each) else None
            slope = 3 if family == "Newton" and with_source else None
            rows += [
                over_models(f"{label}: {family}, steps a layer (linear fit)", [g.slope for g in grown], models,
                            slope, note, source=_SOURCE if slope else ""),
                over_models(f"{label}: {family}, doublings a layer (exponential fit)", [g.doubling for g in grown],
                            models, note=note),
            ]  # fmt: skip
    ratios = torch.tensor([
        seed["Newton"].slope.mean / seed["gradient descent"].doubling.mean
        for seed in growths if {"Newton", "gradient descent"} <= set(seed)
    ])  # fmt: skip
    several = len(ratios) > 1
    measured = interval(ratios) if several else ratios.item() if len(ratios) else "cannot be determined"
    note = "2 if both only follow how far the errors have shrunk: (1 - αλ²)^(2^k) against (1 - aλ)^k"
    quantity = f"{label}: Newton iterations for each doubling of gradient descent steps"
    return [*rows, Row(quantity, None, measured, "seeds" if several else "", note)]


def _nearest(rankings: Sequence[FamilyRanking], layer: float) -> str:
    """The nearest family and those tied with it: over seeds if there are several, else over prompts."""
    if len(rankings) == 1:
        tied = rankings[0].nearest(layer, without=(GRID, *EXTRA))
    else:
        families = [name for name in rankings[0].families if name not in (GRID, *EXTRA)]
        i = rankings[0].rows.index(layer)
        values = {name: torch.stack([ranking.of(name)[i] for ranking in rankings]) for name in families}
        order = sorted(families, key=lambda name: -values[name].nanmean().nan_to_num(nan=-2.0).item())
        best = values[order[0]]
        tied = [name for name in order if name == order[0] or crossed_interval(best - values[name]).low <= 0]
    return f"{tied[0]}; as near: {', '.join(tied[1:])}" if tied[1:] else tied[0]
