"""Recurrent models of transformers, opened by `wrap`: Mamba, Mamba-2 and RWKV."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Mamba2Config, Mamba2Model, MambaConfig, MambaModel, RwkvConfig, RwkvModel

import mechicl
from mechicl import analysis
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=3, n_context=6)
WIDTH, D_TOKEN = 16, 4
SIZES: dict[str, Any] = {"vocab_size": 8, "hidden_size": WIDTH, "num_hidden_layers": 2}
MIXER: dict[str, Any] = {
    "layers": "backbone.layers.{}", "mlp": "backbone.layers.{}.mixer", "unembed": ["backbone.norm_f", "head"],
}  # fmt: skip
PARTS: dict[str, dict[str, Any]] = {
    "mamba": MIXER,
    "mamba2": MIXER,
    "rwkv": {
        "layers": "backbone.blocks.{}", "attention": "backbone.blocks.{}.attention",
        "resid_mid": "backbone.blocks.{}.ln2", "mlp": "backbone.blocks.{}.feed_forward",
        "unembed": ["backbone.ln_out", "head"],
    },
}  # fmt: skip


class OnPrompts(nn.Module):
    """Reads paired prompts."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.read_in, self.head = nn.Linear(D_TOKEN, WIDTH), nn.Linear(WIDTH, 1)
        self.backbone = {
            "mamba": lambda: MambaModel(MambaConfig(state_size=4, **SIZES)),
            "mamba2": lambda: Mamba2Model(Mamba2Config(state_size=4, num_heads=4, head_dim=8, n_groups=1, **SIZES)),
            "rwkv": lambda: RwkvModel(RwkvConfig(attention_hidden_size=WIDTH, context_length=32, **SIZES)),
        }[kind]()

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.read_in(tokens)
        return self.head(self.backbone(inputs_embeds=stream, use_cache=False).last_hidden_state)


@pytest.fixture(scope="module", params=PARTS)
def opened(request):
    torch.manual_seed(0)
    net = OnPrompts(request.param).eval()
    return net, mechicl.wrap(net, encode="paired", **PARTS[request.param])


def test_the_wrapped_model_predicts_as_the_module_and_its_layers_can_be_patched(opened):
    net, model = opened
    prompts = TASK.sample(8, seed=0)
    torch.testing.assert_close(model.predict(prompts), net(model.encode(prompts))[:, -1])
    corrupted = analysis.corrupt(prompts, "labels")
    recovered = analysis.patch(model, prompts, corrupted, "resid_post", ("layer", "pos"), progress=False).recovered()
    assert recovered.shape == (2, 7)
    assert recovered[1, -1] == pytest.approx(1.0, abs=1e-4)  # the last stream determines the prediction
    torch.testing.assert_close(recovered[1, :-1], torch.zeros(6).to(recovered), atol=1e-4, rtol=0)


def test_what_a_part_adds_is_the_change_of_the_stream(opened):
    net, model = opened
    prompts = TASK.sample(8, seed=0)
    with torch.no_grad():
        _, cache = model.run_with_cache(prompts)
    added = cache["blocks.1.hook_mlp_out"] + (cache["blocks.1.hook_attn_out"] if net.kind == "rwkv" else 0)
    torch.testing.assert_close(
        cache["blocks.1.hook_resid_post"], cache["blocks.1.hook_resid_pre"] + added, atol=1e-5, rtol=1e-5
    )
    effect = analysis.ablate(model, prompts, "mlp_out", progress=False).effect()
    assert effect[:, -1].abs().amax(-1).min() > 0  # at the query
