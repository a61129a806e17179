import json
import types

import pytest

from tests.pages import ROOT
from tests.scripts import import_script

suite = import_script("benchmarks.suite")
QUIET = suite.Load(seconds=1.0, others=0.02, average=0.1, cores=2)
LOADED = suite.Load(seconds=1.0, others=1.2, average=2.1, cores=2)
BLOCK = "<!-- part: {} -->\n\n```text\nold\n```\n\n"
PAGE = f"# Benchmarks\n\n{BLOCK.format('machine')}Of it:\n\n{BLOCK.format('fast')}End.\n"


@pytest.fixture
def machine(monkeypatch):
    """Says what others take: before the start, then in each measurement; and has one part, which counts its calls."""
    state = types.SimpleNamespace(before=QUIET, during=[QUIET], calls=0)

    class Watch:
        def load(self):
            return state.during.pop(0)

    def measure(settings):
        state.calls += 1
        return [suite.Row("speed", 2.0, 1.0, 3.0, "median, 3 rounds", ">= 1")]

    monkeypatch.setattr(suite, "adopt_orphans", lambda: None)
    monkeypatch.setattr(suite, "idle_load", lambda: state.before)
    monkeypatch.setattr(suite, "Watch", Watch)
    monkeypatch.setattr(suite, "machine", lambda: "2 cores")
    monkeypatch.setattr(suite.importlib, "import_module", lambda name: types.SimpleNamespace(measure=measure))
    return state


def run(tmp_path, **options):
    return suite.run(["fast"], suite.Settings(), tmp_path / "results.json", **options)


def test_rows_are_printed_and_saved_beside_the_load(machine, tmp_path, capsys):
    assert run(tmp_path) == []
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["machine"] == "2 cores"
    assert saved["parts"]["fast"]["load"]["others"] == 0.02
    assert saved["parts"]["fast"]["rows"][0]["value"] == 2.0
    printed = capsys.readouterr().out
    assert "other processes took 0.02 of 2 cores" in printed
    assert "NOT TO BE QUOTED" not in printed


def test_a_loaded_machine_is_refused_from_the_start(machine, tmp_path):
    machine.before = LOADED
    with pytest.raises(suite.MachineIsLoadedError, match=r"1\.20 of 2 cores.*--loaded"):
        run(tmp_path)
    assert machine.calls == 0


def test_a_part_beside_other_work_is_measured_again_and_then_left_out(machine, tmp_path, capsys):
    machine.during = [LOADED, QUIET]
    assert run(tmp_path) == []
    assert machine.calls == 2
    machine.during = [LOADED, LOADED]
    (tmp_path / "results.json").unlink()
    capsys.readouterr()
    assert run(tmp_path) == ["fast"]
    assert not (tmp_path / "results.json").exists()
    assert "speed" not in capsys.readouterr().out


def test_a_peer_that_is_not_installed_leaves_a_part_out_with_a_sentence(machine, tmp_path, capsys, monkeypatch):
    def absent(name):
        raise ModuleNotFoundError("No module named 'jax'")

    monkeypatch.setattr(suite.importlib, "import_module", absent)
    assert run(tmp_path) == ["fast"]
    printed = capsys.readouterr()
    assert "fast: what it is compared with is not installed: No module named 'jax'" in printed.out
    assert "Traceback" not in printed.err


def test_what_is_measured_all_the_same_is_marked_and_not_written_into_the_page(machine, tmp_path, capsys):
    machine.before, machine.during = LOADED, [LOADED]
    assert run(tmp_path, loaded=True) == []
    assert "NOT TO BE QUOTED: other processes took 1.20" in capsys.readouterr().out
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(ValueError, match="fast was measured on a busy machine"):
        suite.write_page(page, tmp_path / "results.json")
    assert page.read_text() == PAGE


def test_a_part_that_is_measured_again_leaves_the_others_in_the_results(machine, tmp_path):
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"machine": "another", "parts": {"slow": {"rows": []}, "fast": {"rows": []}}}))
    run(tmp_path)
    saved = json.loads(results.read_text())
    assert saved["parts"]["slow"] == {"rows": []}
    assert saved["parts"]["fast"]["rows"]


def test_the_page_gets_the_blocks_and_keeps_its_words(machine, tmp_path):
    run(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    suite.write_page(page, tmp_path / "results.json")
    written = page.read_text()
    assert "```text\n2 cores\n```\n\nOf it:\n" in written
    assert "speed  " in written
    assert "old" not in written
    assert written.endswith("```\n\nEnd.\n")
    suite.write_page(page, tmp_path / "results.json")
    assert page.read_text() == written
    page.write_text("# Nothing\n")
    with pytest.raises(ValueError, match="no place for machine"):
        suite.write_page(page, tmp_path / "results.json")


def test_the_page_has_a_place_for_every_part_and_each_is_a_module():
    page = (ROOT / "docs/project/benchmarks.md").read_text()
    for part in ("machine", *suite.PARTS):
        assert page.count(f"<!-- part: {part} -->\n\n```text\n") == 1
    for part in suite.PARTS:
        assert (ROOT / "analyses/benchmarks" / f"{part}.py").is_file()
