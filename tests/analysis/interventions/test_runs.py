"""How cells are run: within a bound on memory, on the quick routes, with the hooks of others left alone."""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

from mechicl.analysis.interventions import ablate, logit_difference, next_token_loss, patch, patch_paths, runs
from mechicl.analysis.interventions.runs import base_run, record_within, rows_within, run_cells
from mechicl.models import HookedLSTM, LSTMConfig, TransformerConfig
from mechicl.models.adapter import ModelAdapter
from mechicl.models.sites import Site
from tests.analysis.interventions.oracles import (
    bridge,
    hook_name,
    ids,
    inputs,
    loop_patch,
    lstm,
    model_of,
    no_hook_left,
    recorded,
    run,
)

WIDE: dict[str, Any] = {"n_layers": 2, "n_heads": 4, "d_model": 32, "d_head": 8, "n_context": 3}


def peak(work: Callable[[], Any]) -> int:
    """The most memory that was allocated at once, beyond what there was before, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = work()
    del kept
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += cast(Any, event).nbytes()
        most = max(most, now)
    return most


def least(sweep: Callable[[float], Any]) -> float:
    """The smallest bound that is not refused, as the refusals say."""
    memory = 1.0
    while True:
        try:
            sweep(memory)
        except ValueError as error:
            memory = 1.001 * float(str(error).split("at least ")[1].split(",")[0])
        else:
            return memory


def test_the_meter_measures():
    def work():
        a = torch.zeros(1000, 100, dtype=torch.float64)
        b = a + 1
        del a
        return b.sum()

    assert peak(work) == pytest.approx(2 * 800_000, rel=0.01)


@cache
def wide(**fields: Any) -> Any:
    return model_of("gpt", **(WIDE | {"d_mlp": 64} | fields))


@cache
def wide_bridge() -> Any:
    return bridge(n_layer=2, n_head=4, n_embd=32, vocab_size=200)


def ours(*args: Any, **options: Any) -> Callable[[float], Any]:
    model = wide()
    prompts = inputs(model, 0, 3), inputs(model, 1, 3)
    return lambda memory: patch(model, *prompts, *args, memory=memory, **options)


def theirs(*args: Any, **options: Any) -> Callable[[float], Any]:
    tokens = ids(0, 3, 8, 200), ids(1, 3, 8, 200)
    metric = next_token_loss(tokens[0]) if "at" in options else logit_difference(tokens[0][:, 0], tokens[0][:, 1])
    return lambda memory: patch(wide_bridge(), *tokens, *args, metrics=metric, memory=memory, **options)


def recurrent() -> Callable[[float], Any]:
    model = HookedLSTM(LSTMConfig(x_dim=2, n_context=4, n_layers=2, d_model=16, dtype="float64")).eval()
    prompts = inputs(model, 0, 3), inputs(model, 1, 3)
    return lambda memory: patch(model, *prompts, "resid_pre", only={"pos": [2, 3]}, memory=memory)


SWEEPS: dict[str, Callable[[], Callable[[float], Any]]] = {
    "heads": lambda: ours("z"),
    "local": lambda: ours("z", ("layer", "pos", "head"), only={"pos": [0, 3]}),
    "streams": lambda: ours("resid_pre", only={"pos": [1, 6]}),
    "patterns": lambda: ours("pattern", ("layer", "head", "query"), only={"query": [3]}),
    "all positions": lambda: ours("z", at="positions", only={"head": [2]}),
    "pairs": lambda: lambda memory: ablate(
        wide(), inputs(wide(), 0, 3), pairs=True, only={"head": [0, 2]}, memory=memory
    ),
    "directions": lambda: lambda memory: ablate(
        wide(), inputs(wide(), 0, 3), "resid_pre", ("layer",), directions=torch.eye(32)[:2], memory=memory
    ),
    "paths": lambda: lambda memory: patch_paths(
        wide(), inputs(wide(), 0, 3), inputs(wide(), 1, 3), memory=memory
    ),
    "linear": lambda: lambda memory: patch(
        (m := wide(prompt_format="paired", attention="linear", keys="context", normalization_type=None, d_mlp=None)),
        inputs(m, 0, 3), inputs(m, 1, 3), "z", ("layer", "pos", "head"), memory=memory,
    ),
    "bridge": lambda: theirs("z", only={"head": [0, 3]}),
    "bridge, all positions": lambda: theirs("z", at="positions", only={"layer": [1]}),
    "LSTM": recurrent,
}  # fmt: skip


@pytest.mark.parametrize("name", list(SWEEPS))
def test_memory_is_bounded(name):
    sweep = SWEEPS[name]()
    tight = least(sweep)
    found = []
    for memory in (1.1 * tight, 6 * tight):
        found.append(peak(lambda memory=memory: sweep(memory)))
        assert found[-1] <= memory + 4096  # scalars and indices
    assert found[0] < found[1]


def test_cells_are_batched_by_where_they_begin_and_end(monkeypatch):
    """Behind the last layer that a batch's cells edit, no hook is attached."""
    model = model_of("gpt", n_layers=4)
    prompts = inputs(model, 0)
    seen: list[tuple[int, int, int]] = []
    resume = ModelAdapter.resume

    def spy(self, streams, layer, hooks, last_hooked):
        seen.append((layer, last_hooked, len(streams)))
        layers = {int(name.split(".")[1]) for name, _ in hooks}
        assert (min(layers), max(layers)) == (layer, last_hooked)
        return resume(self, streams, layer, hooks, last_hooked)

    monkeypatch.setattr(ModelAdapter, "resume", spy)
    ablate(model, prompts, pairs=True)
    assert {(a, b) for a, b, _ in seen} == {(a, b) for a in range(4) for b in range(a, 4)}
    assert sum(rows for _, _, rows in seen) == 36 * 3
    assert len(seen) == 10


def test_the_quick_way_for_one_position_is_taken_and_equals_the_general_one(monkeypatch):
    model = model_of("gpt", n_layers=3)
    clean, corrupted = inputs(model, 0), inputs(model, 1)
    quick = {}
    components = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z", "q")
    with monkeypatch.context() as patched:
        patched.setattr(runs, "_each_cell", None)
        for component in components:
            axes = ("layer", "pos", "head") if component in ("z", "q") else ("layer", "pos")
            quick[component] = patch(model, clean, corrupted, component, axes)
    monkeypatch.setattr(runs, "_is_local", lambda cell, cfg: False)
    for component, swept in quick.items():
        general = patch(model, clean, corrupted, component, swept.axes)
        assert_close(swept.predictions, general.predictions, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("kind", ["gpt", "linear", "sink", "full"])
@pytest.mark.parametrize("component", ["pattern", "attn_scores"])
def test_a_querys_row_of_scores_and_patterns_takes_the_quick_way(kind, component, monkeypatch):
    model = model_of(kind)
    clean, corrupted = inputs(model, 0, 2), inputs(model, 1, 2)
    for axes in [("layer", "head", "query"), ("query", "layer")]:
        expected, _ = loop_patch(model, corrupted, clean, component, axes)
        with monkeypatch.context() as patched:
            patched.setattr(runs, "_each_cell", None)
            swept = patch(model, clean, corrupted, component, axes)
        assert swept.predictions is not None
        assert_close(swept.predictions.flatten(0, len(axes) - 1), expected, atol=1e-11, rtol=1e-9)
    axes = ("layer", "head", "query", "key")
    expected, _ = loop_patch(model, corrupted, clean, component, axes)
    with monkeypatch.context() as patched:
        patched.setattr(runs, "_each_local_cell", None)
        swept = patch(model, clean, corrupted, component, axes)
    assert swept.predictions is not None
    assert_close(swept.predictions.flatten(0, 3), expected, atol=1e-11, rtol=1e-9)


def test_hooks_of_the_user_make_sweeps_of_patterns_take_the_general_way():
    model = model_of("gpt")
    clean, corrupted = inputs(model, 0), inputs(model, 1)
    model.add_hook(hook_name("z", 1), lambda tensor, *, hook: tensor + tensor.roll(1, 1))
    expected, _ = loop_patch(model, corrupted, clean, "pattern", ("layer", "query"))
    swept = patch(model, clean, corrupted, "pattern", ("layer", "query"))
    assert swept.predictions is not None
    assert_close(swept.predictions.flatten(0, 1), expected, atol=1e-11, rtol=1e-9)


def test_keys_and_values_are_not_local():
    cfg = TransformerConfig(x_dim=2, n_context=2)
    for component in ("k", "v"):
        assert not runs._is_local((Site(component, 0, pos=1, head=0),), cfg)
    assert not runs._is_local((Site("z", 0, head=0),), cfg)
    assert runs._is_local((Site("z", 0, pos=0),), cfg)
    assert runs._is_local((Site("pattern", 0, query=0),), cfg)
    assert not runs._is_local((Site("pattern", 0, query=0, key=1),), cfg)
    assert not runs._is_local((Site("attn_scores", 0, head=1, key=1),), cfg)
    averaged = TransformerConfig(x_dim=2, n_context=2, keys="causal", momentum=0.5)
    assert not runs._is_local((Site("pattern", 0, query=0),), averaged)
    assert runs._is_local((Site("z", 0, pos=0),), averaged)


@pytest.mark.parametrize("kind", ["gpt", "bridge", "lstm"])
def test_a_base_run_keeps_every_stream(kind):
    model = {"gpt": model_of, "bridge": bridge, "lstm": lstm}[kind]()
    prompts = ids(0, d_vocab=20) if kind == "bridge" else inputs(model, 0)
    adapter = ModelAdapter(model)
    base = base_run(adapter, adapter.encode(prompts), held=0, memory=1e9)
    assert len(base) == 3
    for layer in range(adapter.n_layers):
        assert_close(base.streams[layer], recorded(model, prompts, f"blocks.{layer}.hook_resid_pre"))
    last = recorded(model, prompts, f"blocks.{adapter.n_layers - 1}.hook_resid_post")
    assert_close(base.streams[adapter.n_layers], last)
    assert_close(base.unpatched, run(model, prompts), atol=2e-5, rtol=1e-4)
    assert no_hook_left(model)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_recording_in_batches(batch_size):
    model = model_of("gpt")
    prompts = inputs(model, 0, 5)
    adapter = ModelAdapter(model)
    tokens = adapter.encode(prompts)
    names = [hook_name("z", 0), hook_name("pattern", 1), hook_name("z", 0)]
    found = adapter.record(tokens, names, batch_size)
    assert set(found) == set(names)
    for name, activation in found.items():
        assert_close(activation, recorded(model, prompts, name))
        assert not activation.requires_grad
    assert_close(adapter.predict(tokens, batch_size), run(model, prompts))
    with pytest.raises(ValueError, match=r"no hook 'blocks.0.attn.hook_zz'; did you mean 'blocks.0.attn.hook_z'"):
        adapter.record(tokens, ["blocks.0.attn.hook_zz"], batch_size)


def test_a_hook_that_does_not_fire():
    model, tokens = bridge(), ids(0, d_vocab=20)
    adapter = ModelAdapter(model)
    with pytest.raises(ValueError, match="set_use_attn_result"):
        adapter.record(tokens, [hook_name("result", 0)], 2)
    with pytest.raises(ValueError, match="set_use_attn_result"):
        patch(model, tokens, tokens, "result")
    assert no_hook_left(model)


def test_results_of_heads_where_a_bridge_computes_them():
    model, clean, corrupted = bridge(), ids(0, d_vocab=20), ids(1, d_vocab=20)
    model.set_use_attn_result(True)
    assert_close(
        patch(model, clean, corrupted, "result").predictions,
        patch(model, clean, corrupted, "z").predictions,
        atol=2e-5,
        rtol=1e-4,
    )


def test_rows_within_a_bound():
    model = model_of("gpt")
    adapter = ModelAdapter(model)
    tokens = adapter.encode(inputs(model, 0))
    per_row, fixed = adapter.bytes_per_row(tokens), 1000 + adapter.bytes_of_products
    assert rows_within(adapter, tokens, 1000, fixed + per_row) == 1
    assert rows_within(adapter, tokens, 1000, fixed + 7.5 * per_row) == 7
    for memory in (fixed + per_row - 1, 0, -1, float("nan")):
        with pytest.raises(ValueError, match="too little"):
            rows_within(adapter, tokens, 1000, memory)
    with pytest.raises(ValueError, match="too little"):
        record_within(adapter, tokens, [hook_name("z", 0)], per_row)


def test_a_model_of_the_protocol_that_cannot_be_resumed(monkeypatch):
    model, clean, corrupted = bridge(), ids(0, d_vocab=20), ids(1, d_vocab=20)
    expected = {c: patch(model, clean, corrupted, c).predictions for c in ("z", "mlp_out")}
    monkeypatch.setattr(ModelAdapter, "resumes", property(lambda self: False, lambda self, value: None), raising=False)
    for component, predictions in expected.items():
        found = patch(model, clean, corrupted, component)
        assert_close(found.predictions, predictions, atol=2e-5, rtol=1e-4)


def test_no_cells_and_no_metrics():
    model = model_of("gpt")
    adapter = ModelAdapter(model)
    base = base_run(adapter, adapter.encode(inputs(model, 0)), held=0, memory=1e9)
    predictions, found = run_cells(adapter, base, [], {}, metrics={"m": lambda p: p[:, 0]}, keep_predictions=True)
    assert predictions is not None
    assert predictions.shape == (0, 3, 1)
    assert found["m"].shape == (0, 3)


# ---- a bridge that is resumed ----


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
        found = adapter.resume(stream.clone(), last, [], last)
    assert ran == [last]
    assert_close(found, expected[:, -1])

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
    own = type(model.blocks[0]).forward

    def with_more(*args: Any, **kwargs: Any) -> Any:
        return own(model.blocks[1], *args, **kwargs) + args[0].mean() * 0

    vars(model.blocks[1])["forward"] = with_more
    stream = torch.randn(2, 6, 8)
    adapter.resume(stream, 2, [], 2)
    assert vars(model.blocks[1])["forward"] is with_more
