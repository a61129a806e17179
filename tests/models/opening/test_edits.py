"""Edits that a model ignores are refused; those without effect are not."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformer_lens.model_bridge.sources import boot_native

from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edits import check_edits, without_user_hooks
from tests.analysis.interventions.oracles import bridge, hook_name, lstm, model_of
from tests.families import open_family, token_ids


def refuse(model: Any, component: str, layer: int = 1) -> None:
    check_edits(ModelAdapter(model), token_ids(0), [hook_name(component, layer)])


@pytest.mark.parametrize("component", ["attn_scores", "pattern"])
@pytest.mark.parametrize("family", ["GPT-J", "GPT-Neo", "XGLM"])
def test_what_a_bridge_only_shows_is_refused(family, component):
    model, _ = open_family(family)
    with pytest.raises(ValueError, match=rf"ignores edits at 'blocks.1.attn.hook_{component}'.*take 'z'"):
        refuse(model, component)
    refuse(model, "z")


def test_a_hook_that_does_not_fire_is_refused():
    model, _ = open_family("OPT")
    with pytest.raises(ValueError, match=r"'blocks.1.attn.hook_pattern' does not fire.*take 'z'"):
        refuse(model, "pattern")


@pytest.mark.parametrize("fields", [{"normalization_type": "LN"}, {"positional_embedding_type": "rotary"}])
def test_a_network_of_transformer_lens_itself(fields):
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_head": 4, "n_ctx": 16, "d_vocab": 20, "d_mlp": 12}
    model = boot_native({**sizes, "act_fn": "gelu", "seed": 0, **fields}).eval()
    for component in ("resid_mid", "q", "pattern", "z", "post"):
        refuse(model, component)
    with pytest.raises(ValueError, match=r"its scores are computed elsewhere; take 'z'"):
        refuse(model, "attn_scores")


def test_an_edit_without_effect_is_not_refused():
    model = bridge()
    with torch.no_grad():
        model.blocks[1].attn.W_O.zero_()
    tokens = token_ids(0)
    for component in ("z", "v", "pattern", "attn_scores", "q", "k"):
        refuse(model, component)
    check_edits(ModelAdapter(model), tokens[:, :1], [hook_name("pattern", layer) for layer in range(3)])  # one key


class Detached(torch.nn.Module):
    """A bridge's block that cuts the graph."""

    def __init__(self, forward: Any):
        super().__init__()
        self.cut = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.cut(*args, **kwargs)


@pytest.mark.parametrize("component", ["z", "pattern", "resid_mid"])
def test_without_a_graph_noise_tells(component):
    model = bridge()
    vars(model.blocks[1])["forward"] = Detached(model.blocks[1].forward)
    refuse(model, component)
    with torch.inference_mode():
        refuse(model, component)


def test_a_stream_that_only_the_mlp_reads_is_refused():
    model = bridge()
    refuse(model, "resid_mid")
    copied = model.blocks[1].ln2.register_forward_pre_hook(lambda module, args: (args[0].clone(), *args[1:]))
    with pytest.raises(ValueError, match=r"'blocks.1.hook_resid_mid' reaches only some of the readers"):
        refuse(model, "resid_mid")
    refuse(model, "resid_mid", 0)
    copied.remove()


def test_a_hook_that_fires_twice_is_refused():
    model = bridge()
    block = model.blocks[1]
    forward = block.forward
    vars(block)["forward"] = lambda *args, **kwargs: forward(forward(*args, **kwargs), **kwargs)
    with pytest.raises(ValueError, match=r"'blocks.1.attn.hook_z' fires 2 times in a run"):
        refuse(model, "z")


def test_hooks_of_the_user_do_not_count_and_stay():
    model, seen = bridge(), []

    def cut(activation: Tensor, hook: Any) -> Tensor:
        seen.append(hook.name)
        return torch.zeros_like(activation)

    model.add_hook("blocks.2.hook_resid_post", cut)  # no edit before it has an effect
    tokens = token_ids(0)
    before = model(tokens)
    seen.clear()
    refuse(model, "z")
    with without_user_hooks(model):
        assert not torch.equal(model(tokens), before)
    assert not seen
    assert torch.equal(model(tokens), before)
    assert seen
    model.reset_hooks()
    assert not torch.equal(model(tokens), before)


def test_ours_are_not_tried():
    for model in (model_of("gpt"), lstm()):
        adapter = ModelAdapter(model)
        check_edits(adapter, torch.zeros(1), [name for name in model.hook_dict if "resid_pre" in name])
