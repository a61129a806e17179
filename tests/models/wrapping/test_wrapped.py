"""`wrap`: anybody's module as a learner with hooks, against torch's own hooks written by hand."""

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
from mechicl.analysis import InterventionSweep, ablate, align, attribute, fit_readouts, identify, match, patch
from mechicl.analysis.heads import measure_token_sensitivity, read_dual_form, score_heads
from mechicl.analysis.interventions import PatchingSession, corrupt, patch_paths
from mechicl.analysis.layers import Lens, ols_weights, probe
from mechicl.analysis.weights import fit_construction, read_weight_products
from mechicl.checkpoints import save
from mechicl.learners import IterativeLearner, Learner
from mechicl.models import WrappedModel
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.sites import Site
from mechicl.models.wrapping.wrapped import refuse_wrapped
from mechicl.prompts import Interleaved, Paired, Prompts
from mechicl.tasks import LinearRegression
from tests.models.modules import (
    Checkpointed,
    GroupedAttention,
    KeywordsOnly,
    Looped,
    NanoGPT,
    RecurrentSecond,
    SharedBlocks,
    StackedLSTM,
    mlp,
    seeded,
)

TASK = LinearRegression(x_dim=3, n_context=4)
PARTS = {
    "layers": "blocks.{}", "mlp": "blocks.{}.mlp", "resid_mid": "blocks.{}.ln2", "unembed": ["ln_f", "head"],
    "attention": {"out": "blocks.{}.attn", "qkv": "blocks.{}.attn.qkv", "pattern": "blocks.{}.attn.dropout",
                  "scores": "blocks.{}.attn.softmax", "z": "blocks.{}.attn.proj", "n_heads": 4},
}  # fmt: skip
PLACES = {  # component: its sub-module, and whether it is what goes in or what comes out
    "resid_pre": ("blocks.{}", "in"), "resid_post": ("blocks.{}", "out"), "attn_out": ("blocks.{}.attn", "out"),
    "mlp_out": ("blocks.{}.mlp", "out"), "z": ("blocks.{}.attn.proj", "in"),
    "pattern": ("blocks.{}.attn.dropout", "out"), "attn_scores": ("blocks.{}.attn.softmax", "in"),
    "q": ("blocks.{}.attn.qkv", "out"), "k": ("blocks.{}.attn.qkv", "out"), "v": ("blocks.{}.attn.qkv", "out"),
    "resid_mid": ("blocks.{}.ln2", "in"),
}  # fmt: skip


@pytest.fixture(scope="module")
def net() -> NanoGPT:
    return seeded(NanoGPT)


@pytest.fixture(scope="module")
def model(net: NanoGPT) -> WrappedModel:
    return mechicl.wrap(net, encode="interleaved", **PARTS)


@pytest.fixture(scope="module")
def lstm() -> StackedLSTM:
    return seeded(StackedLSTM)


@pytest.fixture(scope="module")
def wrapped_lstm(lstm: StackedLSTM) -> WrappedModel:
    return mechicl.wrap(
        lstm, encode="paired", decode=lambda outputs: outputs["answer"], layers=["first", "second"], unembed="read"
    )


def pair(n: int = 5) -> tuple[Prompts, Prompts]:
    prompts = TASK.sample(n, seed=1)
    return prompts, corrupt(prompts, "labels")


def interleaved(prompts: Prompts) -> torch.Tensor:
    return Interleaved(3, 1).encode(prompts)


def predictions(swept: InterventionSweep, which: str = "predictions") -> torch.Tensor:
    """The predictions of a sweep, or those before anything was patched."""
    kept = getattr(swept, which)
    assert kept is not None
    return kept


# ---- torch's hooks, by hand ----


def replaced(module: nn.Module, tokens: torch.Tensor, name: str, side: str, replace) -> Any:
    """The module's output where what goes into a sub-module, or comes out of it, is replaced."""
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

    def keep(activation):
        kept.append(activation.clone())
        return activation

    replaced(module, tokens, name, side, keep)
    return kept[0]


@pytest.mark.parametrize("component", PLACES)
def test_patching_equals_torchs_own_hooks(net, model, component):
    clean, corrupted = pair()
    axes = ("layer", "pos")
    if component in ("q", "k", "v", "z"):
        axes = ("layer", "pos", "head")
    elif component in ("attn_scores", "pattern"):
        axes = ("layer", "head", "query")
    swept = patch(model, clean, corrupted, component, axes, progress=False)
    cells = torch.cartesian_prod(*(torch.arange(size) for size in predictions(swept).shape[: len(axes)]))
    assert len(cells) >= 2 * 9
    pattern, side = PLACES[component]
    for cell in cells[::3].tolist():
        name = pattern.format(cell[0])
        source = seen(net, interleaved(clean), name, side)

        def replace(activation, cell=cell, source=source):
            source = source.clone()
            if component != "resid_mid":  # which the stream around the MLP goes on with
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
    assert (predictions(swept) - predictions(swept, "unpatched")).abs().amax((-1, -2)).count_nonzero() > len(cells) // 3


@pytest.mark.parametrize("component", ["z", "mlp_out"])
def test_ablation_equals_torchs_own_hooks(net, model, component):
    prompts = TASK.sample(6, seed=2)
    swept = ablate(model, prompts, component, ("layer",), progress=False)
    pattern, side = PLACES[component]
    for layer in range(2):
        mean = seen(net, interleaved(prompts), pattern.format(layer), side).mean(0, keepdim=True)
        expected = replaced(net, interleaved(prompts), pattern.format(layer), side, mean.expand_as)
        assert_close(predictions(swept)[layer], expected[:, -1], rtol=0, atol=1e-6)


def test_attribution_is_exact_where_the_metric_is_linear_in_the_activation():
    linear = seeded(nn.Sequential, nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1))
    model = mechicl.wrap(linear, encode="paired", layers=["1"])
    clean, corrupted = (TASK.sample(5, seed=seed) for seed in (1, 2))
    metrics = {"sum": lambda predictions: predictions.sum(-1)}
    real = patch(model, clean, corrupted, "resid_pre", metrics=metrics, progress=False)
    estimate = attribute(model, clean, corrupted, "resid_pre", metrics=metrics)
    assert_close(estimate.values["sum"], real.values["sum"].to(estimate.values["sum"]), rtol=0, atol=1e-6)
    assert estimate.effect("sum")[0, -1].abs().min() > 0


def test_an_lstm_of_torch(lstm, wrapped_lstm):
    clean, corrupted = pair()
    encode = Paired(3, 1).encode
    assert_close(wrapped_lstm.predict(clean), lstm(encode(clean))["answer"], rtol=0, atol=0)
    assert wrapped_lstm.cfg.n_layers == 2
    assert wrapped_lstm.cfg.d_model == 12
    swept = patch(wrapped_lstm, clean, corrupted, "resid_post", progress=False)
    for layer, name in enumerate(["first", "second"]):
        source = seen(lstm, encode(clean), name, "out")
        for pos in range(5):

            def replace(activation, pos=pos, source=source):
                return torch.where((torch.arange(5) == pos)[:, None], source, activation)

            expected = replaced(lstm, encode(corrupted), name, "out", replace)["answer"]
            assert_close(predictions(swept)[layer, pos], expected, rtol=0, atol=1e-6)
    # the second is given its input by keyword
    pre = patch(wrapped_lstm, clean, corrupted, "resid_pre", only={"layer": 1}, progress=False)
    post = patch(wrapped_lstm, clean, corrupted, "resid_post", only={"layer": 0}, progress=False)
    assert_close(pre.predictions, post.predictions)


def test_readouts_are_least_squares_on_the_stream(net, model):
    fitting, prompts = TASK.sample(400, seed=3), TASK.sample(7, seed=4)
    readouts = fit_readouts(model, fitting, penalties=[1e-9], progress=False)
    trajectory = readouts.trajectory(prompts)
    assert trajectory.predictions.shape == (3, 7, 5, 1)
    for layer, name in enumerate(["blocks.0", "blocks.1"], start=1):  # before them the stream has as few ranks as x
        stream, held_out = (seen(net, interleaved(part), name, "out").double() for part in (fitting, prompts))
        for point in (3, 4):
            design, row = (torch.cat([part[:, 2 * point], torch.ones(len(part), 1)], 1) for part in (stream, held_out))
            weights = torch.linalg.lstsq(design, fitting.ys[:, point].double(), driver="gelsd").solution
            assert_close(trajectory.predictions[layer, :, point].double(), row @ weights, rtol=1e-3, atol=1e-3)


def test_the_lens_ends_at_the_prediction(model, wrapped_lstm):
    prompts = TASK.sample(6, seed=5)
    assert_close(Lens(model).trajectory(prompts).predictions[-1], model.predict_prefixes(prompts).detach())
    assert_close(Lens(wrapped_lstm).trajectory(prompts).predictions[-1, :, -1], wrapped_lstm.predict(prompts).detach())


def test_weights_of_a_layer_are_derivatives(model):
    prompts = TASK.sample(3, seed=6)
    weights = Lens(model).trajectory(prompts, with_weights=True).weights
    query = prompts.query.xs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model.predict(prompts.with_query(query)).sum(), query)
    assert weights is not None
    assert_close(weights[-1, :, -1, :, 0], slope)


def test_what_else_opens_a_model(model):
    clean, corrupted = pair(8)
    session = PatchingSession(model, clean, corrupted)
    session.toggle(Site("z", 1, pos=7, head=2))
    space = {"model": model, "clean": clean, "corrupted": corrupted}
    exec(session.code(), space)
    assert_close(space["prediction"], session.result().prediction)
    swept = patch(model, clean[:1], corrupted[:1], "z", ("layer", "pos", "head"), progress=False)
    assert_close(session.result().prediction, predictions(swept)[1, 7, 2, 0])
    assert session.labels[-1] == "query"
    without_heads = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
    assert session.components == dict.fromkeys(without_heads) | dict.fromkeys((*"qkvz", "attn_scores", "pattern"), 4)
    everything = patch(model, clean, corrupted, "z", at="points", progress=False)
    assert predictions(everything).shape == (2, 4, 8, 5, 1)
    assert_close(predictions(everything)[..., -1, :], predictions(patch(model, clean, corrupted, "z", progress=False)))
    probed = probe(model, {"OLS weights": ols_weights}, TASK.sample(64, seed=7), clean, progress=False)
    assert len(probed.best("OLS weights")) == 3
    best = identify(model, TASK, n_prompts=64, progress=False).best
    assert best.squared_distances.isfinite().all()
    assert align(model, mechicl.wrap(seeded(mlp, 20), encode="paired"), clean).prediction_distance.shape == (8,)
    assert match(Lens(model), model, clean).similarities.shape == (3, 1, 8)


def test_it_is_a_model_of_transformerlens(net, model):
    prompts = TASK.sample(2, seed=0)
    assert all(isinstance(model, protocol) for protocol in (TransformerLensModel, Learner))
    assert not isinstance(model, IterativeLearner)
    outputs, cache = model.run_with_cache(prompts)
    assert_close(outputs, net(interleaved(prompts)), rtol=0, atol=0)
    assert set(cache) == {
        f"blocks.{layer}.{name}"
        for layer in range(2)
        for name in ("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out",
                     "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_z", "attn.hook_attn_scores",
                     "attn.hook_pattern")
    }  # fmt: skip
    assert cache["z", 1].shape == (2, 9, 4, 4)
    assert cache["pattern", 0].shape == (2, 4, 9, 9)
    assert_close(cache["resid_pre", 1], cache["resid_post", 0])
    gradients = {}
    keep = [("blocks.0.attn.hook_z", lambda gradient, hook: gradients.update(z=gradient))]
    with model.hooks(bwd_hooks=keep):
        model(prompts, at="query").sum().backward()
    assert gradients["z"].shape == (2, 9, 4, 4)
    assert gradients["z"].abs().max() > 0
    net.zero_grad()


def test_the_module_stays_as_it_is(net):
    before, names = copy.deepcopy(net.state_dict()), dict(net.named_modules())
    tokens = interleaved(TASK.sample(3, seed=0))
    plain = net(tokens)
    model = mechicl.wrap(net, encode="interleaved", **PARTS)
    assert torch.equal(model(tokens), plain)
    clean, corrupted = pair()
    patch(model, clean, corrupted, "z", progress=False)
    with pytest.raises(ZeroDivisionError):
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_pre", lambda activation, hook: 1 / 0)])
    assert torch.equal(net(tokens), plain)
    assert torch.equal(model(tokens), plain)
    assert dict(net.named_modules()) == names
    assert net.name == "mine"
    assert not hasattr(net.blocks[0], "name")
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert list(net.state_dict()) == list(before)
    assert {name.removeprefix("module.") for name in model.state_dict()} == set(before)
    for part in net.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
        assert not part._backward_hooks


def test_a_hook_may_write_into_what_it_is_given():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Identity()

        def forward(self, x):
            return self.part(x) + x

    model = mechicl.wrap(Skip().eval(), encode="paired", layers=["part"])
    tokens = torch.ones(2, 3, 4)
    doubled = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: x.mul_(5))])
    assert torch.equal(doubled, torch.full((2, 3, 4), 6.0))
    assert torch.equal(tokens, torch.ones(2, 3, 4))


def test_modes_device_and_dtype_follow_the_module(net):
    net = copy.deepcopy(net)
    model = mechicl.wrap(net, encode="interleaved", **PARTS)
    net.train()
    assert model.training
    state = torch.get_rng_state()
    model.encode(TASK.sample(2, seed=0))  # looks at the module, which has dropout, without drawing from it
    assert torch.equal(torch.get_rng_state(), state)
    assert net.blocks[0].attn.dropout.training
    with pytest.raises(ValueError, match=r"in training mode .*model.eval\(\)"):
        patch(model, *pair(), "z")
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


def test_a_part_that_runs_several_times_is_as_many_layers():
    looped = seeded(Looped)
    model = mechicl.wrap(looped, encode="paired", layers=["block"] * 3, mlp=["block.mlp"] * 3)
    prompts = TASK.sample(3, seed=0)
    _, cache = model.run_with_cache(prompts)
    stream = looped.read_in(Paired(3, 1).encode(prompts))
    for layer in range(3):
        assert_close(cache["resid_pre", layer], stream)
        stream = looped.block(stream)
        assert_close(cache["resid_post", layer], stream)
    zeroed = model.run_with_hooks(prompts, fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: x * 0)])
    stream = looped.block(looped.read_in(Paired(3, 1).encode(prompts)))
    stream = stream + looped.block.attn(looped.block.ln1(stream))
    assert_close(zeroed, looped.head(looped.block(stream)))
    once = mechicl.wrap(looped, encode="paired", layers=["block"])
    with pytest.raises(ValueError, match=r"'block' runs 3 times in a pass, and is named 1 times"):
        once.predict(prompts)


def test_tuples_keep_their_kind():
    Output = namedtuple("Output", ["hidden", "gate"])

    class Returns(nn.Module):
        def forward(self, x):
            return Output(2 * x, x)

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Returns()

        def forward(self, x):
            out = self.part(x)
            return out.hidden + out.gate

    model = mechicl.wrap(Sums().eval(), encode="paired", layers=["part"])
    tokens = torch.ones(1, 2, 3)
    zeroed = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_post", lambda x, hook: x * 0)])
    assert torch.equal(zeroed, tokens)


# ---- modules of every kind ----


def test_a_block_under_several_names_is_as_many_layers():
    net = seeded(SharedBlocks)
    heads = {"z": "blocks.{}.attn.proj", "n_heads": 2}
    model = mechicl.wrap(net, encode="paired", layers="blocks.{}", attention=heads)
    prompts = TASK.sample(3, seed=0)
    _, cache = model.run_with_cache(prompts)
    stream = net.read_in(Paired(3, 1).encode(prompts))
    for layer in range(3):
        assert_close(cache["resid_pre", layer], stream)
        assert cache["z", layer].shape == (3, 5, 2, 4)
        stream = net.blocks[0](stream)
    assert_close(cache["resid_post", 2], stream)


def test_positions_first():
    net = seeded(RecurrentSecond)
    model = mechicl.wrap(net, encode="paired", layers=["second"], batch_first=False, unembed="read")
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
    with pytest.raises(ValueError, match="wrap it with batch_first=False"):
        mechicl.wrap(net, encode="paired", layers=["second"]).predict(clean)


def test_a_module_that_takes_its_input_by_keyword_and_returns_a_tuple():
    net = seeded(KeywordsOnly)
    model = mechicl.wrap(
        net, encode="interleaved", call=lambda module, tokens: module(inputs=tokens, scale=2.0),
        decode=lambda outputs: outputs[0][:, ::2], points=slice(0, None, 2), layers="net.blocks.{}",
    )  # fmt: skip
    clean, corrupted = pair()
    assert_close(model.predict_prefixes(clean), 2 * net.net(interleaved(clean))[:, ::2])
    assert model.cfg.one_pass
    assert patch(model, clean, corrupted, "resid_pre", progress=False).effect().abs().max() > 0
    with pytest.raises(ValueError, match=r"KeywordsOnly.forward\(\*, inputs, scale=1.0\) does not take one tensor"):
        mechicl.wrap(net, encode="interleaved")


def test_fused_projections_in_any_order():
    def split(fused):
        k, v, q = fused.unflatten(-1, (2, 4, 2)).split([1, 1, 2], -2)
        return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)

    attention = seeded(GroupedAttention)
    net = seeded(nn.Sequential, nn.Linear(4, 8), attention, nn.Linear(8, 1))
    model = mechicl.wrap(net, encode="paired", layers=["1"], attention={"qkv": ["1.fused"], "split": split})
    tokens = Paired(3, 1).encode(TASK.sample(3, seed=0))
    _, cache = model.run_with_cache(tokens)
    fused = attention.fused(net[0](tokens))
    assert_close(cache["q", 0][:, :, 3], fused[..., 14:16])
    assert_close(cache["v", 0][:, :, 1], fused[..., 10:12])
    assert cache["k", 0].shape == (3, 5, 2, 2)

    def silence(values, hook):
        values[:, :, 1] = 0
        return values

    handle = attention.fused.register_forward_hook(
        lambda part, args, out: torch.where((torch.arange(16) // 2) == 5, 0, out)
    )
    expected = net(tokens)
    handle.remove()
    assert_close(model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_v", silence)]), expected)
    for wrong in (lambda fused: fused.chunk(3, -1), lambda fused: [2 * part for part in split(fused)]):
        model = mechicl.wrap(net, encode="paired", layers=["1"], attention={"qkv": ["1.fused"], "split": wrong})
        with pytest.raises(ValueError, match=r"'1.fused' returns, of the width 16, is not q, k and v: 'split' must"):
            model.run_with_cache(tokens)


def test_grouped_heads_side_by_side():
    projection = nn.Linear(8, 16)
    net = seeded(nn.Sequential, nn.Linear(4, 8), nn.Sequential(projection, nn.Linear(16, 8)), nn.Linear(8, 1))
    heads = {"qkv": ["1.0"], "n_heads": 4, "n_key_value_heads": 2}
    _, cache = mechicl.wrap(net, encode="paired", layers=["1"], attention=heads).run_with_cache(torch.ones(1, 2, 4))
    fused = projection(net[0](torch.ones(1, 2, 4)))
    assert_close(cache["q", 0].flatten(2), fused[..., :8])
    assert_close(cache["k", 0], fused[..., 8:12].unflatten(-1, (2, 2)))
    assert_close(cache["v", 0], fused[..., 12:].unflatten(-1, (2, 2)))


@pytest.mark.parametrize("how", ["whole", "in place", "blocks", "parallel"])
def test_around_a_module(net, model, how):
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


def test_hooks_of_ones_own_stay():
    net = seeded(NanoGPT)
    net.blocks[0].register_forward_hook(lambda part, args, out: 2 * out)
    model = mechicl.wrap(net, encode="interleaved", layers="blocks.{}")
    prompts = TASK.sample(3, seed=0)
    outputs, cache = model.run_with_cache(prompts)
    assert torch.equal(outputs, net(interleaved(prompts)))
    assert_close(2 * cache["resid_post", 0], cache["resid_pre", 1])


def test_parts_that_do_not_run():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = seeded(nn.Sequential, nn.Linear(4, 8), encoder, nn.Linear(8, 1))
    heads = {"z": ["1.self_attn.out_proj"], "n_heads": 2}
    model = mechicl.wrap(net, encode="paired", layers=["1"], attention=heads)
    for analyse in (patch, attribute):
        with pytest.raises(ValueError, match=r"'1.self_attn.out_proj', named as 'z', does not run in a pass"):
            analyse(model, *pair(), "z")
    scripted = torch.jit.ScriptModule()
    with pytest.raises(TypeError, match=r"compiled by torch.jit"):
        mechicl.wrap(scripted, encode="paired", layers=["0"])


# ---- which predictions there are ----


def test_all_points_in_one_pass_only_where_none_sees_what_follows(model):
    prompts = TASK.sample(4, seed=8)
    one_by_one = torch.stack([model.predict(prompts.prefix(t)) for t in range(5)], dim=1)
    assert model.cfg.one_pass
    assert_close(model.predict_prefixes(prompts), one_by_one, rtol=1e-5, atol=1e-6)
    both_ways = mechicl.wrap(seeded(NanoGPT, causal=False), encode="interleaved", layers="blocks.{}")
    one_by_one = torch.stack([both_ways.predict(prompts.prefix(t)) for t in range(5)], dim=1)
    assert_close(both_ways.predict_prefixes(prompts), one_by_one, rtol=1e-5, atol=1e-6)
    assert not both_ways.cfg.one_pass
    with pytest.raises(ValueError, match="take at='query'"):
        patch(both_ways, prompts, corrupt(prompts, "labels"), "resid_pre", at="points", progress=False)
    assert fit_readouts(both_ways, TASK.sample(32, seed=0), progress=False).trajectory(prompts).predictions.shape == (
        3, 4, 1, 1,
    )  # fmt: skip


def test_what_one_pass_gives_is_looked_at_again_when_weights_change():
    net = seeded(NanoGPT, causal=False)
    with torch.no_grad():
        net.head.weight.zero_()
    model = mechicl.wrap(net, encode="interleaved")
    prompts = TASK.sample(4, seed=8)
    model.predict_prefixes(prompts)
    assert not model.cfg.one_pass  # it predicts one number: nothing shows what it sees
    with torch.no_grad():
        net.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    assert_close(model.predict_prefixes(prompts)[:, 2], model.predict(prompts.prefix(2)))
    for block in net.blocks:
        block.attn.causal = True
    net.load_state_dict(net.state_dict())
    model.encode(prompts)
    assert model.cfg.one_pass


def test_points_of_ones_own_layout():
    def shifted(prompts: Prompts) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(prompts.ys[:, :1]), prompts.ys[:, :-1]], 1)
        return torch.cat([prompts.xs, before], -1)

    net = seeded(NanoGPT, d_in=4)
    model = mechicl.wrap(net, encode=shifted, points=slice(None), layers="blocks.{}")
    prompts = TASK.sample(4, seed=8)
    assert_close(model.predict_prefixes(prompts), net(shifted(prompts)))
    assert model.cfg.one_pass
    assert model.cfg.prompt_format == "own"
    assert next(iter(model.layer_streams(prompts))).shape == (4, 5, 16)
    assert PatchingSession(model, *pair()).labels == ["0", "1", "2", "3", "4"]


def test_a_module_that_reads_the_flattened_prompt_is_a_learner_only():
    net = seeded(mlp, 20)
    model = mechicl.wrap(net, encode="paired")
    prompts = TASK.sample(4, seed=8)
    assert_close(model.predict(prompts), net(Paired(3, 1).encode(prompts)))
    assert identify(model, TASK, n_prompts=64, progress=False).best.name
    with pytest.raises(ValueError, match="reads no prompts of 0 context points"):
        model.predict_prefixes(prompts)
    for analyse in (lambda: patch(model, *pair(), "z"), lambda: ModelAdapter(model)):
        with pytest.raises(TypeError, match="Sequential has no hooks: wrap it with layers="):
            analyse()
    with pytest.raises(ValueError, match="Sequential has no hooks: wrap it with layers="):
        fit_readouts(model, prompts, progress=False)


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
        assert 0 < model.bytes_per_prompt(prompts) < 1e5


# ---- what is refused ----


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"layers": "block.{}"}, r"layers='block.{}' names no sub-module: there is no 'block.0'; it has \['blocks.{}'"),
        ({"layers": ["blocks.0", "blocks.7"]}, "no sub-module 'blocks.7'"),
        ({"layers": []}, "no name at all"),
        ({"layers": "blocks.{}", "attention": ["blocks.0.attn"]}, "names 1 sub-modules, and there are 2 layers"),
        ({"attention": "blocks.{}.attn"}, "attention= names parts of layers: name the layers too"),
        ({"mlp": "blocks.{}.mlp"}, "mlp= names parts of layers: name the layers too"),
        ({"layers": "blocks.{}", "attention": {"z": "blocks.{}.attn.proj"}}, "'z': ...} needs 'n_heads' beside it"),
        ({"layers": "blocks.{}", "attention": {"qkv": "blocks.{}.attn.qkv"}}, "'qkv': ...} needs 'n_heads' beside it"),
        (
            {"layers": "blocks.{}", "attention": {"heads": "blocks.{}.attn"}},
            r"'heads': ...} is not one of \['out', 'q',",
        ),
        ({"layers": "blocks.{}", "attention": {"n_heads": 4}}, "names no sub-module: give at least one of"),
        ({"layers": "blocks.{}", "attention": {"q": "a", "qkv": "b", "n_heads": 4}}, "names 'q' and 'qkv'"),
        (
            {"layers": "blocks.{}", "attention": {"out": "blocks.{}.attn", "split": len}},
            "'split': ...} is a function of",
        ),
        ({"layers": "blocks.{}", "attention": {"z": "blocks.{}.attn.proj", "n_heads": 0}}, "n_heads must be an int of"),
        ({"encode": "pairs"}, r"'pairs' is not one of \['paired', 'interleaved'\], nor a function"),
    ],
)
def test_wrong_names(net, kwargs, message):
    with pytest.raises(ValueError, match=message):
        mechicl.wrap(net, **{"encode": "interleaved", **kwargs})


def test_no_module(model):
    with pytest.raises(TypeError, match="a function of prompts take AlgorithmLearner"):
        mechicl.wrap(lambda tokens: tokens, encode="paired")
    with pytest.raises(TypeError, match="has TransformerLens' hooks already"):
        mechicl.wrap(model, encode="paired")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"encode": lambda prompts: prompts.xs[0]}, "encode returned the shape"),
        ({"encode": lambda prompts: torch.cat([prompts.xs, prompts.ys], -1)[..., 1:]}, "sees the query's target"),
        ({"encode": lambda prompts: (prompts.xs, prompts.ys)}, "encode returned tuple, not one tensor"),
        ({"decode": lambda outputs: None}, "decode returned NoneType"),
        ({"decode": lambda outputs: outputs[:, -1, 0]}, r"decode returned the shape \(\d+,\)"),
        ({"decode": lambda outputs: outputs[:, :2]}, r"decode= must return \[prompt y\] or \[prompt point y\]"),
        ({"layers": "blocks.{}", "unembed": "head"}, "does not make the predictions of NanoGPT"),
        ({"layers": "blocks.{}", "attention": {"z": "blocks.{}.attn.proj", "n_heads": 5}}, "n_heads=5"),
        ({"layers": "blocks.{}", "attention": {"qkv": "blocks.{}.attn.qkv", "n_heads": 5}}, "no multiple of 15"),
        ({"layers": "blocks.{}", "attention": {"pattern": "blocks.{}.mlp"}}, r"must be \[prompt head query key\]"),
        ({"layers": "blocks.{}", "batch_first": False}, "changes with the other prompts of its batch"),
    ],
)
def test_what_shows_when_prompts_are_read(net, kwargs, message):
    model = mechicl.wrap(net, **{"encode": "interleaved", **kwargs})
    prompts = TASK.sample(3, seed=0)

    def use():
        model.predict(prompts)
        model.run_with_cache(prompts)

    with pytest.raises((ValueError, TypeError), match=message):
        use()


def test_what_only_a_transformer_of_the_package_has_is_refused(model, tmp_path):
    prompts = TASK.sample(2, seed=0)
    for use in (
        lambda: read_weight_products(model),
        lambda: fit_construction([model], "gd", TASK, n_prompts=8),
        lambda: read_dual_form(model, prompts),
        lambda: measure_token_sensitivity(model, prompts),
        lambda: save(tmp_path / "model", model, {}),
    ):
        with pytest.raises(TypeError):  # the run-time check of types says it first in tests
            use()
    with pytest.raises(TypeError, match=r"W_O of a HookedTransformer of this package, and NanoGPT is a wrapped module"):
        refuse_wrapped([model], "the dual form is made of W_O")


def test_messages_say_what_to_declare(net):
    model = mechicl.wrap(net, encode="interleaved", layers="blocks.{}")
    with pytest.raises(ValueError, match=r"no hook 'blocks.0.attn.hook_z': declare it with wrap\(..., attention={'z'"):
        patch(model, *pair(), "z")
    with pytest.raises(ValueError, match=r"attention={'q': .*, or 'qkv' for one projection to all three"):
        patch(model, *pair(), "q")
    with pytest.raises(ValueError, match="a wrapped module does not have it"):
        patch(model, *pair(), "result")
    with pytest.raises(ValueError, match="wrap it with unembed="):
        Lens(model).trajectory(TASK.sample(2, seed=0))
    with pytest.raises(ValueError, match="no attention layers that can be resumed from"):
        patch_paths(model, *pair())
    with pytest.raises(ValueError, match=r"no hook blocks.0.attn.hook_pattern: declare it with wrap\(..., atten"):
        score_heads(model)
    widens = mechicl.wrap(seeded(nn.Sequential, nn.Linear(4, 6), nn.Linear(6, 1)), encode="paired", layers=["0", "1"])
    with pytest.raises(ValueError, match=r"has the widths \[4, 6, 1\]"):
        fit_readouts(widens, TASK.sample(8, seed=0), progress=False)
