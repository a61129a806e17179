"""Loading language models by name, revision and GGUF file: what is refused, and how errors read."""

import importlib.util
from types import SimpleNamespace

import pytest
from transformer_lens.model_bridge import TransformerBridge

from mechicl.interop import load_language_model
from mechicl.interop.language_models import is_language_model


def test_our_checkpoints_have_no_revisions():
    with pytest.raises(ValueError, match="revision and gguf_file"):
        load_language_model("topics-3l", revision="step1000")


def test_gguf_needs_its_package(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"mechicl\[gguf\]"):
        load_language_model(tmp_path, gguf_file="weights.gguf")


@pytest.mark.parametrize(
    ("raised", "expected", "named"),
    [
        (OSError("couldn't connect to the hub"), OSError, "network"),
        (MemoryError(), MemoryError, "dtype"),
        (ValueError("Unsupported architecture: XForCausalLM"), ValueError, "does not support"),
        (ValueError("something else"), ValueError, "something else"),
    ],
)
def test_errors_name_the_model_and_the_fix(monkeypatch, raised, expected, named):
    def fail(*args, **options):
        raise raised

    monkeypatch.setattr(TransformerBridge, "boot_transformers", fail)
    with pytest.raises(expected, match=named):
        load_language_model("some/model")


def test_revision_and_type_are_passed_on(monkeypatch):
    seen = {}
    bridge = SimpleNamespace(eval=lambda: None, tokenizer="tokenizer")
    monkeypatch.setattr(TransformerBridge, "boot_transformers", lambda name, **options: seen.update(options) or bridge)
    language = load_language_model("some/model", revision="step1000")
    assert (language.name, language.tokenizer, seen["revision"]) == ("some/model@step1000", "tokenizer", "step1000")


def test_names_of_language_models(tmp_path):
    assert is_language_model("EleutherAI/pythia-70m")
    assert not is_language_model("lsa-1l")
    assert not is_language_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert is_language_model(tmp_path)
    (tmp_path / "record.json").write_text("{}")
    assert not is_language_model(tmp_path)
