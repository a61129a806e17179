"""Predictions of any number of prompts in bounded memory, and when they carry a graph."""

import pytest
import torch

from mechicl import wrap
from mechicl.models import HookedLSTM, HookedTransformer, LayeredModel, LSTMConfig, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=3, n_context=4)
GPT2 = TransformerConfig(
    x_dim=3, n_context=4, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=8, d_mlp=16, attention="softmax",
    normalization_type="LN", dtype="float64",
)  # fmt: skip


class Sum(torch.nn.Module):
    """Predicts the sum of the context's targets, times a weight and the query's first coordinate."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, tokens):
        return (self.weight * tokens[:, :-1, 3].sum(1) * tokens[:, -1, 0])[:, None]


def read(prompts: Prompts):
    return torch.cat([prompts.xs, prompts.ys.index_fill(1, torch.tensor([prompts.n_context]), 0.0)], dim=2)


MODELS = {
    "one pass": lambda: HookedTransformer(GPT2),
    "one pass a prefix": lambda: HookedTransformer(TransformerConfig(x_dim=3, n_context=4, dtype="float64")),
    "lstm": lambda: HookedLSTM(LSTMConfig(x_dim=3, n_context=4, n_layers=2, d_model=6, dtype="float64")),
    "wrapped": lambda: wrap(Sum().double(), encode=read),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> LayeredModel:
    torch.manual_seed(0)
    return MODELS[request.param]()


def prompts_of(n: int) -> Prompts:
    return TASK.sample(n, seed=0, dtype=torch.float64)


def test_predictions_come_in_parts_of_bounded_memory(model, monkeypatch):
    prompts = prompts_of(50)
    expected, expected_prefixes = model.predict(prompts), model.predict_prefixes(prompts)
    at_once, encode = [], model.encode
    monkeypatch.setattr(model, "encode", lambda part: at_once.append(len(part)) or encode(part))
    model.predict(prompts)
    assert at_once == [50]
    at_once.clear()
    monkeypatch.setattr("mechicl.models.layered.MEMORY", 16.5 * model.bytes_per_prompt(prompts))
    torch.testing.assert_close(model.predict(prompts), expected, rtol=1e-12, atol=1e-14)
    assert at_once == [16, 16, 16, 2]
    torch.testing.assert_close(model.predict_prefixes(prompts), expected_prefixes, rtol=1e-12, atol=1e-14)
    assert model.predict(prompts_of(0)).shape == (0, 1)
    monkeypatch.setattr("mechicl.models.layered.MEMORY", 1.0)  # less than one takes: one at a time
    torch.testing.assert_close(model.predict(prompts[:3]), expected[:3], rtol=1e-12, atol=1e-14)


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
    assert model(model.encode(prompts)).requires_grad  # what the network itself returns is for training


@pytest.mark.parametrize("name", ["one pass", "lstm"])
def test_hooks_see_all_prompts_at_once_and_may_ask_for_gradients(name, monkeypatch):
    model, prompts = MODELS[name](), prompts_of(20)
    monkeypatch.setattr("mechicl.models.layered.MEMORY", 1.0)
    seen, probe = [], torch.zeros((), dtype=torch.float64, requires_grad=True)

    def look(activation, hook):
        seen.append(len(activation))
        return activation + probe * torch.arange(activation.shape[-1])  # LN removes a shift of the whole stream

    assert not model.has_hooks()
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", look)]):
        assert model.has_hooks()
        predictions = model.predict(prompts)
    assert seen == [20]
    assert torch.autograd.grad(predictions.sum(), probe)[0].abs() > 1e-6
