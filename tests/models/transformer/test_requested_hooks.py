"""Hooks that are there on request: what each head, and the MLP, reads; and losses in place of outputs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.opening.edges import list_nodes
from mechicl.prompts import Prompts
from tests.strategies import random_model, random_prompts, random_tokens

IDS = TransformerConfig(d_vocab=7, n_ctx=6, n_layers=2, d_model=8, d_head=4, dtype="float64", act_fn="relu")
POINTS = TransformerConfig(x_dim=3, y_dim=2, n_context=4, prompt_format="interleaved", d_model=8, dtype="float64")
REQUESTS = {
    "use_attn_in": ("hook_attn_in",),
    "use_split_qkv_input": ("hook_q_input", "hook_k_input", "hook_v_input"),
    "use_hook_mlp_in": ("hook_mlp_in",),
}


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("normalization_type", ["LN", "RMSPre", None])
def test_copies_of_the_stream_are_read(request_name: str, normalization_type: Any):
    model = random_model(IDS.replace(normalization_type=normalization_type)).eval()
    tokens = random_tokens(model.cfg)
    plain, cache = model.run_with_cache(tokens)
    getattr(model, f"set_{request_name}")(True)
    outputs, copies = model.run_with_cache(tokens)
    torch.testing.assert_close(outputs, plain)
    for name in REQUESTS[request_name]:
        read = cache["resid_mid", 1] if name == "hook_mlp_in" else cache["resid_pre", 1][:, :, None].expand(2, 6, 2, 8)
        torch.testing.assert_close(copies[f"blocks.1.{name}"], read, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(tokens), plain)  # nobody looks: the quick route
    made = HookedTransformer(model.cfg)
    assert set(made.hook_dict) == set(model.hook_dict)
    getattr(model, f"set_{request_name}")(False)
    assert not any(name.endswith(REQUESTS[request_name]) for name in model.hook_dict)


def test_one_heads_queries_read_another_stream():
    model = random_model(IDS).eval()
    model.set_use_split_qkv_input(True)
    tokens, other = random_tokens(IDS), torch.randn(2, 6, 8, dtype=torch.float64)

    def replace(stream: Tensor, hook: Any) -> Tensor:
        stream[:, :, 1] = other
        return stream

    with model.hooks(fwd_hooks=[("blocks.0.hook_q_input", replace)]):
        _, cache = model.run_with_cache(tokens)
    _, plain = model.run_with_cache(tokens)
    block = model.blocks[0]
    expected = block.ln1(other) @ block.attn.W_Q[1] + block.attn.b_Q[1]
    torch.testing.assert_close(cache["q", 0][:, :, 1], expected)
    torch.testing.assert_close(cache["q", 0][:, :, 0], plain["q", 0][:, :, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(cache["k", 0], plain["k", 0], rtol=1e-12, atol=1e-12)


def test_an_mlp_that_is_not_there_has_no_neurons():
    model = random_model(IDS.replace(attn_only=True)).eval()
    tokens = random_tokens(model.cfg)
    plain, nodes = model(tokens), list_nodes(model)
    model.set_use_hook_mlp_in(True)
    outputs, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(outputs, plain)
    assert torch.equal(cache["blocks.1.hook_mlp_in"], cache["resid_pre", 1] + cache["attn_out", 1])
    assert not cache["blocks.1.hook_mlp_out"].any()
    assert list_nodes(model) == nodes
    read = torch.zeros_like(cache["blocks.0.hook_mlp_in"], requires_grad=True)
    moved = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_mlp_in", lambda stream, hook: stream + read)])
    assert not torch.autograd.grad(moved.sum(), read)[0].any()
    added = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_mlp_out", lambda out, hook: out + 1)])
    expected = model(cache["resid_post", 0] + 1, start_at_layer=1)
    torch.testing.assert_close(added, expected)
    model.set_use_hook_mlp_in(False)
    assert not any(name.endswith(("hook_mlp_in", "hook_mlp_out")) for name in model.hook_dict)


@pytest.mark.parametrize("request_name", ["use_split_qkv_input", "use_attn_in"])
def test_what_heads_read_has_the_names_of_both_versions(request_name: str):
    model: Any = random_model(IDS).eval()
    getattr(model, f"set_{request_name}")(True)
    tokens = random_tokens(IDS)
    _, cache = model.run_with_cache(tokens)
    for point in REQUESTS[request_name]:
        names = [f"blocks.1.{place}{point}" for place in ("", "attn.")]
        assert torch.equal(*(cache[name] for name in names))
        # the later one sees what the earlier one leaves, and both are read
        edits = [(name, lambda stream, hook, by=by: stream + by) for name, by in zip(names, (1.0, 2.0), strict=True)]
        both = model.run_with_hooks(tokens, fwd_hooks=edits)
        one = model.run_with_hooks(tokens, fwd_hooks=[(names[0], lambda stream, hook: stream + 3.0)])
        torch.testing.assert_close(both, one)


# ---- losses ----


def test_losses_of_token_ids():
    model, tokens = random_model(IDS).eval(), random_tokens(IDS)
    logits = model(tokens).detach()
    losses = [[-logits[i, t].log_softmax(0)[tokens[i, t + 1]].item() for t in range(5)] for i in range(2)]
    expected = torch.tensor(losses, dtype=torch.float64)
    assert torch.allclose(model(tokens, return_type="loss"), expected.mean())
    assert torch.allclose(model(tokens, "loss", loss_per_token=True), expected)
    both = model(tokens, return_type="both")
    assert torch.equal(both.logits, logits)
    assert torch.allclose(both.loss, expected.mean())
    assert model(tokens, return_type=None) is None
    assert torch.allclose(model(tokens[0], return_type="loss"), expected[0].mean())
    assert model(tokens[0]).shape == (1, 6, 7)


def test_losses_of_prompts():
    for cfg in (POINTS, POINTS.replace(prompt_format="paired", d_model=None)):
        model, prompts = random_model(cfg).eval(), random_prompts(cfg)
        if cfg.one_pass:
            predictions, targets = model.predict_prefixes(prompts), prompts.ys
        else:
            predictions, targets = model.predict(prompts)[:, None], prompts.query.ys[:, None]
        expected = (predictions - targets).square().sum(-1) / 2
        assert torch.allclose(model(prompts, return_type="loss"), expected.mean())
        assert torch.allclose(model(prompts, return_type="loss", loss_per_token=True), expected)
        assert torch.equal(model(prompts, return_type="both").logits, model(prompts))


@pytest.mark.usefixtures("unchecked_types")
def test_losses_that_do_not_exist():
    model, prompts = random_model(POINTS).eval(), random_prompts(POINTS)
    with pytest.raises(ValueError, match="ask for the loss of the Prompts"):
        model(model.encode(prompts), return_type="loss")
    with pytest.raises(ValueError, match=r"return_type='predictions' is not one of"):
        model(prompts, return_type="predictions")
    with pytest.raises(ValueError, match="needs at='positions'"):
        model(prompts, return_type="loss", at="query")
    with pytest.raises(ValueError, match="this model has no tokenizer: give one"):
        model("a text")
    assert isinstance(prompts, Prompts)
