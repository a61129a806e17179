"""Text in and out of a model, against the tokenizer itself, and generated tokens, against a loop over the logits."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mechicl.models import HookedTransformer, HookedTransformerConfig, TransformerConfig
from tests.strategies import random_model, random_prompts

WORDS = ["<pad>", "<bos>", "<eos>", "the", "cat", "sat", "on", "mat"]
SMALL: dict[str, Any] = {"n_layers": 2, "d_model": 8, "n_ctx": 12, "d_head": 4, "d_vocab": len(WORDS)}


def word_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    ids = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    ids.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=ids, **special)


@pytest.fixture
def model() -> HookedTransformer:
    model = random_model(HookedTransformerConfig(**SMALL)).eval()
    model.set_tokenizer(word_tokenizer(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"))
    return model


def test_to_tokens(model: HookedTransformer):
    assert model.to_tokens("the cat").tolist() == [[1, 3, 4]]
    assert model.to_tokens("the cat", prepend_bos=False).tolist() == [[3, 4]]
    assert model.to_tokens(["the cat sat", "mat"]).tolist() == [[1, 3, 4, 5], [1, 7, 0, 0]]  # padded on the right
    assert model.to_tokens(["the"] * 2, prepend_bos=False).tolist() == [[3], [3]]
    assert model.to_tokens("the " * 19).shape == (1, 12)
    assert model.to_tokens("the " * 19, truncate=False).shape == (1, 20)
    assert model.to_tokens("", prepend_bos=False).shape == (1, 0)
    assert model.to_tokens("", prepend_bos=False).dtype == torch.int64
    tokens = torch.tensor([[1, 2]])
    assert model.to_tokens(tokens) is tokens
    points = HookedTransformer(TransformerConfig(x_dim=2, n_context=3))
    prompts = random_prompts(points.cfg)
    assert torch.equal(points.to_tokens(prompts), points.encode(prompts))


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
    assert model.to_single_token("cat") == model.to_single_token(4) == 4
    column = model.get_parameter("ln_final.w") * model.W_U[:, 4]
    torch.testing.assert_close(model.tokens_to_residual_directions("cat"), column)
    assert model.get_token_position("the", "the cat the mat") == 1
    assert model.get_token_position("the", "the cat the mat", mode="last") == 3
    assert model.get_token_position("the", "the cat the mat", mode="last", prepend_bos=False) == 2
    assert model.get_token_position(4, torch.tensor([[3, 4]])) == 1


def test_text_as_input(model: HookedTransformer):
    tokens = model.to_tokens("the cat")
    assert torch.equal(model("the cat"), model(tokens))
    assert torch.equal(model("the cat", prepend_bos=False), model(tokens[:, 1:]))
    assert torch.equal(model(["the cat"], return_type="loss"), model(tokens, return_type="loss"))
    assert model.run_with_cache("the cat")[1]["hook_embed"].shape == (1, 3, 8)
    assert torch.equal(model.run_with_hooks("the cat", fwd_hooks=[]), model(tokens))
    embedded, same, *_ = model.input_to_embed("the cat")
    assert torch.equal(same, tokens)
    assert torch.equal(embedded, model(tokens, stop_at_layer=0))


def test_tokenizers():
    prepends = word_tokenizer(bos_token="<bos>", eos_token="<eos>")
    prepends.backend_tokenizer.post_processor = TemplateProcessing(  # type: ignore[assignment]
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
    )
    plain = word_tokenizer(bos_token="<bos>", eos_token="<eos>")
    for tokenizer, default in ((prepends, True), (plain, True), (plain, False)):
        cfg = HookedTransformerConfig(**SMALL, default_prepend_bos=default)
        model = HookedTransformer(cfg, tokenizer=tokenizer)
        assert model.to_tokens("the cat").tolist() == [[1, 3, 4] if default else [3, 4]]
        assert model.to_tokens("the cat", prepend_bos=True).tolist() == [[1, 3, 4]]
        assert model.to_tokens("the cat", prepend_bos=False).tolist() == [[3, 4]]
    bare = word_tokenizer(eos_token="<eos>")
    model.set_tokenizer(bare)
    assert bare.pad_token is None  # the model has a copy
    assert model.tokenizer is not None
    assert (model.tokenizer.pad_token, model.tokenizer.bos_token) == ("<eos>", "<eos>")


# ---- generated tokens ----


def greedy(model: HookedTransformer, tokens: Tensor, steps: int, stop: int | None = None) -> Tensor:
    rows = tokens.tolist()
    for row in rows:
        for _ in range(steps):
            ended = stop in row[tokens.shape[1] :]
            row.append(stop if ended else int(model(torch.tensor([row]))[0, -1].argmax()))
    return torch.tensor(rows)


def test_the_likeliest_tokens(model: HookedTransformer):
    tokens = torch.tensor([[1, 3, 4], [1, 7, 5]])
    options: dict[str, Any] = {"stop_at_eos": False, "verbose": False}
    expected = greedy(model, tokens, 5)
    settings: list[dict[str, Any]] = [{"do_sample": False}, {"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}]
    for likeliest in settings:
        assert torch.equal(model.generate(tokens, 5, **options, **likeliest), expected)
    options["do_sample"] = False
    text = model.generate("the cat", 5, **options)
    assert text == cast(Any, model.tokenizer).decode(expected[0], skip_special_tokens=True)
    assert torch.equal(model.generate("the cat", 5, return_type="tokens", **options), expected[:1])
    assert model.generate(tokens, 5, return_type="str", **options)[0] == text
    assert model.generate(["the cat", "mat"], 5, **options) == [text, model.generate("mat", 5, **options)]
    padded = model.generate(["the cat", "mat"], 5, return_type="tokens", **options)
    assert padded.shape == (2, 8)
    assert padded[1, 0] == 0  # the shorter one is padded on the left, as in TransformerLens


def test_rows_that_have_ended_are_filled_up(model: HookedTransformer):
    tokens = torch.tensor([[1, 3, 4], [1, 7, 5]])
    free = greedy(model, tokens, 6)
    stop = int(free[0, 4])  # the second token of the first row
    ended = model.generate(tokens, 6, eos_token_id=stop, do_sample=False, verbose=False)
    assert torch.equal(ended, greedy(model, tokens, 6, stop)[:, : ended.shape[1]])
    several = model.generate(tokens[:1], 6, eos_token_id=[stop, 99], do_sample=False, verbose=False)
    assert several.shape == (1, 4 + free[0, 3:].tolist().index(stop))


def test_draws_have_the_models_probabilities(model: HookedTransformer):
    tokens = torch.tensor([[1, 3, 4]]).expand(20_000, 3)
    options: dict[str, Any] = {"stop_at_eos": False, "verbose": False, "seed": 0}
    drawn = model.generate(tokens, 1, temperature=0.7, **options)[:, -1]
    expected = (model(tokens[:1])[0, -1] / 0.7).softmax(-1)
    frequencies = drawn.bincount(minlength=8) / len(drawn)
    assert (frequencies - expected).abs().max() < 5 * (0.25 / len(drawn)) ** 0.5
    assert torch.equal(model.generate(tokens, 1, temperature=0.7, **options)[:, -1], drawn)
    assert not torch.equal(model.generate(tokens, 1, **{**options, "seed": 1})[:, -1], drawn)
    state = torch.get_rng_state()
    model.generate(tokens[:1], 1, **options)
    assert torch.equal(torch.get_rng_state(), state)
    top = set(model(tokens[:1])[0, -1].topk(2).indices.tolist())
    assert set(model.generate(tokens[:200], 1, top_k=2, **options)[:, -1].tolist()) == top
