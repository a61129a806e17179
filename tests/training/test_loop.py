import json
import math
import os
import re
import socket
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mechicl.base.locks import FolderInUseError, locked
from mechicl.checkpoints import load_checkpoint, save
from mechicl.models import HookedTransformer, build
from mechicl.tasks import FixedTasks
from mechicl.training import Clamp, Curriculum, Ramp, TrainingConfig, TrainingDivergedError, train
from mechicl.training.metrics import METRICS_FILE, Metrics
from mechicl.training.state import STATE_FILE, RunState
from tests.training.runs import (
    EXACT,
    EXACT_READER,
    INTERLEAVED,
    LSTM,
    MODEL,
    TASK,
    WORDS,
    BlowsUp,
    assert_close,
    assert_same_bits,
    plain_training,
    reading,
    small,
    weights,
)

# ---- the loop against plain PyTorch ----
CASES = [(model, clip, decay) for model in (EXACT, INTERLEAVED.replace(n_layers=2, d_mlp=12, dtype="float64"), LSTM)
         for clip, decay in ((None, 0.0), (0.05, 0.0), (None, 0.5))]  # fmt: skip


@pytest.mark.parametrize(("model", "clip", "decay"), [*CASES, (EXACT_READER, 0.5, 0.0)])
def test_training_equals_a_plain_eager_loop(tmp_path, model, clip, decay):
    task = WORDS if model is EXACT_READER else TASK
    config = small(
        task=task, model=model, steps=30, warmup_steps=5, gradient_clip=clip, weight_decay=decay, seeds=(3,)
    )  # fmt: skip
    result = train(config, tmp_path, progress=False)
    expected, losses = plain_training(config)
    assert_close(weights(result), expected, atol=1e-9)
    assert [line["loss"][0] for line in Metrics.read(tmp_path)[1:]] == pytest.approx(losses, rel=1e-9)
    start = dict(build(model, 3).named_parameters())
    assert max((expected[name] - start[name]).abs().max().item() for name in start) > 0.05  # it did train


# ---- evaluation, target, metrics, saves ----
def held_out_loss(config: TrainingConfig, model: HookedTransformer) -> float:
    prompts = config.eval_tasks[0].sample(config.eval_prompts, seed=config.eval_seed)
    with torch.no_grad():
        return (model.predict(prompts) - prompts.query.ys).square().mean().item()


def test_a_run_stops_at_the_first_evaluation_on_target(tmp_path):
    curve = train(small(steps=40, eval_every=2), tmp_path / "free", progress=False).record["curve"]
    losses = [loss for (loss,) in curve["eval_loss"]]
    target = sorted(losses)[len(losses) // 2]
    expected = next(step for step, loss in zip(curve["eval_step"], losses, strict=True) if step and loss <= target)
    config = small(steps=40, eval_every=2, target_loss=target, n_snapshots=5)
    result = train(config, tmp_path / "run", progress=False)
    assert result.record["steps_done"] == expected < 40
    assert result.record["stopped_at"] == [expected]
    assert held_out_loss(config, result.models[0]) == pytest.approx(losses[expected // 2], rel=1e-5)
    assert max(result.snapshot_steps) <= expected


def test_metrics_have_a_line_for_each_logged_or_evaluated_step_and_a_bar_shows_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mechicl.base.progress.DELAY", 0.0)
    train(small(log_every=5, eval_every=4, seeds=(0, 1), warmup_steps=8), tmp_path)
    assert re.search(r"\d+/12 .*step", capsys.readouterr().err)
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 4, 5, 8, 10, 12]
    assert ["eval_loss" in line for line in lines] == [True, True, False, True, False, True]
    assert all(len(line["loss"]) == 2 and line["steps_per_second"] > 0 for line in lines[1:])
    assert [line["learning_rate"] for line in lines[1:]] == pytest.approx([0.005, 0.00625, 0.01, 0.01, 0.01])


def test_snapshots_are_the_weights_at_their_steps(tmp_path):
    config = small(n_snapshots=5, seeds=(0, 2))
    result = train(config, tmp_path / "run", progress=False)
    assert result.snapshot_steps == config.snapshot_steps
    for i, seed in enumerate(config.seeds):
        for name, weight in HookedTransformer(MODEL, seed=seed).named_parameters():
            assert torch.equal(result.snapshots[name][0, i], weight)
            assert torch.equal(result.snapshots[name][-1, i], weights(result, i)[name])
    short = train(config.replace(steps=config.snapshot_steps[2], n_snapshots=0), tmp_path / "short", progress=False)
    for i in range(2):
        assert_same_bits(weights(short, i), {name: result.snapshots[name][2, i] for name in weights(short)})


def test_no_steps_give_the_initial_models_and_their_loss(tmp_path):
    for _ in range(2):  # also when called again
        result = train(small(steps=0, n_snapshots=3), tmp_path, progress=False)
        assert_same_bits(weights(result), dict(HookedTransformer(MODEL, seed=0).named_parameters()))
        assert result.record["curve"]["eval_step"] == [0] == list(result.snapshot_steps)


def test_tensorboard_gets_loss_held_out_loss_and_learning_rate_as_one_run(tmp_path):
    config = small(tracker="tensorboard", seeds=(5, 2), log_every=2, schedule="cosine")
    train(config, tmp_path, progress=False)
    events = EventAccumulator(str(next(tmp_path.rglob("events.out.tfevents*")).parent))
    events.Reload()
    assert len(list(tmp_path.rglob("events.out.tfevents*"))) == 1

    def curve(tag: str) -> dict:
        return {event.step: pytest.approx(event.value) for event in events.Scalars(tag)}

    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    for name, steps in (("loss", range(2, 13, 2)), ("eval_loss", range(0, 13, 4))):
        expected = {line["step"]: line[name] for line in lines if name in line}
        assert list(expected) == list(steps)
        assert curve(name) == {step: sum(losses) / 2 for step, losses in expected.items()}
        for i, seed in enumerate(config.seeds):
            assert curve(f"{name}/seed {seed}") == {step: losses[i] for step, losses in expected.items()}
    rates = {step: config.learning_rate_at(max(0, step - 1)) for step in range(0, 13, 2)}
    assert curve("learning_rate") == rates


def test_a_tracker_that_does_not_start_is_an_error_before_anything_is_deleted(tmp_path, monkeypatch):
    train(small(), tmp_path, progress=False)

    def refuse(*arguments, **options):
        raise RuntimeError("no key:\n log in first")

    monkeypatch.setattr(Accelerator, "init_trackers", refuse)
    with pytest.raises(ValueError, match="the tracker 'tensorboard' could not be started: no key:"):
        train(small(tracker="tensorboard"), tmp_path, restart=True, progress=False)
    assert (tmp_path / STATE_FILE).is_file()


def test_mixed_precision_trains_near_the_full_one_and_keeps_full_precision_weights(tmp_path):
    full = train(small(steps=40), tmp_path / "full", progress=False)
    mixed = train(small(steps=40, mixed_precision="bf16"), tmp_path / "mixed", progress=False)
    assert all(w.dtype == torch.float32 for w in weights(mixed).values())
    differences = [(weights(mixed)[name] - w).abs().max().item() for name, w in weights(full).items()]
    assert 1e-5 < max(differences) < 0.2
    last = mixed.record["curve"]["eval_loss"]
    assert last[-1][0] < last[0][0]
    again = train(small(steps=40), tmp_path / "again", progress=False)  # and leaves no trace in the process
    assert_same_bits(weights(again), weights(full))


# ---- several tasks ----
GAUSSIAN = TASK.replace(inputs="gaussian", noise_std=0.3)


def test_every_member_is_evaluated_on_held_out_prompts_of_its_own_task(tmp_path):
    fixed = FixedTasks(TASK.replace(input_scale=2.0), 16)
    config = small(more_tasks=(GAUSSIAN, fixed), seeds=(0, 3))
    result = train(config, tmp_path, progress=False)
    tasks = [TASK, TASK, GAUSSIAN, GAUSSIAN, fixed.task, fixed.task]
    expected = [held_out_loss(config.replace(task=t), m) for t, m in zip(tasks, result.models, strict=True)]
    assert result.record["curve"]["eval_loss"][-1] == pytest.approx(expected, rel=1e-5)
    assert result.record["seeds"] == [0, 3, 0, 3, 0, 3]
    assert TrainingConfig.from_dict(json.loads(json.dumps(result.record["training"]))) == config


# ---- divergence ----
@pytest.mark.parametrize("save_every", [2, 3])
def test_a_diverging_run_stops_with_step_seeds_and_a_good_save(tmp_path, monkeypatch, save_every):
    """The loss of a step is that of the weights before it: at step 6 it is finite, the new weights are not."""
    regular = TrainingConfig.learning_rate_at
    monkeypatch.setattr(TrainingConfig, "learning_rate_at", lambda c, step: math.inf if step == 5 else regular(c, step))
    config = small(save_every=save_every, eval_every=1000, seeds=(4, 7))
    saved = 5 // save_every * save_every
    seeds = r"4 \((nan|inf)\), 7 \((nan|inf)\)"
    with pytest.raises(TrainingDivergedError, match=rf"{seeds}; last good save: step {saved} in .*\(now 0.01\)"):
        train(config, tmp_path, progress=False)
    state = RunState.load(tmp_path, config)
    assert state.step == saved
    assert all(weight.isfinite().all() for weight in state.weights.values())


# ---- several processes ----
TWO_PROCESSES = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from accelerate import PartialState
from mechicl import cli
from mechicl.training import TrainingConfig, train

folder = Path(sys.argv[1])
for name, data in json.loads(sys.argv[2]).items():
    result = train(TrainingConfig.from_dict(data), folder / name, progress=False)
    rank = PartialState().process_index
    torch.save([dict(m.named_parameters()) for m in result.models], folder / f"{name}-{rank}.pt")
    (folder / f"{name}-{rank}.json").write_text(json.dumps(result.record))
try:
    train(TrainingConfig.from_dict(data | {"batch_size": 1}), folder / "none", progress=False)
except ValueError as error:
    (folder / f"none-{PartialState().process_index}.txt").write_text(str(error))
cli.main(["train", "lsa-1l", "--steps", "3", "--seeds", "0", "--batch-size", "5", "--eval-prompts", "8", "--quiet",
          "--out", str(folder / "checkpoint"), "--run", str(folder / "cli")])
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_two_processes_train_the_same_models_as_one(tmp_path):
    curriculum = Curriculum(points=Ramp(2, 5, 1, 3))
    free = train(small(seeds=(0, 5), steps=30, eval_every=2), tmp_path / "free", progress=False)
    target = min(free.record["curve"]["eval_loss"][7])
    clamps = (Clamp("pattern", 0, method="freeze", snapshot=3, steps=(4, 9)), Clamp("z", 1, head=0, steps=(2, 12)))
    configs = {
        "even": small(seeds=(0, 5), gradient_clip=0.05, n_snapshots=3),
        "odd": small(batch_size=7, curriculum=curriculum),
        "stopping": small(seeds=(0, 5), steps=30, eval_every=2, target_loss=target),
        # shares of different lengths, in which different numbers of tokens can be predicted
        "tokens": reading(seeds=(0, 5), batch_size=5, model=EXACT_READER),
        "compiled": small(seeds=(0, 5), batch_size=7, gradient_clip=0.05, compile=True),
        "clamped": reading(seeds=(0, 5), model=EXACT_READER, interventions=clamps),
    }
    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        port = free_port.getsockname()[1]
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES)
    # accelerate's --cpu needs MPI; --multi_gpu does the same here
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
              "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
              "--main_process_port", str(port)]  # fmt: skip
    arguments = [str(script), str(tmp_path), json.dumps({name: c.to_dict() for name, c in configs.items()})]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, config in configs.items():
        alone = train(config, tmp_path / f"{name}-alone", progress=False)
        ranks = [torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2)]
        records = [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(2)]
        assert records[0]["curve"] == records[1]["curve"]
        assert records[0]["processes"] == 2
        assert records[0]["stopped_at"] == alone.record["stopped_at"]
        for i in range(len(config.seeds)):
            assert_same_bits(ranks[0][i], ranks[1][i])
            exact = config.model.dtype == "float64"
            assert_close(ranks[0][i], weights(alone, i), atol=1e-10 if exact else 2e-5)
        losses = torch.tensor(records[0]["curve"]["loss"])
        torch.testing.assert_close(losses, torch.tensor(alone.record["curve"]["loss"]), rtol=1e-4, atol=1e-6)
        steps = [line["step"] for line in Metrics.read(tmp_path / name)]
        assert steps == list(range(alone.record["steps_done"] + 1))  # written by one of the processes only
    for rank in range(2):
        assert "2 processes cannot share a batch of 1" in (tmp_path / f"none-{rank}.txt").read_text()
    assert done.stdout.count("held-out MSE") == 1
    assert json.loads((tmp_path / "checkpoint" / "record.json").read_text())["processes"] == 2


# ---- seeds that diverge while others continue, and the folder's lock ----
def test_two_trainings_do_not_share_a_folder(tmp_path):
    with locked(tmp_path), pytest.raises(FolderInUseError, match=f"in use by process {os.getpid()}"):
        train(small(), tmp_path, progress=False)
    assert not (tmp_path / STATE_FILE).exists()
    train(small(), tmp_path, progress=False)


@pytest.mark.parametrize("optimizer", ["adam", "soap"])
def test_seeds_that_diverge_stop_if_wanted_and_the_others_are_unchanged(tmp_path, optimizer):
    config = small(seeds=(0, 1), steps=6, optimizer=optimizer, eval_every=2, save_every=2)
    both = config.replace(more_tasks=(BlowsUp(x_dim=3, n_context=4),))
    with pytest.raises(TrainingDivergedError):
        train(both, tmp_path / "raises", progress=False)
    result = train(both, tmp_path / "stops", stop_diverged=True, progress=False)
    assert result.record["diverged_at"][:2] == [-1, -1]
    assert all(1 <= step <= 6 for step in result.record["diverged_at"][2:])
    assert result.record["steps_done"] == 6
    alone = train(config, tmp_path / "alone", progress=False)
    for ours, theirs in zip(result.models[:2], alone.models, strict=True):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    json.dumps(result.record, allow_nan=False)  # it can be saved
    gone = both.replace(more_tasks=(), task=BlowsUp(x_dim=3, n_context=4), eval_every=1000)
    ended = train(gone, tmp_path / "gone", stop_diverged=True, progress=False)
    assert ended.record["curve"]["eval_step"] == [0, ended.record["steps_done"]]
    expected = [held_out_loss(gone, model) for model in ended.models]  # of the last weights
    assert ended.record["curve"]["eval_loss"][-1] == pytest.approx(expected, rel=1e-5)
    save(tmp_path / "checkpoint", result.models, result.record)
    assert load_checkpoint(tmp_path / "checkpoint").select([2]).record["diverged_at"] == [
        result.record["diverged_at"][2]
    ]
