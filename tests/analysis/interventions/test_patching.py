"""Patching against a plain loop of hooked runs, against TransformerLens, and in spite of bad input."""

import math
from functools import cache
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformer_lens import patching
from transformer_lens.utilities import get_act_name

from mechicl.analysis.interventions import (
    Sweep,
    ablate,
    attribute,
    corrupt,
    find_circuit,
    logit_difference,
    next_token_loss,
    patch,
    patch_paths,
    squared_error,
)
from mechicl.prompts import Prompts
from mechicl.tasks import RepeatedTokens
from mechicl.tokens import TokenSequences
from tests.analysis.interventions.oracles import (
    MODELS,
    bridge,
    cells,
    hook_name,
    ids,
    inputs,
    loop_patch,
    lstm,
    model_of,
    no_hook_left,
    putting,
    recorded,
    run,
)
from tests.strategies import configs, random_model

SWEEPS = [
    ("resid_pre", ("layer", "pos")),
    ("resid_mid", ("layer", "pos")),
    ("resid_post", ("pos", "layer")),
    ("resid_pre", ("layer",)),
    ("attn_out", ("layer", "pos")),
    ("mlp_out", ("layer", "pos")),
    ("mlp_out", ("layer",)),
    ("q", ("layer", "pos", "head")),
    ("k", ("layer", "pos", "head")),
    ("v", ("head", "layer", "pos")),
    ("k", ("layer", "head")),
    ("z", ("layer", "pos", "head")),
    ("z", ("layer", "head")),
    ("z", ("layer", "pos")),
    ("result", ("layer", "pos", "head")),
    ("attn_scores", ("layer", "head", "query")),
    ("attn_scores", ("layer", "key")),
    ("pattern", ("layer", "head")),
    ("pattern", ("layer", "head", "query", "key")),
]


def metric_of(tokens: Any) -> Any:
    return logit_difference(tokens[:, 0], tokens[:, 1])


@pytest.mark.parametrize("kind", list(MODELS))
def test_every_cell_is_what_one_hooked_run_predicts(kind):
    model = model_of(kind)
    clean, corrupted = inputs(model, 0), inputs(model, 1)
    tolerance: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-4} if kind == "float32" else {"atol": 1e-11, "rtol": 1e-9}
    # all of them on one model, every fourth one on the rest
    for component, axes in SWEEPS if kind == "gpt" else SWEEPS[list(MODELS).index(kind) % 4 :: 4]:
        if get_act_name(component, 0) not in model.hook_dict:
            continue
        for direction in ("denoising", "noising")[: 2 if "head" in axes and "pos" not in axes else 1]:
            into, source = (corrupted, clean) if direction == "denoising" else (clean, corrupted)
            swept = patch(model, clean, corrupted, component, axes, direction=direction)
            expected, every = loop_patch(model, into, source, component, axes)
            assert swept.predictions is not None
            assert swept.source is not None
            assert swept.predictions.shape == (*swept.shape, *expected.shape[1:])
            assert swept.predictions.dtype == model.cfg.torch_dtype
            assert not swept.predictions.requires_grad
            assert_close(swept.predictions.flatten(0, len(axes) - 1), expected, **tolerance)
            assert_close(swept.unpatched, run(model, into), **tolerance)
            assert_close(swept.source, run(model, source), **tolerance)
            assert swept.axes == axes
            assert [max(of) + 1 for of in swept.indices] == [1 + max(cell[axis] for cell in every) for axis in axes]


@pytest.mark.parametrize("kind", ["gpt", "full", "linear", "ids"])
@pytest.mark.parametrize("at", ["query", "points", "positions"])
def test_other_predictions_are_read_off_the_same_runs(kind, at):
    model = model_of(kind)
    clean, corrupted = inputs(model, 0), inputs(model, 1)
    if at == "points" and kind != "gpt":
        with pytest.raises(ValueError, match="points"):
            patch(model, clean, corrupted, at=at)
        return
    for component, axes in [("z", ("layer", "pos")), ("resid_pre", ("layer", "pos")), ("k", ("layer", "head"))]:
        swept = patch(model, clean, corrupted, component, axes, at=at, metrics={})
        expected, _ = loop_patch(model, corrupted, clean, component, axes, at)
        assert swept.predictions is not None
        assert_close(swept.predictions.flatten(0, len(axes) - 1), expected, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("over", ["outputs", "values"])
def test_cells_of_one_position_that_momentum_carries_on(over):
    model = model_of("gpt", momentum=0.6, momentum_over=over)
    clean, corrupted = inputs(model, 0), inputs(model, 1)
    one_position = [(component, axes) for component, axes in SWEEPS if "pos" in axes or "query" in axes]
    for component, axes in one_position:
        if get_act_name(component, 0) in model.hook_dict:
            swept = patch(model, clean, corrupted, component, axes)
            expected, _ = loop_patch(model, corrupted, clean, component, axes)
            assert swept.predictions is not None
            assert_close(swept.predictions.flatten(0, len(axes) - 1), expected, atol=1e-11, rtol=1e-9)


@settings(max_examples=10)
@given(configs(), st.data())
def test_any_config(cfg, data):
    if not cfg.n_layers:
        return
    model = random_model(cfg.replace(dtype="float64"), data.draw(st.integers(0, 9)), scale=0.2).eval()
    known = [(c, axes) for c, axes in SWEEPS if get_act_name(c, 0) in model.hook_dict]
    component, axes = data.draw(st.sampled_from(known))
    n = data.draw(st.integers(1, 3))
    clean, corrupted = inputs(model, 0, n), inputs(model, 1, n)
    swept = patch(model, clean, corrupted, component, axes)
    expected, _ = loop_patch(model, corrupted, clean, component, axes)
    assert swept.predictions is not None
    found = swept.predictions.flatten(0, len(axes) - 1)
    assert_close(found, expected, atol=1e-9, rtol=1e-7, equal_nan=True)


@cache
def least_for(component: str, axes: tuple[str, ...]) -> float:
    return least_memory(lambda memory: patch(MODEL, CLEAN, CORRUPTED, component, axes, memory=memory))


def least_memory(sweep: Any) -> float:
    """The smallest bound that is not refused, from what the refusals say."""
    memory = 1.0
    while True:
        try:
            sweep(memory)
        except ValueError as error:
            memory = 1.001 * float(str(error).split("at least ")[1].split(",")[0])
        else:
            return memory


SWEPT = [("z", ("layer", "head")), ("z", ("layer", "pos", "head")), ("pattern", ("layer", "head", "query"))]
MODEL = model_of("gpt")
CLEAN, CORRUPTED = inputs(MODEL, 0, 4), inputs(MODEL, 1, 4)


@settings(max_examples=6)
@given(st.sampled_from(SWEPT), st.floats(1, 30), st.booleans())
def test_results_do_not_depend_on_memory(sweep, factor, denoising):
    direction = "denoising" if denoising else "noising"

    def swept(memory: float) -> Any:
        return patch(MODEL, CLEAN, CORRUPTED, *sweep, direction=direction, memory=memory)

    tight, free = swept(factor * least_for(*sweep)), swept(1e12)
    assert_close(tight.predictions, free.predictions, atol=1e-12, rtol=1e-12)
    assert_close(tight.values["loss"], free.values["loss"], atol=1e-12, rtol=1e-12)
    assert_close(tight.source, free.source, atol=1e-12, rtol=1e-12)


def test_unbounded_memory_is_allowed():
    assert_close(
        patch(MODEL, CLEAN, CORRUPTED, memory=math.inf).values["loss"], patch(MODEL, CLEAN, CORRUPTED).values["loss"]
    )


@pytest.mark.parametrize("kind", ["gpt", "full", "linear"])
def test_only_some_layers_positions_and_heads(kind):
    model = model_of(kind)
    clean, corrupted = inputs(model, 0), inputs(model, 1)
    axes = ("layer", "pos", "head")
    whole = patch(model, clean, corrupted, "z", axes)
    assert whole.predictions is not None
    only = {"layer": [1, 0], "pos": [3, 0, 3], "head": range(1, 2)}
    some = patch(model, clean, corrupted, "z", axes, only=only)
    assert some.indices == ((1, 0), (3, 0, 3), (1,))
    expected = whole.predictions[[1, 0]][:, [3, 0, 3]][:, :, [1]]
    assert some.predictions is not None
    assert_close(some.predictions, expected, atol=1e-12, rtol=1e-10)
    patterns = patch(model, clean, corrupted, "pattern", ("layer", "query"), only={"query": [2, 1], "layer": [1]})
    expected, every = loop_patch(model, corrupted, clean, "pattern", ("layer", "query"))
    picked = [every.index({"layer": 1, "query": query}) for query in (2, 1)]
    assert patterns.predictions is not None
    assert_close(patterns.predictions.flatten(0, 1), expected[picked], atol=1e-11, rtol=1e-9)


def test_a_metric_gives_what_it_gives_on_the_predictions():
    errors = squared_error(CLEAN)
    seen = patch(MODEL, CLEAN, CORRUPTED, metrics={"loss": errors, "sign": lambda p: p[:, 0] > 0})
    assert seen.predictions is not None
    for layer in range(2):
        for head in range(2):
            assert_close(seen.values["loss"][layer, head], errors(seen.predictions[layer, head]))
            assert_close(seen.values["sign"][layer, head], (seen.predictions[layer, head, :, 0] > 0).double())
    assert_close(seen.unpatched_values["loss"], errors(run(MODEL, CORRUPTED)))
    assert_close(seen.source_values["loss"], errors(run(MODEL, CLEAN)))
    assert_close(seen.effect(), seen.values["loss"] - seen.unpatched_values["loss"])
    means = seen.values["loss"].mean(-1), seen.unpatched_values["loss"].mean(), seen.source_values["loss"].mean()
    assert_close(seen.recovered(), (means[0] - means[1]) / (means[2] - means[1]))
    later = patch(MODEL, CLEAN, CORRUPTED, metrics={}).measure("loss", errors)
    assert_close(later.values["loss"], seen.values["loss"])
    assert_close(later.source_values["loss"], seen.source_values["loss"])


def test_default_axes_and_predictions_kept():
    assert patch(MODEL, CLEAN, CORRUPTED).axes == ("layer", "head")
    assert patch(MODEL, CLEAN, CORRUPTED, "mlp_out").axes == ("layer", "pos")
    assert patch(MODEL, CLEAN, CORRUPTED, keep_predictions=False).predictions is None
    model = model_of("ids")
    clean, corrupted = inputs(model, 0), inputs(model, 1)
    assert patch(model, clean, corrupted).values == {}
    assert patch(model, clean, corrupted).predictions is not None
    assert patch(model, clean, corrupted, metrics=metric_of(clean)).predictions is None
    with pytest.raises(ValueError, match="no metric yet"):
        patch(model, clean, corrupted).effect()
    with pytest.raises(ValueError, match="were not kept"):
        patch(model, clean, corrupted, metrics=metric_of(clean)).measure("again", metric_of(clean))


def test_tokens_of_a_continuous_model_do_as_well_as_prompts():
    tokens = MODEL.encode(CLEAN), MODEL.encode(CORRUPTED)
    swept = patch(MODEL, *tokens, metrics=squared_error(CLEAN), keep_predictions=True)
    assert_close(swept.predictions, patch(MODEL, CLEAN, CORRUPTED).predictions)


# ---- TransformerLens ----


@pytest.mark.parametrize("kind", ["bridge", "ours"])
def test_agrees_with_transformer_lens(kind, capsys):
    model: Any = bridge() if kind == "bridge" else model_of("ids", dtype="float32")
    clean, corrupted = (ids(seed, n=3, n_pos=5, d_vocab=model.cfg.d_vocab) for seed in (0, 1))
    metric = metric_of(clean)
    _, cache = model.run_with_cache(clean)
    theirs: dict[Any, Any] = {
        ("resid_pre", ("layer", "pos")): patching.get_act_patch_resid_pre,
        ("attn_out", ("layer", "pos")): patching.get_act_patch_attn_out,
        ("mlp_out", ("layer", "pos")): patching.get_act_patch_mlp_out,
        ("z", ("layer", "pos", "head")): patching.get_act_patch_attn_head_out_by_pos,
        ("z", ("layer", "head")): patching.get_act_patch_attn_head_out_all_pos,
        ("q", ("layer", "head")): patching.get_act_patch_attn_head_q_all_pos,
        ("k", ("layer", "pos", "head")): patching.get_act_patch_attn_head_k_by_pos,
        ("v", ("layer", "head")): patching.get_act_patch_attn_head_v_all_pos,
        ("pattern", ("layer", "head")): patching.get_act_patch_attn_head_pattern_all_pos,
    }
    for (component, axes), function in theirs.items():
        with torch.no_grad():
            expected = function(
                model, corrupted, cache, lambda logits: metric(logits[:, -1]), reduce="none", baseline=True
            )
        found = patch(model, clean, corrupted, component, axes, metrics=metric)
        assert_close(found.values["metric"], expected.values, atol=2e-5, rtol=1e-4)
        assert_close(found.effect(), expected.effect(), atol=4e-5, rtol=1e-4)
    capsys.readouterr()  # TransformerLens' progress bars


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_bridge_does_what_plain_loops_do(kind):
    model = bridge(kind)
    clean, corrupted = (ids(seed, n=3, d_vocab=20) for seed in (0, 1))
    for component, axes in [("z", ("layer", "head")), ("resid_post", ("layer", "pos")), ("v", ("layer", "head"))]:
        for at in ("query", "positions"):
            swept = patch(model, clean, corrupted, component, axes, at=at)
            expected, _ = loop_patch(model, corrupted, clean, component, axes, at)
            assert swept.predictions is not None
            assert_close(swept.predictions.flatten(0, len(axes) - 1), expected, atol=2e-5, rtol=1e-4)
    assert no_hook_left(model)


def test_a_grouped_query_model_has_fewer_keys_and_values():
    model, clean, corrupted = bridge("llama"), ids(0, d_vocab=20), ids(1, d_vocab=20)
    shapes = {c: patch(model, clean, corrupted, c).shape for c in ("q", "k", "v", "z")}
    assert shapes == {"q": (2, 4), "k": (2, 2), "v": (2, 2), "z": (2, 4)}


def test_its_result_has_transformer_lens_statistics():
    swept = patch(MODEL, CLEAN, CORRUPTED)
    result = swept.result()
    assert_close(result.effect(), swept.effect())
    low, high = result.bootstrap_ci(of_effect=True, n_resamples=200)
    assert (low <= swept.effect().mean(-1) + 1e-12).all()
    assert (high >= swept.effect().mean(-1) - 1e-12).all()
    assert result.permutation_pvalue().shape == (2, 2)
    table = result.to_dataframe()
    assert list(table.columns) == ["metric", "layer", "head", "example", "value"]
    row = table[(table["layer"] == 1) & (table["head"] == 1) & (table["example"] == 3)]
    assert row["value"].item() == pytest.approx(swept.values["loss"][1, 1, 3].item())


def test_tables_intervals_and_the_strongest():
    swept = patch(MODEL, CLEAN, CORRUPTED)
    table = swept.to_dataframe()
    assert len(table) == 4
    one = table[(table["layer"] == 1) & (table["head"] == 0)].iloc[0]
    assert one["loss"] == pytest.approx(swept.values["loss"][1, 0].mean().item())
    assert one["loss_effect"] == pytest.approx(swept.effect()[1, 0].mean().item())
    interval = swept.interval(1, 0)
    assert (one["loss_low"], one["loss_high"]) == (pytest.approx(interval.low), pytest.approx(interval.high))
    strongest = swept.strongest(2)["loss_effect"].abs().tolist()
    assert strongest == sorted(table["loss_effect"].abs(), reverse=True)[:2]
    for wrong in ((1,), (1, 0, 0)):
        with pytest.raises(ValueError, match="index for each"):
            swept.interval(*wrong)
    with pytest.raises(ValueError, match="no metric 'lost'"):
        swept.effect("lost")


def test_one_prompt_has_no_interval():
    swept = patch(MODEL, CLEAN[:1], CORRUPTED[:1])
    assert math.isnan(swept.interval(0, 0).low)
    assert len(swept.to_dataframe()) == 4


# ---- other models ----


def test_a_recurrent_network_is_patched_at_its_streams():
    model = lstm()
    clean, corrupted = inputs(model, 0), inputs(model, 1)
    for component in ("resid_pre", "resid_post"):
        for axes in (("layer", "pos"), ("layer",)):
            for at in ("query", "points"):
                swept = patch(model, clean, corrupted, component, axes, at=at)
                expected, _ = loop_patch(model, corrupted, clean, component, axes, at)
                assert swept.predictions is not None
                assert_close(swept.predictions.flatten(0, len(axes) - 1), expected, atol=1e-12, rtol=1e-10)
    with pytest.raises(ValueError, match=r"no hook 'blocks.0.attn.hook_z'"):
        patch(model, clean, corrupted)


def test_gradients_are_not_kept():
    swept = patch(MODEL, CLEAN, CORRUPTED, at="points")
    for tensor in (swept.predictions, swept.unpatched, swept.source, *swept.values.values()):
        assert tensor is not None
        assert not tensor.requires_grad


def test_activations_that_are_not_numbers_stay_so():
    broken, whole = MODEL.encode(CLEAN).clone(), MODEL.encode(CORRUPTED)
    broken[0] = math.nan
    for component, axes in [("z", ("layer", "head")), ("z", ("layer", "pos", "head")), ("resid_pre", None)]:
        swept = patch(MODEL, broken, whole, component, axes, metrics={})
        assert swept.predictions is not None
        assert swept.predictions[..., 0, :].isnan().any()
        assert swept.predictions[..., 1:, :].isfinite().all()


# ---- the user's own hooks ----


@pytest.mark.parametrize("kind", ["gpt", "bridge"])
@pytest.mark.parametrize(
    "name", ["hook_embed", *(hook_name(c, 1) for c in ("resid_pre", "z", "resid_post")), hook_name("resid_pre", 0)]
)
def test_hooks_of_the_user_stay_and_take_effect_once(kind, name):
    model = bridge() if kind == "bridge" else model_of(kind)
    clean, corrupted = ((ids(seed, d_vocab=20) if kind == "bridge" else inputs(model, seed)) for seed in (0, 1))
    plain = run(model, clean)

    def steer(tensor, *, hook):
        return 2 * tensor + tensor.roll(1, dims=1) + 0.5

    model.add_hook(name, steer)
    for component, axes in [("z", ("layer", "head")), ("resid_pre", ("layer", "pos"))]:
        swept = patch(model, clean, corrupted, component, axes)
        expected, _ = loop_patch(model, corrupted, clean, component, axes)
        assert swept.predictions is not None
        assert_close(swept.predictions.flatten(0, 1), expected, atol=2e-5, rtol=1e-4)
    assert next(len(point.fwd_hooks) for point in model.hook_dict.values() if point.fwd_hooks) == 1
    model.reset_hooks()
    assert_close(run(model, clean), plain)


# ---- bad input ----


BAD: dict[str, Any] = {
    "as many and as long": lambda m, a, b: patch(m, a[:2], b),
    "as many and as long: 4 of 5 positions, and 4 of 3": lambda m, a, b: patch(m, a, b.prefix(1)),
    "no prompts": lambda m, a, b: patch(m, a[:0], b[:0]),
    "did you mean 'resid_pre'": lambda m, a, b: patch(m, a, b, "resid_prev"),
    "did you mean 'head'": lambda m, a, b: patch(m, a, b, "z", ("layer", "heads")),
    "not 'head'": lambda m, a, b: patch(m, a, b, "mlp_out", ("layer", "head")),
    "each once": lambda m, a, b: patch(m, a, b, "z", ("layer", "head", "head")),
    "needs 'layer'": lambda m, a, b: patch(m, a, b, "z", ("head",)),
    r"no hook 'blocks.0.attn.hook_result': call model.set_use_attn_result\(True\)": lambda m, a, b: patch(
        m, a, b, "result"
    ),
    "layer 3: the model": lambda m, a, b: patch(m, a, b, only={"layer": 3}),
    r"pos must be 0 to 4, got \[5\]": lambda m, a, b: patch(m, a, b, "mlp_out", only={"pos": 5}),
    "needs 'layer' among its axes": lambda m, a, b: patch(m, a, b, "mlp_out", "pos"),
    "layer 2: the model has layers 0 to 1": lambda m, a, b: patch(m, a, b, only={"layer": [2]}),
    "layer -1": lambda m, a, b: patch(m, a, b, only={"layer": [-1]}),
    "head must be 0 to 1": lambda m, a, b: patch(m, a, b, only={"head": [2]}),
    r"head must be 0 to 1, got \[-1\]": lambda m, a, b: patch(m, a, b, only={"head": [0, -1]}),
    "head must be 0 to 1, got none": lambda m, a, b: patch(m, a, b, only={"head": []}),
    "no layer to sweep": lambda m, a, b: patch(m, a, b, only={"layer": []}),
    "is no axis of this sweep": lambda m, a, b: patch(m, a, b, only={"pos": [0]}),
    "'metric' must return a number a prompt": lambda m, a, b: patch(m, a, b, metrics=lambda p: p.mean()),
    r"got \(4, 1\)": lambda m, a, b: patch(m, a, b, metrics={"wide": lambda p: p}),
    "got float": lambda m, a, b: patch(m, a, b, metrics=cast(Any, lambda p: p.mean().item())),
    "too little": lambda m, a, b: patch(m, a, b, memory=100),
    "memory=0": lambda m, a, b: patch(m, a, b, memory=0),
    "x_dim": lambda m, a, b: patch(m, Prompts(a.xs[..., :1], a.ys), Prompts(b.xs[..., :1], b.ys)),
}


@pytest.mark.parametrize("message", list(BAD))
def test_bad_input_is_refused_and_leaves_the_model_as_it_was(message):
    before = MODEL.predict(CLEAN)
    with pytest.raises(ValueError, match=message):
        BAD[message](MODEL, CLEAN, CORRUPTED)
    assert not MODEL.has_hooks()
    assert no_hook_left(MODEL)
    assert_close(MODEL.predict(CLEAN), before, atol=0, rtol=0)


def test_unknown_choices_are_refused():
    unknown: list[dict[str, Any]] = [{"direction": "sideways"}, {"at": "some"}]
    for options in unknown:
        with pytest.raises(Exception, match=r"is not one of|violates type hint|Type-check"):
            patch(MODEL, CLEAN, CORRUPTED, **options)


def test_an_error_in_the_middle_of_a_sweep_leaves_no_hook():
    for model, clean, corrupted in [(MODEL, CLEAN, CORRUPTED), (bridge(), ids(0, d_vocab=20), ids(1, d_vocab=20))]:
        before, calls = run(model, clean), []

        def fails(predictions, calls=calls):
            calls.append(1)
            if len(calls) > 4:
                raise RuntimeError("enough")
            return predictions.sum(-1)

        with pytest.raises(RuntimeError, match="enough"):
            patch(model, clean, corrupted, metrics=fails)
        assert no_hook_left(model)
        assert_close(run(model, clean), before)


def test_models_in_training_mode_are_refused():
    model = model_of("gpt")
    model.train()
    with pytest.raises(ValueError, match="training mode"):
        patch(model, CLEAN, CORRUPTED)
    model.eval()
    model.blocks[1].attn.train()
    with pytest.raises(ValueError, match=r"training mode \(blocks\.1\.attn"):
        patch(model, CLEAN, CORRUPTED)
    other = bridge()
    other.original_model.transformer.h[1].train()
    with pytest.raises(ValueError, match="training mode"):
        patch(other, ids(0, d_vocab=20), ids(1, d_vocab=20))


def test_what_is_no_model_or_not_its_prompts_is_refused():
    with pytest.raises(TypeError, match="no hooks to open it by"):
        patch(torch.nn.Linear(2, 2), CLEAN, CORRUPTED)
    with pytest.raises(TypeError, match="reads token ids"):
        patch(bridge(), CLEAN, CORRUPTED)
    with pytest.raises(ValueError, match="points"):
        patch(bridge(), ids(0), ids(1), at="points")
    model = bridge()
    with pytest.raises(ValueError, match=r"no hook 'blocks.0.attn.hook_zed'|component 'zed'"):
        patch(model, ids(0), ids(1), "zed")
    with pytest.raises(ValueError, match="too little"):
        patch(model, ids(0), ids(1), memory=1000)
    assert no_hook_left(model)


def test_two_sites_on_one_hook_are_both_replaced():
    from mechicl.analysis.interventions.runs import base_run, run_cells
    from mechicl.models.adapter import ModelAdapter
    from mechicl.models.sites import Site

    adapter = ModelAdapter(MODEL)
    tokens = adapter.encode(CORRUPTED)
    values = {hook_name("z", layer): recorded(MODEL, CLEAN, hook_name("z", layer)) for layer in range(2)}
    base = base_run(adapter, tokens, held=0, memory=1e9)
    mixed = [
        (Site("z", 0, head=1), Site("z", 1, pos=3, head=0)),
        (Site("z", 1, pos=2), Site("z", 1, pos=4, head=0)),
        (Site("z", 0, pos=3, head=0),),
    ]
    found, _ = run_cells(adapter, base, mixed, values, metrics={}, keep_predictions=True)
    assert found is not None
    by_hand = [
        [("z", 0, {"head": 1}), ("z", 1, {"pos": 3, "head": 0})],
        [("z", 1, {"pos": 2}), ("z", 1, {"pos": 4, "head": 0})],
        [("z", 0, {"pos": 3, "head": 0})],
    ]
    for predictions, edits in zip(found, by_hand, strict=True):
        hooks = [putting(c, layer, where, values[hook_name(c, layer)]) for c, layer, where in edits]
        assert_close(predictions, run(MODEL, CORRUPTED, hooks), atol=1e-12, rtol=1e-10)


def test_corrupted_prompts_and_cells_of_the_example():
    swept = patch(MODEL, CLEAN, corrupt(CLEAN, "labels"), "z", ("layer", "pos", "head"))
    assert swept.shape == (2, 5, 2)
    assert len(cells(MODEL, "z", swept.axes, recorded(MODEL, CLEAN, hook_name("z", 0)))) == 20


def test_the_loss_at_all_positions_as_a_metric():
    model = model_of("ids")
    clean, corrupted = inputs(model, 0), inputs(model, 1)
    loss = next_token_loss(clean.roll(-1, 1))
    swept = patch(model, clean, corrupted, at="positions", metrics=loss)
    expected, _ = loop_patch(model, corrupted, clean, "z", ("layer", "head"), "positions")
    assert_close(swept.values["metric"].flatten(0, 1), torch.stack([loss(each) for each in expected]))


def test_one_axis_or_one_index_needs_no_list():
    alone, listed = (patch(MODEL, CLEAN, CORRUPTED, "attn_out", axes) for axes in ("layer", ("layer",)))
    assert (alone.axes, alone.shape) == (("layer",), (2,))
    assert_close(alone.predictions, listed.predictions, atol=0, rtol=0)
    some = patch(MODEL, CLEAN, CORRUPTED, "resid_pre", only={"layer": 1, "pos": [0, 2]})
    assert some.indices == ((1,), (0, 2))
    every = patch(MODEL, CLEAN, CORRUPTED, "resid_pre")
    assert some.predictions is not None
    assert every.predictions is not None
    assert_close(some.predictions, every.predictions[1:, [0, 2]], atol=1e-12, rtol=1e-10)
    sweeps: list[Any] = [ablate, attribute]
    for sweep in sweeps:
        given = (MODEL, CLEAN) if sweep is ablate else (MODEL, CLEAN, CORRUPTED)
        one = sweep(*given, component="z", only={"layer": 1, "head": 0})
        assert one.indices == ((1,), (0,))
        assert_close(one.values["loss"], sweep(*given, component="z").values["loss"][1:, :1], atol=1e-12, rtol=1e-10)


def test_results_of_heads_of_our_models():
    model = model_of("gpt")
    model.set_use_attn_result(True)
    found = patch(model, CLEAN, CORRUPTED, "result").predictions
    assert_close(found, patch(model, CLEAN, CORRUPTED, "z").predictions, atol=1e-12, rtol=1e-10)


# ---- sequences of tokens ----


TASK = RepeatedTokens(d_vocab=6, n_ctx=5, min_period=2, max_period=3)


def same_sweep(a: Sweep, b: Sweep) -> None:
    assert (a.what, a.axes, a.indices) == (b.what, b.axes, b.indices)
    assert list(a.values) == ["loss"]
    for first, second in ((a.values, b.values), (a.unpatched_values, b.unpatched_values),
                          (a.source_values, b.source_values), (a.unpatched, b.unpatched)):  # fmt: skip
        assert_close(first, second, atol=0, rtol=0)


@pytest.mark.parametrize(("kind", "at"), [("ours", "query"), ("ours", "positions"), ("bridge", "query")])
def test_sequences_are_their_ids_with_the_loss_of_what_can_be_predicted(kind, at):
    model: Any = model_of("ids") if kind == "ours" else bridge()
    clean, corrupted = TASK.sample(4, seed=0), TASK.sample(4, seed=1)
    assert (clean.targets() < 0).any()
    targets = clean.targets() if at == "positions" else clean.ids[:, -1]
    options: dict[str, Any] = {"at": at}
    explicit: dict[str, Any] = {"at": at, "metrics": {"loss": next_token_loss(targets)}}
    for sweep in (patch, attribute):
        for direction in ("denoising", "noising")[: 1 + (kind == "ours")]:
            same_sweep(
                sweep(model, clean, corrupted, direction=direction, **options),
                sweep(model, clean.read, corrupted.read, direction=direction, **explicit),
            )
    same_sweep(ablate(model, clean, **options), ablate(model, clean.read, **explicit))
    same_sweep(
        ablate(model, clean, reference=corrupted, **options), ablate(model, clean.read, reference=corrupted.read,
                                                                    **explicit)
    )  # fmt: skip
    same_sweep(patch_paths(model, clean, corrupted, **options), patch_paths(model, clean.read, corrupted.read,
                                                                            **explicit))  # fmt: skip
    found, expected = (
        find_circuit(model, given, tolerance=0.3, edges=kind == "ours", **more)
        for given, more in ((clean, options), (clean.read, explicit))
    )
    assert (found.nodes, found.edges, found.metric) == (expected.nodes, expected.edges, "loss")
    assert_close(found.edges_alone, expected.edges_alone, atol=0, rtol=0)
    assert_close(found.edge_effects, expected.edge_effects, atol=0, rtol=0)


def test_what_is_not_to_be_predicted_has_no_loss():
    model = model_of("ids")
    whole = TASK.sample(4, seed=0)
    predictable = whole.predictable.clone()
    predictable[2, -1] = False
    clean = TokenSequences(whole.ids, predictable)
    asked: list[Any] = [
        lambda **options: patch(model, clean, whole, **options),
        lambda **options: attribute(model, clean, whole, **options),
        lambda **options: ablate(model, clean, **options),
        lambda **options: find_circuit(model, clean, edges=False, **options),
    ]
    for ask in asked:
        with pytest.raises(
            ValueError, match=r"the last token of a sequence is not to be predicted: take at='positions'"
        ):
            ask()
        ask(metrics=metric_of(clean.ids))
        predictable[2, -1] = True
        ask()
        predictable[2, -1] = False
        if len(clean.targets()[2]) and (clean.targets()[2] >= 0).any():
            ask(at="positions")


def test_what_is_neither_prompts_nor_sequences_nor_a_tensor_is_refused():
    model = model_of("ids")
    tokens = ids(0, n_pos=5)
    for wrong in (tokens.tolist(), "a b c", None, tokens.numpy()):
        given: Any = wrong
        for ask in (
            lambda given=given: patch(model, given, tokens),
            lambda given=given: patch(model, tokens, given),
            lambda given=given: ablate(model, given),
            lambda given=given: attribute(model, given, tokens, metrics=metric_of(tokens)),
            lambda given=given: find_circuit(model, given, metric_of(tokens)),
        ):
            with pytest.raises(TypeError):
                ask()
