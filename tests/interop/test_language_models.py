"""Language models with their tokenizers: ours, folders of transformers, names, revisions and GGUF files."""

import importlib.util
from typing import Any

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from mechicl.analysis import FineTuning, compare_with_finetuning
from mechicl.analysis.finetuning import draw_texts
from mechicl.analysis.language import loss_by_position
from mechicl.checkpoints import random_weights
from mechicl.interop import language_models, load_language_model
from mechicl.interop.language_models import is_language_model
from mechicl.tasks.topics import WORDS
from mechicl.text import TEXT_TASKS, text_shots, topic_tokenizer
from tests.text.models import reader, saved

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def test_a_checkpoint_of_ours_by_folder_and_seed(tmp_path):
    folder = saved(tmp_path / "reader")
    language = load_language_model(folder, seed=1)
    assert language.name == "reader"
    assert not language.model.training
    torch.testing.assert_close(language.model.W_Q, reader(1).W_Q)
    torch.testing.assert_close(load_language_model(folder).model.W_Q, reader(0).W_Q)
    assert language.tokenizer.decode(language.tokenizer("cat oak").input_ids) == "[START] cat oak"
    with pytest.raises(ValueError, match=r"reader has no seed 7; it has \[0, 1\]"):
        load_language_model(folder, seed=7)


@pytest.fixture
def gpt2(tmp_path):
    """A folder as `save_pretrained` writes it, with a tokenizer of words, and its model."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 64, "vocab_size": len(WORDS)}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    for each in (model, topic_tokenizer()):
        each.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2", model


def test_a_folder_of_transformers_is_opened_and_compared(gpt2):
    folder, wrapped = gpt2
    language = load_language_model(folder)
    assert language.name == "gpt2"
    tokens = torch.tensor([language.tokenizer("cat oak red").input_ids])
    with torch.no_grad():
        torch.testing.assert_close(language.model(tokens), wrapped(tokens).logits, atol=1e-5, rtol=1e-5)
    texts = draw_texts(TEXT_TASKS["farm"], n_demonstrations=4, n_queries=3, n_held_out=2, seed=0)
    shots = text_shots(language.tokenizer, texts.demonstrations, texts.queries)
    comparison = compare_with_finetuning(language.model, shots, FineTuning(0.1))
    assert comparison.update_similarity.shape == (2, 3)
    assert comparison.update_similarity.isfinite().all()


@pytest.mark.parametrize("bridge", [False, True])
def test_the_tokenizer_begins_texts_as_the_model_does(bridge):
    vocab = {"<|endoftext|>": 0, "a": 1, "b": 2}
    sizes = {"vocab_size": 3, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for kind, start in (("GPT2", [0]), ("GPTNeoX", [])):
        config = getattr(transformers, f"{kind}Config")(**sizes, bos_token_id=0, eos_token_id=0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        tokenizer = getattr(transformers, f"{kind}TokenizerFast")(vocab=vocab, merges=[])
        language = load_language_model(model=model, tokenizer=tokenizer, bridge=bridge)
        assert language.tokenizer("ab").input_ids == language.model.to_tokens("ab")[0].tolist() == [*start, 1, 2]


@torch.no_grad()
def test_a_bridge_is_opened_on_request(gpt2):
    folder, wrapped = gpt2
    tokens = torch.tensor([[0, 5, 9, 3]])
    tokenizer = load_language_model(folder).tokenizer
    for kind in ("HookedTransformer", "TransformerBridge"):
        bridge = kind == "TransformerBridge"
        by_name = load_language_model(folder, bridge=bridge)
        in_memory = load_language_model(model=wrapped, tokenizer=tokenizer, bridge=bridge)
        assert str(by_name) == f"LanguageModel('gpt2', opened as a {kind})"
        assert str(in_memory) == f"LanguageModel('GPT2LMHeadModel', opened as a {kind})"
        for language in (by_name, in_memory):
            torch.testing.assert_close(language.model(tokens), wrapped(tokens).logits, atol=1e-5, rtol=1e-5)
    wrapped.config.dequantized_from = "gpt2.Q4_1.gguf"
    wrapped.save_pretrained(folder)
    for bridge in (False, True):
        assert load_language_model(folder, bridge=bridge).dequantized_from == "gpt2.Q4_1.gguf"


def test_a_folder_of_transformers_that_was_never_trained(gpt2):
    folder, wrapped = gpt2
    state = torch.get_rng_state()
    with random_weights():
        fresh, again, other = (load_language_model(folder, seed=seed).model for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    tokens = torch.tensor([[0, 5, 9, 3]])
    with torch.no_grad():
        logits = [model(tokens) for model in (fresh, again, other)]
        _, cache = fresh.run_with_cache(tokens)
        assert not torch.allclose(logits[0], wrapped(tokens).logits, atol=1e-3)
    torch.testing.assert_close(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2], atol=1e-3)
    assert cache["blocks.0.attn.hook_pattern"].sum(-1).allclose(torch.ones(()))


# ---- what is refused, and how errors read ----
@pytest.mark.parametrize(("call", "message"), [
    (lambda folder: load_language_model("lsa-1l"), "lsa-1l was trained on LinearRegression, not on texts"),
    (lambda folder: load_language_model("topics-3l", revision="step1000"), "revision and gguf_file"),
    (lambda folder: load_language_model(folder, revision="step1000"), "revision is for models on the hub"),
    (lambda folder: load_language_model(folder / "nothing"), "neither a folder nor a name on the hub"),
    (lambda folder: loss_by_position(load_language_model(folder), torch.full((1, 65), 5)),
     "65 tokens, and the model reads at most 64"),
])  # fmt: skip
def test_requests_that_cannot_be_honoured(gpt2, call, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        call(gpt2[0])


def test_gguf_needs_its_package(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"mechicl\[gguf\]"):
        load_language_model(tmp_path, gguf_file="weights.gguf")


@pytest.mark.parametrize(("raised", "expected", "named"), [
    (OSError("couldn't connect to the hub"), OSError, "network"),
    (MemoryError(), MemoryError, "dtype"),
    (ValueError("Unsupported architecture: XForCausalLM"), ValueError, "does not support"),
    (ValueError("something else"), ValueError, "something else"),
])  # fmt: skip
def test_errors_name_the_model_and_the_fix(monkeypatch, raised, expected, named):
    def fail(*args, **options):
        raise raised

    monkeypatch.setattr(language_models, "download_model", fail)
    with pytest.raises(expected, match=named):
        load_language_model("some/model")


def test_names_of_language_models(tmp_path):
    assert is_language_model("EleutherAI/pythia-70m")
    assert not is_language_model("lsa-1l")
    assert not is_language_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert is_language_model(tmp_path)
    (tmp_path / "record.json").write_text("{}")
    assert not is_language_model(tmp_path)
