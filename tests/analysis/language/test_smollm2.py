"""SmolLM2 (135 million parameters) against `transformers` with torch's hooks; skipped if `make lm` has not run."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mechicl.analysis import score_heads
from mechicl.analysis.language import ablate_matched, function_vectors, icl_score
from mechicl.base.settings import settings
from mechicl.interop import load_language_model
from mechicl.text import word_prompts
from tests.analysis.language.test_language import heads_outputs, logits_of, probability, replacing

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mechicl" / "smollm2"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.* pairs of task"),
    pytest.mark.skipif(not FOLDER.exists(), reason="SmolLM2 is not there: make lm fetches it (93 MB)"),
]


@pytest.fixture(scope="module")
def pair():
    plain = AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="eager", dtype=torch.float32).eval()
    return load_language_model(FOLDER), plain


@torch.no_grad()
def test_logits(pair):
    language, plain = pair
    ids = word_prompts(language.tokenizer, "capitals", n_prompts=4, n_shots=4).ids
    difference = (language.model(ids) - plain(ids).logits).abs().max()
    assert difference <= 1e-4


@torch.no_grad()
def test_effects_of_heads(pair):
    language, plain = pair
    draw = {"n_shots": 4, "seed": 1}
    with settings(memory=2**31):
        found = function_vectors(language, "antonyms", n_prompts=4, n_clean=6, progress=False, **draw)
    clean = word_prompts(language.tokenizer, "antonyms", n_prompts=6, n_shots=4, seed=1)
    shuffled = word_prompts(language.tokenizer, "antonyms", n_prompts=4, n_shots=4, labels="shuffled", seed=2)
    means = heads_outputs(plain, clean.ids)[:, :, -1].mean(1)
    for layer, head in found.heads[:3]:
        logits = logits_of(plain, shuffled.ids, replacing(plain, [(layer, head)], means, -1))
        expected = probability(logits, shuffled.targets) - found.shuffled
        torch.testing.assert_close(found.indirect_effects[layer, head], expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_induction_scores(pair):
    language, plain = pair
    half = torch.stack([torch.randperm(10_000, generator=torch.Generator().manual_seed(i))[:20] for i in range(4)])
    ids = torch.cat([half, half], dim=1) + 100
    patterns = torch.stack(plain(ids, output_attentions=True).attentions)  # [layer prompt head query key]
    seconds = range(20, 40)
    induction = torch.stack([patterns[..., i, i - 19] for i in seconds]).mean(0).transpose(1, 2)  # [layer head prompt]
    scores = score_heads(language.model, sequences=ids, progress=False)
    torch.testing.assert_close(scores.scores["induction"], induction.double(), atol=1e-4, rtol=0)


@torch.no_grad()
def test_ablation_of_heads(pair):
    language, plain = pair
    draw = {"tokenizer": language.tokenizer, "task": "antonyms", "n_shots": 4}
    prompts = word_prompts(**draw, n_prompts=4, seed=1)
    reference = word_prompts(**draw, n_prompts=6, labels="shuffled", seed=2)
    heads = [(14, 1), (20, 5), (20, 0)]
    found = ablate_matched(language.model, prompts, heads, reference=reference, n_random=1, progress=False)
    without = logits_of(plain, prompts.ids, replacing(plain, heads, heads_outputs(plain, reference.ids).mean(1)))
    torch.testing.assert_close(found.ablated, probability(without, prompts.targets), atol=1e-4, rtol=0)


def test_antonyms_are_learned_in_context(pair):
    with settings(memory=2**31):
        scores = icl_score(pair[0], "antonyms", shots=(0, 8), n_prompts=16, progress=False)
    assert scores.gain("antonyms").low > 0
