"""`make verify`: scripts run again, and every row is compared with the saved one."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from analyses.support.claims import Paper
from analyses.support.replay import PACKAGE, find_jobs, fingerprint, replay
from tests.scripts import import_script

ROOT = Path(__file__).parents[2]
QUICK = """
import json, pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
with open(pathlib.Path(__file__).parent / "runs.txt", "a") as file:
    file.write("NAME " + " ".join(w for w in sys.argv[1:] if w.startswith("--") and w != "--out") + "\\n")
time.sleep(SECONDS)
row = {"quantity": "loss", "published": 2.0, "measured": VALUE, "over": "", "note": ""}
result = {"title": "T", "lead": "L", "command": "python analyses/NAME.py", "checkpoints": [], "table": [row],
          "wall_time_s": SECONDS}
(out / "NAME.json").write_text(json.dumps(result))
"""


ITEMS = {"one": "Fig. 1, left", "two": "Fig. 10"}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout with two scripts that write given numbers, their results, and a paper's claims on these."""
    entries = [{"results": name, "item": item, "what": "loss", "rows": ["loss"]} for name, item in ITEMS.items()]
    monkeypatch.setattr("analyses.support.claims.read_papers", lambda: [Paper("fu2024", "", entries)])
    (tmp_path / "analyses" / "results").mkdir(parents=True)
    for name, value in (("one", 2.0), ("two", 3.0)):
        write_script(tmp_path, name, value)
        out = tmp_path / "analyses" / "results"
        subprocess.run([sys.executable, tmp_path / "analyses" / f"{name}.py", "--out", out], check=True)
    (tmp_path / "analyses" / "runs.txt").unlink()
    return tmp_path


def write_script(root: Path, name: str, value: float, seconds: float = 0.0) -> None:
    words = {"NAME": name, "VALUE": str(value), "SECONDS": str(seconds)}
    text = QUICK
    for word, value_of_it in words.items():
        text = text.replace(word, value_of_it)
    (root / "analyses" / f"{name}.py").write_text(text)


def ran(root: Path) -> list[str]:
    path = root / "analyses" / "runs.txt"
    return sorted(line.strip() for line in path.read_text().splitlines()) if path.exists() else []


def verify(root: Path, *words: str) -> int:
    """The command's exit code."""
    return import_script("verify").main(["--root", str(root), "--out", str(root / "state"), "--quiet", *words])


def test_a_script_without_claims_keeps_its_control(root, monkeypatch):
    monkeypatch.setattr("analyses.support.claims.read_papers", list)
    assert verify(root) == 0
    assert ran(root) == ["one", "two"]


def test_unchanged_numbers_pass_and_are_not_measured_again(root, capsys):
    assert verify(root) == 0
    assert ran(root) == ["one --no-control", "two --no-control"]
    assert "2 entries of 2 scripts, 2 run now, 0 with errors" in capsys.readouterr().out
    assert verify(root) == 0
    assert len(ran(root)) == 2
    assert "2 entries of 2 scripts, 0 run now" in capsys.readouterr().out


def test_a_changed_number_is_reported(root, capsys):
    path = root / "analyses" / "results" / "one.json"
    path.write_text(path.read_text().replace('"measured": 2.0', '"measured": 2.1'))
    assert verify(root) == 1
    printed = capsys.readouterr().out
    assert "2.1" in printed
    assert "fu2024, Fig. 1, left, loss" in printed
    assert "1 entries moved" in printed
    assert len([line for line in printed.splitlines() if line.startswith("one  ")]) == 2  # the entry, and the table
    path.write_text(path.read_text().replace('"measured": 2.1', '"measured": 2.0000001'))
    assert verify(root) == 0
    assert len(ran(root)) == 2  # a changed results file does not make the script run again


def test_a_script_that_changed_is_run_again(root):
    assert verify(root) == 0
    write_script(root, "two", 4.0)
    assert verify(root) == 1
    assert ran(root) == ["one --no-control", "two --no-control", "two --no-control"]
    assert len(list((root / "state").iterdir())) == 2


@pytest.mark.parametrize(("entry", "expected"), [
    ("one", ["one"]), ("one.py", ["one"]), ("Fig. 1", ["one"]), ("fig. 1, left", ["one"]), ("Fig. 10", ["two"]),
    ("fu2024", ["one", "two"]),
])  # fmt: skip
def test_entries_are_named_by_script_results_paper_or_item(root, entry, expected):
    assert sorted(job.name for job in find_jobs(root, [entry])) == expected


@pytest.mark.parametrize(("entry", "message"), [("Fig. 99", "no 'Fig. 99'.*one, two"), ("fu", "no 'fu'")])
def test_an_unknown_entry_is_refused(root, entry, message):
    with pytest.raises(ValueError, match=message):
        find_jobs(root, [entry])


def test_a_script_that_fails_is_reported_and_run_again(root, capsys):
    (root / "analyses" / "two.py").write_text("import sys; sys.exit('no such thing')")
    assert verify(root) == 1
    assert "two: ended with an error: no such thing" in capsys.readouterr().out
    write_script(root, "two", 3.0)
    assert verify(root) == 0


def test_the_longest_come_first_and_the_list_runs_nothing(root, capsys):
    path = root / "analyses" / "results" / "two.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"wall_time_s": 7.0}))
    path = root / "analyses" / "results" / "one.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"wall_time_s": 5.0}))
    assert [job.seconds for job in find_jobs(root)] == [7.0, 5.0]
    assert verify(root, "--list") == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["7", "s", "1", "entries", "two:", "analyses/two.py"]
    assert ran(root) == []
    assert verify(root, "--workers", "0") == 1
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cpu_time_s": 9.0}))  # before the wall time
    assert [job.seconds for job in find_jobs(root)] == [9.0, 7.0]


@pytest.mark.slow
def test_it_resumes_after_a_kill(root):
    write_script(root, "one", 2.0, seconds=600.0)
    words = [sys.executable, ROOT / "analyses" / "verify.py", "--root", root, "--out", root / "state", "--workers", "2"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True, env=os.environ | {
        "PYTHONPATH": str(PACKAGE.parent)})  # fmt: skip
    while not list((root / "state").glob("two-*/done.json")):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not list((root / "state").glob("one-*/done.json"))
    write_script(root, "one", 2.0)
    assert verify(root) == 0
    assert [line for line in ran(root) if line.startswith("two")] == ["two"]  # once, by a process without claims


def test_a_change_of_checkpoint_script_or_library_is_another_fingerprint(root, monkeypatch):
    (one, two) = sorted(find_jobs(root), key=lambda job: job.name)
    assert fingerprint(one, root) != fingerprint(two, root)
    seen = {fingerprint(one, root)}
    seen.add(fingerprint(replace(one, words=(*one.words, "--more")), root))
    for checkpoint in ("lsa-1l", "lsa-5l"):
        changed = replace(one.written, data={**one.written.data, "checkpoints": [checkpoint]})
        seen.add(fingerprint(replace(one, written=changed), root))
    write_script(root, "one", 2.5)
    seen.add(fingerprint(one, root))
    library = root / "library"
    library.mkdir()
    (library / "code.py").write_text("a = 1")
    monkeypatch.setattr("analyses.support.replay.PACKAGE", library)
    seen.add(fingerprint(one, root))
    (library / "code.py").write_text("a = 2")
    seen.add(fingerprint(one, root))
    assert len(seen) == 7


def test_every_entry_of_the_index_can_be_selected():
    jobs = find_jobs(ROOT)
    assert {job.name for job in jobs} == {path.stem for path in (ROOT / "analyses" / "results").glob("*.json")}
    for job in jobs:
        assert (ROOT / job.words[0]).is_file()
    five = {job.name for job in find_jobs(ROOT, ["Fig. 3b"])}
    assert five == {"oswald_descent_lsa-5l", "fu_matching_gpt2-8l", "fu_size"}  # two papers have such a figure


def test_scripts_end_with_the_generator(root):
    write_script(root, "one", 2.0, seconds=600.0)
    outcomes = replay(find_jobs(root), root, root / "state", workers=2, progress=False)
    assert next(outcomes).job.name == "two"
    outcomes.close()  # type: ignore[attr-defined] - a generator
    assert not list((root / "state").glob("one-*/done.json"))
