"""Tokens after a prompt, against a loop over the model's logits."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mechicl.models import HookedTransformer, HookedTransformerConfig
from tests.models.transformer.test_tokenizing import SMALL, word_tokenizer
from tests.strategies import random_model

FIELDS: dict[str, Any] = SMALL | {"n_layers": 2, "n_ctx": 12}


@pytest.fixture
def model() -> HookedTransformer:
    model = random_model(HookedTransformerConfig(**FIELDS)).eval()
    model.set_tokenizer(word_tokenizer(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"))
    return model


def greedy(model: HookedTransformer, tokens: Tensor, steps: int, stop: int | None = None) -> Tensor:
    rows = tokens.tolist()
    for row, length in zip(rows, [tokens.shape[1]] * len(rows), strict=True):
        for _ in range(steps):
            ended = stop in row[length:]
            row.append(stop if ended else int(model(torch.tensor([row]))[0, -1].argmax()))
    return torch.tensor(rows)


def test_the_likeliest_tokens(model: HookedTransformer):
    tokens = torch.tensor([[1, 3, 4], [1, 7, 5]])
    options: dict[str, Any] = {"stop_at_eos": False, "verbose": False}
    expected = greedy(model, tokens, 5)
    settings: list[dict[str, Any]] = [{"do_sample": False}, {"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}]
    for likeliest in settings:
        assert torch.equal(model.generate(tokens, 5, **options, **likeliest), expected)
    text = model.generate("the cat", 5, do_sample=False, **options)
    assert text == cast(Any, model.tokenizer).decode(greedy(model, tokens[:1], 5)[0], skip_special_tokens=True)
    ids = model.generate("the cat", 5, do_sample=False, return_type="tokens", **options)
    assert torch.equal(ids, expected[:1])
    assert model.generate(tokens, 5, do_sample=False, return_type="str", **options)[0] == text
    both = model.generate(["the cat", "mat"], 5, do_sample=False, **options)
    assert both == [text, model.generate("mat", 5, do_sample=False, **options)]
    padded = model.generate(["the cat", "mat"], 5, do_sample=False, return_type="tokens", **options)
    assert padded.shape == (2, 8)
    assert padded[1, 0] == 0  # the shorter one is padded on the left, as in TransformerLens


def test_rows_that_have_ended_are_filled_up(model: HookedTransformer):
    tokens = torch.tensor([[1, 3, 4], [1, 7, 5]])
    free = greedy(model, tokens, 6)
    stop = int(free[0, 4])  # what the first row says second
    ended = model.generate(tokens, 6, eos_token_id=stop, do_sample=False, verbose=False)
    expected = greedy(model, tokens, 6, stop)
    assert torch.equal(ended, expected[:, : ended.shape[1]])
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


@pytest.mark.usefixtures("unchecked_types")
def test_what_cannot_be_generated(model: HookedTransformer):
    alone = HookedTransformer(HookedTransformerConfig(**FIELDS))
    with pytest.raises(ValueError, match="stop_at_eos needs an end-of-sequence token"):
        alone.generate(torch.tensor([[1]]), 2)
    with pytest.raises(ValueError, match="return_type='embeds' is not one of"):
        model.generate("the", 2, return_type="embeds")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="13 positions, but this model has 12"):
        model.generate("the", 12, stop_at_eos=False, verbose=False)
