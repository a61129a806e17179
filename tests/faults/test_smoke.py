"""A few cases of each campaign, the campaigns' own judgement, and the tests that SECURITY.md names."""

import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from mechicl.algorithms import ridge
from mechicl.base.files import read_json
from mechicl.statistics import interval
from tests.comparing import has_nan, nearly_differing
from tests.faults.__main__ import CAMPAIGNS
from tests.faults.calls import LEFT_OUT, Kind, find_targets, judge_error
from tests.faults.mutations import mutations, raise_user_error
from tests.faults.runner import Outcome, run_apart
from tests.pages import ROOT

SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kills", "damage", "texts"])
def test_a_sample_reaches_its_bar(name):
    """In another process, without the annotation checks of the tests."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.faults", name, "--sample", "--workers", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert "  reached in " in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["hostile", "damage"])
def test_a_case_follows_from_its_number(tmp_path, name):
    texts = []
    for folder in (tmp_path / "first", tmp_path / "again"):
        folder.mkdir()
        campaign = CAMPAIGNS[name](folder, seed=5)
        campaign.prepare()
        outcomes = [campaign.case(number) for number in range(3)]
        texts.append([(each.kind, each.text.replace(folder.name, "")) for each in outcomes])
        assert all(each.good for each in outcomes), texts
    assert texts[0] == texts[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:os.fork")  # JAX's, if another test has imported it
def test_cases_have_time_limits_and_their_own_processes():
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
    assert "ZeroDivisionError: of the case" in outcomes[3].text
    assert len(outcomes[4].text) == 200_000


@pytest.mark.parametrize(("call", "name", "value", "kind"), [
    (partial(ridge, None, penalty="x"), "prompts", None, Kind.NAMED),  # type: ignore[arg-type]
    (partial(ridge, None, penalty="x"), "steps", object(), Kind.UNNAMED),  # type: ignore[arg-type]
    (partial(torch.ones, -1), "n", -1, Kind.RAW),
    (partial(read_json, Path("/nonexistent")), "path", Path("/nonexistent"), Kind.NAMED),
    (partial(torch.empty, 2**45), "n", 2**45, Kind.LARGE),
    (raise_user_error, "function", raise_user_error, Kind.USERS),
])  # fmt: skip
def test_errors_are_judged(call, name, value, kind):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    assert judge_error(caught.value, [name], [value]) == kind


def test_results_are_compared_up_to_rounding():
    samples = torch.tensor([1.0, 2.0, 4.0])
    assert not nearly_differing(interval(samples), interval(samples.double()))
    assert nearly_differing(interval(samples), interval(1.01 * samples))
    assert nearly_differing({"a": [samples]}, {"a": [samples[:2]]})
    assert not nearly_differing([1, "x", None], (1.0, "x", None))
    assert all(map(has_nan, (float("nan"), [{"a": torch.tensor([torch.nan])}], np.float32("nan"))))
    assert not has_nan([1.0, "nan"])


def test_mutations_say_whether_they_can_be_right():
    kinds = {mutation.text: mutation.kind for mutation in mutations(3, int)}
    assert kinds["nan"] == kinds["a string"] == kinds["True"] == kinds["None"] == "bad"
    assert (kinds["as numpy's"], kinds["-1"]) == ("same", "open")
    assert {mutation.text: mutation.kind for mutation in mutations(3, int | None)}["None"] == "open"


def test_functions_that_are_left_out_exist():
    assert set(LEFT_OUT) <= {target.name for target in find_targets()}


@pytest.mark.parametrize("path", re.findall(r"`(tests/[\w/]+\.py)`", SECURITY))
def test_security_names_existing_files(path):
    assert (ROOT / path).is_file()


def test_every_promise_of_security_names_tests_or_campaigns():
    named = set(re.findall(r"`python -m tests\.faults (\w+)`", SECURITY))
    assert {"hostile", "texts", "damage", "kills"} <= named <= set(CAMPAIGNS)
    rows = [line for line in SECURITY.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) > 6
    assert all("tests" in row.split("|")[2] for row in rows)
