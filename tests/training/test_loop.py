import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from mechicl.checkpoints import Snapshots, load, load_checkpoint, save
from mechicl.models import HookedTransformer, TransformerConfig, build
from mechicl.tasks import FixedTasks, LinearRegression
from mechicl.training import Curriculum, Ramp, TrainingConfig, TrainingDivergedError, train
from mechicl.training.state import METRICS_FILE, Metrics, RunState
from tests.training.runs import (
    EXACT,
    LSTM,
    MODEL,
    READER,
    TASK,
    WORDS,
    assert_close,
    assert_same_bits,
    reading,
    small,
    weights,
)

# ---- the loop against plain PyTorch ----


def linear_attention(w: dict[str, Tensor], xs: Tensor, ys: Tensor) -> Tensor:
    """The query's prediction of one layer of linear attention (von Oswald et al. 2023, section 2), one head."""
    tokens = torch.cat([xs, torch.cat([ys[:, :-1], torch.zeros_like(ys[:, -1:])], dim=1)], dim=2)
    query, context = tokens[:, -1:], tokens[:, :-1]
    scores = query @ w["blocks.0.attn.W_Q"][0] @ (context @ w["blocks.0.attn.W_K"][0]).transpose(1, 2)
    query = query + scores @ (context @ w["blocks.0.attn.W_V"][0]) @ w["blocks.0.attn.W_O"][0]
    return -query[:, :, xs.shape[2] :]


def causal_softmax(w: dict[str, Tensor], xs: Tensor, ys: Tensor) -> Tensor:
    """All points' predictions of two blocks of causal attention and ReLU MLP, without norms, on x and y in turn."""
    batch, points, x_dim = xs.shape
    tokens = torch.zeros(batch, 2 * points - 1, x_dim, dtype=xs.dtype)
    for t in range(points):
        tokens[:, 2 * t] = xs[:, t]
        if t < points - 1:
            tokens[:, 2 * t + 1, 0] = ys[:, t, 0]
    stream = tokens @ w["embed"] + w["pos_embed"][: tokens.shape[1]]
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    for layer in range(2):
        attn = {name: w[f"blocks.{layer}.attn.{name}"] for name in ("W_Q", "W_K", "W_V", "W_O")}
        update = torch.zeros_like(stream)
        for head in range(2):
            q, k, v = (stream @ attn[name][head] for name in ("W_Q", "W_K", "W_V"))
            scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[2])
            update = update + scores.masked_fill(mask, -math.inf).softmax(dim=2) @ v @ attn["W_O"][head]
        stream = stream + update
        mlp = {name: w[f"blocks.{layer}.mlp.{name}"] for name in ("W_in", "b_in", "W_out", "b_out")}
        stream = stream + (stream @ mlp["W_in"] + mlp["b_in"]).clamp(min=0) @ mlp["W_out"] + mlp["b_out"]
    return (stream @ w["unembed"])[:, 0::2]


def recurrent(w: dict[str, Tensor], xs: Tensor, ys: Tensor) -> Tensor:
    """All points' predictions of two LSTM layers on x and y in turn."""
    batch, points, x_dim = xs.shape
    tokens = torch.zeros(batch, 2 * points - 1, x_dim, dtype=xs.dtype)
    tokens[:, 0::2] = xs
    tokens[:, 1::2, :1] = ys[:, :-1]
    stream = tokens @ w["embed"]
    for layer in range(2):
        W_ih, W_hh, b_ih, b_hh = (w[f"blocks.{layer}.{name}"] for name in ("W_ih", "W_hh", "b_ih", "b_hh"))
        hidden = cell = torch.zeros(batch, stream.shape[2], dtype=xs.dtype)
        states = []
        for x in stream.unbind(1):
            enter, forget, new, leave = (x @ W_ih.T + hidden @ W_hh.T + b_ih + b_hh).chunk(4, dim=1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            states.append(hidden)
        stream = torch.stack(states, dim=1)
    return (stream @ w["unembed"] + w["unembed_bias"])[:, 0::2]


def plain_training(config: TrainingConfig, predict, rows: slice) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of a plain loop on the prompts that a run of the config trains on."""
    (seed,) = config.seeds
    model = build(config.model, seed)
    w = {name: torch.nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    adam = torch.optim.Adam(w.values(), lr=config.learning_rate)
    generator, losses = torch.Generator().manual_seed(2**40 + seed), []
    for step in range(config.steps):
        for group in adam.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps))
        prompts = TASK.sample(config.batch_size, generator=generator)
        predictions = predict(w, prompts.xs.double(), prompts.ys.double())
        loss = ((predictions - prompts.ys[:, rows]) ** 2).mean()
        adam.zero_grad()
        loss.backward()
        if config.gradient_clip is not None:
            torch.nn.utils.clip_grad_norm_(w.values(), config.gradient_clip)
        adam.step()
        losses.append(loss.item())
    return {name: p.detach() for name, p in w.items()}, losses


SOFTMAX = TransformerConfig(
    x_dim=3, n_context=4, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=8, d_mlp=12, attention="softmax",
    act_fn="relu", initializer_range=0.3, dtype="float64",
)  # fmt: skip
CASES = [
    (EXACT, linear_attention, slice(-1, None)),
    (SOFTMAX, causal_softmax, slice(None)),
    (LSTM, recurrent, slice(None)),
]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(("model", "predict", "rows"), CASES, ids=["linear", "softmax", "lstm"])
def test_training_equals_a_plain_eager_loop(tmp_path, model, predict, rows, clip):
    config = small(model=model, steps=30, warmup_steps=5, gradient_clip=clip, seeds=(3,))
    result = train(config, tmp_path, progress=False)
    expected, losses = plain_training(config, predict, rows)
    assert_close(weights(result), expected, atol=1e-9)
    assert [line["loss"][0] for line in Metrics.read(tmp_path)[1:]] == pytest.approx(losses, rel=1e-9)
    start = dict(build(model, 3).named_parameters())
    assert max((expected[name] - start[name]).abs().max().item() for name in start) > 0.05  # it did train


def test_training_in_single_precision_equals_the_plain_loop_to_that_precision(tmp_path):
    result = train(small(), tmp_path, progress=False)
    expected, _ = plain_training(small(model=EXACT), linear_attention, slice(-1, None))
    assert_close(weights(result), {name: w.float() for name, w in expected.items()}, atol=1e-4)


def test_equal_configs_give_equal_bits_and_other_seeds_other_weights(tmp_path):
    first, again = (train(small(), tmp_path / name, progress=False) for name in "ab")
    other = train(small(seeds=(1,)), tmp_path / "c", progress=False)
    assert_same_bits(weights(first), weights(again))
    assert not torch.equal(weights(first)["blocks.0.attn.W_Q"], weights(other)["blocks.0.attn.W_Q"])


def test_gradient_descent_on_a_full_batch_of_fixed_tasks_never_leaves_the_set(tmp_path):
    task = FixedTasks(TASK, 16, seed=1)
    config = small(task=task, steps=6, learning_rate=1e-12)  # the weights stay where they are
    result = train(config, tmp_path, progress=False)
    with torch.no_grad():
        predictions = result.models[0].predict(task.prompts)
    expected = (predictions - task.prompts.query.ys.float()).square().mean().item()
    assert [line["loss"][0] for line in Metrics.read(tmp_path)[1:]] == pytest.approx([expected] * 6, rel=1e-5)


# ---- evaluation, target, metrics, saves ----


def held_out_loss(config: TrainingConfig, model: HookedTransformer) -> float:
    prompts = config.eval_task.sample(config.eval_prompts, seed=config.eval_seed)
    with torch.no_grad():
        return (model.predict(prompts) - prompts.query.ys).square().mean().item()


def test_held_out_prompts_are_the_same_every_time(tmp_path):
    config = small(learning_rate=1e-12, seeds=(0, 1))
    curve = train(config, tmp_path, progress=False).record["curve"]
    assert curve["eval_step"] == [0, 4, 8, 12]
    for seed in (0, 1):
        expected = held_out_loss(config, HookedTransformer(MODEL, seed=seed))
        assert [losses[seed] for losses in curve["eval_loss"]] == pytest.approx([expected] * 4, rel=1e-5)


def test_the_last_step_is_evaluated_and_saved_whatever_the_intervals(tmp_path):
    config = small(steps=7, eval_every=100, save_every=100, log_every=100)
    result = train(config, tmp_path, progress=False)
    assert result.record["curve"]["eval_step"] == [0, 7]
    assert result.record["curve"]["eval_loss"][-1] == pytest.approx([held_out_loss(config, result.models[0])], rel=1e-5)
    assert RunState.load(tmp_path, config).step == 7


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


def test_metrics_have_a_line_for_each_logged_or_evaluated_step(tmp_path):
    train(small(log_every=5, eval_every=4, seeds=(0, 1), warmup_steps=8), tmp_path, progress=False)
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 4, 5, 8, 10, 12]
    assert ["eval_loss" in line for line in lines] == [True, True, False, True, False, True]
    assert all(len(line["loss"]) == 2 and line["steps_per_second"] > 0 for line in lines[1:])
    assert [line["learning_rate"] for line in lines[1:]] == pytest.approx([0.005, 0.00625, 0.01, 0.01, 0.01])


def test_on_save_hears_of_every_save_after_it_is_on_disk(tmp_path):
    config, heard = small(), []
    train(config, tmp_path, progress=False, on_save=lambda s: heard.append((s, RunState.load(tmp_path, config).step)))
    assert heard == [(5, 5), (10, 10), (12, 12)]


def test_snapshots_hold_the_weights_at_their_steps(tmp_path):
    config = small(n_snapshots=5, seeds=(0, 2))
    result = train(config, tmp_path / "run", progress=False)
    assert result.snapshot_steps == config.snapshot_steps
    for i, seed in enumerate(config.seeds):
        for name, weight in HookedTransformer(MODEL, seed=seed).named_parameters():
            assert torch.equal(result.snapshots[name][0, i], weight)
            assert torch.equal(result.snapshots[name][-1, i], weights(result, i)[name])
    half = config.snapshot_steps[2]
    short = train(config.replace(steps=half, n_snapshots=0), tmp_path / "short", progress=False)
    for i in range(2):
        assert_same_bits(weights(short, i), {name: result.snapshots[name][2, i] for name in weights(short)})


def test_snapshots_stack_into_models_with_their_buffers(tmp_path):
    result = train(small(n_snapshots=3), tmp_path, progress=False)
    model = result.models[0]
    assert set(result.snapshots) == {name for name, _ in (*model.named_parameters(), *model.named_buffers())}


def test_no_steps_give_the_initial_models_and_their_loss(tmp_path):
    config = small(steps=0, n_snapshots=3)
    for _ in range(2):  # also when called again
        result = train(config, tmp_path, progress=False)
        assert_same_bits(weights(result), dict(HookedTransformer(MODEL, seed=0).named_parameters()))
        assert result.record["curve"]["eval_step"] == [0]
        assert result.snapshot_steps == (0,)


def test_the_models_of_a_result_are_in_eval_mode_on_the_cpu_with_the_configs_fields(tmp_path):
    (model,) = train(small(), tmp_path, progress=False).models
    assert not model.training
    assert model.cfg == MODEL
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_the_record_says_how_it_went_as_plain_json(tmp_path):
    config = small(seeds=(2, 1))
    record = train(config, tmp_path, progress=False).record
    assert json.loads(json.dumps(record, allow_nan=False)) == json.loads(json.dumps(record))
    assert TrainingConfig.from_dict(json.loads(json.dumps(record["training"]))) == config
    assert (record["seeds"], record["steps_done"], record["processes"]) == ([2, 1], 12, 1)
    assert record["versions"]["torch"] == torch.__version__
    assert record["wall_time_s"] >= 0
    assert "CPU" in record["hardware"]
    assert len(record["curve"]["loss"]) == 12


def test_a_progress_bar_counts_the_steps(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mechicl.progress.DELAY", 0.0)
    train(small(), tmp_path / "shown")
    assert re.search(r"\d+/12 .*step", capsys.readouterr().err)
    train(small(), tmp_path / "quiet", progress=False)
    assert capsys.readouterr().err == ""


def test_a_tracker_writes_its_events(tmp_path):
    train(small(tracker="tensorboard"), tmp_path, progress=False)
    (events, *_) = list((tmp_path / "mechicl").rglob("events.out.tfevents*"))
    assert b"eval_loss" in events.read_bytes()


def test_an_unknown_tracker_is_refused(tmp_path):
    with pytest.raises(ValueError, match="paperboard"):
        train(small(tracker="paperboard"), tmp_path, progress=False)


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


def test_an_interrupted_run_resumes_as_if_it_had_not_been(tmp_path):
    def interrupt(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(small(), tmp_path / "run", progress=False, on_save=interrupt)
    resumed = train(small(), tmp_path / "run", progress=False)
    assert_same_bits(weights(resumed), weights(train(small(), tmp_path / "whole", progress=False)))


def test_an_error_in_the_prompts_ends_the_run_with_that_error(tmp_path, monkeypatch):
    sample = LinearRegression.sample
    calls = []

    def failing(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == 5:
            raise RuntimeError("the well is dry")
        return sample(self, *args, **kwargs)

    monkeypatch.setattr(LinearRegression, "sample", failing)
    with pytest.raises(RuntimeError, match="the well is dry"):
        train(small(), tmp_path, progress=False)


# ---- several tasks ----

GAUSSIAN = TASK.replace(inputs="gaussian", noise_std=0.3)


def test_an_interrupted_run_on_several_tasks_resumes_as_if_it_had_not_been(tmp_path):
    losses = train(small(more_tasks=(GAUSSIAN,), seeds=(0, 3), eval_every=2), tmp_path / "free", progress=False).record
    target = min(losses["curve"]["eval_loss"][2])  # one has stopped when the run is cut short
    config = small(
        more_tasks=(GAUSSIAN, FixedTasks(TASK, 24)), seeds=(0, 3), n_snapshots=4, target_loss=target, eval_every=2
    )

    def interrupt(step):
        raise KeyboardInterrupt

    for _ in range(2):  # at steps 5 and 10
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run", progress=False, on_save=interrupt)
    assert any(RunState.load(tmp_path / "run", config).stopped_at >= 0)
    resumed = train(config, tmp_path / "run", progress=False)
    whole = train(config, tmp_path / "whole", progress=False)
    for i in range(6):
        assert_same_bits(weights(resumed, i), weights(whole, i))
    assert resumed.record["curve"] == whole.record["curve"]
    assert resumed.record["stopped_at"] == whole.record["stopped_at"]
    assert_same_bits(resumed.snapshots, whole.snapshots)


def test_a_run_is_not_resumed_with_other_tasks(tmp_path):
    train(small(more_tasks=(GAUSSIAN,)), tmp_path, progress=False)
    for tasks in ((), (TASK.replace(noise_std=0.1),), (GAUSSIAN, TASK)):
        with pytest.raises(ValueError, match=r"another config .*more_tasks"):
            train(small(more_tasks=tasks), tmp_path, progress=False)


def test_every_member_is_evaluated_on_held_out_prompts_of_its_own_task(tmp_path):
    fixed = FixedTasks(TASK.replace(input_scale=2.0), 16)
    config = small(more_tasks=(GAUSSIAN, fixed), seeds=(0, 3))
    result = train(config, tmp_path, progress=False)
    tasks = [TASK, TASK, GAUSSIAN, GAUSSIAN, fixed.task, fixed.task]
    expected = [held_out_loss(config.replace(task=t), m) for t, m in zip(tasks, result.models, strict=True)]
    assert result.record["curve"]["eval_loss"][-1] == pytest.approx(expected, rel=1e-5)
    assert result.record["seeds"] == [0, 3, 0, 3, 0, 3]
    assert TrainingConfig.from_dict(json.loads(json.dumps(result.record["training"]))) == config


# ---- sequences of tokens ----

EXACT_READER = READER.replace(dtype="float64")


def next_token_scores(w: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """The logits of two layers of causal attention, without norms and MLPs, on token ids."""
    length = ids.shape[1]
    stream = w["embed"][ids] + w["pos_embed"][:length]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    for layer in range(2):
        attn = {name: w[f"blocks.{layer}.attn.{name}"] for name in ("W_Q", "W_K", "W_V", "W_O")}
        update = torch.zeros_like(stream)
        for head in range(2):
            q, k, v = (stream @ attn[name][head] for name in ("W_Q", "W_K", "W_V"))
            scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[2])
            update = update + scores.masked_fill(mask, -math.inf).softmax(dim=2) @ v @ attn["W_O"][head]
        stream = stream + update
    return stream @ w["unembed"]


def next_token_loss(w: Mapping[str, Tensor], n: int, **draw: object) -> Tensor:
    """Mean of -log softmax at the tokens that a period before tells."""
    sequences = WORDS.sample(n, **draw)  # pyright: ignore[reportArgumentType]
    log_p = next_token_scores(w, sequences.ids)[:, :-1].log_softmax(dim=2)  # token 12 is never read: causal
    return -log_p.gather(2, sequences.ids[:, 1:, None])[..., 0][sequences.predictable[:, 1:]].mean()


def test_training_on_tokens_equals_a_plain_eager_loop(tmp_path):
    model = EXACT_READER.replace(n_ctx=13)  # so that the plain loop has a position for the last token, too
    config = reading(model=model, steps=30, warmup_steps=5, gradient_clip=0.5, seeds=(3,))
    result = train(config, tmp_path, progress=False)
    start = build(model, 3)
    w = {name: torch.nn.Parameter(p.detach().clone()) for name, p in start.named_parameters()}
    adam, generator = torch.optim.Adam(w.values()), torch.Generator().manual_seed(2**40 + 3)
    losses = []
    for step in range(30):
        for group in adam.param_groups:
            group["lr"] = config.learning_rate_at(step)
        loss = next_token_loss(w, 16, generator=generator)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 0.5)
        adam.step()
        losses.append(loss.item())
    assert_close(weights(result), {name: p.detach() for name, p in w.items()}, atol=1e-9)
    assert [line["loss"][0] for line in Metrics.read(tmp_path)[1:]] == pytest.approx(losses, rel=1e-9)
    held_out = next_token_loss(weights(result), config.eval_prompts, seed=config.eval_seed).item()
    assert result.record["curve"]["eval_loss"][-1] == pytest.approx([held_out], rel=1e-9)
    assert held_out < next_token_loss(dict(start.named_parameters()), 32, seed=config.eval_seed).item()


def test_an_interrupted_run_on_tokens_resumes_as_if_it_had_not_been(tmp_path):
    config = reading(more_tasks=(WORDS.replace(min_period=5),), seeds=(0, 3), n_snapshots=4)

    def interrupt(step):
        raise KeyboardInterrupt

    for step in (5, 10):
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run", progress=False, on_save=interrupt)
        assert RunState.load(tmp_path / "run", config).step == step
    resumed = train(config, tmp_path / "run", progress=False)
    whole = train(config, tmp_path / "whole", progress=False)
    for i in range(4):
        assert_same_bits(weights(resumed, i), weights(whole, i))
    assert resumed.record["curve"] == whole.record["curve"]
    assert_same_bits(resumed.snapshots, whole.snapshots)
    for other in (WORDS.replace(max_period=4), WORDS):
        with pytest.raises(ValueError, match="another config"):
            train(config.replace(task=other, more_tasks=()), tmp_path / "run", progress=False)


def test_seeds_and_tasks_of_tokens_trained_together_equal_those_alone(tmp_path):
    tasks = (WORDS, WORDS.replace(min_period=5))
    config = reading(model=EXACT_READER, more_tasks=tasks[1:], seeds=(0, 5), steps=20)
    together = train(config, tmp_path / "together", progress=False)
    for i, (task, seed) in enumerate([(0, 0), (0, 5), (1, 0), (1, 5)]):
        own = config.replace(task=tasks[task], more_tasks=(), seeds=(seed,))
        alone = train(own, tmp_path / f"alone-{i}", progress=False)
        assert_close(weights(together, i), weights(alone), atol=1e-10)
        for name in ("loss", "eval_loss"):
            curve = [line[i] for line in together.record["curve"][name]]
            assert curve == pytest.approx([line[0] for line in alone.record["curve"][name]], rel=1e-6)
    assert not torch.equal(weights(together, 0)["embed"], weights(together, 1)["embed"])


def test_a_run_on_tokens_stops_at_its_target_and_runs_in_mixed_precision(tmp_path):
    curve = train(reading(), tmp_path / "free", progress=False).record["curve"]
    result = train(reading(target_loss=curve["eval_loss"][1][0]), tmp_path / "stopping", progress=False)
    assert result.record["stopped_at"] == [4]
    mixed = train(reading(mixed_precision="bf16"), tmp_path / "mixed", progress=False)
    assert all(w.dtype == torch.float32 for w in weights(mixed).values())
    assert mixed.record["curve"]["eval_loss"][-1] == pytest.approx(curve["eval_loss"][-1], rel=0.05)


def test_a_trained_reader_of_tokens_is_saved_and_loaded_with_its_task(tmp_path):
    other = WORDS.replace(min_period=5)
    config = reading(more_tasks=(other,), seeds=(4, 9), n_snapshots=3)
    result = train(config, tmp_path / "run", progress=False)
    folder = save(tmp_path / "mine", result.models, result.record, Snapshots(result.snapshot_steps, result.snapshots))
    checkpoint = load_checkpoint(folder)
    assert checkpoint.task == WORDS
    assert type(checkpoint.task) is type(WORDS)
    assert [part.task for part in checkpoint.by_task()] == [WORDS, other]
    assert TrainingConfig.from_dict(checkpoint.record["training"]) == config
    assert load(folder, seed=9).cfg == READER
    ids = WORDS.sample(3, seed=0).read
    for i, (trained, last) in enumerate(zip(result.models, checkpoint.models_at(-1), strict=True)):
        with torch.no_grad():
            expected = trained(ids)
            assert torch.equal(checkpoint.models[i](ids), expected)
            assert torch.equal(last(ids), expected)


# ---- divergence ----


def test_a_task_on_which_a_model_diverges_is_named(tmp_path):
    config = small(more_tasks=(GAUSSIAN, TASK.replace(input_scale=1e15)), seeds=(4, 7))
    seeds = r"4 of task 2 \((nan|inf)\), 7 of task 2 \((nan|inf)\)"
    with pytest.raises(TrainingDivergedError, match=rf"at step 1 for seed {seeds}; no save yet"):
        train(config, tmp_path, progress=False)


def test_a_diverging_run_stops_with_step_seed_and_a_good_save(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingConfig, "learning_rate_at", lambda config, step: 0.01 if step < 7 else 1e6)
    config = small(seeds=(4, 7), save_every=3, eval_every=1000)
    with pytest.raises(TrainingDivergedError) as caught:
        train(config, tmp_path, progress=False)
    message = str(caught.value)
    seeds = r"4 \((nan|inf)\), 7 \((nan|inf)\)"
    assert re.search(rf"not finite at step 9 for seed {seeds}; last good save: step 6 in {tmp_path}", message)
    assert "learning_rate (now 0.01)" in message
    state = RunState.load(tmp_path, config)
    assert state.step == 6
    for i in range(2):
        model = HookedTransformer(MODEL)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(state.weights[name][i])
        assert held_out_loss(config, model) < 1
    assert [line["step"] for line in Metrics.read(tmp_path)] == list(range(9))


def test_one_seed_that_diverges_is_named_alone(tmp_path, monkeypatch):
    config = small(seeds=(4, 7))
    init = HookedTransformer.reset_parameters

    def broken(model, seed):
        init(model, seed)
        if seed == 7:
            with torch.no_grad():
                model.blocks[0].attn.W_Q.fill_(1e38)

    monkeypatch.setattr(HookedTransformer, "reset_parameters", broken)
    with pytest.raises(TrainingDivergedError, match=r"at step 1 for seed 7 \((nan|inf)\); no save yet"):
        train(config, tmp_path, progress=False)


@pytest.mark.parametrize("save_every", [1, 2, 3, 4])
def test_weights_that_just_became_bad_are_not_saved(tmp_path, monkeypatch, save_every):
    """The loss of a step is that of the weights before it: at step 6 it is fine, the weights after it are not."""
    regular = TrainingConfig.learning_rate_at
    monkeypatch.setattr(TrainingConfig, "learning_rate_at", lambda c, step: math.inf if step == 5 else regular(c, step))
    config = small(save_every=save_every, eval_every=1000)
    saved = 5 // save_every * save_every
    with pytest.raises(TrainingDivergedError, match=f"last good save: step {saved} "):
        train(config, tmp_path, progress=False)
    state = RunState.load(tmp_path, config)
    assert state.step == saved
    assert all(weight.isfinite().all() for weight in state.weights.values())


def test_divergence_before_the_first_save_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingConfig, "learning_rate_at", lambda config, step: math.inf)
    with pytest.raises(TrainingDivergedError, match="no save yet"):
        train(small(), tmp_path, progress=False)


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


def test_two_processes_train_the_same_models_as_one(tmp_path):
    curriculum = Curriculum(points=Ramp(2, 5, 1, 3))
    free = train(small(seeds=(0, 5), steps=30, eval_every=2), tmp_path / "free", progress=False)
    target = min(free.record["curve"]["eval_loss"][7])
    configs = {
        "even": small(seeds=(0, 5), gradient_clip=0.05, n_snapshots=3),
        "odd": small(batch_size=7, curriculum=curriculum),
        "softmax": small(model=SOFTMAX, batch_size=9),
        "stopping": small(seeds=(0, 5), steps=30, eval_every=2, target_loss=target),
        # shares of different lengths, in which different numbers of tokens can be predicted
        "tokens": reading(seeds=(0, 5), batch_size=5, model=READER.replace(dtype="float64")),
    }
    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        port = free_port.getsockname()[1]
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES)
    # accelerate's --cpu wants MPI; so does this what it does for several GPUs, on the CPU
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
              "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
              "--main_process_port", str(port)]  # fmt: skip
    arguments = [str(script), str(tmp_path), json.dumps({name: c.to_dict() for name, c in configs.items()})]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, timeout=180, env=environment)
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
