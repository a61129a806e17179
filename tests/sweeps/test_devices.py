import pytest

from mechicl.sweeps.devices import device_kind, read_devices, warn_of_several
from mechicl.sweeps.folder import RESULTS
from tests.sweeps.runs import doubled, sweep


def run(folder):
    return sweep().run(folder, doubled, workers=1, progress=False)


def test_each_cell_says_where_it_was_trained(tmp_path):
    run(tmp_path)
    assert [read_devices(tmp_path / "cells" / cell.name) for cell in sweep().cells] == [[device_kind(cpu=True)]] * 4


def test_cells_of_another_device_are_kept_and_one_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("mechicl.sweeps.work.device_kind", lambda cpu: "cuda, H200")
    monkeypatch.setattr("mechicl.sweeps.sweep.device_kind", lambda cpu: "cuda, H200")
    run(tmp_path)
    table = (tmp_path / RESULTS).read_bytes()
    monkeypatch.undo()
    with pytest.warns(UserWarning, match=r"4 on cuda, H200; this is cpu, .* differ in the last digits"):
        run(tmp_path)
    assert (tmp_path / RESULTS).read_bytes() == table


def test_several_devices_in_one_run_are_told_at_its_end(tmp_path, monkeypatch):
    kinds = iter(["cuda, A100", "cuda, A100", "cuda, H200", "cuda, H200"])
    monkeypatch.setattr("mechicl.sweeps.work.device_kind", lambda cpu: next(kinds))
    with pytest.warns(UserWarning, match=r"\(2 on cuda, .*; 2 on cuda, [^;]*\): their"):
        run(tmp_path)


def test_cells_that_say_nothing_are_no_other_device(tmp_path, recwarn):
    assert read_devices(tmp_path) == []
    assert not warn_of_several([tmp_path], "cpu, AVX2")
    (tmp_path / "devices.json").write_text("{nonsense")
    assert not warn_of_several([tmp_path], "cpu, AVX2")
    assert not recwarn
