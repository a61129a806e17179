"""The index of figures and tables: its verdicts, its errors, and that it is complete and up to date."""

import importlib
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mechicl.checkpoints import available
from mechicl.training import PRESETS

ANALYSES = Path(__file__).parent.parent / "analyses"
RESULTS = ANALYSES / "results"


def load(path: Path) -> ModuleType:
    """A script as a module, with what lies beside it importable."""
    sys.path.insert(0, str(path.parent))
    try:
        return importlib.import_module(path.stem)
    finally:
        sys.path.remove(str(path.parent))


index = load(ANALYSES / "index.py")
entries = sys.modules["index_entries.entry"]
Entry, Made, Pattern, Derived, rows = (getattr(entries, n) for n in ("Entry", "Made", "Pattern", "Derived", "rows"))


def interval(mean, low, high, n=5):
    return {"mean": mean, "low": low, "high": high, "n": n, "level": 0.95}


def row(quantity, published, measured, note=""):
    return {"quantity": quantity, "published": published, "measured": measured, "over": "seeds", "note": note}


@pytest.fixture
def library(tmp_path):
    """Made-up results."""
    table = [
        row("inside", 1.0, interval(1.1, 0.9, 1.3)),
        row("inside a wide one", 1.0, interval(1.1, 0.2, 2.0)),
        row("within 5%", 2.0, interval(2.08, 2.07, 2.09)),
        row("beyond 5%", 2.0, interval(2.12, 2.11, 2.13), "noted"),
        row("number", 0.5, 0.51),
        row("zero", 0, interval(0.0, 0.0, 0.0)),
        row("in words", "near 1 (Fig. 2)", interval(0.99, 0.98, 1.0)),
        row("not near", "near 1", interval(0.9, 0.89, 0.91)),
        row("badly known", "near 1", interval(0.99, 0.5, 1.48)),
        row("words in words", "all", "7 of 8 seeds"),
        row("nothing printed", None, interval(3.0, 2.0, 4.0)),
        row("not finite", None, interval(None, None, None)),
        row("loss, layer 1", None, 3.0),
        row("loss, layer 2", None, 2.0),
    ]
    data = {"title": "Made up", "date": "2026-01-01", "table": table, "more": [1, 2, 3]}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "made.json").write_text(json.dumps(data))
    made = {name: Made(f"python analyses/{name}.py", ("lsa-1l",)) for name in ("made", "gone")}
    return index.Library(tmp_path / "results", made)


def entry(*quantities, **options):
    return Entry("Fig. 1", "it", rows("made", *quantities), **{"agrees": "yes", "differs": "no", **options})


@pytest.mark.parametrize(
    ("quantity", "verdict"),
    [
        ("inside", "agrees"),
        ("inside a wide one", "differs"),
        ("within 5%", "agrees"),
        ("beyond 5%", "differs"),
        ("number", "agrees"),
        ("zero", "agrees"),
        ("nothing printed", "not printed"),
    ],
)
def test_numbers_agree_within_an_interval_or_5_percent(library, quantity, verdict):
    assert index.judge(entry(quantity), library).verdict == verdict


@pytest.mark.parametrize(
    ("quantity", "verdict"), [("in words", "agrees"), ("not near", "differs"), ("badly known", "differs")]
)
def test_a_predicate_decides_on_words(library, quantity, verdict):
    judged = index.judge(entry(quantity, holds=entries.near_1), library)
    assert (judged.verdict, judged.why) == (verdict, "yes" if verdict == "agrees" else "no")


def test_some_of_several_values_agree_in_part(library):
    judged = index.judge(entry("within 5%", "beyond 5%", in_part="one"), library)
    assert judged.verdict == "agrees in part"
    assert judged.why == "1 of 2; ratios 1.040 to 1.060; one"


def test_rows_are_compared_with_each_other(library):
    falling = entry(Pattern("loss, layer *", 2), claim="falls", compare=entries.falls)
    assert index.judge(falling, library).verdict == "agrees"
    rising = entry("loss, layer 2", "loss, layer 1", claim="falls", compare=entries.falls)
    assert index.judge(rising, library).verdict == "differs"


def test_a_reason_quotes_measured_values_and_notes(library):
    cited = entry("beyond 5%", differs="because of {it}", cites={"it": rows("made", "number")}, notes=True)
    assert index.judge(cited, library).why == "ratio 1.060; because of 0.51; noted"


def test_without_a_script_an_entry_is_open(library):
    assert index.judge(Entry("Fig. 1", "it", remark="no script yet"), library).verdict == "open"
    assert index.judge(Entry("Fig. 1", "it", measurable=False), library).verdict == "not printed"


def test_data_beside_the_table_are_rows_too(library):
    derived = entry(Derived("last", lambda data: float(data["more"][-1])), claim="3", holds=entries.equals(3))
    assert index.judge(derived, library).verdict == "agrees"


def test_words_without_a_predicate_are_an_error(library):
    with pytest.raises(ValueError, match="'in words' needs a predicate"):
        index.judge(entry("in words"), library)
    with pytest.raises(ValueError, match="a comparison needs a claim"):
        index.judge(entry("loss, layer 1", compare=entries.falls), library)
    with pytest.raises(TypeError, match="'7 of 8 seeds' was measured"):
        index.judge(entry("words in words", holds=entries.near_1), library)
    assert index.judge(entry("words in words", holds=entries.all_of_them), library).verdict == "differs"


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (rows("gone", "inside"), r"no .*gone\.json: make it with `python analyses/gone\.py`"),
        (rows("made", "outside"), r"made\.json has no row 'outside': make it anew with `python analyses/made\.py`"),
        (rows("made", Pattern("outside*", 3)), r"made\.json has no row 'outside\*'"),
        (rows("made", Pattern("loss*", 1)), r"2 rows of .*made\.json match 'loss\*', more than 1"),
        (rows("made", Derived("far", lambda data: data["less"])), r"made\.json has no data for 'far' \(KeyError"),
    ],
)
def test_what_is_missing_is_named_with_the_command_that_makes_it(library, sources, message):
    with pytest.raises(index.MissingResultsError, match=message):
        index.judge(Entry("Fig. 1", "it", sources), library)


def test_cells(library):
    one = index.judge(entry("in words", holds=entries.near_1), library)
    assert index.measured_cell(one.entry, one.rows) == "0.990 ± 0.010 (5 seeds)"
    assert index.published_cell(one.entry, one.rows) == "near 1"
    two = index.judge(entry("within 5%", "number", labels=("a", "b")), library)
    assert index.measured_cell(two.entry, two.rows) == "a: 2.080 ± 0.010 (5 seeds)<br>b: 0.51 (seeds)"
    assert index.published_cell(two.entry, two.rows) == "2<br>0.5"
    three = index.judge(entry("not finite"), library)
    assert index.measured_cell(three.entry, three.rows) == "not finite (5 seeds)"
    assert math.isnan(three.rows[0].measured.mean)
    assert index.published_cell(three.entry, three.rows) == "—"
    with pytest.raises(ValueError, match="3 rows for 2 labels"):
        index.measured_cell(entry(labels=("a", "b")), [*two.rows, *one.rows])


def test_check_sees_a_change_of_the_results(library, tmp_path, monkeypatch, capsys):
    paper = sys.modules["index_entries.entry"].Paper("A paper", "", (entry("inside"),))
    monkeypatch.setattr(index, "HERE", tmp_path)
    monkeypatch.setattr(index, "MADE", {"made": library.made["made"]})
    monkeypatch.setattr(index, "PAPERS", (paper,))
    monkeypatch.setattr(sys, "argv", ["index.py", "--check"])
    with pytest.raises(SystemExit, match="not what the results say"):
        index.main()
    monkeypatch.setattr(sys, "argv", ["index.py"])
    index.main()
    assert "1 entries: 1 agrees, 0 agrees in part" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["index.py", "--check"])
    index.main()
    path = tmp_path / "results" / "made.json"
    path.write_text(path.read_text().replace('"mean": 1.1, "low": 0.9', '"mean": 1.2, "low": 1.1'))
    with pytest.raises(SystemExit, match="not what the results say"):
        index.main()
    path.unlink()
    with pytest.raises(SystemExit, match=r"there is no .*made\.json"):
        index.main()


# ---- the real one ----


def used():
    every = [found for paper in index.PAPERS for found in paper.entries]
    sources = [source for found in every for cited in (found.sources, *found.cites.values()) for source in cited]
    return {source.results for source in sources}


def test_every_results_file_is_indexed():
    assert {path.stem for path in RESULTS.glob("*.json")} <= used() | set(index.NOT_INDEXED)
    assert used() == set(index.MADE)


def test_every_script_appears():
    commands = [*(made.command for made in index.MADE.values()), *index.UNSAVED]
    named = {match[1] for match in (re.match(r"python analyses/(\w+\.py)", command) for command in commands) if match}
    assert named == {path.name for path in ANALYSES.glob("*.py")}


def test_checkpoints_that_scripts_need_can_be_had():
    needs = {name for made in index.MADE.values() if not isinstance(made.needs, str) for name in made.needs}
    assert needs <= {*available(), *PRESETS}


@pytest.fixture(scope="module")
def real():
    return index.Library(RESULTS, index.MADE)


def test_the_readme_is_up_to_date(real):
    text = (ANALYSES / "README.md").read_text(encoding="utf-8")
    assert index.write(real, index.PAPERS) == text, "run `python analyses/index.py`"
    widths = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")]
    assert set(widths) == {8, 5}


def test_every_disagreement_has_a_reason(real):
    for paper in index.PAPERS:
        for found in paper.entries:
            judged = index.judge(found, real)
            assert judged.why or judged.verdict == "agrees", (found.item, found.what)
