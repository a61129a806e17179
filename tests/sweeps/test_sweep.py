import errno
import functools
import importlib
import json
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

import numpy as np
import pandas as pd
import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from mechicl import viz
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.statistics.grids import GridTable
from mechicl.sweeps import Sweep, SweepError, load_table, status
from mechicl.sweeps.folder import RESULTS
from mechicl.sweeps.measuring import identity, measured_columns
from mechicl.training import train
from tests.sweeps.runs import BASE, RATES, doubled, failing, slow, sweep


def run(folder, measure=doubled, **options):
    return sweep().run(folder, measure, progress=False, **{"workers": 1, **options})


THREADS = torch.get_num_threads()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


def test_the_table_has_what_plain_trainings_give(whole, tmp_path):
    assert torch.get_num_threads() == THREADS  # a sweep leaves the user's number
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


def test_a_printed_table_shows_the_extreme_points_of_the_grid_with_intervals_and_no_mean_over_it():
    rows = [{"depth": d, "seed": s, "diverged_at": None, "loss": 10.0**d + s} for d in range(6) for s in range(3)]
    text = str(GridTable(pd.DataFrame(rows), ("depth", "seed")))
    half = 4.302652729911275 / 3**0.5  # Student's t, two degrees of freedom, of the values 0, 1, 2 beyond their mean
    expected = [f"  loss {10.0**d + 1:.1f} ± {half:.1f}  depth={d}" for d in (0, 1, 4, 5)]
    assert text.splitlines() == ["18 models over depth, seed; lowest and highest means over seeds:", *expected]


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


def test_a_finished_sweep_is_not_repeated_and_half_written_files_are_removed(whole):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")}
    for name in (".results.csv.elsewhere.1.tmp", ".sweep.json.4194305.tmp"):  # beyond the numbers of processes
        (whole / name).write_text("half")
    run(whole)
    assert not list(whole.glob(".*.tmp"))
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

    def layers(checkpoint):
        return checkpoint.models[0].cfg.n_layers

    with pytest.raises(ValueError, match="measures:"):
        run(tmp_path / "copy", layers)
    table = run(tmp_path / "copy", layers, extend=True)
    assert table.frame["layers"].tolist() == table.frame["model.n_layers"].tolist()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "copy").rglob("weights.safetensors")} == weights


def test_failed_cells_are_named_and_tried_again_on_request_without_training(tmp_path, monkeypatch):
    with pytest.raises(
        SweepError, match=r"(?s)2 of 4 cells failed.*n_layers=2.*measure 'failing' failed: ArithmeticError: two layers"
    ) as caught:
        run(tmp_path, failing)
    assert "--retry" in str(caught.value)
    assert load_table(tmp_path).frame["model.n_layers"].tolist() == [1, 1, 1, 1]
    states = {cell.places: cell for cell in status(tmp_path)}
    assert [cell.state for cell in states.values()] == ["done", "failed", "done", "failed"]
    assert "two layers" in states["learning_rate=0.001, model.n_layers=2, seed=0 ..."].error
    with pytest.raises(SweepError, match="2 of 4"):
        run(tmp_path, failing)
    weights = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("weights.safetensors")}
    assert len(weights) == 4
    monkeypatch.setattr("tests.sweeps.runs.MOST_LAYERS", 2)
    assert len(run(tmp_path, failing, retry=True).frame) == 8
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("weights.safetensors")} == weights
    assert len(run(tmp_path, doubled, extend=True).frame) == 8


def test_a_model_that_diverges_is_a_result_and_the_others_go_on(tmp_path):
    over = {"learning_rate": (1e-3, 1e30), "model.n_layers": (3,), "seed": (0, 1)}
    table = Sweep(BASE, over).run(tmp_path, doubled, workers=1, progress=False)
    frame = table.frame
    assert frame["diverged_at"].isna().tolist() == [True, True, False, False]
    assert frame["loss"].isna().tolist() == [False, False, True, True]
    assert frame["doubled"].isna().tolist() == [False, False, True, True]
    assert [cell.state for cell in status(tmp_path)] == ["done", "done"]
    assert table.intervals("loss")["missing"].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("name", "nth", "measure"),
    [("sweep.json", 1, doubled), ("results.csv", 1, doubled), ("results.csv", 2, doubled), ("rows.json", 3, doubled),
     ("error.json", 2, failing), ("record.json", 1, doubled),
     ("state.safetensors", 3, doubled)],
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
    with pytest.raises(OSError, match=r"disk is full .*free some space"):
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
    command = [sys.executable, "-c", DRIVER, str(folder), str(workers)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.parametrize("n_kills", [0, 2])
def test_two_drivers_share_a_folder_and_killed_ones_lose_nothing(tmp_path, whole, n_kills):
    rng = np.random.default_rng(0)
    for _ in range(n_kills):
        process, deadline = driver(tmp_path, workers=2), time.monotonic() + 600
        while not list(tmp_path.glob("cells/*/run")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))  # about the duration of trainings and writes of cells
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=300)  # until its workers, which have its pipe, end too
    both = [driver(tmp_path), driver(tmp_path)]
    assert [process.communicate()[0] or process.returncode for process in both] == [0, 0]
    assert (tmp_path / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()
    assert len(list(tmp_path.rglob("weights.safetensors"))) == 4
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_a_cell_whose_process_always_dies_is_given_up(tmp_path, whole):
    flag = tmp_path / "killed"

    def measure(checkpoint):
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if checkpoint.models[0].cfg.n_layers == 2 and checkpoint.record["training"]["learning_rate"] == 1e-2:
            os._exit(3)
        return 1.0

    with pytest.raises(SweepError, match=r"(?s)1 of 4 cells failed.*died \(EXIT\(3\)\), 5 times"):
        run(tmp_path / "sweep", measure, workers=2)
    assert load_table(tmp_path / "sweep").frame["loss"].tolist() == load_table(whole).frame["loss"].tolist()[:6]
    assert [cell.state for cell in status(tmp_path / "sweep")].count("failed") == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [({"workers": 0}, "workers must be"), ({"workers": 2, "ray": "auto"}, "give one"), ({"gpus": 1.0}, "gpus="),
     ({"measure": "nonsense"}, "no measure 'nonsense'"), ({"measure": "tests.sweeps.runs:nonsense"}, "no measure"),
     ({"measure": "tests.sweeps.runs:BASE"}, "is not a function")],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(tmp_path, options, named):
    with pytest.raises(ValueError, match=named):
        run(tmp_path / "sweep", **options)
    assert not (tmp_path / "sweep").exists()


def test_a_measure_that_cannot_be_pickled_needs_one_worker(tmp_path):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="use workers=1"):
        run(tmp_path, lambda checkpoint: lock.locked(), workers=2)
    assert run(tmp_path, lambda checkpoint: float(lock.locked()), extend=True).frame["<lambda>"].sum() == 0


def test_numbers_of_numpy_are_those_of_python():
    values = {"yes": np.bool_(True), "three": np.array(3), "one": np.array([0.5]), "none": np.array(np.nan)}
    columns = measured_columns([lambda checkpoint: values], Checkpoint("mine", []))
    assert columns == {"yes": 1.0, "three": 3.0, "one": 0.5, "none": None}
    with pytest.raises(TypeError, match="returned ndarray: a measure returns a number"):
        measured_columns([lambda checkpoint: np.zeros(2)], Checkpoint("mine", []))


def test_variables_in_a_measure_s_closure_are_part_of_it(tmp_path):
    def make(number):
        return lambda checkpoint: {"number": number}

    run(tmp_path, [make(1), doubled])
    with pytest.raises(ValueError, match="measures:"):
        run(tmp_path, [make(2), doubled])
    assert set(run(tmp_path, [make(2), doubled], extend=True).frame["number"]) == {2}
    with pytest.raises(SweepError, match="two measures return 'number'"):
        run(tmp_path, [make(2), make(3)], extend=True)
    assert identity(make(3)) == identity(make(3)) != identity(make(4))
    assert identity(functools.partial(max, 1)) != identity(functools.partial(max, 2))


def scaled(factor):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(checkpoint):
            return factor * function(checkpoint)

        return wrapper

    return decorate


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def value(self, checkpoint):
        return self.factor


def typed(text):
    names = {}
    exec(text, names)  # as in a shell, without source
    return names["measure"]


def test_a_measure_that_returns_other_values_is_another_measure():
    both = lambda checkpoint: 1.0, lambda checkpoint: 2.0
    assert identity(jaxtyped(typechecker=beartype)(doubled)) == identity(doubled)  # it changes no value
    groups = [
        both,
        (doubled, scaled(2)(doubled), scaled(3)(doubled), scaled(2)(failing)),
        (Scaled(1).value, Scaled(2).value),
        (typed("def measure(c): return 1"), typed("def measure(c): return 2"), typed("def measure(c): return c")),
        (typed("measure = lambda c: c in {'a', 'b'}"), typed("measure = lambda c: c in {'a', 'c'}")),
    ]
    for measures in groups:
        assert len({*map(identity, measures)}) == len(measures)
    assert identity(Scaled(torch.ones(2)).value) == identity(Scaled(torch.ones(2)).value)


def test_a_measure_with_random_numbers_gives_the_same_each_time(tmp_path):
    def draw(checkpoint):
        return {"torch": torch.rand(()), "numpy": np.random.rand(), "python": random.random()}  # noqa: NPY002

    before = torch.get_rng_state()
    first = run(tmp_path / "a", draw).frame
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert run(tmp_path / "b", draw).frame.equals(first)
    assert first["torch"].nunique() == 2  # one draw for each training seed


def test_none_is_a_label_and_a_measure_does_not_write_over_an_axis(tmp_path):
    table = Sweep(BASE, {"gradient_clip": (None, 1.0), "seed": (0,)}).run(tmp_path, workers=1, progress=False)
    assert table.intervals("loss")["gradient_clip"].tolist() == ["none", 1.0]
    assert len(table.where(gradient_clip="none").frame) == 1
    kept = GridTable.load(tmp_path / RESULTS, table.axes)
    assert kept.frame["gradient_clip"].tolist() == ["none", "1.0"]
    assert viz.lines(table, "gradient_clip", "loss").data
    sweep = Sweep(BASE, {"width": {"a": {"steps": 1}, "b": {"steps": 2}}, "seed": (0,)})
    with pytest.raises(SweepError, match=r"a measure returned \['width'\]"):
        sweep.run(tmp_path / "width", lambda checkpoint: {"width": 7}, workers=1, progress=False)


def test_a_damaged_manifest_is_named(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "copy")
    path = tmp_path / "copy" / "sweep.json"
    for text in ("{", "[]", "{}", json.dumps({**json.loads(path.read_text()), "cells": {"../x": {}}})):
        path.write_text(text)
        with pytest.raises(SweepError, match=r"sweep\.json is damaged"):
            status(tmp_path / "copy")
    with pytest.raises(SweepError, match="contains no sweep"):
        load_table(tmp_path / "nowhere")


def test_damaged_rows_are_named_and_a_checkpoint_that_was_cut_short_is_trained_again(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "copy")
    path = next((tmp_path / "copy").glob("cells/*/rows.json"))
    for rows in (3, [3], [{"loss": [1]}], [{"diverged_at": "never"}]):
        path.write_text(json.dumps({**json.loads(path.read_text()), "rows": rows}))
        with pytest.raises(SweepError, match=r"rows\.json is damaged|values that are not numbers"):
            load_table(tmp_path / "copy")
    path.unlink()
    (path.parent / "checkpoint" / "record.json").unlink()
    run(tmp_path / "copy")
    assert (tmp_path / "copy" / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()


# ---- Ray ----
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of jax, if another test has loaded it
def test_a_cluster_of_two_that_loses_one_finishes_with_the_same_bytes(tmp_path):
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        second = cluster.add_node(num_cpus=1)
        done_then = []

        def lose_one():
            while not (done := list((tmp_path / "ray").glob("cells/*/rows.json"))):
                time.sleep(0.02)
            cluster.remove_node(second, allow_graceful=False)
            done_then.append(len(done))

        thread = threading.Thread(target=lose_one, daemon=True)
        thread.start()
        run(tmp_path / "ray", slow, workers=None, ray=cluster.address)
        thread.join()
        assert 1 <= done_then[0] < 4
    finally:
        cluster.shutdown()
    run(tmp_path / "serial", slow)
    assert (tmp_path / "ray" / RESULTS).read_bytes() == (tmp_path / "serial" / RESULTS).read_bytes()


def test_ray_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'mechicl\[ray\]'"):
        run(tmp_path, slow, workers=None, ray="auto")
