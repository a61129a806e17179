"""The index of figures and tables: it is complete, up to date, and says what the scripts claim."""

import importlib
import re
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from mechicl.checkpoints import available
from mechicl.reports import Claim, Comparison, Row
from mechicl.reports.comparison import finite
from mechicl.reports.sources import read_sources
from mechicl.training import PRESETS

ANALYSES = Path(__file__).parent.parent / "analyses"
NAMES = sorted(path.stem for path in (ANALYSES / "results").glob("*.json"))


def load(name: str) -> ModuleType:
    """A script as a module."""
    sys.path.insert(0, str(ANALYSES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ANALYSES))


@pytest.fixture(scope="module")
def index() -> ModuleType:
    return load("index")


@pytest.fixture(scope="module")
def results(index) -> dict[str, Comparison]:
    return index.read_results(ANALYSES / "results")


def test_the_readme_is_up_to_date(index, results):
    text = (ANALYSES / "README.md").read_text(encoding="utf-8")
    written = index.write(list(results.values()), sorted(ANALYSES.glob("*.py")))
    assert written == text, "run `python analyses/index.py`"
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")}
    assert widths == {8, 5, 4}


@pytest.mark.parametrize("name", NAMES)
def test_a_script_claims_of_its_saved_rows_what_the_results_file_holds(index, results, name):
    comparison = results[name]
    script = load(index.command(comparison).split()[0].removesuffix(".py"))
    stated = [finite(asdict(claim)) for claim in script.claims(comparison)]
    assert stated == [finite(asdict(claim)) for claim in comparison.claims], "run `python analyses/index.py --restate`"
    assert stated
    assert {claim["source"] for claim in stated} <= set(index.LEADS) <= set(read_sources())
    assert set(comparison.data["checkpoints"]) <= {*available(), *PRESETS}


def test_every_script_appears():
    text = (ANALYSES / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in ANALYSES.glob("*.py") if f"`python analyses/{path.name}" not in text] == []


def claim(what: str, measured: float) -> Claim:
    return Claim("fu2024", "Fig. 9", what, {"a": [Row("loss | 1", 2.0, measured)]}, why="because")


def test_lines_of_one_claim_in_two_files_are_joined(index):
    files = [
        Comparison("", "", [], data={"command": f"python analyses/{i}.py"}, claims=[claim("loss", measured)])
        for i, measured in enumerate((2.0, 3.0))
    ]
    joined = {entry.what: (entry, commands) for entry, commands in index.joined(files).items()}
    entry, commands = joined["loss"]
    assert commands == ["0.py", "1.py"]
    assert (entry.verdict, entry.outcomes()) == ("agrees in part", [True, False])
    assert index.measured_cell(entry) == "a: 2, 3"
    assert index.published_cell(entry) == "2"
    assert index.why_cell(entry) == "1 of 2; ratios 1.000 to 1.500; because"


def test_check_sees_a_change_of_the_results(index, tmp_path, monkeypatch, capsys):
    files = {"command": "python analyses/a.py", "checkpoints": [], "date": "2026-01-01"}
    Comparison("Title", "Lead", [], data=files, claims=[claim("loss", 2.0)]).write(tmp_path / "results", "a")
    monkeypatch.setattr(index, "HERE", tmp_path)

    def main(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["index.py", *arguments])
        index.main()

    with pytest.raises(SystemExit, match="not what the results say"):
        main("--check")
    main()
    main("--check")
    assert "1 agrees, 0 agrees in part" in capsys.readouterr().out
    path = tmp_path / "results" / "a.json"
    path.write_text(path.read_text().replace('"measured": 2.0', '"measured": 3.0'))
    with pytest.raises(SystemExit, match="not what the results say"):
        main("--check")
    path.write_text("{}")
    with pytest.raises(SystemExit, match=r"a\.json holds no saved comparison"):
        main()
