"""The campaign's own judgement: what it would call wrong, and that it leaves nothing public out."""

import importlib
import inspect
import os
import pkgutil
import time

import numpy as np
import pytest
import torch

import mechicl
from mechicl.base.checks import check_whole
from mechicl.base.files import read_json
from mechicl.statistics import interval
from tests.faults.fuzz import LEFT_OUT, What, alike, find_targets, has_nan, judge_error
from tests.faults.mutations import OurError, mutations
from tests.faults.part import Outcome, run_apart


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX's, where another test has imported it: no case here uses it
def test_cases_end_with_their_time_and_their_process():
    def case(number: int) -> Outcome:
        if number == 1:
            time.sleep(60)
        if number == 2:
            os._exit(3)
        if number == 3:
            raise ZeroDivisionError("of the case")
        return Outcome("fine", True, "x" * 200_000)

    outcomes = dict(run_apart(case, range(5), workers=2, seconds=10.0))
    assert [outcomes[i].kind for i in range(5)] == ["fine", "too slow", "died", "the case itself failed", "fine"]
    assert [outcomes[i].good for i in range(5)] == [True, False, False, False, True]
    assert "ZeroDivisionError: of the case" in outcomes[3].words
    assert len(outcomes[4].words) == 200_000


def caught(function, *args, **kwargs) -> Exception:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError("no error")


def test_errors_are_ours_and_named_or_they_are_not(tmp_path):
    ours = caught(check_whole, 1, steps=-1)
    assert judge_error(ours, ["steps"], [-1]) == What.NAMED
    assert judge_error(ours, ["prompts"], [object()]) == What.UNNAMED
    assert judge_error(caught(torch.ones, -1), ["n"], [-1]) == What.RAW
    assert judge_error(caught(check_whole, "1", steps=1), ["least"], ["1"]) == What.RAW  # Python's own, of a comparison
    assert judge_error(caught(read_json, tmp_path / "x"), ["path"], [tmp_path]) == What.NAMED
    assert judge_error(caught(torch.empty, 2**45), ["n"], [2**45]) == What.LARGE
    assert judge_error(OurError(), [], []) == What.USERS


def test_results_are_alike_up_to_rounding():
    samples = torch.tensor([1.0, 2.0, 4.0])
    assert alike(interval(samples), interval(samples.double()))
    assert not alike(interval(samples), interval(1.01 * samples))
    assert not alike({"a": [samples]}, {"a": [samples[:2]]})
    assert alike([1, "x", None], (1.0, "x", None))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), True),
        ([{"a": torch.tensor([1.0, torch.nan])}], True),
        (np.float32("nan"), True),
        ([1.0, "nan"], False),
    ],
)
def test_a_nan_is_found_wherever_it_is(value, expected):
    assert has_nan(value) == expected


def test_changes_of_an_argument_say_whether_they_can_be_right():
    kinds = {mutation.words: mutation.kind for mutation in mutations(3, int)}
    assert kinds["nan"] == kinds["a word"] == kinds["True"] == kinds["None"] == "bad"
    assert kinds["as numpy's"] == "same"
    assert kinds["-1"] == "open"
    assert {mutation.words: mutation.kind for mutation in mutations(3, int | None)}["None"] == "open"


def test_no_public_function_is_left_out_without_a_reason():
    called = {inspect.unwrap(target.function) for target in find_targets()}
    for module in pkgutil.walk_packages(mechicl.__path__, "mechicl."):
        if module.ispkg and not module.name.startswith("mechicl.cli"):
            package = importlib.import_module(module.name)
            for name in getattr(package, "__all__", ()):
                member = getattr(package, name)
                if inspect.isfunction(member):
                    assert inspect.unwrap(member) in called, f"{module.name}.{name}"
    assert set(LEFT_OUT) <= {target.name for target in find_targets()}
