"""The adapter: runs, recordings and resumed runs of our models and of others."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mechicl.models.opening.adapter import ModelAdapter
from tests.analysis.interventions.oracles import (
    bridge,
    hook_name,
    inputs,
    model_of,
    recorded,
    run,
)
from tests.families import open_family, token_ids


@pytest.mark.parametrize("batch_size", [2, 100])
def test_recording_in_batches(batch_size):
    model = model_of("gpt")
    prompts = inputs(model, 0, 5)
    adapter = ModelAdapter(model)
    tokens = adapter.encode(prompts)
    names = [hook_name("z", 0), hook_name("pattern", 1), hook_name("z", 0)]
    activations = adapter.record(tokens, names, batch_size)
    assert set(activations) == set(names)
    for name, activation in activations.items():
        assert_close(activation, recorded(model, prompts, name))
        assert not activation.requires_grad
    assert_close(adapter.predict(tokens, batch_size), run(model, prompts))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_blocks_before_the_layer_do_not_run_and_are_whole_again_afterwards(kind):
    model = bridge(kind)
    last = model.cfg.n_layers - 1
    tokens = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.run_with_hooks(tokens, fwd_hooks=[])
    adapter = ModelAdapter(model)
    stream = adapter.record(tokens, [f"blocks.{last}.hook_resid_pre"], 2)[f"blocks.{last}.hook_resid_pre"]
    ran: list[int] = []
    blocks = [block.mlp.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, block in enumerate(model.blocks)]
    with torch.no_grad():
        assert adapter.resumes_exactly(last, tokens, stream)
        ran.clear()
        resumed = adapter.resume(stream.clone(), last, [], last)
    assert ran == [last]
    assert_close(resumed, expected[:, -1])

    def fails(activation: torch.Tensor, hook: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        adapter.resume(stream.clone(), last, [(f"blocks.{last}.attn.hook_z", fails)], last)
    for handle in blocks:
        handle.remove()
    assert all("forward" not in vars(block) for block in model.blocks)
    with torch.no_grad():
        assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=[]), expected)


def test_blocks_that_cannot_be_skipped_are_run():
    model = bridge()
    adapter = ModelAdapter(model)
    forward = type(model.blocks[0]).forward

    def with_more(*args: Any, **kwargs: Any) -> Any:
        return forward(model.blocks[1], *args, **kwargs) + args[0].mean() * 0

    vars(model.blocks[1])["forward"] = with_more
    tokens = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(0))
    stream = adapter.record(tokens, ["blocks.2.hook_resid_pre"], 2)["blocks.2.hook_resid_pre"]
    assert adapter.resumes_exactly(2, tokens, stream)
    assert_close(adapter.resume(stream.clone(), 2, [], 2), adapter.run(tokens))
    assert vars(model.blocks[1])["forward"] is with_more


@pytest.mark.parametrize("family", ["BLOOM", "BERT"])
def test_a_bridge_that_resumes_otherwise_than_it_runs_is_not_resumed(family):
    model, _ = open_family(family)
    adapter, tokens = ModelAdapter(model), token_ids(0)
    assert adapter.resumes
    streams = adapter.record(tokens, adapter.stream_names().values(), 2)
    for layer, name in adapter.stream_names().items():
        assert not adapter.resumes_exactly(layer, tokens, streams[name])
        resumed = adapter.resume(streams[name].clone(), layer, [], layer)
        assert (resumed - adapter.run(tokens)).abs().max() > 0.5  # and rightly so


def test_a_bridge_that_resumes_right_only_where_blocks_are_skipped():
    model, _ = open_family("Mamba")
    adapter, tokens = ModelAdapter(model), token_ids(0)
    stream = adapter.record(tokens, ["blocks.2.hook_resid_pre"], 2)["blocks.2.hook_resid_pre"]
    with torch.no_grad():
        plain = model.run_with_hooks(stream, start_at_layer=2, fwd_hooks=[])[:, -1]
    assert (plain - adapter.run(tokens)).abs().max() > 0.5
    assert adapter.resumes_exactly(2, tokens, stream)
    assert_close(adapter.resume(stream.clone(), 2, [], 2), adapter.run(tokens))


def test_hooks_of_the_user_on_a_bridge_are_noticed():
    model = bridge()
    assert not ModelAdapter(model).has_user_hooks()
    model.add_hook("blocks.1.hook_mlp_out", lambda activation, hook: activation)
    assert ModelAdapter(model).has_user_hooks()
