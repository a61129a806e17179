import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from mechicl.statistics.grids import GridTable
from tests.bounds import bounded, make_no_file


@pytest.fixture
def table():
    rng = np.random.default_rng(0)
    rows = [(depth, width, seed, rng.normal()) for depth in (1, 2) for width in ("a", "b") for seed in range(4)]
    return GridTable(pd.DataFrame(rows, columns=["depth", "width", "seed", "loss"]), ("depth", "width", "seed"))


def test_intervals_are_student_s_over_seeds(table):
    out = table.intervals("loss")
    assert out[["depth", "width"]].values.tolist() == [[1, "a"], [1, "b"], [2, "a"], [2, "b"]]
    for i, (_, part) in enumerate(table.frame.groupby(["depth", "width"])):
        low, high = stats.t.interval(0.95, 3, part["loss"].mean(), stats.sem(part["loss"]))
        assert out.loc[i, ["loss", "low", "high"]].tolist() == pytest.approx([part["loss"].mean(), low, high])
    assert out["n"].tolist() == [4] * 4


def test_the_other_axes_count_as_samples(table):
    out = table.intervals("loss", by=["depth"])
    assert out["n"].tolist() == [8, 8]
    assert out["loss"].tolist() == pytest.approx(table.frame.groupby("depth")["loss"].mean().tolist())
    assert table.intervals("loss", by=[])["n"].tolist() == [16]


def test_missing_values_are_left_out_and_counted(table):
    frame = table.frame.copy()
    frame.loc[0:2, "loss"] = math.nan
    out = GridTable(frame, table.axes).intervals("loss")
    assert (out.loc[0, "n"], out.loc[0, "missing"]) == (1, 3)
    assert out.loc[0, "loss"] == frame.loc[3, "loss"]


def test_medians_for_skewed_values(table):
    out = table.intervals("loss", median=True)
    assert out.loc[0, "loss"] == pytest.approx(np.median(table.frame["loss"][:4]))
    assert out.loc[0, "low"] <= out.loc[0, "loss"] <= out.loc[0, "high"]


def test_files_keep_every_digit(table, tmp_path):
    frame = table.frame.assign(loss=[math.pi / 10**i for i in range(16)])
    path = GridTable(frame, table.axes).save(tmp_path / "results.csv")
    assert GridTable.load(path, table.axes).frame.equals(frame)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("," * 10**7, "more than 1,000 columns"),
        ("a\n" + "1," * 1000 + "\n", "more than 1,000 columns"),
        ("depth\n" * 4_000_002, "4,000,000 values, which are not read"),
        *((text, "is not a table") for text in ("", 'depth\n"', "depth\n\udcff")),
        ("loss\n1\n", "axes must be columns"),
    ],
)
def test_files_that_are_not_tables_or_too_large_are_refused(tmp_path, text, message):
    path = tmp_path / "results.csv"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with bounded(), pytest.raises(ValueError, match=message):
        GridTable.load(path, ("depth",))


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_a_table_that_is_not_a_regular_file_is_refused_at_once(tmp_path, kind):
    make_no_file(tmp_path / "results.csv", kind)
    with bounded(), pytest.raises(ValueError, match=r"results\.csv (is a pipe|has 3,221)"):
        GridTable.load(tmp_path / "results.csv", ("depth",))


def test_rows_of_one_value_and_names_that_are_not_there(table):
    assert table.where(width="b", depth=2).frame["seed"].tolist() == [0, 1, 2, 3]
    assert table.values == ("loss",)
    for call, named in (
        (lambda: table.where(loss=1), "axes"),
        (lambda: table.where(depth=3), r"depth must be one of \[1, 2\], got 3"),
        (lambda: table.intervals("seed"), "value"),
        (lambda: GridTable(table.frame, ("depth", "height")), "axes"),
    ):
        with pytest.raises(ValueError, match=named):
            call()
