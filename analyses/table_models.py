"""Models of tables: their losses compared with estimators, by number of rows, and which parts carry the predictions.

python analyses/table_models.py
"""

from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegressionCV, RidgeCV
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from analyses.support.script import Option, script
from mechicl.analysis import ablate, patch
from mechicl.checkpoints import load_checkpoint, random_weights
from mechicl.interop import from_sklearn
from mechicl.models import TableTransformer
from mechicl.prompts import Prompts, Tables
from mechicl.reports import Comparison, Row, Section
from mechicl.statistics import crossed_interval, interval, ratio_interval
from mechicl.tasks import TableClassification
from mechicl.viz.elements import interval_lines

SEED = 2_000_003
ROWS = (8, 16, 32, 64, 128)
PENALTIES = tuple(10.0**power for power in range(-2, 4))


def rivals(classes: bool) -> dict[str, Any]:
    """The estimators: linear ones with a penalty chosen by cross-validation, others with scikit-learn's defaults."""
    if classes:
        settings: Any = {"use_legacy_attributes": False, "l1_ratios": (0.0,), "scoring": "accuracy"}
        linear: Any = LogisticRegressionCV(Cs=5, cv=2, max_iter=200, **settings)
        estimators = {"logistic regression": linear, "5 nearest neighbours": KNeighborsClassifier()}
        estimators["random forest"] = RandomForestClassifier()
    else:
        estimators = {"ridge": RidgeCV(PENALTIES), "5 nearest neighbours": KNeighborsRegressor()}
        estimators["random forest"] = RandomForestRegressor()
    return {
        name: from_sklearn(make_pipeline(StandardScaler(), each), probabilities=classes)
        for name, each in estimators.items()
    }


def losses(predicted: Float[Tensor, "table query y"], tables: Tables) -> Float[Tensor, "table"]:
    """Squared errors, for classes summed over their probabilities (Brier's score); means of the rows to predict."""
    return (predicted.double() - tables.targets.double()).square().sum(-1).mean(1)


@script(
    checkpoints=Option(("table-regression", "table-classification"), "models of tables"),
    n_tables=Option(64, "held-out tables for each number of rows"),
    n_prompts=Option(200, "prompts of the ablations and patches"),
)
def compare(args: Any) -> Comparison:
    """Compare losses by number of rows; ablate heads, patch labels, and correlate attention with distances."""
    rows: list[Row] = []
    sections = []
    for name in args.checkpoints:
        found, picture = _loss_rows(name, args.n_tables)
        rows += found + _part_rows(name, args.n_prompts)
        sections.append(Section(f"{name}: loss by rows with labels", "", [picture]))
    lead = (
        f"Held-out draws of the training task with all its columns and its missing cells (10% in half of the tables), "
        f"{args.n_tables} tables with 32 rows to predict. Estimators read standardized columns with "
        f"medians for missing cells. Losses are squared errors; for classes, of probabilities, summed over classes. "
        f"Intervals are over tables and seeds. Parts are measured on {args.n_prompts} prompts without missing cells."
    )
    return Comparison("Models of tables", lead, rows, sections)


def _loss_rows(name: str, n_tables: int) -> tuple[list[Row], go.Figure]:
    checkpoint = load_checkpoint(name)
    task: Any = checkpoint.task
    classes = isinstance(task, TableClassification)
    rows, curves = [], {}
    for n in ROWS:
        tables = task.replace(n_context=n, varied=False).sample_tables(n_tables, seed=SEED + n)
        ours = torch.stack([losses(model.predict_tables(tables), tables) for model in checkpoint.models])
        curves.setdefault("the model", []).append(crossed_interval(ours))
        rows.append(Row(f"{name}, {n} rows: loss", None, curves["the model"][-1], "seeds"))
        for rival, learner in rivals(classes).items():
            predicted = learner.predict(tables.prompts()).unflatten(0, (n_tables, -1))
            theirs = losses(predicted, tables)
            curves.setdefault(rival, []).append(interval(theirs))
            gain = crossed_interval(theirs - ours)
            note = "ahead" if gain.low > 0 else "behind" if gain.high < 0 else "not distinguished"
            rows.append(Row(f"{name}, {n} rows: loss of {rival} minus the model's", None, gain, "seeds", note))
    picture = interval_lines("", "rows with labels", "loss", ROWS, curves, log_x=True)
    return rows, picture


# ---- which parts carry it ----


def _part_rows(name: str, n_prompts: int) -> list[Row]:
    checkpoint = load_checkpoint(name)
    model: Any = checkpoint.best
    with random_weights():
        untrained: Any = load_checkpoint(name).models[0]
    task: Any = checkpoint.task
    prompts = task.replace(n_context=50, missing=0.0).sample(n_prompts, seed=SEED)
    rows = _ablations(name, model, prompts) + _patched_labels(name, model, prompts)
    for label, each in ((name, model), (f"{name}, untrained", untrained)):
        rows += _attention_rows(label, each, n_prompts)
    return rows


def _ablations(name: str, model: TableTransformer, prompts: Prompts) -> list[Row]:
    """The loss with a part's mean over prompts in its place, over the intact loss."""
    intact = (model.predict(prompts) - prompts.query.ys).square().mean(-1)
    rows = []
    for component, part in (("col_z", "between columns"), ("row_z", "between rows")):
        swept = ablate(model, prompts, component, ("layer", "head"), progress=False)
        for layer in range(model.cfg.n_layers):
            for head in range(model.cfg.n_heads):
                ratio = ratio_interval(swept.values["loss"][layer, head], intact)
                rows.append(Row(f"{name}: loss without head {head} {part} in layer {layer}, over intact", None, ratio,
                                "prompts"))  # fmt: skip
    return rows


def _patched_labels(name: str, model: TableTransformer, prompts: Prompts) -> list[Row]:
    """How much of the effect of the right labels is restored by the stream of some cells after each layer."""
    order = torch.rand(len(prompts), prompts.n_context, generator=torch.Generator().manual_seed(SEED)).argsort(1)
    context = prompts.ys[:, :-1].gather(1, order[..., None].expand_as(prompts.ys[:, :-1]))
    corrupted = Prompts(prompts.xs, torch.cat([context, prompts.ys[:, -1:]], dim=1))
    last, label = prompts.n_context, prompts.x_dim
    layers = list(range(model.cfg.n_layers))
    labels = patch(model, prompts, corrupted, "cell_post", {"layer": layers, "column": [label]}, progress=False)
    cells = patch(model, prompts, corrupted, "cell_post", {"layer": layers, "column": range(label)}, progress=False)
    query = patch(model, prompts, corrupted, "cell_post", {"layer": layers, "pos": [last]}, progress=False)
    rows = []
    for layer in layers[:-1]:
        for swept, what in ((labels, "label column"), (query, "query's row")):
            value = swept.recovered_interval(layer, 0)
            rows.append(
                Row(f"{name}: share of the labels' effect in the {what} after layer {layer}", None, value, "prompts")
            )
        each = [cells.recovered_interval(layer, column) for column in range(label)]
        largest = max(each, key=lambda found: found.mean)
        rows.append(Row(f"{name}: largest share in one feature's column after layer {layer}", None, largest, "prompts",
                        "the largest of all columns, so biased upwards"))  # fmt: skip
    return rows


@torch.no_grad()
def _attention_rows(name: str, model: TableTransformer, n_prompts: int) -> list[Row]:
    """Does attention follow distance in the column that matters, and do label cells attend to that column?"""
    generator = torch.Generator().manual_seed(SEED)
    xs = torch.randn(n_prompts, 51, 3, generator=generator)
    values = 1.5 * xs[..., :1]  # the first of three columns decides
    if model.cfg.predicts == "classes":
        classes = (values > values.median(1, keepdim=True).values).long().squeeze(-1)
        ys = torch.nn.functional.one_hot(classes, model.cfg.y_dim).to(xs)
    else:
        ys = values / 1.5
    _, cache = model.run_with_cache(Prompts(xs, ys))
    rows = []
    near = -(xs[:, :-1] - xs[:, -1:]).abs()  # [prompt row column]
    for layer in range(model.cfg.n_layers):
        between_rows = cache[f"blocks.{layer}.row_attn.hook_pattern"][:, :, :, -1]  # of the query's cells
        between_columns = cache[f"blocks.{layer}.col_attn.hook_pattern"]  # [prompt row head query key]
        for column, what in ((0, "the column that matters"), (1, "a column that does not")):
            heads = [
                _rank_correlation(between_rows[:, -1, head], near[..., column]) for head in range(model.cfg.n_heads)
            ]
            best = max(heads, key=lambda found: found[::2].mean().abs().item())[1::2]  # chosen on other prompts
            quantity = f"{name}: layer {layer}, label cell between rows: rank correlation with nearness in {what}"
            rows.append(Row(quantity, None, interval(best, within=(-1, 1)), "prompts", "head chosen on other prompts"))
        shares = between_columns[:, -1, :, -1]  # of the query's label cell, [prompt head key]
        extra = shares[..., 0] - shares[..., 1:3].mean(-1)
        strongest = extra[::2].mean(0).abs().argmax()
        rows.append(Row(f"{name}: layer {layer}, label cell between columns: attention to the column that matters, "
                        f"minus others", None, interval(extra[1::2, strongest], within=(-1, 1)), "prompts",
                        f"head {int(strongest)}"))  # fmt: skip
    return rows


def _rank_correlation(a: Float[Tensor, "prompt row"], b: Float[Tensor, "prompt row"]) -> Float[Tensor, "prompt"]:
    """Spearman's, for each prompt."""
    ranks = [each.argsort(1).argsort(1).double() for each in (a, b)]
    centred = [each - each.mean(1, keepdim=True) for each in ranks]
    return (centred[0] * centred[1]).sum(1) / (centred[0].square().sum(1) * centred[1].square().sum(1)).sqrt()


if __name__ == "__main__":
    compare.run()
