"""Results and tables of grids: intervals, data frames, files."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from mechicl.base.arguments import ArgumentError
from mechicl.statistics import Interval, Result, interval, load_result, storable
from mechicl.statistics.grids import GridTable
from tests.bounds import bounded, make_no_file


# ---- results ----
@storable
@dataclass(frozen=True)
class Place:
    layer: int
    label: str


@dataclass(frozen=True, eq=False)
class Measurement(Result):
    cosine: Tensor
    by_layer: Tensor
    note: str = "not a tensor"


@dataclass(frozen=True, eq=False)
class Sweeping(Result):
    layers: tuple[int, ...]
    errors: Float[Tensor, "layer head prompt"]
    values: dict[str, Tensor] = field(default_factory=dict)
    best: tuple[Place, ...] = ()
    fit: Interval | None = None
    rest: Any = None
    model: Any = field(default=None, metadata={"stored": False})


def measurement() -> Measurement:
    generator = torch.Generator().manual_seed(1)
    shared = torch.randn(6, generator=generator, dtype=torch.float64)  # some prompts are hard in every layer
    by_layer = shared + 0.1 * torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    return Measurement(cosine=torch.randn(6, generator=generator, dtype=torch.float64), by_layer=by_layer)


def sweep(**fields: Any) -> Sweeping:
    errors = torch.arange(30, dtype=torch.float64).reshape(3, 2, 5) ** 2
    return Sweeping((4, 5, 7), errors, **fields)


def test_intervals_are_over_samples_with_the_entries_of_a_sample_averaged_first():
    result = measurement()
    intervals = result.intervals(0.9)
    assert set(intervals) == {"cosine", "by_layer"}
    per_prompt = [np.mean([result.by_layer[a, b, p].item() for a in range(2) for b in range(3)]) for p in range(6)]
    for name, values in (("cosine", result.cosine.tolist()), ("by_layer", per_prompt)):
        low, high = scipy.stats.t.interval(0.9, 5, loc=np.mean(values), scale=scipy.stats.sem(values))
        assert intervals[name].n == 6
        assert (intervals[name].mean, intervals[name].low, intervals[name].high) == pytest.approx(
            (np.mean(values), low, high), rel=1e-12
        )


def test_quantities_of_different_axes_have_a_row_a_sample_and_a_column_an_entry():
    result = measurement()
    table = result.to_dataframe()
    assert list(table.columns) == ["cosine", *(f"by_layer[{a},{b}]" for a in range(2) for b in range(3))]
    assert table["cosine"].tolist() == result.cosine.tolist()
    assert table["by_layer[1,2]"].tolist() == result.by_layer[1, 2].tolist()
    longer = Measurement(cosine=torch.ones(3), by_layer=torch.ones(4)).to_dataframe()
    assert longer["cosine"].isna().tolist() == [False, False, False, True]


def test_quantities_of_the_same_axes_have_a_row_an_entry_with_its_interval():
    table = sweep().to_dataframe(0.9)
    assert list(table.columns) == ["layer", "head", "errors", "errors_low", "errors_high"]
    assert table["layer"].tolist() == [4, 4, 5, 5, 7, 7]
    assert table["head"].tolist() == [0, 1] * 3
    for row, entry in zip(table.itertuples(), sweep().errors.flatten(0, 1), strict=True):
        expected = interval(entry, 0.9)
        assert (row.errors, row.errors_low, row.errors_high) == (expected.mean, expected.low, expected.high)
    assert len(dataclasses.replace(sweep(), layers=(), errors=torch.zeros(0, 2, 5)).to_dataframe()) == 0


def test_entries_of_one_key_in_two_dictionaries_are_two_quantities():
    @dataclass(frozen=True, eq=False)
    class Pair(Result):
        a: dict[str, Float[Tensor, "layer prompt"]] = field(metadata={"range": (0.0, 1.0)})
        b: dict[str, Float[Tensor, "head prompt"]]
        fit: Interval

    ones, twos = torch.ones(2, 3), torch.full((2, 3), 2.0)
    pair = Pair({"x": ones, "y": ones}, {"x": twos, "fit": twos}, Interval(5.0, 4.0, 6.0, 3))
    assert {name: values.mean().item() for name, values in pair.samples().items()} == {
        "a.x": 1.0, "y": 1.0, "b.x": 2.0, "b.fit": 2.0,
    }  # fmt: skip
    assert pair.axis_names() == {"a.x": ("layer",), "y": ("layer",), "b.x": ("head",), "b.fit": ("head",)}
    found = pair.intervals()
    assert (found["fit"].mean, found["b.fit"].mean) == (5.0, 2.0)
    assert found["a.x"].low > 0.2  # binomial: the range of the field `a`
    assert found["b.x"].low == 2.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_a_table_takes_tensors_of_any_dtype_and_with_gradients(dtype: torch.dtype):
    values = torch.tensor([0, 1, 1]).to(dtype)
    table = Measurement(cosine=values, by_layer=torch.ones(3, requires_grad=True)).to_dataframe()
    assert table["cosine"].tolist() == [0, 1, 1]
    assert table["by_layer"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("fields", "message"), [
    ({"errors": torch.ones(3, 5)}, r"errors must be a tensor of floats \[layer head prompt\], got .* \[3, 5\]"),
    ({"errors": torch.ones(3, 2, 5, device="meta")}, "errors is on the device 'meta'"),
    ({"errors": torch.ones(1).expand(2**38, 2, 2)}, r"errors has 1\.1e\+12 elements, which repeat"),
    ({"layers": (1, "2")}, "layers must be a tuple of ints"),
    ({"fit": 3.0}, "fit must be Interval or None, got 3.0"),
])  # fmt: skip
def test_fields_are_compared_with_their_annotations(fields, message):
    with pytest.raises(ArgumentError, match=message):
        dataclasses.replace(sweep(), **fields)
    undefined = dataclasses.replace(sweep(), errors=torch.full((3, 2, 5), torch.nan))
    assert math.isnan(undefined.intervals()["errors"].mean)


def test_a_printed_result_shows_each_entry_if_there_are_few():
    text = str(sweep())
    assert text.splitlines()[0] == "Sweeping"
    assert f"errors[5, 1]  {interval(sweep().errors[1, 1])}" in text
    larger = dataclasses.replace(sweep(), layers=tuple(range(30)), errors=torch.ones(30, 2, 5))
    assert "1.0000 ± 0.0000  (mean over layer (30) x head (2))" in str(larger)
    assert "<th>errors[5, 1]</th>" in sweep()._repr_html_()
    assert "&lt;" in sweep(values={"<b>": torch.ones(5)})._repr_html_()


def test_a_result_is_the_same_after_it_was_saved(tmp_path):
    saved = sweep(
        values={"loss": torch.tensor([1.0, math.nan], dtype=torch.float16)},
        best=(Place(1, "ü"), Place(2, "")),
        fit=Interval(1.0, -math.inf, math.nan, n=3),
        rest={1: [measurement(), None, True], ("a", 2): range(3), 3: torch.zeros(1), "3": torch.ones(2)},
        model=torch.nn.Linear(2, 2),
    )
    loaded = Sweeping.load(saved.save(tmp_path / "sweep"))
    assert torch.equal(loaded.errors, saved.errors)
    assert loaded.values["loss"].dtype == torch.float16
    assert torch.equal(loaded.values["loss"], saved.values["loss"]) is False  # NaN
    assert torch.equal(loaded.values["loss"].isnan(), saved.values["loss"].isnan())
    assert (loaded.layers, loaded.best, loaded.model) == (saved.layers, saved.best, None)
    assert loaded.fit is not None
    assert loaded.fit.low == -math.inf
    assert math.isnan(loaded.fit.high)
    assert loaded.rest[1][1:] == [None, True]
    assert torch.equal(loaded.rest[1][0].by_layer, saved.rest[1][0].by_layer)
    assert loaded.rest["a", 2] == (0, 1, 2)
    assert (loaded.rest[3].tolist(), loaded.rest["3"].tolist()) == ([0], [1, 1])  # keys of one text
    assert str(loaded) == str(saved)


def test_values_that_cannot_be_stored_are_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match=r"rest.1 is of type Linear"):
        sweep(rest=[1, torch.nn.Linear(1, 1)]).save(tmp_path / "sweep")
    assert not (tmp_path / "sweep" / "result.json").exists()


@pytest.mark.parametrize("damage", ["kind", "fields", "tensor", "json", "other"])
def test_a_damaged_result_is_refused(tmp_path, damage):
    path = sweep().save(tmp_path / "sweep")
    data = json.loads((path / "result.json").read_text())
    if damage == "kind":
        data["kind"] = "os.system"
    elif damage == "fields":
        del data["fields"]["errors"]
    elif damage == "tensor":
        data["fields"]["errors"]["tensor"] = "elsewhere"
    (path / "result.json").write_text("{" if damage == "json" else json.dumps(data))
    with pytest.raises(ValueError, match="sweep"):
        (Measurement.load if damage == "other" else load_result)(path)


def test_two_classes_of_one_name_cannot_both_be_stored():
    with pytest.raises(ValueError, match="two storable classes are called Interval"):

        @storable
        class Interval:
            pass


# ---- grids ----
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


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0, 1.0, 0.0, 1.0], [False, False, False, True, False, True]])
def test_a_column_of_0_and_1_is_a_share_and_is_printed_with_both_ends(values):
    grid = GridTable(
        pd.DataFrame({"depth": 3 * [1] + 3 * [2], "seed": 2 * [0, 1, 2], "fell": values}), ("depth", "seed")
    )
    out = grid.intervals("fell")
    ends = [stats.binomtest(k, 3).proportion_ci(method="exact") for k in (0, 2)]
    assert out[["low", "high"]].values.tolist() == [pytest.approx([each.low, each.high]) for each in ends]
    assert str(grid).splitlines()[1:] == ["  fell 0.00 (0.00 to 0.71)  depth=1", "  fell 0.67 (0.09 to 0.99)  depth=2"]
    always = GridTable(grid.frame.assign(fell=type(values[0])(1)), grid.axes)
    assert str(always).splitlines()[1:] == [f"  fell 1.00 (0.29 to 1.00)  depth={depth}" for depth in (1, 2)]


def test_losses_that_happen_to_be_1_are_no_share():
    frame = pd.DataFrame({"depth": [1, 1, 1, 2, 2, 2], "seed": 2 * [0, 1, 2], "loss": [1.0, 1, 1, 0, 1, 2]})
    out = GridTable(frame, ("depth", "seed")).intervals("loss")
    half = stats.t.ppf(0.975, 2) / math.sqrt(3)
    assert out[["low", "high"]].values.tolist() == [[1, 1], pytest.approx([1 - half, 1 + half])]


def test_files_keep_every_digit(table, tmp_path):
    frame = table.frame.assign(loss=[math.pi / 10**i for i in range(16)])
    path = GridTable(frame, table.axes).save(tmp_path / "results.csv")
    assert GridTable.load(path, table.axes).frame.equals(frame)


@pytest.mark.parametrize(("text", "message"), [
    ("," * 10**7, "more than 1,000 columns"),
    ("a\n" + "1," * 1000 + "\n", "more than 1,000 columns"),
    ("depth\n" * 4_000_002, "4,000,000 values, which are not read"),
    *((text, "is not a table") for text in ("", 'depth\n"', "depth\n\udcff", "depth,loss\n1,2,3\n")),
    ("loss\n1\n", "axes must be columns"),
])  # fmt: skip
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
