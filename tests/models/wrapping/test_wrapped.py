"""`wrap`: any PyTorch module as a learner with hooks, against torch's own hooks written by hand."""

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformer_lens.model_protocol import TransformerLensModel

import mechicl
from mechicl.algorithms.stepwise import ResidualDescent
from mechicl.analysis import InterventionSweep, align, attribute, fit_readouts, identify, match, patch
from mechicl.analysis.causes import test_hypotheses as rank_hypotheses
from mechicl.analysis.interventions import PatchingSession, corrupt
from mechicl.analysis.layers import Lens, ols_weights, probe
from mechicl.learners import IterativeLearner, Learner
from mechicl.models import Reading, WrappedModel
from mechicl.models.opening.sites import Site
from mechicl.prompts import Interleaved, Paired, Prompts
from mechicl.tasks import LinearRegression
from tests.models.modules import (
    Checkpointed,
    Encoder,
    GroupedAttention,
    KeywordsOnly,
    Looped,
    NanoGPT,
    RecurrentSecond,
    StackedLSTM,
    mlp,
    seeded,
)

pytestmark = pytest.mark.filterwarnings("ignore:the model's loss")  # they are not trained
TASK = LinearRegression(x_dim=3, n_context=4)
PARTS = {
    "layers": "blocks.{}", "mlp": "blocks.{}.mlp", "resid_mid": "blocks.{}.ln2", "unembed": ["ln_f", "head"],
    "attention": {"out": "blocks.{}.attn", "qkv": "blocks.{}.attn.qkv", "pattern": "blocks.{}.attn.dropout",
                  "scores": "blocks.{}.attn.softmax", "z": "blocks.{}.attn.proj", "n_heads": 4},
}  # fmt: skip
PLACES = {  # component: its sub-module, and the side on which it is read
    "resid_pre": ("blocks.{}", "in"), "resid_post": ("blocks.{}", "out"), "attn_out": ("blocks.{}.attn", "out"),
    "mlp_out": ("blocks.{}.mlp", "out"), "z": ("blocks.{}.attn.proj", "in"),
    "pattern": ("blocks.{}.attn.dropout", "out"), "attn_scores": ("blocks.{}.attn.softmax", "in"),
    "q": ("blocks.{}.attn.qkv", "out"), "k": ("blocks.{}.attn.qkv", "out"), "v": ("blocks.{}.attn.qkv", "out"),
    "resid_mid": ("blocks.{}.ln2", "in"),
}  # fmt: skip
AXES = {
    **dict.fromkeys("qkvz", ("layer", "pos", "head")),
    **dict.fromkeys(["attn_scores", "pattern"], ("layer", "head", "query")),
}


@pytest.fixture(scope="module")
def net() -> NanoGPT:
    return seeded(NanoGPT)


@pytest.fixture(scope="module")
def model(net: NanoGPT) -> WrappedModel:
    return mechicl.wrap(net, encode="interleaved", **PARTS)


@pytest.fixture(scope="module")
def wrapped_lstm() -> WrappedModel:
    return mechicl.wrap(
        seeded(StackedLSTM), encode="paired", decode=lambda outputs: outputs["answer"], layers=["first", "second"],
        unembed="read",
    )  # fmt: skip


def pair(n: int = 5) -> tuple[Prompts, Prompts]:
    prompts = TASK.sample(n, seed=1)
    return prompts, corrupt(prompts, "labels")


def interleaved(prompts: Prompts) -> torch.Tensor:
    return Interleaved(3, 1).encode(prompts)


def predictions(swept: InterventionSweep) -> torch.Tensor:
    assert swept.predictions is not None
    return swept.predictions


# ---- torch's hooks, by hand ----
def replaced(module: nn.Module, tokens: torch.Tensor, name: str, side: str, replace) -> Any:
    """The module's output after a change of a sub-module's input or output."""
    part = module.get_submodule(name)
    if side == "in":
        handle = part.register_forward_pre_hook(lambda part, args: (replace(args[0]), *args[1:]))
    else:
        handle = part.register_forward_hook(
            lambda part, args, out: (replace(out[0]), *out[1:]) if isinstance(out, tuple) else replace(out)
        )
    with torch.no_grad():
        output = module(tokens)
    handle.remove()
    return output


def seen(module: nn.Module, tokens: torch.Tensor, name: str, side: str) -> torch.Tensor:
    kept = []
    replaced(module, tokens, name, side, lambda activation: kept.append(activation.clone()) or activation)
    return kept[0]


@pytest.mark.parametrize("component", PLACES)
def test_patching_equals_torchs_own_hooks(net, model, component):
    clean, corrupted = pair()
    axes = AXES.get(component, ("layer", "pos"))
    swept = patch(model, clean, corrupted, component, axes, progress=False)
    cells = torch.cartesian_prod(*(torch.arange(size) for size in predictions(swept).shape[: len(axes)]))
    assert len(cells) >= 2 * 9
    pattern, side = PLACES[component]
    for cell in cells[::3].tolist():
        name = pattern.format(cell[0])
        source = seen(net, interleaved(clean), name, side)

        def replace(activation, cell=cell, source=source):
            source = source.clone()
            if component != "resid_mid":  # the stream around the MLP continues with the changed tensor
                activation = activation.clone()
            if component in ("q", "k", "v", "z"):
                first = 4 * cell[2] + 16 * "qkv".find(component) * (component != "z")
                head = slice(first, first + 4)
                activation[:, cell[1], head] = source[:, cell[1], head]
            else:
                activation[:, *cell[1:]] = source[:, *cell[1:]]
            return activation

        expected = replaced(net, interleaved(corrupted), name, side, replace)[:, -1]
        assert_close(predictions(swept)[*cell], expected, rtol=0, atol=1e-6)
    assert (predictions(swept) - swept.unpatched).abs().max() > 1e-5


def test_an_lstm_of_torch(wrapped_lstm):
    lstm, encode = wrapped_lstm.module, Paired(3, 1).encode
    clean, corrupted = pair()
    assert_close(wrapped_lstm.predict(clean), lstm(encode(clean))["answer"], rtol=0, atol=0)
    assert (wrapped_lstm.cfg.n_layers, wrapped_lstm.cfg.d_model) == (2, 12)
    swept = patch(wrapped_lstm, clean, corrupted, "resid_post", progress=False)
    for layer, name in enumerate(["first", "second"]):
        source = seen(lstm, encode(clean), name, "out")
        for pos in range(5):

            def replace(activation, pos=pos, source=source):
                return torch.where((torch.arange(5) == pos)[:, None], source, activation)

            expected = replaced(lstm, encode(corrupted), name, "out", replace)["answer"]
            assert_close(predictions(swept)[layer, pos], expected, rtol=0, atol=1e-6)
    # the second gets its input by keyword
    pre = patch(wrapped_lstm, clean, corrupted, "resid_pre", {"layer": 1, "pos": None}, progress=False)
    assert_close(predictions(pre)[0], predictions(swept)[0])


def test_the_lens_ends_at_the_prediction_and_its_weights_are_derivatives(model, wrapped_lstm):
    prompts = TASK.sample(6, seed=5)
    trajectory = Lens(model).trajectory(prompts, with_weights=True)
    assert_close(trajectory.predictions[-1], model.predict_prefixes(prompts).detach())
    assert_close(Lens(wrapped_lstm).trajectory(prompts).predictions[-1, :, -1], wrapped_lstm.predict(prompts).detach())
    query = prompts.query.xs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model.predict(prompts.with_query(query)).sum(), query)
    assert trajectory.weights is not None
    assert_close(trajectory.weights[-1, :, -1, :, 0], slope)


def test_other_analyses(model):
    clean, corrupted = pair(8)
    session = PatchingSession(model, clean, corrupted)
    session.toggle(Site("z", 1, pos=7, head=2))
    space = {"model": model, "clean": clean, "corrupted": corrupted}
    exec(session.code(), space)
    assert_close(space["prediction"], session.result().prediction)
    swept = patch(model, clean[:1], corrupted[:1], "z", ("layer", "pos", "head"), progress=False)
    assert_close(session.result().prediction, predictions(swept)[1, 7, 2, 0])
    everything = patch(model, clean, corrupted, "z", at="points", progress=False)
    assert_close(predictions(everything)[..., -1, :], predictions(patch(model, clean, corrupted, "z", progress=False)))
    assert identify(model, TASK, n_prompts=64, progress=False).best.squared_distances.isfinite().all()
    assert align(model, mechicl.wrap(seeded(mlp, 20), encode="paired"), clean).prediction_distance.shape == (8,)
    assert match(Lens(model), model, clean).similarities.shape == (3, 1, 8)


def test_it_is_a_model_of_transformerlens(net, model):
    prompts = TASK.sample(2, seed=0)
    assert all(isinstance(model, protocol) for protocol in (TransformerLensModel, Learner))
    assert not isinstance(model, IterativeLearner)
    outputs, cache = model.run_with_cache(prompts)
    assert_close(outputs, net(interleaved(prompts)), rtol=0, atol=0)
    names = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out")
    names += tuple(f"attn.hook_{name}" for name in (*"qkvz", "attn_scores", "pattern"))
    assert set(cache) == {f"blocks.{layer}.{name}" for layer in range(2) for name in names}
    gradients = {}
    keep = [("blocks.0.attn.hook_z", lambda gradient, hook: gradients.update(z=gradient))]
    with model.hooks(bwd_hooks=keep):
        model(prompts, at="query").sum().backward()
    assert gradients["z"].shape == cache["z", 0].shape == (2, 9, 4, 4)
    assert gradients["z"].abs().max() > 0
    net.zero_grad()


def test_the_module_is_unchanged(net):
    before, names = copy.deepcopy(net.state_dict()), dict(net.named_modules())
    tokens = interleaved(TASK.sample(3, seed=0))
    plain = net(tokens)
    model = mechicl.wrap(net, encode="interleaved", **PARTS)
    patch(model, *pair(), "z", progress=False)
    with pytest.raises(ZeroDivisionError):
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_pre", lambda activation, hook: 1 / 0)])
    assert torch.equal(net(tokens), plain)
    assert torch.equal(model(tokens), plain)
    assert dict(net.named_modules()) == names
    assert net.name == "mine"
    assert not hasattr(net.blocks[0], "name")
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert {name.removeprefix("module.") for name in model.state_dict()} == set(before)
    assert not any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in net.modules())


def test_a_hook_may_write_into_its_activation():
    class Skip(nn.ModuleDict):
        def forward(self, x):
            return self["part"](x) + x

    model = mechicl.wrap(Skip({"part": nn.Identity()}).eval(), encode="paired", layers=["part"])
    tokens = torch.ones(2, 3, 4)
    changed = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: x.mul_(5))])
    assert torch.equal(changed, torch.full((2, 3, 4), 6.0))
    assert torch.equal(tokens, torch.ones(2, 3, 4))


def test_the_first_run_may_have_a_hook_that_fits_its_prompts_only(net, model):
    prompts, point = TASK.sample(2, seed=0), "blocks.0.hook_resid_post"
    source = model.run_with_cache(TASK.sample(2, seed=1))[1][point]
    fresh = mechicl.wrap(net, encode="interleaved", **PARTS)
    swapped = [each.run_with_hooks(prompts, fwd_hooks=[(point, lambda x, hook: source)]) for each in (fresh, model)]
    assert_close(swapped[0], swapped[1])
    assert fresh.cfg.one_pass


def test_modes_device_and_dtype_follow_the_module(net):
    net = copy.deepcopy(net)
    model = mechicl.wrap(net, encode="interleaved", **PARTS)
    net.train()
    assert model.training
    state = torch.get_rng_state()
    model.encode(TASK.sample(2, seed=0))  # runs the module, which has dropout, without drawing from it
    assert torch.equal(torch.get_rng_state(), state)
    assert net.blocks[0].attn.dropout.training
    prompts = TASK.sample(2, seed=0)
    for call in (lambda: patch(model, *pair(), "z"), lambda: model.predict(prompts),
                 lambda: model.predict_prefixes(prompts), lambda: list(model.layer_streams(prompts))):  # fmt: skip
        with pytest.raises(ValueError, match=r"in training mode .*model.eval\(\)"):
            call()
    model.eval()
    assert not net.training
    assert not net.blocks[0].attn.dropout.training
    assert not model.training
    net.double()
    assert model.cfg.torch_dtype == torch.float64
    assert model.predict(TASK.sample(2, seed=0)).dtype == torch.float64
    patch(model, *pair(), "z", progress=False)
    assert model.to("meta").cfg.device == "meta"
    assert next(net.parameters()).is_meta


# ---- torch's own attentions ----
@pytest.mark.parametrize("component", ["q", "k", "v", "attn_scores", "pattern", "z"])
def test_fused_attention_is_opened_like_a_softmax_module(model, component):
    fused = seeded(NanoGPT, fused=True)
    heads = {"out": "blocks.{}.attn", "fused": "blocks.{}.attn", "n_heads": 4}
    opened = mechicl.wrap(fused, encode="interleaved", layers="blocks.{}", attention=heads)
    clean, corrupted = pair()
    assert_close(opened.run_with_cache(clean)[1][component, 1], model.run_with_cache(clean)[1][component, 1])
    swept, expected = (
        patch(each, clean, corrupted, component, AXES[component], progress=False) for each in (opened, model)
    )
    assert_close(predictions(swept), predictions(expected), rtol=0, atol=1e-6)
    assert_close(attribute(opened, clean, corrupted, "z").effect(), attribute(model, clean, corrupted, "z").effect())


def test_multi_head_attention_of_torch_is_opened():
    net = seeded(Encoder)
    model = mechicl.wrap(net, encode="interleaved", layers="blocks.{}", attention="blocks.{}.self_attn")
    clean, corrupted = pair()
    outputs, cache = model.run_with_cache(clean)
    assert_close(outputs, net(interleaved(clean)))
    assert model.cfg.n_heads == 4
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    for layer, block in enumerate(net.blocks):
        read = block.norm1(cache["resid_pre", layer])
        theirs, pattern = block.self_attn(read, read, read, attn_mask=mask, average_attn_weights=False)
        assert_close(cache["pattern", layer], pattern)
        assert_close(cache["attn_out", layer], theirs)
        assert_close(block.self_attn.out_proj(cache["z", layer].flatten(2)), theirs)
        q, k, v = block.self_attn.in_proj_weight.chunk(3)
        for name, weight, bias in zip("qkv", (q, k, v), block.self_attn.in_proj_bias.chunk(3), strict=True):
            assert_close(cache[name, layer].flatten(2), read @ weight.T + bias)
    # a head is silent without its columns of the output projection
    silent = copy.deepcopy(net)
    with torch.no_grad():
        silent.blocks[1].self_attn.out_proj.weight[:, 8:12] = 0
    zeroed = model.run_with_hooks(
        clean, fwd_hooks=[("blocks.1.attn.hook_z", lambda z, hook: z.index_fill(2, torch.tensor(2), 0))]
    )
    assert_close(zeroed, silent(interleaved(clean)))
    assert patch(model, clean, corrupted, "pattern", ("layer", "head"), progress=False).effect().abs().max() > 0


def test_masks_and_groups_of_fused_attentions():
    class Masked(nn.Module):
        """A padding mask and a bias on the scores; then grouped heads with a boolean mask."""

        def __init__(self):
            super().__init__()
            self.first = nn.MultiheadAttention(4, 2, batch_first=True, kdim=4, vdim=4)
            self.second, self.out = nn.Linear(4, 16), nn.Linear(8, 1)

        def inner(self, x):
            k, v, q = self.second(x).unflatten(-1, (8, 2)).transpose(1, 2).split([2, 2, 4], 1)
            mask = torch.ones(x.shape[1], x.shape[1]).tril(1).bool()
            return nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)

        def forward(self, x):
            hidden = torch.zeros(x.shape[:2]).index_fill(1, torch.tensor(1), -torch.inf)
            bias = torch.randn(2 * len(x), x.shape[1], x.shape[1], generator=torch.Generator().manual_seed(0))
            x = x + self.first(x, x, x, key_padding_mask=hidden, attn_mask=bias)[0]
            return self.out(self.inner(x).transpose(1, 2).flatten(2))

    net = seeded(lambda: nn.Sequential(Masked()))
    model = mechicl.wrap(net, encode="paired", layers=["0"], attention=["0.first"])
    tokens = Paired(3, 1).encode(TASK.sample(3, seed=0))
    outputs, cache = model.run_with_cache(tokens)
    assert_close(outputs, net(tokens))
    assert not cache["pattern", 0][..., 1].any()
    heads: dict[str, Any] = {"fused": ["0"], "n_heads": 4, "n_key_value_heads": 2}
    net[0].first = Same()
    model = mechicl.wrap(net, encode="paired", layers=["0"], attention=heads)
    outputs, cache = model.run_with_cache(tokens)
    assert_close(outputs, net(tokens))
    assert cache["k", 0].shape == (3, 5, 2, 2)


class Same(nn.Module):
    def forward(self, x, *rest, **masks):
        return 0 * x, None


# ---- modules of every kind ----
@pytest.mark.parametrize("listed", [False, True])
def test_a_part_that_runs_several_times_is_several_layers(listed):
    net = seeded(Looped, listed=listed)
    block = net.blocks[0] if listed else net.block
    names = [f"blocks.{i}" for i in range(3)] if listed else ["block"] * 3
    model = mechicl.wrap(
        net, encode="paired", layers="blocks.{}" if listed else names, mlp=[f"{name}.mlp" for name in names]
    )
    prompts = TASK.sample(3, seed=0)
    _, cache = model.run_with_cache(prompts)
    stream = net.read_in(Paired(3, 1).encode(prompts))
    for layer in range(3):
        assert_close(cache["resid_pre", layer], stream)
        stream = block(stream)
        assert_close(cache["resid_post", layer], stream)
    zeroed = model.run_with_hooks(prompts, fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: x * 0)])
    stream = block(net.read_in(Paired(3, 1).encode(prompts)))
    stream = stream + block.attn(block.ln1(stream))
    assert_close(zeroed, net.head(block(stream)))
    with pytest.raises(ValueError, match=r"runs 3 times, and is named 1 times"):
        mechicl.wrap(net, encode="paired", layers=names[:1]).predict(prompts)


def test_tuples_keep_their_kind():
    Output = namedtuple("Output", ["hidden", "gate"])

    class Returns(nn.Module):
        def forward(self, x):
            return Output(2 * x, x)

    class Sums(nn.ModuleDict):
        def forward(self, x):
            out = self["part"](x)
            return out.hidden + out.gate

    model = mechicl.wrap(Sums({"part": Returns()}).eval(), encode="paired", layers=["part"])
    tokens = torch.ones(1, 2, 3)
    zeroed = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_post", lambda x, hook: x * 0)])
    assert torch.equal(zeroed, tokens)


def test_positions_first():
    net = seeded(RecurrentSecond)
    model = mechicl.wrap(net, encode=Reading("paired", batch_first=False), layers=["second"], unembed="read")
    clean, corrupted = pair()
    encode = Paired(3, 1).encode
    assert_close(model.predict(clean), net(encode(clean).transpose(0, 1))[-1])
    _, cache = model.run_with_cache(clean)
    assert cache["resid_pre", 0].shape == (5, 5, 8)
    source, _ = net.first(encode(clean).transpose(0, 1))
    assert_close(cache["resid_pre", 0], source.transpose(0, 1))
    swept = patch(model, clean, corrupted, "resid_pre", progress=False)
    for pos in range(5):
        stream, _ = net.first(encode(corrupted).transpose(0, 1))
        stream = torch.where((torch.arange(5) == pos)[:, None, None], source, stream)
        assert_close(predictions(swept)[0, pos], net.read(net.second(stream)[0])[-1], rtol=0, atol=1e-6)
    assert_close(Lens(model).trajectory(clean).predictions[-1, :, -1], model.predict(clean).detach())
    with pytest.raises(ValueError, match="batch_first=False"):
        mechicl.wrap(net, encode="paired", layers=["second"]).predict(clean)


def test_a_module_that_takes_its_input_by_keyword_and_returns_a_tuple():
    net = seeded(KeywordsOnly)
    model = mechicl.wrap(
        net,
        encode=Reading("interleaved", slice(0, None, 2), lambda module, tokens: module(inputs=tokens, scale=2.0)),
        decode=lambda outputs: outputs[0][:, ::2],
        layers="net.blocks.{}",
    )
    clean = TASK.sample(5, seed=1)
    assert_close(model.predict_prefixes(clean), 2 * net.net(interleaved(clean))[:, ::2])
    assert model.cfg.one_pass


def test_joint_projections_in_any_order():
    def split(joint):
        k, v, q = joint.unflatten(-1, (2, 4, 2)).split([1, 1, 2], -2)
        return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)

    attention = seeded(GroupedAttention)
    net = seeded(nn.Sequential, nn.Linear(4, 8), attention, nn.Linear(8, 1))
    model = mechicl.wrap(net, encode="paired", layers=["1"], attention={"qkv": ["1.joint"], "split": split})
    tokens = Paired(3, 1).encode(TASK.sample(3, seed=0))
    _, cache = model.run_with_cache(tokens)
    joint = attention.joint(net[0](tokens))
    assert_close(cache["q", 0][:, :, 3], joint[..., 14:16])
    assert_close(cache["v", 0][:, :, 1], joint[..., 10:12])
    assert cache["k", 0].shape == (3, 5, 2, 2)
    expected = replaced(net, tokens, "1.joint", "out", lambda out: torch.where((torch.arange(16) // 2) == 5, 0, out))
    silence: list[Any] = [("blocks.0.attn.hook_v", lambda v, hook: v.index_fill(2, torch.tensor(1), 0))]
    assert_close(model.run_with_hooks(tokens, fwd_hooks=silence), expected)
    for wrong in (lambda joint: joint.chunk(3, -1), lambda joint: [2 * part for part in split(joint)]):
        model = mechicl.wrap(net, encode="paired", layers=["1"], attention={"qkv": ["1.joint"], "split": wrong})
        with pytest.raises(ValueError, match=r"'1.joint', of width 16, is not q, k and v: 'split' must"):
            model.run_with_cache(tokens)


@pytest.mark.parametrize("how", ["whole", "in place", "blocks", "parallel"])
def test_inside_compile_and_data_parallel(net, model, how):
    other = copy.deepcopy(net)
    if how == "whole":
        other = torch.compile(other, backend="eager")
    elif how == "in place":
        other.compile(backend="eager")
    elif how == "blocks":
        other.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in other.blocks)  # type: ignore[misc]
    else:
        other = nn.DataParallel(other)
    clean, corrupted = pair()
    around = mechicl.wrap(other.eval(), encode="interleaved", **PARTS)
    with torch.no_grad():
        around.predict(clean)  # compiles
    expected, got = (patch(each, clean, corrupted, "z", progress=False) for each in (model, around))
    assert_close(predictions(got), predictions(expected))
    torch.compiler.reset()


def test_gradients_of_a_module_that_runs_twice_for_them(model):
    clean, corrupted = pair()
    twice = mechicl.wrap(seeded(Checkpointed), encode="interleaved", **PARTS)
    assert_close(attribute(twice, clean, corrupted, "z").effect(), attribute(model, clean, corrupted, "z").effect())


def test_the_users_own_hooks_stay():
    net = seeded(NanoGPT)
    net.blocks[0].register_forward_hook(lambda part, args, out: 2 * out)
    model = mechicl.wrap(net, encode="interleaved", layers="blocks.{}")
    prompts = TASK.sample(3, seed=0)
    outputs, cache = model.run_with_cache(prompts)
    assert torch.equal(outputs, net(interleaved(prompts)))
    assert_close(2 * cache["resid_post", 0], cache["resid_pre", 1])


# ---- predictions of all points ----
def test_all_points_in_one_pass_only_if_none_sees_later_ones(model):
    prompts = TASK.sample(4, seed=8)
    both_ways = mechicl.wrap(seeded(NanoGPT, causal=False), encode="interleaved", layers="blocks.{}")
    for each in (model, both_ways):
        one_by_one = torch.stack([each.predict(prompts.prefix(t)) for t in range(5)], dim=1)
        assert_close(each.predict_prefixes(prompts), one_by_one, rtol=1e-5, atol=1e-6)
        assert each.cfg.one_pass == each.cfg.causal == (each is model)
    with pytest.raises(ValueError, match="take at='query'"):
        patch(both_ways, prompts, corrupt(prompts, "labels"), "resid_pre", at="points", progress=False)
    readouts = fit_readouts(both_ways, TASK.sample(32, seed=0), progress=False)
    assert readouts.trajectory(prompts).predictions.shape == (3, 4, 1, 1)


@pytest.mark.parametrize("change", ["written", "replaced", "whole module"])
def test_the_trial_is_repeated_after_a_change_of_the_weights(change):
    net = seeded(NanoGPT, causal=False)
    with torch.no_grad():
        net.head.weight.zero_()
    model, prompts = mechicl.wrap(net, encode="interleaved"), TASK.sample(4, seed=8)
    model.predict_prefixes(prompts)
    assert not model.cfg.one_pass  # it predicts one number, which shows nothing

    def set_weight(weight: torch.Tensor) -> None:
        if change == "replaced":  # a new parameter has the version that the old one had
            net.head.weight = nn.Parameter(weight)
        elif change == "written":
            with torch.no_grad():
                net.head.weight.copy_(weight)
        else:
            net.load_state_dict(net.state_dict() | {"head.weight": weight})

    weight = torch.randn(1, 16, generator=torch.Generator().manual_seed(0))
    set_weight(weight)
    assert_close(model.predict_prefixes(prompts)[:, 2], model.predict(prompts.prefix(2)))
    for block in net.blocks:
        block.attn.causal = True
    set_weight(2 * weight)
    assert not model.cfg.one_pass  # not known of these weights
    model.encode(prompts)
    assert model.cfg.one_pass


def shifted(prompts: Prompts) -> torch.Tensor:
    """One token a point: its x, with the y of the point before."""
    before = torch.cat([torch.zeros_like(prompts.ys[:, :1]), prompts.ys[:, :-1]], 1)
    return torch.cat([prompts.xs, before], -1)


def test_the_users_own_layout():
    net = seeded(NanoGPT, d_in=4)
    model = mechicl.wrap(net, encode=Reading(shifted, slice(None)), layers="blocks.{}")
    prompts = TASK.sample(4, seed=8)
    assert_close(model.predict_prefixes(prompts), net(shifted(prompts)))
    assert model.cfg.one_pass
    assert model.cfg.prompt_format == "own"
    assert next(iter(model.layer_streams(prompts))).shape == (4, 5, 16)
    assert PatchingSession(model, *pair()).labels == ["0", "1", "2", "3", "4"]
    assert model.count_points(prompts).tolist() == [0, 1, 2, 3, 4]


def test_a_function_as_encode_is_probed_and_tested_like_its_format(net, model):
    """With points= it is interleaved in all but name, also if only the query's prediction is returned."""
    reading = Reading(interleaved, slice(0, None, 2))
    own = mechicl.wrap(net, encode=reading, decode=lambda outputs: outputs[:, -1], **PARTS)
    quantities, fitting, held_out = {"OLS weights": ols_weights}, TASK.sample(64, seed=7), TASK.sample(8, seed=1)
    probed, expected = (probe(each, quantities, fitting, held_out, progress=False) for each in (own, model))
    assert_close(probed.squared_errors, expected.squared_errors)
    assert len(expected.best("OLS weights")) == 3
    for at in ("query", "points"):
        both = (mechicl.wrap(net, encode=reading, **PARTS), model)
        errors = [fit_readouts(each, fitting, progress=False).errors(held_out, at=at) for each in both]
        assert_close(errors[0].squared_errors, errors[1].squared_errors)
    known = {"descent": ResidualDescent(2, step_size=0.1)}
    tests = [
        rank_hypotheses(each, TASK, known, n_prompts=16, with_likeness=False, progress=False) for each in (own, model)
    ]
    assert_close(tests[0].best.predictions, tests[1].best.predictions)
    unknown = mechicl.wrap(net, encode=interleaved, layers="blocks.{}")
    with pytest.raises(TypeError, match=r"points=slice\(0, None, 2\)"):
        rank_hypotheses(unknown, TASK, known, progress=False)
    both_ways = mechicl.wrap(seeded(NanoGPT, causal=False), encode=reading, layers="blocks.{}")
    for each in (unknown, both_ways):
        with pytest.raises(ValueError, match=r"points=\) at which no later point is seen"):
            probe(each, quantities, fitting, held_out, progress=False)


def test_a_module_that_reads_the_flattened_prompt_is_a_learner_only():
    net = seeded(mlp, 20)
    model = mechicl.wrap(net, encode="paired")
    prompts = TASK.sample(4, seed=8)
    assert_close(model.predict(prompts), net(Paired(3, 1).encode(prompts)))
    assert identify(model, TASK, steps=1, n_prompts=64, with_limits=False, progress=False).best.name
    with pytest.raises(ValueError, match="reads no prompts of 0 context points"):
        model.predict_prefixes(prompts)


@settings(max_examples=15)
@given(
    x_dim=st.integers(1, 4), y_dim=st.integers(1, 3), n_context=st.integers(0, 5), n=st.integers(0, 4),
    layout=st.sampled_from(["interleaved", "paired"]),
)  # fmt: skip
def test_any_shape_of_prompts(x_dim, y_dim, n_context, n, layout):
    layout_of = {"interleaved": Interleaved, "paired": Paired}[layout](x_dim, y_dim)
    net = seeded(nn.Sequential, nn.Linear(layout_of.d_token, 5), nn.Tanh(), nn.Linear(5, y_dim))
    prompts = LinearRegression(x_dim=x_dim, y_dim=y_dim, n_context=n_context).sample(n, seed=0)
    model = mechicl.wrap(net, encode=layout, layers=["1"])
    assert_close(model.predict(prompts), net(layout_of.encode(prompts))[:, -1])
    assert model.predict_prefixes(prompts).shape == prompts.ys.shape
    if n:
        assert [stream.shape for stream in model.layer_streams(prompts, "query")] == [(n, 1, 5)] * 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("hook_name", ["hook_resid_pre", "hook_resid_post", "hook_attn_out"])
def test_nested_tensors_of_torchs_encoder_are_refused_by_name(hook_name):
    class Padded(nn.Module):
        def __init__(self, nested):
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested), nn.Linear(4, 1)

        def forward(self, tokens):
            padding = torch.arange(tokens.shape[1]).expand(tokens.shape[:2]) >= 3 + torch.arange(len(tokens))[:, None]
            return self.head(self.encoder(tokens, src_key_padding_mask=padding))

    tokens = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    parts: Any = {"encode": "paired", "layers": "encoder.layers.{}", "attention": "encoder.layers.{}.self_attn"}
    nested, dense = (mechicl.wrap(seeded(Padded, nested=each), **parts) for each in (True, False))
    name = f"blocks.1.{hook_name}"
    with torch.no_grad():
        with pytest.raises(ValueError, match="nested tensor, from which torch has removed the padding"):
            nested.run_with_cache(tokens, names_filter=name)
        recorded = dense.run_with_cache(tokens, names_filter=name)[1][name]
        whole = dense.run_with_cache(tokens)[1][name]
    assert_close(recorded, whole, rtol=0, atol=1e-5)
