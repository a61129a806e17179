"""SmolLM2 (135 million parameters) against `transformers` with torch's hooks; skipped if `make lm` has not run."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mechicl.analysis.language import icl_score
from mechicl.base.settings import settings
from mechicl.interop import load_language_model
from mechicl.text import word_prompts

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


def test_antonyms_are_learned_in_context(pair):
    with settings(memory=2**31):
        scores = icl_score(pair[0], "antonyms", shots=(0, 8), n_prompts=16, progress=False)
    assert scores.gain("antonyms").low > 0
