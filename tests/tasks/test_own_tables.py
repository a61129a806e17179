"""A table of the user's own: columns of a frame, classes, and rows of each draw."""

import math
from decimal import Decimal
from pathlib import Path

import pandas as pd
import pytest
import torch

from mechicl.tasks import OwnTable

FRAME = pd.DataFrame(
    {
        "size": [float(i) for i in range(30)],
        "colour": ["red", "blue", None] * 10,
        "fresh": [True, False] * 15,
        "price": [3.0 * i + 7 for i in range(30)],
    }
)


def test_columns_become_numbers_and_missing_cells_stay_missing():
    task = OwnTable.from_frame(FRAME, "price")
    assert (task.x_dim, task.y_dim, task.n_context, task.has_classes) == (3, 1, 20, False)
    assert task.cells[:, 0].tolist() == FRAME["size"].tolist()
    assert task.cells[:2, 1].tolist() == [1.0, 0.0]  # alphabetical
    assert task.cells[:, 1].isnan().tolist() == FRAME["colour"].isna().tolist()
    assert task.cells[:2, 2].tolist() == [1.0, 0.0]


def test_a_csv_file_is_read_like_its_frame(tmp_path: Path):
    FRAME.to_csv(tmp_path / "own.csv", index=False)
    read = OwnTable.from_frame(tmp_path / "own.csv", "price")
    torch.testing.assert_close(read.cells, OwnTable.from_frame(FRAME, "price").cells, equal_nan=True)


def test_a_csv_file_with_rows_longer_than_its_header_is_refused(tmp_path: Path):
    lines, path = FRAME.to_csv(index=False).splitlines(), tmp_path / "long.csv"
    path.write_text("\n".join([lines[0], *(line + "," for line in lines[1:])]))  # a trailing comma has no value
    torch.testing.assert_close(
        OwnTable.from_frame(path, "price").cells, OwnTable.from_frame(FRAME, "price").cells, equal_nan=True
    )
    for more in (lines[:1] + [line + ",8" for line in lines[1:]], [*lines, lines[1] + ",8"]):
        path.write_text("\n".join(more))
        with pytest.raises(ValueError, match=r"long.csv must be a CSV file with as many fields in each row"):
            OwnTable.from_frame(path, "price")


NUMBERS = [1, 2, None, 10, 9, 100] * 5
OBJECTS = {
    "object": pd.Series(NUMBERS, dtype=object),
    "decimal": pd.Series([each if each is None else Decimal(each) for each in NUMBERS]),
    "category": pd.Series(pd.Categorical(NUMBERS)),
    "Int64": pd.Series(NUMBERS, dtype="Int64"),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_numbers_are_numbers_whatever_their_dtype(kind: str):
    task = OwnTable.from_frame(FRAME[["price"]].assign(size=OBJECTS[kind]), "price")
    torch.testing.assert_close(
        task.cells[:, 0],
        torch.tensor([math.nan if each is None else float(each) for each in NUMBERS]).double(),
        equal_nan=True,
    )
    if kind == "object":
        labels = FRAME[["size"]].assign(price=OBJECTS[kind].fillna(3))
        assert not OwnTable.from_frame(labels, "price").has_classes


def test_categories_keep_their_order_and_those_without_a_row_are_no_classes():
    heights = pd.Categorical(["low", "high", "medium"] * 10, categories=["low", "medium", "high"], ordered=True)
    task = OwnTable.from_frame(FRAME[["price"]].assign(height=heights), "price")
    assert task.cells[:3, 0].tolist() == [0, 2, 1]
    labels = pd.Categorical(["b", "c"] * 15, categories=["a", "b", "c"])
    filtered = OwnTable.from_frame(FRAME[["size"]].assign(kind=labels), "kind")
    torch.testing.assert_close(filtered.labels, torch.eye(2).double().repeat(15, 1))
    assert OwnTable.from_frame(FRAME[["size"]].assign(kind=pd.Categorical([0, 1] * 15)), "kind").has_classes


@pytest.mark.parametrize(("label", "n"), [("fresh", 2), ("kind", 3)])
def test_text_and_booleans_are_classes(label: str, n: int):
    task = OwnTable.from_frame(FRAME.assign(kind=["a", "b", "c"] * 10), label)
    assert task.has_classes
    assert task.y_dim == n
    assert task.labels.sum(1).eq(1).all()


def test_numbers_are_classes_if_the_user_says_so():
    frame = FRAME.assign(grade=[1, 10, 2] * 10)
    assert not OwnTable.from_frame(frame, "grade").has_classes
    task = OwnTable.from_frame(frame, "grade", classes=True)
    assert task.labels[:3].argmax(1).tolist() == [0, 2, 1]  # by size, not alphabetically
    with pytest.raises(ValueError, match="column 'kind' is not numbers"):
        OwnTable.from_frame(FRAME.assign(kind=["a", "b"] * 15), "kind", classes=False)


def test_a_draw_has_other_rows_as_context_and_to_predict():
    tables = OwnTable.from_frame(FRAME, "price", n_context=22).replace(n_queries=8).sample_tables(50, seed=0)
    rows = tables.xs[..., 0].sort(-1).values
    assert torch.equal(rows, torch.arange(30.0).expand(50, 30))  # each row once
    assert tables.n_context == 22


def test_a_column_that_the_dtype_would_merge_is_centred_and_others_stay():
    columns = [1.7e9 + torch.arange(60.0).double(), 2000 + torch.arange(60.0).double(), torch.full((60,), 0.1).double()]
    cells = torch.stack(columns, 1)
    cells[5, 0] = math.nan
    table = OwnTable(cells, torch.randn(60, 1).double(), n_context=59)
    xs = table.sample_tables(1, seed=0).xs[0]
    times = xs[~xs[:, 0].isnan(), 0].double().sort().values
    assert (times - times[0]).tolist() == [i for i in range(60) if i != 5]
    assert xs[:, 1].sort().values.tolist() == [2000.0 + i for i in range(60)]
    assert xs[:, 2].unique().tolist() == [torch.tensor(0.1).item()]


def test_labels_are_scaled_by_the_context_alone():
    tables = OwnTable.from_frame(FRAME, "price", n_context=12).replace(n_queries=4).sample_tables(5, seed=0)
    tables = tables.to(torch.float64)
    for xs, ys in zip(tables.xs, tables.ys, strict=True):
        raw = 3.0 * xs[:, 0] + 7
        known = raw[:12]
        torch.testing.assert_close(ys[:, 0], (raw - known.mean()) / known.std(correction=0), rtol=1e-5, atol=1e-5)


def test_equal_labels_are_centred():
    table = OwnTable(torch.randn(30, 2).double(), torch.full((30, 1), 5.0).double(), n_context=12)
    assert table.sample_tables(3, seed=0).ys.eq(0).all()


@pytest.mark.parametrize(("frame", "label", "words"), [
    (FRAME, "weight", "label must be one of several columns"),
    (FRAME[["price"]], "price", "label must be one of several columns"),
    (FRAME, "colour", "lacks 10 of 30 labels"),
    (FRAME.assign(when=pd.Timestamp("2026-01-01")), "price", "column 'when' has times"),
    (FRAME.to_numpy(), "price", "pandas DataFrame or the path"),
    (FRAME.set_axis([*FRAME.columns[:-1], FRAME.columns[0]], axis=1), FRAME.columns[0], "names of columns must differ"),
    (FRAME.assign(price=5.0), "price", "two different labels"),
    (FRAME.head(1), "price", "two different labels or more, in 1 rows"),
    (FRAME.assign(name=[f"row {i}" for i in range(30)]), "name", "got 30 values in 30 rows"),
    (FRAME.assign(when=pd.to_datetime(["2026-01-01", "2026-01-02", "2026-01-03"] * 10)), "when", "'when' has times"),
])  # fmt: skip
def test_a_frame_that_is_no_table_is_refused(frame: object, label: str, words: str):
    with pytest.raises(ValueError, match=words):
        OwnTable.from_frame(frame, label)


def test_more_rows_than_the_table_has_are_refused():
    with pytest.raises(ValueError, match="at most the table's 30 rows, got 29 \\+ 2"):
        OwnTable.from_frame(FRAME, "price", n_context=29).replace(n_queries=2)
    assert OwnTable.from_frame(FRAME, "price", n_context=29).whole(16).n_queries == 1
