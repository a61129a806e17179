import errno
import functools
import importlib
import json
import linecache
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mechicl import viz
from mechicl.base.files import write_bytes
from mechicl.checkpoints import load_checkpoint
from mechicl.statistics.grids import GridTable
from mechicl.sweeps import Sweep, SweepError, load_table, status
from mechicl.sweeps.folder import RESULTS
from mechicl.sweeps.measuring import identity
from mechicl.training import train
from tests.bounds import bounded, make_no_file
from tests.sweeps.runs import BASE, RATES, doubled, failing, sweep


def run(folder, measure=doubled, **options):
    return sweep().run(folder, measure, progress=False, **{"workers": 1, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


def test_the_table_has_what_plain_trainings_give(whole, tmp_path):
    table = load_table(whole)
    assert list(table.frame) == ["learning_rate", "model.n_layers", "seed", "diverged_at", "loss", "doubled"]
    assert table.axes == ("learning_rate", "model.n_layers", "seed")
    row = 0
    for rate in (1e-3, 1e-2):
        for n_layers in (1, 2):
            config = BASE.replace(learning_rate=rate, model=BASE.model.replace(n_layers=n_layers), seeds=(0, 1))
            result = train(config, tmp_path / str(row), progress=False)
            for seed in (0, 1):
                line = table.frame.iloc[row]
                assert (line["learning_rate"], line["model.n_layers"], line["seed"]) == (rate, n_layers, seed)
                assert line["loss"] == result.record["curve"]["eval_loss"][-1][seed]
                assert line["doubled"] == 2 * line["loss"]
                row += 1
    assert row == len(table.frame)


@pytest.mark.slow
def test_processes_give_the_same_bytes(whole, tmp_path):
    table = run(tmp_path, workers=2)
    assert (tmp_path / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()
    assert table.frame.equals(load_table(whole).frame)
    assert not multiprocessing.active_children()
    for cell in sweep().cells:
        ours, theirs = (load_checkpoint(folder / "cells" / cell.name / "checkpoint") for folder in (tmp_path, whole))
        for a, b in zip(ours.models, theirs.models, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_finished_sweep_is_not_repeated(whole):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")}
    run(whole)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")} == before


def test_another_sweep_in_the_folder_is_refused_and_extended_on_request(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    more = Sweep(BASE, {**RATES, "learning_rate": (1e-2, 1e-1)})
    with pytest.raises(ValueError, match=r"learning_rate: 0\.001, 0\.01 there, 0\.01, 0\.1 now"):
        more.run(tmp_path / "copy", doubled, workers=1, progress=False)
    kept = {path for path in (tmp_path / "copy").rglob("weights.safetensors") if "learning_rate=0.01" in str(path)}
    times = {path: path.stat().st_mtime_ns for path in kept}
    table = more.run(tmp_path / "copy", doubled, workers=1, progress=False, extend=True)
    assert table.frame["learning_rate"].tolist() == [0.01] * 4 + [0.1] * 4
    assert {path: path.stat().st_mtime_ns for path in kept} == times


def test_another_measure_needs_no_training(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    weights = {path: path.stat().st_mtime_ns for path in (tmp_path / "copy").rglob("weights.safetensors")}
    with pytest.raises(ValueError, match="measures:"):
        run(tmp_path / "copy", {"layers": lambda checkpoint: checkpoint.models[0].cfg.n_layers})
    table = run(tmp_path / "copy", {"layers": lambda checkpoint: checkpoint.models[0].cfg.n_layers}, extend=True)
    assert table.frame["layers"].tolist() == table.frame["model.n_layers"].tolist()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "copy").rglob("weights.safetensors")} == weights


def test_failed_cells_are_named_and_the_others_done(tmp_path):
    with pytest.raises(SweepError, match=r"(?s)2 of 4 cells failed.*n_layers=2.*ArithmeticError: two layers") as caught:
        run(tmp_path, failing)
    assert "--retry" in str(caught.value)
    assert load_table(tmp_path).frame["model.n_layers"].tolist() == [1, 1, 1, 1]
    states = {cell.places: cell for cell in status(tmp_path)}
    assert [cell.state for cell in states.values()] == ["done", "failed", "done", "failed"]
    assert "two layers" in states["learning_rate=0.001, model.n_layers=2, seed=0 ..."].error
    with pytest.raises(SweepError, match="2 of 4"):  # they are not tried again without being asked for
        run(tmp_path, failing)


def test_failed_cells_are_retried_on_request_without_training_again(tmp_path):
    flag = tmp_path / "mended"

    def measure(checkpoint):
        if checkpoint.models[0].cfg.n_layers == 2 and not flag.exists():
            raise ArithmeticError("not yet")
        return 1.0

    with pytest.raises(SweepError):
        run(tmp_path / "sweep", measure)
    weights = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("weights.safetensors")}
    assert len(weights) == 4
    flag.touch()
    table = run(tmp_path / "sweep", measure, retry=True)
    assert len(table.frame) == 8
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("weights.safetensors")} == weights


def test_a_model_that_diverges_is_a_result_and_the_others_go_on(tmp_path):
    over = {"learning_rate": (1e-3, 1e30), "model.n_layers": (3,), "seed": (0, 1)}
    table = Sweep(BASE, over).run(tmp_path, doubled, workers=1, progress=False)
    frame = table.frame
    assert frame["diverged_at"].isna().tolist() == [True, True, False, False]
    assert frame["loss"].isna().tolist() == [False, False, True, True]
    assert frame["doubled"].isna().tolist() == [False, False, True, True]
    assert [cell.state for cell in status(tmp_path)] == ["done", "done"]
    assert table.intervals("loss")["missing"].tolist() == [0, 2]


def test_a_full_disk_stops_the_sweep_and_loses_nothing(tmp_path, monkeypatch, whole):
    calls = 0

    def full(path, data):
        nonlocal calls
        calls += 1
        if calls == 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_bytes(path, data)

    monkeypatch.setattr("mechicl.base.tensor_files.write_bytes", full)
    with pytest.raises(OSError, match="disk is full"):
        run(tmp_path)
    monkeypatch.undo()
    assert not list(tmp_path.rglob("error.json"))
    run(tmp_path)
    assert (tmp_path / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()


@pytest.mark.parametrize(
    ("name", "nth", "measure"),
    [("sweep.json", 1, doubled), ("results.csv", 1, doubled), ("results.csv", 2, doubled), ("rows.json", 3, doubled),
     ("error.json", 2, failing), ("devices.json", 2, doubled), ("record.json", 1, doubled)],
)  # fmt: skip
def test_a_disk_that_is_full_at_any_write_loses_nothing(tmp_path, monkeypatch, whole, name, nth, measure):
    replace, calls = os.replace, []

    def full(source, target):
        if Path(target).name == name:
            calls.append(target)
            if len(calls) == nth:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"disk is full .*make room"):
        run(tmp_path, measure)
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*.tmp"))
    if measure is failing:
        with pytest.raises(SweepError, match="2 of 4 cells failed"):
            run(tmp_path, measure)
        return
    run(tmp_path)
    assert (tmp_path / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()
    assert not list(tmp_path.rglob("error.json"))


def test_what_a_killed_driver_was_writing_goes_with_the_next_run(tmp_path):
    for name in (".results.csv.elsewhere.1.tmp", ".sweep.json.4194305.tmp"):  # beyond the numbers of processes
        (tmp_path / name).write_text("half")
    run(tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))


OUTSIDE = """
from mechicl.checkpoints import Checkpoint
SCALE = 3
def tripled(checkpoint: Checkpoint) -> float:
    return SCALE * checkpoint.final_losses[0]
"""


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [True, False])
def test_a_measure_of_a_module_outside_the_working_directory_works_in_other_processes(
    tmp_path, monkeypatch, whole, by_name
):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "outside_measures.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    monkeypatch.delitem(sys.modules, "outside_measures", raising=False)
    monkeypatch.chdir(tmp_path)
    measure = "outside_measures:tripled" if by_name else importlib.import_module("outside_measures").tripled
    table = run(tmp_path / "sweep", measure, workers=2)
    assert table.frame["tripled"].tolist() == [3 * loss for loss in load_table(whole).frame["loss"]]


DRIVER = """
import sys
from tests.sweeps.runs import doubled, sweep
sweep().run(sys.argv[1], doubled, workers=int(sys.argv[2]), progress=False)
"""


def driver(folder, workers=1):
    return subprocess.Popen([sys.executable, "-c", DRIVER, str(folder), str(workers)], cwd=Path(__file__).parents[2])


@pytest.mark.slow
def test_two_drivers_share_a_folder(tmp_path, whole):
    both = [driver(tmp_path), driver(tmp_path)]
    assert [process.wait() for process in both] == [0, 0]
    assert (tmp_path / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()
    assert len(list(tmp_path.rglob("weights.safetensors"))) == 4


@pytest.mark.slow
def test_killed_drivers_and_workers_lose_nothing(tmp_path, whole):
    rng = np.random.default_rng(0)
    for _ in range(2):
        process = driver(tmp_path, workers=2)
        deadline = time.monotonic() + 600
        while not list(tmp_path.glob("cells/*/run")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))  # trainings and writes of cells take about as long
        process.send_signal(signal.SIGKILL)
        process.wait()
    run(tmp_path)
    assert (tmp_path / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced(tmp_path, whole):
    flag = tmp_path / "killed"

    def measure(checkpoint):
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    table = run(tmp_path / "sweep", measure, workers=2)
    assert len(table.frame) == 8
    assert table.frame["loss"].tolist() == load_table(whole).frame["loss"].tolist()


@pytest.mark.slow
def test_a_cell_whose_process_always_dies_is_given_up(tmp_path):
    def measure(checkpoint):
        if checkpoint.models[0].cfg.n_layers == 2 and checkpoint.record["training"]["learning_rate"] == 1e-2:
            os._exit(3)
        return 1.0

    with pytest.raises(SweepError, match=r"(?s)1 of 4 cells failed.*died \(EXIT\(3\)\), 5 times"):
        run(tmp_path, measure, workers=2)
    assert len(load_table(tmp_path).frame) == 6
    assert [cell.state for cell in status(tmp_path)].count("failed") == 1


@pytest.mark.slow
def test_a_training_may_be_started_by_words_of_its_own(tmp_path, whole):
    over = {"learning_rate": (1e-3,), "model.n_layers": (1,), "seed": (0, 1)}
    launched = Sweep(BASE, over).run(tmp_path, doubled, workers=1, launch=(sys.executable,), progress=False)
    assert launched.frame.equals(load_table(whole).frame.iloc[:2])
    with pytest.raises(ValueError, match="launch:"):
        Sweep(BASE, over).run(tmp_path, doubled, workers=1, progress=False)


def test_words_that_start_nothing_are_a_failed_cell(tmp_path):
    with pytest.raises(SweepError, match=r"RuntimeError: .*python -c .* ended with 7"):
        Sweep(BASE, {"seed": (0,)}).run(tmp_path, workers=1, launch=("python", "-c", "exit(7)"), progress=False)


@pytest.mark.slow
def test_words_whose_process_is_killed_are_tried_again(tmp_path, whole):
    over = {"learning_rate": (1e-3,), "model.n_layers": (1,), "seed": (0, 1)}
    once = tmp_path / "once.sh"
    once.write_text('[ -e "$0.killed" ] || { touch "$0.killed"; kill -9 $$; }\nexec "$PYTHON" "$@"\n', "utf-8")
    launch = ("env", f"PYTHON={sys.executable}", "sh", str(once))
    launched = Sweep(BASE, over).run(tmp_path / "sweep", doubled, workers=1, launch=launch, progress=False)
    assert (tmp_path / "once.sh.killed").exists()
    assert launched.frame.equals(load_table(whole).frame.iloc[:2])


def test_the_user_s_threads_are_left_as_they_were(tmp_path):
    before = torch.get_num_threads()
    run(tmp_path)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "workers must be"),
        ({"workers": 2, "ray": "auto"}, "give one"),
        ({"gpus": 1.0}, "gpus="),
        ({"measure": "nonsense"}, "no measure 'nonsense'"),
        ({"measure": "tests.sweeps.runs:nonsense"}, "no measure"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        run(tmp_path / "sweep", **options)
    assert not (tmp_path / "sweep").exists()


def test_a_measure_that_other_processes_cannot_have_is_refused(tmp_path):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="take workers=1"):
        run(tmp_path, lambda checkpoint: lock.locked(), workers=2)
    assert run(tmp_path, lambda checkpoint: float(lock.locked()), extend=True).frame["<lambda>"].sum() == 0


@pytest.mark.slow
def test_a_measure_from_a_notebook_is_the_same_one_in_every_process(tmp_path):
    name, source = "<ipython-input-7>", "def layers(checkpoint):\n    return checkpoint.models[0].cfg.n_layers\n"
    lines: Any = source.splitlines(True)
    linecache.cache[name] = (len(source), None, lines, name)  # as IPython keeps what was typed
    namespace = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), namespace)
    table = run(tmp_path, namespace["layers"], workers=2)
    assert table.frame["layers"].tolist() == [1, 1, 2, 2, 1, 1, 2, 2]


def test_what_a_measure_closes_over_is_part_of_it(tmp_path):
    def make(number):
        return lambda checkpoint: number

    run(tmp_path, {"number": make(1)})
    with pytest.raises(ValueError, match="measures:"):
        run(tmp_path, {"number": make(2)})
    assert set(run(tmp_path, {"number": make(2)}, extend=True).frame["number"]) == {2}
    assert identity(make(3)) == identity(make(3)) != identity(make(4))
    assert identity(functools.partial(max, 1)) != identity(functools.partial(max, 2))


def test_a_measure_with_random_numbers_gives_the_same_each_time(tmp_path):
    def draw(checkpoint):
        return {"torch": torch.rand(()), "numpy": np.random.rand(), "python": random.random()}  # noqa: NPY002

    before = torch.get_rng_state()
    first = run(tmp_path / "a", draw).frame
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert run(tmp_path / "b", draw).frame.equals(first)
    assert first["torch"].nunique() == 2  # a seed of training has its own


def test_a_driver_s_table_is_of_its_own_grid(tmp_path):
    other = Sweep(BASE, {**RATES, "learning_rate": (1.0,)})

    def meddle(table):
        if len(table.frame) == 2:
            other.run(tmp_path, doubled, workers=1, progress=False, extend=True)

    assert run(tmp_path, on_result=meddle).frame["learning_rate"].tolist() == [1e-3] * 4 + [1e-2] * 4


def test_no_value_is_a_label(tmp_path):
    table = Sweep(BASE, {"gradient_clip": (None, 1.0), "seed": (0,)}).run(tmp_path, workers=1, progress=False)
    assert table.intervals("loss")["gradient_clip"].tolist() == ["none", 1.0]
    assert len(table.where(gradient_clip="none").frame) == 1
    kept = GridTable.load(tmp_path / RESULTS, table.axes)
    assert kept.frame["gradient_clip"].tolist() == ["none", "1.0"]
    assert viz.lines(table, "gradient_clip", "loss").data


def test_a_measure_does_not_write_over_an_axis(tmp_path):
    over = {"width": {"a": {"steps": 1}, "b": {"steps": 2}}, "seed": (0,)}
    with pytest.raises(SweepError, match=r"a measure returned \['width'\]"):
        Sweep(BASE, over).run(tmp_path, lambda checkpoint: {"width": 7}, workers=1, progress=False)


def test_a_mended_measure_is_tried_without_being_asked(tmp_path):
    with pytest.raises(SweepError):
        run(tmp_path, failing)
    assert len(run(tmp_path, doubled, extend=True).frame) == 8


def test_a_damaged_manifest_is_named(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "copy")
    path = tmp_path / "copy" / "sweep.json"
    for text in ("{", "[]", "{}", json.dumps({**json.loads(path.read_text()), "cells": {"../x": {}}})):
        path.write_text(text)
        with pytest.raises(SweepError, match=r"sweep\.json is damaged"):
            status(tmp_path / "copy")
    with pytest.raises(SweepError, match="holds no sweep"):
        load_table(tmp_path / "nowhere")


@pytest.mark.parametrize("rows", [3, [3], [{"loss": [1]}], [{"diverged_at": "never"}]])
def test_damaged_rows_are_named(tmp_path, whole, rows):
    shutil.copytree(whole, tmp_path / "copy")
    path = next((tmp_path / "copy").glob("cells/*/rows.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "rows": rows}))
    with pytest.raises(SweepError, match=r"rows\.json is damaged|something else than numbers"):
        load_table(tmp_path / "copy")


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
@pytest.mark.parametrize("name", ["sweep.json", "rows.json", "run/metrics.jsonl"])
def test_a_folder_of_pipes_and_devices_is_read_at_once(tmp_path, whole, name, kind):
    shutil.copytree(whole, tmp_path / "copy")
    cell = next((tmp_path / "copy").glob("cells/*"))
    (cell / "run").mkdir(exist_ok=True)
    if name != "rows.json":
        (cell / "rows.json").unlink()
    path = tmp_path / "copy" / name if name == "sweep.json" else cell / name
    make_no_file(path, kind)
    with bounded():
        if name == "run/metrics.jsonl" and kind == "large":  # the end of it has no line
            assert {state.step for state in status(tmp_path / "copy")} >= {0}
            return
        with pytest.raises(ValueError, match=path.name if name != "sweep.json" else "sweep"):
            status(tmp_path / "copy")


def test_a_checkpoint_that_was_cut_short_is_trained_again(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "copy")
    cell = tmp_path / "copy" / "cells" / sweep().cells[0].name
    (cell / "rows.json").unlink()
    (cell / "checkpoint" / "record.json").unlink()
    run(tmp_path / "copy")
    assert (tmp_path / "copy" / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()
