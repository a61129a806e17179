"""Layers with a state: both routes against a plain loop, hooks that read and change states, and other libraries."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mechicl import constructions
from mechicl.analysis import ablate, attribute, patch
from mechicl.analysis.heads import read_dual_form
from mechicl.analysis.weights import read_weight_products
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.transformer.recurrent import Recurrence, softplus_inverse
from mechicl.models.transformer.weight_processing import process_weights
from mechicl.tasks import LinearRegression
from tests.models.transformer.recurrent_loop import layer_by_loop
from tests.strategies import random_model, random_tokens

KINDS = [
    ("delta", "none"), ("delta", "head"), ("delta", "key"), ("gated_linear", "none"), ("gated_linear", "head"),
    ("gated_linear", "key"), ("mamba2", "none"), ("mesa", "none"), ("mesa", "head"),
]  # fmt: skip
SIZES: dict[str, Any] = {"x_dim": 3, "n_context": 5, "n_heads": 2, "d_model": 8, "d_head": 4, "dtype": "float64"}
INTERLEAVED: dict[str, Any] = SIZES | {"prompt_format": "interleaved", "n_layers": 2, "normalization_type": "LN"}
TASK_SIZES: dict[str, Any] = {"x_dim": 3, "n_context": 5}
TASK = LinearRegression(**TASK_SIZES)


def watched(model: HookedTransformer, tokens: Tensor, name: str = "hook_state") -> Tensor:
    with model.hooks([(lambda each: each.endswith(name), lambda activation, hook: None)]):
        return model(tokens)


@pytest.mark.parametrize("conv_width", [0, 3])
@pytest.mark.parametrize("keys", ["causal", "context"])
@pytest.mark.parametrize(("attention", "gate"), KINDS)
def test_layers_equal_a_plain_loop(attention: str, gate: Any, keys: Any, conv_width: int):
    cfg = TransformerConfig(
        **SIZES, read_in="linear", read_out="linear", attention=attention, gate=gate, keys=keys, attn_bias=True,
        conv_width=conv_width, score_scale=0.7, damping=0.8, use_attn_state=True,
    )  # fmt: skip
    model, tokens = random_model(cfg), random_tokens(cfg, 2)
    _, cache = model.run_with_cache(tokens)
    expected, states = layer_by_loop(model.blocks[0].attn, cache["hook_embed"])
    torch.testing.assert_close(cache["blocks.0.hook_attn_out"], expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(cache["blocks.0.attn.hook_state"], states, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model(tokens), watched(model, tokens), rtol=1e-10, atol=1e-12)


def largest(values: Tensor) -> float:
    return values.detach().abs().max().item() if values.numel() else 0.0


def gradients(model: HookedTransformer, tokens: Tensor, outputs: Tensor) -> list[Tensor]:
    mixture = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).reshape(outputs.shape)
    return list(torch.autograd.grad((outputs * mixture).sum(), [*model.parameters(), tokens]))


@settings(max_examples=8)
@given(
    kind=st.sampled_from(KINDS), keys=st.sampled_from(["causal", "context"]), n_context=st.integers(0, 40),
    prompt_format=st.sampled_from(["paired", "interleaved"]), heads=st.integers(1, 3), width=st.integers(1, 5),
    normalize=st.booleans(), conv_width=st.sampled_from([0, 1, 4]), batch=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 100),
)  # fmt: skip
def test_routes_agree(kind: Any, keys: Any, n_context: int, prompt_format: Any, heads: int, width: int, normalize: bool,
                      conv_width: int, batch: int, seed: int):  # fmt: skip
    cfg = TransformerConfig(
        x_dim=2, n_context=n_context, n_layers=2, n_heads=heads, d_model=6, d_head=width, attention=kind[0],
        gate=kind[1], keys=keys, prompt_format=prompt_format, read_in="linear", read_out="linear",
        normalization_type="LN", normalize_keys=normalize, conv_width=conv_width,
        use_attn_state=True, dtype="float64",
    )  # fmt: skip
    model, tokens = random_model(cfg, seed), random_tokens(cfg, batch, seed).requires_grad_()
    quick, by_states, hooked = model(tokens), watched(model, tokens), watched(model, tokens, "hook_embed")
    size = 1 + largest(quick)
    for other in (by_states, hooked):
        torch.testing.assert_close(quick, other, rtol=0, atol=1e-10 * size)
        for a, b in zip(gradients(model, tokens, quick), gradients(model, tokens, other), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9 * size * (1 + largest(a)))
        quick = model(tokens)
    single, single_tokens = copy.deepcopy(model).float(), tokens.detach().float()
    last = single(single_tokens, at="query")
    noise = largest(watched(single, single_tokens)[:, -1:] - quick[:, -1:])
    assert largest(last - quick[:, -1:]) <= 1e-5 * size + 10 * noise


@pytest.mark.parametrize(("attention", "gate"), KINDS)
def test_changed_states_continue_the_recurrence(attention: str, gate: Any):
    cfg = TransformerConfig(**SIZES, read_in="linear", attention=attention, gate=gate, keys="causal",
                            use_attn_state=True, read_out="linear")  # fmt: skip
    model, tokens = random_model(cfg), random_tokens(cfg, 3)
    attn = model.blocks[0].attn
    other = layer_by_loop(attn, model.embed_tokens(random_tokens(cfg, 3, 7)))[1]

    def set_two(states: Tensor, hook: Any) -> Tensor:
        states[:, :, 1], states[:, :, 3] = other[:, :, 1], other[:, :, 3]  # in place
        return states

    with model.hooks([("blocks.0.attn.hook_state", set_two)]):
        _, cache = model.run_with_cache(tokens)
    expected, _ = layer_by_loop(attn, cache["hook_embed"], {1: other[:, :, 1], 3: other[:, :, 3]})
    torch.testing.assert_close(cache["blocks.0.hook_attn_out"], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("attention", ["delta", "gated_linear", "mamba2", "mesa"])
def test_patching_states_equals_a_plain_loop(attention: str):
    cfg = TransformerConfig(**SIZES, read_in="linear", attention=attention, use_attn_state=True, read_out="linear")
    model = random_model(cfg)
    clean, corrupted = (TASK.sample(4, seed=seed, dtype=torch.float64) for seed in (0, 1))
    sweep = patch(model, clean, corrupted, component="state", axes=("layer", "pos", "head"), progress=False)
    assert sweep.predictions is not None
    streams = [model.embed_tokens(model.encode(prompts)) for prompts in (clean, corrupted)]
    attn = model.blocks[0].attn
    (_, source), (_, own) = (layer_by_loop(attn, stream) for stream in streams)
    for pos in range(6):
        for head in range(2):
            states = own[:, :, pos].clone()
            # the other head's state stays its own
            states[:, head] = source[:, head, pos]
            out, _ = layer_by_loop(attn, streams[1], {pos: states})
            expected = model.read_out((streams[1] + out)[:, -1:])[:, 0]
            torch.testing.assert_close(sweep.predictions[0, pos, head], expected, rtol=1e-8, atol=1e-9)


def test_attribution_of_states_is_the_derivative_of_patching():
    cfg = TransformerConfig(**INTERLEAVED, attention="delta", use_attn_state=True)
    model = random_model(cfg)
    clean, corrupted = (TASK.sample(3, seed=seed, dtype=torch.float64) for seed in (0, 1))
    estimate = attribute(model, clean, corrupted, "state", ("layer", "pos"), progress=False).effect()
    name, scale = "blocks.0.attn.hook_state", 1e-6
    source = model.run_with_cache(clean)[1][name]

    def loss(share: float, pos: int) -> Tensor:
        def towards(states: Tensor, hook: Any) -> Tensor:
            states[:, :, pos] += share * (source - states)[:, :, pos]
            return states

        with model.hooks([(name, towards)]):
            return (model.predict(corrupted) - clean.query.ys).square().mean(-1)

    for pos in (0, 4, 9):
        slope = (loss(scale, pos) - loss(-scale, pos)) / (2 * scale)
        torch.testing.assert_close(estimate[0, pos], slope, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("attention", ["delta", "gated_linear", "mamba2", "mesa"])
def test_gates_and_steps_can_be_ablated(attention: str):
    model = random_model(TransformerConfig(**INTERLEAVED, attention=attention))
    prompts = TASK.sample(4, seed=0, dtype=torch.float64)
    for component in ("gate", "step", "z"):
        sweep = ablate(model, prompts, component, ("layer", "head"), method="zero", progress=False)
        assert sweep.effect().isfinite().all()


@pytest.mark.parametrize("attention", ["delta", "gated_linear", "mamba2", "mesa"])
def test_norms_are_folded_into_gates_and_steps_too(attention: str):
    model = random_model(TransformerConfig(**INTERLEAVED, attention=attention, conv_width=2))
    processed = process_weights(model)
    assert processed.cfg.normalization_type == "LNPre"
    tokens = random_tokens(model.cfg, 3)
    torch.testing.assert_close(processed(tokens), model(tokens), rtol=1e-9, atol=1e-10)


def test_errors():
    model = random_model(TransformerConfig(**SIZES, attention="delta"))
    prompts = TASK.sample(2, seed=0, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"call model.set_use_attn_state\(True\)"):
        patch(model, prompts, prompts, "state", progress=False)
    model.set_use_attn_state(True)
    model.predict(prompts)
    model = constructions.online_gradient_descent(**TASK_SIZES, step_size=0.3)
    for refuses in (constructions.weights_circuit, read_weight_products, lambda each: read_dual_form(each, prompts)):
        with pytest.raises(ValueError, match="this needs attention, and the model has attention='delta'"):
            refuses(model)
    assert softplus_inverse(1.0) == pytest.approx(0.541324854612918)


@pytest.mark.parametrize(("hook", "changed", "match"), [
    ("hook_state", lambda states: states[..., :2], r"a state must stay \[2, 2, 6, 4, 4\] .*got \[2, 2, 6, 4, 2\]"),
    ("hook_state", lambda states: states[:, :, :3], r"a state must stay \[2, 2, 6, 4, 4\]"),
    ("hook_gate", lambda gate: 1.5 * gate, r"gates must be in \[0, 1\], and a hook .*1.5 to 1.5"),
    ("hook_gate", lambda gate: gate - 2, r"gates must be in \[0, 1\], and a hook .*-1 to -1"),
    ("hook_gate", lambda gate: gate * torch.nan, r"gates must be in \[0, 1\], and a hook .*nan"),
])  # fmt: skip
@pytest.mark.parametrize("attention", ["delta", "gated_linear"])
def test_hooks_that_return_impossible_values_are_named(attention: str, hook: str, changed: Any, match: str):
    model = random_model(TransformerConfig(**SIZES, attention=attention, gate="none", use_attn_state=True))
    prompts = TASK.sample(2, seed=0, dtype=torch.float64)
    with (
        pytest.raises(ValueError, match=match),
        model.hooks([(f"blocks.0.attn.{hook}", lambda activation, hook: changed(activation))]),
    ):
        model.predict(prompts)


@pytest.mark.parametrize("attention", ["delta", "gated_linear", "mamba2", "mesa"])
def test_without_a_context_the_state_is_empty(attention: str):
    sizes: dict[str, Any] = SIZES | {"n_context": 0}
    model = random_model(TransformerConfig(**sizes, attention=attention, use_attn_state=True))
    prompts = LinearRegression(x_dim=3, n_context=0).sample(2, seed=0, dtype=torch.float64)
    _, cache = model.run_with_cache(prompts)
    assert cache["blocks.0.attn.hook_state"].count_nonzero() == 0
    assert model.predict(prompts).isfinite().all()


# ---- other libraries ----
def random_inputs(n_pos: int = 20, keys: int = 4, values: int = 4) -> tuple[Tensor, ...]:
    """Queries, keys and values `[batch head pos d]`, gates and steps `[batch head pos 1]`, float32."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n_pos, d, generator=generator) for d in (keys, keys, values))
    gate, step = (torch.rand(2, 3, n_pos, 1, generator=generator) * 0.6 + 0.3 for _ in range(2))
    return q, k / k.norm(dim=-1, keepdim=True), v, gate, step


def mixer(attention: str, heads: int = 3, **fields: Any) -> Recurrence:
    cfg = TransformerConfig(x_dim=3, n_context=5, n_heads=heads, d_head=4, attention=attention, **fields)
    return HookedTransformer(cfg).blocks[0].attn


def test_layers_equal_flash_linear_attention():
    naive = {
        name: pytest.importorskip(f"fla.ops.{name}.naive") for name in ("gated_delta_rule", "simple_gla", "mesa_net")
    }
    compare_with_flash_linear_attention(naive)


def compare_with_flash_linear_attention(naive: dict[str, Any]) -> None:
    q, k, v, gate, step = random_inputs()
    theirs = [each.transpose(1, 2) for each in (q, k, v)]
    log, beta = gate[..., 0].log().transpose(1, 2), step[..., 0].transpose(1, 2)
    ridge = torch.full((3, 4), 0.7)
    attn = mixer("mesa")
    with torch.no_grad():
        attn.ridge.fill_(softplus_inverse(0.7))
    pairs = [
        (naive["gated_delta_rule"].naive_recurrent_gated_delta_rule(*theirs, beta, log, scale=1.0)[0],
         mixer("delta"), step),
        (2 * naive["simple_gla"].naive_recurrent_simple_gla(*theirs, log)[0],  # their scale is 1 / sqrt(4)
         mixer("gated_linear"), torch.ones_like(step)),
        (naive["mesa_net"].naive_mesa_net_exact(*theirs, log, ridge, beta)[0], attn, step),
    ]  # fmt: skip
    for expected, layer, steps in pairs:
        for z in (layer.read(layer.states(k, v, gate, steps), q, v), layer.read_in_chunks(q, k, v, gate, steps)):
            torch.testing.assert_close(z.transpose(1, 2), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_a_mamba_layer_equals_that_of_transformers():
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer

    torch.manual_seed(0)
    config = Mamba2Config(hidden_size=12, num_heads=3, head_dim=8, state_size=4, n_groups=1, expand=2, chunk_size=8)
    theirs = Mamba2Mixer(config, layer_idx=0).eval()
    theirs.A_log.copy_(torch.rand(3))
    theirs.D.copy_(torch.randn(3))
    stream = torch.randn(2, 21, 12)
    expected = theirs(stream)
    # their projections and convolution around our recurrence
    gate, mixed, dt = theirs.in_proj(stream).split([24, 24 + 2 * 4, 3], dim=-1)
    mixed = torch.nn.functional.silu(theirs.conv1d(mixed.mT)[..., :21].mT)
    v, k, q = mixed.split([24, 4, 4], dim=-1)
    v = v.unflatten(-1, (3, 8)).transpose(1, 2)
    q, k = (each[:, None].expand(-1, 3, -1, -1) for each in (q, k))
    step = torch.nn.functional.softplus(dt + theirs.dt_bias).transpose(1, 2)[..., None]
    ours = mixer("mamba2")
    ours.A_log.copy_(theirs.A_log)
    ours.skip.copy_(theirs.D)
    decay = (-step * ours.A_log.exp()[:, None, None]).exp()
    for z in (ours.read(ours.states(k, v, decay, step), q, v), ours.read_in_chunks(q, k, v, decay, step)):
        out = theirs.out_proj(theirs.norm(z.transpose(1, 2).flatten(2), gate))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
