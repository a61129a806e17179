"""Models trained together equal those trained alone, and faster steps give the same runs to rounding."""

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from mechicl.base.threads import using_threads
from mechicl.models import HookedTransformer, TransformerConfig, build
from mechicl.models.transformer.fast import fuse_attention
from mechicl.tasks import FixedTasks, LinearRegression
from mechicl.training import PRESETS, Curriculum, Ramp, TrainingConfig, train
from mechicl.training.ensemble import Ensemble
from mechicl.training.speed import threads_for
from tests.training.runs import (
    EXACT,
    EXACT_READER,
    LSTM,
    MODEL,
    TASK,
    assert_close,
    interrupted,
    reading,
    small,
    weights,
)

SEEDS = (0, 5, 11)
MIXED = EXACT.replace(n_layers=2, attention="softmax,linear", sink="learned", normalize_by_context=True)
DESCENT = EXACT.replace(
    d_model=6, read_in="linear", read_out="identity", d_mlp=8, mlp_location="input", n_layers=2,
    attention_weights="gradient_descent",
)  # fmt: skip
SOFTMAX = TransformerConfig(
    x_dim=3, n_context=4, prompt_format="interleaved", n_layers=1, n_heads=2, d_model=8, d_mlp=12, attention="softmax",
    normalization_type="LN", sink="learned", initializer_range=0.3, dtype="float64",
)  # fmt: skip
WITH_STATES = [
    SOFTMAX.replace(attention=attention, n_layers=2, sink="none", d_mlp=None, conv_width=2)
    for attention in ("delta", "gated_linear", "mamba2", "mesa", "softmax,delta")
]
MOVING = [SOFTMAX.replace(momentum=0.6), SOFTMAX.replace(momentum=0.6, momentum_over="values")]


def assert_each_member_equals_the_run_alone(config, folder):
    together = train(config, folder / "together", progress=False)
    tolerance = 1e-7 if config.optimizer == "soap" else 1e-10  # eigenvectors amplify rounding
    assert len(together.models) == len(config.tasks) * len(config.seeds)
    curve = torch.tensor(together.record["curve"]["eval_loss"], dtype=torch.float64)
    losses = torch.tensor(together.record["curve"]["loss"], dtype=torch.float64)
    members = [(task, seed) for task in config.tasks for seed in config.seeds]
    for i, (task, seed) in enumerate(members):
        alone = train(config.replace(task=task, more_tasks=(), seeds=(seed,)), folder / f"alone-{i}", progress=False)
        assert_close(weights(together, i), weights(alone), atol=tolerance)
        assert together.record["seeds"][i] == seed
        assert together.record["stopped_at"][i] == alone.record["stopped_at"][0]
        for ours, name in ((curve, "eval_loss"), (losses, "loss")):
            theirs = torch.tensor(alone.record["curve"][name], dtype=torch.float64)[:, 0]
            torch.testing.assert_close(ours[: len(theirs), i], theirs, rtol=1e-9, atol=tolerance / 100)
        n = len(alone.record["curve"]["eval_loss"])
        assert ((curve[n:, i] - curve[n - 1, i]).abs() < 1e-6).all()  # a finished seed is unchanged
        for name, kept in together.snapshots.items():
            theirs = alone.snapshots[name]
            torch.testing.assert_close(kept[: len(theirs), i], theirs[:, 0], rtol=0, atol=1e-10)
    finals = [weights(together, i) for i in range(len(members))]
    for i, one in enumerate(finals):  # and no two are the same
        assert all(any(not torch.allclose(one[n], other[n], atol=1e-4) for n in one) for other in finals[:i])
    return together


@pytest.mark.parametrize(
    "model", [MODEL, MODEL.replace(recurrent=True, n_layers=2), SOFTMAX, LSTM, MIXED, DESCENT, *MOVING, *WITH_STATES]
)
def test_outputs_are_those_of_each_model_on_its_own_tokens(model):
    models = [build(model, seed) for seed in SEEDS]
    tokens = torch.randn(3, 6, model.n_ctx, model.d_token, dtype=model.torch_dtype)
    outputs = Ensemble(models)(tokens, "query")
    for i, one in enumerate(models):
        torch.testing.assert_close(outputs[i], one(tokens[i], at="query"))


@pytest.mark.parametrize("model", [EXACT.replace(n_layers=2, recurrent=True), SOFTMAX, LSTM, DESCENT])
def test_three_seeds_equal_three_runs_alone_while_gradients_are_clipped(tmp_path, model):
    config = small(model=model, seeds=SEEDS, gradient_clip=0.05)
    together = assert_each_member_equals_the_run_alone(config, tmp_path)
    free = train(config.replace(gradient_clip=None), tmp_path / "free", progress=False)
    for i in range(3):  # the bound was reached, or this test shows nothing
        clipped = weights(together, i)
        assert max((weight - clipped[name]).abs().max().item() for name, weight in weights(free, i).items()) > 1e-6


FURTHER = (TASK.replace(inputs="gaussian", noise_std=0.3), FixedTasks(TASK, 24, seed=3))


@pytest.mark.parametrize("config", [
    small(model=EXACT, seeds=SEEDS, curriculum=Curriculum(dims=Ramp(1, 3, 1, 3), points=Ramp(2, 5, 1, 3))),
    small(model=EXACT, seeds=SEEDS, optimizer="soap"),
    reading(model=EXACT_READER, seeds=SEEDS, optimizer="soap"),
    small(model=EXACT, more_tasks=FURTHER, seeds=(0, 5), gradient_clip=0.05, n_snapshots=4),
    small(model=SOFTMAX, more_tasks=FURTHER, seeds=(0, 5), gradient_clip=0.05, n_snapshots=4),
], ids=["curriculum", "soap", "soap on tokens", "several tasks", "several tasks, softmax"])  # fmt: skip
def test_each_model_equals_the_run_alone(tmp_path, config):
    assert_each_member_equals_the_run_alone(config, tmp_path)


def test_a_seed_that_reaches_its_target_stops_where_it_would_have_alone(tmp_path):
    config = small(model=EXACT, seeds=SEEDS, steps=30, eval_every=2, n_snapshots=6)
    losses = train(config, tmp_path / "free", progress=False).record["curve"]["eval_loss"]
    target = torch.tensor(losses[1:], dtype=torch.float64).amin(0).sort().values[1].item()  # two of the three get there
    together = assert_each_member_equals_the_run_alone(config.replace(target_loss=target), tmp_path)
    stopped = together.record["stopped_at"]
    assert sorted(step >= 0 for step in stopped) == [False, True, True]
    assert len({step for step in stopped if step >= 0}) == 2
    assert together.record["steps_done"] == 30


# ---- faster steps: the same runs to rounding ----
SPEED_SOFTMAX = TransformerConfig(
    x_dim=3, n_context=6, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=16, d_mlp=16, attention="softmax",
    normalization_type="LN",
)  # fmt: skip
CONFIG = TrainingConfig(
    task=LinearRegression(x_dim=3, n_context=6), model=SPEED_SOFTMAX, steps=6, batch_size=8, eval_every=3,
    eval_prompts=16, save_every=3, cpu=True,
)  # fmt: skip


@pytest.mark.parametrize("keys", ["causal", "context", "full"])
@pytest.mark.parametrize("attn_bias", [True, False])
def test_fused_attention_is_attention(keys, attn_bias):
    model = HookedTransformer(
        SPEED_SOFTMAX.replace(keys=keys, attn_bias=attn_bias, initializer_range=0.3), seed=1
    ).double()
    prompts = LinearRegression(x_dim=3, n_context=6).sample(5, seed=0)
    expected = model(model.encode(prompts))
    model.zero_grad()
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    fuse_attention(model)
    model.zero_grad()
    fused = model(model.encode(prompts))
    fused.square().sum().backward()
    torch.testing.assert_close(fused, expected, atol=1e-10, rtol=1e-10)
    after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch.testing.assert_close(after, gradients, atol=1e-9, rtol=1e-9)


def test_a_fused_run_is_the_run(tmp_path):
    plain = train(CONFIG, tmp_path / "plain", progress=False)
    fused = train(CONFIG.replace(fused_attention=True), tmp_path / "fused", progress=False)
    for a, b in zip(plain.models[0].parameters(), fused.models[0].parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)
    assert not any(part.fused for part in fused.models[0].modules() if hasattr(part, "fused"))


def test_a_model_that_cannot_be_compiled_is_named(tmp_path, monkeypatch):
    class Failing(TorchDynamoException):
        pass

    def compile_nothing(module, **options):
        def fail(*inputs):
            raise Failing("no compiler\nhere\n\nand more")

        return fail

    monkeypatch.setattr(torch, "compile", compile_nothing)
    with pytest.raises(ValueError, match=r"compile=True: torch cannot compile this run here \(no compiler here\)"):
        train(CONFIG.replace(compile=True), tmp_path, progress=False)


# ---- threads ----
def test_small_steps_have_one_thread_and_large_ones_more(monkeypatch):
    monkeypatch.setattr("mechicl.base.threads.n_cores", lambda: 64)
    five_layers = TrainingConfig(model=TransformerConfig(x_dim=10, n_context=10, n_layers=5))
    configs = [PRESETS["lsa-1l"], small(model=LSTM), reading(), five_layers, PRESETS["gpt2-8l"], PRESETS["gpt2-12l"]]
    with using_threads(16):
        numbers = [threads_for(config, torch.device("cpu")) for config in configs]
        assert numbers == [1, 1, 1, 2, 8, 16]
        compiled = [threads_for(config.replace(compile=True), torch.device("cpu")) for config in configs]
        assert compiled == [1, 1, 1, 3, 14, 16]
        assert torch.get_num_threads() == 16


def test_a_resumed_run_takes_as_many_threads_as_it_began_with_and_gives_back_the_users(tmp_path, monkeypatch):
    config, seen = small(steps=10), []
    monkeypatch.setattr("mechicl.training.routes.threads_for", lambda config, device: 3)
    monkeypatch.setattr("mechicl.training.loop.n_cores", lambda: 4)
    with using_threads(2):
        interrupted(config, tmp_path, 5)
        assert torch.get_num_threads() == 2
        monkeypatch.setattr("mechicl.training.routes.threads_for", lambda config, device: 1)
        result = train(config, tmp_path, progress=False, on_save=lambda step: seen.append(torch.get_num_threads()))
        assert torch.get_num_threads() == 2
    assert set(seen) == {3}
    assert result.record["threads"] == 3
    assert result.record["hardware"].endswith("3 threads")
    monkeypatch.setattr("mechicl.training.loop.n_cores", lambda: 1)
    with pytest.warns(UserWarning, match=r"started with 3 threads, .* this machine has 1 cores"):
        assert train(config, tmp_path, progress=False).record["threads"] == 3
