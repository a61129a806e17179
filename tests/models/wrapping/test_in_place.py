"""Modules that write into their tensors in place, against the same module without in-place operations."""

import operator
from functools import partial

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.testing import assert_close

import mechicl
from mechicl.analysis import ablate, attribute, fit_readouts, patch
from mechicl.models import WrappedModel
from mechicl.tasks import LinearRegression
from tests.models.modules import seeded
from tests.models.wrapping import test_wrapped
from tests.models.wrapping.test_wrapped import AXES, interleaved, pair, predictions, replaced, seen

pytestmark = pytest.mark.filterwarnings("ignore:the model's loss")  # they are not trained


def into_slice(x: Tensor, change: Tensor) -> Tensor:
    x[:, :] = x + change
    return x


def into_view(x: Tensor, change: Tensor) -> Tensor:
    x.view(-1).add_(change.expand_as(x).reshape(-1))
    return x


WRITES = {
    "+=": operator.iadd,
    "add_": Tensor.add_,
    "copy_": lambda x, change: x.copy_(x + change),
    "slice": into_slice,
    "view": into_view,
    "out=": lambda x, change: torch.add(x, change, out=x) if not x.requires_grad else x.add_(change),
}
PARTS = {
    "layers": "blocks.{}", "mlp": "blocks.{}.mlp", "resid_mid": "blocks.{}.ln2", "unembed": ["act", "head"],
    "attention": {"out": "blocks.{}.attn", "qkv": "blocks.{}.attn.qkv", "pattern": "blocks.{}.attn.softmax",
                  "scores": "blocks.{}.attn.softmax", "z": "blocks.{}.attn.proj", "n_heads": 4},
}  # fmt: skip
PLACES = {component: place for component, place in test_wrapped.PLACES.items() if component not in "qkv"}
PLACES["pattern"] = ("blocks.{}.attn.softmax", "out")


class Attention(nn.Module):
    def __init__(self, write, into: str):
        super().__init__()
        self.write, self.saved = write, write if into == "stream" else operator.add  # what autograd saves
        self.qkv, self.proj, self.softmax = nn.Linear(8, 24), nn.Linear(8, 8), nn.Softmax(-1)

    def forward(self, x):
        joint = self.write(self.qkv(x), torch.tensor(0.1))
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in joint.chunk(3, -1))
        scores = (q @ k.mT).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
        pattern = self.saved(self.softmax(scores), torch.tensor(0.01)).tril()
        self.write(scores, torch.tensor(1.0))
        z = (pattern @ v).transpose(1, 2).flatten(-2)
        out = self.proj(z)
        self.saved(z.detach(), torch.tensor(1.0))
        return out


class Block(nn.Module):
    def __init__(self, write, into: str):
        super().__init__()
        self.write, self.into = write, into
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(8), Attention(write, into), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=write is not operator.add), nn.Linear(16, 8))

    def forward(self, x):
        for update in (lambda x: self.attn(self.ln1(x)), lambda x: self.mlp(self.ln2(x))):
            x = self.write(x, update(x)) if self.into == "stream" else self.write(update(x), x)
        return x


class Net(nn.Module):
    """It writes into its tokens, its streams or their updates, queries, keys, values, scores and patterns.

    With `discards` its caller ignores what a block returns: the block has changed the stream itself.
    """

    def __init__(self, write=operator.add, into="stream", discards=False):
        super().__init__()
        self.write, self.into, self.discards = write, into, discards
        self.read_in, self.act, self.head = nn.Linear(3, 8), nn.ReLU(write is not operator.add), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block(write, into) for _ in range(3))

    def forward(self, tokens):
        x = self.read_in(self.write(tokens, torch.tensor(0.5)))
        for block in self.blocks:
            x = x if self.into == "update" else self.write(x, torch.tensor(0.1))
            returned = block(x)
            x = x if self.discards else returned
        return self.head(self.act(x))


def wrapped(write, into="stream", discards=False) -> WrappedModel:
    return mechicl.wrap(seeded(Net, write=write, into=into, discards=discards), encode="interleaved", **PARTS)


plain = partial(wrapped, operator.add)
KINDS = [(name, into, False) for name in WRITES for into in ("stream", "update")] + [("add_", "stream", True)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize(("name", "into", "discards"), KINDS)
def test_what_is_recorded_is_what_the_part_received_or_returned(name, into, discards, mode):
    model, prompts = wrapped(WRITES[name], into, discards), pair()[0]
    tokens = interleaved(prompts)
    before = tokens.clone()
    with mode():
        output, cache = model.run_with_cache(tokens)
        again = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_pre", lambda x, hook: None)])
    net = plain(into).module
    assert_close(output, net(before), rtol=0, atol=1e-6)
    assert torch.equal(again, output)
    assert torch.equal(tokens, before)
    assert len(cache) == 3 * (len(PLACES) + 3)
    for component, (part, side) in PLACES.items():
        for layer in range(3):
            expected = seen(net, before, part.format(layer), side)
            assert_close(cache[component, layer].reshape(expected.shape), expected, rtol=0, atol=1e-6)
    joint = torch.cat([cache[part, 1].flatten(-2) for part in "qkv"], -1)
    assert_close(joint, seen(net, before, "blocks.1.attn.qkv", "out"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("component", [*PLACES, "q", "v"])
@pytest.mark.parametrize(("name", "into", "discards"), [KINDS[0], KINDS[1], KINDS[-1]])
def test_interventions_are_those_on_the_module_without_writes(name, into, discards, component):
    model, reference, prompts = wrapped(WRITES[name], into, discards), plain(into), pair(3)
    axes = AXES.get(component, ("layer", "pos"))
    swept, expected = (patch(each, *prompts, component, axes, progress=False) for each in (model, reference))
    assert_close(predictions(swept), predictions(expected), rtol=0, atol=1e-6)
    assert (predictions(swept) - swept.unpatched).abs().max() > 1e-5


@pytest.mark.parametrize("name", WRITES)
def test_analyses_of_streams_and_gradients(name):
    prompts = LinearRegression(x_dim=3, n_context=4).sample(64, seed=1)
    model, reference = wrapped(WRITES[name]), plain()
    read = [list(each.layer_streams(prompts, "positions")) for each in (model, reference)]
    for ours, expected in zip(*read, strict=True):
        before = ours.clone()
        assert_close(ours, expected, rtol=0, atol=1e-6)
        model.read_out(ours)
        assert torch.equal(ours, before)
    fitted = [fit_readouts(each, prompts, progress=False).trajectory(prompts) for each in (model, reference)]
    assert_close(fitted[0].predictions, fitted[1].predictions, rtol=0, atol=1e-4)
    swept = [ablate(each, prompts[:4], "z", progress=False) for each in (model, reference)]
    assert_close(predictions(swept[0]), predictions(swept[1]), rtol=0, atol=1e-6)
    differentiable = wrapped(WRITES[name], "update"), plain("update")
    effects = [attribute(each, *pair(), component="resid_pre", axes=("layer", "pos")) for each in differentiable]
    assert_close(effects[0].values, effects[1].values, rtol=0, atol=1e-6)
    assert all(effect.abs().max() > 1e-4 for effect in effects[0].values.values())


def test_a_tensor_that_a_hook_puts_in_stays_the_callers():
    model, tokens = wrapped(WRITES["+="]), interleaved(pair()[0])
    kept = {"blocks.1.hook_resid_pre": torch.ones(5, 9, 8), "blocks.0.attn.hook_q": torch.ones(5, 9, 4, 2)}
    runs = [model.run_with_hooks(tokens, fwd_hooks=[(n, lambda x, hook: kept[hook.name]) for n in kept]) for _ in "12"]
    assert torch.equal(*runs)
    assert all((tensor == 1).all() for tensor in kept.values())
    expected = replaced(plain().module, tokens, "blocks.1", "in", torch.ones_like)
    assert_close(runs[0], expected, rtol=0, atol=1e-6)
