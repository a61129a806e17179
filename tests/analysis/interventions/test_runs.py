"""How cells are run: within a bound on memory, and in batches of equal first and last layers."""

import gc
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

from mechicl.analysis.interventions import (
    InterventionSweep,
    ablate,
    logit_difference,
    next_token_loss,
    patch,
    patch_paths,
)
from mechicl.analysis.interventions.patching import make_experiment
from mechicl.models import HookedLSTM, LSTMConfig
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.sites import Site
from tests.analysis.interventions import oracles
from tests.analysis.interventions.oracles import EXACT, SINGLE, flat, hook_name, model_of, pair, recorded, run

WIDE: dict[str, Any] = {"n_layers": 2, "n_heads": 4, "d_model": 32, "d_head": 8, "n_context": 3}


def peak(work: Callable[[], Any]) -> tuple[int, Any]:
    """The most memory that was allocated at once, beyond that before, in bytes, and the result."""
    gc.collect()  # else tensors of earlier tests may be freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = work()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += cast(Any, event).nbytes()
        most = max(most, now)
    return most, made


@cache
def wide(**fields: Any) -> Any:
    return model_of("gpt", **(WIDE | {"d_mlp": 64} | fields))


def linear() -> Any:
    return wide(
        prompt_format="paired", attention="linear", keys="context", normalization_type=None, d_mlp=None
    )  # fmt: skip


def of_bridge(*args: Any, n_pos: int = 8, d_vocab: int = 200, **options: Any) -> Callable[[], Any]:
    model, tokens = (
        oracles.shared_bridge(n_layer=2, n_head=4, n_embd=32, vocab_size=d_vocab, n_positions=n_pos),
        (oracles.ids(0, 3, n_pos, d_vocab), oracles.ids(1, 3, n_pos, d_vocab)),
    )
    metric = next_token_loss(tokens[0]) if "at" in options else logit_difference(tokens[0][:, 0], tokens[0][:, 1])
    return lambda: patch(model, *tokens, *args, metrics=metric, **options)


@cache
def recurrent() -> Any:
    return HookedLSTM(LSTMConfig(x_dim=2, n_context=4, n_layers=2, d_model=16, dtype="float64")).eval()


def of_ours(sweep: Any, model: Any, *args: Any, **options: Any) -> Callable[[], Any]:
    prompts = pair(model)[: 1 if sweep is ablate else 2]
    return lambda: sweep(model, *prompts, *args, **options)


SWEEPS: dict[str, Callable[[], Callable[[], InterventionSweep]]] = {
    "heads": lambda: of_ours(patch, wide(), "z"),
    "local": lambda: of_ours(patch, wide(), "z", {"layer": None, "pos": [0, 3], "head": None}),
    "streams": lambda: of_ours(patch, wide(), "resid_pre", {"layer": None, "pos": [1, 6]}, direction="noising"),
    "patterns": lambda: of_ours(patch, wide(), "pattern", {"layer": None, "head": None, "query": [3]}),
    "ablation": lambda: of_ours(ablate, wide(), "z", {"layer": None, "head": [0, 2]}),
    "paths": lambda: of_ours(patch_paths, wide(n_heads=2)),
    "linear": lambda: of_ours(patch, linear(), "z", {"layer": None, "pos": [1, 2], "head": None}),
    "bridge": lambda: of_bridge("z", {"layer": [0], "head": [0, 3]}),
    "bridge, all positions": lambda: of_bridge("z", {"layer": [1], "head": [0, 3]}, at="positions"),
    "bridge, by position": lambda: of_bridge("resid_pre", n_pos=12, d_vocab=400),
    "scores of all positions": lambda: of_ours(patch, wide(), "attn_scores"),
    "neurons": lambda: of_ours(patch, wide(), "post", ("layer", "pos")),
    "LSTM": lambda: of_ours(patch, recurrent(), "resid_pre", {"layer": None, "pos": [2, 3]}),
}


@pytest.mark.parametrize("name", list(SWEEPS))
def test_memory_is_bounded_and_changes_no_result(name):
    sweep = SWEEPS[name]()
    tight = oracles.least_memory(sweep)
    (least, small), (most, large) = (
        peak(lambda memory=memory: oracles.bounded(memory, sweep)) for memory in (1.1 * tight, 6 * tight)
    )
    assert least <= 1.1 * tight + 4096  # scalars and indices
    assert most <= 6 * tight + 4096
    assert least < most
    tolerance = SINGLE if "bridge" in name else EXACT
    assert_close(small.values, large.values, **tolerance)
    if small.predictions is not None:
        assert_close(flat(small), flat(large), **tolerance)


def test_cells_are_batched_by_where_they_begin_and_end(monkeypatch):
    """After the last layer that a batch's cells edit, no hook is attached."""
    model = model_of("gpt", n_layers=4)
    prompts = oracles.inputs(model, 0)
    seen: list[tuple[int, int, int]] = []
    resume = ModelAdapter.resume

    def spy(self, streams, layer, hooks, last_hooked):
        seen.append((layer, last_hooked, len(streams)))
        layers = {int(name.split(".")[1]) for name, _ in hooks}
        assert (min(layers), max(layers)) == (layer, last_hooked)
        return resume(self, streams, layer, hooks, last_hooked)

    monkeypatch.setattr(ModelAdapter, "resume", spy)
    adapter = ModelAdapter(model)
    experiment = make_experiment(adapter, adapter.encode(prompts), prompts, None)
    heads = [Site("z", layer, head=head) for layer in range(4) for head in range(2)]
    pairs = list(itertools.combinations_with_replacement(heads, 2))
    names = [hook_name("z", layer) for layer in range(4)]
    values = {name: torch.zeros_like(recorded(model, prompts, name)) for name in names}
    baseline = experiment.run_baseline(len(pairs), values)
    results = experiment.run_cells(baseline, [tuple({*pair}) for pair in pairs], values)
    assert results.predictions is not None
    for predicted, two in list(zip(results.predictions, pairs, strict=True))[::5]:
        hooks = [oracles.putting("z", site.layer, {"head": site.head or 0}, values[site.hook_name]) for site in {*two}]
        assert_close(predicted, run(model, prompts, hooks), **EXACT)
    assert {(a, b) for a, b, _ in seen} == {(a, b) for a in range(4) for b in range(a, 4)}
    assert sum(rows for _, _, rows in seen) == 36 * 3
    assert len(seen) == 10
