"""Text in and out of a model, against the tokenizer itself."""

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mechicl.models import HookedTransformer, HookedTransformerConfig, TransformerConfig
from tests.strategies import random_prompts

WORDS = ["<pad>", "<bos>", "<eos>", "the", "cat", "sat", "on", "mat"]
SMALL: dict[str, Any] = {"n_layers": 1, "d_model": 8, "n_ctx": 6, "d_head": 4, "d_vocab": len(WORDS)}


def word_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    ids = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    ids.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=ids, **special)


@pytest.fixture
def model() -> HookedTransformer:
    tokenizer = word_tokenizer(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    return HookedTransformer(HookedTransformerConfig(**SMALL), tokenizer=tokenizer).eval()


def test_to_tokens(model: HookedTransformer):
    assert model.to_tokens("the cat").tolist() == [[1, 3, 4]]
    assert model.to_tokens("the cat", prepend_bos=False).tolist() == [[3, 4]]
    assert model.to_tokens(["the cat sat", "mat"]).tolist() == [[1, 3, 4, 5], [1, 7, 0, 0]]  # padded on the right
    assert model.to_tokens(["the"] * 2, prepend_bos=False).tolist() == [[3], [3]]
    assert model.to_tokens("the " * 9).shape == (1, 6)
    assert model.to_tokens("the " * 9, truncate=False).shape == (1, 10)
    assert model.to_tokens("", prepend_bos=False).shape == (1, 0)
    assert model.to_tokens("", prepend_bos=False).dtype == torch.int64
    tokens = torch.tensor([[1, 2]])
    assert model.to_tokens(tokens) is tokens


@pytest.mark.usefixtures("unchecked_types")
def test_to_text(model: HookedTransformer):
    assert model.to_string(torch.tensor([3, 4])) == "the cat"
    assert model.to_string(torch.tensor([[3], [4]])) == ["the", "cat"]
    assert model.to_string([3, 4]) == model.to_string(np.array([3, 4])) == "the cat"
    assert model.to_string(torch.tensor(4)) == "cat"
    assert model.to_str_tokens("the cat") == ["<bos>", "the", "cat"]
    assert model.to_str_tokens(["the", "cat sat"], prepend_bos=False) == [["the"], ["cat", "sat"]]
    for ids in (torch.tensor([3, 4]), torch.tensor([[3, 4]]), np.array([3, 4])):
        assert model.to_str_tokens(ids) == ["the", "cat"]
    assert model.to_single_str_token(7) == "mat"
    with pytest.raises(ValueError, match="of one prompt"):
        model.to_str_tokens(torch.zeros(2, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\[batch pos\] or \[pos\], got \(1, 1, 1\)"):
        model.to_string(torch.zeros(1, 1, 1, dtype=torch.long))


def test_single_tokens(model: HookedTransformer):
    assert model.to_single_token("cat") == 4
    assert model.to_single_token(4) == 4
    with pytest.raises(ValueError, match="2 tokens, not one"):
        model.to_single_token("the cat")
    with pytest.raises(ValueError, match="8 is not a token id: the model has d_vocab=8"):
        model.to_single_token(8)
    assert torch.equal(model.tokens_to_residual_directions("cat"), model.W_U[:, 4])


@pytest.mark.usefixtures("unchecked_types")
def test_positions(model: HookedTransformer):
    assert model.get_token_position("the", "the cat the mat") == 1
    assert model.get_token_position("the", "the cat the mat", mode="last") == 3
    assert model.get_token_position("the", "the cat the mat", mode="last", prepend_bos=False) == 2
    assert model.get_token_position(4, torch.tensor([[3, 4]])) == 1
    with pytest.raises(ValueError, match="'sat' does not occur"):
        model.get_token_position("sat", "the cat")
    with pytest.raises(ValueError, match="mode='any' is not one of"):
        model.get_token_position("the", "the cat", mode="any")  # type: ignore[arg-type]


def test_text_goes_in_where_tokens_do(model: HookedTransformer):
    tokens = model.to_tokens("the cat")
    assert torch.equal(model("the cat"), model(tokens))
    assert torch.equal(model("the cat", prepend_bos=False), model(tokens[:, 1:]))
    assert torch.equal(model(["the cat"], return_type="loss"), model(tokens, return_type="loss"))
    _, cache = model.run_with_cache("the cat")
    assert cache["hook_embed"].shape == (1, 3, 8)
    assert torch.equal(model.run_with_hooks("the cat", fwd_hooks=[]), model(tokens))
    embedded, same, *_ = model.input_to_embed("the cat")
    assert torch.equal(same, tokens)
    assert torch.equal(embedded, model(tokens, stop_at_layer=0))


def test_a_tokenizer_that_prepends():
    tokenizer = word_tokenizer(bos_token="<bos>", eos_token="<eos>")
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(  # type: ignore[assignment]
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
    )
    model = HookedTransformer(HookedTransformerConfig(**SMALL), tokenizer=tokenizer)
    assert model.to_tokens("the cat").tolist() == [[1, 3, 4]]
    assert model.to_tokens("the cat", prepend_bos=False).tolist() == [[3, 4]]


def test_the_tokenizer_itself_stays_as_it_is():
    tokenizer = word_tokenizer(eos_token="<eos>")
    model = HookedTransformer(HookedTransformerConfig(**SMALL))
    model.set_tokenizer(tokenizer)
    assert tokenizer.pad_token is None
    assert model.tokenizer is not None
    assert (model.tokenizer.pad_token, model.tokenizer.bos_token) == ("<eos>", "<eos>")


def test_the_default_for_the_first_token():
    tokenizer = word_tokenizer(bos_token="<bos>", eos_token="<eos>")
    cfg = HookedTransformerConfig(**SMALL, default_prepend_bos=False)
    model = HookedTransformer(cfg, tokenizer=tokenizer)
    assert model.to_tokens("the cat").tolist() == [[3, 4]]
    assert model.to_tokens("the cat", prepend_bos=True).tolist() == [[1, 3, 4]]


@pytest.mark.usefixtures("unchecked_types")
def test_what_has_no_text():
    model = HookedTransformer(HookedTransformerConfig(**SMALL))
    for call in (lambda: model("the cat"), lambda: model.to_string([1]), lambda: model.to_single_token("cat")):
        with pytest.raises(ValueError, match="no tokenizer"):
            call()
    with pytest.raises(TypeError, match="str is no tokenizer of transformers"):
        model.set_tokenizer("gpt2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="default_padding_side='left'"):
        model.set_tokenizer(word_tokenizer(), default_padding_side="left")  # type: ignore[arg-type]
    points = HookedTransformer(TransformerConfig(x_dim=2, n_context=3))
    with pytest.raises(ValueError, match="reads points"):
        points.set_tokenizer(word_tokenizer())
    prompts = random_prompts(points.cfg)
    assert torch.equal(points.to_tokens(prompts), points.encode(prompts))
