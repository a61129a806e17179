"""Ablation and direct paths against plain loops, and of bridges against plain models."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mechicl.analysis.interventions import Replacement, ablate, patch_paths
from mechicl.analysis.interventions.corruptions import derangement
from tests.analysis.interventions import oracles
from tests.analysis.interventions.oracles import EXACT, SINGLE, flat, hook_name, model_of, pair, recorded, run
from tests.families import open_family, place_of, putting, token_ids

MODEL = model_of("gpt")
PROMPTS = oracles.inputs(MODEL, 0, 4)


def replacement(model, prompts, name: str, method: str, reference=None) -> Tensor:
    activation = recorded(model, prompts, name)
    if method == "zero":
        return torch.zeros_like(activation)
    if method == "resample":
        return activation[derangement(len(activation), torch.Generator().manual_seed(0))]
    origin = activation if reference is None else recorded(model, reference, name)
    return torch.stack([origin.mean(0)] * len(activation))


def loop(model, prompts, component, axes, method, reference=None) -> Tensor:
    values = [
        replacement(model, prompts, hook_name(component, layer), method, reference)
        for layer in range(model.cfg.n_layers)
    ]
    predictions = []
    for cell in oracles.cells(model, component, axes, values[0]):
        where = {axis: i for axis, i in cell.items() if axis != "layer"}
        hook = oracles.putting(component, cell["layer"], where, values[cell["layer"]])
        predictions.append(run(model, prompts, [hook]))
    return torch.stack(predictions)


@pytest.mark.parametrize(("kind", "method"), [
    ("gpt", "mean"), ("gpt", "zero"), ("gpt", "resample"), ("looped", "zero"), ("ids", "mean"), ("bridge", "mean"),
])  # fmt: skip
def test_every_cell_is_one_hooked_run(kind, method):
    model = oracles.shared_bridge() if kind == "bridge" else model_of(kind)
    prompts, tolerance = oracles.inputs(model, 0, 4), SINGLE if kind == "bridge" else EXACT
    sweeps = [("z", ("layer", "head")), ("z", ("layer", "pos", "head")), ("attn_out", ("layer",))]
    sweeps += [("pattern", ("layer", "head"))]
    if method == "mean":
        sweeps += [("attn_scores", ("layer", "head"))]  # masked keys stay masked
    for component, axes in sweeps:
        swept = ablate(model, prompts, component, axes, method=method)
        assert_close(flat(swept), loop(model, prompts, component, axes, method), **tolerance)
        assert_close(swept.unpatched, run(model, prompts), **tolerance)
        assert swept.source is None
    assert oracles.no_hook_left(model)


def test_means_may_be_taken_over_other_prompts():
    reference = oracles.inputs(MODEL, 7, 9)
    swept = ablate(MODEL, PROMPTS, method=Replacement("mean", reference))
    expected = loop(MODEL, PROMPTS, "z", ("layer", "head"), "mean", reference)
    assert_close(flat(swept), expected, **EXACT)


# ---- paths ----
def by_hand(model, stream, layer, receiver):
    """Queries, keys or values of a stream, by formula."""
    block = model.blocks[layer]
    if model.cfg.normalization_type is not None:
        centred = stream - stream.mean(-1, keepdim=True)
        stream = centred / (centred.pow(2).mean(-1, keepdim=True) + model.cfg.eps).sqrt()
        if model.cfg.normalization_type == "LN":
            stream = stream * block.ln1.w + block.ln1.b
    out = torch.stack([stream @ getattr(block.attn, f"W_{receiver.upper()}")[h] for h in range(model.cfg.n_heads)], 2)
    return out + getattr(block.attn, f"b_{receiver.upper()}") if model.cfg.attn_bias else out


@pytest.mark.parametrize(("kind", "receiver"), [*(("gpt", by) for by in "qkv"), ("looped", "q"), ("full", "k")])
@torch.no_grad()
def test_paths_by_hand(kind, receiver):
    model = model_of(kind, n_layers=3, n_context=1)
    clean, corrupted = pair(model)
    for direction in ("denoising", "noising")[: 1 + (kind == "gpt" and receiver == "q")]:
        into, source = (corrupted, clean) if direction == "denoising" else (clean, corrupted)
        swept = patch_paths(model, clean, corrupted, receiver, direction=direction)
        assert swept.predictions is not None
        assert swept.shape == (3, 2, 3, 2)
        unpatched = run(model, into)
        for layer, head, to, other in itertools.product(range(3), range(2), range(3), range(2)):
            expected = unpatched
            if to > layer:
                written = [
                    model.cfg.damping * recorded(model, prompts, hook_name("z", layer))[:, :, head]
                    @ model.blocks[layer].attn.W_O[head]
                    for prompts in (source, into)
                ]  # fmt: skip
                stream = recorded(model, into, hook_name("resid_pre", to)) + written[0] - written[1]
                received = by_hand(model, stream, to, receiver)

                def put(activation, hook, received=received, other=other):
                    out = activation.clone()
                    out[:, :, other] = received[:, :, other]
                    return out

                expected = run(model, into, [(hook_name(receiver, to), put)])
            assert_close(swept.predictions[layer, head, to, other], expected, **EXACT)


def test_hooks_of_the_user_take_effect():
    model = model_of("gpt", n_layers=3)
    clean, corrupted = pair(model)
    model.add_hook(hook_name("resid_pre", 1), lambda tensor, *, hook: 2 * tensor + tensor.roll(1, 2))
    swept = patch_paths(model, clean, corrupted, "k")
    before = recorded(model, corrupted, hook_name("resid_post", 0))
    z = [recorded(model, prompts, hook_name("z", 0))[:, :, 1] for prompts in (clean, corrupted)]
    stream = before + (z[0] - z[1]) @ model.blocks[0].attn.W_O[1].detach()
    received = by_hand(model, 2 * stream + stream.roll(1, 2), 1, "k").detach()

    def put(activation, hook):
        out = activation.clone()
        out[:, :, 0] = received[:, :, 0]
        return out

    assert swept.predictions is not None
    expected = run(model, corrupted, [(hook_name("k", 1), put)])
    assert_close(swept.predictions[0, 1, 1, 0], expected, **EXACT)
    model.reset_hooks()


@pytest.mark.parametrize("family", ["Llama", "OPT", "GPT-J", "StableLM", "Granite"])
def test_paths_of_bridges_are_those_of_the_plain_model(family):
    """The write of a head goes through the plain model's own modules."""
    model, plain = open_family(family)
    clean, corrupted = token_ids(0), token_ids(1)
    swept = patch_paths(model, clean, corrupted, progress=False).predictions
    assert swept is not None
    z, streams = (
        [recorded(model, corrupted, hook_name(component, layer)) for layer in range(3)]
        for component in ("z", "resid_pre")
    )
    for layer, head, to, other in [(0, 0, 1, 1), (0, 1, 2, 0), (1, 1, 2, 1)]:
        new_z = z[layer].clone()
        new_z[:, :, head] = recorded(model, clean, hook_name("z", layer))[:, :, head]
        out, query = place_of(model, plain, "z", layer), place_of(model, plain, "q", to)
        assert out is not None
        assert query is not None
        write, block = plain.get_submodule(out[0]), plain.get_submodule(query[0].split(f".{to}.")[0])[to]
        with torch.no_grad():
            change = write(new_z.flatten(2)) - write(z[layer].flatten(2))
            change = change * getattr(plain.config, "residual_multiplier", 1.0)  # Granite's
            normed = block.get_submodule(model.blocks[to].ln1.name)(streams[to] + change)
            received = plain.get_submodule(query[0])(normed).unflatten(-1, z[to].shape[2:])

        def put(activation: torch.Tensor, received: Any = received, other: int = other) -> None:
            activation.view(received.shape)[:, :, other] = received[:, :, other]

        with torch.no_grad(), putting(plain, query, put):
            expected = plain(corrupted).logits[:, -1]
        assert_close(swept[layer, head, to, other], expected, **SINGLE)
