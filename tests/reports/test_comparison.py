"""Rows, tables of published and measured values, and the page of a sweep."""

import errno
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from analyses.support.claims import row_from_json, seeds_of
from analyses.support.resamples import over_seeds
from mechicl.base import files
from mechicl.checkpoints import Checkpoint
from mechicl.models import TransformerConfig, build
from mechicl.reports import Comparison, Row, comparison, published
from mechicl.reports.comparison import SHOWN
from mechicl.reports.rows import as_text
from mechicl.reports.sweep_page import write_sweep_page
from mechicl.statistics import Interval, interval, median_interval
from mechicl.statistics.grids import GridTable


# ---- rows ----
def ended_at(*losses: float) -> Checkpoint:
    models = [build(TransformerConfig(x_dim=2, n_context=3), i) for i in range(len(losses))]
    return Checkpoint("mine", models, {"curve": {"eval_loss": [list(losses)]}})


def test_a_row_is_over_all_seeds_and_its_note_is_without_stuck_ones():
    values = torch.tensor([1.0, 1.2, 1.4, 5.0], dtype=torch.float64)
    with_stuck = ended_at(0.5, 0.51, 0.52, 0.9)
    assert over_seeds(values, with_stuck) == (interval(values), "seeds", "without 1 of 4 stuck seeds: 1.20 ± 0.50")
    assert over_seeds(values, ended_at(0.5, 0.51, 0.52, 0.53))[2] == ""
    note = "without 1 of 4 stuck seeds: 1.20 (1.00 to 1.40)"
    assert over_seeds(values, with_stuck, median=True) == (median_interval(values), "seeds", note)
    measured, over, note = over_seeds([2.0], ended_at(0.5))
    assert (measured.mean, measured.n, over, note) == (2.0, 1, "seed", "")
    assert math.isnan(measured.low)
    with pytest.raises(ValueError, match="2 values for the 3 seeds of mine"):
        over_seeds([1.0, 2.0], ended_at(0.5, 0.5, 0.5))


@pytest.mark.parametrize(("measured", "over", "n"), [
    (Interval(1.0, 0.5, 1.5, 5), "seeds", 5), (Interval(1.0, 0.5, 1.5, 7), "seeds that copy", 7),
    (Interval(1.0, 0.5, 1.5, 900), "prompts", None), (1.0, "3 seeds", 3), (1.0, "seed 0", None),
    (Interval(1.0, 0.5, 1.5, 900), "prompts, best of 10 seeds", 10), ("7 of 8 seeds", "", None),
])  # fmt: skip
def test_the_number_of_seeds(measured, over, n):
    assert seeds_of(Row("loss", None, measured, over)) == n


@pytest.mark.parametrize(("value", "words"), [
    (0.0, "0"), (3e-17, "rounding"), (-3e-17, "rounding"), (2e-9, "2e-09"), (1.0, "1"), (math.nan, "nan"),
    (Interval(1e-13, -1e-13, 3e-13, 5), "rounding"), (Interval(0.0, 0.0, 0.0, 5), "0"),
    (Interval(1e-13, 1e-13, 1e-13, 5), "rounding"), (Interval(1.0, 1.0, 1.0, 5), "1"),
    (Interval(1 + 1e-9, 1 - 1e-9, 1 + 3e-9, 5), "1 (to rounding)"),
    (Interval(0.5, 0.2, 2.0, 5, 0.95, "median"), "0.50 (0.20 to 2.00)"),
])  # fmt: skip
def test_rounding_is_named(value, words):
    assert as_text(value) == words


def test_rows_come_back_from_files():
    for middle in ("median", "mean"):
        row = Row("steps", None, Interval(160.0, 120.0, 1400.0, 5, 0.95, middle), "seeds")
        assert ("middle" in row.to_json()["measured"]) == (middle == "median")
        assert row_from_json(row.to_json()) == row
    with pytest.raises(ValueError, match="not a row of a results file"):
        row_from_json({"quantity": "steps"})


# ---- tables ----
ROWS = [
    Row("cosine", 0.994, Interval(0.95, 0.94, 0.96, 100), "prompts", "step 17"),
    Row("growth", "linear", "linear", "layers 3 to 8"),
    Row("undefined", None, math.nan, ""),
]


def test_tables_are_printed_saved_and_shown(tmp_path):
    data = {"values": (1.0, math.inf)}
    comparison = Comparison("A <b>", "lead", [*ROWS, *[Row(f"row {i}", None, 1.0) for i in range(20)]], data=data)
    printed = str(comparison)
    assert printed.startswith("A <b>\nlead\n")
    for words in ("0.994", "0.950 ± 0.010", "95%, 100 prompts", "step 17"):
        assert words in printed
    page = comparison.write(tmp_path / "new", "name").read_text()
    assert "A &lt;b&gt;" in page
    assert f"<details><summary>{21 - SHOWN} more rows</summary>" in page  # long tables are folded
    saved = json.loads((tmp_path / "new" / "name.json").read_text(), parse_constant=pytest.fail)
    assert saved["values"] == [1.0, None]
    assert saved["table"][2]["measured"] is None
    assert saved["table"][0]["measured"]["n"] == 100


def test_published_numbers_come_by_their_key():
    assert published("fu2024_table1")["lstm"]["ogd"] == 0.831


# ---- sweeps ----
@pytest.mark.parametrize(("axes", "pictures"), [
    ({"model.n_layers": [1, 2, 4]}, 1), ({"model.attention": ["linear", "softmax"]}, 1), ({}, 1),
    ({"model.n_layers": [1, 2], "task.noise_std": [0.0, 0.5]}, 1),
    ({"model.n_layers": [1, 2], "task.noise_std": [0.0, 0.5], "batch_size": [8, 16, 32]}, 3),
])  # fmt: skip
def test_every_number_of_a_sweep_has_its_picture_and_its_table(tmp_path, axes, pictures):
    places = pd.MultiIndex.from_product([*axes.values(), range(3)], names=[*axes, "seed"]).to_frame(index=False)
    loss = np.random.default_rng(0).normal(1.0, 0.1, len(places))
    loss[1] = np.nan
    frame = places.assign(diverged_at=pd.array([None, 7, *[None] * (len(places) - 2)], dtype="Int64"), loss=loss)
    table = GridTable(frame.assign(best="ridge"), (*axes, "seed"))
    html = write_sweep_page(table, tmp_path, title="A sweep").read_text()
    assert html.count('class="figure"') == pictures
    assert f"{len(table.frame)} models over {', '.join(table.axes)}; 1 of them diverged." in html
    assert "<h2>loss</h2>" in html
    assert "<h2>best</h2>" not in html  # text has no picture
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [row["loss"] for row in rows] == [None if np.isnan(v) else v for v in table.frame["loss"]]
    assert rows[1]["diverged_at"] == 7


def test_near_settings_of_a_sweep_have_different_labels(tmp_path):
    frame = pd.DataFrame({"x": [0.3, 0.1 + 0.2, 1 / 3], "seed": 0, "loss": [1.0, 1.00001, 2.0]})
    html = write_sweep_page(GridTable(frame, ("x", "seed")), tmp_path).read_text()
    assert [html.count(f"<td>{each}</td>") for each in ("0.3", "0.30000000000000004", "0.3333")] == [1, 1, 1]


def test_an_empty_sweep_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no cell of the sweep"):
        write_sweep_page(GridTable(pd.DataFrame({"seed": [], "loss": []}), ("seed",)), tmp_path)


# ---- a disk that is full ----
@pytest.mark.parametrize("full", ["page", "folder"])
def test_a_full_disk_keeps_the_numbers_and_names_their_file(full, tmp_path, monkeypatch):
    def write(path, data, real=files.write_bytes):
        if path.parent == tmp_path / "out" and (full == "folder" or path.suffix == ".html"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, data)

    monkeypatch.setattr(files, "write_bytes", write)
    monkeypatch.setattr(comparison, "write_bytes", write)
    made = Comparison("title", "lead", [Row("loss", None, 0.25)], data={"kept": [1, 2]})
    with pytest.raises(OSError, match="No space left on device; all numbers were saved in") as raised:
        made.write(tmp_path / "out", "report")
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(tmp_path / "out" / ("report.html" if full == "page" else "report.json"))
    kept = str(raised.value.strerror).partition("saved in ")[2]
    saved = json.loads(Path(kept).read_text())
    assert saved["kept"] == [1, 2]
    assert saved["table"][0]["measured"] == 0.25
    assert (Path(kept).parent == tmp_path / "out") == (full == "page")
