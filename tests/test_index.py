"""The index of figures and tables is complete, up to date, and agrees with the scripts."""

import importlib
import re
import sys
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from types import ModuleType, SimpleNamespace

import pytest

from analyses.support.claims import Claim, Paper, judge, read_papers
from analyses.support.results import Results
from mechicl.checkpoints import available
from mechicl.reports import Row
from mechicl.reports.published import read_sources
from mechicl.statistics import Interval
from mechicl.training import PRESETS
from tests.scripts import ANALYSES, import_script

NAMES = sorted(path.stem for path in (ANALYSES / "results").glob("*.json"))


@pytest.fixture(scope="module")
def index() -> ModuleType:
    return import_script("index")


@pytest.fixture(scope="module")
def results(index) -> dict[str, Results]:
    return index.read_results(ANALYSES / "results")


def test_the_readme_is_up_to_date(index, results):
    text = (ANALYSES / "README.md").read_text(encoding="utf-8")
    written = index.write(list(results.values()), index.find_scripts())
    assert written == text, "run `python analyses/index.py`"
    assert len(index.find_scripts()) > 60
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")}
    assert widths == {10, 5, 4}


@pytest.mark.parametrize("name", NAMES)
def test_a_results_file_has_the_rows_that_claims_are_on(index, results, name):
    comparison = results[name]
    without = ("does_it_run", "learned_subspaces", "sweep_", "clamped_", "strategy_phases", "transience",
               "learning_coefficients", "beyond_attention", "parameter_free", "query_side",
               "isolated_points", "loose_ends", "learner_kinds", "fu_matching_gpt2-8l-d10",
               "update_controls", "oswald_tuning_draws", "table_")  # fmt: skip
    if name.startswith(without):  # no claims of papers
        assert not comparison.claims
        return
    assert comparison.claims or name.startswith("known_")  # no paper has these models
    script = importlib.import_module(index.command(comparison).split()[0].removesuffix(".py").replace("/", "."))
    derived = script.compare.derived(comparison) if comparison.claims else []
    assert [row.to_json() for row in derived] == [row.to_json() for row in comparison.derived]
    assert {paper.source for paper in read_papers()} <= set(read_sources())
    assert set(comparison.data["checkpoints"]) <= {*available(), *PRESETS}


def test_every_claim_of_a_papers_table_is_on_a_results_file():
    entries = [entry for paper in read_papers() for entry in paper.entries]
    patterns = {entry["results"] for entry in entries if entry["results"]}
    assert [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in NAMES)] == []
    known = {each.name for each in fields(Claim)} | {"results", "rows", "printed", "optional"}
    assert {key for entry in entries for key in entry} <= known


def test_no_entry_lacks_a_measurement_a_control_or_a_cause(index, results):
    weak = index.lacking(list(results.values()))
    assert weak == []


def claim(what: str, measured: float) -> Claim:
    lines = {"a": [Row("loss | 1", 2.0, measured)]}
    return Claim("fu2024", "Fig. 9", what, lines, judge(lines), why="because")


def test_lines_of_one_claim_in_two_files_are_joined(index):
    files = [
        SimpleNamespace(data={"command": f"python analyses/{i}.py"}, claims=[claim("loss", measured)])
        for i, measured in enumerate((2.0, 3.0))
    ]
    joined = {entry.what: (entry, commands) for entry, commands in index.joined(files).items()}
    entry, commands = joined["loss"]
    assert commands == ["0.py", "1.py"]
    assert (entry.verdict, entry.outcomes) == ("agrees in part", [True, False])
    assert index.measured_cell(entry) == "a: 2, 3"
    assert index.published_cell(entry) == "2"
    assert index.why_cell(entry) == "1 of 2; ratios 1.000 to 1.500; because"


def test_missing_parts_of_an_entry(index):
    controls = {"untrained": [Row("loss", 2.0, 5.0)]}
    agreeing = replace(claim("agrees", 2.0), controls=controls, untrained_verdict="differs")
    differing = replace(agreeing, what="differs", lines={"": [Row("loss", 2.0, 3.0)]}, outcomes=[False])
    assert (agreeing.lacks, agreeing.standing) == ("", "agrees")
    assert claim("loss", 2.0).lacks == "the untrained control"
    assert replace(claim("loss", 2.0), trained=False).lacks == ""
    assert differing.lacks == "a cause, a control that supports the cause"
    explained = replace(differing, cause="size", controls={**controls, "larger": [Row("loss", None, 2.1)]})
    assert explained.lacks == ""
    assert index.control_cell(explained) == "untrained: 5 (**differs**)<br>larger: 2.1"
    assert index.control_cell(claim("loss", 2.0)) == "untrained: not measured yet"
    assert index.control_cell(replace(claim("loss", 2.0), trained=False)) == "nothing trained"
    many = replace(agreeing, controls={"untrained": [Row("loss", None, float(i)) for i in range(9)]})
    assert index.control_cell(many) == "untrained: 0 to 8 (9 values) (**differs**)"
    assert index.why_cell(explained) == "ratio 1.500; cause: size; because"


def test_n_is_the_fewest_seeds(index):
    def over(*samples: tuple[float, int, str]) -> str:
        rows = [Row("loss", None, Interval(mean, mean, mean, n), words) for mean, n, words in samples]
        return index.n_cell(replace(claim("loss", 2.0), lines={"": rows}))

    assert over((1.0, 5, "seeds"), (2.0, 5, "seeds")) == "5 seeds"
    assert over((1.0, 5, "seeds"), (2.0, 1, "seed"), (2.0, 900, "prompts")) == "1 seed"
    assert over((1.0, 5000, "prompts")) == "5,000 prompts"
    assert over((1.0, 20, "draws"), (1.0, 900, "prompts")) == "—"
    assert index.n_cell(claim("loss", 2.0)) == "—"


def test_check_notices_changes_and_strict_missing_parts(index, tmp_path, monkeypatch, capsys):
    files = {"command": "python analyses/a.py", "checkpoints": [], "date": "2026-01-01"}
    Results("Title", "Lead", [Row("loss", 2.0, 2.0)], data=files).write(tmp_path / "results", "a")
    papers = [Paper("fu2024", "", [{"results": "a", "item": "Fig. 9", "what": "loss", "rows": ["loss"]}])]
    monkeypatch.setattr("analyses.support.claims.read_papers", lambda: papers)
    monkeypatch.setattr(index, "HERE", tmp_path)

    def main(*arguments: str) -> object:
        monkeypatch.setattr(sys, "argv", ["index.py", *arguments])
        try:
            index.main()
        except SystemExit as ended:
            return ended.code
        return None

    assert "not what the results say" in str(main("--check"))
    assert main() is None
    assert "1 agrees, 0 agrees in part" in capsys.readouterr().out
    assert (main("--check"), main("--strict")) == (0, 1)
    assert "fu2024, Fig. 9, loss: lacks the untrained control" in capsys.readouterr().err
    path = tmp_path / "results" / "a.json"
    path.write_text(path.read_text().replace('"measured": 2.0', '"measured": 3.0'))
    assert "not what the results say" in str(main("--check"))
    path.write_text("{}")
    assert "a.json does not contain a saved comparison" in str(main())
