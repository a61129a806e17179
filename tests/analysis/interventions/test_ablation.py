"""Ablation against plain loops: methods, pairs, directions, positions."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mechicl.analysis.interventions import ablate
from mechicl.analysis.interventions.corruptions import derangement
from tests.analysis.interventions import oracles
from tests.analysis.interventions.oracles import EXACT, SINGLE, flat, hook_name, model_of, recorded, run

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


def loop(model, prompts, component, axes, method, reference=None, at="query") -> Tensor:
    values = [
        replacement(model, prompts, hook_name(component, layer), method, reference)
        for layer in range(model.cfg.n_layers)
    ]
    predictions = []
    for cell in oracles.cells(model, component, axes, values[0]):
        where = {axis: i for axis, i in cell.items() if axis != "layer"}
        predictions.append(
            run(model, prompts, [oracles.putting(component, cell["layer"], where, values[cell["layer"]])], at)
        )
    return torch.stack(predictions)


@pytest.mark.parametrize(
    ("kind", "method"), [("gpt", "mean"), ("gpt", "zero"), ("gpt", "resample"), ("looped", "zero"), ("ids", "mean")]
)
def test_every_cell_is_one_hooked_run(kind, method):
    model = model_of(kind)
    prompts = oracles.inputs(model, 0, 4)
    sweeps = [("z", ("layer", "head")), ("z", ("layer", "pos", "head")), ("attn_out", ("layer",))]
    sweeps += [("pattern", ("layer", "head"))]
    if method == "mean":
        sweeps += [("attn_scores", ("layer", "head"))]  # masked keys stay masked
    for component, axes in sweeps:
        swept = ablate(model, prompts, component, axes, method=method)
        assert_close(flat(swept), loop(model, prompts, component, axes, method), **EXACT)
        assert_close(swept.unpatched, run(model, prompts), **EXACT)
        assert swept.source is None


def test_means_may_be_taken_over_other_prompts():
    reference = oracles.inputs(MODEL, 7, 9)
    swept = ablate(MODEL, PROMPTS, reference=reference)
    expected = loop(MODEL, PROMPTS, "z", ("layer", "head"), "mean", reference)
    assert_close(flat(swept), expected, **EXACT)


def test_the_seed_chooses_whom_to_resample_from():
    a, b, again = (ablate(MODEL, PROMPTS, method="resample", seed=seed).values["loss"] for seed in (0, 3, 0))
    assert_close(a, again, atol=0, rtol=0)
    assert not torch.equal(a, b)


@pytest.mark.parametrize(("kind", "method"), [("linear", "zero"), ("bridge", "mean")])
def test_pairs_are_two_hooks_in_one_run(kind, method):
    model = oracles.shared_bridge() if kind == "bridge" else model_of(kind, n_layers=3)
    prompts = oracles.bridge_pair()[0] if kind == "bridge" else oracles.inputs(model, 0, 4)
    swept = ablate(model, prompts, pairs=True, method=method)
    assert swept.axes == ("layer", "head", "layer_2", "head_2")
    assert swept.predictions is not None
    values = [replacement(model, prompts, hook_name("z", layer), method) for layer in range(3)]
    places = [(layer, head) for layer in range(3) for head in range(2)]
    tolerance = SINGLE if kind == "bridge" else EXACT
    for first in places[::2]:
        for second in places:
            hooks = [oracles.putting("z", layer, {"head": head}, values[layer]) for layer, head in {first, second}]
            assert_close(swept.predictions[(*first, *second)], run(model, prompts, hooks), **tolerance)


def test_pairs_of_some_heads_and_their_loss():
    swept = ablate(MODEL, PROMPTS, pairs=True, only={"layer": [1, 0], "head": [1]}, keep_predictions=False)
    assert swept.predictions is None
    assert swept.indices == ((1, 0), (1,), (1, 0), (1,))
    whole = ablate(MODEL, PROMPTS, pairs=True)
    assert_close(swept.values["loss"], whole.values["loss"][[1, 0]][:, [1]][:, :, [1, 0]][:, :, :, [1]], **EXACT)
    assert len(swept.to_patching_result().index_df) == 4


@pytest.mark.parametrize(
    ("method", "component"), [("mean", "resid_post"), ("zero", "attn_out"), ("resample", "resid_post")]
)
def test_a_direction_is_ablated_as_by_hand(method, component):
    directions = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    swept = ablate(MODEL, PROMPTS, component, ("layer", "pos"), method=method, directions=directions)
    assert swept.axes == ("layer", "pos", "direction")
    assert swept.shape == (2, 5, 2)
    assert swept.predictions is not None
    for layer in range(2):
        name = hook_name(component, layer)
        values = replacement(MODEL, PROMPTS, name, method)
        for d, direction in enumerate(directions.double()):
            for pos in (0, 3):

                def project(x, hook, pos=pos, direction=direction, values=values):
                    x = x.clone()
                    for i in range(len(x)):
                        coordinate = (x[i, pos] - values[i, pos]) @ direction / (direction @ direction)
                        x[i, pos] = x[i, pos] - coordinate * direction
                    return x

                expected = run(MODEL, PROMPTS, [(name, project)])
                assert_close(swept.predictions[layer, pos, d], expected, **EXACT)
    assert len(swept.to_dataframe()) == 20


def test_a_bridge_and_all_positions():
    model, tokens = oracles.shared_bridge(), oracles.bridge_pair()[0]
    swept = ablate(model, tokens, "mlp_out", ("layer", "pos"), at="positions")
    assert_close(flat(swept), loop(model, tokens, "mlp_out", ("layer", "pos"), "mean", at="positions"), **SINGLE)
    assert oracles.no_hook_left(model)


def test_one_prompt_is_ablated_with_a_reference():
    one = ablate(MODEL, PROMPTS[:1], reference=PROMPTS)
    assert_close(one.effect(), ablate(MODEL, PROMPTS).effect()[..., :1], **EXACT)
