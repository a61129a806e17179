"""Effects of heads of SmolLM2 (`make lm`): the time of our calls, and of TransformerLens' hooks in a loop."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.rows import Row, Settings, alternate, ratios, row, timed
from mechicl import settings
from mechicl.analysis import ablate, attribute, find_circuit, patch
from mechicl.analysis.interventions import Replacement, logit_difference, target_probability
from mechicl.analysis.language import function_vectors
from mechicl.interop import LanguageModel, load_language_model
from mechicl.text import WordPrompts, word_prompts

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mechicl" / "smollm2"
N_PROMPTS, N_SAMPLED = 16, 8  # the loop is timed on a sample of the heads


def open_smollm2() -> LanguageModel:
    if not (CACHE / "model.safetensors").is_file():
        raise ImportError("SmolLM2; run `make lm`")
    return load_language_model(CACHE)


def measure(settings: Settings) -> list[Row]:
    """Replace each head's output at the last position by its mean over other prompts."""
    language = open_smollm2()
    draw = {"tokenizer": language.tokenizer, "task": "antonyms", "n_shots": 10, "n_prompts": N_PROMPTS}
    prompts = word_prompts(**draw, labels="shuffled", seed=0)
    clean = word_prompts(**draw, seed=1)
    metric, last = target_probability(prompts.targets), prompts.ids.shape[1] - 1
    with torch.no_grad():
        names = [f"blocks.{layer}.attn.hook_z" for layer in range(language.model.cfg.n_layers)]
        cache = language.model.run_with_cache(clean.ids, names_filter=names)[1]
        means = [cache[name][:, -1].mean(0) for name in names]

    def ours() -> torch.Tensor:
        swept = ablate(
            language.model, prompts.ids, "z", {"layer": None, "pos": last, "head": None},
            method=Replacement("mean", clean.ids), metrics=metric, progress=False,
        )  # fmt: skip
        return swept.values["metric"][:, 0]

    n_layers, n_heads = language.model.cfg.n_layers, language.model.cfg.n_heads
    layers = torch.linspace(0, n_layers - 1, N_SAMPLED).long().tolist()
    heads = [(layer, layer % n_heads) for layer in layers]
    share = n_layers * n_heads / len(heads)
    times, plain, difference = [], [], 0.0
    for _ in range(2):
        seconds, found = timed(ours)
        of_loop, values = timed(lambda: loop(language, prompts, means, heads, metric))
        times.append(seconds)
        plain.append(share * of_loop)
        differences = [found[head] - value for head, value in zip(heads, values, strict=True)]
        difference = max(difference, float(torch.stack(differences).abs().max()))
    heads_words = f"effects of {n_layers * n_heads} heads on {N_PROMPTS} prompts"
    quantity = f"{heads_words}: a loop of TransformerLens' hooks over ours"
    seen = f"loop {min(plain):.0f} s (from {len(heads)} heads), ours {min(times):.0f} s; difference {difference:.0e}"
    return [row(quantity, ratios(plain, times), ">= 3", seen)]


@torch.no_grad()
def loop(
    language: LanguageModel, prompts: WordPrompts, means: list[torch.Tensor], heads: list[tuple[int, int]],
    metric: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    """Run the model once for each head, with one hook."""
    values = []
    for layer, head in heads:

        def replace(z, hook, layer=layer, head=head):
            z[:, -1, head] = means[layer][head]
            return z

        logits = language.model.run_with_hooks(prompts.ids, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", replace)])
        values.append(metric(logits[:, -1]))
    return values


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    started = time.process_time()
    call()
    return time.process_time() - started


def waiting_rows(rounds: int, n_prompts: int = 4) -> list[Row]:
    """CPU seconds of `attribute`, `patch`, `function_vectors` and a first circuit, and of the same by hooks."""
    language = open_smollm2()
    draw: dict[str, Any] = {"tokenizer": language.tokenizer, "task": "antonyms", "n_shots": 10, "n_prompts": n_prompts}
    clean, corrupted = word_prompts(**draw, seed=0), word_prompts(**draw, labels="shuffled", seed=0)
    metric = target_probability(clean.targets)
    pair = language.model, clean.ids, corrupted.ids
    n_layers, n_heads, last = language.model.cfg.n_layers, language.model.cfg.n_heads, clean.ids.shape[1] - 1
    quiet: dict[str, Any] = {"metrics": metric, "progress": False}
    sizes = f"{n_prompts} prompts of {last + 1} tokens"
    of_heads = partial(attribute, *pair, "z", {"layer": None, "pos": None, "head": None}, **quiet)
    by_hooks = partial(attribute_by_hooks, *pair, metric)
    found, expected = of_heads().effect(), by_hooks()
    with settings(memory=2**31):  # the hooks keep all activations at once
        times = alternate({"ours": partial(cpu_seconds, of_heads), "hooks": partial(cpu_seconds, by_hooks)}, rounds)
    words = f"{sizes}, 2 GiB; difference {(found - expected).abs().max():.0e}"
    rows = [
        row("attribute on SmolLM2, all heads and positions: seconds", times["ours"], "<= 2.5", words),
        row("the same by hooks of TransformerLens, over ours", ratios(times["hooks"], times["ours"]), ">= 1", sizes),
    ]
    last_layer = [(n_layers - 1, head) for head in range(n_heads)]
    every_third = [(layer, layer % n_heads) for layer in range(0, n_layers, 3)]
    for of, heads, share, bar in (
        ("nine heads of the last layer", last_layer, 1, ">= 1.5"),
        ("all heads", every_third, n_layers * n_heads / len(every_third), ">= 2.5"),
    ):
        layers = sorted({layer for layer, _ in heads}) if share == 1 else None
        swept = partial(patch, *pair, "z", {"layer": layers, "pos": last, "head": None}, **quiet)
        one_by_one = partial(patch_by_hooks, *pair, metric, heads)
        swept()  # a first call also looks whether every layer can be entered
        times = alternate({"ours": partial(cpu_seconds, swept), "loop": partial(cpu_seconds, one_by_one)}, rounds)
        words = f"loop {share * min(times['loop']):.3g} s, ours {min(times['ours']):.3g} s, last position, {sizes}"
        loop_times = [share * each for each in times["loop"]]
        rows.append(
            row(f"patch on SmolLM2, {of}: a loop of hooks over ours", ratios(loop_times, times["ours"]), bar, words)
        )
    vectors = partial(function_vectors, language, "antonyms", n_prompts=6, n_clean=20, progress=False)
    rows.append(row("function_vectors on SmolLM2: seconds", [cpu_seconds(vectors)], "<= 60", "6 prompts, 20 clean"))
    short = word_prompts(language.tokenizer, "antonyms", n_shots=1, n_prompts=2, seed=0)
    difference = logit_difference(short.targets, short.targets.flip(0))
    first = partial(find_circuit, language.model, short.ids, difference, search="eap-ig", effects=False, progress=False)
    words = f"2 prompts of {short.ids.shape[1]} tokens"
    return [*rows, row("find_circuit on SmolLM2, EAP-IG: seconds", [cpu_seconds(first)], "<= 60", words)]


def attribute_by_hooks(model: Any, clean: Tensor, corrupted: Tensor, metric: Callable[[Tensor], Tensor]) -> Tensor:
    """Attribution of all heads at all positions by one run, and one run with gradients: `[layer pos head prompt]`."""
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
    with torch.no_grad():
        source = model.run_with_cache(clean, names_filter=names)[1]
    into: dict[str, Tensor] = {}

    def keep(z: Tensor, hook: Any) -> Tensor:
        z.retain_grad()
        into[hook.name] = z
        return z

    metric(model.run_with_hooks(corrupted, fwd_hooks=[(name, keep) for name in names])[:, -1]).sum().backward()
    changes = [((source[name] - into[name]) * into[name].grad).sum(-1) for name in names]
    model.zero_grad()
    return torch.stack(changes).detach().permute(0, 2, 3, 1)


@torch.no_grad()
def patch_by_hooks(
    model: Any, clean: Tensor, corrupted: Tensor, metric: Callable[[Tensor], Tensor], heads: list[tuple[int, int]]
) -> list[Tensor]:
    """One run for each head, with one hook."""
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
    source, values = model.run_with_cache(clean, names_filter=names)[1], []
    for layer, head in heads:

        def put(z: Tensor, hook: Any, head: int = head) -> Tensor:
            z[:, -1, head] = source[hook.name][:, -1, head]
            return z

        values.append(metric(model.run_with_hooks(corrupted, fwd_hooks=[(names[layer], put)])[:, -1]))
    return values
