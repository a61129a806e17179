"""Patching against a plain loop of hooked runs."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformer_lens.utilities import get_act_name

from mechicl.analysis.circuits import find_circuit
from mechicl.analysis.interventions import (
    InterventionSweep,
    Replacement,
    ablate,
    attribute,
    next_token_loss,
    patch,
    patch_paths,
    squared_error,
)
from mechicl.tasks import RepeatedTokens
from tests.analysis.interventions import oracles
from tests.analysis.interventions.oracles import EXACT, SINGLE, flat, hook_name, model_of, pair, run
from tests.strategies import configs, random_model

SWEEPS = [
    ("resid_pre", ("layer", "pos")), ("resid_mid", ("layer", "pos")), ("resid_post", ("pos", "layer")),
    ("resid_pre", ("layer",)), ("attn_out", ("layer", "pos")), ("mlp_out", ("layer", "pos")),
    ("mlp_out", ("layer",)), ("q", ("layer", "pos", "head")), ("k", ("layer", "pos", "head")),
    ("v", ("head", "layer", "pos")), ("k", ("layer", "head")), ("z", ("layer", "pos", "head")),
    ("z", ("layer", "head")), ("z", ("layer", "pos")), ("result", ("layer", "pos", "head")),
    ("attn_scores", ("layer", "head", "query")), ("attn_scores", ("layer", "key")), ("pattern", ("layer", "head")),
    ("pattern", ("layer", "query", "key")), ("pattern", ("query", "layer")), ("pre", ("layer", "neuron")),
    ("post", ("layer", "pos", "neuron")), ("post", ("layer", "pos")),
]  # fmt: skip
ON_REQUEST = {
    "read by head": [
        *((component, ("layer", "pos", "head")) for component in ("q_input", "k_input", "v_input")),
        ("v_input", ("layer", "head")),
        ("mlp_in", ("layer", "pos")),
        ("mlp_in", ("layer",)),
    ],
    "read by heads": [("attn_in", ("layer", "pos", "head")), ("attn_in", ("layer", "head"))],
}
MODEL = model_of("gpt")
CLEAN, CORRUPTED = pair(MODEL, 4)


def check_against_loop(
    model: Any, clean: Any, corrupted: Any, component: str, axes: Any, at: Any = "query", **tolerance: Any
) -> None:
    swept = patch(model, clean, corrupted, component, axes, at=at)
    assert_close(
        flat(swept), oracles.loop_patch(model, corrupted, clean, component, axes, at)[0], **(tolerance or EXACT)
    )


@pytest.mark.parametrize("kind", list(oracles.MODELS))
def test_every_cell_is_one_hooked_run(kind):
    model = model_of(kind)
    clean, corrupted = pair(model)
    tolerance = SINGLE if kind == "float32" else EXACT
    # all of them on one model, every fourth one on the others
    every_fourth = SWEEPS[list(oracles.MODELS).index(kind) % 4 :: 4]
    for component, axes in SWEEPS if kind == "gpt" else ON_REQUEST.get(kind, []) + every_fourth:
        if get_act_name(component, 0) not in model.hook_dict:
            continue
        for direction in ("denoising", "noising")[: 1 + (axes == ("layer", "head"))]:
            into, source = (corrupted, clean) if direction == "denoising" else (clean, corrupted)
            swept = patch(model, clean, corrupted, component, axes, direction=direction)
            expected, every = oracles.loop_patch(model, into, source, component, axes)
            assert swept.predictions is not None
            assert swept.predictions.shape == (*swept.shape, *expected.shape[1:])
            assert swept.predictions.dtype == model.cfg.torch_dtype
            assert not swept.predictions.requires_grad
            assert_close(flat(swept), expected, **tolerance)
            assert_close(swept.unpatched, run(model, into), **tolerance)
            assert_close(swept.source, run(model, source), **tolerance)
            assert swept.axes == axes
            assert [max(places) for places in swept.indices] == [max(cell[axis] for cell in every) for axis in axes]


@pytest.mark.parametrize(("kind", "at"), [
    *((kind, "query") for kind in ("gpt2", "llama")),
    ("gpt", "points"),
    *((kind, "positions") for kind in ("gpt", "full", "ids", "gpt2")),
])  # fmt: skip
def test_other_models_and_other_predictions(kind, at):
    foreign = kind in ("gpt2", "llama")
    model = oracles.shared_bridge(kind) if foreign else model_of(kind)
    inputs = oracles.bridge_pair() if foreign else pair(model)
    for component, axes in [("z", ("layer", "pos")), ("resid_post", ("layer",)), ("k", ("layer", "head"))]:
        check_against_loop(model, *inputs, component, axes, at, **(SINGLE if foreign else EXACT))
    assert oracles.no_hook_left(model)


@pytest.mark.parametrize("over", ["outputs", "values"])
def test_cells_of_one_position_with_momentum(over):
    model = model_of("gpt", momentum=0.6, momentum_over=over)
    for component in ("attn_out", "q", "k"):
        check_against_loop(model, *pair(model), component, ("layer", "pos"))
    check_against_loop(model, *pair(model), "pattern", ("layer", "query"))


@settings(max_examples=5)
@given(configs(), st.data())
def test_any_config(cfg, data):
    if cfg.n_layers:
        model = random_model(cfg.replace(dtype="float64"), data.draw(st.integers(0, 9)), scale=0.2).eval()
        known = [(c, axes) for c, axes in SWEEPS if get_act_name(c, 0) in model.hook_dict]
        sweep = data.draw(st.sampled_from(known))
        check_against_loop(model, *pair(model, 2), *sweep, atol=1e-9, rtol=1e-7, equal_nan=True)


def test_some_layers_positions_and_heads_or_one_of_them():
    axes = ("layer", "pos", "head")
    whole = patch(MODEL, CLEAN, CORRUPTED, "z", axes).predictions
    assert whole is not None
    chosen = patch(MODEL, CLEAN, CORRUPTED, "z", {"layer": [1, 0], "pos": [3, 0, 3], "head": range(1, 2)})
    assert chosen.indices == ((1, 0), (3, 0, 3), (1,))
    assert_close(chosen.predictions, whole[[1, 0]][:, [3, 0, 3]][:, :, [1]], **EXACT)
    assert patch(MODEL, CLEAN, CORRUPTED, "attn_out", "layer").axes == ("layer",)
    one = ablate(MODEL, CLEAN, axes={"layer": 1, "head": 0})
    assert one.indices == ((1,), (0,))
    assert_close(one.values["loss"], ablate(MODEL, CLEAN).values["loss"][1:, :1], **EXACT)


def test_metrics_are_functions_of_the_predictions():
    errors = squared_error(CLEAN)
    swept = patch(MODEL, CLEAN, CORRUPTED, metrics={"loss": errors, "sign": lambda p: p[:, 0] > 0})
    assert swept.predictions is not None
    for layer, head in itertools.product(range(2), range(2)):
        assert_close(swept.values["loss"][layer, head], errors(swept.predictions[layer, head]))
        assert_close(swept.values["sign"][layer, head], (swept.predictions[layer, head, :, 0] > 0).double())
    assert_close(swept.unpatched_values["loss"], errors(run(MODEL, CORRUPTED)))
    assert_close(swept.source_values["loss"], errors(run(MODEL, CLEAN)))
    assert_close(swept.effect(), swept.values["loss"] - swept.unpatched_values["loss"])
    whole = (swept.source_values["loss"] - swept.unpatched_values["loss"]).mean()
    assert_close(swept.recovered(), swept.effect().mean(-1) / whole)


def test_a_recurrent_network_is_patched_at_its_streams():
    model = oracles.lstm()
    for component, at in (("resid_pre", "query"), ("resid_post", "points")):
        check_against_loop(model, *pair(model), component, ("layer", "pos"), at)


@pytest.mark.parametrize(("kind", "name"), [
    *(("gpt", name) for name in ("hook_embed", *(hook_name(c, 1) for c in ("resid_pre", "z", "resid_post")))),
    ("bridge", hook_name("resid_pre", 1)),
])  # fmt: skip
def test_hooks_of_the_user_stay_and_take_effect_once(kind, name):
    model = oracles.bridge() if kind == "bridge" else model_of(kind)
    clean, corrupted = oracles.bridge_pair() if kind == "bridge" else pair(model)
    plain = run(model, clean)

    def steer(tensor, *, hook):
        return 2 * tensor + tensor.roll(1, dims=1) + 0.5

    model.add_hook(name, steer)
    for component, axes in [("z", ("layer", "head")), ("resid_pre", ("layer", "pos")), ("pattern", ("layer", "query"))]:
        check_against_loop(model, clean, corrupted, component, axes, **SINGLE)
    assert next(len(point.fwd_hooks) for point in model.hook_dict.values() if point.fwd_hooks) == 1
    model.reset_hooks()
    assert_close(run(model, clean), plain)


def test_an_error_in_the_middle_of_a_sweep_leaves_no_hook():
    for model, clean, corrupted in [(MODEL, CLEAN, CORRUPTED), (oracles.shared_bridge(), *oracles.bridge_pair())]:
        before, calls = run(model, clean), itertools.count()

        def fails(predictions, calls=calls):
            if next(calls) == 4:
                raise RuntimeError("enough")
            return predictions.sum(-1)

        with pytest.raises(ValueError, match=r"metric.* failed: RuntimeError: enough"):
            patch(model, clean, corrupted, metrics=fails)
        assert oracles.no_hook_left(model)
        assert_close(run(model, clean), before)


TASK = RepeatedTokens(d_vocab=6, n_ctx=5, min_period=2, max_period=3)


def same_sweep(a: InterventionSweep, b: InterventionSweep) -> None:
    assert (a.what, a.axes, a.indices, list(a.values)) == (b.what, b.axes, b.indices, ["loss"])
    for name in ("values", "unpatched_values", "source_values", "unpatched"):
        assert_close(getattr(a, name), getattr(b, name), atol=0, rtol=0)


@pytest.mark.parametrize("at", ["query", "positions"])
def test_sequences_are_their_ids_with_the_loss_of_predictable_tokens(at):
    model = model_of("ids")
    clean, corrupted = TASK.sample(4, seed=0), TASK.sample(4, seed=1)
    assert (clean.targets() < 0).any()
    targets = clean.targets() if at == "positions" else clean.ids[:, -1]
    explicit: dict[str, Any] = {"at": at, "metrics": {"loss": next_token_loss(targets)}}
    two_runs: list[Any] = [patch, attribute, patch_paths]
    for sweep in two_runs:
        same_sweep(sweep(model, clean, corrupted, at=at), sweep(model, clean.read, corrupted.read, **explicit))
    by_ids = ablate(model, clean.read, method=Replacement("mean", corrupted.read), **explicit)
    same_sweep(ablate(model, clean, method=Replacement("mean", corrupted), at=at), by_ids)
    circuit, expected = (
        find_circuit(model, prompts, tolerance=0.5, search="eap-ig", **options)
        for prompts, options in ((clean, {"at": at}), (clean.read, explicit))
    )
    assert (circuit.nodes, circuit.metric) == (expected.nodes, "loss")
    assert_close(circuit.alone, expected.alone, atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_inputs_of_parts_of_a_bridge(kind):
    """Edits are of a copy: the stream around the part, and the other heads, still read the original."""
    model = oracles.bridge(kind)
    clean, corrupted = oracles.bridge_pair()
    for method in ("set_use_hook_mlp_in", "set_use_split_qkv_input"):
        getattr(model, method)(True)
    for component, axes in [
        ("resid_mid", ("layer", "pos")),
        ("mlp_in", ("layer", "pos")),
        ("q_input", ("layer", "head")),
        ("v_input", ("layer", "head")),
        ("post", ("layer", "neuron")),
    ]:
        check_against_loop(model, clean, corrupted, component, axes, **SINGLE)
