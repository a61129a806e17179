"""`make gpu` without a GPU: its message, and a dry run."""

import json
from typing import Any

import pytest
import torch

from mechicl.checkpoints import load_checkpoint
from mechicl.training.state import RunState
from tests.scripts import import_script


@pytest.fixture(scope="module")
def script() -> Any:
    return import_script("on_a_gpu")


def test_without_a_gpu_it_says_so(script, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.run(["--minutes", "1"]) == 1
    assert "no GPU: torch" in capsys.readouterr().err


def test_a_dry_run_times_steps_and_trains(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "SPEEDS", {"fp32": {}, "tf32": {"tf32": True}, "fused": {"fused_attention": True}})
    words = ["--dry", "--minutes", "1", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert script.run([*words, "--presets", "gpt2-12l"]) == 0
    speeds = json.loads((tmp_path / "gpu_speed.json").read_text())["steps_per_second"]
    assert speeds["fp32"] > 0
    assert speeds["fused"] > 0
    assert speeds["tf32"] == "left out in a dry run"
    assert "held-out loss" in capsys.readouterr().out
    assert load_checkpoint(tmp_path / "runs" / "gpt2-12l-gpu" / "checkpoint").record["steps_done"] == 4


def test_a_training_stops_in_time_and_resumes(script, tmp_path, capsys):
    config, folder = script.config_of("gpt2-12l-1h", True), tmp_path / "gpt2-12l-1h-gpu"
    script.go_on(config, {"fused_attention": True}, folder, deadline=0.0)
    assert "saved at step 2 of 4" in capsys.readouterr().out
    script.go_on(config, {}, folder, deadline=float("inf"))  # with its first settings, whatever is fastest now
    assert RunState.load(folder, config.replace(fused_attention=True)).step == 4


def test_a_setting_that_does_not_run_gives_the_reason(script, tmp_path):
    config = script.config_of("gpt2-12l", True).replace(tf32=True)
    assert script.steps_per_second(config, 4, tmp_path / "speed").startswith("does not run: tf32=True needs")
