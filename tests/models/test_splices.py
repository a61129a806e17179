"""What other libraries put into a model without torch's hooks counts on a plain run too."""

import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.tasks import LinearRegression

PROMPTS = LinearRegression(x_dim=2, n_context=5).sample(8, seed=0)
GPT2 = TransformerConfig(
    x_dim=2, n_context=5, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=8, d_mlp=16, attention="softmax",
    normalization_type="LN",
)  # fmt: skip
MODELS: dict[str, Any] = {
    "transformer": lambda: HookedTransformer(GPT2),
    "looped": lambda: HookedTransformer(GPT2.replace(recurrent=True)),
    "linear": lambda: HookedTransformer(TransformerConfig(x_dim=2, n_context=5, n_layers=2)),
    "lstm": lambda: HookedLSTM(LSTMConfig(x_dim=2, n_context=5, n_layers=2, d_model=6)).eval(),
}


class Half(nn.Module):
    """Half of what a part returns."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.part(*args, **kwargs) / 2


def expected_with_half(model: Any, hook_name: str) -> Tensor:
    """The outputs when an ordinary hook halves the activation."""
    return model.run_with_hooks(PROMPTS, fwd_hooks=[(hook_name, lambda activation, hook: activation / 2)])


def plain_and_cached(model: Any) -> tuple[Tensor, Tensor]:
    return model(PROMPTS), model.run_with_cache(PROMPTS)[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_module_in_the_place_of_a_hook(name):
    model = MODELS[name]()
    hook_name = "blocks.1.hook_resid_post"
    expected = expected_with_half(model, hook_name)
    model.blocks[1].hook_resid_post = Half(nn.Identity())
    assert model.has_hooks()
    for outputs in (*plain_and_cached(model), copy.deepcopy(model)(PROMPTS)):
        torch.testing.assert_close(outputs, expected)
    model.setup()  # looks at the parts anew, and must not take the new one for ours
    torch.testing.assert_close(model(PROMPTS), expected)
    torch.testing.assert_close(model.to(torch.float64)(PROMPTS).float(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["transformer", "looped", "linear"])
@pytest.mark.parametrize("part", ["attn", "mlp"])
def test_a_wrapped_part(name, part):
    model = MODELS[name]()
    if not hasattr(model.blocks[0], part):
        pytest.skip("no MLP")
    expected = expected_with_half(model, f"blocks.0.hook_{part}_out")
    setattr(model.blocks[0], part, Half(getattr(model.blocks[0], part)))
    for outputs in plain_and_cached(model):
        torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(model.to(torch.float64)(PROMPTS).float(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_wrapped_block(name):
    model = MODELS[name]()
    expected = expected_with_half(model, "blocks.0.hook_resid_post")
    model.blocks[0] = Half(model.blocks[0])
    for outputs in plain_and_cached(model):
        torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(model.to(torch.float64)(PROMPTS).float(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("path", ["blocks.0", "blocks.1.hook_resid_post", "hook_embed"])
def test_a_replaced_forward(name, path):
    model = MODELS[name]()
    part = model.get_submodule(path)
    hook_name = path if "hook" in path else f"{path}.hook_resid_post"
    plain, expected = model(PROMPTS), expected_with_half(model, hook_name)
    forward = part.forward
    part.forward = types.MethodType(lambda self, stream: forward(stream) / 2, part)
    for outputs in plain_and_cached(model):
        torch.testing.assert_close(outputs, expected)
    del part.forward
    assert torch.equal(model(PROMPTS), plain)
    assert not model.has_hooks()


def test_names_that_other_libraries_read():
    for make in MODELS.values():
        model = make()
        assert model.config is model.cfg
        assert model.device == torch.device("cpu")
