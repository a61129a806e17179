"""Tables of random functions: sizes, missing cells, labels, and columns that matter."""

import statistics
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from mechicl.base.arguments import ArgumentError
from mechicl.prompts import Tables
from mechicl.tasks import TableClassification, TableRegression
from mechicl.tasks.sampling import RandomTensors
from mechicl.tasks.tables import _random_functions


def test_sizes_are_drawn_anew_for_each_batch():
    generator = torch.Generator().manual_seed(0)
    task = TableRegression(x_dim=3, n_context=40, n_queries=7, varied=True)
    drawn = [task.sample_tables(2, generator=generator) for _ in range(60)]
    assert {tables.xs.shape[2] for tables in drawn} == {1, 2, 3}
    rows = [tables.n_context for tables in drawn]
    assert min(rows) < 10 < 30 < max(rows) <= 40
    assert {tables.n_queries for tables in drawn} == {7}
    assert task.sample(2, seed=0).xs.shape == (2, 41, 3)


def test_the_same_seed_gives_the_same_tables():
    task = TableClassification(missing=0.2, n_queries=3)
    first, second = (task.sample_tables(4, seed=5) for _ in range(2))
    assert torch.equal(first.xs.nan_to_num(7.0), second.xs.nan_to_num(7.0))
    assert torch.equal(first.ys, second.ys)


def test_missing_cells_are_in_half_of_the_tables():
    tables = TableRegression(missing=0.3, n_queries=50).sample_tables(400, seed=0)
    shares = tables.xs.isnan().double().mean((1, 2))
    assert 0.4 < (shares > 0).double().mean() < 0.6
    assert shares[shares > 0].mean() == pytest.approx(0.3, abs=0.01)
    assert not tables.ys.isnan().any()


def test_labels_have_mean_0_and_mean_square_1():
    ys = TableRegression(n_context=4000).sample_tables(20, seed=0).ys
    torch.testing.assert_close(ys.mean(1), torch.zeros(20, 1), rtol=0, atol=0.02)
    torch.testing.assert_close(ys.square().mean(1), torch.ones(20, 1), rtol=0, atol=0.1)


@pytest.mark.parametrize("kind", [TableRegression, TableClassification])
def test_labels_of_the_context_do_not_tell_the_sum_of_all(kind: Any):
    # scaled by all rows, the query's label would be minus the sum of the others': a slope of -8
    ys = kind(n_context=8).sample_tables(4000, seed=0).ys[..., 0].double()
    mean = ys[:, :8].mean(1)
    slope = ((mean - mean.mean()) * ys[:, 8]).sum() / (mean - mean.mean()).square().sum()
    assert slope > -0.2


def test_classes_of_a_table():
    tables = TableClassification(n_classes=4, n_context=200).sample_tables(300, seed=0)
    assert tables.ys.sum(-1).eq(1).all()
    present = (tables.ys.sum(1) > 0).sum(-1)
    assert set(present.tolist()) == {2, 3, 4}


@pytest.mark.parametrize("seed", range(5))
def test_functions_depend_on_used_columns_only(seed: int):
    def values(xs: torch.Tensor) -> torch.Tensor:
        return _random_functions(xs, used, RandomTensors(torch.Generator().manual_seed(seed)))

    used = torch.tensor([[True, False, True]]).expand(200, -1)
    xs = torch.randn(200, 30, 3, generator=torch.Generator().manual_seed(99))
    changed = [xs.clone() for _ in range(3)]
    for column in range(3):
        changed[column][..., column] = changed[column][..., column].roll(1, 1)
    differ = [(values(each) != values(xs)).any(1).double().mean().item() for each in changed]
    assert differ[1] == 0
    assert min(differ[0], differ[2]) > 0.8  # trees may use one of them only


@pytest.mark.parametrize("settings", [{"relevant": 1.5}, {"missing": -0.1}, {"n_queries": 0}, {"x_dim": 0}])
def test_errors(settings: dict[str, Any]):
    with pytest.raises((ValueError, TypeError), match=next(iter(settings))):
        TableRegression(**settings)


def test_classification_has_two_classes_or_more():
    with pytest.raises(ValueError, match="n_classes must be an int of at least 2"):
        TableClassification(n_classes=1)


def test_prompts_of_tables_are_those_of_a_loop():
    tables = TableRegression(x_dim=2, n_context=5, n_queries=3, missing=0.4).sample_tables(12, seed=1)
    prompts = tables.prompts()
    assert len(prompts) == 36
    for table in range(12):
        for query in range(3):
            each = prompts[[3 * table + query]]
            for column in range(2):
                seen = tables.xs[table, :5, column]
                seen = seen[~seen.isnan()].tolist()
                median = statistics.median(seen) if seen else 0.0
                for row, place in enumerate([0, 1, 2, 3, 4, 5 + query]):
                    cell = tables.xs[table, place, column].item()
                    expected = cell if cell == cell else pytest.approx(median, rel=1e-6)
                    assert each.xs[0, row, column].item() == expected
            assert torch.equal(each.ys[0, :-1], tables.ys[table, :5])
            assert torch.equal(each.query.ys[0], tables.targets[table, query])


def test_tables_are_checked():
    xs, ys = torch.zeros(1, 4, 2), torch.zeros(1, 4, 1)
    for arguments, message in (
        ((xs, ys[:, :3], 2), "the same tables and rows"),
        ((xs, ys, 4), "must leave a row"),
        ((xs / 0 + 1, ys + torch.inf, 2), "labels finite"),
        ((xs + torch.inf, ys, 2), "cells must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            Tables(*arguments)
    made = Tables.from_arrays([[1.0, float("nan")], [2.0, 3.0]], [5.0, 6.0], [[0.0, 1.0]])
    assert (made.n_context, made.n_queries) == (2, 1)
    assert made.xs.isnan().sum() == 1
    assert made.targets.item() == 0
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    made = Tables.from_arrays(frame, [5.0, 6.0], frame[["b", "a"]])
    assert made.xs[0].tolist() == 2 * [[1.0, 3.0], [2.0, 4.0]]
    numbered = frame.set_axis([0, 1], axis=1)
    made = Tables.from_arrays(numbered, [5.0, 6.0], numbered[[1, 0]].rename(columns=str))
    assert made.xs[0].tolist() == 2 * [[1.0, 3.0], [2.0, 4.0]]
    whole = pd.DataFrame({"a": pd.array([1, None], dtype="Int64"), "b": [3, 4]})
    made = Tables.from_arrays(whole, pd.Series([5, 6], dtype="Int64"), whole)
    np.testing.assert_array_equal(made.xs[0].numpy(), 2 * [[1.0, 3.0], [np.nan, 4.0]])
    assert made.ys[0, :2, 0].tolist() == [5.0, 6.0]
    with pytest.raises(ArgumentError, match=r"must have the columns of xs, \['a', 'b'\], got \['b'\]"):
        Tables.from_arrays(frame, [5.0, 6.0], frame[["b"]])
