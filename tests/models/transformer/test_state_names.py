"""State dicts under other names."""

import copy

import torch

from mechicl.models import HookedTransformer, TransformerConfig
from tests.strategies import random_model, random_tokens

IDS = TransformerConfig(d_vocab=7, n_ctx=6, n_layers=2, d_model=8, d_head=4, dtype="float64")
POINTS = TransformerConfig(
    x_dim=3, n_context=4, prompt_format="interleaved", d_model=8, attention="softmax", normalization_type="LN"
)


def renamed(model: HookedTransformer) -> dict[str, torch.Tensor]:
    """The names that both ends had when they were parameters of the model itself."""
    names: dict[str, str] = {"embed.W_E": "embed", "embed.b_E": "embed_bias", "pos_embed.W_pos": "pos_embed"}
    names |= {"unembed.W_U": "unembed", "unembed.b_U": "unembed_bias"}
    return {names.get(str(name), str(name)): weight.clone() for name, weight in model.state_dict().items()}


def test_earlier_names_load():
    for cfg in (IDS, POINTS):
        model = random_model(cfg)
        other = HookedTransformer(cfg, seed=5)
        other.load_state_dict(renamed(model))
        tokens = random_tokens(cfg)
        assert torch.equal(model(tokens), other(tokens))


def test_a_bias_on_the_embeddings_of_ids_is_in_each_of_them():
    model, bias = random_model(IDS), torch.randn(8, dtype=torch.float64)
    other = HookedTransformer(IDS)
    other.load_state_dict(renamed(model) | {"embed_bias": bias})
    tokens = random_tokens(IDS)
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for row in expected.embed.W_E:
            row += bias
    torch.testing.assert_close(other(tokens), expected(tokens))


def test_buffers_that_follow_from_the_config_are_left_out():
    model = random_model(IDS)
    state = model.state_dict()
    for layer in range(2):
        state[f"blocks.{layer}.attn.mask"] = torch.ones(6, 6, dtype=torch.bool).tril()
        state[f"blocks.{layer}.attn.IGNORE"] = torch.tensor(-torch.inf)
    other = HookedTransformer(IDS)
    other.load_state_dict(state, strict=True)
    assert torch.equal(other.W_Q, model.W_Q)
