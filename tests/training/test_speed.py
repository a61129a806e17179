"""Faster steps: the same runs to rounding."""

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch.testing import assert_close

from mechicl.base.threads import using_threads
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.transformer.fast import fuse_attention
from mechicl.tasks import LinearRegression
from mechicl.training import PRESETS, TrainingConfig, train
from mechicl.training.speed import threads_for
from tests.training.runs import LSTM, interrupted, reading, small

SOFTMAX = TransformerConfig(
    x_dim=3, n_context=6, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=16, d_mlp=16, attention="softmax",
    normalization_type="LN",
)  # fmt: skip
CONFIG = TrainingConfig(
    task=LinearRegression(x_dim=3, n_context=6), model=SOFTMAX, steps=6, batch_size=8, eval_every=3, eval_prompts=16,
    save_every=3, cpu=True,
)  # fmt: skip


@pytest.mark.parametrize("keys", ["causal", "context", "full"])
@pytest.mark.parametrize("attn_bias", [True, False])
def test_fused_attention_is_attention(keys, attn_bias):
    model = HookedTransformer(SOFTMAX.replace(keys=keys, attn_bias=attn_bias, initializer_range=0.3), seed=1).double()
    prompts = LinearRegression(x_dim=3, n_context=6).sample(5, seed=0)
    expected = model(model.encode(prompts))
    model.zero_grad()
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    fuse_attention(model)
    model.zero_grad()
    fused = model(model.encode(prompts))
    fused.square().sum().backward()
    assert_close(fused, expected, atol=1e-10, rtol=1e-10)
    after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert_close(after, gradients, atol=1e-9, rtol=1e-9)


def test_a_fused_run_is_the_run(tmp_path):
    plain = train(CONFIG, tmp_path / "plain", progress=False)
    fused = train(CONFIG.replace(fused_attention=True), tmp_path / "fused", progress=False)
    for a, b in zip(plain.models[0].parameters(), fused.models[0].parameters(), strict=True):
        assert_close(a, b, atol=2e-4, rtol=1e-3)
    assert not any(part.fused for part in fused.models[0].modules() if hasattr(part, "fused"))


def test_a_model_that_cannot_be_compiled_is_named(tmp_path, monkeypatch):
    class Failing(TorchDynamoException):
        pass

    def compile_nothing(module):
        def fail(*inputs):
            raise Failing("no compiler\nand more")

        return fail

    monkeypatch.setattr(torch, "compile", compile_nothing)
    with pytest.raises(ValueError, match=r"compile=True: torch cannot compile this model here \(no compiler\)"):
        train(CONFIG.replace(compile=True), tmp_path, progress=False)


def test_a_compiled_run_resumes(tmp_path, monkeypatch):
    """The passes are those of `torch.compile`, whose own work is not tested here."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda module: compiled.append(module) or module)
    plain = train(CONFIG, tmp_path / "plain", progress=False)
    assert not compiled
    config = CONFIG.replace(compile=True)

    interrupted(config, tmp_path / "compiled", 3)
    resumed = train(config, tmp_path / "compiled", progress=False)
    assert len(compiled) == 2
    assert resumed.record["steps_done"] == 6
    for a, b in zip(plain.models[0].parameters(), resumed.models[0].parameters(), strict=True):
        assert_close(a, b, atol=0, rtol=0)


# ---- threads ----


def test_small_steps_have_one_thread_and_large_ones_more(monkeypatch):
    monkeypatch.setattr("mechicl.base.threads.n_cores", lambda: 64)
    five_layers = TrainingConfig(model=TransformerConfig(x_dim=10, n_context=10, n_layers=5))
    configs = [PRESETS["lsa-1l"], small(model=LSTM), reading(), five_layers, PRESETS["gpt2-8l"], PRESETS["gpt2-12l"]]
    with using_threads(16):
        assert [threads_for(config, torch.device("cpu")) for config in configs] == [1, 1, 1, 2, 8, 16]
        assert torch.get_num_threads() == 16


def test_a_resumed_run_takes_as_many_threads_as_it_began_with_and_gives_back_the_users(tmp_path, monkeypatch):
    config, seen = small(steps=10), []
    monkeypatch.setattr("mechicl.training.loop.threads_for", lambda config, device: 3)
    monkeypatch.setattr("mechicl.training.loop.n_cores", lambda: 4)
    with using_threads(2):
        interrupted(config, tmp_path, 5)
        assert torch.get_num_threads() == 2
        monkeypatch.setattr("mechicl.training.loop.threads_for", lambda config, device: 1)
        result = train(config, tmp_path, progress=False, on_save=lambda step: seen.append(torch.get_num_threads()))
        assert torch.get_num_threads() == 2
    assert set(seen) == {3}
    assert result.record["threads"] == 3
    assert result.record["hardware"].endswith("3 threads")
    monkeypatch.setattr("mechicl.training.loop.n_cores", lambda: 1)
    with pytest.warns(UserWarning, match=r"started with 3 threads, .* this machine has 1 cores"):
        assert train(config, tmp_path, progress=False).record["threads"] == 3
