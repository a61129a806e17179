import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import ArgumentError
from mechicl.statistics import Interval, Result, interval, load_result, storable


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


def test_a_single_number_is_one_sample():
    intervals = Measurement(cosine=torch.tensor(2), by_layer=torch.tensor(3.0)).intervals()
    assert (intervals["cosine"].mean, intervals["cosine"].n) == (2.0, 1)


def test_quantities_of_different_axes_have_a_row_a_sample_and_a_column_an_entry():
    result = measurement()
    table = result.to_dataframe()
    assert list(table.columns) == ["cosine", *(f"by_layer[{a},{b}]" for a in range(2) for b in range(3))]
    assert table["cosine"].tolist() == result.cosine.tolist()
    assert table["by_layer[1,2]"].tolist() == result.by_layer[1, 2].tolist()
    with pytest.raises(ValueError, match="same length"):
        Measurement(cosine=torch.ones(3), by_layer=torch.ones(4)).to_dataframe()


def test_quantities_of_the_same_axes_have_a_row_an_entry_with_its_interval():
    table = sweep().to_dataframe(0.9)
    assert list(table.columns) == ["layer", "head", "errors", "errors_low", "errors_high"]
    assert table["layer"].tolist() == [4, 4, 5, 5, 7, 7]
    assert table["head"].tolist() == [0, 1] * 3
    for row, entry in zip(table.itertuples(), sweep().errors.flatten(0, 1), strict=True):
        expected = interval(entry, 0.9)
        assert (row.errors, row.errors_low, row.errors_high) == (expected.mean, expected.low, expected.high)
    assert len(dataclasses.replace(sweep(), layers=(), errors=torch.zeros(0, 2, 5)).to_dataframe()) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_a_table_takes_tensors_of_any_dtype_and_with_gradients(dtype: torch.dtype):
    values = torch.tensor([0, 1, 1]).to(dtype)
    table = Measurement(cosine=values, by_layer=torch.ones(3, requires_grad=True)).to_dataframe()
    assert table["cosine"].tolist() == [0, 1, 1]
    assert table["by_layer"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"errors": torch.ones(3, 5)}, r"errors must be a tensor of floats \[layer head prompt\], got .* \[3, 5\]"),
        ({"errors": torch.ones(3, 2, 5, device="meta")}, "errors is on the device 'meta'"),
        ({"errors": torch.ones(1).expand(2**38, 2, 2)}, r"errors has 1\.1e\+12 elements, which repeat"),
        ({"layers": (1, "2")}, "layers must be a tuple of ints"),
        ({"fit": 3.0}, "fit must be Interval or None, got 3.0"),
    ],
)
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
        rest={1: [measurement(), None, True], ("a", 2): range(3)},
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
