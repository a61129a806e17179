"""A sample of the campaign (`make faults`), the same cases in every run, in a process without the tests' own checks."""

import os
import subprocess
import sys

import pytest

from tests.faults.damage import Damage
from tests.pages import ROOT

HELD = ("kills", "damage", "strings")
"""Parts whose bars are reached."""


@pytest.fixture(scope="module")
def said() -> str:
    """What a sample of these parts prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.faults", *HELD, "--sample", "--workers", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("part", HELD)
def test_a_sample_reaches_its_bar(said, part):
    (lines,) = (lines for lines in said.split("\n\n") if lines.strip().startswith(f"{part}: "))
    assert "  reached in " in lines, lines


def test_a_case_follows_from_its_number(tmp_path):
    words = []
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
        part = Damage(tmp_path / name, seed=5)
        part.prepare()
        outcomes = [part.case(number) for number in range(3)]
        words.append([(each.kind, each.words.replace(name, "")) for each in outcomes])
    assert words[0] == words[1]
