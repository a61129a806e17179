"""Every class of results: its table, text, intervals and files, on instances that are made from its annotations."""

import dataclasses
import importlib
import inspect
import math
import pkgutil
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pandas as pd
import pytest
import torch
from torch import Tensor

from mechicl import analysis
from mechicl.base.annotations import is_array
from mechicl.statistics import Interval, Result, interval, load_result

for module in pkgutil.walk_packages(analysis.__path__, "mechicl.analysis."):
    importlib.import_module(module.name)


def subclasses(kind: type) -> set[type]:
    return {kind} | {each for child in kind.__subclasses__() for each in subclasses(child)}


RESULTS = sorted((each for each in subclasses(Result) - {Result} if each.__module__.startswith("mechicl.")),
                 key=lambda each: each.__name__)  # fmt: skip


def made(hint: Any, n: int = 5) -> Any:
    """A value of a type: axes and collections have two entries, and samples (the last axis) `n`."""
    origin, args = get_origin(hint), get_args(hint)
    if is_array(hint):
        names = [name for name in hint.dim_str.split() if not name.startswith(("*", "."))]
        shape = (*([2] * (len(names) - 1)), n)
        return torch.randint(9, shape) if all("int" in dtype for dtype in hint.dtypes) else torch.rand(shape)
    if origin in (Union, UnionType):
        return made(args[0], n)
    if origin is Literal:
        return args[0]
    if origin is dict:
        return {made(args[0]) + i: made(args[1], n) for i in (["", "b"] if args[0] is str else [0, 1])}
    if origin is tuple and Ellipsis not in args:
        return tuple(made(each, n) for each in args)
    if origin in (list, tuple):
        return origin([made(args[0], n)] * 2)
    if hint is Interval:
        return interval(torch.rand(5))
    plain = {str: "a", int: 1, float: 0.5, bool: True, Tensor: torch.rand(n), Any: None}
    if hint in plain:
        return plain[hint]
    return build(hint, [n] * 99) if dataclasses.is_dataclass(hint) and inspect.isclass(hint) else None


def build(kind: type, samples: list[int]) -> Any:
    hints = get_type_hints(kind)
    fields = [each for each in dataclasses.fields(kind) if each.metadata.get("stored", True)]
    fields = [each for each in fields if each.default is dataclasses.MISSING or is_array(hints[each.name])]
    return kind(**{each.name: made(hints[each.name], n) for each, n in zip(fields, samples, strict=False)})


TESTED_ELSEWHERE = {  # their fields depend on one another
    "ConstructionFit", "FamilyMatch", "HeadScores", "Identification", "InterventionSweep", "StrategyTracking",
    "TaskTexts",
}  # fmt: skip
RESULTS = [each for each in RESULTS if each.__name__ not in TESTED_ELSEWHERE]


@pytest.mark.parametrize("kind", RESULTS, ids=lambda each: each.__name__)
def test_every_result_has_a_table_a_text_intervals_and_files(kind, tmp_path):
    result = build(kind, [5] * 99)
    table = result.to_dataframe()
    assert isinstance(table, pd.DataFrame)
    assert str(result)
    assert kind.__name__ in result._repr_html_()
    for name, found in result.intervals().items():
        assert found.low <= found.mean <= found.high or math.isnan(found.low), name
    again = load_result(result.save(tmp_path / "result"))
    assert type(again) is kind
    pd.testing.assert_frame_equal(again.to_dataframe(), table)
    for name, tensor in result.samples().items():
        torch.testing.assert_close(again.samples()[name], tensor, rtol=0, atol=0)
