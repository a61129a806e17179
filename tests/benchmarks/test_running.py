"""Running the benchmark: processes of peers, the load by other processes, rows, and the page of results."""

import json
import types

import pytest
import torch

from mechicl.statistics import interval
from tests.pages import ROOT
from tests.scripts import import_script

apart, load, rows, suite = (import_script(f"benchmarks.{name}") for name in ("apart", "load", "rows", "suite"))


# ---- peers in separate processes ----
def probe(**options):
    return apart.Apart("tests.benchmarks.probe:Probe", number=3, **options)


def test_peers_have_their_own_variables_of_threads(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with apart.peers({"theirs": probe, "ours": lambda: probe(ours=True)}) as made:
        theirs, ours = (made[name].call("sees", 4) for name in ("theirs", "ours"))
        with pytest.raises(RuntimeError, match="ArithmeticError: too large"):
            made["theirs"].call("fail")
    assert (theirs["sum"], theirs["OMP_NUM_THREADS"], theirs["OMP_WAIT_POLICY"]) == (7, None, None)
    assert (ours["OMP_NUM_THREADS"], ours["OMP_WAIT_POLICY"]) == (None, "passive")


def test_one_core_is_one_core_for_every_library_and_missing_peers_are_left_out(capsys):
    missing = {"missing": lambda: apart.Apart("no_such_twin:Twin")}
    with apart.peers(missing | {"one core": lambda: probe(one_core=True)}) as made:
        assert list(made) == ["one core"]
        seen = made["one core"].call("sees", 4)
    assert (seen["cores"] or 1, seen["OMP_NUM_THREADS"]) == (1, "1")
    assert "multi_thread_eigen=false" in seen["XLA_FLAGS"]
    assert "left out: missing: no_such_twin:Twin cannot be measured here: No module named" in capsys.readouterr().out


# ---- load ----
@pytest.mark.parametrize(("others", "quiet"), [(0.0, True), (0.1, True), (0.5, False)])
def test_a_machine_is_quiet_if_others_use_little(others, quiet):
    measured = load.Load(seconds=2.0, others=others, average=3.5, cores=2)
    assert measured.is_quiet is quiet
    assert load.Load(**measured.to_dict()) == measured


# ---- rows ----
def test_rounds_alternate_and_ratios_are_taken_round_by_round():
    order, values = [], {"ours": iter([2.0, 8.0]), "theirs": iter([1.0, 2.0])}

    def measure(name):
        return lambda: order.append(name) or next(values[name])

    speeds = rows.alternate({name: measure(name) for name in values}, 2)
    assert order == ["ours", "theirs"] * 2
    row = rows.row("speed", rows.ratios(speeds["ours"], speeds["theirs"]), ">= 3")
    assert (row.value, row.low, row.high, row.spread) == (3.0, 2.0, 4.0, "median, 2 rounds")
    mean = interval(torch.tensor([1.0, 2.0, 3.0]))
    row = rows.row("loss", mean, over="prompts")
    assert (row.value, row.low, row.high, row.spread) == (2.0, mean.low, mean.high, "mean, 95% over 3 prompts")


@pytest.mark.parametrize(("bar", "value", "met"), [
    (">= 4.0", 4.0, True), (">= 4", 3.99, False), ("<= 1e-5", 2e-5, False), ("<= 1e-5", 1e-6, True),
    ("< 60", 60.0, False), ("0.995 to 1.005", 1.0, True), ("0.99 to 1.01", 1.02, False), ("1", 0.9, False),
    ("shown", 3.0, None),
])  # fmt: skip
def test_bars(bar, value, met):
    row = rows.row("quantity", [value], bar)
    assert row.is_met is met
    assert ("MISSED" in rows.table([row])) is (met is False)


# ---- the run and its page ----
QUIET, LOADED = (suite.Load(seconds=1.0, others=others, average=0.1, cores=2) for others in (0.02, 1.2))
BLOCK = "<!-- part: {} -->\n\n```text\nold\n```\n\n"
PAGE = f"# Benchmarks\n\n{BLOCK.format('machine')}Of it:\n\n{BLOCK.format('fast')}End.\n"


@pytest.fixture
def machine(monkeypatch):
    """A machine with given loads before and during measurements, and one part that counts its calls."""
    state = types.SimpleNamespace(loads=[QUIET] * 3, calls=0)

    def measure(settings):
        state.calls += 1
        return [suite.Row("speed", 2.0, 1.0, 3.0, "median, 3 rounds", ">= 1")]

    monkeypatch.setattr(suite, "measure_load", lambda: state.loads.pop(0))
    monkeypatch.setattr(suite, "machine", lambda: "2 cores")
    monkeypatch.setattr(suite.importlib, "import_module", lambda name: types.SimpleNamespace(measure=measure))
    return state


def run(tmp_path, **options):
    return suite.run(["fast"], suite.Settings(), tmp_path / "results.json", **options)


def test_parts_are_measured_again_on_a_busy_machine_and_then_left_out(machine, tmp_path, capsys):
    results = tmp_path / "results.json"
    machine.loads = [QUIET, QUIET, LOADED, LOADED, QUIET]
    assert run(tmp_path) == ["fast"]
    assert not results.exists()
    results.write_text(json.dumps({"machine": "another", "parts": {"slow": {"rows": []}, "fast": {"rows": []}}}))
    machine.loads = [QUIET, QUIET, LOADED, QUIET, QUIET]
    assert run(tmp_path) == []
    assert machine.calls == 4
    saved = json.loads(results.read_text())
    assert (saved["machine"], saved["parts"]["slow"]) == ("2 cores", {"rows": []})
    assert saved["parts"]["fast"]["load"]["others"] == 0.02
    assert saved["parts"]["fast"]["rows"][0]["value"] == 2.0
    machine.loads = [LOADED]
    with pytest.raises(suite.MachineIsLoadedError, match=r"1\.20 of 2 cores.*--loaded"):
        run(tmp_path)
    assert "NOT TO BE QUOTED" not in capsys.readouterr().out


def test_the_page_gets_the_blocks_and_keeps_its_text(machine, tmp_path, capsys):
    page, results = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text(PAGE)
    machine.loads = [LOADED] * 3
    assert run(tmp_path, loaded=True) == []
    assert "NOT TO BE QUOTED: other processes took 1.20" in capsys.readouterr().out
    with pytest.raises(ValueError, match="fast was measured on a busy machine"):
        suite.write_page(page, results)
    assert page.read_text() == PAGE
    machine.loads = [LOADED, QUIET, QUIET]
    run(tmp_path, loaded=True)
    for _ in range(2):
        suite.write_page(page, results)
        written = page.read_text()
        assert "```text\n2 cores\n```\n\nOf it:\n" in written
        assert "speed  " in written
        assert "old" not in written
        assert written.endswith("```\n\nEnd.\n")
    page.write_text("# Nothing\n")
    with pytest.raises(ValueError, match="no place for machine"):
        suite.write_page(page, results)


def test_the_page_has_a_block_for_every_part_and_each_is_a_module():
    page = (ROOT / "docs/project/benchmarks.md").read_text()
    for part in ("machine", *suite.PARTS):
        assert page.count(f"<!-- part: {part} -->\n\n```text\n") == 1
    assert all((ROOT / "analyses/benchmarks" / f"{part.replace('-', '_')}.py").is_file() for part in suite.PARTS)
