"""Saves: resumed runs, damaged saves, metrics. Kills at random moments are a campaign of tests/faults."""

import dataclasses
import json
import shutil

import pytest
import torch

from mechicl.tasks import FixedTasks
from mechicl.training import train
from mechicl.training.metrics import METRICS_FILE, Metrics
from mechicl.training.state import EARLIER_STATE_FILE, STATE_FILE, DamagedSaveError, RunState
from tests.faults.saves import differences
from tests.training.runs import LSTM, TASK, BlowsUp, assert_same_bits, interrupted, reading, small, weights


@pytest.mark.parametrize(("config", "at", "options"), [
    (small(n_snapshots=4), (5,), {}),
    (small(schedule="cosine", warmup_steps=7, gradient_clip=None), (5,), {}),
    (small(mixed_precision="bf16"), (5,), {}),
    (small(model=LSTM.replace(dtype="float32"), seeds=(0, 1)), (5,), {}),
    (small(optimizer="soap", seeds=(0, 3), steps=23), (5,), {}),
    (reading(optimizer="soap", steps=23), (5,), {}),
    (small(more_tasks=(TASK.replace(inputs="gaussian"), FixedTasks(TASK, 24)), seeds=(0, 3), n_snapshots=4,
           target_loss=0.3129, eval_every=2), (5, 10), {}),
    (small(more_tasks=(BlowsUp(x_dim=3, n_context=4),), seeds=(0, 1), save_every=2), (4,), {"stop_diverged": True}),
])  # fmt: skip
def test_a_resumed_run_ends_bit_for_bit_like_an_uninterrupted_one(tmp_path, config, at, options):
    whole = train(config, tmp_path / "whole", progress=False, **options)
    for step in at:
        interrupted(config, tmp_path / "parts", step, **options)
    resumed = train(config, tmp_path / "parts", progress=False, **options)
    for i in range(len(config.members)):
        assert_same_bits(weights(resumed, i), weights(whole, i))
    assert not differences(tmp_path / "whole", tmp_path / "parts")
    assert_same_bits(resumed.snapshots, whole.snapshots)
    for name in ("curve", "stopped_at", "diverged_at"):
        assert resumed.record[name] == whole.record[name]
    stopped = {step > 0 for step in whole.record["stopped_at"]}  # some had stopped, or these cases show nothing
    assert stopped == ({True, False} if options or config.target_loss else {False})


def test_a_finished_run_called_again_gives_its_result_without_another_step(tmp_path):
    config = small(n_snapshots=4)
    first = train(config, tmp_path, progress=False)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    saves = []
    again = train(config, tmp_path, progress=False, on_save=saves.append)
    assert saves == []
    assert_same_bits(weights(again), weights(first))
    assert again.record == first.record
    assert again.snapshot_steps == first.snapshot_steps
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_restart_forgets_the_earlier_run(tmp_path):
    train(small(steps=20, n_snapshots=9), tmp_path / "run", progress=False)
    other = small(learning_rate=0.02, n_snapshots=3)
    restarted = train(other, tmp_path / "run", restart=True, progress=False)
    fresh = train(other, tmp_path / "fresh", progress=False)
    assert_same_bits(weights(restarted), weights(fresh))
    assert not differences(tmp_path / "run", tmp_path / "fresh")


# ---- saves that do not fit ----
def test_a_folder_of_a_run_with_another_config_is_refused_with_the_fields_that_differ(tmp_path):
    train(small(), tmp_path, progress=False)
    before = (tmp_path / STATE_FILE).read_bytes()
    with pytest.raises(ValueError, match=r"\(seeds: \[0\] there, \[1\] now; steps: 12 there, 13 now\); use"):
        train(small(steps=13, seeds=(1,)), tmp_path, progress=False)
    assert (tmp_path / STATE_FILE).read_bytes() == before


DAMAGES = {
    "a bit": lambda data, other, at: data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :],
    "cut": lambda data, other, at: data[:at],
    "another run's": lambda data, other, at: other,
    "gone": lambda data, other, at: None,
}


@pytest.mark.parametrize("name", [STATE_FILE, METRICS_FILE, "snapshots/000000003.safetensors"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_save_gives_the_same_bits_or_an_error_that_names_an_intact_one(tmp_path, name, damage):
    config = small(n_snapshots=4, save_every=3)
    train(config, tmp_path / "whole", progress=False)
    interrupted(config, tmp_path / "sound", 9)
    interrupted(small(n_snapshots=4, save_every=3, seeds=(1,)), tmp_path / "other", 9)
    data, other = ((tmp_path / folder / name).read_bytes() for folder in ("sound", "other"))
    generator = torch.Generator().manual_seed(len(name))
    for number in range(8 if damage in ("a bit", "cut") else 1):
        folder = tmp_path / f"damaged-{number}"
        shutil.copytree(tmp_path / "sound", folder)
        bad = DAMAGES[damage](data, other, int(torch.randint(len(data), (), generator=generator)))
        if bad is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(bad)
        if damage == "gone" and name == STATE_FILE:  # a run without a save starts over
            train(config, folder, progress=False)
            continue
        message = "has a run with another config" if (damage, name) == ("another run's", STATE_FILE) else name
        with pytest.raises(ValueError, match=message) as caught:
            train(config, folder, progress=False)
        if message != name:
            continue
        if "of step 6, is intact" in str(caught.value):
            (folder / EARLIER_STATE_FILE).rename(folder / STATE_FILE)
            train(config, folder, progress=False)
            assert not differences(folder, tmp_path / "whole")
        else:
            assert "No earlier save is intact" in str(caught.value)
            assert name != STATE_FILE


def test_tensors_of_another_run_or_device_are_refused_before_an_optimiser_reads_them(tmp_path):
    """Torch's fused Adam would write beyond the end of a shorter one."""
    config = small(save_every=3)
    interrupted(config, tmp_path, 9)
    whole = RunState.load(tmp_path, config)
    first = whole.moments["exp_avg.weights"]
    others = {name: moment for name, moment in whole.moments.items() if name != "exp_avg.weights"}
    for changed in ({"exp_avg.weights": first[:, :3]}, {"exp_avg.weights": first.double()}, {"exp_avg.weight": first}):
        dataclasses.replace(whole, moments=others | changed).save(tmp_path, config)
        with pytest.raises(DamagedSaveError, match=r"has other moments than this run: \['exp_avg.weight"):
            train(config, tmp_path, progress=False)
    dataclasses.replace(whole, generators=torch.zeros(1, 16, dtype=torch.uint8)).save(tmp_path, config)  # CUDA's size
    with pytest.raises(ValueError, match="another kind of device than cpu"):
        train(config, tmp_path, progress=False)


# ---- metrics ----
def test_metrics_of_steps_after_the_save_go_and_a_line_cut_short_is_left_out(tmp_path):
    lines = [json.dumps({"step": step}) + "\n" for step in range(5)]
    (tmp_path / METRICS_FILE).write_text("".join(lines) + '{"step": 5, "lo')
    assert [line["step"] for line in Metrics.read(tmp_path)] == [0, 1, 2, 3, 4]
    metrics = Metrics(tmp_path, n_bytes=len("".join(lines[:4])))
    metrics.write({"step": 4, "new": True})
    assert Metrics.read(tmp_path)[3:] == [{"step": 3}, {"step": 4, "new": True}]  # flushed: a kill would not lose it
    metrics.close()
    assert (tmp_path / METRICS_FILE).read_text().count("\n") == 5


def test_a_run_killed_before_its_first_save_starts_over_with_each_step_once(tmp_path):
    (tmp_path / METRICS_FILE).write_text('{"step": 0, "eval_loss": [9.0]}\n{"step": 1, "loss": [9.0]}\n')
    train(small(), tmp_path, progress=False)
    lines = Metrics.read(tmp_path)
    assert [line["step"] for line in lines] == list(range(13))
    assert 9.0 not in [value for line in lines for key in ("loss", "eval_loss") for value in line.get(key, [])]


def test_a_run_killed_before_a_new_state_was_written_leaves_nothing(tmp_path, monkeypatch):
    """The last state has two names then, and renaming one of them to the other does nothing."""
    config = small(steps=4, save_every=2)

    def dies(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    train(config.replace(steps=2), tmp_path, progress=False)
    state = RunState.load(tmp_path, config.replace(steps=2))
    with monkeypatch.context() as patched:
        patched.setattr("mechicl.training.state.write_tensors", dies)
        with pytest.raises(KeyboardInterrupt):
            state.save(tmp_path, config)
    assert (tmp_path / STATE_FILE).samefile(tmp_path / EARLIER_STATE_FILE)
    state.save(tmp_path, config)
    assert not (tmp_path / STATE_FILE).samefile(tmp_path / EARLIER_STATE_FILE)
    assert list(tmp_path.glob(".*.tmp")) == []
