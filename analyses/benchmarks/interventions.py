"""The time of patching, compared with a loop of single runs by `transformer_lens.patching`."""

import contextlib
import io
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformer_lens.patching import generic_activation_patch, layer_pos_head_vector_patch_setter
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.rows import Row, Settings, row, timed
from mechicl.analysis import InterventionSweep, PatchingSession, corrupt, patch
from mechicl.checkpoints import load_checkpoint
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.sites import Site

AXES = ("layer", "pos", "head")


def loop_of_runs(model: Any, clean: Tensor, corrupted: Tensor, metric: Any, cells: pd.DataFrame) -> Tensor:
    """One run for each cell with one hook, by TransformerLens: `[cell prompt]`."""
    with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        _, cache = model.run_with_cache(clean)
        result: Any = generic_activation_patch(
            model, corrupted, cache, metric, layer_pos_head_vector_patch_setter, "z", index_df=cells, reduce="none"
        )
    return result.values


def compare(
    model: Any, clean: Any, corrupted: Any, metric: Any, rounds: int, only: dict[str, list[int]]
) -> tuple[list[float], list[float], float]:
    """Ratios of the loop's time to ours, our seconds, and the largest difference of the metric of the last outputs."""
    encode = ModelAdapter(model).encode
    options: dict[str, Any] = {"metrics": metric, "axes": dict.fromkeys(AXES) | only, "progress": False}
    ratios, ours, difference = [], [], 0.0
    for _ in range(rounds):
        seconds, swept = timed(lambda: patch(model, clean, corrupted, "z", **options))
        cells = pd.DataFrame(list(itertools.product(*swept.indices)), columns=list(AXES))
        arguments = model, encode(clean), encode(corrupted), lambda out: metric(out[:, -1]), cells
        of_loop, plain = timed(partial(loop_of_runs, *arguments))
        ours.append(seconds)
        ratios.append(of_loop / seconds)
        difference = max(difference, (plain - swept.values["metric"].flatten(0, 2)).abs().max().item())
    return ratios, ours, difference


def regression_rows(rounds: int, n_prompts: int) -> list[Row]:
    """Every head's output at every position of the 8-layer model."""
    checkpoint = load_checkpoint("gpt2-8l")
    model, clean = checkpoint.models[0], checkpoint.task.sample(n_prompts, seed=0)
    corrupted = corrupt(clean, "labels")
    ratios, ours, difference = compare(model, clean, corrupted, lambda predictions: predictions[:, 0], rounds, {})
    detail = f"8 x 41 x 4 cells, {n_prompts} prompts"
    return [
        row(f"head outputs of gpt2-8l, loop of single runs over ours, {n_prompts} prompts", ratios, ">= 5", detail),
        row("the same, seconds of ours", ours, "", ""),
        row("the same, largest difference of predictions", [difference], "<= 1e-5", ""),
    ]


def bridge() -> Any:
    """GPT-2's shape with random weights as a `TransformerBridge`."""
    torch.manual_seed(0)
    config = GPT2Config()
    return build_bridge_from_module(GPT2LMHeadModel(config).eval(), "GPT2LMHeadModel", hf_config=config)


def bridge_rows(rounds: int, n_prompts: int = 2, n_pos: int = 16) -> list[Row]:
    """Every head's output at four positions of a model of GPT-2's shape."""
    model = bridge()
    generator = torch.Generator().manual_seed(0)
    clean, corrupted = torch.randint(50257, (2, n_prompts, n_pos), generator=generator)
    ratios, ours, difference = compare(
        model, clean, corrupted, lambda logits: logits[:, 11] - logits[:, 22], rounds, {"pos": [3, 7, 11, 15]}
    )
    return [
        row("head outputs of a 12-layer TransformerBridge, loop over ours", ratios, ">= 2",
            f"12 x 4 x 12 cells, {n_prompts} prompts of {n_pos} tokens, GPT-2's shape, random weights"),
        row("the same, seconds of ours", ours, "", ""),
        row("the same, largest difference of logit differences", [difference], "<= 1e-4", ""),
    ]  # fmt: skip


def peak_bytes(sweep: Callable[[], InterventionSweep]) -> int:
    """The most memory that tensors made by a call take at one time, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        sweep()
    now = peak = 0
    profiler: Any = record.profiler
    events = profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def session_rows() -> list[Row]:
    """Seconds from a click in the explorer to its prediction, without the browser."""
    rows = []
    for name in ("gpt2-8l", "copy-2l", "lsa-1l"):
        checkpoint = load_checkpoint(name)
        clean = checkpoint.task.sample(4, seed=0)
        session = PatchingSession(checkpoint.models[0], clean, corrupt(clean, "labels"))
        seconds = []
        for layer, pos in itertools.product(range(session.n_layers), range(session.n_pos)):
            site = Site("resid_pre", layer, pos=pos)
            seconds.append(timed(lambda session=session, site=site: (session.toggle(site), session.result()))[0])
            session.undo()
        rows.append(row(f"patching session on {name}, seconds a click", seconds, "< 0.2", f"{len(seconds)} clicks"))
    return rows


def measure(settings: Settings) -> list[Row]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [*regression_rows(min(settings.rounds, 3), 16), *regression_rows(1, 64), *bridge_rows(1)]
        return [*rows, *session_rows()]
    finally:
        torch.set_num_threads(before)
