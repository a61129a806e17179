import json

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from mechicl.models import HookedLSTM, LSTMConfig, TransformerConfig, config_from_dict
from mechicl.prompts import Prompts
from tests.strategies import random_prompts

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


def test_patching_a_layers_output_changes_what_follows_and_nothing_before():
    model = random_lstm()
    tokens = model.encode(random_prompts(CFG, batch=4))
    patched = model(tokens, stop_at_layer=1).detach()
    patched[:, 4] += 1

    def patch(stream: Tensor, hook: object) -> None:
        stream[:, 4] += 1

    outputs = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_post", patch)])
    torch.testing.assert_close(outputs, model(patched, start_at_layer=1))
    torch.testing.assert_close(outputs[:, :4], model(tokens)[:, :4])
    assert not torch.allclose(outputs[:, 4:], model(tokens)[:, 4:])


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


def test_same_seed_same_weights_whatever_the_dtype_and_the_global_generator():
    state = torch.get_rng_state()
    a, b, other = HookedLSTM(CFG, seed=3), HookedLSTM(CFG.replace(dtype="float32"), seed=3), HookedLSTM(CFG, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    for name, weight in a.named_parameters():
        torch.testing.assert_close(weight.float(), dict(b.named_parameters())[name], atol=1e-7, rtol=0)
    assert not torch.equal(a.embed, other.embed)
    with torch.no_grad():
        for weight in other.parameters():
            weight.fill_(9.0)
    other.reset_parameters(3)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), other.parameters(), strict=True))


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
