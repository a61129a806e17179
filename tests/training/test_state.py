import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mechicl.base.tensor_files import read_tensors
from mechicl.training import TrainingConfig, train
from mechicl.training.metrics import METRICS_FILE, Metrics
from mechicl.training.state import EARLIER_STATE_FILE, STATE_FILE, DamagedSaveError, RunState
from tests.training.runs import LSTM, assert_same_bits, interrupted, small, weights

# Imports once and forks each run, so that kills come at its first and last step.
KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path

config, folder, kills = json.loads(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
import torch
import mechicl.base.files
from mechicl.training import TrainingConfig, train

torch.set_num_threads(1)
config = TrainingConfig.from_dict(config)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(function, number, when):
    count = 0

    def wrapper(*args):
        nonlocal count
        count += 1
        if count == number and when == "before":
            die()
        result = function(*args)
        if count == number and when == "after":
            die()
        return result

    return wrapper


def child(kill):
    if isinstance(kill, list):  # in the middle of writing a file
        name, number, when = kill
        setattr(mechicl.base.files.os, name, die_at_call(getattr(os, name), number, when))
    train(config, folder, progress=False, on_save=lambda step: time.sleep(0.005))


outcomes = []
for kill in kills:
    process = os.fork()
    if process == 0:
        code = 1
        try:
            child(kill)
            code = 0
        finally:
            os._exit(code)
    if isinstance(kill, float):
        time.sleep(kill)
        os.kill(process, signal.SIGKILL)
    status = os.waitpid(process, 0)[1]
    outcomes.append(os.waitstatus_to_exitcode(status))
print(json.dumps(outcomes))
"""


def run_and_kill(config: TrainingConfig, folder: Path, kills: list) -> list[int]:
    """Exit codes of the runs, -9 for a killed one. A number kills after that time in seconds, a triple at a call."""
    arguments = [json.dumps(config.to_dict()), str(folder), json.dumps(kills)]
    done = subprocess.run([sys.executable, "-c", KILLER, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_same_runs(a: Path, b: Path) -> None:
    """Every tensor of the last save, every line of the metrics (but the speed), every snapshot."""
    assert_same_bits(read_tensors(a / STATE_FILE)[0], read_tensors(b / STATE_FILE)[0])
    lines = [[{**line, "steps_per_second": 0} for line in Metrics.read(folder)] for folder in (a, b)]
    assert lines[0] == lines[1]
    snapshots = [sorted(path.name for path in folder.glob("snapshots/*")) for folder in (a, b)]
    assert snapshots[0] == snapshots[1]
    for name in snapshots[0]:
        assert_same_bits(read_tensors(a / "snapshots" / name)[0], read_tensors(b / "snapshots" / name)[0])


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_bit_for_bit_like_one_that_was_not(tmp_path):
    config = small(
        seeds=(0, 3), steps=120, save_every=2, log_every=1, eval_every=3, n_snapshots=9, schedule="cosine",
        gradient_clip=0.1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    moments = [0.05 + 0.25 * torch.rand(1, generator=generator).item() for _ in range(5)]
    in_a_write = [["fsync", 1, "before"], ["replace", 4, "before"], ["replace", 7, "after"], ["fsync", 12, "after"]]
    kills = [in_a_write[0], moments[0], in_a_write[1], moments[1], moments[2], in_a_write[2], moments[3], in_a_write[3],
             moments[4]]  # fmt: skip
    codes = run_and_kill(config, tmp_path / "killed", [*kills, None])
    assert codes[0] == -signal.SIGKILL  # a quick machine may finish before the later ones
    assert set(codes[1:-1]) <= {0, -signal.SIGKILL}
    assert codes[-1] == 0
    assert run_and_kill(config, tmp_path / "whole", [None]) == [0]
    assert_same_runs(tmp_path / "killed", tmp_path / "whole")
    steps = [line["step"] for line in Metrics.read(tmp_path / "killed")]
    assert steps == list(range(121))
    assert not [path for path in (tmp_path / "killed").rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"schedule": "cosine", "warmup_steps": 7, "gradient_clip": None},
        {"mixed_precision": "bf16"},
        {"model": LSTM.replace(dtype="float32"), "seeds": (0, 1)},
    ],
)
def test_a_resumed_run_ends_bit_for_bit_like_an_uninterrupted_one(tmp_path, changes):
    config = small(**{"n_snapshots": 4} | changes)
    whole = train(config, tmp_path / "whole", progress=False)
    interrupted(config, tmp_path / "parts", 5)
    resumed = train(config, tmp_path / "parts", progress=False)
    for i in range(len(config.seeds)):
        assert_same_bits(weights(resumed, i), weights(whole, i))
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")
    assert_same_bits(resumed.snapshots, whole.snapshots)
    assert resumed.record["curve"] == whole.record["curve"]


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
    assert_same_runs(tmp_path / "run", tmp_path / "fresh")


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
            assert_same_runs(folder, tmp_path / "whole")
        else:
            assert "No earlier save is intact" in str(caught.value)
            assert name != STATE_FILE


@pytest.mark.parametrize("change", ["shape", "name", "type"])
def test_tensors_of_another_run_are_refused_before_an_optimiser_reads_them(tmp_path, change):
    """Torch's fused Adam would write beyond the end of a shorter one."""
    config = small(save_every=3)
    interrupted(config, tmp_path, 9)
    state = RunState.load(tmp_path, config)
    moments = state.moments
    if change == "shape":
        moments["exp_avg.weights"] = moments["exp_avg.weights"][:, :3]
    elif change == "type":
        moments["exp_avg.weights"] = moments["exp_avg.weights"].double()
    else:
        moments["exp_avg.weight"] = moments.pop("exp_avg.weights")
    state.save(tmp_path, config)
    with pytest.raises(DamagedSaveError, match=r"has other moments than this run: \['exp_avg.weight"):
        train(config, tmp_path, progress=False)


def test_a_save_from_another_kind_of_device_is_refused(tmp_path):
    config = small()
    train(config, tmp_path, progress=False)
    state = RunState.load(tmp_path, config)
    state.generators = torch.zeros(1, 16, dtype=torch.uint8)  # such as CUDA's
    state.save(tmp_path, config)
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
