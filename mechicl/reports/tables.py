"""The report on a learner of tables: losses next to estimators, its kind and family, and which cells carry labels."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mechicl import viz
from mechicl.analysis import Identification, ablate, identify_on_tables, patch
from mechicl.interop import from_sklearn
from mechicl.learners import AlgorithmLearner, Learner, squared_errors
from mechicl.models import LayeredModel, TableTransformer
from mechicl.prompts import Prompts, Tables
from mechicl.reports.comparison import Comparison, Measured, Section
from mechicl.reports.kind import HISTORY, Kind, Part
from mechicl.reports.rows import Row
from mechicl.reports.verdict import NEAR, NOT_TESTED, Answer, Fact, Verdict, capital, has_learned, which_algorithm
from mechicl.statistics import crossed_interval, interval
from mechicl.viz import elements as draw
from mechicl.viz.behaviour import verdict_figure

N_QUERIES, N_IDENTIFY, N_PATCHED, N_ROWS = 16, 24, 64, 50
MEAN, RESTORED = "the mean label of the context", "share of the labels' effect restored in"
_WORDS = {
    "loss": "Squared error of predictions (of probabilities, summed over classes), on tables that no learner has seen. "
    "Intervals are over tables. Estimators have scikit-learn's defaults, but for ridge regression's penalty, "
    "which is chosen by cross-validation, and read standardized columns.",
    "learner": "Each family of estimators is fitted to the learner's predictions on 8 tables, and compared on others. "
    "Distances are squared differences of predictions over their squared distance from the mean label.",
    "kind": "The first panel: how far predictions change where they should not if it had the property. The second: how "
    "much the label of one row changes a prediction, by the row's distance from the row to predict.",
    "cells": "The context's labels are exchanged between tables, and the right ones restored in one column of the "
    "stream after each layer, or in the row to predict. Cells are the share of the loss that this recovers. "
    f"Tables have at most {N_ROWS} rows here.",
    "heads": "Change of the loss when a head's output is replaced by its mean over tables.",
}


def _estimators(classes: bool) -> dict[str, Any]:
    from sklearn import ensemble, linear_model, neighbors
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    penalties = [10.0**power for power in range(-2, 4)]
    known: dict[str, Any] = {
        "logistic regression": linear_model.LogisticRegression(max_iter=1000),
        "nearest neighbours": neighbors.KNeighborsClassifier(), "a random forest": ensemble.RandomForestClassifier(),
    } if classes else {
        "ridge regression": linear_model.RidgeCV(penalties), "nearest neighbours": neighbors.KNeighborsRegressor(),
        "a random forest": ensemble.RandomForestRegressor(),
    }  # fmt: skip
    return {
        name: from_sklearn(make_pipeline(StandardScaler(), each), probabilities=classes) for name, each in known.items()
    }


def _loss(kind: "OfTables") -> Measured:
    losses = {kind.study.name: kind.squared_errors[0], **{name: kind.loss_of(name) for name in kind.rivals}}
    name = "Brier's score" if kind.study.task.has_classes else "squared error (MSE)"
    intervals = [interval(values) for values in losses.values()]
    rows = [Row(f"{name}, {who}", None, value, "tables") for who, value in zip(losses, intervals, strict=True)]
    if len(kind.models) > 1:
        rows.append(Row(f"{name}, all seeds", None, crossed_interval(kind.squared_errors), "seeds"))
    drawn = draw.interval_dots("Losses", name, list(losses), intervals)
    return rows, [Section("How good is it?", _WORDS["loss"], drawn)], {}


def _learner(kind: "OfTables") -> Measured:
    found = kind.identified
    rows = [
        Row(f"distance from {match.name}, fitted to the learner", None, found.distance(match), "tables", "", share=True)
        for match in found.matches[:3]
    ]
    prints = found.fingerprint
    assert prints is not None
    rows += [Row(f"violation: {name}", None, prints.violation(name), "tables") for name in prints.violations]
    sections = [
        Section("Which family of estimators?", _WORDS["learner"], viz.plot(found, title="Distances of families")),
        Section("What kind of learner?", _WORDS["kind"], viz.plot(prints, title="Properties")),
    ]
    return rows, sections, {"families": found.to_dataframe().to_dict("records")}


def _no_cells(kind: "OfTables") -> str:
    model = kind.study.model
    if not isinstance(model, LayeredModel):
        return f"{type(model).__name__} only predicts: mechicl.wrap(module, ..., layers=...) opens a torch module"
    return "" if isinstance(model, TableTransformer) else "patch and ablate open a wrapped model of tables"


def _cells(kind: "OfTables") -> Measured:
    model, task = kind.study.model, kind.study.task
    prompts = task.replace(n_context=min(task.n_context, N_ROWS)).whole(1).sample(N_PATCHED, seed=kind.seed + 1)
    exchanged = Prompts(prompts.xs, torch.cat([prompts.ys[:, :-1].roll(1, 0), prompts.ys[:, -1:]], 1))
    layers = range(model.cfg.n_layers)
    columns = patch(model, prompts, exchanged, "cell_post",
                    {"layer": layers, "column": range(prompts.x_dim + 1)})  # fmt: skip
    query = patch(model, prompts, exchanged, "cell_post", {"layer": layers, "pos": [prompts.n_context]})
    rows = [
        Row(f"{RESTORED} {where} after layer {layer}", None, found.recovered_interval(layer, place),
            "tables", share=True)
        for layer in layers for found, place, where in ((columns, prompts.x_dim, "the label's column"),
                                                        (query, 0, "the row to predict"))
    ]  # fmt: skip
    names = [*(f"column {i}" for i in range(prompts.x_dim)), "labels"]
    drawn = viz.patching_grid(columns, title="The stream of one column restored").update_xaxes(
        tickvals=list(map(str, range(len(names)))), ticktext=names)  # fmt: skip
    sections = [Section("Where the labels are", _WORDS["cells"], drawn)]
    for component, what in (("col_z", "columns"), ("row_z", "rows")):
        without = ablate(model, prompts, component, ("layer", "head"))
        drawn = viz.patching_grid(without, title=f"Heads between {what} replaced by their means")
        sections.append(Section(f"Which heads between {what} matter?", _WORDS["heads"], drawn))
    return rows, sections, {"cell_post_recovered": columns.recovered().tolist()}


class OfTables(Kind):
    """Losses next to estimators, family and kind of learner, and what carries labels in a model that can be opened."""

    parts = (
        Part("loss", _loss), Part("learner", _learner), Part("cells", _cells, _no_cells),
        HISTORY,
    )  # fmt: skip
    heading = "What kind of learner of tables is {name}?"
    n_held_out, prompt_seed = 640, 7_000_003
    opens = "learner"

    @property
    def plateau(self) -> None:
        """None, so that the first loss counts."""

    @property
    def traced(self) -> dict[str, Any]:
        """Nothing: the history is that of the loss."""
        return {}

    @cached_property
    def held_out(self) -> Prompts:
        """Prompts of tables with 16 rows to predict each, in order."""
        return self._tables.prompts()

    @cached_property
    def _tables(self) -> Tables:
        task = self.study.task.whole(N_QUERIES)
        return task.sample_tables(max(2, self.n_prompts // task.n_queries), seed=self.seed).to(torch.float64)

    def _by_table(self, learner: Any) -> Tensor:
        """Squared errors of a learner, summed over classes: means of the rows to predict of each table."""
        errors = squared_errors(learner, self.held_out)[:, 0] * self.held_out.y_dim
        return self._tables.means(errors)

    @cached_property
    def squared_errors(self) -> Tensor:
        """Squared errors of the models `[seed table]`."""
        return torch.stack([self._by_table(model) for model in self.models])

    @cached_property
    def rivals(self) -> dict[str, Learner]:
        """The mean label, three estimators, and the learners to compare with."""
        mean = AlgorithmLearner(lambda prompts: prompts.ys[:, :-1].mean(1))
        return self.study.with_compared({MEAN: mean, **_estimators(self.study.task.has_classes)})

    @cached_property
    def _losses(self) -> dict[str, Tensor]:
        return {}

    def loss_of(self, rival: str) -> Tensor:
        """Squared errors of a rival `[table]`, measured on first use: not every section needs all."""
        if rival not in self._losses:
            self._losses[rival] = self._by_table(self.rivals[rival])
        return self._losses[rival]

    @property
    def learned(self) -> tuple[str, str, Fact]:
        """The loss of the opened model compared with that of the mean label and of an estimator."""
        some = {name: self.loss_of(name) for name in list(self.rivals)[:2]}
        name = "Brier's score" if self.study.task.has_classes else "squared error"
        return has_learned(self.squared_errors[0], some, name)

    @cached_property
    def identified(self) -> Identification:
        """Families of estimators, ranked, and the fingerprint."""
        return identify_on_tables(self.study.model, self.study.task, n_tables=N_IDENTIFY)

    def verdict(self, comparison: Comparison) -> Verdict:
        """Name the family if one is near, and the kind of learner."""
        found = self.identified
        answer: Answer = which_algorithm(found, nouns=("family of estimators", "families of estimators"))
        picture = verdict_figure(found, answer.match, answer.rivals, near=NEAR, zero="the mean label")
        picture.update_layout(title_text="Left unexplained by the nearest families")
        picture.update_traces(name="other families", selector={"name": "other algorithms"})
        sentences = {"Which family?": answer.words}
        facts = [*answer.facts]
        restored = [row for row in comparison.rows if row.quantity.startswith(f"{RESTORED} the row to predict")]
        if there := next((row for row in restored if row.ends[1] > 0.5), None):
            place = there.quantity.removeprefix(f"{RESTORED} ")
            facts.append((str(there), f"of the labels' effect has reached {place}; before, it is less than half"))
        gaps = [] if restored else ["what carries the predictions inside: the model cannot be opened"]
        gaps.append("tables of other sizes and of other origin")
        sentences[NOT_TESTED] = f"{capital('; '.join(gaps))}."
        assert found.fingerprint is not None
        kind = f"Kind: {found.fingerprint.description}."
        return Verdict(answer.headline, sentences, picture, answer.numbers, facts, kind)
