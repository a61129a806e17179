"""The README: short, its code is the first page's, and what it names exists."""

import importlib
import re

from support.results import Results
from tests.pages import ROOT, blocks

PATH = ROOT / "README.md"
README = PATH.read_text(encoding="utf-8")
FIRST_PAGE = ROOT / "docs" / "index.md"


def test_it_is_short():
    assert len(README.splitlines()) <= 150
    (code,) = blocks(PATH)
    assert len([line for line in code.code.splitlines() if line.strip()]) <= 15


def test_its_code_and_what_that_prints_are_those_of_the_first_page_which_is_run():
    (readme,) = blocks(PATH)
    page = blocks(FIRST_PAGE)
    assert lines(readme.code) == [line for block in page for line in lines(block.code)]
    assert lines(readme.output) == [line for block in page for line in lines(block.output)]


def lines(text: str | None) -> list[str]:
    return [line for line in (text or "").splitlines() if line.strip()]


def test_names_are_public():
    for room, name in re.findall(r"\b(analysis|algorithms|constructions|viz)\.(\w+)", README):
        assert hasattr(importlib.import_module(f"mechicl.{room}"), name), f"{room}.{name}"


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)", README)
    assert len(targets) > 20
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


def test_numbers_of_the_findings_are_on_their_pages():
    part = README.partition("## What it found")[2].partition("\n## ")[0]
    for item in re.split(r"\n(?=\d\. )", part):
        pages = "".join(
            (ROOT / page).read_text(encoding="utf-8") for page in re.findall(r"docs/findings/[\w-]+\.md", item)
        )
        for number in re.findall(r"\d+\.\d+ ± \d+\.\d+", item):
            assert number in pages, number


def test_numbers_of_the_findings_are_those_of_the_index():
    part = README.partition("## What it found")[2].partition("\n## ")[0]
    results = [Results.read(path) for path in sorted((ROOT / "analyses" / "results").glob("*.json"))]
    rows = [row for comparison in results for row in comparison.rows]
    claims = [claim for comparison in results for claim in comparison.claims]
    rows += [row for claim in claims for each in (*claim.lines.values(), *claim.controls.values()) for row in each]
    printed = {str(row) for row in rows}
    numbers = re.findall(r"-?\d[\d.]* ± [\d.]*\d|-?\d[\d.]* \([\d.-]+ to [\d.-]*\d\)|\d+ of \d+ seeds", part)
    assert numbers
    for number in numbers:
        assert number in printed, f"{number}: no results file prints it"


def test_the_picture_is_small():
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert (ROOT / picture).stat().st_size <= 80_000
