"""What SECURITY.md promises is tested by tests that there are."""

import re

import pytest

from tests.faults.campaign import PARTS
from tests.pages import ROOT

WORDS = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("path", "test"), re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", WORDS))
def test_every_test_that_is_named_is_there(path, test):
    assert re.search(rf"^def {test}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_parts_of_the_campaign_that_are_named_are_there():
    named = set(re.findall(r"`python -m tests\.faults (\w+)`", WORDS))
    assert {"hostile", "strings", "damage", "kills"} <= named <= set(PARTS)


def test_every_promise_names_a_test():
    rows = [line for line in WORDS.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) > 6
    assert all("tests" in row.split("|")[2] for row in rows)
