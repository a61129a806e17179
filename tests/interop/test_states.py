"""States of Mamba, Mamba-2 and gated delta nets, against loops over positions with the weights of `transformers`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from mechicl.analysis import ablate, attribute, patch
from mechicl.analysis.interventions import logit_difference
from mechicl.interop import open_states
from tests.families import open_family, token_ids

Edits = dict[int, Tensor]


def conv(layer: Any, x: Tensor) -> Tensor:
    """A causal convolution over the positions of `[batch pos channel]`, tap by tap."""
    width = layer.weight.shape[-1]
    out = torch.zeros_like(x) if layer.bias is None else layer.bias.expand_as(x).clone()
    for t in range(x.shape[1]):
        for tap in range(width):
            if t - width + 1 + tap >= 0:
                out[:, t] += layer.weight[:, 0, tap] * x[:, t - width + 1 + tap]
    return F.silu(out)


def mamba_by_loop(mixer: Any, stream: Tensor, edits: Edits) -> tuple[Tensor, Tensor]:
    x, gate = mixer.in_proj(stream).chunk(2, dim=-1)
    x = conv(mixer.conv1d, x)
    rank, size = mixer.time_step_rank, mixer.ssm_state_size
    step, write, read = mixer.x_proj(x).split([rank, size, size], dim=-1)
    step, decay = F.softplus(mixer.dt_proj(step)), -mixer.A_log.exp()
    state, states, outputs = x.new_zeros(len(x), x.shape[-1], size), [], []
    for t in range(x.shape[1]):
        state = (decay * step[:, t, :, None]).exp() * state + (step[:, t] * x[:, t])[..., None] * write[:, t, None]
        state = edits.get(t, state)
        states.append(state)
        outputs.append((state * read[:, t, None]).sum(-1) + mixer.D * x[:, t])
    return mixer.out_proj(torch.stack(outputs, 1) * F.silu(gate)), torch.stack(states, 2)


def mamba2_by_loop(mixer: Any, stream: Tensor, edits: Edits) -> tuple[Tensor, Tensor]:
    heads, width, size, groups = mixer.num_heads, mixer.head_dim, mixer.ssm_state_size, mixer.n_groups
    inner = heads * width
    gate, x, step = mixer.in_proj(stream).split([inner, inner + 2 * groups * size, heads], dim=-1)
    x, write, read = conv(mixer.conv1d, x).split([inner, groups * size, groups * size], dim=-1)
    step = F.softplus(step + mixer.dt_bias)
    states, outputs = [], x.new_zeros(*x.shape[:2], heads, width)
    state: Tensor = x.new_zeros(len(x), heads, width, size)
    for t in range(x.shape[1]):
        group = [head * groups // heads for head in range(heads)]
        k, q = (y[:, t].view(len(x), groups, size)[:, group] for y in (write, read))
        v = x[:, t].view(len(x), heads, width)
        written = step[:, t, :, None, None] * v[..., None] * k[:, :, None]
        state = (-step[:, t] * mixer.A_log.exp()).exp()[..., None, None] * state + written
        state = edits.get(t, state)
        states.append(state)
        outputs[:, t] = (state * q[:, :, None]).sum(-1) + mixer.D[:, None] * v
    return mixer.out_proj(mixer.norm(outputs.flatten(2), gate)), torch.stack(states, 2)


def delta_net_by_loop(mixer: Any, stream: Tensor, edits: Edits) -> tuple[Tensor, Tensor]:
    parts = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(stream), mixer.in_proj_ba(stream))
    q, k, v, gate, strength, decay = parts
    joined = torch.cat([part.flatten(2) for part in (q, k, v)], dim=-1)
    q, k, v = conv(mixer.conv1d, joined).split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    heads, repeats = mixer.num_v_heads, mixer.num_v_heads // mixer.num_k_heads
    q, k = (y.unflatten(-1, (mixer.num_k_heads, -1)).repeat_interleave(repeats, 2) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    v = v.unflatten(-1, (heads, -1))
    keep, strength = (-mixer.A_log.exp() * F.softplus(decay + mixer.dt_bias)).exp(), strength.sigmoid()
    state, states, outputs = v.new_zeros(len(v), heads, k.shape[-1], v.shape[-1]), [], []
    for t in range(v.shape[1]):
        state = keep[:, t, :, None, None] * state
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], strength[:, t, :, None] * error)
        state = edits.get(t, state)
        states.append(state)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / k.shape[-1] ** 0.5)
    z = torch.stack(outputs, 1)
    z = mixer.norm(z.flatten(0, 2), gate.reshape(-1, gate.shape[-1])).view(*stream.shape[:2], -1)
    return mixer.out_proj(z), torch.stack(states, 2)


LOOPS: dict[str, Callable[[Any, Tensor, Edits], tuple[Tensor, Tensor]]] = {
    "Mamba": mamba_by_loop, "Mamba-2": mamba2_by_loop, "Qwen3-Next": delta_net_by_loop,
}  # fmt: skip


def run_by_loop(plain: Any, name: str, tokens: Tensor, layer: int, edits: Edits) -> tuple[Tensor, Tensor]:
    """The logits of the last position and the states of a layer, whose mixer runs as a loop."""
    base = plain.backbone if hasattr(plain, "backbone") else plain.model
    block, seen = base.layers[layer], []
    mixer = block.mixer if hasattr(block, "mixer") else block.linear_attn

    def forward(hidden_states: Tensor, **_: Any) -> Tensor:
        out, states = LOOPS[name](mixer, hidden_states, edits)
        seen.append(states)
        return out

    mixer.forward = forward
    try:
        return plain(tokens, use_cache=False).logits[:, -1].double(), seen[0].double()
    finally:
        del mixer.forward


@pytest.mark.parametrize("name", LOOPS)
def test_patched_states_equal_a_plain_loop(name: str):
    bridge, plain = open_family(name)
    plain.requires_grad_(False)
    plain = plain.double()
    clean, corrupted = token_ids(0), token_ids(1)
    layers = open_states(bridge)
    assert layers == [0, 1, 2]
    assert open_states(bridge) == layers  # again changes nothing
    sweep = patch(bridge, clean, corrupted, "state", {"layer": layers, "pos": None, "head": [0, 2]}, progress=False)
    assert sweep.predictions is not None
    for layer in layers:
        (_, source), (plain_logits, own) = (
            run_by_loop(plain, name, tokens, layer, {}) for tokens in (clean, corrupted)
        )
        torch.testing.assert_close(
            plain(corrupted, use_cache=False).logits[:, -1].double(), plain_logits, atol=1e-5, rtol=1e-5
        )  # the loop's test
        for pos in range(clean.shape[1]):
            for i, head in enumerate((0, 2)):
                states = own[:, :, pos].clone()
                states[:, head] = source[:, head, pos]
                # the other heads keep their own states
                expected, _ = run_by_loop(plain, name, corrupted, layer, {pos: states})
                actual = sweep.predictions[layer, pos, i].double()
                torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LOOPS)
def test_set_states_stay_set_and_later_ones_follow(name: str):
    bridge, plain = open_family(name)
    plain.requires_grad_(False)
    plain, tokens = plain.double(), token_ids(2)
    open_states(bridge)
    _, own = run_by_loop(plain, name, tokens, 1, {})
    values = {1: own[:, :, 1] + 1, 3: own[:, :, 3] * -2}

    def put(states: Tensor, hook: Any) -> None:
        for pos, value in values.items():
            states[:, :, pos] = value.to(states)

    expected, _ = run_by_loop(plain, name, tokens, 1, values)
    with torch.no_grad():
        actual = bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_state", put)])[:, -1]
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    cached = bridge.run_with_cache(tokens)[1]["blocks.1.attn.hook_state"]
    torch.testing.assert_close(cached.double(), own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LOOPS)
def test_ablation_and_attribution_reach_the_states(name: str):
    bridge, plain = open_family(name)
    plain.requires_grad_(False)
    plain, clean, corrupted = plain.double(), token_ids(0), token_ids(1)
    open_states(bridge)
    sweep = ablate(bridge, clean, "state", {"layer": [0], "pos": [2]}, method="zero", progress=False)
    _, own = run_by_loop(plain, name, clean, 0, {})
    expected, _ = run_by_loop(plain, name, clean, 0, {2: torch.zeros_like(own[:, :, 2])})
    assert sweep.predictions is not None
    torch.testing.assert_close(sweep.predictions[0, 0].double(), expected, atol=1e-5, rtol=1e-5)
    metric = logit_difference(torch.tensor([3, 3]), torch.tensor([4, 4]))
    estimate = attribute(bridge, clean, corrupted, "state", {"layer": [0], "pos": None}, metrics=metric, progress=False)
    _, source = run_by_loop(plain, name, clean, 0, {})
    _, own = run_by_loop(plain, name, corrupted, 0, {})
    for pos in range(clean.shape[1]):
        share = torch.zeros((), dtype=torch.float64, requires_grad=True)
        moved = own[:, :, pos] + share * (source - own)[:, :, pos]
        logits, _ = run_by_loop(plain, name, corrupted, 0, {pos: moved})
        (slope,) = torch.autograd.grad((logits[:, 3] - logits[:, 4]).mean(), share)
        assert float(estimate.effect().mean(-1)[0, pos]) == pytest.approx(float(slope), rel=1e-4, abs=1e-5)


def test_what_has_no_states_is_refused():
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    config = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=20)
    gpt2 = build_bridge_from_module(GPT2LMHeadModel(config).eval(), "GPT2LMHeadModel", hf_config=config)
    with pytest.raises(ValueError, match="it keeps no state"):
        open_states(gpt2)
    with pytest.raises(TypeError, match="in a TransformerBridge, got Linear"):
        open_states(torch.nn.Linear(2, 2))
    bridge, _ = open_family("Mamba")
    with pytest.raises(ValueError, match=r"call mechicl.interop.open_states\(model\) first"):
        patch(bridge, token_ids(0), token_ids(1), "state", progress=False)
    open_states(bridge)
    keep = [("blocks.0.attn.hook_state", lambda states, hook: None)]
    with pytest.raises(ValueError, match="pass use_cache=False"):
        bridge.run_with_hooks(token_ids(0), fwd_hooks=keep, use_cache=True)
    wrong = [("blocks.0.attn.hook_state", lambda states, hook: states[:, :1])]
    with pytest.raises(ValueError, match="states must stay"):
        bridge.run_with_hooks(token_ids(0), fwd_hooks=wrong)
    assert bridge(token_ids(0)).isfinite().all()


def test_hybrids_have_states_only_where_they_keep_them():
    bridge, _ = open_family("Bamba")
    assert open_states(bridge) == [0, 2]
    assert "blocks.1.attn.hook_state" not in bridge.hook_dict
