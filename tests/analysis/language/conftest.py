"""A small language model with random weights, grouped keys and values, and a tokenizer of whole words."""

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mechicl.interop import LanguageModel
from mechicl.text import WORD_TASKS

TASKS = ("antonyms", "plural", "past_tense")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for every word with its space, and for every other character."""
    words = {word for name in TASKS for pair in WORD_TASKS[name].pairs for word in pair}
    vocab = ["<unk>", "<s>", "Q", "A", ":", "\n", *(f" {word}" for word in sorted(words))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocab)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" [^\s]+|\n|[^\s]"), "isolated")  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


@pytest.fixture(scope="package")
def hf_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(make_tokenizer()), hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="package")
def language(hf_model: LlamaForCausalLM) -> LanguageModel:
    twin = LlamaForCausalLM(hf_model.config).eval()
    twin.load_state_dict(hf_model.state_dict())
    bridge = build_bridge_from_module(twin, "LlamaForCausalLM", hf_config=hf_model.config)
    bridge.eval()
    return LanguageModel("tiny", bridge, make_tokenizer())
