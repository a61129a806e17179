"""The report on learners of tables: its parts against direct computations, and its pages."""

import json
from pathlib import Path

import pytest
import torch
from sklearn.linear_model import RidgeCV
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from mechicl.checkpoints import Study
from mechicl.interop import from_sklearn
from mechicl.models import TableConfig, TableTransformer
from mechicl.reports import report
from mechicl.reports.tables import OfTables
from mechicl.tasks import LinearRegression, OwnTable, TableRegression
from tests.browser import Browser

TASK = TableRegression(x_dim=2, n_context=10)


def rows(path: Path) -> dict[str, dict]:
    return {row["quantity"]: row for row in json.loads(path.with_suffix(".json").read_text())["table"]}


def test_losses_are_those_of_plain_fits(tmp_path: Path):
    path = report(from_sklearn(KNeighborsRegressor(3)), TASK, tmp_path, sections=["loss"], n_prompts=48, progress=False)
    tables = TASK.whole(16).sample_tables(3, seed=7_000_003).to(torch.float64)
    losses = []
    for xs, ys in zip(tables.xs.numpy(), tables.ys[..., 0].numpy(), strict=True):
        fitted = make_pipeline(StandardScaler(), RidgeCV([10.0**power for power in range(-2, 4)])).fit(xs[:10], ys[:10])
        losses.append(((fitted.predict(xs[10:]) - ys[10:]) ** 2).mean())
    found = rows(path)["squared error (MSE), ridge regression"]["measured"]
    assert found["mean"] == pytest.approx(sum(losses) / 3)
    assert found["n"] == 3  # tables, not rows


def test_cells_of_a_model(tmp_path: Path):
    torch.manual_seed(0)
    model = TableTransformer(TableConfig(x_dim=2, n_context=10, n_layers=2, n_heads=2, d_model=8, d_mlp=8)).eval()
    path = report(model, TASK, tmp_path, sections=["cells"], progress=False)
    found = rows(path)
    assert {f"share of the labels' effect restored in {where} after layer {layer}" for layer in (0, 1)
            for where in ("the label's column", "the row to predict")} == set(found)  # fmt: skip
    last = found["share of the labels' effect restored in the row to predict after layer 1"]["measured"]
    assert last["mean"] == pytest.approx(1.0, abs=1e-4)  # predictions read no other row


def test_the_loss_of_a_classifier_is_cross_entropy():
    names = {name: OfTables(Study.load(name)).loss for name in ("table-classification", "table-regression")}
    assert names == {"table-classification": "cross entropy (nats)", "table-regression": "squared error (MSE)"}


def test_a_model_of_tables_is_not_asked_about_other_tasks(tmp_path: Path):
    model = TableTransformer(TableConfig(x_dim=2, n_context=10, n_layers=1, n_heads=2, d_model=8, d_mlp=8))
    with pytest.raises(ValueError, match="is a model of tables: task must be"):
        report(model, LinearRegression(x_dim=2), tmp_path, progress=False)


@pytest.mark.slow
def test_the_page_of_an_estimator_on_the_users_table(tmp_path: Path, browser: Browser):
    cells = torch.randn(90, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    task = OwnTable(cells, cells[:, :1].sin(), n_context=40)
    path = report(from_sklearn(KNeighborsRegressor(4)), task, tmp_path, n_prompts=160, progress=False)
    tab = browser.new_context(offline=True, viewport={"width": 390, "height": 844}).new_page()
    tab.goto(path.as_uri())
    assert "behaves like nearest neighbours" in tab.locator("h1").inner_text()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    tab.set_viewport_size({"width": 1300, "height": 900})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1300
    tab.context.close()
