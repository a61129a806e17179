"""Effects of all heads of a language model: the time of `ablate`, and of TransformerLens' hooks in a loop."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.rows import Row, Settings, ratios, row, timed
from mechicl.analysis import ablate
from mechicl.analysis.interventions import Replacement, target_probability
from mechicl.interop import LanguageModel, load_language_model
from mechicl.text import WordPrompts, word_prompts

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mechicl" / "smollm2"
N_PROMPTS, N_SAMPLED = 16, 8  # the loop is timed on a sample of the heads


def measure(settings: Settings) -> list[Row]:
    """Replace each head's output at the last position by its mean over other prompts, on SmolLM2 (`make lm`)."""
    if not (CACHE / "model.safetensors").is_file():
        raise ImportError("SmolLM2; run `make lm`")
    language = load_language_model(CACHE)
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
