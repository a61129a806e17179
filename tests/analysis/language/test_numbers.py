"""Numbers as text against a loop over all outputs with the model of `transformers`, in float64."""

import functools
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from mechicl.analysis import identify
from mechicl.analysis.language import TextLearner
from mechicl.base.settings import settings
from mechicl.interop import LanguageModel
from mechicl.tasks import LinearRegression

CHARACTERS = "0123456789 ->\nyesno"
TASK = LinearRegression(x_dim=2, n_context=3)


@pytest.fixture(scope="module")
def language() -> LanguageModel:
    return opened(make_model("llama"))


def opened(hf_model, template: str = "$A") -> LanguageModel:
    """A model with a tokenizer of single characters, whose template adds special tokens."""
    vocab = {character: i for i, character in enumerate(dict.fromkeys(CHARACTERS))} | {"<s>": 27, "</s>": 28}
    tokenizer = Tokenizer(models.WordLevel(vocab | {"<unk>": 29}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    special = [("<s>", 27), ("</s>", 28)]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)  # type: ignore[assignment]
    bridge = build_bridge_from_module(hf_model, type(hf_model).__name__, hf_config=hf_model.config)
    bridge.eval()
    return LanguageModel("tiny", bridge, PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"))


@functools.cache
@torch.no_grad()
def next_logits(hf_model, tokenizer, text: str, start: tuple[int, ...] = ()) -> torch.Tensor:
    ids = [*start, *tokenizer(text, add_special_tokens=False).input_ids]
    return hf_model(torch.tensor([ids])).logits[0, -1]


def probability(hf_model, tokenizer, text: str, alternatives: list[str], output: str, start=()) -> float:
    """Multiply the probabilities of an output's characters, each among those that some alternative has next."""
    product = 1.0
    for n in range(len(output)):
        logits = next_logits(hf_model, tokenizer, text + output[:n], start)
        allowed = sorted({a[n] for a in alternatives if a.startswith(output[:n])})
        weights = logits[tokenizer("".join(allowed), add_special_tokens=False).input_ids].softmax(-1)
        product *= float(weights[allowed.index(output[n])])
    return product


def written(value: float, bound: float) -> str:
    return f"{min(max(round(99 * (value + bound) / (2 * bound)), 0), 99):02d}"


def test_points_are_written_with_two_digits(language):
    prompts, texts = TASK.sample(3, seed=0, dtype=torch.float64), []
    for xs, ys in zip(prompts.xs.tolist(), prompts.ys[..., 0].tolist(), strict=True):
        points = [f"{written(x[0], 0.5)} {written(x[1], 0.5)} ->" for x in xs]
        shown = [f"{point} {written(y, 2.0)}\n" for point, y in zip(points[:-1], ys[:-1], strict=True)]
        texts.append("".join([*shown, points[-1]]))
    assert TextLearner(language, x_bound=0.5, y_bound=2.0).write(prompts) == texts


SIZES: dict[str, Any] = {"vocab_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.4}
GATED: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_key_value_heads": 1}


def make_model(kind: str):
    torch.manual_seed(2)
    if kind == "gpt2":  # learned absolute positions
        sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=30, initializer_range=0.4, **sizes))
    elif kind == "window":  # of 8 tokens: a prompt has 41
        model = MistralForCausalLM(MistralConfig(**SIZES, **GATED, sliding_window=8))
    else:  # rotary positions
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **GATED))
    model.config._attn_implementation = "eager"
    return model.double().eval()


@pytest.mark.parametrize("kind", ["gpt2", "window", "llama"])
@pytest.mark.parametrize(("template", "start"), [("<s> $A </s>", (27,)), ("$A </s>", ()), ("<s> $A", (27,))])
def test_a_prediction_is_the_mean_over_all_hundred_outputs_and_that_of_its_prompt_alone(kind, template, start):
    hf_model = make_model(kind)
    # transformers computes rotary angles in float32: on some processors the last bit depends on the place in the tensor
    near = {"rtol": 0, "atol": 1e-9 if kind == "gpt2" else 1e-6}
    model, prompts = opened(hf_model, template), TASK.sample(6, seed=1, dtype=torch.float64)
    learner = TextLearner(model, x_bound=0.5, y_bound=2.0)
    alone = torch.cat([learner.predict(prompts[i : i + 1]) for i in range(6)])
    outputs, expected = [f" {i:02d}" for i in range(100)], 0.0
    for i, output in enumerate(outputs):
        share = probability(hf_model, model.tokenizer, learner.write(prompts)[0], outputs, output, start)
        expected += share * (4.0 * i / 99 - 2.0)
    assert float(alone[0]) == pytest.approx(expected, abs=near["atol"])
    torch.testing.assert_close(learner.predict(prompts), alone, **near)
    order = torch.tensor([4, 0, 5, 2, 1, 3, 0])
    torch.testing.assert_close(learner.predict(prompts[order]), alone[order], **near)
    with settings(memory=6e5):
        torch.testing.assert_close(learner.predict(prompts), alone, **near)


def test_a_language_model_is_compared_with_the_families(language):
    with pytest.warns(UserWarning, match="looks untrained"):
        result = identify(TextLearner(language), TASK, steps=1, n_prompts=16, with_limits=False, progress=False)
    assert all(match.squared_distances.isfinite().all() for match in result.matches)
    assert all(match.sensitivity_cosine.isnan().all() for match in result.matches)
