import json

import numpy as np
import pandas as pd
import pytest

from mechicl.reports.sweep_page import write_sweep_page
from mechicl.statistics.grids import GridTable


def grid(**axes):
    """Losses over some axes and three seeds, of which one model diverged."""
    places = pd.MultiIndex.from_product([*axes.values(), range(3)], names=[*axes, "seed"]).to_frame(index=False)
    loss = np.random.default_rng(0).normal(1.0, 0.1, len(places))
    loss[1] = np.nan
    frame = places.assign(diverged_at=pd.array([None, 7, *[None] * (len(places) - 2)], dtype="Int64"), loss=loss)
    return GridTable(frame.assign(best="ridge"), (*axes, "seed"))


@pytest.mark.parametrize(
    ("axes", "pictures"),
    [
        ({"model.n_layers": [1, 2, 4]}, 1),
        ({"model.attention": ["linear", "softmax"]}, 1),
        ({"model.n_layers": [1, 2], "task.noise_std": [0.0, 0.5]}, 1),
        ({"model.n_layers": [1, 2], "task.noise_std": [0.0, 0.5], "batch_size": [8, 16, 32]}, 3),
        ({}, 1),
    ],
)
def test_every_number_has_its_picture_and_its_table(tmp_path, axes, pictures):
    table = grid(**axes)
    path = write_sweep_page(table, tmp_path, title="A sweep")
    html = path.read_text()
    assert html.count('class="figure"') == pictures
    assert f"{len(table.frame)} models over {', '.join(table.axes)}; 1 of them diverged." in html
    assert "<h2>loss</h2>" in html
    assert "<h2>best</h2>" not in html  # words are no number
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [row["loss"] for row in rows] == [None if np.isnan(v) else v for v in table.frame["loss"]]
    assert rows[1]["diverged_at"] == 7


def test_an_empty_table_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing of the sweep is done yet"):
        write_sweep_page(GridTable(pd.DataFrame({"seed": [], "loss": []}), ("seed",)), tmp_path)
