"""The adapter: runs, recordings and resumed runs of our models and of others."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mechicl.models.adapter import ModelAdapter
from tests.analysis.interventions.oracles import (
    bridge,
    hook_name,
    inputs,
    model_of,
    recorded,
    run,
)


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
    with pytest.raises(ValueError, match=r"no hook 'blocks.0.attn.hook_zz'; did you mean 'blocks.0.attn.hook_z'"):
        adapter.record(tokens, ["blocks.0.attn.hook_zz"], batch_size)


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
        adapter.resume(stream.clone(), last, [], last)  # tries, and compares, first
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
    stream = torch.randn(2, 6, 8)
    adapter.resume(stream, 2, [], 2)
    assert vars(model.blocks[1])["forward"] is with_more
