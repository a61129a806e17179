"""Numbers as text against a loop over all outputs with the model of `transformers`, in float64."""

import functools

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mechicl.analysis import identify
from mechicl.analysis.language import TextLearner, numbers
from mechicl.interop import LanguageModel
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression

CHARACTERS = "0123456789 ->\nyesno"
TASK = LinearRegression(x_dim=2, n_context=3)
PROMPTS = TASK.sample(3, seed=0, dtype=torch.float64)


@pytest.fixture(scope="module")
def hf_model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.4,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def language(hf_model: LlamaForCausalLM) -> LanguageModel:
    vocab = {character: i for i, character in enumerate(dict.fromkeys(CHARACTERS))} | {"<unk>": 29}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    bridge = build_bridge_from_module(hf_model, "LlamaForCausalLM", hf_config=hf_model.config)
    bridge.eval()
    return LanguageModel("tiny", bridge, PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"))


@functools.cache
@torch.no_grad()
def next_logits(hf_model, tokenizer, text: str) -> torch.Tensor:
    return hf_model(torch.tensor([tokenizer(text).input_ids])).logits[0, -1]


def probability(hf_model, tokenizer, text: str, alternatives: list[str], output: str) -> float:
    """Multiply the probabilities of an output's characters, each among those that some alternative has next."""
    product = 1.0
    for n in range(len(output)):
        logits = next_logits(hf_model, tokenizer, text + output[:n])
        allowed = sorted({a[n] for a in alternatives if a.startswith(output[:n])})
        weights = logits[[tokenizer(each).input_ids[0] for each in allowed]].softmax(-1)
        product *= float(weights[allowed.index(output[n])])
    return product


def written(value: float, bound: float) -> str:
    return f"{min(max(round(99 * (value + bound) / (2 * bound)), 0), 99):02d}"


def test_predictions_are_means_over_all_hundred_outputs(language, hf_model, monkeypatch):
    learner = TextLearner(language, x_bound=0.5, y_bound=2.0)
    outputs = [f" {i:02d}" for i in range(100)]
    expected, texts = [], []
    for xs, ys in zip(PROMPTS.xs.tolist(), PROMPTS.ys[..., 0].tolist(), strict=True):
        points = [f"{written(x[0], 0.5)} {written(x[1], 0.5)} ->" for x in xs]
        texts.append(
            "".join(f"{p} {written(y, 2.0)}\n" for p, y in zip(points[:-1], ys[:-1], strict=True)) + points[-1]
        )
        shares = [probability(hf_model, language.tokenizer, texts[-1], outputs, output) for output in outputs]
        expected.append(sum(share * (4.0 * i / 99 - 2.0) for i, share in enumerate(shares)))
    assert learner.write(PROMPTS) == texts
    pruned = learner.predict(PROMPTS)[:, 0]
    monkeypatch.setattr(numbers, "LEAST_SHARE", 0.0)
    torch.testing.assert_close(learner.predict(PROMPTS)[:, 0], torch.tensor(expected, dtype=torch.float64))
    assert (pruned - torch.tensor(expected)).abs().max() < 10 * 0.01 * 4.0  # ten tens, each below one percent


def test_classes_are_words(language, hf_model):
    prompts = Prompts(PROMPTS.xs, PROMPTS.ys.sign())
    learner = TextLearner(language, classes={"no": -1.0, "yes": 1.0})
    predicted = learner.predict(prompts)[:, 0]
    for text, value in zip(learner.write(prompts), predicted.tolist(), strict=True):
        yes = probability(hf_model, language.tokenizer, text, [" no", " yes"], " yes")
        assert value == pytest.approx(2 * yes - 1, abs=1e-9)
    with pytest.raises(ValueError, match="among the classes"):
        learner.predict(PROMPTS)
    with pytest.raises(ValueError, match="one output is the beginning of another"):
        TextLearner(language, classes={"y": -1.0, "yes": 1.0}).predict(Prompts(PROMPTS.xs, PROMPTS.ys.sign()))


def test_a_language_model_is_compared_with_the_families(language):
    with pytest.warns(UserWarning, match="looks untrained"):
        result = identify(TextLearner(language), TASK, n_prompts=16, with_limits=False, progress=False)
    assert all(match.squared_distances.isfinite().all() for match in result.matches)
    assert all(match.sensitivity_cosine.isnan().all() for match in result.matches)
