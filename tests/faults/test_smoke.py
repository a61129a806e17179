"""A few cases of each campaign, and the tests that SECURITY.md names."""

import os
import re
import subprocess
import sys
import time

import pytest

from tests.faults.__main__ import CAMPAIGNS
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


@pytest.mark.parametrize("path", re.findall(r"`(tests/[\w/]+\.py)`", SECURITY))
def test_security_names_existing_files(path):
    assert (ROOT / path).is_file()


def test_every_promise_of_security_names_tests_or_campaigns():
    named = set(re.findall(r"`python -m tests\.faults (\w+)`", SECURITY))
    assert {"hostile", "texts", "damage", "kills"} <= named <= set(CAMPAIGNS)
    rows = [line for line in SECURITY.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) > 6
    assert all("tests" in row.split("|")[2] for row in rows)
