"""The LSTM by hand; memory, gradients, and parts replaced by other libraries, for all kinds of models."""

import copy
import json
import types
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from mechicl.base.settings import settings
from mechicl.models import (
    HookedLSTM,
    LayeredModel,
    LSTMConfig,
    ModelConfig,
    TransformerConfig,
    WrappedModel,
    build,
    config_from_dict,
)
from mechicl.models.architectures import build_unfilled, outline
from mechicl.prompts import Prompts
from tests.analysis.interventions.test_runs import peak
from tests.models.kinds import GPT2, KINDS, OURS, TASK
from tests.strategies import random_prompts

PROMPTS = TASK.sample(8, seed=0)


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> LayeredModel:
    return KINDS[request.param]().double()


def prompts_of(n: int) -> Prompts:
    return TASK.sample(n, seed=0, dtype=torch.float64)


# ---- memory and gradients ----
def test_predictions_come_in_parts_of_bounded_memory(model, monkeypatch):
    prompts = prompts_of(50)
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)
    expected, expected_prefixes = model.predict(prompts), model.predict_prefixes(prompts)
    at_once, encode = [], model.encode
    monkeypatch.setattr(model, "encode", lambda part: at_once.append(len(part)) or encode(part))
    model.predict(prompts)
    assert at_once == [50]
    at_once.clear()
    with settings(memory=16.5 * model.bytes_per_prompt(prompts)):
        close(model.predict(prompts), expected)
        assert at_once == [16, 16, 16, 2]
        close(model.predict_prefixes(prompts), expected_prefixes)
        assert model.predict(prompts_of(0)).shape == (0, 1)
    with settings(memory=1.0):  # too little for one: one at a time
        close(model.predict(prompts[:3]), expected[:3])


def test_batches_on_a_cpu_stay_small_but_not_tiny(model, monkeypatch):
    prompts = prompts_of(50)
    expected, at_once, encode = model.predict(prompts), [], model.encode
    monkeypatch.setattr(model, "encode", lambda part: at_once.append(len(part)) or encode(part))
    monkeypatch.setattr("mechicl.models.layered.FAST_BYTES", 20.5 * model.bytes_per_prompt(prompts))
    monkeypatch.setattr("mechicl.models.layered.FEWEST", 10)
    torch.testing.assert_close(model.predict(prompts), expected, rtol=1e-12, atol=1e-14)
    assert at_once == [20, 20, 10]
    at_once.clear()
    monkeypatch.setattr("mechicl.models.layered.FEWEST", 30)
    model.predict(prompts)
    assert at_once == [30, 20]


def test_a_graph_leads_to_prompts_that_require_gradients_and_to_nothing_else(model):
    prompts = prompts_of(5)
    assert any(weight.requires_grad for weight in model.parameters())
    assert not model.predict(prompts).requires_grad
    assert not model.predict_prefixes(prompts).requires_grad
    query = prompts.query.xs.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(model.predict(prompts.with_query(query)).sum(), query)
    assert slopes.abs().sum() > 0
    labels = prompts.ys.clone().requires_grad_()
    assert model.predict_prefixes(Prompts(prompts.xs, labels)).requires_grad
    with torch.no_grad():
        assert not model.predict(prompts.with_query(query)).requires_grad
    assert model(model.encode(prompts)).requires_grad  # the network's own outputs are for training


@pytest.mark.parametrize("name", ["transformer", "lstm"])
def test_hooks_see_all_prompts_at_once_and_may_require_gradients(name):
    model, prompts = KINDS[name]().double(), prompts_of(20)
    seen, probe = [], torch.zeros((), dtype=torch.float64, requires_grad=True)

    def look(activation, hook):
        seen.append(len(activation))
        return activation + probe * torch.arange(activation.shape[-1])  # LN removes a shift of the whole stream

    with settings(memory=1.0), model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", look)]):
        predictions = model.predict(prompts)
    assert seen == [20]
    assert torch.autograd.grad(predictions.sum(), probe)[0].abs() > 1e-6


SIZE: dict[str, Any] = {"x_dim": 5, "n_context": 20, "n_layers": 2}
GPT: dict[str, Any] = SIZE | {"prompt_format": "interleaved", "d_model": 64, "n_heads": 4, "attention": "softmax"}


@pytest.mark.parametrize("cfg", [
    TransformerConfig(**SIZE, n_heads=4, dtype="float64"),
    TransformerConfig(**SIZE, d_head=40),
    TransformerConfig(x_dim=5, n_context=100, n_layers=2),
    TransformerConfig(**SIZE, attention="softmax", d_head=6, n_heads=2, sink="learned", keys="causal"),
    TransformerConfig(**SIZE, attention="relu", keys="causal", normalize_by_context=True),
    TransformerConfig(**GPT, d_mlp=256, normalization_type="LN", act_fn="gelu_new"),
    TransformerConfig(**GPT, momentum=0.5),
    LSTMConfig(**SIZE, d_model=96),
])  # fmt: skip
def test_bytes_per_prompt_is_an_upper_estimate_of_the_measured_peak(cfg: ModelConfig):
    model, n = build(cfg), 16
    prompts = random_prompts(cfg, batch=n)
    with torch.no_grad():
        quick = max(peak(lambda: model.predict(prompts))[0], peak(lambda: model.predict_prefixes(prompts))[0]) / n
        with model.hooks(fwd_hooks=[("hook_embed", lambda x, hook: None)]):
            hooked = peak(lambda: model(prompts))[0] / n
    assert quick <= model.bytes_per_prompt(prompts)
    assert hooked <= model.bytes_per_prompt(prompts) <= 3 * hooked  # far larger ones would slow analyses down


# ---- parts that other libraries have replaced, without torch's hooks, count in plain runs ----
class Half(nn.Module):
    """Half of a part's result."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.part(*args, **kwargs) / 2


def assert_halved(model: Any, expected: Tensor) -> None:
    for outputs in (model(PROMPTS), model.run_with_cache(PROMPTS)[0], copy.deepcopy(model)(PROMPTS)):
        torch.testing.assert_close(outputs, expected)
    if not isinstance(model, WrappedModel):
        model.setup()  # it indexes the parts anew, and must not take the new one for ours
    torch.testing.assert_close(model(PROMPTS), expected)
    torch.testing.assert_close(model.to(torch.float64)(PROMPTS).float(), expected, atol=1e-5, rtol=1e-4)


SPLICED = [  # a part, and the hook at its output
    ("wrapped", "blocks.1.hook_resid_post", "blocks.1.hook_resid_post"),
    *((name, path, hook) for name in OURS for path, hook in [
        ("blocks.1.hook_resid_post", "blocks.1.hook_resid_post"), ("blocks.0", "blocks.0.hook_resid_post")]),
    *((name, "blocks.0.attn", "blocks.0.hook_attn_out") for name in ("transformer", "looped", "linear")),
    *((name, "blocks.0.mlp", "blocks.0.hook_mlp_out") for name in ("transformer", "looped")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "path", "hook"), SPLICED)
def test_a_replaced_part(name, path, hook):
    model = KINDS[name]()
    expected = model.run_with_hooks(PROMPTS, fwd_hooks=[(hook, lambda activation, hook: activation / 2)])
    parent, _, child = path.rpartition(".")
    setattr(model.get_submodule(parent), child, Half(model.get_submodule(path)))
    assert_halved(model, expected)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("path", ["blocks.0", "blocks.1.hook_resid_post", "hook_embed"])
def test_a_replaced_forward(name, path):
    model = OURS[name]()
    part, plain = model.get_submodule(path), model(PROMPTS)
    hook = path if "hook" in path else f"{path}.hook_resid_post"
    expected = model.run_with_hooks(PROMPTS, fwd_hooks=[(hook, lambda activation, hook: activation / 2)])
    forward = part.forward
    part.forward = types.MethodType(lambda self, stream: forward(stream) / 2, part)
    for outputs in (model(PROMPTS), model.run_with_cache(PROMPTS)[0]):
        torch.testing.assert_close(outputs, expected)
    del part.forward
    assert torch.equal(model(PROMPTS), plain)


def test_build_unfilled_and_outline_make_the_same_parts_as_build():
    for cfg in (GPT2.replace(recurrent=True), KINDS["lstm"]().cfg):
        made, empty, meta = build(cfg), build_unfilled(cfg), outline(cfg)
        empty.load_state_dict(made.state_dict())
        assert torch.equal(empty(PROMPTS), made(PROMPTS))
        assert empty.cfg == made.cfg
        assert {n: w.shape for n, w in meta.state_dict().items()} == {n: w.shape for n, w in made.state_dict().items()}
        assert next(meta.parameters()).is_meta


CFG = LSTMConfig(x_dim=3, y_dim=2, n_context=5, n_layers=3, d_model=7, dtype="float64")


def random_lstm(cfg: LSTMConfig = CFG, seed: int = 0) -> HookedLSTM:
    """A model none of whose weights is at its initial value."""
    model, generator = HookedLSTM(cfg), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.5 * torch.randn(weight.shape, dtype=torch.float64, generator=generator))
    return model


def lstm_by_hand(model: HookedLSTM, tokens: Tensor) -> tuple[np.ndarray, list[np.ndarray]]:
    """Outputs `[prompt pos y]` and the stream before and after each layer, from the equations."""
    w = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    streams = [tokens.numpy() @ w["embed"]]
    for layer in range(model.cfg.n_layers):
        W_ih, W_hh, b_ih, b_hh = (w[f"blocks.{layer}.{name}"] for name in ("W_ih", "W_hh", "b_ih", "b_hh"))
        hidden = np.zeros_like(streams[-1])
        for i, prompt in enumerate(streams[-1]):
            h, c = np.zeros((2, model.cfg.d_model))
            for t, x in enumerate(prompt):
                enter, forget, fresh, leave = np.split(W_ih @ x + b_ih + W_hh @ h + b_hh, 4)
                c = c / (1 + np.exp(-forget)) + np.tanh(fresh) / (1 + np.exp(-enter))
                h = hidden[i, t] = np.tanh(c) / (1 + np.exp(-leave))
        streams.append(hidden)
    return streams[-1] @ w["unembed"] + w["unembed_bias"], streams


def test_equals_the_equations_at_every_layer():
    model, prompts = random_lstm(), random_prompts(CFG, batch=4)
    tokens = model.encode(prompts)
    outputs, streams = lstm_by_hand(model, tokens)
    actual, cache = model.run_with_cache(prompts)
    expected = {"hook_embed": streams[0]}
    for layer in range(3):
        expected |= {f"blocks.{layer}.hook_resid_pre": streams[layer]}
        expected |= {f"blocks.{layer}.hook_resid_post": streams[layer + 1]}
    assert set(cache) == set(expected)
    for name, stream in expected.items():
        np.testing.assert_allclose(cache[name].numpy(), stream, atol=1e-12)
    for each in (actual, model(tokens)):
        np.testing.assert_allclose(each.detach().numpy(), outputs, atol=1e-12)


def test_predictions_are_those_of_each_prefix_and_never_see_their_target():
    model, prompts = random_lstm(), random_prompts(CFG)
    together = model.predict_prefixes(prompts)
    alone = torch.stack([model.predict(prompts.prefix(t)) for t in range(6)], dim=1)
    torch.testing.assert_close(together, alone, atol=1e-12, rtol=0)
    torch.testing.assert_close(model.decode(model(prompts)), together, atol=1e-12, rtol=0)
    ys = prompts.ys.clone()
    ys[:, -1] = 1e6
    assert torch.equal(model.predict(Prompts(prompts.xs, ys)), model.predict(prompts))


@pytest.mark.parametrize("layer", [0, 1, 2, 3, -1, -3])
def test_start_and_stop_at_layer(layer: int):
    model = random_lstm()
    tokens = model.encode(random_prompts(CFG, batch=4))
    stream = model(tokens, stop_at_layer=layer)
    kept = stream.clone()
    torch.testing.assert_close(model(stream, start_at_layer=layer), model(tokens))
    assert torch.equal(stream, kept)


def test_sensitivities_and_second_derivatives():
    model = random_lstm(CFG.replace(n_layers=2, y_dim=1))
    prompts = random_prompts(model.cfg, batch=2)

    def loss(xs: Tensor, *weights: Tensor) -> Tensor:
        named = dict(zip(dict(model.named_parameters()), weights, strict=True))
        tokens = model.encode(prompts.with_query(xs))
        return functional_call(model, named, (tokens,), {"at": "query"}).square().sum()

    inputs = [prompts.query.xs, *(weight.detach() for weight in model.parameters())]
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, inputs, fast_mode=True)
    assert all(weight.grad is None for weight in model.parameters())


def test_initial_weights_are_bounded_by_their_fan_in_and_forget_gates_start_open():
    model = HookedLSTM(LSTMConfig(x_dim=4, n_context=5, n_layers=2, d_model=64))
    bounds = {"embed": 0.5, "unembed": 0.125, "W_ih": 0.125, "W_hh": 0.125}
    for name, weight in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in bounds:
            assert 0.9 * bounds[leaf] < weight.abs().max().item() <= bounds[leaf]
            assert abs(weight.mean().item()) < 0.2 * bounds[leaf]
        elif leaf == "b_ih":
            assert weight.tolist() == [0.0] * 64 + [1.0] * 64 + [0.0] * 128
        else:
            assert weight.abs().max() == 0


def test_a_config_survives_json_and_says_what_it_is_of():
    data = json.loads(json.dumps(CFG.to_dict()))
    assert data["architecture"] == "lstm"
    assert "device" not in data
    assert config_from_dict(data) == CFG
    transformer = TransformerConfig(x_dim=3, n_context=4)
    assert "architecture" not in transformer.to_dict()
    assert config_from_dict(transformer.to_dict()) == transformer


@pytest.mark.parametrize("name", OURS)
def test_same_seed_same_weights_whatever_the_dtype_and_the_global_generator(name):
    cfg, state = OURS[name]().cfg, torch.get_rng_state()
    one, same, other = (dict(build(cfg, seed=seed).named_parameters()) for seed in (1, 1, 2))
    wide, again = dict(build(cfg.replace(dtype="float64"), seed=1).named_parameters()), build(cfg, seed=2)
    again.reset_parameters(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert any(not torch.equal(one[key], other[key]) for key in one)
    for key, weight in again.named_parameters():
        assert torch.equal(weight, one[key])
        assert torch.equal(weight, same[key])
        torch.testing.assert_close(wide[key].float(), weight, atol=1e-7, rtol=0)
